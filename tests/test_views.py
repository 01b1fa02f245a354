"""What views count and hand to the front end: rates against counting by hand, data against the trace, one policy."""

import base64
import hashlib
import json
import math
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_report import clocked, small_step, trace_of
from test_tokens import TABLE
from test_trace import letters, make_header, make_step, make_trace

from ddlab import views
from ddlab.trace import Trace
from ddlab.tree import DraftTree
from ddlab.views import data, front, page, path, rates, rounds, tree

# ---- intervals ---------------------------------------------------------------------------------


@given(st.integers(1, 500), st.data())
def test_the_ends_of_an_interval_are_the_rates_that_the_score_test_just_allows(count, draw):
    hits = draw.draw(st.integers(0, count))
    for end in rates.Rate("", hits, count).interval:
        if 1e-9 < end < 1 - 1e-9:
            score = (hits / count - end) / math.sqrt(end * (1 - end) / count)
            assert abs(score) == pytest.approx(1.959964, rel=1e-6)
        else:
            assert hits in (0, count)


def test_an_interval_of_no_hits_reaches_above_zero():
    low, high = rates.Rate("", 0, 10).interval
    assert low == 0 and 0.2 < high < 0.35


# ---- what is counted ---------------------------------------------------------------------------


def stepwise(path, stop_reason="mismatch", bonus=20):
    """The small tree, 11 and 12 under the root, 13 under 11, with another path."""
    return small_step(path=path, stop_reason=stop_reason, bonus=bonus)


def counted(found):
    return {rate.name: (rate.hits, rate.count) for rate in found}


def test_by_depth_counts_rounds_that_came_so_far_and_had_drafts_there():
    steps = [stepwise((0,)), stepwise((0, 1)), stepwise((0, 1, 3), "exhausted"), stepwise((0, 2), "exhausted")]
    # node 2 is a leaf: of its round nothing is known at depth 2; the others at depth 2 stood on node 1
    assert counted(rates.by_depth(steps)) == {"depth 1": (3, 4), "depth 2": (1, 2)}


def test_a_round_that_was_cut_says_nothing_of_the_place_where_it_was():
    steps = [stepwise((0, 1), "length", bonus=None)]
    assert counted(rates.by_depth(steps)) == {"depth 1": (1, 1)}


def test_by_rank_counts_the_drafts_that_the_path_came_by():
    steps = [stepwise((0, 2), "exhausted"), stepwise((0, 1))]
    assert counted(rates.by_rank(steps)) == {"#1": (1, 3), "#2": (1, 2)}  # 13 has rank 0, at its depth


def test_spine_and_siblings_share_the_accepted_drafts():
    steps = [stepwise((0, 2), "exhausted"), stepwise((0, 1, 3), "exhausted"), stepwise((0,))]
    assert counted(rates.spine_and_siblings(steps)) == {"on the spine": (2, 3), "on siblings": (1, 3)}
    assert rates.spine_and_siblings([stepwise((0,))]) == []


def test_calibration_puts_drafts_into_bins_of_their_own_probability():
    found = rates.calibration([stepwise((0, 1))])
    assert counted(found) == {"60% to 80%": (1, 1), "20% to 40%": (0, 1), "40% to 60%": (0, 1)}
    by_name = {rate.name: rate.mean_prob for rate in found}
    assert by_name["40% to 60%"] == pytest.approx(0.5)  # 0.3 of the path over 0.6 of its parent


@given(st.integers(0, 10**6))
def test_every_accepted_draft_is_counted_once(seed):
    steps = [make_step(seed, index, nodes=12) for index in range(4)]
    accepted = sum(step.accepted for step in steps)
    assert sum(rate.hits for rate in rates.by_depth(steps)) == accepted
    assert sum(rate.hits for rate in rates.by_rank(steps)) == accepted
    assert sum(rate.hits for rate in rates.spine_and_siblings(steps)) == accepted


def test_rates_are_said_with_counts_and_intervals_in_both_forms():
    view = views.acceptance_view(trace_of(*[small_step()] * 4))
    assert re.search(r"depth 1: 4 of 4 = 100% \(51% to 100%\)", view.text)
    assert "4 of 4" in view.html and "95 %" in view.html
    assert all(title in view.text and f"<b>{title}</b>" in view.html for title, _, _ in rates.TABLES)


@pytest.mark.parametrize(("count", "grey"), [(29, True), (30, False)])
def test_rates_on_few_rounds_are_greyed_with_the_reason(count, grey):
    view = views.acceptance_view(trace_of(*[small_step()] * count))
    said = f"Only {count} rounds, fewer than 30: greyed."
    assert (said in view.text) == grey and (said in view.html) == grey
    figures = re.findall(r"<figcaption[^>]*><b>by depth", view.html)
    assert figures == ['<figcaption class="few"><b>by depth' if grey else "<figcaption><b>by depth"]


# ---- time --------------------------------------------------------------------------------------


def test_time_is_given_by_stage_with_its_share_and_its_median():
    times = [{"draft": 1.0, "verify": 3.0}, {"draft": 0.1, "verify": 0.3}, {"draft": 0.1, "verify": 0.5}]
    view = views.time_view(trace_of(*[small_step(times=t) for t in times]))
    assert re.search(r"draft +1.200 +24% +100.0 +1000.0", view.text)
    assert re.search(r"verify +3.800 +76% +400.0 +3000.0", view.text)
    assert view.html.count("<g><title>round ") == 3 and "round 1: draft 100.0 ms, verify 300.0 ms" in view.html


def test_a_run_that_was_not_timed_says_so():
    view = views.time_view(clocked(0.0, 0.0, 3))
    assert "not timed" in view.text and "Not timed" in view.html


# ---- near misses -------------------------------------------------------------------------------


def with_draft(**changes):
    """The small round with its draft: two places, three candidates each."""
    return small_step(
        draft_ids=np.array([[11, 12, 20], [13, 20, 12]]), draft_log_probs=np.log([[0.6, 0.3, 0.05], [0.5, 0.2, 0.1]]),
        **changes,
    )  # fmt: skip


def test_a_choice_just_below_the_budget_is_said_with_both_scores():
    step = with_draft()
    said = tree.near_miss(step, trace_of(step), 1)
    assert (
        said
        == f"the drafter's #2 at depth 2 (20.0%): path {np.log(0.12):.2f}, the last node drafted has {np.log(0.3):.2f}"
    )
    assert said in views.tree_view(trace_of(step), 0).text


def test_a_choice_that_was_drafted_below_another_parent_is_said():
    step = with_draft(target_choice=np.array([11, 20, 13, 22]), path=(0, 2))
    assert tree.near_miss(step, trace_of(step), 2).startswith("drafted after ␣w11 (node 3) instead; the drafter's #1")


def test_a_choice_that_the_draft_never_held_likely_is_said():
    step = with_draft(target_choice=np.array([11, 50, 13, 22]))
    assert tree.near_miss(step, trace_of(step), 1) == "not among the drafter's first 3 at depth 2"


def test_a_choice_beyond_the_draft_is_said():
    step = with_draft(path=(0, 1, 3), stop_reason="exhausted")
    assert tree.near_miss(step, trace_of(step), 3) == "the draft ended at depth 2"


def test_a_choice_that_was_drafted_is_no_miss():
    step = with_draft()
    assert tree.near_miss(step, trace_of(step), 0) == ""


def test_the_first_choice_that_was_rejected_is_kept_with_its_place_in_the_text():
    step = with_draft()
    said = [(piece.label, piece.first) for piece in path.pieces(trace_of(step)) if piece.round == 0]
    assert said == [("␣w11", ""), ("␣w20", "␣w13 (50.0%)")]
    assert "the drafter&#x27;s first choice was ␣w13 (50.0%)" in views.path_view(trace_of(step)).html.replace(
        "'", "&#x27;"
    )


# ---- runs over one another -----------------------------------------------------------------------


def test_runs_are_aligned_by_position_and_the_first_difference_is_named_with_its_round():
    plain = clocked(0.1, 0.1, 3)  # three rounds of one token, 20
    other = trace_of(
        small_step(path=(0,), bonus=20, emitted=(20,)), small_step(), linear_state="flattened"
    )  # 20, 11, 20
    view = views.aligned_view([plain, other])
    assert view.text == (
        "ddtree, flattened: parts from ar at token 3, position 4, round 1: ␣w11, an accepted draft, instead of ␣w20"
    )
    rows = re.findall(r"<tr><th scope=\"row\">(.*?)</th>(.*?)</tr>", view.html)
    assert [re.findall(r'"tok .">(.*?)</bdi>', cells) for _, cells in rows] == [
        ["␣w7", "␣w20", "␣w20", "␣w20"], ["␣w7", "␣w20", "␣w11", "␣w20"],
    ]  # fmt: skip
    assert [cells.count("apart") for _, cells in rows] == [0, 2]
    assert [cells.count("begins") for _, cells in rows] == [3, 2]


def test_equal_runs_are_said_to_be_equal_and_other_prompts_are_not_compared():
    one, same, longer = (trace_of(*[small_step()] * count) for count in (2, 2, 3))
    assert views.aligned_view([one, same]).text == "ddtree (2): the same 5 tokens as ddtree"
    assert views.aligned_view([one, longer]).text.endswith("the same 5 tokens as ddtree, of 7 here and 5 there")
    same.header["prompt"] = {"ids": [1]}
    assert views.aligned_view([one, same]).text == views.aligned_view([one]).text == "no two runs of one prompt"


# ---- what the front end is given -----------------------------------------------------------------


def test_the_data_of_a_run_are_those_of_its_trace():
    trace = make_trace(3)
    run = json.loads(json.dumps(data.run_data(trace)))
    ids = [row[0] for row in run["tokens"]]
    for step, given_ in zip(trace.steps, run["rounds"], strict=True):
        assert given_["parents"] == step.tree.parents.tolist() and given_["path"] == list(step.path)
        assert [ids[place] for place in given_["tokens"]] == step.tree.tokens.tolist()
        assert [ids[place] for place in given_["choice"]] == step.target_choice.tolist()
        assert [[ids[place] for place in row] for row in given_["best"]] == step.draft_ids.tolist()
        assert np.allclose(given_["log_prob"], step.tree.log_prob, atol=1e-4)
        assert given_["node_log_prob"][0] is None
    assert [ids[row[2]] for row in run["text"]] == [*trace.prompt_ids, *trace.output_ids]


def spelled(row):
    """Bytes of a token as the front end reads them."""
    return row[1].replace("␣", " ").encode() if len(row) == 2 else None if row[2] is None else bytes.fromhex(row[2])


def test_bytes_of_every_token_can_be_read_from_the_data():
    trace = Trace(make_header() | {"first_token": None, "prompt": {"ids": list(TABLE)}}, token_text=dict(TABLE))
    rows = data.run_data(trace)["tokens"]
    assert {row[0]: spelled(row) for row in rows} == {id: token.raw for id, token in TABLE.items()}


def test_layers_are_counted_by_kind_and_window():
    trace = make_trace(1)
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "linear_attention"]
    trace.header["pair"] = {"layer_types": kinds, "windows": [64, None, 64, None]}
    found = [(layer["name"].split(":")[0], layer["window"], layer["seen"]) for layer in data.layers(trace)]
    assert found == [
        ("full attention, 1 layer", None, True),
        ("1 layer", None, False),
        ("sliding window of 64, 2 layers", 64, True),
    ]


def test_the_layers_of_the_wrong_way_say_so():
    trace = trace_of(small_step(), linear_state="flattened")
    assert any("flattened on purpose" in layer["name"] for layer in data.layers(trace))


def test_a_cell_of_a_very_long_run_stays_small_and_says_what_it_left_out():
    trace = Trace(make_header(), token_text=letters(range(97)))
    for step in [make_step(0, 0, nodes=500)] * 80:
        trace.append(replace(step, index=trace.rounds))
    view = views.rounds_view(trace, 70)
    assert len(view._repr_mimebundle_()["text/html"]) < 2_500_000
    assert view.run["rounds"][view.round]["index"] == 70
    assert sum(len(r["parents"]) for r in view.run["rounds"]) <= rounds.NODES_IN_A_CELL
    assert re.search(r"Rounds \d+ to 79 of 80; a report has them all", view.run["notes"][-1])


# ---- the one script ------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [front.PAGE, front.WIDGET])
def test_the_modules_become_one_script_that_needs_no_other_file(code):
    assert not re.search(r"^import ", code, re.MULTILINE)
    assert "</script" not in code.lower() and "<!--" not in code
    names = re.findall(r"^(?:async )?(?:function|class|const|let) (\w+)", code, re.MULTILINE)
    assert len(names) == len(set(names))  # one scope: no name twice


def test_a_modules_imports_exist_and_come_before_it():
    order = [*front.MODULES, "page", "widget"]
    for place, name in enumerate(order):
        source = front.FOLDER.joinpath(f"{name}.js").read_text("utf-8")
        for names, other in re.findall(r'^import \{ (.*) \} from "\./(\w+)\.js";', source, re.MULTILINE):
            assert order.index(other) < place
            exported = front.FOLDER.joinpath(f"{other}.js").read_text("utf-8")
            for wanted in names.split(", "):
                assert re.search(rf"^export (?:function|class|const) {wanted}\b", exported, re.MULTILINE), wanted


def test_text_never_becomes_markup_in_the_front_end():
    code = front.PAGE + front.WIDGET
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", code)
    assert not re.search(r"\bfetch\b|XMLHttpRequest|WebSocket|import\(|https?://(?!www\.w3\.org/2000/svg)", code)


def test_nothing_moves_by_itself():
    assert not re.search(r"transition|animation|@keyframes|scroll-behavior|smooth", page.STYLE + front.PAGE)


def test_the_policy_of_a_page_names_its_script_and_its_style_and_nothing_else():
    content = views.tree_view(trace_of(small_step()), 0).document()
    (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)"', content)
    (code,) = re.findall(r'<script type="module">(.*?)</script>', content, re.DOTALL)
    digest = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in (code, page.STYLE)]
    assert (
        policy == f"default-src 'none'; script-src 'sha256-{digest[0]}'; style-src 'sha256-{digest[1]}'; img-src data:"
    )
    assert " style=" not in content


# ---- for papers --------------------------------------------------------------------------------


def test_a_graph_draws_without_the_dot_program(monkeypatch, tmp_path):
    pytest.importorskip("pygraphviz")
    monkeypatch.setenv("PATH", str(tmp_path))
    graph = small_step().tree.to_graphviz(["<b>", "a&b", '"', "\\N"])
    svg = graph.pipe("svg", encoding="utf-8")
    drawn = [re.sub("&#45;", "-", text) for text in re.findall(r"<text[^>]*>(.*?)</text>", svg)]
    assert drawn == ["&lt;b&gt;", "a&amp;b", "&quot;", "\\N"]
    assert graph.render(tmp_path / "tree", format="pdf", cleanup=True) == str(tmp_path / "tree.pdf")
    assert (tmp_path / "tree.pdf").read_bytes().startswith(b"%PDF") and not (tmp_path / "tree").exists()


def test_without_any_layout_engine_a_cell_shows_the_cure_and_the_source(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    graph = small_step().tree.to_graphviz()
    said = graph._repr_mimebundle_()["text/plain"]
    assert "pip install pygraphviz" in said and graph.source in said
    with pytest.raises(RuntimeError, match="dot program"):
        graph.pipe("svg")


def test_lines_of_a_graph_are_as_wide_as_the_draft_held_them_likely():
    source = small_step().tree.to_graphviz().source
    widths = {int(child): float(width) for child, width in re.findall(r"-> (\d) \[penwidth=([\d.]+)\]", source)}
    assert widths == {1: 2.9, 2: 1.7, 3: 2.5}
    unknown = DraftTree.from_parents([1, 2], [-1, 0]).to_graphviz().source
    assert "penwidth" not in unknown
