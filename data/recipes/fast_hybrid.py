"""A Qwen3.5 hybrid made fast to train in plain PyTorch: gated delta rule in chunks, convolution.

flash-linear-attention 0.6 refuses the backward of the gated rule on Hopper GPUs, and Transformers' own form solves its
triangular systems one by one. Here a chunk's system is inverted by products of blocks, whose backward are two more.
Inside `fast_forms` a model computes by these forms; nothing of the installed packages is changed for good.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddlab.delta import delta_form, teach_tree_rows

CHUNK = 64  # tokens
BLOCK = 8  # rows of a triangular block that is inverted by its (finite) Neumann series


@contextmanager
def _ieee() -> Iterator[None]:
    """Products in full float32; elsewhere the caller may allow TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _diagonal_blocks(a: Tensor, size: int) -> Tensor:
    """[..., n, n] -> [..., n / size, size, size]"""
    blocks = a.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # [..., row block, row, column block, column]
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def inverse_of_unit_lower(a: Tensor) -> Tensor:
    """(I + a)^-1 for strictly lower triangular a [..., n, n]; n is a power of two.

    Blocks of 8 by their Neumann series, which ends there and whose terms stay small; a longer one would cancel badly
    where keys repeat. Then twice the size from two halves at a time.
    """
    n = a.shape[-1]
    size = min(BLOCK, n)
    block = _diagonal_blocks(a, size)
    one = torch.eye(size, dtype=a.dtype, device=a.device)
    square = block @ block
    inverse = (one - block) @ (one + square) @ (one + square @ square)
    while size < n:
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = _diagonal_blocks(a, 2 * size)[..., size:, :size]
        corner = -(second @ below @ first)
        top = torch.cat([first, torch.zeros_like(first)], dim=-1)
        inverse = torch.cat([top, torch.cat([corner, second], dim=-1)], dim=-2)
        size *= 2
    return inverse.squeeze(-3)


class UnitLowerSolve(torch.autograd.Function):
    """x of (I + a) x = b for strictly lower triangular a [..., n, n], b [..., n, m]."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        with _ieee():
            inverse = inverse_of_unit_lower(a)
        x = inverse @ b
        ctx.save_for_backward(inverse, x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        inverse, x = ctx.saved_tensors
        of_b = inverse.transpose(-1, -2) @ grads[0]
        return -(of_b @ x.transpose(-1, -2)).tril(-1), of_b


def _within_chunks(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, normalise: bool
) -> tuple[Tensor, ...]:
    """What needs no state; inputs [b, chunks, chunk, heads(, dim)], outputs [b, heads, chunks, chunk, dim].

    With G the log decay summed within a chunk and D_ij = exp(G_i - G_j) for j <= i: e^G q, e^(G_end - G) k, the system
    strict(D * beta k k^T), D * q k^T, its right sides [beta v, beta e^G k], and e^G_end.
    """
    size, group = query.shape[2], value.shape[3] // query.shape[3]
    q, k, v = (x.permute(0, 3, 1, 2, 4) for x in (query, key, value))  # [b, heads, chunks, chunk, dim]
    b, total = beta.permute(0, 3, 1, 2)[..., None], g.permute(0, 3, 1, 2).cumsum(-1)
    if normalise:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    products = k @ k.transpose(-1, -2), q @ k.transpose(-1, -2)  # a key head serves `group` value heads
    kk, qk, q, k = (x.repeat_interleave(group, dim=1) for x in (*products, q, k))
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    from_start = total.exp()[..., None]
    to_end = (total[..., -1:] - total).exp()[..., None]
    right = torch.cat([b * v, b * from_start * k], dim=-1)
    return q * from_start, k * to_end, (b * kk * between).tril(-1), qk * between, right, from_start[..., -1:, :]


def chunk_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    chunk: int = CHUNK,
    within: Callable[..., tuple[Tensor, ...]] = _within_chunks,
    **__: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule with a backward, arguments as Transformers' `torch_chunk_gated_delta_rule`.

    query, key [b, t, k heads, k dim]; value [b, t, v heads, v dim]; g (log decay, <= 0) and beta [b, t, v heads] ->
    out like value in the dtype of query, and the state [b, v heads, k dim, v dim] or None. Float32, or float64 for
    float64. chunk: a power of two.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    batch, length, _, k_dim = key.shape
    heads, v_dim = value.shape[2:]
    with torch.autocast(query.device.type, enabled=False):
        missing = -length % chunk
        q, k, v, decay, b = (
            F.pad(x.to(dtype), (0, 0) * (x.ndim - 2) + (0, missing)).unflatten(1, (-1, chunk))
            for x in (query, key, value, g, beta)
        )
        q, k, system, scores, right, end = within(q, k, v, decay, b, use_qk_l2norm_in_kernel)
        known, reads = UnitLowerSolve.apply(system, right).split([v_dim, k_dim], dim=-1)
        state = q.new_zeros(batch, heads, k_dim, v_dim) if initial_state is None else initial_state.to(dtype)
        out = []
        chunks = zip(*(x.unbind(2) for x in (q, k, scores, known, reads, end)), strict=True)
        for q_i, k_i, scores_i, known_i, reads_i, end_i in chunks:
            writes = known_i - reads_i @ state  # [b, heads, chunk, v dim]
            out.append(q_i @ state + scores_i @ writes)
            state = end_i * state + k_i.transpose(-1, -2) @ writes
        result = torch.cat(out, dim=2)[:, :, :length].transpose(1, 2)
    return result.to(query.dtype), state if output_final_state else None


def shifted_conv(
    columns: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """Depthwise causal convolution [b, channels, t] as a sum of shifted copies; cuDNN's backward of it is slow."""
    taps = weight.to(columns.dtype).unbind(-1)
    out = columns * taps[-1][:, None]
    for back, tap in enumerate(reversed(taps[:-1]), start=1):
        out = out + F.pad(columns, (back, -back)) * tap[:, None]
    if bias is not None:
        out = out + bias.to(out.dtype)[:, None]
    return F.silu(out) if activation in ("silu", "swish") else out


@contextmanager
def fast_forms(model: nn.Module, compiled: bool = False) -> Iterator[None]:
    """In this block forwards of `model` without a cache compute its linear layers, if any, by the forms above.

    compiled: what a chunk needs no state for, and the convolution, through torch.compile.
    """
    compile_it: Callable[[Any], Any] = functools.partial(torch.compile, dynamic=True) if compiled else lambda f: f
    rule = functools.partial(chunk_rule, within=compile_it(_within_chunks))
    forms = {"torch_chunk_gated_delta_rule": rule, "causal_conv1d_fn": compile_it(shifted_conv)}

    def form(name: str, plain: Any, rows: Any, *args: Any, **kwargs: Any) -> Any:
        return forms.get(name, plain)(*args, **kwargs)

    linear = next((m for m in model.modules() if hasattr(m, "A_log")), None)
    if linear is not None:
        teach_tree_rows(linear)
    with delta_form(form):
        yield
