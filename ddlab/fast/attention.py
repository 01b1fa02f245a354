"""Triton kernels of the fast path: attention layers over committed keys and a tree or a block.

``meta`` is as in :mod:`ddlab.fast.delta`. The plain forms are Transformers' own modules under the masks of
:func:`ddlab.verify.tree_masks`; tests/test_kernels.py holds the two together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddlab.fast.norms import power_of_2, sigmoid


@triton.jit
def _heads(q, k, v, q_weight, k_weight, cos, sin, q_out, k_out, v_out, meta, eps, q_stride, capacity,
           H: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ROT: tl.constexpr,
           NORM: tl.constexpr, ZERO_CENTRED: tl.constexpr, Q_HEAD: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BD)
    here = i < D
    slot = (tl.load(meta) + row).to(tl.int64)
    if head >= H + KVH:
        kv = head - H - KVH
        copied = tl.load(v + (row * KVH + kv) * D + i, mask=here, other=0.0)
        tl.store(v_out + (kv * capacity + slot) * D + i, copied, mask=here)
    else:
        turns = i < ROT
        other = tl.where(i < ROT // 2, i + ROT // 2, i - ROT // 2)  # the entry that each is turned with
        if head < H:
            x_at, w_at = q + row * q_stride + head * Q_HEAD, q_weight
        else:
            x_at, w_at = k + (row * KVH + head - H) * D, k_weight
        x = tl.load(x_at + i, mask=here, other=0.0)
        pair = tl.load(x_at + other, mask=turns, other=0.0)
        kind = x.dtype
        if NORM:
            value, paired = x.to(tl.float32), pair.to(tl.float32)
            scale = tl.rsqrt(tl.sum(value * value, axis=0) / D + eps)
            w = tl.load(w_at + i, mask=here, other=0.0).to(tl.float32)
            w_pair = tl.load(w_at + other, mask=turns, other=0.0).to(tl.float32)
            if ZERO_CENTRED:
                x = (value * scale * (1.0 + w)).to(kind)
                pair = (paired * scale * (1.0 + w_pair)).to(kind)
            else:
                x = ((value * scale).to(kind).to(tl.float32) * w).to(kind)
                pair = ((paired * scale).to(kind).to(tl.float32) * w_pair).to(kind)
        c = tl.load(cos + row * ROT + i, mask=turns, other=0.0).to(tl.float32)
        s = tl.load(sin + row * ROT + i, mask=turns, other=0.0).to(tl.float32)
        turned = tl.where(i < ROT // 2, -pair.to(tl.float32), pair.to(tl.float32))
        one = (x.to(tl.float32) * c).to(kind).to(tl.float32)
        two = (turned * s).to(kind).to(tl.float32)
        y = tl.where(turns, (one + two).to(kind), x)
        if head < H:
            tl.store(q_out + (row * H + head) * D + i, y, mask=here)
        else:
            tl.store(k_out + ((head - H) * capacity + slot) * D + i, y, mask=here)


def norm_rotate_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    zero_centred: bool,
    cos: Tensor,
    sin: Tensor,
    meta: Tensor,
    q_out: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Head norms and rotary embedding; keys and values go behind the committed ones.

    Args:
        q: [n, heads * width], the query in the first ``dim`` of each head's ``width`` entries.
        k, v: [n, kv_heads * dim].
        norms: weights [dim] of the query's and the key's, or None. cos, sin: [n, rotary dim].
        q_out: [n, heads, dim]. keys, values: [kv_heads, capacity, dim], written from row ``meta[START]`` on.
    """
    n, heads, dim = q_out.shape
    kv_heads, capacity, _ = keys.shape
    _heads[(n, heads + 2 * kv_heads)](
        q, k, v, *(norms or (q, q)), cos, sin, q_out, keys, values, meta, eps, q.shape[1], capacity,
        H=heads, KVH=kv_heads, D=dim, BD=power_of_2(dim), ROT=cos.shape[-1], NORM=norms is not None,
        ZERO_CENTRED=zero_centred, Q_HEAD=q.shape[1] // max(heads, 1), num_warps=1 if dim <= 128 else 2,
    )  # fmt: skip


@triton.jit
def _attend(q, keys, values, seen, depth, meta, part_out, part_max, part_sum, scale, n, capacity, window,
            H: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
            SPLITS: tl.constexpr):  # fmt: skip
    kv, block, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group = H // KVH
    m = block * BM + tl.arange(0, BM)  # rows of all heads of the group
    in_m = m < n * group
    row = m // group
    at = (row * H + kv * group + m % group).to(tl.int64)  # [BM] of [n * heads]
    d = tl.arange(0, BD)
    in_d = d < D
    x = tl.load(q + at[:, None] * D + d[None], mask=in_m[:, None] & in_d[None], other=0.0)
    start = tl.load(meta)
    mine = start + tl.load(depth + row, mask=in_m, other=0)  # positions
    first = tl.maximum(0, start - window + 1) // BN * BN  # no row sees further back
    each = tl.cdiv(tl.cdiv(start + n - first, BN), SPLITS) * BN
    low = first + split * each
    high = tl.minimum(low + each, start + n)
    best = tl.full((BM,), -1e30, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BD), tl.float32)
    for at_key in range(low, high, BN):
        j = at_key + tl.arange(0, BN)
        in_j = j < high
        k_at = (kv * capacity + j)[None] * D + d[:, None]
        k = tl.load(keys + k_at, mask=in_d[:, None] & in_j[None], other=0.0)  # [BD, BN]
        score = tl.dot(x, k, input_precision="tf32x3") * scale
        node = j - start
        old = ((node < 0) & in_j)[None] & (mine[:, None] - j[None] < window)
        drafted = in_m[:, None] & ((node >= 0) & in_j)[None]
        visible = old | (tl.load(seen + row[:, None] * n + node[None], mask=drafted, other=0) != 0)
        score = tl.where(visible, score * 1.4426950408889634, -1e30)
        top = tl.maximum(best, tl.max(score, axis=1))
        p = tl.where(visible, tl.exp2(score - top[:, None]), 0.0)
        shrink = tl.exp2(best - top)
        total = total * shrink + tl.sum(p, axis=1)
        v_at = (kv * capacity + j)[:, None] * D + d[None]
        v = tl.load(values + v_at, mask=in_j[:, None] & in_d[None], other=0.0)  # [BN, BD]
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="tf32x3")
        best = top
    to = split * n * H + at
    tl.store(part_max + to, best, mask=in_m)
    tl.store(part_sum + to, total, mask=in_m)
    tl.store(part_out + to[:, None] * D + d[None], acc, mask=in_m[:, None] & in_d[None])


def attention_tile(dim: int, itemsize: int, rows: int) -> dict[str, int]:
    """Rows and keys of a program's tile, as far as they fit into shared memory (227 kB), and how it is launched."""
    most = 128 if dim <= 64 else 64 if dim <= 128 or itemsize == 2 else 32
    tile = {"BM": min(most, max(16, power_of_2(rows))), "BN": 64 if itemsize == 2 else 32}
    return tile | {"num_warps": 8 if dim > 128 else 4, "num_stages": 2}


@triton.jit
def _join(part_out, part_max, part_sum, gate, out, rows, gate_stride, H: tl.constexpr, D: tl.constexpr,
          BD: tl.constexpr, SPLITS: tl.constexpr, BS: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, BS), tl.arange(0, BD)
    in_s, in_d = s < SPLITS, d < D
    top = tl.load(part_max + s * rows + at, mask=in_s, other=-1e30)
    weight = tl.where(in_s, tl.exp2(top - tl.max(top, axis=0)), 0.0)
    total = tl.sum(weight * tl.load(part_sum + s * rows + at, mask=in_s, other=0.0), axis=0)
    parts = tl.load(part_out + (s[:, None] * rows + at) * D + d[None], mask=in_s[:, None] & in_d[None], other=0.0)
    kind = out.dtype.element_ty
    y = (tl.sum(parts * weight[:, None], axis=0) / total).to(kind)
    if GATED:
        g_at = gate + at // H * gate_stride + (2 * (at % H) + 1) * D
        y = (y.to(tl.float32) * sigmoid(tl.load(g_at + d, mask=in_d, other=0.0))).to(kind)
    tl.store(out + at * D + d, y, mask=in_d)


def tree_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    depth: Tensor,
    meta: Tensor,
    scale: float,
    window: int | None,
    splits: int,
    gate: Tensor | None,
    out: Tensor,
) -> None:
    """Attention of n rows over all committed keys (in a window of positions) and over the rows that each may see.

    The keys are shared out over ``splits`` programs for each block of rows, joined by their log-sum-exp.

    Args:
        q: [n, heads, dim]; keys, values: [kv_heads, capacity, dim], committed rows, then the n new ones.
        seen: uint8 [n, n]; depth: int32 [n], a row's position less ``meta[START]``.
        gate: the query projection [n, heads * 2 * dim] whose second halves gate the output, or None.
        out: [n, heads * dim].
    """
    n, heads, dim = q.shape
    kv_heads, capacity, _ = keys.shape
    rows = n * heads
    parts = [q.new_empty(splits, rows, *shape, dtype=torch.float32) for shape in ((dim,), (), ())]
    tile = attention_tile(dim, q.dtype.itemsize, rows // kv_heads)
    _attend[(kv_heads, triton.cdiv(rows // kv_heads, tile["BM"]), splits)](
        q, keys, values, seen, depth, meta, *parts, scale, n, capacity, 2**30 if window is None else window,
        H=heads, KVH=kv_heads, D=dim, BD=max(16, power_of_2(dim)), SPLITS=splits, **tile,
    )  # fmt: skip
    _join[(rows,)](
        *parts, q if gate is None else gate, out, rows, 0 if gate is None else gate.shape[1], H=heads, D=dim,
        BD=power_of_2(dim), SPLITS=splits, BS=power_of_2(splits), GATED=gate is not None, num_warps=2,
    )  # fmt: skip


@triton.jit
def _commit_rows(x, path, meta, capacity, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr):
    base = x + tl.program_id(0).to(tl.int64) * capacity * D
    d = tl.arange(0, BD)
    start, count = tl.load(meta), tl.load(meta + 2)
    for first in range(0, count, BM):  # rows only move to the front: what a step reads no earlier step has written
        j = first + tl.arange(0, BM)
        here = (j < count)[:, None] & (d < D)[None]
        row = tl.load(path + j, mask=j < count, other=0)
        kept = tl.load(base + (start + row)[:, None] * D + d[None], mask=here, other=0.0)
        tl.debug_barrier()
        tl.store(base + (start + j)[:, None] * D + d[None], kept, mask=here)
        tl.debug_barrier()


def commit_rows(x: Tensor, path: Tensor, meta: Tensor) -> None:
    """Keys or values [..., capacity, dim]: the rows of ``path`` move to the front of the new ones."""
    capacity, dim = x.shape[-2:]
    _commit_rows[(x.numel() // (capacity * dim),)](
        x, path, meta, capacity, D=dim, BD=power_of_2(dim), BM=16, num_warps=2
    )
