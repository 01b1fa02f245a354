"""Triton kernels of the fast path: the target's choice at each node.

The plain form is `ddlab.sampling._read_from_device`; tests/test_top_kernels.py holds the two together.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ddlab.fast.norms import power_of_2
from ddlab.fast.top import LAST, entry, number, ordered, sum_exp, taken_apart

_TILE = 4096  # numbers that one program reads


@triton.jit
def _parts(scores, likely, bests, sums, vocab, score_row, score_column, likely_row, likely_column,
           SAME: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(scores + row * score_row + i * score_column, mask=i < vocab, other=float("-inf")).to(tl.float32)
    entries = entry(ordered(x), i)
    best = tl.max(entries, axis=0)
    to = 2 * (row * tl.num_programs(1) + part)
    tl.store(bests + to, best)
    tl.store(bests + to + 1, tl.max(tl.where(entries == best, LAST, entries), axis=0))
    if SAME:
        peak = number((best >> 32).to(tl.int32))
    else:
        x = tl.load(likely + row * likely_row + i * likely_column, mask=i < vocab, other=float("-inf")).to(tl.float32)
        peak = number(tl.max(ordered(x), axis=0))
    tl.store(sums + to, peak)
    tl.store(sums + to + 1, sum_exp(x, peak))


@triton.jit(do_not_specialize=["n", "m"])  # they change from round to round: one compilation serves all
def _join(bests, sums, likely, asked, out, n, m, parts, likely_row, likely_column,
          PARTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row < n:
        p = tl.arange(0, PARTS)
        at = 2 * (row * parts + p)
        first = tl.load(bests + at, mask=p < parts, other=LAST)
        second = tl.load(bests + at + 1, mask=p < parts, other=LAST)
        best = tl.max(first, axis=0)
        second = tl.max(tl.maximum(second, tl.where(first == best, LAST, first)), axis=0)
        logit, token = taken_apart(best)
        peaks = tl.load(sums + at, mask=p < parts, other=float("-inf"))
        totals = tl.load(sums + at + 1, mask=p < parts, other=0.0)
        peak = number(tl.max(ordered(peaks), axis=0))
        tl.store(out + row, token.to(tl.float32))
        tl.store(out + n + row, logit)
        tl.store(out + 2 * n + row, number((second >> 32).to(tl.int32)))
        tl.store(out + 3 * n + row, peak)
        tl.store(out + 4 * n + row, tl.sum(totals * tl.exp(peaks - peak), axis=0))
        tl.store(out + 5 * n + row, tl.load(likely + row * likely_row + token * likely_column).to(tl.float32))
    else:
        q = (row - n) * BLOCK + tl.arange(0, BLOCK)
        node, column = tl.load(asked + q, mask=q < m, other=0), tl.load(asked + m + q, mask=q < m, other=0)
        picked = tl.load(likely + node * likely_row + column * likely_column, mask=q < m, other=0.0)
        tl.store(out + 6 * n + q, picked.to(tl.float32), mask=q < m)


def read(scores: Tensor, likely: Tensor, nodes: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, ...]:
    """`ddlab.sampling._read_from_device` of scores in float32 or less, in two launches.

    ``nodes`` begins with all rows, whose own choices are picked.
    """
    (n, vocab), m = scores.shape, len(ids)
    parts = triton.cdiv(vocab, _TILE)
    asked = torch.from_numpy(np.concatenate([nodes[n:], ids])).to(scores.device, non_blocking=True)
    bests = scores.new_empty(n, parts, 2, dtype=torch.int64)  # the two best, each with its column
    sums = scores.new_empty(n, parts, 2, dtype=torch.float32)  # maximum and sum of exp(. - maximum)
    out = scores.new_empty(6 * n + m, dtype=torch.float32)  # it holds ids up to 2**24
    with torch.cuda.device_of(scores):
        _parts[(n, parts)](
            scores, likely, bests, sums, vocab, *scores.stride(), *likely.stride(),
            SAME=likely is scores, BLOCK=_TILE,
        )  # fmt: skip
        _join[(n + triton.cdiv(m, 128),)](
            bests, sums, likely, asked, out, n, m, parts, *likely.stride(), PARTS=power_of_2(parts), BLOCK=128
        )
    tokens, best, second, peak, total, picked = np.split(out.cpu().numpy(), n * np.arange(1, 6))
    return tokens.astype(np.int64), best, second, peak, np.log(total), picked
