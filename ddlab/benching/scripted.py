"""Scripted acceptance: a seeded oracle decides how much of a round is accepted, whatever the models say.

Random weights accept nothing, so they tell what a round costs and not what it brings. Hooks on draft and verify let a
round do all of its real work on a path as long as the script says: the draft's first choices become likely, so that the
tree holds them as a path, and the target's logits are edited to follow that path so far and no further. What comes out
is a simulation and has to be called one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddlab.hooks import Hook
from ddlab.tree import DraftTree

SIMULATED = "SIMULATED"
_LIKELY, _CHOSEN = 30.0, 1e4  # logits: far above a draft's others; above whatever a target says
_GOLDEN = (5**0.5 - 1) / 2


@functools.lru_cache(maxsize=64)
def accept_probability(tau: float, depth: int) -> float:
    """How likely each draft has to be accepted, so that rounds bring ``tau`` tokens on average.

    A round accepts drafts until one is refused or ``depth`` of them are, and adds the target's own token:
    ``tau = 1 + p + p**2 + ... + p**depth``.

    Raises:
        ValueError: no probability does, because tau is below 1 or above depth + 1.
    """
    if not 1 <= tau <= depth + 1:
        raise ValueError(f"{depth} drafts deep, a round brings 1 to {depth + 1} tokens, not {tau}: see --budget")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.polyval(np.ones(depth + 1), middle) < tau else (low, middle)
    return (low + high) / 2


class Script:
    """How deep the accepted path of each round goes.

    Args:
        tau: tokens per round, on average; or
        probabilities: of each draft being accepted where those above it were, by depth from 1 on; deeper ones never.
        seed: of the order of the rounds. Their depths are spread evenly over the distribution, so that few rounds have
            nearly its mean.
    """

    def __init__(self, tau: float | None = None, probabilities: Sequence[float] | None = None, seed: int = 0):
        if (tau is None) == (probabilities is None):
            raise ValueError("give tau or probabilities")
        wrong = [p for p in probabilities or () if not 0 <= p <= 1]
        if wrong:
            raise ValueError(f"probabilities of acceptance are between 0 and 1, not {wrong}")
        self.tau, self.probabilities = tau, None if probabilities is None else tuple(map(float, probabilities))
        self._seed, self._at = seed, float(np.random.default_rng(seed).random())

    def __str__(self) -> str:
        if self.tau is not None:
            return f"tau {self.tau:g}"
        return "acceptance " + " ".join(f"{p:g}" for p in self.probabilities or ())

    def again(self) -> Script:
        """The same script from its beginning."""
        return Script(self.tau, self.probabilities, self._seed)

    def chances(self, depth: int) -> list[float]:
        """Of each draft of a path being accepted where those above it were."""
        if self.probabilities is None:
            assert self.tau is not None
            return [accept_probability(self.tau, depth)] * depth
        return [*self.probabilities[:depth], *[0.0] * (depth - len(self.probabilities))]

    def expected(self, depth: int) -> float:
        """Tokens per round, on average, where the path is ``depth`` drafts long."""
        return 1.0 + float(np.cumprod(self.chances(depth)).sum())

    def accepted(self, depth: int) -> int:
        """How many drafts the next round accepts."""
        self._at = (self._at + _GOLDEN) % 1.0  # evenly spread, whenever it ends
        reached = np.cumprod(self.chances(depth))  # P(so many or more)
        return int(np.count_nonzero(self._at < reached))

    @contextmanager
    def on(self, decoder: Any) -> Iterator[None]:
        """In this block the rounds of a decoder go by the script; its trace says that they were edited."""
        trees: list[DraftTree] = []

        def draft(_: Any, logits: Tensor) -> Tensor:
            best = logits.argmax(-1, keepdim=True)
            return logits.scatter(1, best, logits.amax(-1, keepdim=True) + _LIKELY)

        def tree(_: Any, built: DraftTree) -> None:
            trees[:] = [built]

        def verify(_: Any, logits: Tensor) -> Tensor:
            path = _path(trees[0])
            taken = self.accepted(len(path) - 1)
            tokens = trees[0].tokens[trees[0].children(path[taken])].tolist()
            other = next(token for token in range(len(tokens) + 1) if token not in tokens)
            chosen = [*trees[0].tokens[path[1 : taken + 1]].tolist(), other]
            at = torch.tensor([path[: taken + 1], chosen]).to(logits.device, non_blocking=True)
            return logits.index_put((at[0], at[1]), logits.new_full((), _CHOSEN))

        hooks: dict[str, Hook] = {"draft": draft, "tree": tree, "verify": verify}
        handles = [decoder.register_hook(phase, hook) for phase, hook in hooks.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _path(tree: DraftTree) -> list[int]:
    """The nodes that are their depth's first choice, from the root on."""
    path = [0]
    while True:
        below = [int(child) for child in tree.children(path[-1]) if tree.rank[child] == 0]
        if not below:
            return path
        path += below
