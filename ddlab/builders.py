"""From a block's candidates to a tree: the builders by name.

A block drafter gives one distribution per depth; a builder chooses which prefixes of it are verified.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ddlab.tree import DraftTree, grow


class Candidates(NamedTuple):
    """What was kept of one block's draft: the best tokens of each depth, best first, equals by ascending id."""

    ids: np.ndarray  # int [depth, k]
    log_probs: np.ndarray  # float64 [depth, k]
    complete: bool  # the whole vocabulary was kept

    def best(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """ids and log-probabilities [depth, min(n, vocab)]. Raises ValueError where fewer than n were kept."""
        kept = self.ids.shape[1]
        if n > kept and not self.complete:
            raise ValueError(f"the {kept} best tokens of each depth were kept, {n} are needed: replay(budgets=[{n}])")
        return self.ids[:, :n], self.log_probs[:, :n]


def best_first(drafted: Candidates, budget: int, root_token: int = -1) -> DraftTree:
    """DDTree: the ``budget`` most probable prefixes."""
    return grow(*drafted.best(budget), budget, root_token=root_token)


def chain(drafted: Candidates, budget: int, root_token: int = -1) -> DraftTree:
    """DFlash: the first choice of every depth, at most ``budget`` of them."""
    return grow(*drafted.best(1), len(drafted.ids), root_token=root_token).truncate(budget)


def fixed_width(drafted: Candidates, budget: int, root_token: int = -1, *, width: int = 2) -> DraftTree:
    """At most ``width`` children a node: the Cartesian product of the ``width`` best tokens of each depth.

    It is Medusa's product with one width at every depth, SpecInfer's expansion <w, w, ...>. The whole product has
    width + width² + ... nodes, so it is cut to its ``budget`` most probable prefixes. Width 1 is the chain, width >=
    budget is best-first.
    """
    if operator.index(width) < 1:
        raise ValueError(f"width is the most children of a node, 1 or more, not {width}")
    return grow(*drafted.best(min(width, budget)), budget, root_token=root_token)


def cost_aware(drafted: Candidates, budget: int, root_token: int = -1, *, cost: float = 0.02) -> DraftTree:
    """Best-first, while the next node pays: its path probability under the draft is at least ``cost``.

    A node's path probability is what it adds to the expected number of accepted drafts. ``cost`` is the price of one
    more row, in tokens: the seconds it adds to a round times the tokens per second of the run. Where rows cost alike
    and ``cost`` is the run's own, no tree of these candidates earns more per second (a ratio is at its best where its
    numerator minus that ratio times its denominator is: Dinkelbach, 1967). CaDDTree (He et al., 2026) instead stops at
    the best ratio of each round by itself. The default is a place to
    start from: measure your own.
    """
    if not cost >= 0:
        raise ValueError(f"cost is the price of a row in tokens, 0 or more, not {cost}")
    tree = best_first(drafted, budget, root_token)
    return tree.truncate(int(np.count_nonzero(np.exp(tree.log_prob[1:]) >= cost)))  # most probable first


Builder = Callable[..., DraftTree]  # (candidates, budget, root_token, **options)
BUILDERS: dict[str, Builder] = {
    "best_first": best_first,
    "chain": chain,
    "fixed_width": fixed_width,
    "cost_aware": cost_aware,
}
