"""The target's choice at each node, and the walk that follows it.

With temperature the choice is the arg-max of ``logits + T * Gumbel noise``, a sample of ``softmax(logits / T)``. The
noise depends on the seed and the absolute position of the chosen token alone, so plain decoding, DFlash and DDTree with
one seed choose the same tokens, and losslessness is checked token by token at every temperature.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ddlab.tree import DraftTree


@functools.lru_cache(maxsize=32)  # a tree's nodes share their depth's noise, and the next tree meets it again
def gumbel_noise(seed: int, position: int, vocab_size: int) -> np.ndarray:
    """Standard Gumbel noise, float64 [vocab_size], a function of (seed, position) alone on every machine.

    Philox with the key (seed, position) (Salmon et al., 2011): no state, so no order of drawing to keep.
    """
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, position], dtype=np.uint64)
    uniform = np.random.Generator(np.random.Philox(key=key)).random(vocab_size)  # [0, 1)
    noise = -np.log(-np.log(uniform + 2.0**-54))  # the offset keeps both logarithms finite
    noise.setflags(write=False)
    return noise


class Choice(NamedTuple):
    """What the target chose at each node.

    tokens int64 [n]; log_prob float [n] under the target's distribution (after processors and temperature; at T = 0
    that of T = 1); margin float [n], the first minus the second of the scores that decided, in logits;
    log_probs [n, vocab].
    """

    tokens: Tensor
    log_prob: Tensor
    margin: Tensor
    log_probs: Tensor


@dataclass(frozen=True)
class Sampling:
    """The target's own rule: greedy at ``temperature`` 0, else a sample keyed by (seed, position)."""

    temperature: float = 0.0
    seed: int = 0
    processors: LogitsProcessorList | None = None

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and np.isfinite(self.temperature)):
            raise ValueError(f"temperature must be a finite number >= 0 (0 is greedy), not {self.temperature}")

    def choose(self, logits: Tensor, positions: np.ndarray, history: Callable[[int], list[int]]) -> Choice:
        """The target's choice after each node.

        Args:
            logits: float [n, vocab].
            positions: int [n], absolute position of the token to be chosen after each node.
            history: node -> all token ids up to and including that node; asked for only when there are processors.
        """
        scores = logits
        if self.processors:
            rows = []
            for node in range(len(logits)):
                ids = torch.tensor([history(node)], device=logits.device)
                rows.append(self.processors(ids, logits[node : node + 1].clone()))
            scores = torch.cat(rows)
        log_probs = torch.log_softmax(scores / self.temperature if self.temperature else scores, dim=-1)
        if self.temperature:
            distinct, which = np.unique(positions, return_inverse=True)
            noise = np.stack([gumbel_noise(self.seed, int(p), scores.shape[-1]) for p in distinct])
            scores = scores + self.temperature * torch.from_numpy(noise).to(scores)[torch.from_numpy(which)]
        best = scores.topk(min(2, scores.shape[-1]), dim=-1).values  # [n, 2]
        tokens = scores.argmax(dim=-1)
        return Choice(
            tokens,
            log_probs.gather(1, tokens[:, None])[:, 0],
            best[:, 0] - best[:, -1] if best.shape[1] == 2 else torch.full_like(best[:, 0], torch.inf),
            log_probs,
        )


class Walk(NamedTuple):
    """The path that a round took.

    path: node indices, root to the last accepted draft. bonus: the target's own token after it, or None when the round
    was cut before it. stop_reason: why the path ended, ``mismatch`` (the target chose a token that is no child),
    ``exhausted`` (a leaf was reached), ``stop_token`` (the text ended here), ``length`` (cut by max_new_tokens) or
    ``edited`` (an accept hook stopped before the path did).
    """

    path: tuple[int, ...]
    bonus: int | None
    stop_reason: str

    def emitted(self, tree: DraftTree) -> tuple[int, ...]:
        """What the round adds to the text: accepted drafts, then the bonus."""
        drafts = tuple(int(tree.tokens[node]) for node in self.path[1:])
        return drafts if self.bonus is None else (*drafts, self.bonus)


def walk(tree: DraftTree, choice: np.ndarray, stop_token_ids: Container[int], room: int) -> Walk:
    """Follow the target's choices from the root while they were drafted.

    Args:
        choice: int [n], the target's token after each node.
        stop_token_ids: the text ends with the first of these.
        room: tokens that may still be added, at least 1.
    """
    path = [0]
    while True:
        token = int(choice[path[-1]])
        children = tree.children(path[-1])
        child = next((int(c) for c in children if int(tree.tokens[c]) == token), None)
        ended, full = token in stop_token_ids, len(path) == room
        if child is None:
            reason = "stop_token" if ended else "mismatch" if len(children) else "exhausted"
            return Walk(tuple(path), token, reason)
        path.append(child)
        if ended or full:  # the text ends with a drafted token: accepted, and nothing comes after it
            return Walk(tuple(path), None, "stop_token" if ended else "length")
