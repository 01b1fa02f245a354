"""A sweep's folder: runs equal to single decodes, kept through kills, refusals and failures; figures by hand."""

from __future__ import annotations

import fcntl
import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import numpy as np
import pytest

import ddlab
from ddlab import cli
from ddlab.decode import Decoder, generate
from ddlab.pair import Pair
from ddlab.sweep import Process, _share, sweep
from ddlab.sweeps.promptfile import as_entries, read_prompts
from ddlab.sweeps.results import Sweep
from ddlab.sweeps.sweepfile import Spec, SweepFolder, plan
from ddlab.trace import Trace
from ddlab.views.sweep import sweep_report, sweep_view

HERE = Path(__file__).parent
SETTINGS: dict[str, Any] = dict(
    budgets=[3, 9], temperatures=[0.0, 0.9], seeds=[4, 7], max_new_tokens=20, progress=False
)
SMALL: dict[str, Any] = SETTINGS | dict(budgets=[3], temperatures=[0.9], seeds=[4])
PROMPTS = [
    {"id": "one", "kind": "short", "prompt": [5, 6, 7]},
    {"id": "two/…", "kind": "short", "prompt": [9, 8]},
    {"id": "three", "kind": "long", "prompt": list(range(10, 40))},
]


@lru_cache
def pair() -> Pair:
    """A random hybrid that ends many of its texts early."""
    target = models.fresh_target("hybrid")
    target.generation_config.eos_token_id = list(range(0, models.VOCAB, 24))
    return Pair(target, models.random_drafter(target, block=5, mask_token_id=1), name="tiny")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """A whole sweep, to be read only."""
    return sweep(pair(), tmp_path_factory.mktemp("sweep"), PROMPTS, **SETTINGS)


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted((folder / "runs").rglob("*")) if p.is_file()}


def without_times(trace: Trace) -> list[Any]:
    return [
        (s.start, s.tree.tokens.tolist(), s.tree.parents.tolist(), s.path, s.emitted, s.stop_reason)
        for s in trace.steps
    ]


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_every_run_is_the_decode_of_its_settings(made: Sweep) -> None:
    prompts = {str(entry["id"]): entry["prompt"] for entry in PROMPTS}
    assert made.complete and not made.failed and made.planned == len(made.runs) == 3 * (1 + 2) * (1 + 1 + 2)
    for run in made.runs:
        settings = dict(method=run.method, budget=run.budget, temperature=run.temperature, seed=run.seed)
        alone = generate(pair(), prompts[run.prompt], max_new_tokens=20, **settings)
        kept = made.trace(run.run)
        assert without_times(kept) == without_times(alone)
        assert (run.new_tokens, run.rounds, run.finished) == (len(alone.output_ids), alone.rounds, alone.finished)
        assert kept.header["sweep"]["prompt"] == run.prompt


def test_only_what_differs_is_run() -> None:
    specs = plan({"methods": ["ar", "dflash", "ddtree"], **SETTINGS}, as_entries(PROMPTS))
    assert len({spec.name.lower() for spec in specs}) == len(specs)
    assert sum(spec.temperature == 0 for spec in specs) == 3 * 4  # no seed changes them
    assert {spec.budget for spec in specs if spec.method != "ddtree"} == {None}
    assert all(Path(spec.name).name == spec.name and spec.name.isascii() for spec in specs)


def test_a_second_call_decodes_nothing(made: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "start", lambda *_: pytest.fail("something was decoded again"))
    before = content(made.path)
    again = sweep(pair(), made.path, PROMPTS, **SETTINGS)
    assert again.rows() == made.rows() and content(made.path) == before


def test_a_killed_sweep_loses_the_run_under_way_only(tmp_path: Path) -> None:
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[2])\n"
        "import test_sweep as t; from ddlab.trace import TraceWriter\n"
        "append = TraceWriter.append\n"
        "TraceWriter.append = lambda *a: (append(*a), time.sleep(0.02))\n"  # so that there is a run under way
        "t.sweep(t.pair(), sys.argv[1], t.PROMPTS, **t.SMALL)\n"
    )
    folder = tmp_path / "sweep"
    with subprocess.Popen([sys.executable, "-c", code, str(folder), str(HERE)], cwd=HERE) as child:
        deadline = time.monotonic() + 120
        while len(list((folder / "runs").glob("*"))) < 4 or not list((folder / "partial").glob("*/trace.jsonl")):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        child.send_signal(signal.SIGKILL)
    before, left = content(folder), Sweep(folder)
    assert 0 < len(left.runs) < left.planned and not left.complete and not (folder / "report.html").exists()
    results = sweep(pair(), folder, PROMPTS, **SMALL)
    after = content(folder)
    assert results.complete and len(results.runs) == results.planned
    assert {name: after[name] for name in before} == before
    assert not (folder / "partial").exists() and (folder / "report.html").exists()


def test_an_interrupt_ends_the_sweep_and_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = Decoder.step, []

    def interrupted(self: Decoder) -> Any:
        steps.append(1)
        if len(steps) == 30:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Decoder, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep(pair(), tmp_path, PROMPTS, **SMALL)
    assert 0 < len(Sweep(tmp_path).runs) < Sweep(tmp_path).planned
    assert sweep(pair(), tmp_path, PROMPTS, **SMALL).complete


def test_a_damaged_run_is_named_and_the_others_are_there(made: Sweep, tmp_path: Path) -> None:
    files = SweepFolder.create(tmp_path, made.manifest)
    for run in made.runs:
        made.trace(run.run).save(files.begin(run.run))
        files.finish(run.run)
    (files.run_path(made.runs[0].run) / "trace.jsonl").write_text("{")
    left = Sweep(tmp_path)
    assert len(left.runs) == len(made.runs) - 1 and left.pending == [made.runs[0].run]
    assert "sweep again" in left.notes[0] and made.runs[0].run in left.notes[0]


# ---- failures and refusals -------------------------------------------------------------------------------------------


def test_a_prompt_that_does_not_fit_fails_alone_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [{"id": "long", "prompt": [3] * 505}, *PROMPTS[:1]]  # the target has 512 positions
    kept = dict(methods=["ar", "ddtree"], budgets=[3], max_new_tokens=10, progress=False)
    results = sweep(pair(), tmp_path, prompts, **kept)
    assert results.complete and len(results.runs) == 2 and len(results.failed) == 2
    assert all("515 positions" in failed["error"] and failed["prompt"] == "long" for failed in results.failed)
    assert [group.failed_runs for group in results.summary()] == [1, 1]
    assert "515 positions" in results.to_text() and (tmp_path / "report.html").exists()
    monkeypatch.setattr(Decoder, "_check_room", lambda *_: None)
    again = sweep(pair(), tmp_path, prompts, **kept)
    assert not again.failed and len(again.runs) == 4


def test_any_error_of_a_run_is_kept_with_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = Decoder.verify

    def broken(self: Decoder) -> Any:
        if self.method == "dflash":
            raise RuntimeError("CUDA error: an illegal memory access")
        return verify(self)

    monkeypatch.setattr(Decoder, "verify", broken)
    results = sweep(pair(), tmp_path, PROMPTS[:1], budgets=[3], max_new_tokens=8, progress=False)
    assert [failed["method"] for failed in results.failed] == ["dflash"] and len(results.runs) == 2
    assert "in broken" in results.failed[0]["traceback"]


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(max_new_tokens=21), "settings.max_new_tokens is 20 there, not 21"),
        (dict(budgets=[3]), r"settings.budgets is \[3, 9\] there, not \[3\]"),
        (dict(prompts=PROMPTS[:2]), "it has other prompts three"),
        (dict(prompts=[*PROMPTS, [1, 2]]), "it lacks the prompts prompt-4"),
        (dict(prompts=[{**PROMPTS[0], "prompt": [1]}, *PROMPTS[1:]]), "it has other texts for one"),
        (dict(prompts=PROMPTS[::-1]), "its prompts are in another order"),
    ],
)
def test_a_sweep_of_something_else_is_refused_and_says_of_what(made: Sweep, change: dict[str, Any], said: str) -> None:
    wanted = {"prompts": PROMPTS, **SETTINGS, **change}
    with pytest.raises(ValueError, match=f"is a sweep of something else: {said}.*Give another folder"):
        sweep(pair(), made.path, **wanted)


def test_another_pair_is_refused(made: Sweep) -> None:
    other = Pair(pair().target, models.random_drafter(pair().target, block=4, mask_token_id=1), name="tiny")
    with pytest.raises(ValueError, match=r"pair\.drafter\.block_size is 5 there, not 4"):
        sweep(other, made.path, PROMPTS, **SETTINGS)


@pytest.mark.parametrize(
    "settings, said",
    [
        (dict(methods=["ddtre"]), "did you mean 'ddtree'"),
        (dict(methods=[]), "at least one method"),
        (dict(methods="ar"), "a list"),
        (dict(budgets=[-1]), "budget must be"),
        (dict(budgets=[2.5]), "integers"),
        (dict(temperatures=[-1.0]), "temperature"),
        (dict(seeds=["a"]), "integers"),
        (dict(max_new_tokens=1), "2 or more"),
        (dict(prompts=[]), "at least one prompt"),
        (dict(prompts=[[1, 2], [1, 2]]), "prompt 2, is the prompt of prompt 1 again"),
        (dict(prompts=[{"id": "a", "prompt": [1]}, {"id": "a", "prompt": [2]}]), "has the id 'a' of prompt 1"),
        (dict(prompts=[""]), "has no prompt to run"),
        (dict(prompts=[{"text": "x"}]), 'has no "prompt"'),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_written(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        sweep(pair(), tmp_path / "sweep", **{"prompts": PROMPTS, "progress": False, **settings})
    assert not (tmp_path / "sweep").exists()


def test_a_pair_without_drafter_decodes_plainly_only(tmp_path: Path) -> None:
    alone = Pair(pair().target, name="tiny")
    with pytest.raises(ValueError, match=r"methods=\['ar'\]"):
        sweep(alone, tmp_path, PROMPTS, progress=False)
    assert len(sweep(alone, tmp_path, PROMPTS[:1], methods=["ar"], max_new_tokens=4, progress=False).runs) == 1


def test_other_peoples_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"thesis.tex.*empty folder"):
        sweep(pair(), tmp_path, PROMPTS, progress=False)
    with pytest.raises(FileExistsError, match="is a file"):
        sweep(pair(), tmp_path / "thesis.tex", PROMPTS, progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(FileNotFoundError, match=r"no sweep in .*sweep.json"):
        Sweep(tmp_path)


@pytest.mark.parametrize(
    "lines, said",
    [
        (b"", "holds no prompt"),
        (b"\n  \n", "holds no prompt"),
        (b'{"prompt": "a"}\n\xff\n', "line 2, is not UTF-8"),
        (b'{"prompt": "a"}\nWhy?\n', "line 2, is no JSON"),
        (b'["a"]\n', 'line 1, has no "prompt"'),
        (b'{"prompt": "a"}\n\n{"prompt": "a"}\n', "line 3, is the prompt of p.jsonl, line 1 again"),
        (b'{"prompt": 3}\n', "line 1, has no prompt to run"),
    ],
)
def test_a_prompt_file_that_cannot_be_read_names_the_line(tmp_path: Path, lines: bytes, said: str) -> None:
    (tmp_path / "p.jsonl").write_bytes(lines)
    with pytest.raises(ValueError, match=said):
        read_prompts(tmp_path / "p.jsonl")


def test_a_prompt_file_with_a_byte_order_mark_and_windows_line_ends_is_read(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"id": 7, "kind": "k", "prompt": "b"}\r\n')
    assert read_prompts(tmp_path / "p.jsonl") == [("line-1", "prompt", "a"), ("7", "k", "b")]


def test_the_prompts_of_ddlab_are_found() -> None:
    entries = read_prompts()
    assert len(entries) == 72 and entries[0].id == "chat-01" and len({entry.kind for entry in entries}) > 3


# ---- several processes -----------------------------------------------------------------------------------------------


def processes(monkeypatch: pytest.MonkeyPatch, index: int, count: int) -> None:
    for name, value in {"RANK": index, "WORLD_SIZE": count, "LOCAL_RANK": index}.items():
        monkeypatch.setenv(name, str(value))


def test_shares_are_whole_texts_and_together_everything() -> None:
    specs = plan({"methods": ["ar", "ddtree"], **SETTINGS}, as_entries(PROMPTS))
    orders = [list(_share(specs, Process(i, 2))) for i in range(2)]
    groups = list(dict.fromkeys(spec.group for spec in specs))
    for i, order in enumerate(orders):
        assert sorted(spec.name for spec in order) == sorted(spec.name for spec in specs)
        met = list(dict.fromkeys(spec.group for spec in order))
        assert met == [*groups[i::2], *reversed(groups[1 - i :: 2])]
        assert [spec.group for spec in order] == [group for group in met for s in specs if s.group == group]
    assert len({next(s.method for s in orders[0] if s.group == group) for group in groups[::2]}) == 2  # in turn


def test_a_process_whose_partner_never_comes_does_its_share_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes(monkeypatch, 1, 2)
    results = sweep(pair(), tmp_path, PROMPTS, budgets=[3], max_new_tokens=6, progress=False)
    assert results.complete and (tmp_path / "report.html").exists()


def test_what_another_process_holds_is_left_to_it(tmp_path: Path) -> None:
    kept = dict(methods=["ar"], max_new_tokens=4, progress=False)
    name = Spec("one", "short", "ar", None, 0.0, 0).name
    (tmp_path / "claims").mkdir()
    SweepFolder.create(tmp_path / "s", sweep(pair(), tmp_path / "other", PROMPTS, **kept).manifest)
    (tmp_path / "s" / "claims").mkdir()
    with (tmp_path / "s" / "claims" / name).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        partial = sweep(pair(), tmp_path / "s", PROMPTS, **kept)
        assert partial.pending == [name] and len(partial.runs) == 2
        assert not (tmp_path / "s" / "report.html").exists()
    assert sweep(pair(), tmp_path / "s", PROMPTS, **kept).complete


def test_two_processes_of_accelerate_make_one_sweep(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": text}) for text in ("What is a tree?", "Hi!", "Why is the sky blue?", "Count.")]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]  # or no GPU
    command = ["-m", "ddlab", "sweep", "out", "--prompts", "p.jsonl", "--max-new-tokens", "8", "--budget", "4"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*launch, *command, "--method", "ar", "ddtree"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    results = Sweep(tmp_path / "out")
    assert results.complete and len(results.runs) == 8 and (tmp_path / "out" / "report.html").exists()
    by_prompt = defaultdict(set)
    for run in results.runs:
        by_prompt[run.prompt].add(tuple(results.trace(run.run).header["sweep"]["process"]))
    assert set.union(*by_prompt.values()) == {(0, 2, 0), (1, 2, 1)}
    assert done.stdout.count("8 of 8 runs") == 1


def test_a_process_takes_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert [Process(i, 3, i).device for i in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert Process(1, 2, 1).device == "cpu"


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_figures_are_those_of_the_traces(made: Sweep) -> None:
    for group in made.summary():
        sums: dict[str, list[float]] = {}
        short, rounds = 0, 0
        for run in made.runs:
            if (run.method, run.budget, run.temperature) == (group.method, group.budget, group.temperature):
                trace = made.trace(run.run)
                if trace.finished == "stop_token" and len(trace.output_ids) < 20:
                    short += 1
                    continue
                total = sums.setdefault(run.prompt, [0, 0, 0.0])
                total[0] += sum(len(step.emitted) for step in trace.steps)
                total[1] += trace.rounds
                total[2] += sum(sum(step.times.values()) for step in trace.steps)
                rounds += trace.rounds
        assert (group.short_runs, group.tokens_per_round.rounds) == (short, rounds)
        assert group.tokens_per_round.prompts == len(sums)
        if sums:
            assert float(group.tokens_per_round) == pytest.approx(np.mean([t / r for t, r, _ in sums.values()]))
            assert float(group.tokens_per_second) == pytest.approx(np.mean([t / s for t, _, s in sums.values()]))
    assert sum(group.short_runs for group in made.summary()) > 0


def test_a_text_is_short_under_every_method_or_none(made: Sweep) -> None:
    said = defaultdict(set)
    for run in made.runs:
        said[run.prompt, run.temperature, run.seed].add(run.short)
    assert all(len(verdicts) == 1 for verdicts in said.values()) and {True} in said.values()


def test_kinds_add_up(made: Sweep) -> None:
    for key in made.keys:
        whole = next(g for g in made.summary() if (g.method, g.budget, g.temperature) == key)
        parts = [g for g in made.summary(by_kind=True) if (g.method, g.budget, g.temperature) == key]
        assert [g.kind for g in parts] == ["short", "long"]
        assert whole.runs == sum(g.runs for g in parts) and whole.short_runs == sum(g.short_runs for g in parts)


def test_comparisons_are_by_prompt_over_shared_seeds(made: Sweep) -> None:
    found = {p.ours: p for p in made.compare("tokens_per_round", ("dflash", None))}
    assert len(found) == 2 * 3
    pair_of = found["ddtree, budget 9, T = 0.9"]
    taus: dict[str, dict[str, list[int]]] = {"ddtree": {}, "dflash": {}}
    for run in made.runs:
        if run.temperature == 0.9 and not run.short and (run.method == "dflash" or run.budget == 9):
            total = taus[run.method].setdefault(run.prompt, [0, 0])
            total[0] += run.new_tokens - 1
            total[1] += run.rounds
    ratios = [
        (taus["ddtree"][p][0] / taus["ddtree"][p][1]) / (taus["dflash"][p][0] / taus["dflash"][p][1])
        for p in taus["dflash"]
    ]
    assert pair_of.theirs == "dflash" and pair_of.ratio.prompts == len(ratios)
    assert pair_of.ratio.value == pytest.approx(math.exp(np.mean(np.log(ratios))))
    assert pair_of.wins == sum(ratio > 1 for ratio in ratios)


def test_comparisons_with_what_is_not_there_are_refused(made: Sweep) -> None:
    with pytest.raises(ValueError, match="no runs of"):
        made.compare(baseline=("ddtree", 64))
    with pytest.raises(ValueError, match="did you mean 'tokens_per_second'"):
        made.compare("tokens_per_seconds")


def test_texts_are_those_of_plain_decoding(made: Sweep) -> None:
    found = made.texts()
    assert [(same.method, same.budget, same.temperature) for same in found] == [k for k in made.keys if k[0] != "ar"]
    assert all(same.compared == same.equal == (3 if same.temperature == 0 else 6) for same in found)


def test_a_text_that_differs_is_found_and_judged(tmp_path: Path) -> None:
    kept = dict(methods=["ar", "ddtree"], budgets=[3], max_new_tokens=12, progress=False)
    results = sweep(pair(), tmp_path, PROMPTS[:1], **kept)
    ar, tree = results.runs
    wrong = generate(pair(), [5, 6, 7, 9], method="ddtree", budget=3, max_new_tokens=12)  # another prompt's text
    wrong.header["prompt"] = results.trace(tree.run).header["prompt"]
    wrong.save(tmp_path / "runs" / tree.run)
    (tmp_path / "results.parquet").unlink()
    (same,) = sweep(pair(), tmp_path, PROMPTS[:1], **kept).texts()
    (difference,) = same.differences
    plain, index = results.trace(ar.run), difference["index"]
    assert (same.equal, same.compared, difference["tie"]) == (0, 1, False)
    assert wrong.output_ids[:index] == plain.output_ids[:index]
    assert (difference["token"], difference["ar_token"]) == (wrong.output_ids[index], plain.output_ids[index])
    if index:
        assert difference["margin"] == pytest.approx(float(plain.steps[index - 1].margin[0]))
    assert "NO TIE" in sweep_view(Sweep(tmp_path)).text


# ---- what is written -------------------------------------------------------------------------------------------------


def test_the_table_is_the_rows(made: Sweep) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(made.path / "results.parquet")
    assert table.to_pylist() == made.rows()
    frame = made.to_frame()
    assert len(frame) == len(made.runs) and frame.budget.isna().sum() == sum(r.budget is None for r in made.runs)


def test_without_pyarrow_everything_else_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    results = sweep(pair(), tmp_path, PROMPTS[:1], methods=["ar"], max_new_tokens=4, progress=False)
    assert "pip install pyarrow" in results.notes[-1] and len(results.runs) == 1
    assert (tmp_path / "report.html").exists() and not (tmp_path / "results.parquet").exists()


def test_the_report_escapes_what_it_is_given_and_asks_for_nothing(made: Sweep, tmp_path: Path) -> None:
    evil = '<script>alert("x")</script>'
    prompts = [{"id": evil, "kind": evil, "prompt": [3] * 511}, PROMPTS[0]]
    results = sweep(pair(), tmp_path / "s", prompts, methods=["ar"], max_new_tokens=4, progress=False)
    page = (tmp_path / "s" / "report.html").read_text("utf-8")
    assert results.failed and evil not in page and "&lt;script&gt;" in page
    assert "http://" not in page and "https://" not in page
    with pytest.raises(FileNotFoundError, match="create it first"):
        sweep_report(made, tmp_path / "nowhere" / "r.html")


def test_every_figure_of_the_view_says_what_stands_behind_it(made: Sweep) -> None:
    text = sweep_view(made).text
    for group in made.summary():
        line = next(
            row for row in text.splitlines() if row.startswith(f"{group.name} ") and f" {group.temperature:g} " in row
        )
        assert str(group.tokens_per_round.rounds) in line and str(group.tokens_per_round.prompts) in line
    assert "left out" in text and "95 %" in text and "2 or more" not in text


def test_devices_that_were_mixed_are_said(made: Sweep, tmp_path: Path) -> None:
    files = SweepFolder.create(tmp_path, made.manifest)
    for run in made.runs[:2]:
        trace = made.trace(run.run)
        trace.header["pair"]["device"] = "cuda:1" if run is made.runs[0] else "cpu"
        trace.save(files.begin(run.run))
        files.finish(run.run)
    assert "more than one device: cpu (1 runs), cuda (1 runs)" in Sweep(tmp_path).notes[0]


def test_recordings_for_advice_are_one_a_prompt(made: Sweep) -> None:
    found = made.replays(pair(), [9])
    assert [(r.prompt, r.kind) for r in found] == [(str(p["id"]), str(p["kind"])) for p in PROMPTS]
    for recording in found:
        (run,) = [r for r in made.runs if r.prompt == recording.prompt and r.budget == 9 and r.temperature == 0]
        assert [r.emitted for r in recording.replay.run(9)] == [s.emitted for s in made.trace(run.run).steps]


# ---- the command -----------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[Any, str, str]:
    try:
        status: Any = cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
        status = end.code
    return status, *capsys.readouterr()


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(ddlab, "load_pair", functools.cache(lambda *_, **__: pair()))
    (tmp_path / "p.jsonl").write_text('{"id": "a", "prompt": [5, 6, 7]}\n{"id": "b", "prompt": [9, 8]}\n')
    return ["sweep", tmp_path / "out", "--prompts", tmp_path / "p.jsonl", "--max-new-tokens", 40, "--budget", 3]


def test_the_command_sweeps_advises_and_writes(
    capsys: pytest.CaptureFixture[str], command: list[Any], tmp_path: Path
) -> None:
    status, out, err = run(capsys, *command, "--advise")
    assert (status, err) == (0, "") and "6 of 6 runs" in out and "✓" in out
    assert re_best(out) and out.endswith(f"report: {tmp_path / 'out' / 'report.html'}\n")
    assert json.loads((tmp_path / "out" / "advice.json").read_text())["kinds"][0]["prompts"] >= 1
    assert "Which budget" in (tmp_path / "out" / "report.html").read_text("utf-8")


def re_best(text: str) -> bool:
    return any("Best: " in line and "predicted tokens/s" in line for line in text.splitlines())


@pytest.mark.parametrize("ok, status", [(True, 0), (False, 1)])
def test_a_check_that_fails_ends_the_command_with_status_1(
    capsys: pytest.CaptureFixture[str], command: list[Any], monkeypatch: pytest.MonkeyPatch, ok: bool, status: int
) -> None:
    asked: list[Any] = []

    def check(*arguments: Any, **settings: Any) -> Any:
        asked.append((arguments[1:], settings))
        return SimpleNamespace(ok=ok, to_text=lambda: "predicted and measured")

    monkeypatch.setattr("ddlab.costs.check.check", check)
    found, out, _ = run(capsys, *command, "--budget", 0, 3, "--check")
    assert found == status and "predicted and measured" in out
    assert asked == [(([[9, 8]], [3]), {"max_new_tokens": 40, "temperature": 0.0})]  # the other text is short


def test_advice_on_short_texts_alone_is_refused_in_a_line(
    capsys: pytest.CaptureFixture[str], command: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_text('{"id": "a", "prompt": [5, 6, 7]}\n')
    status, out, err = run(capsys, *command, "--advise")
    assert status == 2 and "3 of 3 runs" in out and "1 of them too short" in err and err.count("\n") == 1


def test_progress_is_shown_when_asked_for(capsys: pytest.CaptureFixture[str], command: list[Any]) -> None:
    _, _, err = run(capsys, *command, "--method", "ar", "--progress")
    assert "2/2" in err and "sweep" in err


def test_a_failed_run_ends_the_command_with_status_1(
    capsys: pytest.CaptureFixture[str], command: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": [3] * 511}) + '\n{"prompt": [1]}\n')
    status, out, _ = run(capsys, *command, "--method", "ar")
    assert status == 1 and "failed runs" in out


@pytest.mark.parametrize(
    "more, said", [(["--prompts", "nowhere"], "nowhere"), (["--max-new-tokens", "1"], "2 or more")]
)
def test_input_that_does_not_fit_is_one_line(
    capsys: pytest.CaptureFixture[str], command: list[Any], more: list[str], said: str, tmp_path: Path
) -> None:
    status, out, err = run(capsys, *command, *more)
    assert (status, out) == (2, "") and said in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_device_map_for_several_processes_is_refused(
    capsys: pytest.CaptureFixture[str], command: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes(monkeypatch, 0, 2)
    status, _, err = run(capsys, *command, "--device-map", "auto")
    assert status == 2 and "leave --device-map out" in err
