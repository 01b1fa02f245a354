"""How long a best-first tree takes on draft logits of a 27B target's size: ``python tests/bench_tree.py``.

Prints, for peaky and flat drafts, median milliseconds of the top-k (on the GPU where there is one) and of
what comes after it: ``ddlab.tree.grow``, and a plain heap over the same arrays.
"""

from __future__ import annotations

import gc
import heapq
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from ddlab.tree import grow, top_tokens

DEPTH, VOCAB = 15, 248_320
DRAFTS = {"peaky": (3.5, 1.6), "flat": (1.6, 0.9)}
BUDGETS = (16, 64, 256, 512, 1024)
REPEATS = 30


def heap_best_first(ids: np.ndarray, log_probs: np.ndarray, budget: int) -> tuple[np.ndarray, ...]:
    """Plain best-first over the arrays of ``top_tokens``: parents, depth, log_prob, rank; the root included.

    A prefix opens two others, its next sibling and its first child; neither may come before it.
    """
    tokens, log_prob = ids.tolist(), log_probs.tolist()
    nodes = [(-1, 0, 0.0, -1)]
    heap: list[tuple[float, int, tuple[int, ...], int, int]] = []

    def push(parent: int, path: tuple[int, ...], rank: int) -> None:
        depth = len(path)
        if depth < len(tokens) and rank < len(tokens[depth]) and log_prob[depth][rank] > -np.inf:
            score = nodes[parent][2] + log_prob[depth][rank]
            heapq.heappush(heap, (-score, depth + 1, (*path, tokens[depth][rank]), parent, rank))

    push(0, (), 0)
    while heap and len(nodes) <= budget:
        cost, depth, path, parent, rank = heapq.heappop(heap)
        nodes.append((parent, depth, -cost, rank))
        push(parent, path[:-1], rank + 1)
        push(len(nodes) - 1, path, 0)
    return tuple(np.array(column) for column in zip(*nodes, strict=True))


def draft_logits(first: float, last: float, seed: int = 0) -> torch.Tensor:
    """Logits [DEPTH, VOCAB]: noisy power laws in the rank, with exponents from ``first`` down to ``last``."""
    noise = torch.Generator().manual_seed(seed)
    fall = torch.linspace(first, last, DEPTH)[:, None] * torch.arange(1, VOCAB + 1).log()
    logits = 0.5 * torch.randn(DEPTH, VOCAB, generator=noise) - fall
    return torch.stack([row[torch.randperm(VOCAB, generator=noise)] for row in logits])


def medians(*calls: Callable[[], object]) -> list[float]:
    """Median milliseconds of each call; the calls take turns, and the garbage collector is off."""
    times: list[list[float]] = [[] for _ in calls]
    gc.disable()
    for _ in range(REPEATS):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            taken.append(1000 * (time.perf_counter() - start))
    gc.enable()
    return [statistics.median(taken) for taken in times]


def row(name: str, logits: torch.Tensor, budget: int) -> str:
    ids, log_probs = top_tokens(logits, budget)
    (top,) = medians(lambda: top_tokens(logits, budget))
    ours, heap = medians(lambda: grow(ids, log_probs, budget), lambda: heap_best_first(ids, log_probs, budget))
    depth = grow(ids, log_probs, budget).depth.max()
    return f"{name:<18}{budget:>6}{depth:>7}{top:>9.2f}{ours:>9.3f}{heap:>9.3f}{heap / ours:>9.2f}"


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"draft logits [{DEPTH}, {VOCAB}], median ms of {REPEATS}, top-k on {device}")
    print(f"{'draft':<18}{'budget':>6}{'depth':>7}{'top-k':>9}{'grow':>9}{'heap':>9}{'ratio':>9}")
    for name, exponents in DRAFTS.items():
        logits = draft_logits(*exponents).to(device)
        for dtype in (torch.float32, torch.bfloat16):
            for budget in BUDGETS:
                print(row(f"{name}, {str(dtype).removeprefix('torch.')}", logits.to(dtype), budget))


if __name__ == "__main__":
    main()
