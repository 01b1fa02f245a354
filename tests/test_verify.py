"""One forward over a tree: masks, positions, dtypes, memory, and what stays as it was."""

from __future__ import annotations

import warnings

import models
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from strategies import parent_lists, scripted, tree_of
from test_exact import pair_of, plain_text, worst

from ddlab.decode import Decoder, generate
from ddlab.oracle import path_logits
from ddlab.pair import Pair
from ddlab.sampling import Sampling
from ddlab.tree import DraftTree
from ddlab.verify import TargetState, tree_masks

FULL, SLIDING = ("full_attention", None), ("sliding_attention", 8)


@given(parent_lists(), st.integers(0, 30), st.integers(1, 9))
def test_masks_show_the_committed_text_and_a_nodes_own_ancestors(parents: list[int], start: int, window: int) -> None:
    tree = tree_of(parents, 0, 60)
    kinds = [FULL, ("sliding_attention", window)]
    masks = tree_masks(tree, start, kinds, torch.float32, torch.device("cpu"))
    positions = [*range(start), *(start + tree.depth).tolist()]  # of the keys
    for kind, reach in kinds:
        first = 0 if reach is None else max(0, start - reach + 1)
        seen = masks[kind][0, 0] == 0
        assert seen.shape == (len(tree), start - first + len(tree))
        for node in range(len(tree)):
            path = {start + n for n in tree.path(node)}
            for column, key in enumerate(range(first, start + len(tree))):
                near = reach is None or start + tree.depth[node] - positions[key] < reach
                assert bool(seen[node, column]) == (near and (key < start or key in path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masks_are_additive_and_finite_in_the_models_own_dtype(dtype: torch.dtype) -> None:
    """Legal on eager, which adds whatever mask it gets, and on sdpa; half precision has no infinity in it."""
    tree = DraftTree.from_parents([1, 2, 3, 4], [-1, 0, 0, 1])
    for mask in tree_masks(tree, 12, [FULL, SLIDING], dtype, torch.device("cpu")).values():
        assert mask.dtype == dtype and mask.shape[:2] == (1, 1) and torch.isfinite(mask).all()
        assert set(mask.unique().tolist()) == {0.0, torch.finfo(dtype).min}


@pytest.mark.parametrize("kind", ["dense", "swa", "hybrid", "vlm", "gemma3"])
def test_eager_and_sdpa_give_the_same_logits_on_a_tree(kind: str) -> None:
    target = models.target(kind)
    text, tree = [5, 6, 7, 8, 9] * 3, tree_of([-1, 0, 0, 1, 1, 3, 2], 4, models.VOCAB)
    logits = {}
    for attention in ("sdpa", "eager"):
        before = target.config._attn_implementation
        target.set_attn_implementation(attention)
        try:
            state = TargetState(Pair(target))
            state.prefill(text)
            logits[attention] = state.verify(tree)
        finally:
            target.set_attn_implementation(before)
    assert worst(logits["eager"], logits["sdpa"]) < 1e-5


def test_a_nested_target_set_to_eager_never_runs_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    target = models.target("vlm")
    calls: list[int] = []
    plain = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or plain(*a, **k)
    )
    before = target.config._attn_implementation
    for attention, expected in (("eager", False), ("sdpa", True)):
        target.set_attn_implementation(attention)
        pair = Pair(target)
        assert pair.attention == attention
        state = TargetState(pair)
        state.prefill([1, 2, 3])
        state.verify(DraftTree.from_parents([1, 2, 3], [-1, 0, 0]))
        assert bool(calls) == expected
    target.set_attn_implementation(before)


def test_states_keep_their_dtypes_in_a_bfloat16_hybrid() -> None:
    pair = pair_of("hybrid", torch.bfloat16)
    decoder = Decoder(pair, "ddtree", budget=6, max_new_tokens=9, stop_token_ids=())
    decoder.register_hook("draft", scripted([3] * 40, 3, models.VOCAB, "random"))
    decoder.start([1, 2, 3, 4, 5])
    for _ in range(3):
        decoder.step()
        for state in decoder._text.target.snapshot().linear:
            assert state is None or (state[0].dtype, state[1].dtype) == (torch.bfloat16, torch.float32)
    decoder.back()
    assert all(s is None or s[1].dtype == torch.float32 for s in decoder._text.target.snapshot().linear)
    assert decoder.trace.header["pair"]["recurrent_state_dtype"] == "float32"


def test_what_a_verify_keeps_is_what_the_formula_says_and_no_state_per_node() -> None:
    """Scaled down from 27B: per linear layer n * (conv channels + keys + writes + log decays), linear in the rows."""
    pair = pair_of("hybrid")
    heads, key_heads, dim, channels, kernel, layers = 4, 2, 16, 128, 4, 3
    for n in (8, 32, 96):
        state = TargetState(pair)
        state.prefill([1, 2, 3, 4, 5])
        state.verify(tree_of([-1, *(i // 3 for i in range(n - 1))], 0, models.VOCAB))
        writes = n * (key_heads * dim + heads * dim + heads)
        assert state.cache.pending_nbytes() == 4 * layers * (writes + (kernel + n) * channels)
    assert state.cache.pending_nbytes() < 4 * layers * n * heads * dim * dim  # what a state per node would take


def test_peak_memory_of_a_verify_is_near_what_it_keeps_and_far_below_a_state_per_row() -> None:
    """The 27B target's linear layers (dims 128, three value heads to a key head, conv 4), fewer heads and layers."""
    config = models.target_config("hybrid8")
    config.linear_num_key_heads, config.linear_num_value_heads = 2, 6
    config.linear_key_head_dim = config.linear_value_head_dim = 128
    torch.manual_seed(0)
    pair = Pair(transformers.Qwen3_5ForCausalLM(config).eval())
    one_state = 6 * 6 * 128 * 128 * 4  # bytes: linear layers * v_heads * k_dim * v_dim * float32
    for n in (32, 64, 128):
        state = TargetState(pair)
        state.prefill([1, 2, 3, 4, 5])
        tree = tree_of([-1, *(i // 3 for i in range(n - 1))], 0, models.VOCAB)
        with torch.profiler.profile(profile_memory=True) as profile:
            state.verify(tree)
        held = peak = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        kept = state.cache.pending_nbytes()
        assert kept / 2 < peak < 2 * kept
        assert peak < n * one_state / 20


def test_nothing_that_transformers_will_remove_is_called() -> None:
    target = models.target("hybrid")
    pair = Pair(target, models.random_drafter(target, block=4))
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        warnings.simplefilter("error", FutureWarning)
        generate(pair, [5, 6, 7], method="ddtree", budget=5, max_new_tokens=6, stop_token_ids=())


def test_a_text_may_contain_the_drafters_mask_id() -> None:
    target = models.target("dense")
    text = plain_text(Pair(target), [5, 17, 40], 12, Sampling())
    for mask_id in text[4:7]:
        pair = Pair(target, models.random_drafter(target, block=4, mask_token_id=mask_id))
        trace = generate(pair, text[:3], method="ddtree", budget=6, max_new_tokens=12, stop_token_ids=())
        assert trace.output_ids == text[3:] and mask_id in trace.output_ids


def test_a_tree_round_accepts_at_least_what_its_chain_would() -> None:
    pair = pair_of("hybrid")
    text = plain_text(pair, [9, 1, 7], 46, Sampling())
    decoder = Decoder(pair, "ddtree", budget=20, max_new_tokens=40, stop_token_ids=())
    draft = scripted(text, 5, models.VOCAB, "mixed", seed=4)
    decoder.register_hook("draft", draft)
    decoder.start(text[:3])
    while not decoder.finished:
        chain = DraftTree.chain(draft(decoder, None)).tokens[1:].tolist()
        expected = text[len(decoder.ids) :]
        hit = next((i for i, (a, b) in enumerate(zip(chain, expected, strict=False)) if a != b), len(chain))
        step = decoder.step()
        inside = all(
            any(step.tree.depth[n] == d + 1 and step.tree.tokens[n] == chain[d] for n in range(len(step.tree)))
            for d in range(hit)
        )
        assert not inside or step.accepted >= min(hit, len(step.emitted))


@pytest.mark.parametrize("length", [65, 130])
def test_long_texts_read_at_once_or_token_by_token_verify_alike(length: int) -> None:
    """Past one and two chunks of 64: the chunk form and the recurrent form of the delta rule."""
    pair = pair_of("hybrid")
    text = np.random.default_rng(1).integers(0, models.VOCAB, length).tolist()
    tree = tree_of([-1, 0, 0, 1, 2], 0, models.VOCAB)
    at_once, stepwise = TargetState(pair), TargetState(pair)
    at_once.prefill(text)
    for token in text:
        stepwise.prefill([token])
    assert worst(at_once.verify(tree), stepwise.verify(tree)) < 1e-5
    assert worst(at_once.verify(tree), path_logits(pair, text, tree)) < 1e-5


def test_a_kernel_swapped_in_after_loading_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    state = TargetState(pair_of("hybrid"))
    state.prefill([1, 2, 3])
    monkeypatch.setattr(qwen, "torch_chunk_gated_delta_rule", qwen.torch_chunk_gated_delta_rule.__wrapped__)
    with pytest.raises(RuntimeError, match="without the tree"):
        state.verify(DraftTree.from_parents([1, 2, 3], [-1, 0, 0]))
