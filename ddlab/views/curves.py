"""Ways to decode as pictures: τ and tokens per second against budget, and a row of each way's intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddlab.intervals import ENOUGH_PROMPTS, Estimate
from ddlab.views.page import escape, figure, label, svg

WIDE, TALL, LEFT, TOP = 330, 170, 46, 10  # pixels of a curve, and what is left of it and above
ROW = 220  # pixels of the scale in a row of a table


@dataclass(frozen=True)
class Choice:
    """A way to decode with what is known of it."""

    name: str  # "ar", "chain" or "tree"
    budget: int | None
    replayed_tau: Estimate | None
    measured_tau: Estimate | None
    predicted: Estimate | None  # tokens per second
    measured: Estimate | None
    share: float  # of the resamples that choose it; NaN: not asked
    best: bool

    @property
    def label(self) -> str:
        return self.name if self.budget is None else f"{self.name} {self.budget}"

    @property
    def tau(self) -> Estimate | None:
        return self.replayed_tau or self.measured_tau

    @property
    def speed(self) -> float:
        known = [e.value for e in (self.predicted, self.measured) if e is not None and e.value is not None]
        return known[0] if known else 0.0

    @property
    def known(self) -> list[Estimate]:
        every = (self.replayed_tau, self.measured_tau, self.predicted, self.measured)
        return [estimate for estimate in every if estimate is not None]


Figure = Callable[[Choice], Estimate | None]


def curves(found: Sequence[Choice]) -> str:
    """The two pictures beside each other; nothing where no way has a budget."""
    if not any(choice.budget for choice in found):
        return ""
    taus = _curve("τ against budget", found, lambda c: c.replayed_tau, lambda c: c.measured_tau)
    speeds = _curve("tokens per second against budget", found, lambda c: c.predicted, lambda c: c.measured)
    return f'<div class="rates">{taus}{speeds}</div>'


def _points(found: Sequence[Choice], of: Figure) -> list[tuple[Choice, Estimate, float]]:
    """Choices with a figure, and its value."""
    pairs = ((choice, of(choice)) for choice in found)
    return [(choice, e, e.value) for choice, e in pairs if e is not None and e.value is not None]


def _curve(title: str, found: Sequence[Choice], ours: Figure, theirs: Figure) -> str:
    """Budgets to the right on a logarithmic scale, the figure upwards from 0; ways without a budget as level lines."""
    predicted, measured = _points(found, ours), _points(found, theirs)
    if not predicted and not measured:
        return ""
    estimates = [estimate for _, estimate, _ in (*predicted, *measured)]
    top = 1.05 * max(ends(estimate)[1] for estimate in estimates)
    budgets = sorted({choice.budget for choice in found if choice.budget is not None})
    bottom = TOP + TALL

    def x_of(budget: int) -> float:
        return round(LEFT + WIDE * math.log2(1 + budget) / math.log2(1 + budgets[-1]), 1)

    def y_of(value: float) -> float:
        return round(bottom - TALL * value / top, 1)

    body = [f'<path d="M{LEFT} {TOP}V{bottom}H{LEFT + WIDE}" fill="none" stroke="var(--edge)"/>']
    body += [label(LEFT - 6, y_of(tick) + 4, f"{tick:g}", "soft end") for tick in _ticks(top)]
    said = math.inf  # where the last budget stands: the largest is always said, one too near to the next is not
    for budget in reversed(budgets):
        if said - x_of(budget) > 18:
            said = x_of(budget)
            body.append(label(said, bottom + 14, budget, "soft mid"))
    body.append(label(LEFT + WIDE / 2, bottom + 28, "budget", "soft mid"))
    level = {choice.name: (choice, estimate, value) for choice, estimate, value in (*measured, *predicted)}
    for choice, estimate, value in level.values():
        if choice.budget is None:
            y, dash = y_of(value), "2 3" if choice.name == "ar" else "7 4"
            body.append(f'<path d="M{LEFT} {y}H{LEFT + WIDE}" stroke="var(--soft)" stroke-dasharray="{dash}"/>')
            body.append(label(LEFT + WIDE + 12, y + 4, f"{choice.name} {value:.2f}", "soft", str(estimate)))
    for filled, points in ((False, predicted), (True, measured)):
        trees = [(choice.budget, choice, e, value) for choice, e, value in points if choice.budget is not None]
        trees.sort(key=lambda point: point[0])
        line = " ".join(f"{x_of(budget)},{y_of(value)}" for budget, _, _, value in trees)
        dash = ' stroke-dasharray="5 3"' if filled else ""
        body.append(f'<polyline points="{line}" fill="none" stroke="var(--edge)" stroke-width="1.5"{dash}/>')
        for budget, choice, estimate, value in trees:
            x, (low, high) = x_of(budget) + 5 * filled, ends(estimate)  # beside the other one, where the two agree
            body.append(f'<path d="M{x} {y_of(low)}V{y_of(high)}" stroke="var(--ink)" stroke-width="1.2"/>')
            body.append(_mark(x, y_of(value), filled, f"{choice.label}: {estimate}"))
    prompts = sorted({estimate.prompts for estimate in estimates})
    count = f"{prompts[0]}" if len(prompts) == 1 else f"{prompts[0]} to {prompts[-1]}"
    marks = [mark for mark, points in (("○ by replay", predicted), ("◆ measured", measured)) if points]
    caption = f"<b>{title}</b>. Mean of {count} prompts, rounds in the table. {', '.join(marks)}."
    grey = "few" if prompts[0] < ENOUGH_PROMPTS else ""
    return figure(svg(LEFT + WIDE + 100, bottom + 34, title, "".join(body)), caption, grey)


def _ticks(top: float) -> list[float]:
    step = 10.0 ** math.floor(math.log10(top))
    step = step if top / step >= 4 else step / 2 if top / step >= 2 else step / 5
    return [round(i * step, 10) for i in range(int(top / step) + 1)]


def whiskers(choice: Choice, most: float) -> str:
    """A row's intervals on a scale from 0 that all rows share."""
    body = ['<path d="M0.5 2V20" stroke="var(--line)"/>']
    for estimate, y, filled in ((choice.predicted, 8, False), (choice.measured, 15, True)):
        if estimate is not None and estimate.value is not None:
            x, (low, high) = (ROW - 8) * estimate.value / most, ends(estimate)
            span = f"M{(ROW - 8) * low / most:.1f} {y}H{(ROW - 8) * high / most:.1f}"
            body.append(f'<path d="{span}" stroke="var(--ink)" stroke-width="1.2"/>{_mark(x, y, filled)}')
    return svg(ROW, 22, f"{choice.label}: tokens per second", "".join(body))


def ends(estimate: Estimate) -> tuple[float, float]:
    """Of its interval; the value twice where there is none."""
    value = float(estimate)
    return (value if estimate.low is None else estimate.low, value if estimate.high is None else estimate.high)


def _mark(x: float, y: float, filled: bool, tip: str = "") -> str:
    """◆ measured, ○ predicted or replayed."""
    said = f"<title>{escape(tip)}</title>" if tip else ""
    if filled:
        return f'<path d="M{x:.1f} {y - 4.5:g}l4.5 4.5-4.5 4.5-4.5-4.5z" fill="var(--bonus)">{said}</path>'
    circle = f'cx="{x:.1f}" cy="{y:g}" r="3.5" fill="var(--page)" stroke="var(--root)" stroke-width="2"'
    return f"<circle {circle}>{said}</circle>"
