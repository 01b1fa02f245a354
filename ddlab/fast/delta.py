"""Triton kernels of the fast path: gated-delta-net layers on a tree.

Rows are the nodes of a tree, parents first. ``meta`` is int32 on the device: how many tokens are committed, how deep
the tree is, how many rows a commit keeps; so one captured launch serves every round. The plain forms are in
:mod:`ddlab.delta`; tests/test_kernels.py holds the two together.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ddlab.fast.norms import power_of_2, sigmoid, silu

START, DEPTH, COUNT = 0, 1, 2  # in meta
DELTA_ROWS = 65  # rows of one tree that `tree_delta` takes


@triton.jit
def _conv_silu(rows, window, table, w, out, channels, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = c < channels
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(K):
        column = tl.load(table + row * K + tap)
        old = tl.load(window + c * K + column, mask=here & (column < K), other=0.0).to(tl.float32)
        new = tl.load(rows + (column - K) * channels + c, mask=here & (column >= K), other=0.0).to(tl.float32)
        total += (old + new) * tl.load(w + c * K + tap, mask=here, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + row * channels + c, silu(total.to(kind).to(tl.float32)).to(kind), mask=here)


def tree_conv_silu(rows: Tensor, window: Tensor, table: Tensor, weight: Tensor, out: Tensor) -> None:
    """Causal convolution and SiLU, every row over its own ancestors.

    rows, out [n, channels]; window [channels, kernel], the committed columns; table int64 [n, kernel]: columns of
    ``cat(window, rows)``, oldest first (`TreeRows.conv_table`); weight [channels, kernel].
    """
    n, channels = rows.shape
    kernel = weight.shape[1]
    _conv_silu[(n, triton.cdiv(channels, 512))](rows, window, table, weight, out, channels, K=kernel, BLOCK=512)


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) + 1e-6)


@triton.jit
def _decay(a, a_log, dt_bias):
    """-exp(a_log) * softplus(a + dt_bias), with log(1 + e) right also where e is small."""
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return -tl.exp(a_log.to(tl.float32)) * tl.where(x > 20.0, x, log1p)


@triton.jit
def _delta(qkv, ba, a_log, dt_bias, anc, meta, state, out, writes, keys, decay, n,
           HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
           BK: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    head, part = tl.program_id(0), tl.program_id(1)
    group = HV // HK
    k_head = head // group
    channels = 2 * HK * DK + HV * DV
    dk, dv = tl.arange(0, BK), part * BV + tl.arange(0, BV)
    in_k, in_v = dk < DK, dv < DV
    kind = out.dtype.element_ty
    rate, bias = tl.load(a_log + head), tl.load(dt_bias + head)
    keep_keys = (part == 0) & (head % group == 0)

    # the root: one plain step of the recurrence; every other row starts behind it
    s_at = (head * DK + dk)[:, None] * DV + dv[None]
    s = tl.load(state + s_at, mask=in_k[:, None] & in_v[None], other=0.0)  # [BK, BV]
    q0 = tl.load(qkv + k_head * DK + dk, mask=in_k, other=0.0).to(tl.float32)
    k0 = tl.load(qkv + (HK + k_head) * DK + dk, mask=in_k, other=0.0).to(tl.float32)
    v0 = tl.load(qkv + 2 * HK * DK + head * DV + dv, mask=in_v, other=0.0).to(tl.float32)
    q0 = q0 * tl.rsqrt(tl.sum(q0 * q0, axis=0) + 1e-6) * (DK**-0.5)
    k0 = k0 * tl.rsqrt(tl.sum(k0 * k0, axis=0) + 1e-6)
    beta0 = sigmoid(tl.load(ba + head))
    g0 = _decay(tl.load(ba + HV + head), rate, bias)
    u0 = beta0 * (v0 - tl.exp(g0) * tl.sum(k0[:, None] * s, axis=0))
    s = tl.exp(g0) * s + k0[:, None] * u0[None]
    tl.store(out + head * DV + dv, tl.sum(q0[:, None] * s, axis=0).to(kind), mask=in_v)
    u_at = writes + head.to(tl.int64) * n * DV
    tl.store(u_at + dv, u0, mask=in_v)
    tl.store(decay + head * n, g0, mask=part == 0)
    tl.store(keys + k_head * n * DK + dk, k0, mask=in_k & keep_keys)

    if BN > 0:
        r = 1 + tl.arange(0, BN)
        in_n = r < n
        row = r[:, None].to(tl.int64)
        in_nk, in_nv = in_n[:, None] & in_k[None], in_n[:, None] & in_v[None]
        k_at = row * channels + (HK + k_head) * DK + dk[None]
        k = _unit(tl.load(qkv + k_at, mask=in_nk, other=0.0).to(tl.float32))  # [BN, BK]
        beta = sigmoid(tl.load(ba + r * 2 * HV + head, mask=in_n, other=0.0))
        g = tl.where(in_n, _decay(tl.load(ba + r * 2 * HV + HV + head, mask=in_n, other=0.0), rate, bias), 0.0)
        sees = tl.load(anc + row * n + r[None], mask=in_n[:, None] & in_n[None], other=0) != 0  # [BN, BN]
        total = tl.sum(tl.where(sees, g[None], 0.0), axis=1)  # [BN] from behind the root
        between = tl.where(sees, tl.exp(total[:, None] - total[None]), 0.0)
        system = tl.dot(k, tl.trans(k), input_precision="tf32x3") * between * beta[:, None]
        system = tl.where(r[:, None] == r[None], 0.0, system)
        v_at = row * channels + 2 * HK * DK + head * DV + dv[None]
        v = tl.load(qkv + v_at, mask=in_nv, other=0.0).to(tl.float32)
        from_root = tl.exp(total)[:, None]
        right = beta[:, None] * (v - from_root * tl.dot(k, s, input_precision="tf32x3"))  # [BN, BV]
        u = right
        depth = tl.load(meta + 1)
        for _ in range(1, depth):  # a row is right once its ancestors are: level by level
            u = right - tl.dot(system, u, input_precision="tf32x3")
        q_at = row * channels + k_head * DK + dk[None]
        q = _unit(tl.load(qkv + q_at, mask=in_nk, other=0.0).to(tl.float32)) * (DK**-0.5)
        o = from_root * tl.dot(q, s, input_precision="tf32x3")
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * between
        o += tl.dot(scores, u, input_precision="tf32x3")
        tl.store(out + row * HV * DV + head * DV + dv[None], o.to(kind), mask=in_nv)
        tl.store(u_at + row * DV + dv[None], u, mask=in_nv)
        tl.store(decay + head * n + r, total + g0, mask=in_n & (part == 0))
        tl.store(keys + k_head * n * DK + row * DK + dk[None], k, mask=in_nk & keep_keys)


def tree_delta(
    qkv: Tensor,
    gates: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    ancestors: Tensor,
    meta: Tensor,
    state: Tensor,
    out: Tensor,
    writes: Tensor,
    keys: Tensor,
    decay: Tensor,
) -> None:
    """`ddlab.delta.tree_delta_rule` with its gates and norms, in one launch.

    The triangular system is solved level by level: a row is right once its ancestors are, so ``depth - 1`` products
    give what substitution gives.

    Args:
        qkv: [n, channels] after the convolution; gates [n, 2 * v_heads]: write strength, then decay, before their
            activations.
        ancestors: uint8 [n, n]; n <= DELTA_ROWS. state: float32 [v_heads, k_dim, v_dim], before the tree.
        out: [n, v_heads * v_dim]. writes float32 [v_heads, n, v_dim], keys float32 [k_heads, n, k_dim] and decay
            float32 [v_heads, n] are what `commit_state` needs.
    """
    n = len(qkv)
    v_heads, k_dim, v_dim = state.shape
    block = 0 if n == 1 else max(16, power_of_2(n - 1))
    part = min(power_of_2(v_dim), 64)
    _delta[(v_heads, triton.cdiv(v_dim, part))](
        qkv, gates, a_log, dt_bias, ancestors, meta, state, out, writes, keys, decay, n,
        HK=keys.shape[0], HV=v_heads, DK=k_dim, DV=v_dim, BK=max(16, power_of_2(k_dim)), BV=max(16, part), BN=block,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _commit_state(state, writes, keys, decay, path, meta, n, HK: tl.constexpr, HV: tl.constexpr,
                  DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    layer, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    k_head = layer * HK + head // (HV // HK)
    v_head = layer * HV + head
    dk, dv = tl.arange(0, BK), part * BV + tl.arange(0, BV)
    in_k, in_v = dk < DK, dv < DV
    count = tl.load(meta + 2)
    last = tl.load(decay + v_head * n + tl.load(path + count - 1))
    at = (v_head * DK + dk)[:, None] * DV + dv[None]
    here = in_k[:, None] & in_v[None]
    s = tl.load(state + at, mask=here, other=0.0) * tl.exp(last)
    for j in range(count):
        row = tl.load(path + j)
        left = tl.exp(last - tl.load(decay + v_head * n + row))
        k = tl.load(keys + (k_head * n + row) * DK + dk, mask=in_k, other=0.0) * left
        u = tl.load(writes + (v_head * n + row) * DV + dv, mask=in_v, other=0.0)
        s += k[:, None] * u[None]
    tl.store(state + at, s, mask=here)


def commit_state(state: Tensor, writes: Tensor, keys: Tensor, decay: Tensor, path: Tensor, meta: Tensor) -> None:
    """Recurrent states after the rows of ``path``, in place, all layers in one launch.

    state [layers, v_heads, k_dim, v_dim]; writes, keys, decay as `tree_delta` left them, with a layer axis in front;
    path int64, its first ``meta[COUNT]`` entries count.
    """
    layers, v_heads, k_dim, v_dim = state.shape
    part = min(power_of_2(v_dim), 64)
    _commit_state[(layers, v_heads, triton.cdiv(v_dim, part))](
        state, writes, keys, decay, path, meta, decay.shape[2],
        HK=keys.shape[1], HV=v_heads, DK=k_dim, DV=v_dim, BK=power_of_2(k_dim), BV=part,
    )  # fmt: skip


@triton.jit
def _commit_window(window, rows, path, meta, channels, n, K: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr):
    layer = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tap = tl.arange(0, BK)
    count = tl.load(meta + 2)
    here = (c < channels)[:, None] & (tap < K)[None]
    column = count + tap[None]  # of cat(window, kept rows), whose last K columns stay
    at = window + (layer * channels + c[:, None]) * K
    old = tl.load(at + column, mask=here & (column < K), other=0.0)
    row = tl.load(path + column - K, mask=(column >= K) & (tap < K)[None], other=0)
    new = tl.load(rows + (layer * n + row) * channels + c[:, None], mask=here & (column >= K), other=0.0)
    tl.debug_barrier()
    tl.store(at + tap[None], tl.where(column < K, old, new), mask=here)


def commit_window(window: Tensor, rows: Tensor, path: Tensor, meta: Tensor) -> None:
    """Convolution windows after the rows of ``path``, in place.

    window [layers, channels, kernel]; rows [layers, n, channels], before the convolution.
    """
    layers, channels, kernel = window.shape
    _commit_window[(layers, triton.cdiv(channels, 256))](
        window, rows, path, meta, channels, rows.shape[1], K=kernel, BK=power_of_2(kernel), BLOCK=256
    )
