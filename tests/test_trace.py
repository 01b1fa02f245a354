"""A trace on disk and in memory: nothing lost, nothing guessed, small, and readable without a model."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlab import tracefile
from ddlab.tokens import Token
from ddlab.trace import SCHEMA_VERSION, Step, Trace, TraceWriter, new_header
from ddlab.tree import DraftTree

VOCAB = 97
MAX_NEW = 1000


def letters(ids):
    """Token text for tests: id 3 is the first byte of an emoji, id 96 has no token, the rest are words."""
    special = {3: Token(3, "🙂".encode()[:2]), 96: Token(96, None)}
    special[2] = Token(2, b"<|im_end|>", special=True)
    return {i: special.get(i, Token(i, f" w{i}".encode())) for i in ids}


def make_step(seed, index, start=None, nodes=7, stop_reason="mismatch", depth=5, best=4, vocab=VOCAB):
    """A round as an engine would record it: a random tree, a path down it, random numbers at its nodes."""
    rng = np.random.default_rng([seed, index])
    parents, tokens, taken = [-1], [int(rng.integers(4, vocab - 1))], set()
    while len(parents) <= nodes:
        parent, token = int(rng.integers(len(parents))), int(rng.integers(4, vocab - 1))
        if (parent, token) not in taken:
            taken.add((parent, token))
            parents.append(parent)
            tokens.append(token)
    n = len(tokens)
    log_prob = np.concatenate([[0.0], -rng.random(n - 1)])
    tree = DraftTree.from_parents(tokens, parents, log_prob=log_prob, rank=np.arange(n) - 1)
    path = tuple(tree.path(int(rng.integers(n))))
    bonus = None if stop_reason in ("stop_token", "length") else int(rng.integers(4, vocab - 1))
    emitted = tuple(tokens[i] for i in path[1:]) + (() if bonus is None else (bonus,))
    return Step(
        index=index,
        start=10 * index if start is None else start,
        tree=tree,
        target_choice=rng.integers(0, vocab, n),
        target_log_prob=-rng.random(n, np.float32),
        margin=rng.random(n, np.float32),
        node_log_prob=np.concatenate([[np.nan], -rng.random(n - 1)]).astype(np.float32),
        path=path,
        bonus=bonus,
        emitted=emitted,
        stop_reason=stop_reason,
        times={"draft": 0.25, "verify": float(rng.random())},
        draft_ids=rng.integers(0, vocab, (depth, best)),
        draft_log_probs=-rng.random((depth, best), np.float32),
    )


def make_header(**settings):
    return new_header(
        pair={"target": "made for a test", "layer_types": ("linear_attention", "full_attention")},
        settings={"method": "ddtree", "max_new_tokens": MAX_NEW, "stop_token_ids": (2,)} | settings,
        prompt={
            "ids": [5, 6],
            "text": "<user> w5</script>\u2028\ud83d w6",
            "messages": None,
            "template_args": {},
        },
        first_token=7,
    )


def make_trace(rounds=3, seed=0, **options):
    trace = Trace(make_header(), token_text=letters(range(VOCAB)))
    for index in range(rounds):
        trace.append(make_step(seed, index, **options))
    return trace


# ---- round trip --------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10**6),
    st.integers(0, 5),
    st.integers(0, 20),
    st.integers(0, 6),
    st.sampled_from([97, 248320]),
)
def test_a_saved_trace_loads_equal(tmp_path_factory, seed, rounds, nodes, depth, vocab):
    trace = make_trace(rounds, seed, nodes=nodes, depth=depth, vocab=vocab)
    loaded = Trace.load(trace.save(tmp_path_factory.mktemp("traces") / "run"))
    assert loaded == replace(trace, token_text=loaded.token_text)
    shown = {*trace.prompt_ids, trace.first_token}.union(*(step.token_ids() for step in trace.steps))
    assert loaded.token_text == {i: trace.token_text[i] for i in shown if i in trace.token_text}


def test_arrays_come_back_with_their_types(tmp_path):
    step, loaded = make_step(1, 0), Trace.load(make_trace(1, 1).save(tmp_path / "run")).steps[0]
    for name in (
        "target_choice",
        "target_log_prob",
        "margin",
        "node_log_prob",
        "draft_ids",
        "draft_log_probs",
    ):
        assert getattr(loaded, name).dtype == getattr(step, name).dtype, name
        np.testing.assert_array_equal(getattr(loaded, name), getattr(step, name))
    for name in ("tokens", "parents", "depth", "log_prob", "rank"):
        assert getattr(loaded.tree, name).dtype == getattr(step.tree, name).dtype, name
        np.testing.assert_array_equal(getattr(loaded.tree, name), getattr(step.tree, name))


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=3),
        st.tuples(
            st.sampled_from(["i1", "<i4", "<i8", ">i2", ">f8", "<f4", "?", "u1", ">u4"]),
            st.lists(st.integers(0, 3), max_size=3),
            st.integers(0, 40),
        ),
        max_size=6,
    ).filter(lambda kinds: "__metadata__" not in kinds)
)
@settings(deadline=None)
def test_a_blob_is_what_safetensors_makes_of_the_narrowest_integers(kinds):
    from safetensors import numpy as safetensors

    def random(dtype, shape, bits):
        return np.random.default_rng(0).integers(0, 2**bits, shape).astype(dtype).T

    arrays = {name: random(*kind) for name, kind in kinds.items()}
    narrow = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    for name, array in arrays.items():
        if array.dtype.kind == "i" and array.size:
            lowest = min(int(array.min()), -1 - int(array.max()))  # negative, so of a signed type
            narrow[name] = np.ascontiguousarray(array, np.min_scalar_type(lowest))
    blob = tracefile.pack_arrays(arrays)
    assert blob == safetensors.save(narrow)
    for name, array in safetensors.load(blob).items():
        np.testing.assert_array_equal(array, np.atleast_1d(arrays[name]))


@pytest.mark.parametrize("field", ["margin", "target_choice", "draft_ids"])
def test_steps_that_differ_in_one_number_are_not_equal(field):
    step = make_step(0, 0)
    changed = getattr(step, field).copy()
    changed.flat[0] += 1
    assert replace(step, **{field: changed}) != step
    assert replace(step, **{field: getattr(step, field).copy()}) == step


def test_every_id_of_a_loaded_trace_can_be_shown_without_a_tokenizer(tmp_path):
    loaded = Trace.load(make_trace(4).save(tmp_path / "run"))
    for step in loaded.steps:
        ids = [*step.tree.tokens, *step.target_choice, *step.draft_ids.ravel(), *step.emitted, step.bonus]
        assert all(int(i) in loaded.token_text for i in ids)
    assert {5, 6, 7} <= loaded.token_text.keys()


def test_fields_this_version_does_not_know_are_kept(tmp_path):
    folder = make_trace(2).save(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "trace.jsonl").read_text("utf-8").splitlines()]
    lines[0]["weather"] = {"wind": [1, 2.5]}
    lines[2]["mood"] = "fine"
    (folder / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    again = Trace.load(Trace.load(folder).save(tmp_path / "again"))
    assert again.header["weather"] == {"wind": [1, 2.5]}
    assert again.steps[0].extra == {} and again.steps[1].extra == {"mood": "fine"}


def test_arrays_this_version_does_not_know_are_kept(tmp_path):
    trace = make_trace(1)
    trace.steps[0] = replace(trace.steps[0], extra={"heat": np.arange(6.0).reshape(2, 3)})
    again = Trace.load(trace.save(tmp_path / "run"))
    np.testing.assert_array_equal(again.steps[0].extra["heat"], np.arange(6.0).reshape(2, 3))


def test_the_files_are_utf8_json_lines_and_safetensors(tmp_path):
    from safetensors import numpy as safetensors

    folder = make_trace(2).save(tmp_path / "run")
    blobs = (folder / "rounds.bin").read_bytes()
    lines = [json.loads(line) for line in (folder / "trace.jsonl").read_bytes().decode("utf-8").split("\n")[:-1]]
    assert lines[0]["schema_version"] == SCHEMA_VERSION
    assert sorted(entry.name for entry in folder.iterdir()) == ["rounds.bin", "trace.jsonl"]
    for line in lines[1:]:
        assert "margin" in safetensors.load(blobs[line["offset"] : line["offset"] + line["length"]])


def test_settings_that_json_cannot_hold_are_written_by_name(tmp_path):
    header = make_header(where=Path("a"), scale=float("inf"), ids=np.arange(2), kinds={"b", "a"}, kind=Step)
    kept = Trace.load(Trace(header).save(tmp_path / "run")).settings
    assert (kept["where"], kept["scale"], kept["ids"], kept["kinds"]) == ("a", "inf", [0, 1], ["a", "b"])


# ---- a run that ends badly ---------------------------------------------------------------------

WRITE_FOREVER = """
import sys
sys.path.insert(0, sys.argv[2])
from test_trace import make_header, make_step, letters, VOCAB
from ddlab.trace import Trace, TraceWriter
trace = Trace(make_header(), token_text=letters(range(VOCAB)))
writer, index = TraceWriter(sys.argv[1], trace), 0
while True:
    step = make_step(5, index, nodes=40)
    writer.append(step)
    index += 1
    print(index, flush=True)
"""


@pytest.mark.parametrize("rounds", [1, 7, 30])
def test_a_killed_process_keeps_every_finished_round(tmp_path, rounds):
    command = [sys.executable, "-c", WRITE_FOREVER, str(tmp_path / "run"), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        acknowledged = 0
        while acknowledged < rounds:
            acknowledged = int(child.stdout.readline())
        os.kill(child.pid, signal.SIGKILL)
        acknowledged = max([acknowledged, *map(int, child.stdout.read().split())])
    loaded = Trace.load(tmp_path / "run")
    assert acknowledged <= loaded.rounds <= acknowledged + 1
    assert loaded.lost_rounds <= 1
    assert loaded.steps == [make_step(5, index, nodes=40) for index in range(loaded.rounds)]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_trace_cut_at_any_byte_keeps_the_rounds_before_the_cut(tmp_path_factory, data):
    trace = make_trace(3)
    folder = trace.save(tmp_path_factory.mktemp("traces") / "run")
    name = data.draw(st.sampled_from(["trace.jsonl", "rounds.bin"]))
    whole = (folder / name).read_bytes()
    header = whole.index(b"\n") if name == "trace.jsonl" else 0
    cut = data.draw(st.integers(header, len(whole)))
    (folder / name).write_bytes(whole[:cut])
    loaded = Trace.load(folder)
    assert loaded.steps == trace.steps[: loaded.rounds]
    lines = [
        json.loads(line)
        for line in (folder / "trace.jsonl").read_bytes().splitlines(keepends=True)[1:]
        if b"\n" in line
    ]
    whole_rounds = sum(line["offset"] + line["length"] <= (folder / "rounds.bin").stat().st_size for line in lines)
    # a last line may be whole without its newline
    assert whole_rounds <= loaded.rounds <= whole_rounds + (name == "trace.jsonl")


def test_lost_rounds_are_said(tmp_path):
    folder = make_trace(3).save(tmp_path / "run")
    with open(folder / "rounds.bin", "r+b") as file:
        file.truncate(10)
    loaded = Trace.load(folder)
    assert (loaded.rounds, loaded.lost_rounds) == (0, 3)
    assert any("could not be read" in said for said in loaded.warnings)


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path):
    folder = make_trace(3).save(tmp_path / "run")
    lines = (folder / "trace.jsonl").read_bytes().split(b"\n")
    lines[2] = lines[2][:50]
    (folder / "trace.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match="line 3, is damaged"):
        Trace.load(folder)


def test_a_missing_line_is_an_error(tmp_path):
    folder = make_trace(3).save(tmp_path / "run")
    lines = (folder / "trace.jsonl").read_bytes().split(b"\n")
    del lines[2]
    (folder / "trace.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match="round 2 in the place of round 1"):
        Trace.load(folder)


def test_damaged_arrays_are_an_error(tmp_path):
    folder = make_trace(2).save(tmp_path / "run")
    (folder / "rounds.bin").write_bytes(b"\xff" * (folder / "rounds.bin").stat().st_size)
    with pytest.raises(ValueError, match="round 0 is damaged"):
        Trace.load(folder)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("failing_write", [1, 2])
def test_a_write_that_breaks_off_leaves_room_for_the_next_try(tmp_path, monkeypatch, error, failing_write):
    trace, writes = make_trace(2), []
    write_all = tracefile._write_all

    def break_off(file, data):
        writes.append(data)
        write_all(file, data[: len(data) // 2] if len(writes) == failing_write else data)
        if len(writes) == failing_write:
            raise error("the disk is full")

    with TraceWriter(tmp_path / "run", trace) as writer:
        writer.append(trace.steps[0])
        with monkeypatch.context() as patched, pytest.raises(error):
            patched.setattr(tracefile, "_write_all", break_off)
            writer.append(trace.steps[1])
        writer.append(trace.steps[1])
    loaded = Trace.load(tmp_path / "run")
    assert loaded.steps == trace.steps
    assert trace.steps[1].token_ids() <= loaded.token_text.keys()


# ---- versions ----------------------------------------------------------------------------------


def with_header(folder, change):
    lines = (folder / "trace.jsonl").read_bytes().split(b"\n")
    header = json.loads(lines[0])
    change(header)
    (folder / "trace.jsonl").write_bytes(b"\n".join([json.dumps(header).encode(), *lines[1:]]))


def test_a_newer_schema_is_refused_and_names_the_cure(tmp_path):
    folder = make_trace(1).save(tmp_path / "run")
    with_header(folder, lambda header: header.update(schema_version=SCHEMA_VERSION + 1))
    with pytest.raises(
        ValueError, match=rf"schema {SCHEMA_VERSION + 1}.*reads up to {SCHEMA_VERSION}.*pip install -U ddlab"
    ):
        Trace.load(folder)


@pytest.mark.parametrize("version", [None, "1", True, 0])
def test_a_missing_or_odd_schema_version_is_refused(tmp_path, version):
    folder = make_trace(1).save(tmp_path / "run")
    with_header(
        folder,
        lambda header: header.update(schema_version=version) if version is not None else header.pop("schema_version"),
    )
    with pytest.raises(ValueError, match="no schema_version"):
        Trace.load(folder)


def test_a_folder_without_a_trace_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no trace in .*trace\.jsonl"):
        Trace.load(tmp_path)


def test_a_trace_loads_where_torch_and_transformers_cannot_be_imported(tmp_path):
    folder = make_trace(2).save(tmp_path / "run")
    code = textwrap.dedent("""
        import sys
        sys.modules["torch"] = sys.modules["transformers"] = None
        import ddlab
        trace = ddlab.Trace.load(sys.argv[1])
        print(trace.rounds, len(trace.to_text(trees=True)) > 0)
    """)
    child = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert child.stdout.split() == ["2", "True"]


# ---- saving over something ---------------------------------------------------------------------


def test_an_older_trace_is_replaced_and_nothing_is_left_behind(tmp_path):
    make_trace(3).save(tmp_path / "run")
    make_trace(1, seed=9).save(tmp_path / "run")
    assert Trace.load(tmp_path / "run").steps == make_trace(1, seed=9).steps
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("write", [lambda t, p: t.save(p), lambda t, p: TraceWriter(p, t)])
def test_a_foreign_folder_is_refused_untouched(tmp_path, write):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"thesis\.tex"):
        write(make_trace(1), tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(FileExistsError, match="is a file"):
        make_trace(1).save(tmp_path / "run")


# ---- a round at a time -------------------------------------------------------------------------


def test_appended_rounds_are_on_disk_before_the_writer_is_closed(tmp_path):
    trace = make_trace(2)
    writer = TraceWriter(tmp_path / "run", trace)
    for step in trace.steps:
        writer.append(step)
        assert Trace.load(tmp_path / "run").steps == trace.steps[: step.index + 1]
    writer.close()


@given(st.lists(st.one_of(st.just("append"), st.integers(0, 6)), max_size=12))
@settings(deadline=None, max_examples=40)
def test_going_back_leaves_what_was_kept(tmp_path_factory, moves):
    folder = tmp_path_factory.mktemp("traces") / "run"
    trace = Trace(make_header(), token_text=letters(range(VOCAB)))
    with TraceWriter(folder, trace) as writer:
        for number, move in enumerate(moves):
            if move == "append":
                trace.append(make_step(number, trace.rounds))
                writer.append(trace.steps[-1])
            else:
                trace.truncate(min(move, trace.rounds))
                writer.truncate(trace.rounds)
    loaded = Trace.load(folder)
    assert loaded.steps == trace.steps
    assert all(step.token_ids() <= loaded.token_text.keys() for step in loaded.steps)


def test_rounds_out_of_order_are_refused(tmp_path):
    trace = make_trace(1)
    with pytest.raises(ValueError, match="round 3 cannot follow 1"):
        trace.append(make_step(0, 3))
    with (
        TraceWriter(tmp_path / "run", trace) as writer,
        pytest.raises(ValueError, match="round 3 cannot follow 0"),
    ):
        writer.append(make_step(0, 3))


def test_keeping_more_rounds_than_there_are_is_refused(tmp_path):
    trace = make_trace(1)
    with pytest.raises(ValueError, match="cannot keep 2 of 1"):
        trace.truncate(2)
    with (
        TraceWriter(tmp_path / "run", trace) as writer,
        pytest.raises(ValueError, match="cannot keep 1 of 0"),
    ):
        writer.truncate(1)


def test_two_thousand_rounds_at_budget_64_stay_small(tmp_path):
    trace = Trace(make_header(), token_text=letters(range(VOCAB)))
    with TraceWriter(tmp_path / "run", trace) as writer:
        step = make_step(0, 0, nodes=64, depth=15, best=8, vocab=248320)
        for index in range(2000):
            writer.append(replace(step, index=index))
    size = sum(file.stat().st_size for file in (tmp_path / "run").iterdir())
    assert size / 2000 < 5_000, f"{size / 2000:.0f} bytes a round"


# ---- what it says ------------------------------------------------------------------------------


def test_output_is_the_first_token_and_what_rounds_added():
    trace = make_trace(4)
    assert trace.output_ids == [7] + [token for step in trace.steps for token in step.emitted]
    assert len(trace.output_ids) == 1 + trace.rounds * float(trace.tokens_per_round)


def test_nothing_was_decoded_without_a_first_token():
    trace = Trace(make_header(max_new_tokens=0) | {"first_token": None})
    assert trace.output_ids == [] and trace.text == "" and trace.finished == "length"
    assert str(trace.tokens_per_round) == "tokens per round: no rounds"


def test_both_counts_have_names_and_rounds():
    trace = make_trace(5)
    accepted = [len(step.path) - 1 for step in trace.steps]
    assert [step.accepted for step in trace.steps] == accepted
    assert str(trace.accepted_drafts) == f"accepted drafts per round: {sum(accepted) / 5:.2f} (5 rounds)"
    assert str(trace.tokens_per_round) == f"tokens per round: {sum(accepted) / 5 + 1:.2f} (5 rounds)"
    assert f"{trace.tokens_per_round:.1f}" == f"{sum(accepted) / 5 + 1:.1f}"
    assert not trace.tokens_per_round.enough


@pytest.mark.parametrize("reason", ["stop_token", "length"])
def test_a_cut_round_finishes_the_text(reason):
    trace = make_trace(2)
    assert trace.finished is None
    trace.append(make_step(0, 2, stop_reason=reason))
    assert trace.finished == reason


def test_a_first_token_that_stops_finishes_the_text():
    assert Trace(make_header() | {"first_token": 2}).finished == "stop_token"
    assert Trace(make_header(max_new_tokens=1)).finished == "length"


def test_text_leaves_out_special_tokens_and_half_characters():
    trace = make_trace(0)
    step = replace(make_step(0, 0), emitted=(8, 2, 3))
    trace.append(step)
    assert trace.text == " w7 w8"


def test_positions_are_those_of_the_text():
    step = make_step(0, 0, start=40)
    assert step.positions[0] == 40
    assert all(step.positions[i] == 40 + len(step.tree.path(i)) - 1 for i in range(len(step.tree)))


def test_runs_that_differ_only_in_the_rendered_prompt_are_shown_as_different():
    one, other = make_trace(1), make_trace(1)
    assert one.differences(other) == []
    other.header = one.header | {
        "prompt": one.header["prompt"] | {"text": "<user>/no_think w5 w6"},
        "created": "later",
    }
    assert one.differences(other) == ["prompt.text"]


def test_the_wrong_way_and_edits_are_said():
    assert make_trace(1).warnings == []
    wrong = Trace(make_header(linear_state="flattened"))
    assert "flattened" in wrong.warnings[0]
    edited = make_trace(3)
    edited.steps[1] = replace(edited.steps[1], edited=("draft",))
    assert "draft" in edited.warnings[0] and "1 of 3 rounds: 1" in edited.warnings[0]
    edited.steps[2] = replace(edited.steps[2], edited=("verify",))
    assert any("need not be the target's own" in said for said in edited.warnings)


# ---- tables and text ---------------------------------------------------------------------------


def test_a_frame_has_one_row_a_round():
    pandas = pytest.importorskip("pandas")
    trace = make_trace(3)
    trace.append(make_step(0, 3, stop_reason="length"))
    frame = trace.to_frame()
    assert isinstance(frame, pandas.DataFrame) and len(frame) == 4
    assert frame["accepted_drafts"].tolist() == [step.accepted for step in trace.steps]
    assert frame["new_tokens"].tolist() == [len(step.emitted) for step in trace.steps]
    assert frame["stop_reason"].tolist() == ["mismatch"] * 3 + ["length"]
    assert frame["bonus"].isna().tolist() == [False] * 3 + [True]


def test_a_frame_without_pandas_names_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        make_trace(1).to_frame()


def test_reprs_are_short():
    trace = make_trace(3)
    assert len(repr(trace)) < 200 and len(repr(trace.steps[0])) < 200
