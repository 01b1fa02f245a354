"""How often drafts were accepted, by depth, by rank, and by the drafter's own probability, with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ddlab.step import Step
from ddlab.trace import ENOUGH_ROUNDS
from ddlab.views.page import figure, label, svg

Z = 1.959964  # 95 % of a normal distribution lie within so many deviations
RANKS = 8  # first choices told apart; later ones are one row
BINS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)  # of the draft probability
ROW, BARS = 18, 190  # pixels


@dataclass(frozen=True)
class Offer:
    """A draft that stood where the path came by: the target took it or not."""

    depth: int
    rank: int  # -1: unknown
    prob: float  # the drafter's, NaN where unknown
    spine: bool  # a first choice after nothing but first choices: what a chain would have drafted
    accepted: bool


@dataclass(frozen=True)
class Rate:
    """`hits` of `count`, with the Wilson interval at 95 % (Wilson 1927): sound also near 0 and 1, and for few."""

    name: str
    hits: int
    count: int
    mean_prob: float = math.nan  # mean draft probability of what was counted

    @property
    def value(self) -> float:
        return self.hits / self.count

    @property
    def interval(self) -> tuple[float, float]:
        n, p = self.count, self.value
        middle = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z / (1 + Z * Z / n) * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.hits} of {self.count} = {self.value:.0%} ({low:.0%} to {high:.0%})"


def offers(steps: Sequence[Step]) -> Iterator[list[Offer]]:
    """Of every place on a path where drafts stood and the target chose, all the drafts there.

    A place is left out where the round was cut, by a stop token or the length, before the choice could show.
    """
    for step in steps:
        tree, taken = step.tree, set(step.path)
        cut = step.bonus is None
        spine = {0}
        for node in range(1, len(tree)):
            if tree.rank[node] == 0 and int(tree.parents[node]) in spine:
                spine.add(node)
        for node in step.path[:-1] if cut else step.path:
            children = tree.children(node).tolist()
            if children:
                yield [
                    Offer(
                        depth=int(tree.depth[child]),
                        rank=int(tree.rank[child]),
                        prob=math.exp(tree.log_prob[child] - tree.log_prob[node]),
                        spine=child in spine,
                        accepted=child in taken,
                    )
                    for child in children
                ]


def by_depth(steps: Sequence[Step]) -> list[Rate]:
    """Of the rounds that came so far and had drafts there: how many went on."""
    places = [(place[0].depth, any(offer.accepted for offer in place)) for place in offers(steps)]
    depths = sorted({depth for depth, _ in places})
    return [_rate(f"depth {d}", [hit for depth, hit in places if depth == d]) for d in depths]


def by_rank(steps: Sequence[Step]) -> list[Rate]:
    """Of the drafts of one rank that the path came by: how many the target took."""
    every = [offer for place in offers(steps) for offer in place if offer.rank >= 0]

    def name(offer: Offer) -> str:
        return f"#{offer.rank + 1}" if offer.rank < RANKS else f"#{RANKS + 1} and on"

    names = list(dict.fromkeys(map(name, sorted(every, key=lambda offer: offer.rank))))
    return [_rate(n, [offer.accepted for offer in every if name(offer) == n]) for n in names]


def spine_and_siblings(steps: Sequence[Step]) -> list[Rate]:
    """Accepted drafts that a chain would have had too, and those that only the tree's other branches gave."""
    taken = [offer.spine for place in offers(steps) for offer in place if offer.accepted]
    if not taken:
        return []
    return [_rate("on the spine", taken), _rate("on siblings", [not spine for spine in taken])]


def calibration(steps: Sequence[Step]) -> list[Rate]:
    """Drafts that the path came by, in bins of the drafter's probability: how many the target took."""
    every = [offer for place in offers(steps) for offer in place if not math.isnan(offer.prob)]
    out = []
    for low, high in pairwise(BINS):
        inside = [o for o in every if low <= o.prob < high or (high == 1.0 and o.prob >= high)]
        if inside:
            mean = sum(min(offer.prob, 1.0) for offer in inside) / len(inside)
            out.append(_rate(f"{low:.0%} to {high:.0%}", [offer.accepted for offer in inside], mean))
    return out


def _rate(name: str, hits: Sequence[bool], mean_prob: float = math.nan) -> Rate:
    return Rate(name, sum(hits), len(hits), mean_prob)


# what is shown: title, how it is counted, what is said of it
TABLES: tuple[tuple[str, Callable[[Sequence[Step]], list[Rate]], str], ...] = (
    ("by depth", by_depth, "Of the rounds that reached a depth and had drafts there, those that went on."),
    ("by rank", by_rank, "Of the drafts of one rank at their depth that the path came by, those taken."),
    ("spine against siblings", spine_and_siblings, "Of the accepted drafts: in the chain of first choices, or not."),
    ("calibration", calibration, "Of the drafts with such a draft probability that the path came by, those taken."),
)
ROUNDS_OF_ONE_TEXT = "Whiskers: Wilson intervals, 95 %. Rounds of one text resemble each other, so they are optimistic."


def few(steps: Sequence[Any]) -> str:
    """Why the figures are greyed, or nothing."""
    return f" Only {len(steps)} rounds, fewer than {ENOUGH_ROUNDS}: greyed." if len(steps) < ENOUGH_ROUNDS else ""


def lines(steps: Sequence[Step]) -> list[str]:
    out = []
    for title, count, said in TABLES:
        rates = count(steps)
        if rates:
            width = max(len(rate.name) for rate in rates)
            out += ["", f"{title}: {said}{few(steps)}", *(f"  {rate.name:>{width}}: {rate}" for rate in rates)]
    return out


def figures(steps: Sequence[Step]) -> str:
    shown = []
    for title, count, said in TABLES:
        rates = count(steps)
        if rates:
            style = "few" if few(steps) else ""
            picture = _calibration(rates, style) if count is calibration else bars(title, rates, style)
            shown.append(figure(picture, f"<b>{title}</b>. {said}{few(steps)}", style))
    return f'<div class="rates">{"".join(shown)}</div><p class="soft">{ROUNDS_OF_ONE_TEXT}</p>' if shown else ""


def bars(title: str, rates: Sequence[Rate], style: str) -> str:
    left = 12 + 7 * max(len(rate.name) for rate in rates)
    fill, body = "var(--soft)" if style else "var(--accepted)", []
    for place, rate in enumerate(rates):
        y, (low, high) = 4 + ROW * place, rate.interval
        body.append(label(left - 8, y + 10, rate.name, "soft end"))
        width = BARS * rate.value
        body.append(f'<rect x="{left}" y="{y}" width="{width:.1f}" height="12" fill="{fill}" opacity=".55"/>')
        whisker = f"M{left + BARS * low:.1f} {y + 6}H{left + BARS * high:.1f}"
        body.append(f'<path d="{whisker}" stroke="var(--ink)" stroke-width="1.5"/>')
        body.append(label(left + BARS + 8, y + 10, f"{rate.hits} of {rate.count}", "soft"))
    body.append(f'<path d="M{left + BARS + 0.5} 2V{4 + ROW * len(rates)}" stroke="var(--line)"/>')
    return svg(left + BARS + 90, 8 + ROW * len(rates), f"acceptance {title}", "".join(body))


def _calibration(rates: Sequence[Rate], style: str) -> str:
    """Mean draft probability to the right, share taken upwards; a drafter that knows itself is on the diagonal."""
    size, left, top = 190, 40, 8
    stroke, body = "var(--soft)" if style else "var(--accepted)", []
    body.append(f'<path d="M{left} {top}V{top + size}H{left + size}" fill="none" stroke="var(--edge)"/>')
    diagonal = f"M{left} {top + size}L{left + size} {top}"
    body.append(f'<path d="{diagonal}" stroke="var(--edge)" stroke-dasharray="3 4"/>')
    for tick in (0, 0.5, 1):
        body.append(label(left - 6, top + size * (1 - tick) + 4, f"{tick:.0%}", "soft end"))
        body.append(label(left + size * tick, top + size + 14, f"{tick:.0%}", "soft mid"))
    said = 0.0  # where the last count stands: a bin too near to it keeps its own for the tip
    for rate in rates:
        x, y = left + size * rate.mean_prob, top + size * (1 - rate.value)
        low, high = (top + size * (1 - end) for end in rate.interval)
        body.append(f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{stroke}" stroke-width="1.5"/>')
        tip = f"draft probability {rate.name}, mean {rate.mean_prob:.0%}: {rate}"
        body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{stroke}"><title>{tip}</title></circle>')
        if x - said > 20:
            body.append(label(x + 6, y + 12, rate.count, "soft"))
            said = x
    body.append(label(left + size / 2, top + size + 28, "draft probability", "soft mid"))
    return svg(left + size + 40, top + size + 34, "draft probability against acceptance", "".join(body))
