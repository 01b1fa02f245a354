"""Each kernel of the fast path against Transformers' module or ddlab's plain form of the same arithmetic.

Without a GPU the kernels are interpreted (float32 only: the interpreter has no bfloat16 products).
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from ddlab.delta import TreeRows, tree_causal_conv, tree_delta_rule
from ddlab.tree import DraftTree

pytest.importorskip("triton", reason="the fast path is written in Triton")

from ddlab.fast import attention, delta, norms

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]
BAND = {torch.float32: 3e-6, torch.bfloat16: 2e-2}  # of the largest entry


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", DTYPES)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, device=DEVICE, dtype=dtype)


def assert_close(found: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> None:
    found, right = found.double().cpu(), right.double().cpu()
    assert found.shape == right.shape
    assert (found - right).abs().max() <= BAND[dtype] * right.abs().max().clamp_min(1e-9)


def bushy(n: int, seed: int = 0) -> DraftTree:
    rng = np.random.default_rng(seed + n)
    parents = [-1]
    for node in range(1, n):
        parents.append(int(rng.integers(max(0, node - 5), node)))
    return DraftTree.from_parents(np.arange(n), parents)


def meta(start: int = 0, depth: int = 0, count: int = 0) -> torch.Tensor:
    return torch.tensor([start, depth, count, 0], dtype=torch.int32, device=DEVICE)


def with_weight(module: torch.nn.Module, weight: torch.Tensor) -> torch.nn.Module:
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module.to(DEVICE)


@pytest.mark.parametrize("made", [qwen.Qwen3_5RMSNorm, LlamaRMSNorm])
@pytest.mark.parametrize("size", [24, 64])
def test_add_rms_norm_adds_then_norms_as_the_module_does(made, size, dtype):
    h, delta, weight = (draw(5, size, dtype=dtype, seed=i) for i in range(3))
    weight = weight[0].contiguous()
    module, zero_centred = with_weight(made(size), weight), made is qwen.Qwen3_5RMSNorm
    for change in (delta, None):
        before, out = h.clone(), empty(5, size, dtype=dtype)
        norms.add_rms_norm(h, change, weight, 1e-6, zero_centred, out)
        right = before if change is None else before + change
        assert_close(h, right, dtype)
        assert_close(out, module(right), dtype)


def test_activations_are_those_of_the_modules(dtype):
    gate, up, weight = draw(5, 70, dtype=dtype), draw(5, 70, dtype=dtype, seed=1), draw(20, dtype=dtype)
    out = empty(5, 70, dtype=dtype)
    norms.silu_mul(gate, up, out)
    assert_close(out, torch.nn.functional.silu(gate) * up, dtype)
    x, z, out = draw(3, 40, dtype=dtype), draw(3, 40, dtype=dtype, seed=1), empty(3, 40, dtype=dtype)
    norms.gated_rms_norm(x, z, weight, 1e-6, out)
    module = with_weight(qwen.Qwen3_5RMSNormGated(20), weight)
    assert_close(out.view(-1, 20), module(x.view(-1, 20), z.view(-1, 20)), dtype)


@pytest.mark.parametrize("n", [1, 2, 9] + ([65] if CUDA else []))
@pytest.mark.parametrize("sizes", [(2, 4, 16, 16), (1, 3, 24, 40)] + ([(4, 12, 128, 128)] if CUDA else []))
def test_a_linear_layer_on_a_tree_is_the_plain_tree_form(n, sizes, dtype):
    k_heads, v_heads, k_dim, v_dim = sizes
    tree = bushy(n)
    rows = TreeRows(tree.parents, tree.ancestors())
    channels, kernel = 2 * k_heads * k_dim + v_heads * v_dim, 4
    raw, window = draw(n, channels, dtype=dtype), draw(channels, kernel, dtype=dtype)
    weight, mixed = draw(channels, kernel, dtype=dtype, seed=1), empty(n, channels, dtype=dtype)
    delta.tree_conv_silu(raw, window, rows.conv_table(kernel, kernel, DEVICE), weight, mixed)
    right = tree_causal_conv(torch.cat([window, raw.T], 1)[None], weight, None, "silu", rows)[0].T
    assert_close(mixed, right, dtype)

    gates, state = 3 * draw(n, 2 * v_heads, dtype=dtype), draw(v_heads, k_dim, v_dim, dtype=torch.float32)
    a_log, dt_bias = draw(v_heads, dtype=dtype), 3 * draw(v_heads, dtype=dtype, seed=1)
    out, writes = empty(n, v_heads * v_dim, dtype=dtype), empty(v_heads, n, v_dim)
    keys, decay = empty(k_heads, n, k_dim), empty(v_heads, n)
    seen = torch.tensor(tree.ancestors(), dtype=torch.uint8, device=DEVICE)
    before = state.clone()
    told = meta(depth=int(tree.depth.max()))
    delta.tree_delta(mixed, gates, a_log, dt_bias, seen, told, state, out, writes, keys, decay)
    assert torch.equal(state, before)
    q, k, v = mixed.split([k_heads * k_dim, k_heads * k_dim, v_heads * v_dim], -1)
    g = -a_log.float().exp() * torch.nn.functional.softplus(gates[:, v_heads:].float() + dt_bias)
    q, k, v = (x.reshape(1, n, -1, dim) for x, dim in ((q, k_dim), (k, k_dim), (v, v_dim)))
    right, left = tree_delta_rule(q, k, v, g[None], gates[:, :v_heads].sigmoid()[None], rows, state[None])
    for found, wanted in (
        (out, right.reshape(n, -1)),
        (writes, left.writes),
        (keys, left.keys),
        (decay, left.log_decay),
    ):
        assert_close(found, wanted, dtype)

    path = tree.path(int(tree.depth.argmax()))
    kept = torch.tensor(path + [0] * (n - len(path)), device=DEVICE)
    told = meta(count=len(path))
    states, windows = torch.stack([state, state]), torch.stack([window, window])
    delta.commit_state(states, *(torch.stack([x, x]) for x in (writes, keys, decay)), kept, told)
    delta.commit_window(windows, torch.stack([raw, raw]), kept, told)
    for layer in range(2):
        assert_close(states[layer], left.state_after(torch.tensor(path, device=DEVICE))[0], torch.float32)
        assert torch.equal(windows[layer], torch.cat([window, raw[path].T], 1)[:, -kernel:])


def test_the_decay_keeps_its_last_bits_where_it_is_small(dtype):
    tree, small = bushy(1), torch.tensor([[0.0, 0.0, -12.0, -17.0]], dtype=dtype, device=DEVICE)
    zero = torch.zeros(2, dtype=dtype, device=DEVICE)
    qkv, state, decay = draw(1, 16 * 4, dtype=dtype), draw(2, 16, 16, dtype=torch.float32), empty(2, 1)
    seen = torch.ones(1, 1, dtype=torch.uint8, device=DEVICE)
    scratch = empty(1, 32, dtype=dtype), empty(2, 1, 16), empty(1, 1, 16)
    delta.tree_delta(qkv, small, zero, zero, seen, meta(depth=tree.depth.max()), state, *scratch, decay)
    right = -torch.log1p(torch.tensor([-12.0, -17.0], dtype=torch.float64).exp())
    assert ((decay[:, 0].double().cpu() - right) / right).abs().max() < 1e-5


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (6, 1, 40)] + ([(24, 4, 256)] if CUDA else []))
@pytest.mark.parametrize(("start", "window", "splits"), [(0, None, 1), (37, None, 3), (70, 20, 4), (5, 2, 2)])
def test_attention_is_a_masked_softmax(heads, kv_heads, dim, start, window, splits, dtype):
    tree, n = bushy(7), 7
    keys, values = (draw(kv_heads, start + n + 3, dim, dtype=dtype, seed=i) for i in range(2))
    q, gate = draw(n, heads, dim, dtype=dtype), draw(n, heads * 2 * dim, dtype=dtype)
    seen = tree.ancestors()
    if window is not None:
        seen = seen & (tree.depth[:, None] - tree.depth[None] < window)
    positions = torch.tensor(start + tree.depth)
    distance = positions[:, None] - torch.arange(start)[None]
    committed = distance < (2**30 if window is None else window)
    visible = torch.cat([committed, torch.tensor(seen)], 1)
    depth = torch.tensor(tree.depth, dtype=torch.int32, device=DEVICE)
    given = torch.tensor(seen, dtype=torch.uint8, device=DEVICE), depth, meta(start)
    k, v = (x[:, : start + n].double().cpu().repeat_interleave(heads // kv_heads, 0) for x in (keys, values))
    scores = q.double().cpu().transpose(0, 1) @ k.transpose(1, 2) * dim**-0.5
    right = (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v).transpose(0, 1).reshape(n, -1)
    opened = right * gate.double().cpu().view(n, heads, 2, dim)[:, :, 1].reshape(n, -1).sigmoid()
    for gating, wanted in ((None, right), (gate, opened)):
        out = empty(n, heads * dim, dtype=dtype)
        attention.tree_attention(q, keys, values, *given, dim**-0.5, window, splits, gating, out)
        assert_close(out, wanted, dtype)


FITS = """
import triton
from triton.backends.compiler import GPUTarget
from ddlab.fast.attention import _attend, attention_tile
for dim in (64, 128, 256):
    for kind, itemsize in (("bf16", 2), ("fp32", 4)):
        tile = attention_tile(dim, itemsize, 2**20)
        launch = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
        fixed = tile | dict(H=24, KVH=4, D=dim, BD=dim, SPLITS=4)
        kinds = dict.fromkeys(("q", "keys", "values"), "*" + kind) | dict(seen="*u8", depth="*i32", meta="*i32")
        kinds |= dict.fromkeys(("part_out", "part_max", "part_sum"), "*fp32") | dict(scale="fp32")
        names = _attend.arg_names
        given = {name: "constexpr" if name in fixed else kinds.get(name, "i32") for name in names}
        source = triton.compiler.ASTSource(
            _attend, given, {(names.index(name),): value for name, value in fixed.items()},
            {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if given[name].startswith("*")},
        )
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)
        assert made.metadata.shared <= 232448, (dim, kind, made.metadata.shared)
"""


def test_attention_fits_into_the_shared_memory_of_hopper():  # which the interpreter knows nothing of
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", FITS], check=True, env=environment)


@pytest.mark.parametrize("normed", ["zero-centred", "plain", None])
def test_heads_are_normed_turned_and_stored_behind_the_committed_rows(normed, dtype):
    n, heads, kv_heads, dim, turns, start = 3, 4, 2, 16, 8, 5
    q, k, v = (draw(n, width, dtype=dtype) for width in (heads * 2 * dim, kv_heads * dim, kv_heads * dim))
    cos, sin = draw(n, turns, dtype=dtype), draw(n, turns, dtype=dtype, seed=1)
    keys, values, out = (
        empty(2, 12, dim, dtype=dtype),
        empty(2, 12, dim, dtype=dtype),
        empty(n, heads, dim, dtype=dtype),
    )
    weights = draw(dim, dtype=dtype), draw(dim, dtype=dtype, seed=1)
    norms = weights if normed else None
    args = (norms, 1e-6, normed == "zero-centred", cos, sin, meta(start), out, keys, values)
    attention.norm_rotate_store(q, k, v, *args)
    right_q, right_k = q.view(1, n, heads, 2, dim)[:, :, :, 0], k.view(1, n, kv_heads, dim)
    if normed:
        made = qwen.Qwen3_5RMSNorm if normed == "zero-centred" else LlamaRMSNorm
        right_q, right_k = (with_weight(made(dim), w)(x) for w, x in zip(weights, (right_q, right_k), strict=True))
    right_q, right_k = qwen.apply_rotary_pos_emb(right_q.transpose(1, 2), right_k.transpose(1, 2), cos[None], sin[None])
    assert_close(out, right_q[0].transpose(0, 1), dtype)
    assert_close(keys[:, start : start + n], right_k[0], dtype)
    assert_close(values[:, start : start + n], v.view(n, kv_heads, dim).transpose(0, 1), dtype)
    untouched = [*range(start), *range(start + n, 12)]
    assert keys[:, untouched].isnan().all() and values[:, untouched].isnan().all()


@pytest.mark.parametrize("path", [[0], [0, 1, 2], [0, 3, 19, 20], list(range(0, 40, 2))])
def test_a_committed_path_moves_to_the_front(path, dtype):
    start, n = 6, 41
    x = draw(2, 3, start + n + 2, 24, dtype=dtype)
    before, kept = x.clone(), torch.tensor(path + [0] * (n - len(path)), device=DEVICE)
    attention.commit_rows(x, kept, meta(start, count=len(path)))
    assert torch.equal(x[:, :, :start], before[:, :, :start])
    assert torch.equal(x[:, :, start : start + len(path)], before[:, :, [start + row for row in path]])
