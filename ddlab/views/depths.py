"""How far replayed rounds come: at each depth, of the rounds that had drafts there, those that went on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ddlab.views.page import View, figure
from ddlab.views.rates import ROUNDS_OF_ONE_TEXT, Rate, bars, few

if TYPE_CHECKING:
    from ddlab.replay import DenseDrafts, Replay, Round


def by_depth(replays: Sequence[Replay], budget: int | None, builder: str = "best_first", **options: Any) -> list[Rate]:
    """What `rates.by_depth` counts in decoded rounds, of replayed ones; arguments as in `Replay.run`."""
    came: Counter[int] = Counter()
    went: Counter[int] = Counter()
    for replay in replays:
        for taken in replay.run(budget, builder, **options):
            reached = range(1, taken.accepted + 1)
            went.update(reached)
            came.update(reached)
            came[taken.accepted + 1] += _refused(replay.drafts, taken, budget, builder, options)
    return [Rate(f"depth {depth}", went[depth], came[depth]) for depth in sorted(came) if came[depth]]


def _refused(drafts: DenseDrafts, taken: Round, budget: int | None, builder: str, options: dict[str, Any]) -> bool:
    """Were there drafts where the path ended, none of which the target took?"""
    if taken.stop_reason != "stop_token" or len(taken.emitted) == taken.accepted:
        return taken.stop_reason == "mismatch"
    tree, node = drafts.tree(taken.start, budget, builder, **options), 0  # it stopped with a token of the target's own
    for token in taken.emitted[:-1]:
        node = next(int(child) for child in tree.children(node) if tree.tokens[child] == token)
    return len(tree.children(node)) > 0


def depths_view(replays: Sequence[Replay], budget: int | None, builder: str = "best_first", **options: Any) -> View:
    """Acceptance by depth under one budget and builder, over all texts, with counts and Wilson intervals."""
    rates = by_depth(replays, budget, builder, **options)
    rounds = sum(len(replay.run(budget, builder, **options)) for replay in replays)
    name = f"{builder}, " + ("the block's depth" if budget is None else f"budget {budget}")
    texts = f"{len(replays)} text{'' if len(replays) == 1 else 's'}"
    grey = few(range(rounds))
    said = f"Of the {rounds} rounds of {texts} that came to a depth and had drafts there, those that went on.{grey}"
    width = max((len(rate.name) for rate in rates), default=0)
    lines = [f"acceptance by depth, {name}: {said}", *(f"  {rate.name:>{width}}: {rate}" for rate in rates)]
    html = "<p>No round had a draft.</p>"
    if rates:
        picture = figure(bars(f"by depth, {name}", rates, "few" if grey else ""), f"<b>{name}</b>. {said}")
        html = f'{picture}<p class="soft">{ROUNDS_OF_ONE_TEXT}</p>'
    return View(
        title=f"acceptance by depth ({name})",
        text="\n".join(lines),
        html=html,
        height=110 + 18 * len(rates),
    )
