"""What one text's rounds would be if one thing were perfect: the drafter's ranking, its block, the cost of verifying.

Rounds are replayed (`ddlab.replay`), their seconds come from a `CostModel`; nothing is decoded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from ddlab.costs.model import CostModel
    from ddlab.replay import DenseDrafts, Replay, Round

ORACLES = {
    "perfect_ranking": "of the candidates that a tree of this budget chooses from, the right ones are always in it",
    "longer_block": "a round that used up its block goes on with the next round's, at no cost",
    "free_rows": "a verify of any size takes as long as one of a single row",
    "free_verify": "verifying takes no time",
}
ENDS = {
    "full_depth": "the whole block was accepted",
    "ranked_out": "the right token was among the candidates, but not in the tree",
    "not_drafted": "the right token was not among the candidates",
    "cut": "the text ended inside the tree, or with a stop token",
}


def end_of(drafts: DenseDrafts, taken: Round, budget: int) -> str:
    """What ended a replayed best-first round, a key of ENDS. Candidates: the ``budget`` best tokens of each depth."""
    if taken.stop_reason in ("stop_token", "length"):
        return "cut"
    if taken.accepted >= drafts.ids.shape[1]:
        return "full_depth"
    return "ranked_out" if _among(drafts, taken.start, taken.accepted, budget) else "not_drafted"


def _among(drafts: DenseDrafts, start: int, depth: int, budget: int) -> bool:
    """Is the text's token at this depth of the block (from 0) among the ``budget`` best?"""
    row = start - drafts.prompt_length
    right = drafts.text[start + 1 + depth]
    return depth < drafts.depths[row] and bool((drafts.ids[row, depth, :budget] == right).any())


def perfectly_ranked(drafts: DenseDrafts, budget: int) -> list[tuple[int, int]]:
    """(start, new tokens) of each round if the right token were in the tree wherever it is among the candidates.

    A round accepts up to the first depth where it is not. A text that was not finished is followed as far as it
    decides.
    """
    last = len(drafts.text) - 1
    finished = last + 1 == drafts.prompt_length + drafts.max_new_tokens or drafts.text[-1] in drafts.stop_token_ids
    rounds, start = [], drafts.prompt_length
    while start < last:
        accepted = 0
        while start + accepted < last and _among(drafts, start, accepted, budget):
            accepted += 1
        if start + accepted == last and not finished:
            break
        tokens = min(accepted + 1, last - start)
        rounds.append((start, tokens))
        start += tokens
    return rounds


class Way(NamedTuple):
    """One text decoded one way. changed: rounds that are not those of the real tree."""

    tokens: int
    rounds: int
    nodes: int
    seconds: float
    changed: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds


Ways = dict[tuple[str, int | None], Way]


def ways_of(replay: Replay, cost: CostModel, budgets: Sequence[int]) -> tuple[Ways, dict[int, Counter[str]]]:
    """One text under ``ar``, ``chain``, and every budget's ``tree`` and ORACLES; and what ended each budget's rounds.

    ``ar`` and ``chain`` are there where the cost model has figures for them.
    """
    drafts, ways, ends = replay.drafts, Ways(), {}
    if cost.plain is not None:
        roots = np.arange(drafts.prompt_length, len(drafts.text) - 1)
        ways["ar", None] = Way(len(roots), len(roots), 0, math.fsum(cost.plain_seconds(roots)))
    if drafts.ids.shape[1] < cost.rows[-1]:
        tokens, nodes, seconds, _ = _costs(replay.run(None, "chain"), cost)
        ways["chain", None] = Way(tokens, len(seconds), nodes, math.fsum(seconds))
    for budget in budgets:
        rounds = replay.run(budget)
        tokens, nodes, seconds, saved = _costs(rounds, cost)
        names = [end_of(drafts, taken, budget) for taken in rounds]
        ends[budget] = Counter(names)
        ways["tree", budget] = Way(tokens, len(rounds), nodes, math.fsum(seconds))
        ranked = np.array(perfectly_ranked(drafts, budget), int).reshape(-1, 2)
        size = max((r.nodes for r in rounds), default=0)
        taken = math.fsum(cost.seconds_of(size + 1, ranked[:, 0], ranked[:, 1]))
        real = {(r.start, len(r.emitted)) for r in rounds}
        changed = sum((int(start), int(n)) not in real for start, n in ranked)
        ways["perfect_ranking", budget] = Way(int(ranked[:, 1].sum()), len(ranked), len(ranked) * size, taken, changed)
        own = np.array([True] + [name != "full_depth" for name in names[:-1]])[: len(rounds)]  # not merged into another
        ways["longer_block", budget] = Way(tokens, int(own.sum()), nodes, math.fsum(seconds[own]), int((~own).sum()))
        for name, saving in saved.items():
            ways[name, budget] = Way(tokens, len(rounds), nodes, math.fsum(seconds - saving))
    return ways, ends


def _costs(rounds: Sequence[Round], cost: CostModel) -> tuple[int, int, np.ndarray, dict[str, np.ndarray]]:
    """New tokens, nodes, seconds of each round, and what free rows and free verifies would save of them."""
    columns = np.array([(r.nodes, r.start, len(r.emitted)) for r in rounds], float).reshape(-1, 3)
    nodes, prefix, emitted = columns.T
    phases = cost.phases(nodes + 1, prefix, emitted)
    verify = phases["verify"]
    one_row = cost.phases(cost.rows[0], prefix)["verify"]
    seconds = np.sum([part for phase, part in phases.items() if phase != "record"], axis=0)
    saved = {"free_rows": verify - one_row, "free_verify": verify}
    return int(emitted.sum()), int(nodes.sum()), seconds, saved
