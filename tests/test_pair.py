"""Pairs: what is found in a target, what is refused, how prompts are rendered, where pairs come from."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ddlab.drafter import Drafter
from ddlab.pair import Pair, embedded_folder, load_pair

TINY = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2, vocab_size=97)
WITHOUT_SPECIAL = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)


def drafter_config(**changes: Any) -> dict[str, Any]:
    return {**models.drafter_config(models.target("dense")), **changes}


def drafter_of(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Drafter:
    return Drafter.from_state(config, models.drafter_state(config, dtype=dtype))


def save_pair(folder: Path, kind: str = "dense", tokenizer: bool = True) -> tuple[Path, Path]:
    """A target folder and a drafter folder."""
    target, drafter = folder / "target", folder / "drafter"
    models.target(kind).save_pretrained(target)
    if tokenizer:
        models.tokenizer().save_pretrained(target)
    drafter.mkdir()
    config = models.drafter_config(models.target(kind))
    (drafter / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(models.drafter_state(config), drafter / "model.safetensors")
    return target, drafter


# -- what is found in a target ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", models.KINDS)
def test_the_parts_of_every_target_are_found(kind: str) -> None:
    target = models.target(kind)
    pair = Pair(target)
    assert pair.layers is pair.text_model.layers
    assert len(pair.layer_types) == len(pair.windows) == len(pair.layers) == (8 if kind == "hybrid8" else 4)
    assert pair.embed is target.get_input_embeddings().weight
    assert (pair.vocab_size, pair.rows, pair.max_positions) == (97, 97, 512)
    assert pair.attention == ("eager" if kind == "gpt_oss" else "sdpa")
    assert pair.dtype == torch.float32
    assert pair.drafter is None


@pytest.mark.parametrize("kind", models.KINDS)
def test_head_of_the_last_hidden_state_is_the_targets_logits(kind: str) -> None:
    target = models.target(kind)
    with torch.no_grad():
        out = target(input_ids=torch.tensor([[5, 9, 33, 2]]), use_cache=False, output_hidden_states=True)
        torch.testing.assert_close(Pair(target).head(out.hidden_states[-1]), out.logits, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "types", "windows"),
    [
        ("dense", ["full_attention"] * 4, [None] * 4),
        ("swa", ["sliding_attention", "full_attention"] * 2, [8, None, 8, None]),
        ("gpt_oss", ["sliding_attention", "full_attention"] * 2, [8, None, 8, None]),
        ("vlm", ["linear_attention"] * 3 + ["full_attention"], [None] * 4),
        ("qwen3_moe", ["full_attention"] * 4, [None] * 4),
    ],
)
def test_layer_types_and_windows_are_those_of_the_text_model(kind: str, types: list[str], windows: list[Any]) -> None:
    pair = Pair(models.target(kind))
    assert list(pair.layer_types) == types
    assert list(pair.windows) == windows


def test_asking_a_nested_target_for_eager_runs_no_sdpa(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    models.target("vlm").save_pretrained(tmp_path)
    nested = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager").eval()
    calls = []
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1))
    for pair in (Pair(nested), load_pair(tmp_path, attention="eager")):
        assert pair.attention == "eager"
        pair.target(input_ids=torch.tensor([[5, 9, 33]]), use_cache=False)
    assert calls == []


# -- what is refused --------------------------------------------------------------------------------------


def unsupported(kind: str) -> Any:
    """Real models whose layers keep a state that no tree can be verified on here."""
    common = {**TINY, **WITHOUT_SPECIAL, "num_hidden_layers": 2}
    if kind == "convolution":
        config: Any = transformers.Lfm2Config(**common, layer_types=["conv", "full_attention"])
        return transformers.Lfm2ForCausalLM(config)
    if kind == "lightning":
        types = ["linear_attention", "full_attention"]
        config = transformers.MiniMaxConfig(**common, head_dim=16, num_local_experts=2, layer_types=types)
        return transformers.MiniMaxForCausalLM(config)
    sizes = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, attn_layer_indices=[1])
    return transformers.BambaForCausalLM(transformers.BambaConfig(**common, **sizes))


@pytest.mark.parametrize(("kind", "name"), [("convolution", "Lfm2"), ("lightning", "MiniMax"), ("mamba", "Bamba")])
def test_a_layer_of_an_unsupported_kind_is_named(kind: str, name: str) -> None:
    with pytest.raises(ValueError, match=rf"layer 0 \({name}.*ddlab verifies trees"):
        Pair(unsupported(kind).eval())


def test_a_target_that_is_no_causal_decoder_with_a_head_in_evaluation_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"call target\.eval\(\)"):
        Pair(models.fresh_target("dense").train())
    with pytest.raises(ValueError, match="no language-model head"):
        Pair(models.target("dense").model)
    t5 = transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=97)
    with pytest.raises(ValueError, match="encoder-decoder"):
        Pair(transformers.T5ForConditionalGeneration(t5).eval())
    gemma = models.target_config("gemma3").to_dict() | {"use_bidirectional_attention": True}
    both_ways = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**gemma)).eval()
    with pytest.raises(ValueError, match="use_bidirectional_attention"):
        Pair(both_ways)


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention", "paged|sdpa", "kernels-community/flash-attn"])
def test_attention_without_a_tree_mask_is_refused_naming_what_to_use(name: str) -> None:
    with pytest.raises(ValueError, match='attention="sdpa" or attention="eager"'):
        load_pair(attention=name)


def test_a_target_in_hand_with_flex_attention_is_refused() -> None:
    with pytest.raises(ValueError, match=r"flex_attention.*tree mask"):
        Pair(models.fresh_target("dense", attention="flex_attention"))


def test_a_drafter_of_another_hidden_size_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden_size is 32, the target's 64"):
        Pair(models.target("dense"), drafter_of(drafter_config(hidden_size=32)))


def test_a_tap_beyond_the_targets_layers_is_named_with_count_and_field() -> None:
    config = drafter_config(num_target_layers=None)
    config["dflash_config"]["target_layer_ids"] = [1, 4]
    drafter = drafter_of(config)
    with pytest.raises(ValueError, match=r"dflash_config.target_layer_ids names layer 4.*4 layers \(0 to 3\)"):
        Pair(models.target("dense"), drafter)


def test_a_drafter_made_for_another_depth_is_refused() -> None:
    with pytest.raises(ValueError, match=r"target of 64 layers.*this one has 4"):
        Pair(models.target("dense"), drafter_of(drafter_config(num_target_layers=64)))


@pytest.mark.parametrize("mask", [97, -1])
def test_a_mask_id_outside_the_embedding_is_refused_with_the_range(mask: int) -> None:
    config = drafter_config()
    config["dflash_config"]["mask_token_id"] = mask
    with pytest.raises(ValueError, match=rf"dflash_config.mask_token_id is {mask}.*0\.\.96"):
        Pair(models.target("dense"), drafter_of(config))


def test_a_mask_id_that_is_a_stop_id_is_warned_about() -> None:
    tokenizer = models.tokenizer()
    drafter = models.random_drafter(models.target("dense"), mask_token_id=tokenizer.eos_token_id)
    with pytest.warns(UserWarning, match="stop id"):
        Pair(models.target("dense"), drafter, tokenizer)


@pytest.mark.parametrize(("ids", "fits"), [(98, False), (97, True), (60, False)])
def test_a_drafter_for_other_ids_than_the_targets_is_a_vocabulary_mismatch(ids: int, fits: bool) -> None:
    drafter = drafter_of(drafter_config(vocab_size=ids))
    tokenizer = models.tokenizer()  # 97 ids
    if fits:
        assert Pair(models.target("dense"), drafter, tokenizer).vocab_size == 97
        return
    with pytest.raises(ValueError, match=f"vocabulary mismatch.*{ids} ids"):
        Pair(models.target("dense"), drafter, tokenizer)


def test_a_tokenizer_with_more_ids_than_the_target_has_rows_is_a_vocabulary_mismatch() -> None:
    with pytest.raises(ValueError, match=r"vocabulary mismatch.*300 ids.*97 rows"):
        Pair(models.target("dense"), None, models.tokenizer(300))


def test_a_refused_pair_runs_no_forward() -> None:
    target, ran = models.fresh_target("dense"), []
    target.model.register_forward_pre_hook(lambda *a: ran.append(1))
    with pytest.raises(ValueError, match="hidden_size"):
        Pair(target, drafter_of(drafter_config(hidden_size=32)))
    assert ran == []


# -- vocabulary and head ----------------------------------------------------------------------------------


def test_padded_rows_are_never_drafted_and_the_head_is_left_alone() -> None:
    config = models.target_config("dense")
    config.vocab_size = 128
    target = transformers.Qwen3ForCausalLM(config).eval()
    models.randomize(target)
    pair = Pair(target, drafter_of(drafter_config(vocab_size=128)), models.tokenizer())
    assert (pair.vocab_size, pair.rows) == (97, 128)
    cache = pair.drafter.new_cache()
    with pair.tap() as tap, torch.no_grad():
        logits = target(input_ids=torch.tensor([[5, 9, 33]])).logits
    pair.drafter.ingest(cache, tap.features())
    drafts = pair.propose(cache, 7)
    assert drafts.shape == (4, 128)
    assert bool((drafts[:, 97:] == -torch.inf).all()) and bool(drafts[:, :97].isfinite().all())
    assert bool(logits[..., 97:].isfinite().all())
    assert pair.drafter.settings.vocab == "target head"


def test_a_drafter_that_caps_its_logits_gets_the_bare_head() -> None:
    target = models.target("gemma3")  # caps its own logits at 4
    config = {**models.drafter_config(target), "final_logit_softcapping": 3.0}
    pair = Pair(target, drafter_of(config))
    plain = Pair(target, drafter_of(models.drafter_config(target)))
    features = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    caches = [p.drafter.new_cache() for p in (pair, plain)]
    for p, cache in zip((pair, plain), caches, strict=True):
        p.drafter.ingest(cache, features)
    own, targets = pair.propose(caches[0], 7), plain.propose(caches[1], 7)
    bare = torch.atanh(targets / 4) * 4
    torch.testing.assert_close(own, torch.tanh(bare / 3) * 3, atol=1e-4, rtol=1e-4)


def test_a_tied_head_is_the_embedding_after_loading(tmp_path: Path) -> None:
    target, drafter = save_pair(tmp_path, "tied")
    assert "lm_head.weight" not in load_file(target / "model.safetensors")
    pair = load_pair(target, drafter)
    assert pair.target.get_output_embeddings().weight.data_ptr() == pair.embed.data_ptr()
    assert models.plain_greedy(pair.target, [5, 9], 6) == models.plain_greedy(models.target("tied"), [5, 9], 6)


# -- stop ids ---------------------------------------------------------------------------------------------


def target_stopping_at(generation: Any, config: Any = None) -> Any:
    target = models.fresh_target("dense")
    target.generation_config.eos_token_id = generation
    target.config.eos_token_id = config
    return target


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        (5, None, None, (5,)),
        ([5, 9], None, None, (5, 9)),
        (None, None, None, ()),
        (None, [3], None, (3,)),
        ([9, 5], 5, "has one", (1, 5, 9)),
    ],
)
def test_stop_ids_are_the_union_of_all_that_name_one(
    generation: Any, config: Any, tokenizer: Any, expected: tuple[int, ...]
) -> None:
    assert models.tokenizer().eos_token_id == 1
    pair = Pair(target_stopping_at(generation, config), None, models.tokenizer() if tokenizer else None)
    assert pair.stop_token_ids == expected


def test_a_stop_id_outside_the_vocabulary_is_refused_naming_its_source() -> None:
    with pytest.raises(ValueError, match=r"generation_config.eos_token_id names stop id 500.*0\.\.96"):
        Pair(target_stopping_at([5, 500]))


# -- prompts ----------------------------------------------------------------------------------------------


def chatting(template: str | None = models.CHAT_TEMPLATE) -> Pair:
    tokenizer = models.tokenizer(300, chat=False)
    tokenizer = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    config = models.target_config("dense")
    config.vocab_size = 300
    return Pair(transformers.Qwen3ForCausalLM(config).eval(), None, tokenizer)


MESSAGE = [{"role": "user", "content": "What is a tree?"}]


@pytest.mark.parametrize(
    ("args", "end", "defaults"),
    [
        ({}, "<think>\n", {"enable_thinking": "not set"}),
        ({"enable_thinking": True}, "<think>\n", {}),
        ({"enable_thinking": False}, "<think>\n\n</think>\n\n", {}),
    ],
)
def test_a_rendered_prompt_holds_text_ids_arguments_and_defaults(
    args: dict[str, Any], end: str, defaults: dict[str, Any]
) -> None:
    pair = chatting()
    prompt = pair.encode(MESSAGE, **args)
    assert prompt.text == f"<|im_start|>user\nWhat is a tree?<|im_end|>\n<|im_start|>assistant\n{end}"
    assert prompt.template_args == {"add_generation_prompt": True, **args}
    assert prompt.template_defaults == defaults
    assert prompt.messages == tuple(MESSAGE)
    assert pair.decode(prompt.ids) == prompt.text
    assert pair.encode("What is a tree?", **args) == prompt
    assert json.loads(json.dumps(prompt.to_dict()))["ids"] == list(prompt.ids)


def test_prompts_that_differ_only_in_a_template_argument_differ() -> None:
    pair = chatting()
    given, unset = pair.encode(MESSAGE, enable_thinking=True), pair.encode(MESSAGE)
    assert given.ids == unset.ids
    assert given != unset != pair.encode(MESSAGE, enable_thinking=False)


def test_the_value_of_a_default_filter_is_recorded() -> None:
    template = "{{ language | default('English') }} {{ style | default }}{{ messages[0].content }}"
    prompt = chatting(template).encode(MESSAGE)
    assert prompt.template_defaults == {"language": "English", "style": "not set"}
    assert prompt.text == "English What is a tree?"


def test_a_template_argument_that_the_template_never_reads_is_refused_with_a_near_match() -> None:
    with pytest.raises(ValueError, match=r"'enable_thinkin'.*'enable_thinking'"):
        chatting().encode(MESSAGE, enable_thinkin=True)
    with pytest.raises(ValueError, match="no chat template, so enable_thinking would be lost"):
        chatting().encode([1, 2], enable_thinking=True)


def test_a_started_answer_can_be_continued() -> None:
    messages = [*MESSAGE, {"role": "assistant", "content": "A tree"}]
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    prompt = chatting(template).encode(messages, continue_final_message=True)
    assert prompt.text == "user: What is a tree?\nassistant: A tree"
    assert prompt.template_args == {"add_generation_prompt": False, "continue_final_message": True}


def test_a_string_is_taken_as_it_is_without_a_template_or_with_chat_off() -> None:
    for pair, chat in ((chatting(None), True), (chatting(), False)):
        prompt = pair.encode("What is a tree?", chat=chat)
        assert prompt.text == pair.decode(prompt.ids) == "What is a tree?"
        assert prompt.messages is None


@pytest.mark.parametrize("ids", [[3, 4], (3, 4), torch.tensor([3, 4]), torch.tensor([[3, 4]]), [[3, 4]]])
def test_token_ids_come_in_any_container(ids: Any) -> None:
    assert Pair(models.target("dense")).encode(ids).ids == (3, 4)


def test_one_token_is_a_prompt() -> None:
    assert Pair(models.target("dense")).encode([3]).ids == (3,)


@pytest.mark.parametrize("empty", ["", [], (), torch.tensor([], dtype=torch.long)])
def test_an_empty_prompt_is_refused_saying_what_to_do(empty: Any) -> None:
    with pytest.raises(ValueError, match="empty: give at least one token"):
        chatting().encode(empty)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1.5], "integer token ids"),
        (torch.tensor([1.0]), "integer token ids"),
        ([[1, 2], [3, 4]], "one row"),
        (["What"], "integer token ids"),
        ([3, 97], r"id 97.*0\.\.96"),
        ([-1], r"id -1.*0\.\.96"),
        (MESSAGE, "tokenizer with a chat template"),
        ("What", "no tokenizer"),
    ],
)
def test_what_is_no_prompt_is_refused(prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pair(models.target("dense")).encode(prompt)


def test_a_message_without_role_or_content_is_refused() -> None:
    with pytest.raises(ValueError, match="role and content"):
        chatting().encode([{"role": "user"}])


def test_ids_without_a_tokenizer_are_shown_as_numbers() -> None:
    assert Pair(models.target("dense")).decode([3, 40]) == "[id 3][id 40]"


# -- loading ----------------------------------------------------------------------------------------------


def test_the_embedded_pair_loads_in_float32_and_drafts_what_its_target_says() -> None:
    pair = load_pair()
    assert pair.dtype == pair.drafter.dtype == torch.float32
    assert set(pair.layer_types) == {"linear_attention", "full_attention"}
    assert (pair.name, pair.drafter.name) == ("tiny-hybrid", "tiny-hybrid")
    assert str(embedded_folder("tiny-hybrid")) not in json.dumps(pair.source)
    assert pair.decode([pair.drafter.settings.mask_token_id]) == "<|mask|>"
    ids = list(pair.encode("What is 2 + 3?").ids)
    text = models.plain_greedy(pair.target, ids, 24)
    hits = 0
    for start in range(0, 16, 4):
        known, cache = ids + text[:start], pair.drafter.new_cache()
        with pair.tap() as tap, torch.no_grad():
            pair.target(input_ids=torch.tensor([known]), use_cache=False)
        pair.drafter.ingest(cache, tap.features())
        drafts = pair.propose(cache, text[start]).argmax(-1).tolist()
        hits += sum(a == b for a, b in zip(drafts[:4], text[start + 1 :], strict=False))
    assert hits >= 8  # of 16; chance is one in 8192


def test_an_embedded_pair_of_another_name_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match="no embedded pair 'nothing'"):
        embedded_folder("nothing")


def test_folders_load_and_the_source_is_recorded(tmp_path: Path) -> None:
    target, drafter = save_pair(tmp_path)
    pair = load_pair(target, drafter, dtype="float64", attention="eager")
    assert pair.dtype == pair.drafter.dtype == torch.float64
    assert pair.attention == pair.drafter.model.config._attn_implementation == "eager"
    assert pair.source["target"] == pair.name == str(target)
    assert pair.source["drafter"]["name"] == str(drafter)
    assert (pair.source["dtype"], pair.source["attention"]) == ("torch.float64", "eager")
    assert pair.encode("What is a tree?").messages is not None


def test_hub_names_load_from_the_cache_and_record_their_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "made").mkdir()
    made = save_pair(tmp_path / "made")
    commits = ("a" * 40, "b" * 40)
    for folder, name, commit in zip(made, ("models--lab--target", "models--lab--drafter"), commits, strict=True):
        (tmp_path / name / "refs").mkdir(parents=True)
        (tmp_path / name / "refs" / "v1").write_text(commit)
        (tmp_path / name / "snapshots").mkdir()
        folder.rename(tmp_path / name / "snapshots" / commit)
    pair = load_pair("lab/target", "lab/drafter", revision="v1", drafter_revision="v1")
    source = pair.source
    assert (source["target"], source["revision"], source["commit"]) == ("lab/target", "v1", commits[0])
    assert source["drafter"] == {"name": "lab/drafter", "revision": "v1", "commit": commits[1]}


def test_a_target_folder_without_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    target, _ = save_pair(tmp_path, tokenizer=False)
    pair = load_pair(target)
    assert pair.tokenizer is None
    assert pair.drafter is None
    assert pair.encode([3]).ids == (3,)


def test_a_drafter_that_does_not_load_is_said_before_the_target_is_read(tmp_path: Path) -> None:
    target, _ = save_pair(tmp_path)
    (target / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load_pair(target, tmp_path / "nothing")


def test_a_drafter_in_hand_can_be_given(tmp_path: Path) -> None:
    target, _ = save_pair(tmp_path)
    drafter = models.random_drafter(models.target("dense"))
    assert load_pair(target, drafter).drafter is drafter


def test_a_conditional_generation_checkpoint_gives_the_same_logits(tmp_path: Path) -> None:
    models.target("vlm").save_pretrained(tmp_path)
    ids = [5, 9, 33, 2]
    assert torch.equal(
        models.path_logits(load_pair(tmp_path).target, ids), models.path_logits(models.target("vlm"), ids)
    )


def test_a_misspelt_attention_is_refused_with_a_near_match_and_spoils_no_later_load(tmp_path: Path) -> None:
    target, drafter = save_pair(tmp_path)
    with pytest.raises(ValueError, match=r"unknown attention 'spda': did you mean 'sdpa'\?"):
        load_pair(target, drafter, attention="spda")
    assert load_pair(target, drafter, attention="sdpa").attention == "sdpa"


def test_attention_that_the_class_lacks_is_refused_and_auto_takes_what_it_has(tmp_path: Path) -> None:
    models.target("gpt_oss").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match='GptOssForCausalLM has no sdpa attention: use attention="eager"'):
        load_pair(tmp_path, attention="sdpa")
    assert load_pair(tmp_path, attention="auto").attention == "eager"


def test_without_accelerate_device_map_says_so_in_one_line_and_device_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = save_pair(tmp_path)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ImportError, match=r"accelerate.*restart the kernel") as error:
        load_pair(target, drafter, device_map="auto")
    assert "\n" not in str(error.value)
    assert load_pair(target, drafter, device="cpu").device.type == "cpu"


def test_device_map_goes_through_accelerate(tmp_path: Path) -> None:
    target, drafter = save_pair(tmp_path)
    pair = load_pair(target, drafter, device_map={"": "cpu"})
    assert pair.device.type == pair.drafter.device.type == "cpu"
    with pytest.raises(ValueError, match="not both"):
        load_pair(target, drafter, device_map="auto", device="cpu")


def test_a_target_that_lacks_tensors_is_refused_rather_than_filled_at_random(tmp_path: Path) -> None:
    target, _ = save_pair(tmp_path)
    state = load_file(target / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks tensors: model.layers.1.mlp.up_proj.weight"):
        load_pair(target)


def test_a_folder_that_is_no_checkpoint_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no checkpoint: it has no config.json"):
        load_pair(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load_pair(str(tmp_path / "nothing"))


def test_stray_drafter_tensors_can_be_left_out_by_name(tmp_path: Path) -> None:
    target, drafter = save_pair(tmp_path)
    state = load_file(drafter / "model.safetensors")
    save_file({**state, "lm_head.weight": torch.zeros(97, 64)}, drafter / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected: lm_head.weight"):
        load_pair(target, drafter)
    assert load_pair(target, drafter, allow_unexpected=("lm_head.weight",)).drafter is not None


def test_remote_code_is_never_run_by_default(tmp_path: Path) -> None:
    config = {"model_type": "own", "architectures": ["Own"], "auto_map": {"AutoConfig": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "own.py").write_text("raise SystemExit('this code ran')", encoding="utf-8")
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_pair(tmp_path)


def test_building_a_pair_raises_no_warning_of_its_own() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target = models.target("dense")
        repr(Pair(target, models.random_drafter(target), models.tokenizer()))
