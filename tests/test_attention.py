"""Attention backends: flash_tree against dense float64 attention, whole pairs on each, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import parent_lists, scripted, tree_of
from test_exact import worst
from test_pair import save_pair
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from ddlab import attention, flash_tree
from ddlab import sdpa_kernels as kernels
from ddlab.attention import BACKENDS, CALLS, Call, attention_backend, available, calls_of, use
from ddlab.audit import audit, band
from ddlab.decode import Decoder
from ddlab.drafter import Drafter
from ddlab.flash_tree import CausalWindow, causal_mask, flash_tree_forward
from ddlab.oracle import path_logits
from ddlab.pair import Pair, load_pair
from ddlab.record import describe_pair
from ddlab.verify import TargetState, tree_masks

CPU = torch.device("cpu")
# largest error of a convex mean of normal values, as the output is rounded
BAND = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Layer:
    """Stands for an attention module."""

    is_causal, training = True, False


def forward(query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **keywords: Any) -> Tensor:
    return flash_tree_forward(Layer(), query, key, value, mask, **keywords)[0]


def inputs(
    n: int, keys: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int, batch: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    shapes = ((batch, n, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, dim))
    query, key, value = (torch.randn(shape, generator=noise).to(dtype).transpose(1, 2) for shape in shapes)
    return query, key, value


def by_hand(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, sinks: Tensor | None = None) -> Tensor:
    """[batch, n, heads, dim] in float64, a softmax over what each row sees (bool [n, keys]) and the sinks."""
    group = query.shape[1] // key.shape[1]
    q, k, v = query.double(), key.double().repeat_interleave(group, 1), value.double().repeat_interleave(group, 1)
    scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        extra = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, extra], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2)


def error(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right).abs().max())


# -- flash_tree: one layer ---------------------------------------------------------------------------------------


def heads_and_sizes() -> st.SearchStrategy[tuple[int, int, int]]:
    """(heads, kv heads, head size)"""
    groups = st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1), (6, 2)])
    return st.tuples(groups, st.sampled_from([8, 32, 64, 128, 256])).map(lambda x: (*x[0], x[1]))


@settings(max_examples=150)
@given(
    parents=parent_lists(20),
    start=st.integers(0, 40),
    window=st.one_of(st.none(), st.integers(1, 30)),
    shape=heads_and_sizes(),
    dtype=st.sampled_from(list(BAND)),
    with_sinks=st.booleans(),
    seed=st.integers(0, 999),
)
def test_a_trees_rows_are_dense_attention_in_float64(
    parents: list[int],
    start: int,
    window: int | None,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    with_sinks: bool,
    seed: int,
) -> None:
    """Any prefix (none, shorter than the window), any window (shorter than the tree is deep), any group of heads."""
    tree, (heads, kv_heads, dim) = tree_of(parents, 0, 60), shape
    n, first = len(tree), 0 if window is None else max(0, start - window + 1)
    query, key, value = inputs(n, start - first + n, heads, kv_heads, dim, dtype, seed)
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(seed)).to(dtype) if with_sinks else None
    positions = [*range(first, start), *(start + tree.depth).tolist()]  # of the keys
    seen = torch.zeros(n, len(positions), dtype=torch.bool)
    for node in range(n):
        path = {start - first + x for x in tree.path(node)}
        for column, position in enumerate(positions):
            near = window is None or start + int(tree.depth[node]) - position < window
            seen[node, column] = near and (column < start - first or column in path)
    (mask,) = tree_masks(tree, start, [("layer", window)], dtype, CPU, dense_part=True).values()
    got = forward(query, key, value, mask, s_aux=sinks)
    assert got.dtype == dtype and got.shape == (1, n, heads, dim)
    assert error(got, by_hand(query, key, value, seen, sinks)) < BAND[dtype]


@given(parent_lists(), st.integers(0, 30), st.integers(1, 30))
def test_a_dense_part_is_the_mask_without_the_committed_keys_that_every_row_sees(
    parents: list[int], start: int, window: int
) -> None:
    tree, kinds = tree_of(parents, 0, 60), [("full", None), ("sliding", window)]
    whole = tree_masks(tree, start, kinds, torch.float32, CPU)
    part = tree_masks(tree, start, kinds, torch.float32, CPU, dense_part=True)
    for kind, _ in kinds:
        n, shared = len(tree), whole[kind].shape[3] - part[kind].shape[3]
        edge = part[kind].shape[3] - n
        left_out = whole[kind][..., edge : edge + shared]
        assert (left_out == 0).all()
        assert torch.equal(part[kind], torch.cat([whole[kind][..., :edge], whole[kind][..., edge + shared :]], dim=3))
        assert edge <= tree.depth.max()


@settings(max_examples=80)
@given(
    n=st.integers(1, 23),
    before=st.integers(0, 20),
    window=st.one_of(st.none(), st.integers(1, 30)),
    shape=heads_and_sizes(),
    with_sinks=st.booleans(),
    seed=st.integers(0, 999),
)
def test_prefill_steps_and_cached_keys_are_causal_over_the_last_keys(
    n: int, before: int, window: int | None, shape: tuple[int, int, int], with_sinks: bool, seed: int
) -> None:
    heads, kv_heads, dim = shape
    query, key, value = inputs(n, before + n, heads, kv_heads, dim, torch.float64, seed)
    sinks = torch.randn(heads, dtype=torch.float64) if with_sinks else None
    row, column = torch.arange(before, before + n)[:, None], torch.arange(before + n)
    seen = (column <= row) & (row - column < (window or 999))
    right = by_hand(query, key, value, seen, sinks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_tree, "WINDOW_ROWS", 5)
        for given_as in ({"mask": CausalWindow(window)} if window else {}, {"sliding_window": window}):
            assert error(forward(query, key, value, s_aux=sinks, **given_as), right) < 1e-12


def test_without_a_causal_module_and_without_a_mask_every_row_sees_every_key() -> None:
    query, key, value = inputs(4, 9, 4, 2, 16, torch.float64, 0)
    right = by_hand(query, key, value, torch.ones(4, 9, dtype=torch.bool))
    assert error(forward(query, key, value, is_causal=False), right) < 1e-12


@pytest.mark.parametrize("heads_in_mask", [1, 4])
def test_a_whole_mask_is_taken_boolean_or_additive_in_any_dtype(heads_in_mask: int) -> None:
    noise = torch.Generator().manual_seed(0)
    query, key, value = inputs(5, 9, 4, 2, 16, torch.float32, 1, batch=2)
    seen = torch.rand(2, heads_in_mask, 5, 9, generator=noise) < 0.5
    seen[..., 4] = True
    right = by_hand(query, key, value, seen)
    assert error(forward(query, key, value, seen), right) < 1e-5
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
        assert error(forward(query, key, value, mask), right) < 1e-5


def test_a_row_that_sees_itself_alone_is_finite_and_moves_no_other() -> None:
    query, key, value = inputs(8, 8, 4, 2, 16, torch.float32, 2)
    seen = torch.eye(8, dtype=torch.bool)
    seen[:5, :5] = torch.ones(5, 5).tril().bool()
    got = forward(query, key, value, seen[None, None])
    assert torch.isfinite(got).all()
    alone = forward(query[:, :, :5], key[:, :, :5], value[:, :, :5], seen[None, None, :5, :5])
    assert torch.allclose(got[:, :5], alone, atol=1e-6)


class Watcher(TorchDispatchMode):
    """The operations of a block of code and the shapes that they give."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.add(str(func))
        self.shapes += [tuple(x.shape) for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor)]
        return out


@pytest.mark.parametrize("window", [None, 1500])
def test_no_tensor_of_rows_by_committed_keys_exists_and_nothing_waits_for_the_device(window: int | None) -> None:
    tree, start = tree_of([-1, *range(16)], 0, 60), 2000
    n, first = len(tree), 0 if window is None else start - window + 1
    query, key, value = inputs(n, start - first + n, 4, 2, 16, torch.float32, 3)
    with Watcher() as seen:
        masks = tree_masks(tree, start, [("layer", window)], torch.float32, CPU, dense_part=True)
        forward(query, key, value, masks["layer"], s_aux=torch.zeros(4))
    for shape in seen.shapes:
        assert not (max(shape, default=0) >= 1000 and {n, 2 * n, 4 * n} & set(shape))
    assert seen.names and not [x for x in seen.names if "local_scalar" in x or "nonzero" in x]


def test_keys_are_not_repeated_for_their_group() -> None:
    query, key, value = inputs(3, 1000, 8, 2, 16, torch.float32, 4)
    with Watcher() as seen:
        forward(query, key, value, torch.zeros(1, 1, 3, 3))
    assert not [shape for shape in seen.shapes if shape[:1] == (1,) and 8 in shape and max(shape) >= 900]


def test_the_kernel_for_cuda_is_called_as_pytorch_declares_it() -> None:
    """On the meta device: shapes and types without a GPU, for folded heads, for a prompt, and for keys in a buffer."""
    query, key, value = (x.to("meta") for x in inputs(5, 40, 8, 2, 64, torch.bfloat16, 0))
    folded = flash_tree._folded(query, 2)
    for rows, causal in ((folded, False), (query, True)):
        out, lse = flash_tree._flash_cuda(rows, key[:, :, 3:30], value[:, :, 3:30], 0.125, causal)
        assert (out.shape, out.dtype) == (rows.shape, torch.bfloat16)
        assert (lse.shape, lse.dtype) == (rows.shape[:3], torch.float32)


BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "a square 2-D mask": ({"mask": torch.zeros(4, 4)}, r"a mask \[1, 1, 4, m\].*got \[4, 4\]"),
    "3-D": ({"mask": torch.zeros(1, 4, 6)}, r"got \[1, 4, 6\]"),
    "fewer columns than rows": ({"mask": torch.zeros(1, 1, 4, 3)}, r"got \[1, 1, 4, 3\]"),
    "more columns than keys": ({"mask": torch.zeros(1, 1, 4, 7)}, r"got \[1, 1, 4, 7\]"),
    "another number of rows": ({"mask": torch.zeros(1, 1, 5, 6)}, r"got \[1, 1, 5, 6\]"),
    "another number of heads": ({"mask": torch.zeros(1, 3, 4, 6)}, r"got \[1, 3, 4, 6\]"),
    "integers": ({"mask": torch.ones(1, 1, 4, 6, dtype=torch.int64)}, "boolean or an additive mask"),
    "no mask at all": ({"mask": "causal"}, "got str"),
    "dropout": ({"dropout": 0.1}, 'no dropout: use attention="eager"'),
    "a soft cap": ({"softcap": 30.0}, "no softcap"),
    "a bias": ({"position_bias": torch.zeros(1, 4, 4, 6)}, "no position_bias"),
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_a_call_that_would_go_wrong_is_refused_before_any_kernel(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_tree, "_flash", None)
    keywords, message = BAD_CALLS[what]
    query, key, value = inputs(4, 6, 4, 2, 16, torch.float32, 5)
    with pytest.raises(ValueError, match=message):
        forward(query, key, value, **keywords)


def test_shapes_that_do_not_fit_and_a_call_for_gradients_are_refused() -> None:
    query, key, value = inputs(4, 6, 4, 2, 16, torch.float32, 5)
    with pytest.raises(ValueError, match="do not fit"):
        forward(query[:, :3], key, value)
    with pytest.raises(ValueError, match="do not fit"):
        forward(query, key, value[..., :8])
    with pytest.raises(ValueError, match="4 rows with 3 keys"):
        forward(query, key[:, :, :3], value[:, :, :3])
    with pytest.raises(ValueError, match="for inference"):
        forward(query.clone().requires_grad_(), key, value)


# -- the mask that models make -------------------------------------------------------------------------------------


def made(q_length: int, kv_length: int, **keywords: Any) -> Any:
    offset = kv_length - q_length
    keywords = {"allow_is_causal_skip": True, "mask_function": causal_mask_function, "dtype": torch.float32} | keywords
    return causal_mask(1, q_length, kv_length, q_offset=keywords.pop("q_offset", offset), **keywords)


def test_a_plainly_causal_call_needs_no_mask_and_a_window_only_where_it_reaches_less_far() -> None:
    assert made(5, 5) is made(1, 9) is made(3, 9) is None
    assert made(5, 5, local_size=5) is None
    assert made(5, 9, local_size=5) == CausalWindow(5)
    assert made(5, 5, attention_mask=torch.ones(1, 5, dtype=torch.bool)) is None


@pytest.mark.parametrize(
    "keywords",
    [
        {"allow_is_causal_skip": False},
        {"attention_mask": torch.tensor([[False, True, True, True, True]])},
        {"q_offset": 0},
        {"q_offset": torch.tensor(2)},
        {"local_size": 3, "mask_function": sliding_window_causal_mask_function(3), "allow_is_causal_skip": False},
        {"local_size": 3, "config": type("Chunked", (), {"attention_chunk_size": 3})},
    ],
)
def test_any_other_call_gets_a_whole_additive_mask(keywords: dict[str, Any]) -> None:
    mask = made(3, 5, **keywords)
    assert mask.shape == (1, 1, 3, 5)
    assert set(mask.unique().tolist()) == {0.0, torch.finfo(torch.float32).min}


@pytest.mark.parametrize("kind", ["dense", "swa", "gpt_oss"])
def test_a_padded_batch_is_as_on_the_models_own_backend(kind: str) -> None:
    pair = Pair(models.fresh_target(kind))
    ids, mask = torch.randint(3, 90, (2, 14), generator=torch.Generator().manual_seed(0)), torch.ones(2, 14).long()
    mask[0, :5] = 0
    with torch.no_grad():
        right = pair.target(input_ids=ids, attention_mask=mask).logits
        with use(pair, "flash_tree"):
            got = pair.target(input_ids=ids, attention_mask=mask).logits
    assert torch.allclose(got[mask.bool()], right[mask.bool()], atol=1e-4)


# -- whole pairs -------------------------------------------------------------------------------------------------


@cache
def pair_on(name: str, kind: str, dtype: torch.dtype = torch.float32) -> Pair:
    """A target and a random drafter with both kinds of layers, both on one backend."""
    target, types = models.fresh_target(kind, dtype), ("sliding_attention", "full_attention")
    pair = Pair(target, models.random_drafter(target, layer_types=types, window=5, block=6))
    for part in ("target", "drafter"):
        attention.set_attention(pair, name, part)
    return pair


@pytest.mark.parametrize("kind", ["dense", "swa", "hybrid", "gpt_oss"])
@settings(max_examples=6)
@given(
    prompt=st.lists(st.integers(3, models.VOCAB - 5), min_size=1, max_size=25),
    script=st.sampled_from([None, "oracle", "mixed"]),
    budget=st.integers(1, 30),
    seed=st.integers(0, 99),
)
def test_a_pair_on_flash_tree_decodes_exactly(
    kind: str, prompt: list[int], script: str | None, budget: int, seed: int
) -> None:
    """Prefill, steps, the drafter's blocks and the trees; the oracle is plain decoding on the model's own backend."""
    pair, own = pair_on("flash_tree", kind), Pair(models.target(kind))
    text = prompt + models.plain_greedy(own.target, prompt, 14)
    decoder = Decoder(pair, "ddtree", budget=budget, max_new_tokens=9, stop_token_ids=())
    if script is not None:
        decoder.register_hook("draft", scripted(text, 5, models.VOCAB, script, seed))
    seen: dict[str, Tensor] = {}
    decoder.register_hook("verify", lambda d, logits: seen.update(logits=logits))
    decoder.start(prompt)
    while not decoder.finished:
        before = decoder.ids
        step = decoder.step()
        assert worst(seen["logits"], path_logits(own, before[:-1], step.tree)) < 1e-4
    assert decoder.ids == text[: len(prompt) + 9]
    assert decoder.trace.header["pair"]["attention"] == "flash_tree"
    assert decoder.trace.header["pair"]["drafter"]["attention"] == "flash_tree"


@pytest.mark.parametrize("kind", ["llama", "gemma3", "hybrid8", "vlm", "qwen3_moe", "qwen3_next"])
def test_a_tree_on_flash_tree_is_path_replay_on_the_models_own_backend(kind: str) -> None:
    own, pair = Pair(models.target(kind)), Pair(models.fresh_target(kind))
    text, tree = [5, 9, 33, 2] * 6, tree_of([-1, 0, 0, 1, 1, 3, 2, 5, 6, 0, 8, 10], 4, models.VOCAB)
    with use(pair, "flash_tree"):
        state = TargetState(pair)
        state.prefill(text)
        assert worst(state.verify(tree), path_logits(own, text, tree)) < 1e-4


@pytest.mark.parametrize(("kind", "temperature"), [("dense", 0.0), ("swa", 1.0), ("hybrid", 0.0), ("hybrid", 1.0)])
def test_the_audit_of_a_run_on_flash_tree_finds_nothing(kind: str, temperature: float) -> None:
    """Neither where its replay is on the model's own backend nor where it is on the run's, with Transformers' cache."""
    pair = pair_on("flash_tree", kind)
    decoder = Decoder(pair, "ddtree", 16, temperature=temperature, max_new_tokens=16, stop_token_ids=())
    list(decoder.run([2, 7, 1, 8]))
    for judge in (Pair(models.target(kind)), pair) if kind == "swa" else (Pair(models.target(kind)),):
        found = audit(judge, decoder.trace)
        assert found.ok and found.text_equal and found.nodes == found.nodes_total


@pytest.mark.parametrize("kind", ["dense", "swa", "gemma3"])
@pytest.mark.parametrize("name", [n for n in BACKENDS if available(n) is None and n != "flex"])
@settings(max_examples=6)
@given(parents=parent_lists(24), length=st.integers(1, 30), seed=st.integers(0, 999))
def test_every_backend_on_this_machine_verifies_trees_in_float64(
    name: str, kind: str, parents: list[int], length: int, seed: int
) -> None:
    """After a prompt in two parts and a step."""
    pair = pair_on(name, kind, torch.float64)
    text, tree = np.random.default_rng(seed).integers(0, models.VOCAB, length).tolist(), tree_of(parents, seed, 97)
    state = TargetState(pair)
    for part in (text[: length // 2], text[length // 2 : -1], text[-1:]):
        if part:
            state.prefill(part)
    right = path_logits(Pair(models.target(kind, torch.float64)), text, tree)
    rounded = name == "eager"  # its softmax is in float32 whatever the model's dtype
    assert worst(state.verify(tree), right) < (1e-4 if rounded else 1e-10)


@pytest.mark.parametrize("name", ["sdpa", "sdpa:math", "sdpa:flash"])
def test_a_backend_that_drops_sinks_is_refused_naming_those_that_do_not(name: str) -> None:
    message = r'drops attention sinks.*attention="flash_tree" or attention="eager"'
    with pytest.raises(ValueError, match=message), use(Pair(models.target("gpt_oss")), name):
        pass


@pytest.mark.parametrize("kind", ["dense", "swa", "hybrid"])
def test_flash_tree_in_bfloat16_stays_in_the_band(kind: str) -> None:
    pair = pair_on("flash_tree", kind, torch.bfloat16)
    text, tree = [5, 9, 33, 2] * 6, tree_of([-1, 0, 0, 1, 1, 3, 2, 5, 6, 0], 4, models.VOCAB)
    state = TargetState(pair)
    state.prefill(text)
    assert worst(state.verify(tree), path_logits(Pair(models.target(kind, torch.bfloat16)), text, tree)) < band(
        torch.bfloat16
    )


@given(context=st.integers(0, 40), window=st.integers(1, 30), block=st.integers(2, 9), causal=st.booleans())
@settings(max_examples=40)
def test_a_drafted_block_is_as_on_sdpa(context: int, window: int, block: int, causal: bool) -> None:
    types = ("sliding_attention", "full_attention")
    target = models.target("dense", torch.float64)
    config = models.drafter_config(target, layer_types=types, window=window, block=block)
    state = models.drafter_state(config, dtype=torch.float64)
    how = dict.fromkeys(types, "causal" if causal else "bidirectional")
    logits = []
    for name in ("sdpa", "flash_tree"):
        pair = Pair(target, Drafter.from_state(config, state, attention=name, block_attention=how))
        cache = pair.drafter.new_cache()
        pair.drafter.ingest(cache, torch.randn(context, 128, generator=torch.Generator().manual_seed(context)))
        logits.append(pair.propose(cache, 5))
    assert worst(logits[1], logits[0]) < 1e-10


# -- legality ------------------------------------------------------------------------------------------------------

CALL = Call("verify", None, False, torch.bfloat16, 256, "cuda", 24, 4)
LEGALITY: list[tuple[str, dict[str, Any], str | None]] = [
    ("eager", {}, None),
    ("eager", {"sinks": True, "softcap": 30.0, "dtype": torch.float64}, None),
    ("sdpa", {}, None),
    ("sdpa", {"sinks": True}, "drops attention sinks"),
    ("sdpa", {"softcap": 30.0}, "soft cap"),
    ("flash_tree", {}, None),
    ("flash_tree", {"sinks": True, "window": 8}, None),
    ("flash_tree", {"kind": "draft", "window": 8}, None),
    ("flash_tree", {"dtype": torch.float32}, "on CUDA knows bfloat16 and float16, not float32"),
    ("flash_tree", {"dtype": torch.float64, "device": "cpu"}, None),
    ("flash_tree", {"head_dim": 264}, "head sizes up to 256"),
    ("flash_tree", {"head_dim": 100}, "in steps of 8, not 100"),
    ("flash_tree", {"head_dim": 100, "device": "cpu"}, None),
    ("flash_tree", {"softcap": 30.0}, "soft cap"),
    ("flash_tree", {"device": "mps"}, "does not run on mps"),
    ("sdpa:math", {"dtype": torch.float64}, None),
    ("sdpa:math", {"sinks": True}, "drops attention sinks"),
    ("sdpa:flash", {}, "takes no tree mask"),
    ("sdpa:flash", {"kind": "draft"}, "takes no mask, and a drafted block needs one"),
    ("sdpa:flash", {"kind": "prefill"}, None),
    ("sdpa:flash", {"kind": "prefill", "window": 8}, "a sliding window needs one"),
    ("sdpa:flash", {"kind": "step", "dtype": torch.float32}, "not float32"),
    ("sdpa:flash", {"device": "cpu", "window": 8, "dtype": torch.float32}, None),
    ("sdpa:efficient", {}, None),
    ("sdpa:efficient", {"dtype": torch.float32}, None),
    ("sdpa:efficient", {"device": "cpu"}, "does not run on cpu"),
    ("sdpa:cudnn", {}, None),
    ("sdpa:cudnn", {"dtype": torch.float32}, "not float32"),
    ("flex", {"sinks": True}, None),
    ("flex", {"sinks": True, "device": "cpu"}, "no log-sum-exp on the CPU"),
    ("flex", {"dtype": torch.float64}, "no float64"),
    ("flash_attention_2", {}, "takes no tree mask"),
    ("flash_attention_2", {"kind": "prefill", "window": 8}, None),
    ("flash_attention_2", {"kind": "step", "sinks": True}, "drops attention sinks"),
    ("flash_attention_3", {"kind": "draft"}, "a drafted block needs one"),
    ("flash_attention_3", {"kind": "step"}, None),
    ("flash_attention_3", {"kind": "step", "device": "cpu"}, "does not run on cpu"),
    ("flash_attention_4", {"kind": "step", "head_dim": 512}, "head sizes up to 256"),
    ("flash_attention_4", {"kind": "step", "head_dim": 64, "sinks": True}, None),
]


@pytest.mark.parametrize(("name", "changes", "message"), LEGALITY)
def test_what_is_legal(name: str, changes: dict[str, Any], message: str | None) -> None:
    refusal = BACKENDS[name].refusal(replace(CALL, **changes))
    assert (refusal is None) if message is None else (refusal is not None and message in refusal)


@given(
    st.builds(
        Call,
        kind=st.sampled_from(CALLS),
        window=st.sampled_from([None, 8]),
        sinks=st.booleans(),
        dtype=st.sampled_from(list(BAND)),
        head_dim=st.sampled_from([16, 100, 256, 320]),
        device=st.sampled_from(["cpu", "cuda", "mps"]),
        heads=st.just(8),
        kv_heads=st.just(2),
        softcap=st.sampled_from([None, 30.0]),
    )
)
def test_a_refusal_names_only_what_is_legal_for_the_same_call_and_something_always_is(call: Call) -> None:
    assert BACKENDS["eager"].refusal(call) is None
    for backend in BACKENDS.values():
        if (refusal := backend.refusal(call)) is not None:
            named = [n for n in BACKENDS if f'attention="{n}"' in refusal]
            assert named and all(BACKENDS[n].refusal(call) is None for n in named)


def test_the_calls_of_a_pair_are_those_of_its_layers() -> None:
    target = models.target("gpt_oss")
    pair = Pair(target, models.random_drafter(target, layer_types=("sliding_attention", "full_attention"), window=6))
    layer = Call("verify", 8, True, torch.float32, 16, "cpu", 4, 2)
    calls = calls_of(pair)
    assert [(i, c.kind) for i, c in calls] == [(i, k) for i in range(4) for k in ("prefill", "step", "verify")]
    assert calls[2] == (0, layer) and calls[5] == (1, replace(layer, window=None))
    drafted = replace(layer, kind="draft", sinks=False)
    assert calls_of(pair, "drafter") == [(0, replace(drafted, window=6)), (1, replace(drafted, window=None))]
    hybrid = Pair(models.target("vlm"))
    assert {i for i, _ in calls_of(hybrid)} == {3} and calls_of(hybrid, "drafter") == []
    with pytest.raises(ValueError, match="unknown part"):
        calls_of(pair, "tokenizer")


# -- setting and restoring -------------------------------------------------------------------------------------


def settings_of(pair: Pair) -> list[str | None]:
    configs = [m.config for m in pair.target.modules() if isinstance(m, PreTrainedModel)]
    return [config._attn_implementation for config in configs]


@pytest.mark.parametrize("kind", ["dense", "vlm", "gpt_oss"])
def test_whatever_was_set_before_is_set_again_also_after_an_exception(kind: str) -> None:
    target = models.fresh_target(kind)
    pair = Pair(target, models.random_drafter(target))
    attention.set_attention(pair, "eager")
    before = settings_of(pair)
    with pytest.raises(RuntimeError, match="inside"), use(pair, "flash_tree", "both"):
        assert attention_backend(pair) == attention_backend(pair, "drafter") == pair.attention == "flash_tree"
        with use(pair, "eager"):
            assert (pair.attention, attention_backend(pair, "drafter")) == ("eager", "flash_tree")
        assert pair.attention == "flash_tree"
        raise RuntimeError("inside")
    assert settings_of(pair) == before
    assert (pair.attention, attention_backend(pair, "drafter")) == ("eager", "sdpa")


def test_a_towers_own_attention_is_left_alone() -> None:
    pair = Pair(models.fresh_target("vlm"))
    with use(pair, "flash_tree"):
        assert pair.target.config.vision_config._attn_implementation == "sdpa"
        assert pair.target.config.text_config._attn_implementation == "ddlab_tree"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flash_attention_2", "not available: it needs a CUDA device and the package flash-attn"),
        ("sdpa:cudnn", "not available: it needs a CUDA device"),
        ("sdpa:flash", r"the target's layer 0: sdpa:flash drops attention sinks.*use attention=\"flash_tree\" or"),
        ("flash_tee", "did you mean 'flash_tree'"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without CUDA lacks")
def test_an_illegal_backend_is_refused_and_nothing_is_changed(name: str, message: str) -> None:
    pair = Pair(models.fresh_target("gpt_oss"))
    before = settings_of(pair)
    with pytest.raises(ValueError, match=message), use(pair, name):
        raise AssertionError("it ran")
    with pytest.raises(ValueError, match=message):
        attention.set_attention(pair, name)
    assert settings_of(pair) == before


def test_only_the_kinds_of_calls_that_will_be_made_count(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(models.fresh_target("dense"))
    monkeypatch.setattr(attention, "available", lambda name: None)
    monkeypatch.setattr(attention, "_set", lambda model, name: None)
    on_cuda = [(i, replace(c, device="cuda", dtype=torch.bfloat16)) for i, c in calls_of(pair)]
    monkeypatch.setattr(attention, "calls_of", lambda pair, part: on_cuda)
    with use(pair, "sdpa:flash", kinds=("prefill", "step")):
        pass
    with pytest.raises(ValueError, match="takes no tree mask"), use(pair, "sdpa:flash"):
        pass


def test_a_class_that_cannot_be_set_is_refused_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(models.fresh_target("dense"))
    monkeypatch.setattr(type(pair.text_model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(ValueError, match="does not let its attention be set"), use(pair, "flash_tree"):
        pass
    assert pair.attention == "sdpa"


def test_a_drafter_that_is_not_there_cannot_be_set() -> None:
    pair = Pair(models.fresh_target("dense"))
    with pytest.raises(ValueError, match="no drafter"), use(pair, "eager", "drafter"):
        pass
    with use(pair, "eager", "both"):
        assert pair.attention == "eager"


def test_a_maskless_backend_set_by_hand_is_refused_before_the_forward_of_a_tree() -> None:
    pair = Pair(models.fresh_target("dense"))
    state = TargetState(pair)
    state.prefill([5, 6, 7])
    pair.text_model.config._attn_implementation = "flash_attention_2"
    ran: list[int] = []
    pair.target.register_forward_pre_hook(lambda *a: ran.append(1))
    with pytest.raises(ValueError, match=r"takes no tree mask.*attention=\"sdpa\""):
        state.verify(tree_of([-1, 0, 0], 0, models.VOCAB))
    assert not ran


# -- loading -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    yield save_pair(tmp_path)


@pytest.mark.parametrize("name", ["flash_tree", "sdpa:math", "sdpa:flash"])
def test_a_pair_loads_on_a_backend_of_ours(folders: tuple[Path, Path], name: str) -> None:
    pair = load_pair(*folders, attention=name)
    described = describe_pair(pair)
    assert pair.attention == described["attention"] == described["drafter"]["attention"] == name
    assert pair.source["attention"] == name and name in repr(pair)
    ids = [5, 9, 33, 2]
    assert torch.allclose(
        models.path_logits(pair.target, ids), models.path_logits(models.target("dense"), ids), atol=1e-5
    )


def test_auto_without_cuda_is_the_default(folders: tuple[Path, Path]) -> None:
    pair = load_pair(*folders, attention="auto", device="cpu")
    assert (pair.attention, attention_backend(pair, "drafter"), pair.source["attention"]) == ("sdpa", "sdpa", "auto")


def test_auto_is_flash_tree_on_cuda_in_half_precision_where_it_is_legal(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(models.target("gpt_oss"))
    plain = calls_of(pair)
    monkeypatch.setattr(attention, "available", lambda name: None)
    for changes, expected in (
        ({"device": "cuda", "dtype": torch.bfloat16}, "flash_tree"),
        ({"device": "cuda", "dtype": torch.bfloat16, "head_dim": 320}, "eager"),
        ({"device": "cuda"}, "eager"),
        ({"dtype": torch.bfloat16}, "eager"),
    ):
        monkeypatch.setattr(
            attention, "calls_of", lambda pair, part, c=changes: [(i, replace(x, **c)) for i, x in plain]
        )
        assert attention.best(pair) == expected


def test_a_drafter_that_cannot_follow_keeps_sdpa_under_auto_and_it_is_said(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddlab import pair as pair_module

    monkeypatch.setattr(pair_module, "best", lambda pair, part: "flash_tree" if part == "target" else "sdpa")
    with pytest.warns(UserWarning, match="the drafter keeps sdpa"):
        pair = load_pair(*folders, attention="auto")
    assert (pair.attention, attention_backend(pair, "drafter")) == ("flash_tree", "sdpa")


def test_a_name_that_cannot_serve_the_target_is_refused_naming_what_can(tmp_path: Path) -> None:
    models.target("gpt_oss").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"layer 0: sdpa:math drops attention sinks.*\"flash_tree\" or .*\"eager\""):
        load_pair(tmp_path, attention="sdpa:math")
    assert load_pair(tmp_path, attention="flash_tree").attention == "flash_tree"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without CUDA lacks")
def test_a_backend_that_is_not_there_is_refused_before_weights_are_read(folders: tuple[Path, Path]) -> None:
    (folders[0] / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(ValueError, match="sdpa:efficient' is not available: it needs a CUDA device"):
        load_pair(*folders, attention="sdpa:efficient")


# -- single kernels --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sdpa:math", "sdpa:flash"])
def test_one_sdpa_kernel_refuses_what_it_would_get_wrong(name: str) -> None:
    run = kernels.sdpa_forward(name)
    query, key, value = inputs(3, 5, 4, 2, 16, torch.float32, 6)
    seen = torch.ones(3, 5, dtype=torch.bool).tril(2)
    for mask in (seen[None, None], torch.zeros(1, 1, 3, 5).masked_fill(~seen, torch.finfo(torch.float32).min)):
        assert error(run(Layer(), query, key, value, mask)[0], by_hand(query, key, value, seen)) < 1e-5
    for mask, keywords, message in (
        (None, {}, "3 rows over 5 keys are causal over the first keys"),
        (torch.zeros(3, 5), {}, r"got \[3, 5\]"),
        (torch.zeros(1, 1, 3, 4), {}, r"got \[1, 1, 3, 4\]"),
        (torch.ones(1, 1, 3, 5).long(), {}, "boolean or an additive"),
        (seen[None, None], {"s_aux": torch.zeros(4)}, "would drop s_aux"),
        (seen[None, None], {"softcap": 30.0}, "would drop softcap"),
    ):
        with pytest.raises(ValueError, match=message):
            run(Layer(), query, key, value, mask, **keywords)


def test_a_kernel_that_is_not_there_is_no_other_kernel() -> None:
    query, key, value = inputs(3, 3, 4, 2, 16, torch.float32, 6)
    with pytest.raises(ValueError, match="sdpa:cudnn has no kernel for query"):
        kernels.sdpa_forward("sdpa:cudnn")(Layer(), query, key, value, None)


def test_flex_gets_the_element_mask_as_a_block_mask_never_densely(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[Any] = []
    monkeypatch.setattr(kernels, "flex_attention_forward", lambda m, q, k, v, mask, **_: handed.append(mask))
    query, key, value = inputs(4, 6, 4, 2, 16, torch.float32, 7)
    tree = tree_of([-1, 0, 0, 1], 0, 60)
    (mask,) = tree_masks(tree, 2, [("layer", None)], torch.float32, CPU).values()
    for given_as in (mask, mask == 0):
        kernels.flex_forward(Layer(), query, key, value, given_as)
        block = handed.pop()
        row, column = torch.meshgrid(torch.arange(4), torch.arange(6), indexing="ij")
        assert torch.equal(block.mask_mod(0, 0, row, column), mask[0, 0] == 0)
        assert block.seq_lengths == (4, 6)
    with pytest.raises(ValueError, match=r"a block mask over \(4, 6\) for 4 rows and 5 keys"):
        kernels.flex_forward(Layer(), query, key[:, :, :5], value[:, :, :5], block)
    with pytest.raises(ValueError, match="lets every row see every key"):
        kernels.flex_forward(Layer(), query, key, value, None)
    with pytest.raises(ValueError, match=r"got \[1, 1, 4, 5\]"):
        kernels.flex_forward(Layer(), query, key, value, mask[..., :5])
    assert not handed
