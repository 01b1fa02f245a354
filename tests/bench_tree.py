"""How long a best-first tree takes on draft logits of a 27B target's size: ``python tests/bench_tree.py``.

Prints, for peaky and flat drafts, median milliseconds of the top-k (on the GPU where there is one) and of
what comes after it: ``ddlab.tree.grow``, and a plain heap over the same arrays. ``--cuda`` instead holds the ways to
read a vocabulary on the GPU to each other: the top-k of a draft (called, and captured as the graph engine launches it,
alone and with the tree grown from it), and what is read of a verify's logits.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from ddlab.sampling import Sampling, _read_from_device, two_best
from ddlab.top import largest, packed_top, top_tokens
from ddlab.tree import best_first, grow

DEPTH, VOCAB = 15, 248_320
DRAFTS = {"peaky": (3.5, 1.6), "flat": (1.6, 0.9)}
BUDGETS = (16, 64, 256, 512, 1024)
CUDA_BUDGETS = (64, 256, 512)
ROWS = (1, 65, 257, 513)  # of a verify
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
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            taken.append(1000 * (time.perf_counter() - start))
    gc.enable()
    return [statistics.median(taken) for taken in times]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def row(name: str, logits: torch.Tensor, budget: int) -> str:
    ids, log_probs = top_tokens(logits, budget)
    (top,) = medians(lambda: top_tokens(logits, budget))
    ours, heap = medians(lambda: grow(ids, log_probs, budget), lambda: heap_best_first(ids, log_probs, budget))
    depth = grow(ids, log_probs, budget).depth.max()
    return f"{name:<18}{budget:>6}{depth:>7}{top:>9.2f}{ours:>9.3f}{heap:>9.3f}{heap / ours:>9.2f}"


def table(calls: dict[str, Callable[[], object]]) -> None:
    for _ in range(3):
        for call in calls.values():
            call()
    for name, median in zip(calls, medians(*calls.values()), strict=True):
        print(f"  {name:<58}{median:>9.3f}")


def top_by_threshold(logits: torch.Tensor, n: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The n largest by a floor: the n-th largest maximum of blocks; what reaches it is found with one wait."""
    floor = logits.unflatten(1, (-1, width)).amax(-1).topk(n, sorted=False).values.amin(-1, keepdim=True)
    above = logits >= floor
    most = int(above.sum(-1).max())
    values, ids = torch.where(above, logits, -torch.inf).topk(most) if most < 2 * n else logits.topk(n)
    return values[:, :n], ids[:, :n]


def two_best_in_place(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two passes and few launches: the maxima are taken out of the scores, and put back."""
    tokens = scores.argmax(-1, keepdim=True)
    best = scores.gather(1, tokens)
    second = scores.scatter_(1, tokens, -torch.inf).amax(-1)
    scores.scatter_(1, tokens, best)
    return tokens[:, 0], best[:, 0], second


def read_plainly(scores: torch.Tensor, nodes: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As it reads: a whole log-softmax, an argmax, a top-2, and a transfer of each."""
    log_probs = torch.log_softmax(scores, dim=-1)
    best, tokens = scores.topk(2).values, scores.argmax(-1)
    log_prob = log_probs.gather(1, tokens[:, None])[:, 0]
    parts = (tokens, log_prob, best[:, 0] - best[:, 1], log_probs[nodes, ids])
    return torch.cat([part.float().cpu() for part in parts])


def total(scores: torch.Tensor) -> torch.Tensor:
    return (scores - scores.amax(-1, keepdim=True)).exp_().sum(-1).log()


class Launched:
    """A form of ``packed_top`` that writes to a buffer, captured in a CUDA graph for each n; on a CPU just called."""

    def __init__(self, form: Callable[[torch.Tensor, int, torch.Tensor], object], logits: torch.Tensor):
        self.form, self.logits = form, logits
        self.launches: dict[int, tuple[Callable[[], object], torch.Tensor]] = {}

    def launch(self, n: int) -> torch.Tensor:
        if n not in self.launches:
            out = torch.zeros(len(self.logits), 2 + 2 * n, device=self.logits.device)
            self.launches[n] = self.captured(lambda: self.form(self.logits, n, out)), out
        launch, out = self.launches[n]
        launch()
        return out

    def __call__(self, n: int) -> np.ndarray:
        packed: np.ndarray = self.launch(n).cpu().numpy()
        return packed

    def captured(self, run: Callable[[], object]) -> Callable[[], object]:
        if self.logits.device.type == "cpu":
            return run
        run()  # compiles
        synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay


def compare_tops(logits: torch.Tensor, budget: int) -> None:
    from ddlab.fast import top

    n = budget + budget // 8 + 8
    expected = logits.topk(n).values
    widths = [w for w in (16, 32, 64, 128, 256) if n <= logits.shape[1] // w]
    for width in widths:
        assert torch.equal(largest(logits, n, width)[0], expected)
    assert torch.equal(top_by_threshold(logits, n, 32)[0], expected)
    plain = Launched(lambda logits, n, out: out.copy_(packed_top(logits, n)), logits)
    kernels = Launched(top.packed_top, logits)
    for packed in (plain.launch(n), kernels.launch(n)):
        assert torch.equal(packed[:, 2 : 2 + n], expected)
        assert torch.equal(logits.gather(1, packed[:, 2 + n :].long()), expected)
    table(
        {"torch.topk": lambda: logits.topk(n)}
        | {f"blocks of {w}": lambda w=w: largest(logits, n, w) for w in widths}
        | {
            "floor of blocks of 32": lambda: top_by_threshold(logits, n, 32),
            "ddlab: largest": lambda: largest(logits, n),
            "ddlab: top_tokens, with the normaliser and the transfer": lambda: top_tokens(logits, budget),
            "ddlab: top_tokens and grow": lambda: best_first(lambda k: top_tokens(logits, k), budget),
            "launched: packed_top, plain": lambda: plain.launch(n),
            "launched: packed_top, kernels": lambda: kernels.launch(n),
            "launched: top_tokens and grow, plain": lambda: best_first(lambda k: top_tokens(logits, k, plain), budget),
            "launched: top_tokens and grow, kernels": lambda: best_first(
                lambda k: top_tokens(logits, k, kernels), budget
            ),
        }
    )


def compare_choices(scores: torch.Tensor) -> None:
    from ddlab.fast import choice

    rows, vocab = scores.shape
    positions = np.arange(rows)
    asked = positions[:-1], np.random.default_rng(0).integers(0, vocab, rows - 1)
    every, ids = np.concatenate([positions, asked[0]]), asked[1]
    nodes_there, ids_there = (torch.from_numpy(array).to(scores.device) for array in asked)
    for mine, plain in zip(two_best(scores), two_best_in_place(scores), strict=True):
        assert torch.equal(mine, plain)
    both = (read(scores, scores, every, ids) for read in (choice.read, _read_from_device))
    for mine, plain in zip(*both, strict=True):
        np.testing.assert_allclose(mine, plain, rtol=1e-5)
    table(
        {
            "argmax and topk(2)": lambda: (scores.argmax(-1), scores.topk(2)),
            "two_best by blocks": lambda: two_best(scores),
            "two_best in place": lambda: two_best_in_place(scores),
            "normaliser: log_softmax": lambda: torch.log_softmax(scores, -1).amax(-1),
            "normaliser: sub, exp_, sum": lambda: total(scores),
            "normaliser: logsumexp": lambda: torch.logsumexp(scores, -1),
            "all, plainly": lambda: read_plainly(scores, nodes_there, ids_there),
            "ddlab: all, plain": lambda: _read_from_device(scores, scores, every, ids),
            "ddlab: all, kernels": lambda: choice.read(scores, scores, every, ids),
            "ddlab: Sampling.choose, kernels": lambda: Sampling().choose(
                scores, positions, lambda node: [], asked, choice.read
            ),
        }
    )


def on_cuda(device: str = "cuda") -> None:
    print(f"{torch.cuda.get_device_name() if device == 'cuda' else device}, median ms of {REPEATS}")
    for name, exponents in DRAFTS.items():
        logits = draft_logits(*exponents).to(device)
        for kind, rounded in (("float32", logits), ("rounded to bfloat16", logits.bfloat16().float())):
            for budget in CUDA_BUDGETS:
                n = budget + budget // 8 + 8
                print(f"\n{name} draft [{DEPTH}, {VOCAB}], {kind}, budget {budget}: the {n} largest of each row")
                compare_tops(rounded, budget)
    noise = torch.Generator().manual_seed(0)
    for rows in ROWS:
        print(f"\nlogits of a verify [{rows}, {VOCAB}]")
        compare_choices(torch.randn(rows, VOCAB, generator=noise).mul_(3).to(device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="compare ways on the GPU")
    if parser.parse_args().cuda:
        on_cuda()
        return
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
