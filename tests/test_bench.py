"""The bench: its tables say what its JSON says, its floor is counted by hand, and a script reaches its tau."""

from __future__ import annotations

import functools
import json
import math
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ddlab
from ddlab import cli
from ddlab.bench import bench
from ddlab.benching import floor, trace_cost
from ddlab.benching.scripted import Script, accept_probability
from ddlab.benching.shape import SHAPES, Shape, drafter_tensors, random_pair
from ddlab.pair import Pair
from ddlab.tokens import Token

TINY = Shape(
    target=SHAPES["qwen3.6-27b"].target
    | dict(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        rope_parameters=SHAPES["qwen3.6-27b"].target["rope_parameters"] | dict(mrope_section=[2, 1, 1]),
    ),
    drafter=SHAPES["qwen3.6-27b"].drafter
    | dict(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_target_layers=8,
        dflash_config=dict(mask_token_id=380, target_layer_ids=[1, 4, 6]),
    ),
)


@pytest.fixture(scope="module", autouse=True)
def small_copies() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(floor.COPIED, "cpu", 2**20)
        patched.setattr(ddlab, "load_pair", functools.cache(ddlab.load_pair))
        yield


@functools.cache
def tiny_pair() -> Pair:
    return random_pair(TINY, "cpu", torch.float32)


@functools.cache
def measured() -> Any:
    scripts = [Script(2.0), Script(probabilities=[1.0, 0.5])]
    return bench(tiny_pair(), prefixes=[9, 30], budgets=[4, 20], repeats=4, scripts=scripts, rounds=8)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def tables(text: str) -> list[list[dict[str, str]]]:
    """The tables of a markdown text, as rows by head."""
    found = []
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        heads, _, *rows = block.strip().split("\n")
        found.append([dict(zip(cells(heads), cells(row), strict=True)) for row in rows])
    return found


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        status = cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
        status = int(end.code or 0)
    return status, *capsys.readouterr()


# ---- table and JSON --------------------------------------------------------------------------------------------------


def test_every_case_is_there_once_with_its_repeats() -> None:
    data = measured().data
    keys = [(c["method"], c["budget"], c["prefix"]) for c in data["cases"]]
    sizes = [("ar", None), ("dflash", None), ("ddtree", 4), ("ddtree", 20)]
    assert sorted(keys, key=str) == sorted([(*size, prefix) for size in sizes for prefix in (9, 30)], key=str)
    rows = {("ar", None): 1, ("dflash", None): 16, ("ddtree", 4): 5, ("ddtree", 20): 21}
    for case in data["cases"]:
        assert case["rows"] == rows[case["method"], case["budget"]]
        assert {spread["n"] for spread in case["seconds"].values()} == {4}
        assert all(s["p10"] <= s["median"] <= s["p90"] for s in case["seconds"].values())
        phases = sum(s["p10"] for name, s in case["seconds"].items() if name != "round")
        assert 0 < phases <= case["seconds"]["round"]["p90"]


def test_the_table_says_what_the_json_says() -> None:
    data = json.loads(json.dumps(measured().data))
    rounds, simulated = tables(measured().to_text())
    assert len(rounds) == len(data["cases"]) and len(simulated) == len(data["simulated"])
    for row, case in zip(rounds, data["cases"], strict=True):
        assert (row["method"], row["prefix"], row["rows"]) == (case["method"], str(case["prefix"]), str(case["rows"]))
        assert row["budget"] == ("" if case["budget"] is None else str(case["budget"]))
        for name, spread in case["seconds"].items():
            assert float(row[name]) == pytest.approx(1e3 * spread["median"], rel=0.006)
        ratio = case["seconds"]["round"]["median"] / case["floor"]
        assert float(row["times floor"]) == pytest.approx(ratio, abs=0.0051)
    for row, case in zip(simulated, data["simulated"], strict=True):
        assert float(row["tokens/s"]) == pytest.approx(case["tokens"] / case["seconds"], rel=1e-3)
        assert float(row["tokens per round"]) == pytest.approx(case["tokens"] / case["rounds"], abs=0.0051)


def test_random_weights_and_simulated_acceptance_are_said_in_every_table_and_in_the_json() -> None:
    text, data = measured().to_text(), measured().data
    for part in text.split("\n## "):
        assert "RANDOM WEIGHTS" in part
    assert "## SIMULATED" in text and "RANDOM WEIGHTS" in data["pair"]["notice"]
    assert {run["label"] for run in data["simulated"]} == {"SIMULATED"}
    real = bench(ddlab.load_pair(), prefixes=[5], methods=["ar"], repeats=1)
    assert "RANDOM" not in real.to_text() and real.data["pair"]["notice"] is None


def test_the_floor_counts_what_a_step_reads() -> None:
    def numbers(*modules: Any) -> int:
        return sum(p.numel() for module in modules for p in module.parameters())

    for pair in (tiny_pair(), ddlab.load_pair()):  # an own head, and one that is the embedding
        size = floor.weight_bytes(pair)
        head = 4 * pair.rows * pair.text_config.hidden_size
        assert size["target"] == 4 * numbers(pair.text_model.layers, pair.text_model.norm)
        assert pair.drafter is not None and size["drafter"] == 4 * numbers(pair.drafter.model)
        assert size["head"] == size["draft_head"] == head
        seconds = floor.floor_seconds(size, 1e9)
        assert seconds["plain"] == pytest.approx((size["target"] + head) / 1e9)
        assert seconds["drafted"] == pytest.approx((size["target"] + 2 * head + size["drafter"]) / 1e9)


def test_the_cost_model_reads_the_json(tmp_path: Path) -> None:
    data = json.loads(measured().save(tmp_path / "bench.json").read_text("utf-8"))
    from ddlab.costs.model import CostModel

    cost = CostModel.from_dict(data["cost"]["eager"])
    assert (cost.rows, cost.prefixes, cost.samples) == ((5, 21), (9, 30), 4)
    own = {(c["prefix"], c["rows"]): c["seconds"]["verify"] for c in data["cases"] if c["method"] == "ddtree"}
    for (prefix, rows), spread in own.items():
        seconds = float(cost.phases(rows, prefix)["verify"])
        assert spread["p10"] * 0.5 <= seconds <= spread["p90"] * 3
    assert cost.plain is not None and (cost.plain > 0).all()
    assert measured().cost("eager").rows == cost.rows


def test_a_timed_round_leaves_no_trace_of_itself() -> None:
    from ddlab.bench import prompt_ids, timed_round
    from ddlab.decode import Decoder

    decoder = Decoder(tiny_pair(), budget=6, max_new_tokens=40, stop_token_ids=())
    decoder.start(prompt_ids(tiny_pair(), 12))
    before = decoder.ids
    with decoder.register_hook("verify", lambda d, v: None):
        taken = timed_round(decoder)
    assert taken["round"] == pytest.approx(sum(s for name, s in taken.items() if name != "round"))
    decoder.back()
    assert decoder.ids == before and decoder.trace.rounds == 0


# ---- random weights --------------------------------------------------------------------------------------------------


def test_random_weights_give_finite_logits_and_exact_trees() -> None:
    trace = ddlab.generate(tiny_pair(), list(range(20)), budget=9, max_new_tokens=6, stop_token_ids=())
    assert ddlab.audit(tiny_pair(), trace).ok
    with torch.no_grad():
        out = tiny_pair().target(torch.arange(50)[None], output_hidden_states=True)
    assert all(torch.isfinite(h).all() and h.std() < 10 for h in out.hidden_states)
    again = random_pair(TINY, "cpu", torch.float32).target.parameters()
    assert all(torch.equal(a, b) for a, b in zip(tiny_pair().target.parameters(), again, strict=True))


def test_the_published_shape_is_the_published_size() -> None:
    drafter = SHAPES["qwen3.6-27b"].drafter
    tensors = dict(drafter_tensors(drafter))
    assert len(tensors) == 58 and math.isclose(sum(map(math.prod, tensors.values())), 1.73e9, rel_tol=0.01)
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    with torch.device("meta"):
        target = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPES["qwen3.6-27b"].target))
    kinds = target.config.layer_types
    assert (kinds.count("linear_attention"), kinds.count("full_attention"), kinds[3]) == (48, 16, "full_attention")
    assert math.isclose(sum(p.numel() for p in target.parameters()), 26.9e9, rel_tol=0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_a_shape_without_a_device_for_it_is_refused_before_anything_is_made() -> None:
    with pytest.raises(ValueError, match="53 GiB of a GPU's memory, and PyTorch sees no GPU"):
        random_pair("qwen3.6-27b")


# ---- scripted acceptance ---------------------------------------------------------------------------------------------


@given(st.integers(1, 15), st.floats(0, 1))
def test_the_probability_gives_tau(depth: int, share: float) -> None:
    tau = 1 + depth * share
    p = accept_probability(tau, depth)
    assert 0 <= p <= 1 and sum(p**d for d in range(depth + 1)) == pytest.approx(tau, abs=1e-9)


@given(st.integers(2, 15), st.floats(0.02, 0.98), st.integers(0, 99))
def test_scripted_depths_have_their_distribution(depth: int, share: float, seed: int) -> None:
    """As a binomial test: how often a depth is reached, within 4 standard deviations of its probability."""
    script, rounds = Script(1 + depth * share, seed=seed), 400
    deep = np.array([script.accepted(depth) for _ in range(rounds)])
    for d, chance in enumerate(np.cumprod(script.chances(depth)), 1):
        assert abs((deep >= d).sum() - rounds * chance) <= 4 * math.sqrt(rounds * chance * (1 - chance)) + 1


@pytest.mark.parametrize(("method", "budget"), [("dflash", None), ("ddtree", 6), ("ddtree", 20)])
def test_a_run_by_script_accepts_what_the_script_says(method: str, budget: int | None) -> None:
    from ddlab.decode import Decoder

    script, rounds = Script(3.0, seed=1), 24
    decoder = Decoder(tiny_pair(), method, budget=budget, max_new_tokens=16 * rounds, stop_token_ids=())
    decoder.start([1, 2, 3])
    with script.on(decoder):
        for _ in range(rounds):
            decoder.step()
    depth, expected = min(15, budget or 15), script.again()
    steps = decoder.trace.steps
    assert [step.accepted for step in steps] == [expected.accepted(depth) for _ in steps]
    assert {step.stop_reason for step in steps} <= {"mismatch", "exhausted"}
    assert {step.edited for step in steps} == {("draft", "verify")}
    spent = 4 * math.sqrt(np.var([step.accepted for step in steps]) / rounds)
    assert abs(np.mean([len(step.emitted) for step in steps]) - 3.0) <= spent
    plain = decoder.step()  # the hooks are gone
    assert plain.edited == ()


def test_probabilities_by_depth_end_where_they_end() -> None:
    script = Script(probabilities=[1.0, 1.0, 0.0, 1.0])
    assert {script.accepted(9) for _ in range(20)} == {2} and script.expected(9) == 3.0
    assert script.expected(1) == 2.0


@pytest.mark.parametrize("tau", [0.5, 17.0, float("nan")])
def test_a_tau_that_no_acceptance_gives_is_refused(tau: float) -> None:
    with pytest.raises(ValueError, match="15 drafts deep, a round brings 1 to 16 tokens"):
        accept_probability(tau, 15)


# ---- what recording costs --------------------------------------------------------------------------------------------


def test_trace_cost_compares_runs_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_cost, "LONG", 20)
    found = trace_cost.trace_cost(tiny_pair(), [6], ["ar", "ddtree"], repeats=2, tokens=6)["cases"]
    assert (found[0]["method"], found[0]["budget"], found[0]["rounds"]) == ("ar", None, 5)
    for case in found:
        assert {s["n"] for s in (*case["tokens_per_second"].values(), case["lost"])} == {2}
        assert case["bytes_a_round"] > 500
    trace = ddlab.generate(tiny_pair(), [1], method="ar", max_new_tokens=4, stop_token_ids=())
    assert trace.rounds == 3  # recording is on again


def test_a_run_that_records_nothing_has_the_same_text() -> None:
    from ddlab.decode import Decoder

    decoders = [Decoder(tiny_pair(), budget=6, max_new_tokens=12, stop_token_ids=()) for _ in range(2)]
    list(decoders[0].run([1, 2]))
    with trace_cost._nothing_recorded():
        list(decoders[1].run([1, 2]))
    assert decoders[0].ids == decoders[1].ids and decoders[1].trace.rounds == 0


def test_a_long_trace_stays_small() -> None:
    """2,000 rounds at budget 64 in less than 100 MB, counted in bytes, with the text of every id of 248,320."""
    some, more = (trace_cost.long_trace(300, rounds, 64) for rounds in (40, 200))
    memory, disk = ((more[k] - some[k]) / 160 for k in ("memory_bytes", "disk_bytes"))
    tracemalloc.start()
    tokens = {i: Token(i, b"eightish") for i in range(248_320)}
    written = dict.fromkeys(tokens, 0)  # what the writer remembers
    table = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(written) == 248_320 and 2000 * memory + table < 100e6
    assert 1e3 < disk < 10e3 and more["disk_bytes"] / 200 == pytest.approx(disk, rel=0.3)  # later rounds cost no more


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_and_writes_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    status, text, err = run(
        capsys, "bench", "--prefix", 6, "--budget", 4, "--method", "ddtree", "--repeats", 2, "--scripted-tau", 2,
        "--rounds", 3, "--out", out,
    )  # fmt: skip
    assert (status, err) == (0, "") and text.endswith(f"\nJSON: {out}\n")
    data = json.loads(out.read_text("utf-8"))
    assert (data["schema"], data["version"], data["settings"]["prefixes"]) == ("ddlab.bench", 1, [6])
    rounds, simulated = tables(text)
    assert [row["budget"] for row in rounds] == ["4"] and [row["script"] for row in simulated] == ["2"]
    assert simulated[0]["times ar"] == ""  # plain decoding was not timed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prefix", 0], "1 or more"),
        (["--budget", 0], "1 or more"),
        (["--repeats", 0], "1 or more"),
        (["--scripted-tau", 9, "--budget", 4], "a round brings 1 to 5 tokens, not 9"),
        (["--scripted-tau", 2, "--method", "ar"], "--method dflash or ddtree"),
        (["--scripted-accept", 1.5], "between 0 and 1"),
        (["--prefix", 10**7], "shorter prefixes"),
        (["--out", "/nowhere/bench.json"], "create it first"),
        (["--shape", "qwen3.6-27b", "--target", "x"], "leave --target out"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[object], said: str
) -> None:
    status, text, err = run(capsys, "bench", *arguments)
    assert (status, text) == (cli.BAD_INPUT, "") and err.startswith("ddlab: ") and said in err
    assert err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="graph runs there")
def test_an_engine_that_cannot_run_the_pair_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    status, _, err = run(capsys, "bench", "--engine", "graph", "eager")
    assert status == cli.BAD_INPUT and "CUDA graphs" in err


def test_engines_are_compared_in_one_run() -> None:
    """With a second engine that is the first one under another name: ratios are of the JSON's medians."""
    from ddlab import bench as module

    data = json.loads(json.dumps(measured().data))
    for case in list(data["cases"]):
        seconds = {k: {**s, "median": 2.5 * s["median"]} for k, s in case["seconds"].items()}
        data["cases"].append({**case, "engine": "slow", "seconds": seconds})
    data["settings"]["engines"] = ["eager", "slow"]
    ratios = tables(module.Bench(data).to_text())[1]
    assert len(ratios) == 8 and {(row["verify"], row["round"]) for row in ratios} == {("2.50", "2.50")}


def test_a_shape_is_matched_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"unknown shape 'qwen3.6', it is one of .*did you mean 'qwen3.6-27b'"):
        random_pair("qwen3.6")
