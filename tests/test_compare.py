"""Backends layer by layer: planted faults are found where they are and nowhere else, legal backends are no faults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import faulty
import models
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import parent_lists, scripted, tree_of
from torch.utils._python_dispatch import TorchDispatchMode

import ddlab
from ddlab import attention
from ddlab.attention import BACKENDS, available
from ddlab.comparing import ways
from ddlab.comparing.comparison import Comparison
from ddlab.comparing.delta_forms import FORMS
from ddlab.comparing.outcome import _kl
from ddlab.comparing.rows import block_rows, chain_rows, distinct_faults, right, tree_rows
from ddlab.comparing.verdict import apart, layer_band
from ddlab.delta import teach_tree_rows
from ddlab.oracle import path_logits
from ddlab.pair import Pair
from ddlab.sampling import walk
from ddlab.trace import Trace
from ddlab.verify import TargetState, tree_masks

HERE = [name for name in BACKENDS if available(name) is None and name != "flex"]  # flex is compiled: see test_attention
TEXT = [5, 33, 9, 60, 2, 71, 18, 44, 7, 90, 13, 52] * 2


@pytest.fixture
def faults() -> Iterator[None]:
    with faulty.registered(*faulty.FUNCTIONS):
        yield


@cache
def pair_of(kind: str, dtype: torch.dtype = torch.float32) -> Pair:
    target = models.target(kind, dtype, "eager" if kind == "gpt_oss" else None)
    drafter = models.random_drafter(target, layer_types=("sliding_attention", "full_attention"), block=6)
    return Pair(target, drafter)


@cache
def trace_of(kind: str, dtype: torch.dtype = torch.float32, method: str = "ddtree") -> Trace:
    """A run whose drafts are partly right, so that paths have something to lose."""
    pair = pair_of(kind, dtype)
    plain = ddlab.generate(Pair(pair.target), TEXT, method="ar", max_new_tokens=20, stop_token_ids=())
    decoder = ddlab.Decoder(pair, method, budget=9, max_new_tokens=14, stop_token_ids=())
    drafts = scripted([*TEXT, *plain.output_ids], 4, models.VOCAB, "mixed", seed=2)
    decoder.register_hook("draft", lambda decoder, value: 5 * drafts(decoder, value))  # sure of itself: deep trees
    for _ in decoder.run(TEXT):
        pass
    assert max(step.tree.depth.max() for step in decoder.trace.steps) >= 3
    return decoder.trace


def compare(kind: str, names: list[str], what: str, dtype: torch.dtype = torch.float32, **more: Any) -> Comparison:
    given = trace_of(kind, dtype) if what in ("draft", "verify") else TEXT
    return ddlab.compare(pair_of(kind, dtype), given, names, what, **{"repeats": 0, "rounds": 3} | more)


# -- planted faults ----------------------------------------------------------------------------------------------------

PLANTED = [
    ("no_window", "swa", "prefill", [0, 2], "the window is ignored"),
    ("no_window", "gpt_oss", "prefill", [0, 2], "the window is ignored"),
    ("no_window", "gemma3", "prefill", [0, 2], "the window is ignored"),
    ("no_window", "swa", "draft", [0], "the window is ignored"),
    ("no_window", "swa", "verify", [0, 2], "the rows are read as a chain, without the window"),
    ("no_sinks", "gpt_oss", "prefill", [0, 1, 2, 3], "attention sinks (s_aux) are dropped"),
    ("no_sinks", "gpt_oss", "step", [0, 1, 2, 3], "attention sinks (s_aux) are dropped"),
    ("no_sinks", "gpt_oss", "verify", [0, 1, 2, 3], "attention sinks (s_aux) are dropped"),
    ("as_bool", "dense", "verify", [0, 1, 2, 3], "the mask is added as ones and zeros"),
    ("as_bool", "hybrid", "verify", [3], "the mask is added as ones and zeros"),
    ("as_bool", "swa", "draft", [0], "the mask is added as ones and zeros"),
    ("as_chain", "dense", "verify", [0, 1, 2, 3], "the rows are read as a chain, each sees all before it"),
    ("as_chain", "hybrid", "verify", [3], "the rows are read as a chain, each sees all before it"),
    ("flattened", "hybrid", "verify", [0, 1, 2], "the rows are read as a chain (flattened)"),
    ("flattened", "qwen3_next", "verify", [0, 1, 2], "the rows are read as a chain (flattened)"),
]


@pytest.mark.parametrize(("name", "kind", "what", "layers", "said"), PLANTED)
def test_a_planted_fault_is_found_in_its_layers_alone_and_carried_on_by_a_whole_forward(
    faults: None, name: str, kind: str, what: str, layers: list[int], said: str
) -> None:
    found = compare(kind, ["eager", name], what)
    assert found["eager"].wrong == [] and found[name].wrong == layers and not found.ok
    (fault,) = found[name].faults
    assert fault.startswith(said)
    for figures in found["eager"].layers.values():
        assert figures.verdict == "rounding" and figures.error < figures.band
    for index, figures in found[name].layers.items():
        assert (figures.rms > 1e-3) == (index in layers)  # teacher-forced: the error of one layer
        assert (figures.free_rms > 1e-3) == (index >= layers[0])  # free-running: it accumulates
        assert index in layers or figures.rms < 1e-5


def test_the_first_backend_is_judged_like_the_others(faults: None) -> None:
    found = compare("swa", ["no_window", "eager"], "prefill")
    assert found["no_window"].wrong == [0, 2] and found["eager"].wrong == []
    assert found["eager"].layers[0].rms > 0.1  # far from the first, and right


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_faults_are_told_from_rounding_in_half_precision(faults: None, dtype: torch.dtype) -> None:
    found = compare("swa", ["sdpa", "eager", "flash_tree", "no_window"], "prefill", dtype)
    assert [b.name for b in found.backends if b.wrong] == ["no_window"]
    assert list(found["no_window"].faults) == ["the window is ignored"]
    band = found["eager"].layers[1].band
    assert band is not None and torch.finfo(dtype).eps < band < 0.1


# -- what is right is called right -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", attention.CALLS)
@pytest.mark.parametrize("kind", ["swa", "gemma3", "gpt_oss", "hybrid", "vlm"])
def test_no_legal_backend_is_called_wrong(kind: str, what: str, dtype: torch.dtype) -> None:
    names = [*HERE, *(f for f in FORMS if f != "flattened")] if kind in ("hybrid", "vlm") else HERE
    found = compare(kind, ["eager", *names], what, dtype, rounds=2)
    assert found.ok
    for result in found.backends:
        assert result.status in ("ok", "refused", "not installed")
        assert bool(result.layers) == (result.status == "ok")
        for figures in result.layers.values():
            assert figures.verdict in ("rounding", "same")


@settings(max_examples=8)
@given(parents=parent_lists(20), seed=st.integers(0, 99))
def test_every_form_of_the_delta_rule_gives_the_same_logits(parents: list[int], seed: int) -> None:
    """Path replay is the oracle; a chain is legal on every form, a tree that branches on those that follow it."""
    pair, tree = pair_of("hybrid"), tree_of(parents, seed, models.VOCAB)
    branches = tree_rows(tree, 0).branches
    state = TargetState(pair)
    state.prefill(TEXT)
    oracle = path_logits(pair, TEXT, tree)
    for name, form in FORMS.items():
        if form.missing("cpu") or form.refusal(len(tree), branches):
            continue
        with form.use():
            logits = state.verify(tree)
        off = float(((logits - oracle).abs().amax(-1) / oracle.abs().amax(-1)).max())
        if len(tree) > 1 and branches and form.wrong_on_trees:
            continue
        assert off < 1e-4, name
    assert {n for n, form in FORMS.items() if form.refusal(len(tree), True) is None} >= {"tree", "by_node", "flattened"}
    assert FORMS["chunk"].refusal(9, True) is not None and FORMS["chunk"].refusal(9, False) is None


def test_a_form_is_in_use_inside_its_block_only() -> None:
    pair = pair_of("hybrid")
    teach_tree_rows(pair.layers[0].linear_attn)
    state = TargetState(pair)
    state.prefill(TEXT)
    tree = tree_of([-1, 0, 0, 1, 2], 0, models.VOCAB)
    before = state.verify(tree)
    with pytest.raises(ZeroDivisionError), FORMS["flattened"].use():
        assert not torch.allclose(state.verify(tree), before, atol=1e-3)
        raise ZeroDivisionError
    assert torch.equal(state.verify(tree), before)


# -- refusals ----------------------------------------------------------------------------------------------------------


class Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_an_illegal_backend_is_shown_with_its_reason_and_without_a_figure() -> None:
    found = compare("gpt_oss", ["eager", "sdpa", "flash_attention_2"], "verify")
    refused = found["sdpa"]
    assert (refused.status, refused.layers, refused.end, refused.seconds) == ("refused", {}, None, None)
    assert "drops attention sinks" in refused.reason and 'attention="eager"' in refused.reason
    assert f"refused sdpa: {refused.reason}" in found.to_text()
    assert found["flash_attention_2"].status in ("not installed", "refused")
    assert not any(row["backend"] == "sdpa" for _, row in found.to_frame().iterrows())


def test_a_refused_first_backend_is_an_error_before_anything_runs() -> None:
    pair, trace = pair_of("gpt_oss"), trace_of("gpt_oss")
    with Counter() as counter, pytest.raises(ValueError, match=r"first backend .* 'sdpa' is refused: .*sinks"):
        ddlab.compare(pair, trace, ["sdpa", "eager"], "verify")
    assert not [op for op in counter.ops if "mm" in op or "attention" in op]


def test_a_backend_that_raises_is_shown_with_its_words_and_the_others_go_on(faults: None) -> None:
    found = compare("swa", ["eager", "old_kernel", "sdpa"], "prefill")
    assert found["old_kernel"].status == "error" and found["sdpa"].status == "ok"
    assert found["old_kernel"].reason.startswith("TypeError: ")
    assert "unexpected keyword argument" in found["old_kernel"].reason


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ddlab.compare(pair_of("swa"), TEXT, ["eagre"]), "unknown backend 'eagre': did you mean 'eager'"),
        (lambda: ddlab.compare(pair_of("swa"), TEXT, ["flex_attention"]), "can end the process: use 'flex'"),
        (lambda: ddlab.compare(pair_of("swa"), TEXT, []), "at least one backend"),
        (lambda: ddlab.compare(pair_of("swa"), TEXT, ["eager"], "decode"), "unknown call 'decode'"),
        (lambda: ddlab.compare(pair_of("swa"), [5], ["eager"], "step"), "at least two tokens"),
        (lambda: ddlab.compare(pair_of("swa"), trace_of("swa"), ["eager"], "verify", rounds=0), "1 or more, not 0"),
        (lambda: ddlab.compare(Pair(models.target("swa")), TEXT, ["eager"], "verify"), "no drafter"),
        (lambda: ddlab.compare(pair_of("swa"), Trace({}), ["eager"], "verify"), "no rounds"),
    ],
)
def test_what_cannot_be_compared_is_refused_naming_the_cure(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_trace_of_another_vocabulary_is_refused() -> None:
    trace = Trace({"prompt": {"ids": [1, 5000]}}, list(trace_of("swa").steps))
    with pytest.raises(ValueError, match="does not know"):
        ddlab.compare(pair_of("swa"), trace, ["eager"], "verify")


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_what_was_set_before_is_set_after_and_no_hook_stays(faults: None, part: str) -> None:
    pair = pair_of("swa")
    model = pair.text_model if part == "target" else pair.drafter.model
    before = model.config._attn_implementation
    compare("swa", ["eager", "no_window", "old_kernel"], "verify" if part == "target" else "draft")
    assert model.config._attn_implementation == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# -- figures, each against an oracle -----------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 7), st.integers(0, 99))
def test_differences_of_a_layer_are_what_they_say(rows: int, hidden: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    one, other = rng.normal(size=(2, rows, hidden))
    found = apart(torch.from_numpy(one), torch.from_numpy(other))
    whole = np.sqrt((one**2).mean(1).mean())
    for i in range(rows):
        scale = max(np.sqrt((one[i] ** 2).mean()), whole)
        assert found["max_abs"][i] == pytest.approx(np.abs(other[i] - one[i]).max())
        assert found["rms"][i] == pytest.approx(np.sqrt(((other[i] - one[i]) ** 2).mean()) / scale)
        cosine = (one[i] @ other[i]) / np.linalg.norm(one[i]) / np.linalg.norm(other[i])
        assert found["cosine"][i] == pytest.approx(cosine)


def test_equal_rows_of_zeros_are_equal() -> None:
    found = apart(torch.zeros(2, 3), torch.zeros(2, 3))
    assert found["rms"].tolist() == [0, 0] and found["cosine"].tolist() == [1, 1]


@given(st.integers(2, 9), st.integers(0, 99))
def test_divergence_is_in_nats_and_leaves_out_what_cannot_be_drafted(vocab: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    one, other = torch.randn(2, 40, vocab, generator=draw, dtype=torch.float64)
    one[:, -1] = other[:, -1] = -torch.inf
    p, q = one[:, :-1].softmax(-1).numpy(), other[:, :-1].softmax(-1).numpy()
    np.testing.assert_allclose(_kl(one, other), (p * np.log(p / q)).sum(1), atol=1e-12)


@pytest.mark.parametrize("linear", [False, True])
def test_bands_grow_with_what_the_plain_form_loses(linear: bool) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        least = layer_band(dtype, 0.0, linear=linear)
        assert least >= torch.finfo(torch.float32).eps  # norms and the delta rule run in float32
        assert layer_band(dtype, 1.0, linear=linear) > least


def test_the_end_of_a_verification_is_what_two_runs_by_hand_say(faults: None) -> None:
    pair, trace = pair_of("dense"), trace_of("dense")
    end = compare("dense", ["eager", "as_bool"], "verify", rounds=None)["as_bool"].end
    assert end is not None and end.replayed is not None and end.tau is not None and end.first_tau is not None
    text = [*trace.prompt_ids, *trace.output_ids]
    flips = paths = agree = 0
    emitted: dict[str, list[int]] = {"eager": [], "as_bool": []}
    for step in trace.steps:
        state = TargetState(pair)
        state.prefill(text[: step.start])
        taken, chosen = {}, {}
        for name in emitted:
            with ways.find(name).use(pair, "target", "verify"):
                chosen[name] = state.verify(step.tree).argmax(-1)
            taken[name] = walk(step.tree, chosen[name].numpy(), (), len(TEXT) + 14 - step.start - 1)
            emitted[name].append(len(taken[name].emitted(step.tree)))
        flips += int((chosen["eager"] != chosen["as_bool"]).sum())
        paths += taken["eager"] != taken["as_bool"]
        agree += int((chosen["as_bool"] == path_logits(pair, text[: step.start], step.tree).argmax(-1)).sum())
    nodes = sum(len(step.tree) for step in trace.steps)
    assert (end.flips, end.rows, end.paths, end.rounds) == (flips, nodes, paths, len(trace.steps))
    assert flips > 0 and paths > 0
    assert end.tau.value == np.mean(emitted["as_bool"]) and end.first_tau.value == np.mean(emitted["eager"])
    assert end.first_tau.value == trace.tokens_per_round.value and end.tau.rounds == trace.rounds
    replayed = end.replayed  # every round is in dispute
    assert (replayed.nodes, replayed.agree, replayed.right) == (nodes, agree, False)


def test_path_replay_says_that_the_right_one_is_right(faults: None) -> None:
    found = compare("hybrid", ["eager", "flattened"], "verify")
    right, wrong = found["eager"].end, found["flattened"].end
    assert right is not None and right.replayed is not None and right.replayed.right
    assert right.replayed.agree == right.replayed.nodes
    assert wrong is not None and wrong.replayed is not None and not wrong.replayed.right


@pytest.mark.parametrize("method", ["ddtree", "dflash"])
def test_drafts_are_walked_along_the_recorded_text(method: str) -> None:
    """On what was set when the trace was made, the rounds are the trace's own."""
    pair = pair_of("swa")
    trace = ddlab.generate(pair, TEXT, method=method, budget=7, max_new_tokens=16, stop_token_ids=())
    found = ddlab.compare(pair, trace, ["sdpa", "eager"], "draft", repeats=0)
    for result in found.backends:
        assert result.end is not None and result.end.tau is not None
        assert result.end.tau.rounds >= trace.rounds - 1  # the text decides all but the last, perhaps
        counts = [len(step.emitted) for step in trace.steps[: result.end.tau.rounds]]
        assert result.end.tau.value == np.mean(counts) and result.end.paths == 0


def test_a_prompt_alone_gets_rounds_of_its_own() -> None:
    found = ddlab.compare(pair_of("swa"), TEXT, ["sdpa"], "draft", rounds=2, repeats=0)
    assert found.calls[0]["round"] == 0 and len(found.calls) == 2
    assert found.calls[0]["start"] == len(TEXT)


def test_times_are_medians_in_turn_and_say_so() -> None:
    found = compare("swa", ["eager", "sdpa"], "verify", repeats=2)
    assert found.timed.startswith("median of 2 runs in turn")
    for result in found.backends:
        assert result.seconds > 0 and all(f.seconds > 0 for f in result.layers.values())
        assert all(f.peak_bytes is None for f in result.layers.values())  # on the CPU
    assert "not timed" in compare("swa", ["eager"], "step").timed


# -- what rows see -----------------------------------------------------------------------------------------------------


@given(parent_lists(), st.integers(0, 30), st.one_of(st.none(), st.integers(1, 9)))
def test_the_judge_and_the_decoder_agree_on_what_a_trees_rows_see(
    parents: list[int], start: int, window: int | None
) -> None:
    tree = tree_of(parents, 0, 60)
    kind = "full_attention" if window is None else "sliding_attention"
    mask = tree_masks(tree, start, [(kind, window)], torch.float32, torch.device("cpu"))[kind][0, 0] == 0
    seen = tree_rows(tree, start).seen(kind, window)
    assert np.array_equal(seen[:, seen.shape[1] - mask.shape[1] :], mask.numpy())
    assert not seen[:, : seen.shape[1] - mask.shape[1]].any()


@given(st.integers(1, 8), st.integers(0, 20), st.integers(1, 9), st.sampled_from(["causal", "bidirectional"]))
def test_the_judge_and_the_drafter_agree_on_what_a_block_sees(block: int, context: int, window: int, how: str) -> None:
    target = models.target("dense")
    kinds = ("sliding_attention", "full_attention")
    config = models.drafter_config(target, layer_types=kinds, window=window, block=block)
    among = {"sliding_attention": how, "full_attention": "bidirectional"}
    drafter = ddlab.Drafter.from_state(config, models.drafter_state(config), block_attention=among)
    rows = block_rows(block, context, among)
    for kind, mask in drafter.masks(context).items():
        assert np.array_equal(rows.seen(kind, window if kind == kinds[0] else None), mask.numpy())


@given(parent_lists(12), st.integers(0, 12), st.one_of(st.none(), st.integers(1, 6)), st.booleans())
def test_faults_that_could_not_be_told_apart_are_named_once(
    parents: list[int], start: int, window: int | None, sinks: bool
) -> None:
    rows = tree_rows(tree_of(parents, 0, 60), start)
    kind = "full_attention" if window is None else "sliding_attention"
    first = 0 if window is None else max(0, start - window + 1)
    sights = [right(rows, kind, window, first), *distinct_faults(rows, kind, window, sinks, first).values()]
    for i, one in enumerate(sights):
        assert one.keys.shape == (len(rows), start + len(rows) - first)
        assert not any(one.like(other, sinks) for other in sights[:i])


def test_a_chain_does_not_branch() -> None:
    assert not chain_rows(5, 3).branches and not tree_rows(tree_of([-1, 0, 1, 2], 0, 9), 4).branches
    assert tree_rows(tree_of([-1, 0, 0], 0, 9), 4).branches


# -- as data -----------------------------------------------------------------------------------------------------------


def test_a_comparison_is_plain_data(faults: None) -> None:
    found = compare("hybrid", ["sdpa", "eager", "as_bool", "flattened", "chunk"], "verify", repeats=1)
    saved = json.loads(json.dumps(found.to_dict()))
    assert not saved["ok"] and [b["name"] for b in saved["backends"]][-1] == "chunk"
    assert saved["backends"][1]["layers"]["0"]["verdict"] == "same"
    nodes = saved["backends"][2]["layers"]["3"]["nodes"]
    assert len(nodes["error"]) == len(nodes["free_rms"]) == found.rows
    frame = found.to_frame()
    assert len(frame) == 4 * 4 and set(frame["verdict"]) == {"same", "rounding", "wrong"}
    assert repr(found) == "<Comparison: verify, 4 layers, 5 backends, wrong: as_bool, flattened>"
    with pytest.raises(KeyError, match="no backend 'x' was compared"):
        found["x"]


def test_the_default_is_everything_on_this_machine_with_what_is_set_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways.attention, "available", lambda name: None if name in HERE else "not today")
    names = [way.name for way in ways.every(pair_of("hybrid"), "verify")]
    assert names[0] == "sdpa" and set(names) == {*HERE, "chunk", "recurrent", "tree", "by_node"}
    assert [way.name for way in ways.every(pair_of("hybrid"), "draft")] == ["sdpa", *(n for n in HERE if n != "sdpa")]


def test_a_long_error_keeps_what_the_compiler_says() -> None:
    said = ways.verbatim(RuntimeError("Command: " + "g++ " * 300 + "file.cpp:3:1: error: no such thing" + " x" * 300))
    assert said.startswith("RuntimeError: Command: g++") and "error: no such thing" in said and len(said) < 500


def test_what_computes_the_linear_layers_is_said() -> None:
    assert compare("hybrid", ["eager"], "verify").linear_form == "tree"
    assert compare("hybrid", ["eager"], "prefill").linear_form == "chunk"
    assert compare("hybrid", ["eager"], "step").linear_form == "recurrent"
    assert compare("hybrid", ["by_node", "eager"], "prefill").linear_form == "by_node"
    assert compare("swa", ["eager"], "prefill").linear_form is None
    assert "Linear layers run as 'tree'." in compare("hybrid", ["eager"], "verify").to_text()


def test_a_first_backend_that_raises_is_an_error_in_its_own_words(faults: None) -> None:
    with pytest.raises(ValueError, match=r"'old_kernel' fails: TypeError: .*unexpected keyword"):
        compare("swa", ["old_kernel", "eager"], "prefill")
