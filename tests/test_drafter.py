"""DFlash drafting, held to a plain form of the published drafter and to Transformers' own DFlash classes."""

from __future__ import annotations

import json
from typing import Any

import models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from ddlab.drafter import Drafter, FeatureTap

MIXED = ("sliding_attention", "full_attention")
FLAGS = {
    "default": {},
    "all bidirectional": {"is_causal": False},
    "all causal": {"dflash_config.causal_head": True},
    "table": {"dflash_config.block_attention": dict(sliding_attention="bidirectional", full_attention="causal")},
}
IN_BLOCK = {  # what each flag means for sliding layers, for full layers
    "default": ("causal", "bidirectional"),
    "all bidirectional": ("bidirectional", "bidirectional"),
    "all causal": ("causal", "causal"),
    "table": ("bidirectional", "causal"),
}


def config_with(changes: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    """A drafter config for the dense target with fields changed; None removes; dflash_config.x is nested."""
    config = models.drafter_config(models.target("dense"), **kwargs)
    for name, value in changes.items():
        place = config["dflash_config"] if name.startswith("dflash_config.") else config
        place[name.removeprefix("dflash_config.")] = value
        if value is None:
            del place[name.removeprefix("dflash_config.")]
    return config


def drafter_of(config: dict[str, Any], seed: int = 0, **kwargs: Any) -> Drafter:
    state = models.drafter_state({**config_with({}), **config}, seed)  # sizes stay known where a test removes them
    return Drafter.from_state(config, state, **kwargs)


def features_of(rows: int, drafter: Drafter, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, drafter.model.encoder.fc.in_features, generator=torch.Generator().manual_seed(seed))


def embed() -> torch.Tensor:
    return models.target("dense").get_input_embeddings().weight


def head(hidden: torch.Tensor) -> torch.Tensor:
    return models.target("dense").lm_head(hidden)


def proposed(drafter: Drafter, features: torch.Tensor, anchor: int = 7) -> torch.Tensor:
    cache = drafter.new_cache()
    drafter.ingest(cache, features)
    return drafter.propose(cache, anchor, embed(), head)


# -- one block, against the published drafter in plain torch -----------------------------------------------


def visible(kind: str, causal: bool, query: int, key: int, window: int) -> bool:
    return not (causal and key > query) and not (kind == "sliding_attention" and abs(query - key) >= window)


def reference(
    config: dict[str, Any],
    state: dict[str, torch.Tensor],
    features: torch.Tensor,
    anchor: int,
    causal: dict[str, bool],
) -> torch.Tensor:
    """Logits [B, vocab] of every slot of one block: no cache, no class, z-lab's tensor names."""
    d, theta, block = config["head_dim"], config["rope_theta"], config["block_size"]
    frequency = 1.0 / theta ** (torch.arange(0, d, 2).float() / d)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], state[f"{name}.weight"], config["rms_norm_eps"])

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def rotate(x: torch.Tensor, start: int) -> torch.Tensor:  # [tokens, heads, d]
        angle = torch.arange(start, start + len(x))[:, None, None] * torch.cat((frequency, frequency))
        half = torch.cat((-x[..., d // 2 :], x[..., : d // 2]), -1)
        return x * angle.cos() + half * angle.sin()

    context = norm(linear(features, "fc"), "hidden_norm")
    n = len(context)
    x = embed()[[anchor] + [config["dflash_config"]["mask_token_id"]] * (block - 1)]
    for i, kind in enumerate(config["layer_types"]):
        layer = f"layers.{i}."
        noise = norm(x, layer + "input_layernorm")
        both = torch.cat((context, noise))  # the context is not normed again
        attn = layer + "self_attn."
        q = rotate(norm(linear(noise, attn + "q_proj").view(block, -1, d), attn + "q_norm"), n)
        k = rotate(norm(linear(both, attn + "k_proj").view(n + block, -1, d), attn + "k_norm"), 0)
        v = linear(both, attn + "v_proj").view(n + block, -1, d)
        groups = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(groups, 1)) * d**-0.5
        seen = [
            [visible(kind, causal[kind], n + a, b, config["sliding_window"]) for b in range(n + block)]
            for a in range(block)
        ]
        weights = scores.masked_fill(~torch.tensor(seen), -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(groups, 1)).reshape(block, -1)
        x = x + linear(out, attn + "o_proj")
        y = norm(x, layer + "post_attention_layernorm")
        gated = F.silu(linear(y, layer + "mlp.gate_proj")) * linear(y, layer + "mlp.up_proj")
        x = x + linear(gated, layer + "mlp.down_proj")
    return head(norm(x, "norm"))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("context", [0, 1, 5, 20])
def test_a_block_equals_the_published_drafter(flag: str, context: int, attention: str) -> None:
    config = config_with(FLAGS[flag], layer_types=MIXED)
    drafter = drafter_of(config, attention=attention)
    features = features_of(context, drafter)
    causal = dict(zip(MIXED, (way == "causal" for way in IN_BLOCK[flag]), strict=True))
    expected = reference(config, models.drafter_state(config), features, 7, causal)[1:]
    torch.testing.assert_close(proposed(drafter, features), expected, atol=1e-5, rtol=1e-5)


def test_a_window_shorter_than_the_block_also_cuts_inside_the_block() -> None:
    config = config_with({"is_causal": False}, layer_types=("sliding_attention",) * 2, window=3, block=7)
    drafter = drafter_of(config)
    features = features_of(9, drafter)
    expected = reference(config, models.drafter_state(config), features, 7, dict.fromkeys(MIXED, False))[1:]
    torch.testing.assert_close(proposed(drafter, features), expected, atol=1e-5, rtol=1e-5)


def test_attention_biases_are_part_of_the_drafter() -> None:
    config = config_with({"attention_bias": True})
    state = models.drafter_state(config)
    for i in range(2):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            rows = len(state[f"layers.{i}.self_attn.{name}.weight"])
            generator = torch.Generator().manual_seed(rows + i)
            state[f"layers.{i}.self_attn.{name}.bias"] = torch.randn(rows, generator=generator)
    drafter = Drafter.from_state(config, state)
    features = features_of(6, drafter)
    expected = reference(config, state, features, 7, dict.fromkeys(MIXED, False))[1:]
    torch.testing.assert_close(proposed(drafter, features), expected, atol=1e-5, rtol=1e-5)


def test_scale_multiplier_and_soft_cap_of_the_config_are_applied() -> None:
    plain = config_with({})
    extra = {"input_embedding_scale": 0.5, "output_multiplier": 0.3, "final_logit_softcapping": 2.0}
    drafter = drafter_of(config_with({f"dflash_config.{k}": v for k, v in extra.items()}))
    assert drafter.settings.scales_logits
    features = features_of(6, drafter)
    cache = drafter.new_cache()
    drafter.ingest(cache, features)
    unscaled = drafter_of(plain)
    cache_plain = unscaled.new_cache()
    unscaled.ingest(cache_plain, features)
    bare = unscaled.propose(cache_plain, 7, embed() * 0.5, head)
    expected = torch.tanh(bare * 0.3 / 2.0) * 2.0
    torch.testing.assert_close(drafter.propose(cache, 7, embed(), head), expected, atol=1e-5, rtol=1e-5)


# -- Transformers' own classes -----------------------------------------------------------------------------


@pytest.mark.parametrize("flag", FLAGS)
def test_rounds_equal_transformers_class_and_cache_fed_the_plain_way(flag: str) -> None:
    drafter = drafter_of(config_with(FLAGS[flag], layer_types=MIXED))
    causal = dict(zip(MIXED, (way == "causal" for way in IN_BLOCK[flag]), strict=True))
    cache, plain, length, block = drafter.new_cache(), DFlashCache(), 0, drafter.block_size
    for rows, anchor in ((6, 3), (1, 50), (4, 9), (9, 11)):
        features = features_of(rows, drafter, seed=rows)
        length += rows
        masks = {}
        for kind in MIXED:
            seen = [
                [visible(kind, causal[kind], length + a, b, 8) for b in range(length + block)] for a in range(block)
            ]
            masks[kind] = torch.where(torch.tensor(seen), 0.0, torch.finfo(torch.float32).min)[None, None]
        with torch.no_grad():
            out = drafter.model(
                noise_embeds=embed()[[anchor] + [0] * (block - 1)][None],
                context_hidden_states=features[None],
                attention_mask=masks,
                position_ids=torch.arange(length - rows, length + block)[None],
                cache=plain,
            )
        plain.crop(-block)
        drafter.ingest(cache, features)
        logits = drafter.propose(cache, anchor, embed(), head)
        torch.testing.assert_close(logits, head(out.last_hidden_state[0, 1:]), atol=1e-5, rtol=1e-5)


def test_chain_drafts_equal_transformers_candidate_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    target = models.target("dense")
    drafter = models.random_drafter(target)  # full layers, bidirectional: Transformers' conventions
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    original = DFlashTokenCandidateGenerator.get_candidates

    def spy(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        ids, logits = original(self, input_ids, *args, **kwargs)
        if logits is not None:
            seen.append((input_ids[0].clone(), logits[0].clone()))
        return ids, logits

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", spy)
    prompt = torch.tensor([[5, 9, 33, 2, 71, 14]])
    target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=drafter.model,
        speculation_type="dflash",
        do_sample=False,
        max_new_tokens=12,
        pad_token_id=0,
    )
    assert len(seen) >= 3
    cache = drafter.new_cache()
    for ids, logits in seen:
        with FeatureTap(target.model, drafter.settings.target_layer_ids) as tap, torch.no_grad():
            target(input_ids=ids[None, :-1], use_cache=False)
        drafter.ingest(cache, tap.features()[cache.length :])
        ours = drafter.propose(cache, int(ids[-1]), embed(), head)
        torch.testing.assert_close(ours, logits.float(), atol=1e-4, rtol=1e-4)
        assert ours.argmax(-1).tolist() == logits.argmax(-1).tolist()


def test_a_native_checkpoint_drafts_like_transformers_class(tmp_path: Any) -> None:
    torch.manual_seed(0)
    config = MuseGlimmerAssistantConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=64,
        block_size=5,
        mask_token_id=4,
        target_layer_ids=[1, 3],
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    native = MuseGlimmerAssistantModel(config)
    models.randomize(native)
    native.eval().save_pretrained(tmp_path)
    drafter = Drafter.from_pretrained(tmp_path)
    assert drafter.settings.layout == "transformers"
    assert drafter.settings.block_attention["sliding_attention"] == "bidirectional"
    assert drafter.settings.rope["rope_theta"] == MuseGlimmerAssistantConfig.default_theta
    features = features_of(6, drafter)
    with torch.no_grad():
        out = native(
            noise_embeds=embed()[[7, 4, 4, 4, 4]][None],
            context_hidden_states=features[None],
            cache=(cache := DFlashCache(config=config)),
            attention_mask=cache.set_previous_accepted_tokens(6),
        )
    expected = head(out.last_hidden_state[0, 1:])
    torch.testing.assert_close(proposed(drafter, features), expected, atol=1e-5, rtol=1e-5)


# -- what a block is made of -------------------------------------------------------------------------------


def test_slot_0_holds_the_anchor_and_the_others_the_mask() -> None:
    drafter = drafter_of(config_with({"dflash_config.mask_token_id": 4}))
    looked_up = []
    drafter.model.register_forward_pre_hook(lambda m, a, k: looked_up.append(k["noise_embeds"][0]), with_kwargs=True)
    cache = drafter.new_cache()
    for anchor in (7, 50):
        drafter.ingest(cache, features_of(3, drafter))
        assert drafter.block_ids(anchor) == [anchor, 4, 4, 4, 4]
        logits = drafter.propose(cache, anchor, embed(), head)
        assert torch.equal(looked_up.pop(), embed()[[anchor, 4, 4, 4, 4]])
        assert logits.shape == (4, models.VOCAB)
        assert logits.dtype == torch.float32


def test_positions_are_those_of_the_text_without_gap_or_repeat() -> None:
    drafter = drafter_of(config_with({}, block=4))
    seen: list[list[int]] = []
    drafter.model.rotary_emb.register_forward_pre_hook(lambda m, a: seen.append(a[1][0].tolist()))
    cache, start = drafter.new_cache(), 0
    for rows in (6, 3, 1, 4):  # a prompt of 6, then rounds with 2, 0 and 3 accepted drafts (and the root)
        drafter.ingest(cache, features_of(rows, drafter))
        drafter.propose(cache, 7, embed(), head)
        start += rows
        assert seen == [list(range(start - rows, start)), list(range(start, start + 4))]
        seen.clear()


def test_sliding_layers_give_exactly_no_weight_to_older_keys() -> None:
    drafter = drafter_of(config_with({}, layer_types=MIXED), attention="eager")
    weights = []
    for layer in drafter.model.layers:
        layer.self_attn.register_forward_hook(lambda m, a, out: weights.append(out[1][0]))  # [heads, B, keys]
    cache = drafter.new_cache()
    drafter.ingest(cache, features_of(20, drafter))
    drafter.propose(cache, 7, embed(), head)
    sliding, full = weights
    first = 25 - sliding.shape[-1]  # keys that no query of the block can see are not even passed
    for a in range(5):
        for b in range(first, 25):
            outside = 20 + a - b >= 8 or b > 20 + a
            assert bool((sliding[:, a, b - first] == 0).all()) == outside
    assert first <= 20 - 7
    assert full.shape[-1] == 25
    assert bool((full > 0).all())


def test_features_older_than_the_window_change_nothing_in_sliding_layers_and_something_in_full_ones() -> None:
    for kind, moved in (("sliding_attention", False), ("full_attention", True)):
        drafter = drafter_of(config_with({}, layer_types=(kind,) * 2))
        features = features_of(20, drafter)
        changed = features.clone()
        changed[:12] += 1.0  # the first query is at 20 and sees from 13 on
        assert torch.equal(proposed(drafter, features), proposed(drafter, changed)) != moved


def test_a_later_mask_slot_is_unseen_in_causal_layers_only() -> None:
    for flag, equal in (("all causal", True), ("all bidirectional", False)):
        drafter = drafter_of(config_with(FLAGS[flag]))
        shorter = drafter_of(config_with(FLAGS[flag], block=4))
        features = features_of(6, drafter)
        full, cut = proposed(drafter, features)[:3], proposed(shorter, features)
        assert torch.allclose(full, cut, atol=1e-5) == equal


def test_masks_say_what_the_block_sees() -> None:
    drafter = drafter_of(config_with({}, layer_types=MIXED))
    masks = drafter.masks(20)
    assert {kind: tuple(m.shape) for kind, m in masks.items()} == dict.fromkeys(MIXED, (5, 25))
    for a in range(5):
        for b in range(25):
            assert bool(masks["full_attention"][a, b])
            assert bool(masks["sliding_attention"][a, b]) == (0 <= 20 + a - b < 8)


def test_a_layout_that_drafts_from_the_anchor_gives_one_more_row_and_is_never_guessed() -> None:
    usual = drafter_of(config_with({}, block=4))
    shifted = drafter_of(config_with({"dflash_config.drafts_from": "anchor"}, block=4))
    told = drafter_of(config_with({}, block=4), drafts_from="anchor")
    assert (usual.depth, shifted.depth, told.depth) == (3, 4, 4)
    assert usual.settings.sources["drafts_from"] == "default (mask)"
    assert shifted.settings.sources["drafts_from"] == "dflash_config.drafts_from"
    assert told.settings.sources["drafts_from"] == "argument drafts_from"
    features = features_of(6, usual)
    torch.testing.assert_close(proposed(shifted, features)[1:], proposed(usual, features))
    assert torch.equal(proposed(shifted, features), proposed(told, features))


def test_a_block_of_one_drafts_nothing() -> None:
    drafter = drafter_of(config_with({}, block=1))
    assert proposed(drafter, features_of(6, drafter)).shape == (0, models.VOCAB)


# -- the draft cache ---------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(sum))
def test_context_in_pieces_equals_context_at_once(pieces: list[int]) -> None:
    drafter = models.random_drafter(models.target("dense"), layer_types=MIXED)
    features = features_of(sum(pieces), drafter)
    cache = drafter.new_cache()
    for piece in features.split(pieces):
        drafter.ingest(cache, piece)
        drafter.propose(cache, 7, embed(), head)
    torch.testing.assert_close(
        drafter.propose(cache, 7, embed(), head), proposed(drafter, features), atol=1e-5, rtol=1e-5
    )


def test_propose_leaves_the_context_as_it_was() -> None:
    drafter = drafter_of(config_with({}, layer_types=MIXED))
    cache = drafter.new_cache()
    drafter.ingest(cache, features_of(6, drafter))
    before = [k[:, :, :6].clone() for k in (*cache.keys, *cache.values)]
    first = drafter.propose(cache, 7, embed(), head)
    drafter.propose(cache, 50, embed(), head)
    assert cache.length == 6
    assert all(torch.equal(a, b[:, :, :6]) for a, b in zip(before, (*cache.keys, *cache.values), strict=True))
    assert torch.equal(drafter.propose(cache, 7, embed(), head), first)


def test_truncate_and_the_same_context_again_restore_the_cache_bit_for_bit() -> None:
    drafter = drafter_of(config_with({}, layer_types=MIXED))
    features = features_of(9, drafter)
    cache = drafter.new_cache()
    drafter.ingest(cache, features[:6])
    drafter.ingest(cache, features[6:])
    first = drafter.propose(cache, 7, embed(), head)
    cache.truncate(6)
    drafter.ingest(cache, features_of(2, drafter, seed=5))  # another continuation, larger than the buffer's start
    drafter.ingest(cache, features_of(80, drafter, seed=6))
    cache.truncate(6)
    drafter.ingest(cache, features[6:])
    assert torch.equal(drafter.propose(cache, 7, embed(), head), first)


def test_truncate_refuses_to_grow() -> None:
    cache = drafter_of(config_with({})).new_cache()
    with pytest.raises(ValueError, match="0 tokens to 1"):
        cache.truncate(1)


def test_a_clone_is_independent() -> None:
    drafter = drafter_of(config_with({}))
    cache = drafter.new_cache()
    drafter.ingest(cache, features_of(6, drafter))
    first = drafter.propose(cache, 7, embed(), head)
    copy = cache.clone()
    drafter.ingest(copy, features_of(3, drafter, seed=4))
    copy.truncate(0)
    drafter.ingest(copy, features_of(9, drafter, seed=5))
    assert cache.length == 6
    assert torch.equal(drafter.propose(cache, 7, embed(), head), first)


def test_a_cache_made_in_inference_mode_can_be_used_outside() -> None:
    drafter = drafter_of(config_with({}))
    with torch.inference_mode():
        cache = drafter.new_cache()
        drafter.ingest(cache, features_of(6, drafter))
        first = drafter.propose(cache, 7, embed(), head)
    assert torch.equal(drafter.propose(cache, 7, embed(), head), first)


def test_features_of_another_width_are_refused() -> None:
    drafter = drafter_of(config_with({}))
    with pytest.raises(ValueError, match=r"\[3, 64\].*\[tokens, 128\]"):
        drafter.ingest(drafter.new_cache(), torch.zeros(3, 64))


def test_a_bfloat16_drafter_works_with_a_float32_target() -> None:
    drafter = drafter_of(config_with({}), dtype="bfloat16")
    features = features_of(6, drafter)
    logits = proposed(drafter, features)
    exact = proposed(drafter_of(config_with({})), features)
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().max() < 0.05 * exact.abs().max()


# -- context features --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", models.KINDS)
def test_features_are_the_outputs_of_the_listed_layers_in_the_listed_order(kind: str) -> None:
    target = models.target(kind)
    text = next(m for m in target.modules() if hasattr(m, "layers") and hasattr(m, "embed_tokens"))
    hooked: dict[int, torch.Tensor] = {}

    def keep(i: int) -> Any:
        return lambda m, a, out: hooked.__setitem__(i, out[0] if isinstance(out, tuple) else out)

    handles = [text.layers[i].register_forward_hook(keep(i)) for i in (0, 2)]
    ids = torch.tensor([[5, 9, 33, 2, 71, 14]])
    with FeatureTap(text, (2, 0)) as tap, torch.no_grad():
        out = target(input_ids=ids, use_cache=False, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    features, hidden = tap.features(), out.hidden_states
    assert torch.equal(features, torch.cat((hooked[2][0], hooked[0][0]), -1))
    assert torch.equal(features, torch.cat((hidden[3][0], hidden[1][0]), -1))
    assert not torch.allclose(features, torch.cat((hidden[2][0], hidden[0][0]), -1))
    assert features.shape == (6, 128)


@pytest.mark.parametrize("kind", ["dense", "hybrid", "vlm", "gpt_oss"])
def test_the_last_layer_is_taken_after_the_final_norm(kind: str) -> None:
    target = models.target(kind)
    text = next(m for m in target.modules() if hasattr(m, "layers") and hasattr(m, "embed_tokens"))
    with FeatureTap(text, (1, 3)) as tap, torch.no_grad():
        out = target(input_ids=torch.tensor([[5, 9, 33]]), use_cache=False, output_hidden_states=True)
    last = tap.features()[:, 64:]
    assert torch.equal(last, out.hidden_states[-1][0])
    torch.testing.assert_close(target.lm_head(last), out.logits[0])


def test_a_tap_removes_its_own_hooks_even_after_an_error_and_no_others() -> None:
    text = models.fresh_target("dense").model
    fired = []
    text.layers[1].register_forward_hook(lambda *a: fired.append(1))

    def counts() -> list[int]:
        return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in text.modules()]

    before = counts()
    with pytest.raises(RuntimeError, match="on the way"), FeatureTap(text, (1, 3)):
        assert sum(counts()) == sum(before) + 2
        raise RuntimeError("on the way")
    assert counts() == before
    text(input_ids=torch.tensor([[1, 2]]))
    assert fired == [1]


def test_features_before_any_forward_are_an_error() -> None:
    with (
        FeatureTap(models.target("dense").model, (1, 2)) as tap,
        pytest.raises(RuntimeError, match=r"\[1, 2\]"),
    ):
        tap.features()


# -- checkpoints: layouts ----------------------------------------------------------------------------------


def test_published_config_layouts_give_the_same_drafter() -> None:
    nested = config_with({})
    top = {**config_with({}), **nested["dflash_config"]}
    del top["dflash_config"]
    new_rope = config_with({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}})
    inner_block = config_with({"block_size": None, "dflash_config.block_size": 5})
    both = config_with({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "mask_token_id": 0})
    state = models.drafter_state(nested)
    features = features_of(6, drafter_of(nested))
    expected = proposed(drafter_of(nested), features)
    for config in (top, new_rope, inner_block, both):
        assert torch.equal(proposed(Drafter.from_state(config, state), features), expected)


def test_settings_name_the_field_behind_each_value() -> None:
    sources = drafter_of(config_with({})).settings.sources
    assert sources["block_size"] == "block_size"
    assert sources["mask_token_id"] == "dflash_config.mask_token_id"
    assert sources["target_layer_ids"] == "dflash_config.target_layer_ids"
    assert sources["block_attention"].startswith("default of the layout z-lab")
    assert sources["rope"] == "theta: rope_theta; scaling: none"
    assert sources["input_embedding_scale"] == "default (1.0)"


def test_settings_are_json() -> None:
    values = drafter_of(config_with({}, layer_types=MIXED)).settings.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["sources"]["sliding_window"] == "sliding_window"


@pytest.mark.parametrize(
    "changes",
    [
        {"mask_token_id": 5},
        {"target_layer_ids": [0, 2]},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}},
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "rope_scaling": {"type": "linear", "factor": 2},
        },
        {"is_causal": False, "dflash_config.causal_head": True},
        {"layer_types": list(MIXED)},  # while use_sliding_window stays false
    ],
)
def test_a_config_that_says_two_things_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="says two things"):
        drafter_of(config_with(changes))


def test_old_and_new_rope_layout_give_the_same_frequencies() -> None:
    old = drafter_of(config_with({"rope_theta": 1e7}))
    new = drafter_of(config_with({"rope_theta": None, "rope_parameters": {"rope_theta": 1e7}}))
    expected = 1.0 / 1e7 ** (torch.arange(0, 16, 2).float() / 16)
    assert torch.equal(old.model.rotary_emb.inv_freq, expected)
    assert torch.equal(new.model.rotary_emb.inv_freq, expected)
    assert old.settings.rope == new.settings.rope == {"rope_type": "default", "rope_theta": 1e7}


def test_without_any_theta_it_is_that_of_the_config_class() -> None:
    settings = drafter_of(config_with({"rope_theta": None})).settings
    assert settings.rope["rope_theta"] == 10000.0
    assert settings.sources["rope"] == "theta: default (10000.0); scaling: none"


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_yarn_reaches_the_frequencies(key: str) -> None:
    yarn = {
        key: "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    old = drafter_of(config_with({"rope_theta": 1e7, "rope_scaling": yarn}))
    new = drafter_of(config_with({"rope_theta": None, "rope_parameters": {**yarn, "rope_theta": 1e7}}))
    plain = drafter_of(config_with({"rope_theta": 1e7}))
    rotary = old.model.rotary_emb
    assert torch.equal(rotary.inv_freq, new.model.rotary_emb.inv_freq)
    assert not torch.equal(rotary.inv_freq, plain.model.rotary_emb.inv_freq)
    assert rotary.attention_scaling == pytest.approx(0.1 * torch.tensor(64.0).log().item() + 1)
    assert old.settings.rope["rope_type"] == "yarn"
    assert old.settings.sources["rope"] == "theta: rope_theta; scaling: rope_scaling"


def test_layer_types_come_from_the_window_rule_when_they_are_not_listed() -> None:
    window = {"layer_types": None, "use_sliding_window": True, "max_window_layers": 1}
    assert drafter_of(config_with(window)).settings.layer_types == ("full_attention", "sliding_attention")
    assert drafter_of(config_with({"layer_types": None})).settings.layer_types == ("full_attention",) * 2


@pytest.mark.parametrize("types", ["sliding_attention", ["full_attention"], ["full_attention", "chunked_attention"]])
def test_layer_types_that_are_no_list_of_known_kinds_are_refused(types: Any) -> None:
    with pytest.raises(ValueError, match="layer_types must be a list of 2"):
        drafter_of(config_with({"layer_types": types}))


def test_in_block_attention_can_be_told_and_is_checked() -> None:
    told = drafter_of(config_with({"is_causal": False}), block_attention={"full_attention": "causal"})
    assert told.settings.block_attention["full_attention"] == "causal"
    assert told.settings.sources["block_attention"] == "argument block_attention"
    with pytest.raises(ValueError, match="causal or bidirectional"):
        drafter_of(config_with({}), block_attention={"full_attention": "casual"})


@pytest.mark.parametrize("flag", ["dflash_config.causal_head", "dflash_config.causal", "is_causal"])
def test_a_causal_head_is_causal_in_every_layer(flag: str) -> None:
    settings = drafter_of(config_with({flag: True}, layer_types=MIXED)).settings
    assert settings.block_attention == dict.fromkeys(("full_attention", "sliding_attention"), "causal")
    assert settings.sources["block_attention"] == flag


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config.mask_token_id": None}, r"mask_token_id is None.*0\.\.96"),
        ({"block_size": 0}, "block_size is 0"),
        ({"hidden_size": None, "head_dim": None}, "lacks hidden_size, head_dim"),
        (
            {"dflash_config.target_layer_ids": [1, 4]},
            "dflash_config.target_layer_ids names layer 4.*4 layers",
        ),
        ({"dflash_config.target_layer_ids": [1, 1]}, "repeats layers"),
        ({"dflash_config.target_layer_ids": "1,3"}, "must be a list"),
        ({"dflash_config.target_hidden_size": 32}, "target_hidden_size"),
        ({"dflash_config.drafts_from": "slot 0"}, "must be one of mask, anchor"),
        (
            {"layer_types": list(MIXED), "use_sliding_window": True, "sliding_window": None},
            "sliding_window is None",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ by layer type"),
    ],
)
def test_a_config_field_that_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drafter_of(config_with(changes))


def test_ids_from_the_default_spacing_are_used_and_repeats_on_a_shallow_target_are_refused() -> None:
    spaced = config_with({"dflash_config.target_layer_ids": None, "num_target_layers": 64}, layers=5)
    state = models.drafter_state({**spaced, "dflash_config": {"target_layer_ids": range(5)}})
    drafter = Drafter.from_state(spaced, state)
    assert drafter.settings.target_layer_ids == (1, 16, 31, 46, 61)
    assert "64 target layers" in drafter.settings.sources["target_layer_ids"]
    with pytest.raises(ValueError, match=r"default spacing.*4 target layers repeats layers"):
        Drafter.from_state({**spaced, "num_target_layers": 4}, state)


# -- checkpoints: architectures and tensors ----------------------------------------------------------------


def test_a_config_without_an_architecture_loads_by_its_fields() -> None:
    bare = config_with({"architectures": None})
    assert drafter_of(bare).settings.layout == "z-lab (dflash_config, rope_theta)"
    with pytest.raises(ValueError, match="unknown drafter architecture None"):
        Drafter.from_state({"model_type": "qwen3"}, {})


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'FooDFlashDraftModel'; known: DFlashDraftModel, MuseGlimmerAssistantModel"):
        drafter_of(config_with({"architectures": ["FooDFlashDraftModel"]}))


@pytest.mark.parametrize("changes", [{"architectures": ["DFlash2DraftModel"]}, {"dflash_config.selector_rank": 256}])
def test_dflash2_is_refused_by_its_config(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="DFlash2"):
        drafter_of(config_with(changes))


@pytest.mark.parametrize("name", ["candidate_selector.predecessor_codebook", "layers.0.mlp_conv.base_kernel"])
def test_dflash2_is_refused_by_its_tensors(name: str) -> None:
    config = config_with({})
    with pytest.raises(ValueError, match="DFlash2"):
        Drafter.from_state(config, {**models.drafter_state(config), name: torch.zeros(1)})


def test_missing_unexpected_and_misshaped_tensors_are_listed_in_one_error() -> None:
    config = config_with({})
    state = models.drafter_state(config)
    del state["hidden_norm.weight"], state["layers.1.mlp.up_proj.weight"]
    state["layers.0.gate.weight"] = torch.zeros(3)
    state["fc.weight"] = torch.zeros(64, 64)
    with pytest.raises(ValueError) as error:
        Drafter.from_state(config, state)
    for name in (
        "output_norm_enc.weight",
        "layers.1.mlp.up_proj.weight",
        "layers.0.gate.weight",
        "[64, 64]",
        "[64, 128]",
    ):
        assert name in str(error.value)


def test_stray_embedding_and_head_are_refused_unless_named() -> None:
    config = config_with({})
    state = models.drafter_state(config)
    stray = {name: torch.zeros(97, 64) for name in ("embed_tokens.weight", "lm_head.weight")}
    with pytest.raises(ValueError, match=r"unexpected: embed_tokens.weight, lm_head.weight.*allow_unexpected"):
        Drafter.from_state(config, {**state, **stray})
    drafter = Drafter.from_state(config, {**state, **stray}, allow_unexpected=tuple(stray))
    features = features_of(6, drafter)
    assert torch.equal(proposed(drafter, features), proposed(drafter_of(config), features))


def own_head_state(config: dict[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    ids = torch.randperm(97, generator=torch.Generator().manual_seed(0))[:40].sort().values
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    extra = {
        "lm_head.weight": weight,
        "d2t": ids - torch.arange(40),
        "t2d": torch.isin(torch.arange(97), ids),
    }
    return models.drafter_state(config) | extra, ids


def test_a_head_over_a_reduced_vocabulary_drafts_mapped_target_ids() -> None:
    config = config_with({})
    state, ids = own_head_state(config)
    drafter = Drafter.from_state(config, state)
    assert drafter.settings.vocab == "own head, 40 rows"
    features = features_of(6, drafter)
    logits = proposed(drafter, features)
    assert torch.equal(logits.isfinite().all(0), torch.isin(torch.arange(97), ids))
    shared = drafter_of(config)
    cache = shared.new_cache()
    shared.ingest(cache, features)
    own = shared.propose(cache, 7, embed(), lambda h: F.pad(h @ state["lm_head.weight"].T, (0, 57)))[:, :40]
    torch.testing.assert_close(logits[:, ids], own)


@pytest.mark.parametrize("change", ["t2d of other ids", "ids beyond the vocabulary", "no head"])
def test_an_own_head_whose_map_does_not_fit_is_refused(change: str) -> None:
    config = config_with({})
    state, _ = own_head_state(config)
    if change == "no head":
        del state["lm_head.weight"]
    elif change == "t2d of other ids":
        state["t2d"] = state["t2d"].roll(1)
    else:
        state["d2t"] = state["d2t"] + 90
    with pytest.raises(ValueError, match="lm_head.weight" if change == "no head" else "read as offsets"):
        Drafter.from_state(config, state)


def test_ids_the_drafter_was_not_made_for_are_never_drafted() -> None:
    drafter = drafter_of(config_with({"vocab_size": 90}))
    logits = proposed(drafter, features_of(6, drafter))
    assert bool((logits[:, 90:] == -torch.inf).all())
    assert bool(logits[:, :90].isfinite().all())


# -- checkpoints: files ------------------------------------------------------------------------------------


def write_folder(folder: Any, config: dict[str, Any], shards: int = 1) -> None:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    state = models.drafter_state(config)
    if shards == 1:
        save_file(state, folder / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    where = {tensor: names[i % shards] for i, tensor in enumerate(state)}
    for name in names:
        save_file({k: v for k, v in state.items() if where[k] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}), encoding="utf-8")


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_loads_whole_or_in_shards(tmp_path: Any, shards: int) -> None:
    config = config_with({})
    write_folder(tmp_path, config, shards)
    drafter = Drafter.from_pretrained(tmp_path)
    features = features_of(6, drafter)
    assert torch.equal(proposed(drafter, features), proposed(drafter_of(config), features))
    assert drafter.source == {"name": str(tmp_path), "revision": None, "commit": None}


def test_a_lost_shard_is_named(tmp_path: Any) -> None:
    write_folder(tmp_path, config_with({}), 3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks shards.*model-00002-of-00003"):
        Drafter.from_pretrained(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pickled.*safetensors"):
        Drafter.from_pretrained(tmp_path)


def test_a_folder_that_is_no_checkpoint_or_not_there_is_said_so(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"no config.json"):
        Drafter.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"no .safetensors"):
        Drafter.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        Drafter.from_pretrained(tmp_path / "nothing")


def test_a_revision_of_a_folder_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="goes with a hub name"):
        Drafter.from_pretrained(tmp_path, revision="main")


@pytest.mark.parametrize(("name", "value"), [("dtype", "bfloat61"), ("attention", "flash_attention_2")])
def test_unknown_dtype_and_maskless_attention_are_refused(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=value):
        drafter_of(config_with({}), **{name: value})
