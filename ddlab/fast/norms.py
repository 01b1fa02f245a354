"""Triton kernels of the fast path: norms and activations.

Each does in one launch what Transformers does in a chain of small ones, and rounds to the model's dtype where that
chain does. The plain forms are Transformers' own modules; tests/test_kernels.py holds the two together.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n; Triton's blocks are such."""
    return 1 << max(n - 1, 0).bit_length()


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def sigmoid(x):
    """In float32, rounded to the dtype of x, in float32 again."""
    return (1.0 / (1.0 + tl.exp(-x.to(tl.float32)))).to(x.dtype).to(tl.float32)


@triton.jit
def _add_norm(
    h,
    delta,
    w,
    out,
    eps,
    size,
    HAS_DELTA: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * size
    i = tl.arange(0, BLOCK)
    here = i < size
    x = tl.load(h + row + i, mask=here, other=0.0)
    if HAS_DELTA:
        x = (x.to(tl.float32) + tl.load(delta + row + i, mask=here, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(h + row + i, x, mask=here)
    x = x.to(tl.float32)
    weight = tl.load(w + i, mask=here, other=0.0)
    kind = out.dtype.element_ty
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    if ZERO_CENTRED:
        y = y * (1.0 + weight.to(tl.float32))
    else:
        y = y.to(kind).to(tl.float32) * weight.to(tl.float32)
    tl.store(out + row + i, y.to(kind), mask=here)


def add_rms_norm(h: Tensor, delta: Tensor | None, weight: Tensor, eps: float, zero_centred: bool, out: Tensor) -> None:
    """``h += delta``; ``out = rms_norm(h)``. All [rows, hidden] and contiguous.

    zero_centred: the weight is stored less one (Qwen3.5), else as it is (Llama).
    """
    rows, size = h.shape
    block = power_of_2(size)
    _add_norm[(rows,)](
        h, delta, weight, out, eps, size,
        HAS_DELTA=delta is not None, ZERO_CENTRED=zero_centred, BLOCK=block, num_warps=8 if block >= 4096 else 4,
    )  # fmt: skip


@triton.jit
def _silu_mul(gate, up, out, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < size
    g = tl.load(gate + i, mask=here, other=0.0)
    activated = silu(g.to(tl.float32)).to(g.dtype).to(tl.float32)
    tl.store(out + i, (activated * tl.load(up + i, mask=here, other=0.0).to(tl.float32)).to(g.dtype), mask=here)


def silu_mul(gate: Tensor, up: Tensor, out: Tensor) -> None:
    """``out = silu(gate) * up``, elementwise over contiguous tensors."""
    _silu_mul[(triton.cdiv(gate.numel(), 1024),)](gate, up, out, gate.numel(), BLOCK=1024)


@triton.jit
def _gated_norm(x, z, w, out, eps, rows, SIZE: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr):
    r = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, BLOCK)
    at = r[:, None].to(tl.int64) * SIZE + i[None]
    here = (r < rows)[:, None] & (i < SIZE)[None]
    weight = tl.load(w + i, mask=i < SIZE, other=0.0)[None]
    value = tl.load(x + at, mask=here, other=0.0)
    v = value.to(tl.float32)
    y = (v * tl.rsqrt(tl.sum(v * v, axis=1, keep_dims=True) / SIZE + eps)).to(value.dtype).to(tl.float32)
    y = (y * weight.to(tl.float32)).to(value.dtype).to(tl.float32)
    gate = tl.load(z + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + at, (y * silu(gate)).to(value.dtype), mask=here)


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """``out = weight * rms_norm(x) * silu(z)`` over the last axis; x, z, out contiguous [..., v_dim]."""
    size = weight.shape[0]
    rows = x.numel() // size
    _gated_norm[(triton.cdiv(rows, 8),)](x, z, weight, out, eps, rows, SIZE=size, BLOCK=power_of_2(size), HEADS=8)
