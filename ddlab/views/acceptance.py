"""How much each round accepted, how the rounds ended, and the means with the number of rounds behind them."""

from __future__ import annotations

from collections import Counter

from ddlab.step import Step
from ddlab.trace import ENOUGH_ROUNDS, Mean, Trace
from ddlab.views import rates
from ddlab.views.page import View, escape, figure, label, notes, svg, table

# the mark of each stop reason in pictures, and what it means
STOPS = {
    "mismatch": ("×", "the target chose a token that was not drafted there"),
    "exhausted": ("|", "the path reached a leaf: a deeper tree might have gone on"),
    "stop_token": ("■", "the text ended with a stop token"),
    "length": ("▲", "the text reached the length asked for"),
    "edited": ("✎", "a hook ended the round before the path did"),
}
BAR, UNIT, LEFT = 14, 11, 34  # pixels of a round, of a token, and of the axis on the left


def acceptance_view(trace: Trace) -> View:
    """By round, as a histogram, by stop reason, depth, rank and draft probability; greyed on few rounds."""
    (note_text, note_html), steps = notes(trace), trace.steps
    means = (trace.accepted_drafts, trace.tokens_per_round)
    text = [note_text + describe(means[0]), describe(means[1]), *_lines(steps), *rates.lines(steps)]
    html = note_html + acceptance_html(trace)
    return View(f"acceptance ({trace.method})", "\n".join(text), html, height=_height(steps))


def _height(steps: list[Step]) -> int:
    """The page's pixels where a cell is narrow enough to put the histogram below the columns."""
    if not steps:
        return 150
    most, best = max(len(step.emitted) for step in steps), max(step.accepted for step in steps)
    rows = max(9, min(best + 1, max(int(step.tree.depth.max()) for step in steps)))  # by depth, or by rank
    figures = (
        187 + most * _unit(most) + 16 * best,
        32 * (1 + len({step.stop_reason for step in steps})),
        381 + 18 * rows,
    )
    return 150 + int(sum(figures))


def _unit(most: int) -> float:
    """Pixels of a token, where the highest column has `most`."""
    return min(UNIT, max(3.0, 150 / most))


def acceptance_html(trace: Trace, run: str = "") -> str:
    """The figures, for a page that says the rest; columns lead to their rounds in the inspector of `run`."""
    means, steps = (trace.accepted_drafts, trace.tokens_per_round), trace.steps
    body = "".join(f'<p class="{"" if mean.enough else "few"}">{escape(describe(mean))}</p>' for mean in means)
    if not steps:
        return body
    return body + f'<div class="side">{_bars(steps, run)}{_histogram(steps)}</div>{_stops(steps)}{rates.figures(steps)}'


def describe(mean: Mean) -> str:
    """The mean with its rounds, and why it is greyed where it is."""
    symbol = "τ, " if mean.name == "tokens per round" else ""
    few = "" if mean.enough or mean.value is None else f": fewer than {ENOUGH_ROUNDS}, too few to rest on"
    return f"{symbol}{mean}{few}"


def _lines(steps: list[Step]) -> list[str]:
    lines = ["", "round  drafted  accepted  new"]
    for step in steps:
        bar = "█" * step.accepted + "▒" * (len(step.emitted) - step.accepted)
        counts = f"{step.index:>5}  {len(step.tree) - 1:>7}  {step.accepted:>8}  {len(step.emitted):>3}"
        lines.append(f"{counts}  {bar} {_mark(step)}{' edited' if step.edited else ''}")
    accepted = Counter(step.accepted for step in steps)
    lines += ["", "accepted drafts: rounds"]
    lines += [f"{count:>15}: {accepted[count]}" for count in range(max(accepted, default=-1) + 1)]
    reasons = Counter(step.stop_reason for step in steps)
    lines += ["", "stop reason: rounds"]
    lines += [f"{f'{STOPS[r][0]} {r}':>13}: {reasons[r]:>4}  {STOPS[r][1]}" for r in STOPS if reasons[r]]
    return lines


def _mark(step: Step) -> str:
    return STOPS.get(step.stop_reason, ("?", ""))[0]


def _bars(steps: list[Step], run: str) -> str:
    """A column a round: accepted drafts, the target's own token on top, the stop reason as a mark below."""
    most = max(len(step.emitted) for step in steps)
    unit = _unit(most)
    base, edited = 16 + most * unit, any(step.edited for step in steps)
    right = LEFT + BAR * len(steps)
    out = [f'<path d="M{LEFT - 6} {base + 0.5:g}H{right}" stroke="var(--edge)"/>']
    out += [label(LEFT - 10, base - tick * unit + 4, tick, "soft end") for tick in sorted({0, most // 2, most})]
    for step in steps:
        x, middle, top = LEFT + BAR * step.index, LEFT + BAR * step.index + 5.5, base - step.accepted * unit
        tip = f"{step.accepted} accepted drafts, {len(step.emitted)} new tokens, {step.stop_reason}"
        column = [f"<title>{escape(f'round {step.index}, position {step.start}: {tip}')}</title>"]
        if step.accepted:
            size = f'width="{BAR - 3}" height="{step.accepted * unit:g}"'
            column.append(f'<rect x="{x}" y="{top:g}" {size} fill="var(--accepted)"/>')
        if len(step.emitted) > step.accepted:
            place = f'x="{x + 0.75}" y="{top - unit + 0.75:g}" width="{BAR - 4.5}" height="{unit - 2:g}"'
            column.append(f'<rect {place} fill="none" stroke="var(--bonus)" stroke-width="1.5"/>')
        column.append(label(middle, base + 14, _mark(step), "soft mid"))
        if step.index % 10 == 0:
            column.append(label(middle, base + 27, step.index, "soft mid"))
        if step.edited:
            column.append(label(middle, base + 40, "e", "mid"))
        link = f' data-goto="{run}" data-number="{step.index}"' if run else ""
        out.append(f"<g{link}>{''.join(column)}</g>")
    marks = ", ".join(f"<b>{mark}</b> {reason}" for reason, (mark, _) in STOPS.items())
    caption = (
        "New tokens of each round: ■ filled, accepted drafts; □ outlined, the target's own.<br>"
        f"Below: {marks}{', <b>e</b> edited' if edited else ''}."
    )
    return figure(svg(right + 10, base + (44 if edited else 31), "new tokens of each round", "".join(out)), caption)


def _histogram(steps: list[Step]) -> str:
    accepted = Counter(step.accepted for step in steps)
    most, few = max(accepted.values()), len(steps) < ENOUGH_ROUNDS
    out = []
    for count in range(max(accepted) + 1):
        y, width = 4 + 16 * count, 240 * accepted[count] / most
        out.append(label(22, y + 10, count, "soft end"))
        fill = "var(--soft)" if few else "var(--accepted)"
        out.append(f'<rect x="30" y="{y}" width="{width:.1f}" height="12" fill="{fill}"/>')
        out.append(label(round(35 + width), y + 10, accepted[count]))
    caption = f"Rounds by number of accepted drafts, {len(steps)} rounds{': too few for a shape' if few else ''}."
    picture = svg(300, 8 + 16 * (max(accepted) + 1), "rounds by accepted drafts", "".join(out))
    return figure(picture, caption, "few" if few else "")


def _stops(steps: list[Step]) -> str:
    reasons = Counter(step.stop_reason for step in steps)
    rows = ([f"{STOPS[r][0]} {r}", str(reasons[r]), escape(STOPS[r][1])] for r in STOPS if reasons[r])
    return table(("stop reason", "rounds", "meaning"), rows, "figures")
