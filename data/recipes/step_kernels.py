"""One token a row: attention over the row's keys, and one step of the delta rule. In PyTorch, and as Triton kernels.

Both are bound by memory: the kernels read only the keys that a row has, and a state once instead of ten times.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # the plain forms are all there is
    triton = None


def attend(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, fused: bool = False) -> Tensor:
    """q [rows, kv heads, group, dim] over keys, values [rows, kv heads, length, dim] up to positions [rows] -> like q.

    The last key that a row sees is the one at its position.
    """
    if fused:
        q, out = q.contiguous(), torch.empty(q.shape, dtype=q.dtype, device=q.device)
        rows, heads, group, dim = q.shape
        _attend[(heads, rows)](q, keys, values, out, positions, keys.shape[2], heads, group, dim, BLOCK=64)
        return out
    seen = torch.arange(keys.shape[2], device=q.device) <= positions[:, None]  # [rows, length]
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen[:, None, None])


def delta_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, fused: bool = False
) -> Tensor:
    """One step of the gated delta rule; state [rows, v heads, k dim, v dim] is changed in place.

    q, k [rows, k heads, k dim], normalised and scaled; v [rows, v heads, v dim]; decay (its factor, not its log) and
    beta [rows, v heads]; all float32 -> out [rows, v heads, v dim].
    """
    rows, heads, k_dim, v_dim = state.shape
    group = heads // q.shape[1]
    if fused:
        q, k, v, decay, beta = (x.contiguous() for x in (q, k, v, decay, beta))
        out = torch.empty_like(v)
        _delta[(heads, rows)](q, k, v, decay, beta, state, out, heads, group, k_dim, v_dim, num_warps=2)
        return out
    q, k = (x.repeat_interleave(group, dim=1)[..., None] for x in (q, k))  # [rows, v heads, k dim, 1]
    state.mul_(decay[:, :, None, None])
    write = (v - (state * k).sum(2)) * beta[:, :, None]
    state.addcmul_(k, write[:, :, None])
    return (state * q).sum(2)


if triton is not None:

    @triton.jit
    def _attend(Q, K, V, OUT, POSITION, length, heads, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """A program a row and kv head: its queries over the row's keys, block by block, with an online softmax."""
        head = tl.program_id(0)
        row = tl.program_id(1).to(tl.int64)
        keys = tl.load(POSITION + row).to(tl.int32) + 1
        g = tl.arange(0, 16)  # at least so many rows for a tensor core
        d = tl.arange(0, DIM)
        at = ((row * heads + head) * GROUP + g[:, None]) * DIM + d[None]
        q = tl.load(Q + at, mask=g[:, None] < GROUP, other=0.0)
        top = tl.full((16,), -1e30, tl.float32)
        total = tl.zeros((16,), tl.float32)
        out = tl.zeros((16, DIM), tl.float32)
        first = (row * heads + head) * length
        for begin in range(0, keys, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            here = place < keys
            where = (first + place[:, None]) * DIM + d[None]
            k = tl.load(K + where, mask=here[:, None], other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision="tf32x3") * (DIM**-0.5)
            s = tl.where(here[None], s, -1e30)
            higher = tl.maximum(top, tl.max(s, 1))
            p = tl.exp(s - higher[:, None])
            shrunk = tl.exp(top - higher)
            v = tl.load(V + where, mask=here[:, None], other=0.0)
            out = out * shrunk[:, None] + tl.dot(p.to(v.dtype), v, input_precision="tf32x3")
            total = total * shrunk + tl.sum(p, 1)
            top = higher
        tl.store(OUT + at, (out / total[:, None]).to(OUT.dtype.element_ty), mask=g[:, None] < GROUP)

    @triton.jit
    def _delta(Q, K, V, DECAY, BETA, STATE, OUT, heads, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr):  # type: ignore[no-untyped-def]
        """A program a row and value head: its state is read once and written once."""
        head = tl.program_id(0)
        row = tl.program_id(1).to(tl.int64)
        i = tl.arange(0, DK)
        j = tl.arange(0, DV)
        at = row * heads + head
        of_key = (row * (heads // GROUP) + head // GROUP) * DK + i
        k = tl.load(K + of_key)
        q = tl.load(Q + of_key)
        v = tl.load(V + at * DV + j)
        where = STATE + at * DK * DV + i[:, None] * DV + j[None]
        state = tl.load(where) * tl.load(DECAY + at)
        write = (v - tl.sum(state * k[:, None], 0)) * tl.load(BETA + at)
        state += k[:, None] * write[None]
        tl.store(where, state)
        tl.store(OUT + at * DV + j, tl.sum(state * q[:, None], 0))


def differences(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    """Largest difference of the kernels' results from the plain forms': attention, delta step (out and state)."""
    draw = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, generator=draw)

    q, keys, values = normal(5, 2, 3, 64).to(dtype), normal(5, 2, 96, 64).to(dtype), normal(5, 2, 96, 64).to(dtype)
    positions = torch.tensor([0, 3, 63, 64, 95], device=device)
    seen = [attend(q, keys, values, positions, fused).float() for fused in (False, True)]
    unit_q, unit_k = (F.normalize(normal(5, 2, 64), dim=-1) for _ in range(2))
    v, state = normal(5, 4, 64), normal(5, 4, 64, 64)
    decay, beta = normal(5, 4).sigmoid(), normal(5, 4).sigmoid()
    states = [state.clone(), state.clone()]
    outs = [delta_step(s, unit_q, unit_k, v, decay, beta, i == 1) for i, s in enumerate(states)]
    step = max((outs[0] - outs[1]).abs().max().item(), (states[0] - states[1]).abs().max().item())
    return (seen[0] - seen[1]).abs().max().item(), step


@functools.cache
def kernels_agree(device: torch.device) -> bool:
    """Whether the kernels run on this device and give what the plain forms give; if not, says why."""
    if triton is None or device.type != "cuda":
        return False
    limits = {torch.float32: 5e-3, torch.bfloat16: 3e-2}  # float32: PyTorch's own may be TF32
    try:
        found = {dtype: max(differences(device, dtype)) for dtype in limits}
    except Exception as error:  # whatever keeps them from running, the plain forms do
        print(f"no kernels: {type(error).__name__}: {error}")
        return False
    if agree := all(found[dtype] < limit for dtype, limit in limits.items()):
        return agree
    print(f"no kernels: they differ from the plain forms by {found}")
    return False
