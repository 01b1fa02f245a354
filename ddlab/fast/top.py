"""Triton kernels of the fast path: the largest logits of a draft.

The plain form is `ddlab.top.packed_top`; tests/test_top_kernels.py holds the two together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddlab import top as plain
from ddlab.fast.norms import power_of_2

LOWEST = tl.constexpr(-2139095041)  # ordered(-inf)
LAST = tl.constexpr(LOWEST.value << 32)  # after every entry of a row, and -inf itself
_TILE = 8192  # numbers that one program holds
_ROW = tl.constexpr(32)  # int32 a row of ``state``: rows have a cache line each, else their counters meet in one


@triton.jit
def ordered(x):
    """int32 in the order of float32 numbers: -0.0 as 0.0, NaN above all."""
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, 0x7FFFFFFF, tl.where(key == -1, 0, key))


@triton.jit
def number(key):
    """The float32 number of ``ordered``."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def entry(key, column):
    """int64: the larger comes first, and of equals that of the lower column."""
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)


@triton.jit
def taken_apart(entry):
    """The number of an entry, and its column in int64."""
    return number((entry >> 32).to(tl.int32)), 0x7FFFFFFF - (entry & 0x7FFFFFFF)


@triton.jit
def sum_exp(x, peak):
    """Sum of exp(x - peak) over a tile; 0 where all of it is -inf."""
    terms = tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak))
    return tl.sum(tl.ravel(terms), axis=0)


@triton.jit
def _maxima(logits, maxima, parts, vocab, blocks, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b = part * BLOCK + tl.arange(0, BLOCK)
    at = tl.arange(0, WIDTH)[:, None] * blocks + b[None]
    here = (b < blocks)[None] & (at < vocab)
    x = tl.load(logits + row * vocab + at, mask=here, other=float("-inf")).to(tl.float32)
    top = tl.max(ordered(x), axis=0)
    tl.store(maxima + row * blocks + b, top, mask=b < blocks)
    peak = number(tl.max(top, axis=0))
    to = parts + 2 * (row * tl.num_programs(1) + part)
    tl.store(to, peak)
    tl.store(to + 1, sum_exp(x, peak))


@triton.jit
def _floor(maxima, parts, state, out, n, most, blocks, count, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    p, b = tl.arange(0, PARTS), tl.arange(0, BLOCK)
    key = tl.load(maxima + row * blocks + b, mask=b < blocks, other=LOWEST)
    top = tl.max(key, axis=0)
    peak = number(top)
    peaks = tl.load(parts + 2 * (row * count + p), mask=p < count, other=float("-inf"))
    totals = tl.load(parts + 2 * (row * count + p) + 1, mask=p < count, other=0.0)
    tl.store(out + row * (2 + 2 * n), peak)
    tl.store(out + row * (2 + 2 * n) + 1, tl.sum(totals * tl.exp(peaks - peak), axis=0))
    high = top.to(tl.int64) + 1  # fewer than n maxima reach it
    low = high * 0 + LOWEST  # at least n do
    reach = blocks
    while (high - low > 1) & (reach > most):
        middle = low + (high - low) // 2
        found = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), axis=0)
        enough = found >= n
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        reach = tl.where(enough, found, reach)
    tl.store(state + row * _ROW, low.to(tl.int32))
    tl.store(state + row * _ROW + 1, 0)


@triton.jit
def _collect(logits, maxima, state, found, vocab, blocks,
             WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    floor = tl.load(state + row * _ROW)
    reach = (b < blocks) & (tl.load(maxima + row * blocks + b, mask=b < blocks, other=LOWEST) >= floor)
    at = tl.arange(0, WIDTH)[:, None] * blocks + b[None]
    here = reach[None] & (at < vocab)
    key = ordered(tl.load(logits + row * vocab + at, mask=here, other=float("-inf")).to(tl.float32))
    here = here & (key >= floor)
    slot = tl.atomic_add(state + row * _ROW + 1 + 0 * at, 1, mask=here, sem="relaxed")
    tl.store(found + row * ROOM + slot, entry(key, at), mask=here & (slot < ROOM))


@triton.jit
def _settle(logits, state, found, n, vocab, ROOM: tl.constexpr, BLOCK: tl.constexpr):
    """Where more than there is room for reach the floor: exactly n, found in the row itself."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    count = tl.load(state + row * _ROW + 1)
    if count > ROOM:
        low = tl.load(state + row * _ROW).to(tl.int64)  # at least n numbers reach it
        high = low * 0 + 0x80000000  # none does
        above = count * 0  # numbers that reach ``high``
        while high - low > 1:
            middle = low + (high - low) // 2
            reach = count * 0
            for start in range(0, vocab, BLOCK):
                x = tl.load(logits + row * vocab + start + i, mask=start + i < vocab, other=float("-inf"))
                reach += tl.sum((ordered(x.to(tl.float32)) >= middle.to(tl.int32)).to(tl.int32), axis=0)
            enough = reach >= n
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
            above = tl.where(enough, above, reach)
        last = low.to(tl.int32)
        more_before, same_before = count * 0, above
        for start in range(0, vocab, BLOCK):
            here = start + i < vocab
            x = tl.load(logits + row * vocab + start + i, mask=here, other=float("-inf"))
            key = ordered(x.to(tl.float32))
            more, same = (here & (key > last)).to(tl.int32), (here & (key == last)).to(tl.int32)
            slot = tl.where(more != 0, more_before + tl.cumsum(more, 0), same_before + tl.cumsum(same, 0)) - 1
            tl.store(found + row * ROOM + slot, entry(key, start + i), mask=(more + same != 0) & (slot < n))
            more_before += tl.sum(more, axis=0)
            same_before += tl.sum(same, axis=0)
        tl.store(state + row * _ROW + 1, n)


@triton.jit
def _rank(state, found, out, n, ROOM: tl.constexpr, MINE: tl.constexpr, OTHERS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * MINE + tl.arange(0, MINE)
    count = tl.load(state + row * _ROW + 1)
    if tl.program_id(1) * MINE < count:
        mine = tl.load(found + row * ROOM + i, mask=i < count, other=LAST)
        rank = tl.zeros((MINE,), tl.int32)  # how many come before it
        for start in range(0, count, OTHERS):
            j = start + tl.arange(0, OTHERS)
            other = tl.load(found + row * ROOM + j, mask=j < count, other=LAST)
            rank += tl.sum((other[None] > mine[:, None]).to(tl.int32), axis=1)
        to = out + row * (2 + 2 * n) + 2 + rank
        here = (i < count) & (rank < n)
        logit, token = taken_apart(mine)
        tl.store(to, logit, mask=here)
        tl.store(to + n, token.to(tl.float32), mask=here)


def packed_top(logits: Tensor, n: int, out: Tensor) -> None:
    """`ddlab.top.packed_top` of contiguous logits [depth, vocab] into ``out``, float32 [depth, 2 + 2 * n].

    Equals come by ascending id. The n-th largest maximum of blocks of columns is a floor that at least n numbers of
    the row reach, and few more do: those are collected and ranked. A block's columns are far apart, because neighbours
    in a vocabulary are alike.
    """
    depth, vocab = logits.shape
    width = power_of_2(triton.cdiv(vocab, _TILE))
    blocks = triton.cdiv(vocab, width)
    if 2 * n > blocks:  # not many fewer than all
        out.copy_(plain.packed_top(logits, n))
        return
    tile = _TILE // width
    programs, room = triton.cdiv(blocks, tile), max(256, power_of_2(2 * n))
    maxima, state = (logits.new_empty(depth, size, dtype=torch.int32) for size in (blocks, _ROW.value))
    found = logits.new_empty(depth, room, dtype=torch.int64)
    parts = logits.new_empty(depth, programs, 2, dtype=torch.float32)  # maximum and sum of exp(. - maximum)
    _maxima[(depth, programs)](logits, maxima, parts, vocab, blocks, WIDTH=width, BLOCK=tile, num_warps=8)
    _floor[(depth,)](
        maxima, parts, state, out, n, n + n // 8, blocks, programs,
        BLOCK=power_of_2(blocks), PARTS=power_of_2(programs), num_warps=8,
    )  # fmt: skip
    _collect[(depth, programs)](
        logits, maxima, state, found, vocab, blocks, WIDTH=width, BLOCK=tile, ROOM=room, num_warps=8
    )
    _settle[(depth,)](logits, state, found, n, vocab, ROOM=room, BLOCK=_TILE, num_warps=16)
    _rank[(depth, room // 64)](state, found, out, n, ROOM=room, MINE=64, OTHERS=256, num_warps=8)
