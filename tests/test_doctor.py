"""The doctor: its table is true on every kind of pair, it names what is wrong, and a crash is a result."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import faulty
import models
import pytest
import torch
from strategies import tree_of
from test_compare import HERE, TEXT, Counter
from test_drafter import write_folder
from test_exact import worst

import ddlab
from ddlab import attention
from ddlab.cli import main
from ddlab.comparing import children, miniature, probe, ways
from ddlab.comparing.delta_forms import FORMS
from ddlab.comparing.probe import UNMASKED, Case, Probe, Subject, subjects
from ddlab.comparing.ways import Way
from ddlab.doctor import Findings, doctor, faults_of, public
from ddlab.drafter import Drafter
from ddlab.pair import Pair, embedded_folder
from ddlab.verify import TargetState

KINDS = ("llama", "swa", "gemma3", "hybrid", "vlm")
EXPERTS = ("qwen3_moe", "gpt_oss", "qwen3_next", "qwen3_5_moe")  # PyTorch multiplies their matrices in float32 at most


@pytest.fixture
def faults() -> Iterator[None]:
    with faulty.registered(*faulty.FUNCTIONS):
        yield


@cache
def pair_of(kind: str, dtype: torch.dtype = torch.float32) -> Pair:
    target = models.target(kind, dtype, "eager" if kind == "gpt_oss" else None)
    return Pair(target, models.random_drafter(target, layer_types=("sliding_attention", "full_attention"), block=6))


@cache
def table(kind: str, dtype: torch.dtype = torch.float32) -> Findings:
    forms = [name for name in FORMS if name != "flattened"] if "linear_attention" in pair_of(kind).layer_types else []
    return doctor(pair_of(kind, dtype), [*HERE, *forms], repeats=0)


# -- the table is true -------------------------------------------------------------------------------------------------


def logits(pair: Pair, what: str) -> torch.Tensor:
    """Of one call of the pair itself."""
    if what == "draft":
        assert pair.drafter is not None
        cache_ = pair.drafter.new_cache()
        draw = torch.Generator().manual_seed(0)
        width = pair.drafter.model.encoder.fc.in_features
        pair.drafter.ingest(cache_, torch.randn(21, width, generator=draw, dtype=torch.float64))
        return pair.propose(cache_, 5)
    state = TargetState(pair)
    if what == "prefill":
        return state.prefill(TEXT)
    with attention.use(pair, "eager"):
        state.prefill(TEXT)
    return state.verify(tree_of([-1, 0, 0, 1, 1, 3, 2, 5] if what == "verify" else [-1], 0, models.VOCAB))


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_doctor_calls_right_is_eager_in_float64_on_the_pair_itself(kind: str) -> None:
    """Eager's softmax is in float32, whatever the dtype."""
    pair = pair_of(kind, torch.float64)
    tried = {(p.part, p.what, p.backend) for p in table(kind, torch.float64).probes if p.what != UNMASKED}
    legal = {(part, what, name) for part, what, name in tried if legal_everywhere(kind, part, what, name)}
    assert {name for _, _, name in legal} >= {"eager", "sdpa", "flash_tree"}
    for part, what, name in legal:
        with attention.use(pair, "eager", part, (what,)):
            right = logits(pair, what)
        with ways.find(name).use(pair, part, what):
            assert worst(logits(pair, what), right) < 1e-5, (part, what, name)


def legal_everywhere(kind: str, part: str, what: str, name: str) -> bool:
    found = [p for p in table(kind, torch.float64).probes if (p.part, p.what, p.backend) == (part, what, name)]
    return all(p.works for p in found)


@pytest.mark.parametrize("kind", [*KINDS, *EXPERTS])
def test_every_probe_is_right_or_refused(kind: str) -> None:
    findings = table(kind)
    assert findings.ok and not findings.faults
    for p in findings.probes:
        if p.what == UNMASKED:
            continue
        assert p.verdict in ("ok", "refused", "not installed"), p
        if p.verdict == "ok":
            assert p.error is not None and p.band is not None and p.error <= p.band
        else:
            assert p.said and p.error is None
    kinds = {(p.part, p.kind) for p in findings.probes}
    assert len(kinds) == len(miniature.kinds_of(pair_of(kind), "target")) + 2
    every = {index for p in findings.probes if p.part == "target" for index in p.layers}
    assert every == set(range(len(pair_of(kind).layers)))


@pytest.mark.parametrize("kind", ["gpt_oss", "hybrid", "swa"])
def test_what_the_doctor_calls_refused_raises_before_any_kernel(kind: str) -> None:
    pair = pair_of(kind)
    for p in table(kind).probes:
        if p.verdict not in ("refused", "not installed"):
            continue
        way = ways.find(p.backend)
        if way.linear:
            assert FORMS[p.backend].missing("cpu") or FORMS[p.backend].refusal(9, True)
            continue
        message = re.escape(p.said.split(" (")[0])
        with (
            Counter() as ran,
            pytest.raises(ValueError, match=message),
            attention.use(pair, p.backend, p.part, (p.what,)),
        ):
            pass
        assert ran.ops == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_held_to_a_band_of_its_own(dtype: torch.dtype) -> None:
    findings = table("swa", dtype)
    assert findings.ok and findings.machine["pair"] == f"{str(dtype)[6:]} on cpu"
    assert max(p.band for p in findings.probes if p.band is not None) > 1e-3


@pytest.mark.parametrize("kind", [*KINDS, *EXPERTS])
def test_a_miniature_has_the_shapes_that_a_kernel_sees(kind: str) -> None:
    pair = pair_of(kind, torch.bfloat16)
    for subject in subjects(pair):
        mini, call = subject.pair, "draft" if subject.part == "drafter" else "verify"
        own = [c for i, c in attention.calls_of(pair, subject.part) if i == subject.layers[0] and c.kind == call]
        small = [c for i, c in attention.calls_of(mini, subject.part) if i == subject.site and c.kind == call]
        if subject.linear:
            assert own == [] and mini.layer_types[0] == "linear_attention"
            continue
        (mine,), (its,) = own, small
        assert its == mine and mini.text_config.vocab_size <= miniature.VOCAB
    long = models.fresh_target("swa")
    long.config.sliding_window = 4096
    (first, *_) = subjects(Pair(long))
    assert first.kind == "sliding attention of 4096" and first.pair.windows == (miniature.WINDOW,)


# -- what is wrong -----------------------------------------------------------------------------------------------------


def of(findings: Findings, **wanted: Any) -> list[Probe]:
    found = [p for p in findings.probes if all(getattr(p, name) == value for name, value in wanted.items())]
    assert found
    return found


def test_a_kernel_that_takes_no_window_fails_with_the_right_diagnosis_and_the_text_is_the_same_without_it(
    faults: None,
) -> None:
    """The founding failure: the drafter's sliding layers on a flash kernel whose signature lacks what they pass."""
    pair = pair_of("hybrid")
    findings = doctor(pair, ["eager", "sdpa", "old_kernel"], repeats=0)
    for p in of(findings, part="drafter", backend="old_kernel", what="draft"):
        assert p.verdict == "error" and p.diagnosis == "this kernel does not take a sliding window"
        assert p.said.startswith("TypeError: ") and "unexpected keyword argument 'sliding_window'" in p.said
    drafter = next(choice for choice in findings.choices if choice.part == "drafter")
    assert drafter.usable == ("eager", "sdpa") and findings.ok
    text = findings.to_text()
    assert "ERROR old_kernel: this kernel does not take a sliding window: TypeError" in text
    plain = ddlab.generate(Pair(pair.target), TEXT, method="ar", max_new_tokens=12, stop_token_ids=())
    for name in drafter.usable:
        with attention.use(pair, name, "drafter"):
            trace = ddlab.generate(pair, TEXT, budget=6, max_new_tokens=12, stop_token_ids=())
        assert trace.output_ids == plain.output_ids


def test_a_kernel_that_does_not_take_sinks_is_named() -> None:
    said = "TypeError: attend() got an unexpected keyword argument 's_aux'"
    assert probe.diagnose(said) == "this kernel does not take attention sinks (s_aux)"


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("RuntimeError: FlashAttention only support fp16 and bf16 data type", "this kernel does not know the dtype"),
        ("RuntimeError: No available kernel. Aborting execution.", "PyTorch has no such kernel"),
        ("IndexError: index 9 is out of bounds for dimension 0 with size 7", "a 4-D mask was read as padding"),
        ("InductorError: CppCompileError: C++ compile error", "the kernel could not be compiled"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "not enough memory"),
        ("ValueError: something else", ""),
    ],
)
def test_errors_are_traced_to_their_causes(said: str, cause: str) -> None:
    assert probe.diagnose(said).startswith(cause) and (cause != "" or probe.diagnose(said) == "")


@pytest.mark.parametrize(
    ("name", "kind", "what", "diagnosis"),
    [
        ("no_window", "swa", "prefill", "the window is ignored"),
        ("no_window", "gpt_oss", "prefill", "the window is ignored"),
        ("no_sinks", "gpt_oss", "step", "attention sinks (s_aux) are dropped"),
        ("as_bool", "swa", "verify", "the mask is added as ones and zeros"),
        ("as_chain", "llama", "verify", "the rows are read as a chain"),
    ],
)
def test_a_kernel_that_runs_and_is_wrong_is_called_wrong(
    faults: None, name: str, kind: str, what: str, diagnosis: str
) -> None:
    findings = doctor(pair_of(kind), ["eager", name], repeats=0)
    wrong = [p for p in of(findings, part="target", backend=name, what=what) if p.verdict == "wrong"]
    assert wrong and all(p.diagnosis.startswith(diagnosis) and p.error > p.band for p in wrong)
    assert ("sliding" in {p.kind.split(" ")[0] for p in wrong}) or "window" not in diagnosis


def test_a_drafter_set_to_a_kernel_that_ignores_the_window_is_wrong_not_working(faults: None) -> None:
    pair = Pair(models.target("swa"), models.random_drafter(models.target("swa"), layer_types=("sliding_attention",)))
    pair.drafter.model.set_attn_implementation("no_window")
    findings = doctor(pair, ["eager", "no_window"], repeats=0)
    (p,) = of(findings, part="drafter", backend="no_window", what="draft")
    assert (p.verdict, p.diagnosis) == ("wrong", "the window is ignored")
    choice = findings.choices[1]
    assert (choice.now, choice.works, choice.usable) == ("no_window", False, ("eager",))
    assert "drafter: set to no_window, which is wrong here" in findings.to_text()
    assert "no_window" in [way.name for way in ddlab.doctor.__globals__["_everything"](pair)]


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_a_drafter_called_without_a_mask_runs_its_sliding_layers_as_full_ones(name: str) -> None:
    """Transformers' own functions are right with a mask, and silently wrong without one."""
    wrong, right = of(table("swa"), part="drafter", backend=name, what=UNMASKED)
    assert (wrong.kind, wrong.verdict) == ("sliding attention of 8", "wrong")
    assert wrong.diagnosis == "the window and the order in the block are ignored, because the mask is None"
    assert (right.kind, right.verdict) == ("full attention", "ok")
    assert all(p.works for p in of(table("swa"), part="drafter", backend=name, what="draft"))
    both = dict.fromkeys(("sliding_attention", "full_attention"), "bidirectional")
    config = models.drafter_config(models.target("swa"), layer_types=("sliding_attention",))
    drafter = Drafter.from_state(config, models.drafter_state(config), block_attention=both)
    findings = doctor(Pair(models.target("swa"), drafter), [name], repeats=0)
    (p,) = of(findings, part="drafter", what=UNMASKED)
    assert p.diagnosis == "the window is ignored, because the mask is None"


def test_sliding_layers_without_a_window_are_a_fault_of_the_configuration() -> None:
    config = models.target_config("swa")
    config.sliding_window, config.use_sliding_window = None, False
    target = type(models.target("swa"))(config).eval()
    pair = Pair(target)
    assert faults_of(pair) == [
        "target: layers [0, 2] are sliding_attention, but sliding_window is None (use_sliding_window false?): they run "
        "as full attention"
    ]
    findings = doctor(pair, ["eager"], repeats=0)
    assert not findings.ok and "CANNOT decode exactly" in findings.to_text()


def test_a_drafter_whose_settings_and_model_disagree_is_a_fault() -> None:
    def changed(**settings: Any) -> Pair:
        drafter = models.random_drafter(models.target("swa"), layer_types=("sliding_attention", "full_attention"))
        for name, value in settings.items():
            setattr(drafter.model.config, name, value)
        return Pair(models.target("swa"), drafter)

    assert faults_of(changed()) == []
    assert "a window of 9, its settings one of 8" in faults_of(changed(sliding_window=9))[0]
    full = ["full_attention", "full_attention"]
    assert "layers [0] are ['full_attention'] in the model" in faults_of(changed(layer_types=full))[0]
    pair = changed()
    object.__setattr__(pair.drafter.settings, "sliding_window", None)
    assert "drafter: layers [0] are sliding_attention, but sliding_window is None" in faults_of(pair)[0]


def test_a_package_that_is_not_there_is_not_installed_and_transformers_says_so_too() -> None:
    findings = doctor(pair_of("llama"), ["flash_attention_2"], repeats=0)
    assert {p.verdict for p in findings.probes} == {"not installed"} and not findings.ok
    assert "not installed: flash_attention_2" in findings.to_text()
    with (
        pytest.raises(ImportError, match="FlashAttention2"),
        Way("flash_attention_2").unruled(pair_of("llama"), "target"),
    ):
        pass


# -- here or in a child ------------------------------------------------------------------------------------------------


class Ends:
    """What a child gets to unpickle in place of its subjects."""

    part, layers, kind = "target", (0,), "full attention"

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def test_a_crash_costs_one_probe_and_not_the_session() -> None:
    (found,) = children.in_a_child([Ends(os.abort)], Way("eager"), [(0, "prefill")])
    assert (found.verdict, found.what, found.backend) == ("crashed", "prefill", "eager")
    assert found.said.startswith("the process was ended by SIGABRT")


def test_a_child_that_gives_no_answer_is_ended_and_not_asked_again() -> None:
    wanted = [(0, "prefill"), (0, "step"), (0, "verify")]
    found = children.in_a_child([Ends(time.sleep, 60)], Way("eager"), wanted, patience=0.2)
    assert [p.verdict for p in found] == ["crashed", "not tried", "not tried"]
    assert all(p.said == "no answer within 0.2 seconds" for p in found)


def test_a_child_says_what_the_same_probe_says_here() -> None:
    some = subjects(pair_of("gpt_oss"))[:1]
    wanted = [(0, "prefill"), (0, "verify")]
    found = children.in_a_child(some, Way("flash_tree"), wanted, repeats=0)
    assert found == [Case(some[0], what).probe(Way("flash_tree"), repeats=0) for _, what in wanted]


def test_only_what_may_end_a_process_goes_to_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(children, "in_a_child", lambda subjects, way, wanted, repeats: asked.append(way.name) or [])
    some = subjects(pair_of("llama"))[:1]
    children.probes(some, [Way("eager"), Way("flex"), Way("flex_attention"), Way("sdpa")], repeats=0)
    assert asked == [name for name in ("flex", "flex_attention") if Way(name).missing("cpu") is None]
    assert probe.known("flex_attention") == Way("flex_attention")
    assert children.risky(Way("fla_chunk", linear=True)) and not children.risky(Way("chunk", linear=True))


def test_a_pair_that_cannot_be_made_small_is_tried_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Pair:
        raise ValueError("no causal class")

    monkeypatch.setattr(miniature, "small_target", refuse)
    pair = pair_of("swa")
    findings = doctor(pair, ["eager", "sdpa", "flex"], repeats=0)
    assert "no miniature (ValueError: no causal class)" in findings.notes[0]
    assert {p.verdict for p in findings.probes if p.backend == "sdpa" and p.what != UNMASKED} == {"ok"}
    assert {p.verdict for p in findings.probes if p.backend == "flex"} <= {"not tried", "not installed"}
    assert pair.attention == "sdpa"


# -- what is said ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("no file /home/ada/models/x/config.json here", "no file …/config.json here"),
        ("File '/Users/ada/a b.py', line 3", "File '…/a b.py', line 3"),
        (r"C:\Users\ada\x.py failed", "…/x.py failed"),
        ("~/models/tiny", "…/tiny"),
        ("z-lab/Qwen3.5-4B-DFlash, https://example.org/a/b, 1/2, and/or", None),
    ],
)
def test_folders_and_people_are_left_out(said: str, shown: str | None) -> None:
    assert public(said) == (said if shown is None else shown)


def test_the_text_can_be_pasted_into_an_issue() -> None:
    findings = doctor(pair_of("hybrid"), ["eager", "sdpa", "flash_attention_2", "tree", "chunk"], repeats=2)
    text = findings.to_text()
    assert text == str(findings) and max(map(len, text.splitlines())) <= 120
    for named in ("python: 3", f"torch: {torch.__version__.split('+')[0]}", "transformers: ", "platform: ", "cuda: "):
        assert named in text
    assert str(Path.home()) not in text and str(Path.cwd()) not in text and "/home/" not in text
    assert 'attention="auto" takes sdpa' in text and "median of 2" in text
    assert "target, linear attention (layers 0, 1, 2)" in text and "refused chunk: " in text
    assert json.loads(json.dumps(findings.to_dict()))["ok"] is True
    assert len(findings.to_frame()) == len(findings.probes)
    assert repr(findings).startswith("<Findings: Qwen3_5ForCausalLM can decode exactly; ")
    bundle = findings._repr_mimebundle_()
    assert bundle["text/plain"] == text and "srcdoc" in bundle["text/html"]


def test_the_cost_of_the_automatic_choice_is_measured_against_the_fastest_that_is_right() -> None:
    findings = doctor(pair_of("swa"), ["eager", "sdpa", "flash_tree"], repeats=1)
    for choice in findings.choices:
        assert choice.auto == "sdpa" == choice.now and choice.works
        assert choice.fastest in choice.usable and choice.slower >= 1.0 and choice.repeats == 1


def test_the_doctor_looks_at_the_embedded_pair_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "probes", lambda subjects, chosen, repeats, small: asked.extend(chosen) or [])
    asked: list[Way] = []
    assert doctor(repeats=0).pair == "tiny-hybrid"
    assert [w.name for w in asked] == [*attention.BACKENDS, *(name for name in FORMS if name != "flattened")]


def test_a_subject_is_data_for_a_child() -> None:
    assert all(isinstance(s, Subject) and s.calls for s in subjects(pair_of("llama")))


# -- the commands ------------------------------------------------------------------------------------------------------


def test_the_command_says_whether_the_pair_can_decode(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--backends", "eager", "tree"]) == 0
    assert "ddlab doctor: tiny-hybrid can decode exactly on this machine" in capsys.readouterr().out
    assert main(["doctor", "--backends", "flash_attention_3"]) == 1
    assert "CANNOT decode exactly" in capsys.readouterr().out
    assert main(["doctor", "--backends", "eagre"]) == 2
    assert "did you mean 'eager'" in capsys.readouterr().err


def test_the_command_answers_for_a_drafter_that_says_two_things(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = models.drafter_config(models.target("dense"), layer_types=("sliding_attention", "full_attention"))
    folder = tmp_path / "drafter"
    folder.mkdir()
    write_folder(folder, config | {"use_sliding_window": False})
    target = embedded_folder("tiny-hybrid") / "target"
    assert main(["doctor", "--target", str(target), "--drafter", str(folder)]) == 1
    said = capsys.readouterr().out
    assert "layer_types has sliding layers, use_sliding_window is false" in said and "torch: " in said
    assert str(tmp_path) not in said
    assert main(["doctor", "--target", str(tmp_path / "nothing")]) == 2


def test_the_compare_command_prints_a_verdict_and_writes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "layers.html"
    asked = ["compare", "--prompt", "Why?", "--what", "verify", "--rounds", "1", "--backends", "sdpa"]
    assert main([*asked, "flash_tree", "--out", str(out)]) == 0
    assert "verify: 1 round" in capsys.readouterr().out and "data-layers" in out.read_text("utf-8")
    assert main([*asked, "flattened"]) == 1
    assert "WRONG  flattened, layers 0-2, 4-6" in capsys.readouterr().out
    assert main([*asked, "--out", str(tmp_path / "no" / "x.html")]) == 2
    assert main(["compare", "--backends", "spda"]) == 2
