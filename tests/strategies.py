"""Hypothesis strategies and stub drafters that several test files share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from ddlab.tree import DraftTree


@st.composite
def parent_lists(draw: st.DrawFn, max_nodes: int = 24) -> list[int]:
    """Parents of a tree in parents-first order; node 0 is the root."""
    n = draw(st.integers(1, max_nodes))
    return [-1] + [draw(st.integers(0, i - 1)) for i in range(1, n)]


def tree_of(parents: list[int], seed: int, vocab: int) -> DraftTree:
    """A tree of that shape with random tokens, no two siblings alike (shape cut where a node has too many children)."""
    rng = np.random.default_rng(seed)
    taken: dict[int, set[int]] = {}
    tokens = [int(rng.integers(vocab))]
    for parent in parents[1:]:
        free = [t for t in range(vocab) if t not in taken.setdefault(parent, set())]
        tokens.append(int(rng.choice(free)))
        taken[parent].add(tokens[-1])
    return DraftTree.from_parents(tokens, parents)


def scripted(text: list[int], depth: int, vocab: int, kind: str, seed: int = 0) -> Callable[[Any, Any], Tensor]:
    """A draft hook that knows the whole text to come.

    oracle: the right tokens, sharply. adversarial: never the right one. mixed: the right ones at random ranks.
    random: noise.
    """

    def draft(decoder: Any, value: Any) -> Tensor:
        at = len(decoder.ids)
        noise = torch.Generator().manual_seed(seed * 1009 + at)
        logits = torch.randn(depth, vocab, generator=noise)
        for row in range(depth):
            right = text[at + row] if at + row < len(text) else 0
            match kind:
                case "oracle":
                    logits[row, right] += 30
                case "adversarial":
                    logits[row, (right + 1) % vocab] += 30
                    logits[row, right] = -torch.inf
                case "mixed":
                    logits[row, right] = logits[row].sort(descending=True).values[int(noise.initial_seed()) % 4]
        return logits

    return draft
