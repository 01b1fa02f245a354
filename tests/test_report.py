"""Views and the report: both renderings say the same, no token can break them, no figure stands alone."""

import html
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from test_tokens import TABLE
from test_trace import letters, make_header, make_step, make_trace

import ddlab
from ddlab import tokens, views
from ddlab.step import Step
from ddlab.tokens import Token
from ddlab.trace import Trace
from ddlab.tree import DraftTree
from ddlab.views import front, page, path, rounds, setup, summary, tree

HOSTILE = 'a<b && "c" <img src=x onerror=alert(1)> </script><b>x\u2028 \u202eflip\u202c \ud83d end'
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Elements, attributes and text of a page; fails on tags that do not match."""

    def __init__(self, content):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.text, self.inside = [], set(), [], [], {}
        self.feed(content)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)
            self.inside.setdefault(tag, []).append("")

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        self.text.append(data)
        for tag in set(self.open):
            self.inside[tag][-1] += data


def small_step(**changes):
    """Two drafts under the root, one under the first; the target takes the first, then leaves the tree."""
    draft = DraftTree.from_parents(
        [10, 11, 12, 13], [-1, 0, 0, 1], log_prob=np.log([1, 0.6, 0.3, 0.3]), rank=[-1, 0, 1, 0]
    )
    values = dict(
        index=0,
        start=5,
        tree=draft,
        target_choice=np.array([11, 20, 21, 22]),
        target_log_prob=np.log(np.array([0.9, 0.5, 0.7, 0.8], np.float32)),
        margin=np.array([2, 0.25, 1, 1], np.float32),
        node_log_prob=np.array([np.nan, *np.log([0.9, 0.05, 0.1])], np.float32),
        path=(0, 1),
        bonus=20,
        emitted=(11, 20),
        stop_reason="mismatch",
        times={"draft": 0.01, "verify": 0.02},
    )
    return Step(**(values | changes))


def trace_of(*steps, table=None, **settings):
    trace = Trace(make_header(**settings), token_text=letters(range(97)) if table is None else table)
    for step in steps:
        trace.append(replace(step, index=trace.rounds))
    return trace


def zoo_trace():
    """Every token of the zoo as a sibling in one tree, in the text and in the prompt."""
    ids = list(TABLE)
    draft = DraftTree.from_parents([ids[0], *ids], [-1, *([0] * len(ids))])
    n = len(draft)
    ones = np.zeros(n, np.float32)
    step = Step(0, 3, draft, np.array([*ids, ids[0]]), ones, ones, ones, (0, 1), ids[1], tuple(ids), "mismatch")
    trace = Trace(make_header() | {"first_token": ids[2]}, token_text=dict(TABLE))
    trace.header["prompt"] = {"ids": ids, "text": HOSTILE, "template_args": {"<i>": HOSTILE}}
    trace.header["pair"]["name"] = HOSTILE
    trace.append(step)
    return trace


def all_views(trace):
    last = trace.rounds - 1
    return [
        views.tree_view(trace, last),
        views.mask_view(trace, last),
        views.path_view(trace),
        views.acceptance_view(trace),
        views.time_view(trace),
        views.summary_view([trace]),
        views.setup_view([trace]),
    ]


# ---- nothing a token contains can break a page -------------------------------------------------


def code_of(content):
    """The contents of script elements that are code, not data."""
    return re.findall(r'<script type="module">(.*?)</script>', content, re.DOTALL)


@pytest.mark.parametrize("number", range(7))
def test_hostile_tokens_leave_a_view_well_formed(number):
    view = all_views(zoo_trace())[number]
    content = view.document()
    document = Page(content)
    assert not document.tags & {"img", "iframe"}
    assert code_of(content) == ([front.PAGE] if view.run else [])
    assert len(document.inside.get("script", [])) == (2 if view.run else 0)  # ours and its data
    assert not [name for name, _ in document.attributes if name.startswith("on")]


def test_hostile_tokens_leave_a_report_well_formed(tmp_path):
    content = ddlab.report(zoo_trace(), tmp_path / "r.html").read_text("utf-8")
    document = Page(content)
    assert "img" not in document.tags and code_of(content) == [front.PAGE]
    assert len(document.inside["script"]) == 3  # code, the run for the inspector, the figures for programs
    assert not [name for name, _ in document.attributes if name.startswith("on")]


def test_the_prompt_in_a_report_is_the_prompt(tmp_path):
    trace = make_trace(2)
    trace.header["prompt"]["text"] = 'a<b && "c" <img src=x onerror=alert(1)>\n</script><b>x\u2028'
    document = Page(ddlab.report(trace, tmp_path / "r.html").read_text("utf-8"))
    assert trace.header["prompt"]["text"] in document.inside["pre"]


def test_the_data_in_a_report_is_whole(tmp_path):
    trace = zoo_trace()
    trace.header["prompt"]["text"] = "</script><b>x\u2028<!-- <script>"
    content = ddlab.report(trace, tmp_path / "r.html").read_text("utf-8")
    (data,) = re.findall(r'<script type="application/json" id="ddlab-report">(.*?)</script>', content, re.DOTALL)
    run = json.loads(data)["runs"][0]
    assert run["header"]["prompt"]["text"] == trace.header["prompt"]["text"]
    assert run["output_ids"] == trace.output_ids


def test_a_report_refers_to_nothing_outside_itself(tmp_path):
    content = ddlab.report(zoo_trace(), tmp_path / "r.html").read_text("utf-8")
    for name, value in Page(content).attributes:
        if name in ("src", "href", "data", "action", "srcset", "poster", "background"):
            assert value.startswith("#"), (name, value)
    style = page.STYLE
    assert "url(" not in style and "@import" not in style and "http" not in style
    assert "default-src 'none'" in content


def test_every_token_keeps_its_reading_direction_to_itself():
    hebrew = {
        1: Token(1, "שלום".encode()),
        2: Token(2, b","),
        3: Token(3, b"12"),
        4: Token(4, "مرحبا".encode()),
    }
    trace = Trace(make_header() | {"first_token": None}, token_text=hebrew)
    trace.header["prompt"] = {"ids": [1, 2, 3, 4, 2, 3]}
    text = re.search(r'<div class="text".*</div>', views.path_view(trace).html).group()
    assert re.findall(r'<bdi class="p">(.*?)</bdi>', text) == ["שלום", ",", "12", "مرحبا", ",", "12"]


def test_a_character_over_several_tokens_is_shown_where_it_is_whole():
    table = {i: Token(i, bytes([byte])) for i, byte in enumerate("🙂".encode())}
    trace = Trace(make_header() | {"first_token": None}, token_text=table)
    trace.header["prompt"] = {"ids": [0, 1, 2, 3]}
    assert [piece.text for piece in path.pieces(trace)] == ["", "", "", "🙂"]
    assert Page(views.path_view(trace).html).inside["bdi"][-4:] == ["⟨F0⟩", "⟨9F⟩", "⟨99⟩", "🙂"]


# ---- the tree ----------------------------------------------------------------------------------


def test_the_tree_as_text():
    text = views.tree_view(trace_of(small_step()), 0).text
    assert text == "\n".join(
        [
            "round 0, root at position 5: 3 drafted, 1 accepted + bonus = 2 new tokens",
            "mismatch: the target's own ␣w20 (50.0%, margin 0.25) was not drafted here",
            "◆ ␣w10",
            "├─✓ ␣w11    draft 60.0% #1   target 90.0%",
            "│ ├─→ ␣w20                   target 50.0%  the target's own",
            "│ └─· ␣w13  draft 50.0% #1   target 10.0%",
            "└─· ␣w12    draft 30.0% #2   target  5.0%",
        ]
    )


def test_text_and_html_of_a_tree_list_the_same_nodes():
    trace = trace_of(make_step(3, 0, nodes=30))
    view = views.tree_view(trace, 0)
    listed = Page(re.search(r'<ul class="tree">.*</ul>', view.html).group()).inside["bdi"]
    lines = view.text.splitlines()[2:]
    assert len(listed) == len(lines) == 30 + 1 + 1  # drafts, root, the target's own
    assert all(label in line for label, line in zip(listed, lines, strict=True))


def test_marks_are_on_the_path_and_nowhere_else():
    step = make_step(8, 0, nodes=40)
    marked = [node.node for node in tree.nodes(step, trace_of(step)) if node.mark in ("root", "accepted")]
    assert marked == sorted(step.path)


def test_a_draft_that_equals_the_targets_choice_off_the_path_is_marked_unreached():
    chain = DraftTree.from_parents([1, 5, 6, 7], [-1, 0, 1, 2])
    ones = np.zeros(4, np.float32)
    step = small_step(
        tree=chain, target_choice=np.array([5, 9, 7, 8]), target_log_prob=ones, margin=ones,
        node_log_prob=ones, path=(0, 1), bonus=9, emitted=(5, 9),
    )  # fmt: skip
    trace = trace_of(step)
    assert [node.mark for node in tree.nodes(trace.steps[0], trace)] == ["root", "accepted", "", "missed"]
    assert step.accepted == 1


def test_a_drafters_probability_is_that_of_its_depth_and_the_path_is_called_a_product():
    view = views.tree_view(trace_of(small_step()), 0)
    assert "draft 50.0% #1" in view.text  # 0.3 of the path over 0.6 of its parent
    assert "path 30.0% (product of per-depth marginals)" in html.unescape(view.html)


def test_a_cut_round_says_that_nothing_comes_after():
    step = small_step(bonus=None, emitted=(11,), stop_reason="length")
    view = views.tree_view(trace_of(step), 0)
    assert "length: the length was reached" in view.text and "→" not in view.text


def test_unknown_probabilities_are_question_marks():
    draft = DraftTree.from_parents([1, 5], [-1, 0])
    two = np.full(2, np.nan, np.float32)
    step = small_step(tree=draft, target_choice=np.array([5, 9]), target_log_prob=two, margin=two, node_log_prob=two)
    assert "draft     ?      target     ?" in views.tree_view(trace_of(step), 0).text


# ---- the mask ----------------------------------------------------------------------------------


def test_the_mask_is_the_element_mask_of_the_tree():
    text = views.mask_view(trace_of(small_step()), 0).text
    rows = re.findall(r"▒▒▒([█·]+)", text)
    assert rows == ["█···", "██··", "█·█·", "██·█"]
    assert "8 are visible" in text and "5 committed tokens" in text


def test_the_picture_of_a_mask_has_a_cell_for_every_visible_pair():
    step = make_step(2, 0, nodes=20)
    cells = views.mask_view(trace_of(step), 0).html.count("h-10z")
    assert cells == int(step.tree.ancestors().sum())


# ---- acceptance and summary --------------------------------------------------------------------


def test_acceptance_has_both_counts_with_names_and_rounds():
    for view in (views.acceptance_view(trace_of(*[small_step()] * 4)),):
        for form in (view.text, view.html):
            assert "accepted drafts per round: 1.00 (4 rounds)" in form
            assert "τ, tokens per round: 2.00 (4 rounds)" in form


@pytest.mark.parametrize(("count", "grey"), [(29, True), (30, False)])
def test_a_mean_on_few_rounds_is_greyed_with_the_reason(count, grey):
    view = views.acceptance_view(trace_of(*[small_step()] * count))
    assert ("fewer than 30, too few to rest on" in view.text) == grey
    assert ('<p class="few">' in view.html) == grey


def test_acceptance_counts_stop_reasons_and_draws_a_column_a_round():
    steps = [small_step(), small_step(stop_reason="exhausted"), small_step()]
    view = views.acceptance_view(trace_of(*steps))
    assert re.search(r"× mismatch: +2 ", view.text) and re.search(r"\| exhausted: +1 ", view.text)
    assert view.html.count("<g><title>round ") == 3


def clocked(first, later, count):
    """A run by a fake clock: `first` seconds for round 0, `later` for every other."""
    steps = [
        small_step(path=(0,), bonus=20, emitted=(20,), times={"verify": first if not i else later})
        for i in range(count)
    ]
    return trace_of(*steps, method="ar", budget=None)


@pytest.mark.parametrize(("count", "shown"), [(0, "not timed"), (3, "not enough data"), (15, "not enough data")])
def test_a_speed_from_too_little_is_not_shown(count, shown):
    assert shown in views.summary_view([clocked(0.5, 0.01, count)]).text


def test_a_speed_leaves_out_the_first_round():
    assert summary.speed(clocked(0.5, 0.01, 256)).rate == pytest.approx(100)
    assert summary.speed(clocked(0.5, 0.01, 256)).warm_up == 0.5


def test_a_clock_that_stands_still_divides_nothing():
    assert summary.speed(clocked(0.5, 0.0, 256)).rate is None
    assert "not timed" in views.summary_view([clocked(0.0, 0.0, 256)]).text


def test_a_looping_text_is_flagged():
    loop = trace_of(*[small_step(emitted=(11, 11))] * 20)
    fresh = trace_of(*[small_step(emitted=(2 * i + 8, 2 * i + 9)) for i in range(20)])
    assert summary.loop_share(loop.output_ids) > 0.9 and summary.loop_share(fresh.output_ids) == 0
    assert "loops" in views.summary_view([loop]).html and "% loops" not in views.summary_view([fresh]).html


def test_the_text_is_held_to_the_plain_run_where_there_is_no_audit():
    plain = clocked(0.1, 0.1, 3)
    same = Trace(plain.header | {"settings": plain.settings | {"method": "dflash"}}, plain.steps, plain.token_text)
    other = Trace(same.header, [replace(plain.steps[0], emitted=(30,)), *plain.steps[1:]], plain.token_text)
    assert summary.same_text(same, None, [plain, same]) == "yes, as ar"
    assert summary.same_text(other, None, [plain, other]) == "NO, from token 2"
    assert summary.same_text(other, {"text_equal": True}, [plain, other]) == "yes"
    assert summary.same_text(same, None, [same]) == "not checked"


def test_runs_have_names_of_their_own():
    one, edited = trace_of(small_step(), budget=8), trace_of(small_step(edited=("tree",)), budget=8)
    wrong = trace_of(small_step(), budget=8, linear_state="flattened")
    assert summary.names([one, one, edited, wrong]) == [
        "ddtree, budget 8", "ddtree, budget 8 (2)", "ddtree, budget 8, edited", "ddtree, budget 8, flattened",
    ]  # fmt: skip


# ---- setup -------------------------------------------------------------------------------------


def test_setup_tells_what_differs_from_what_is_shared():
    one, other = trace_of(small_step(), budget=8), trace_of(small_step(), budget=16)
    view = views.setup_view([one, other])
    assert "budget: 8 | 16" in view.text and "max_new_tokens: 1000" in view.text
    assert "did not read the same prompt" not in view.text


def test_prompts_that_differ_only_as_rendered_are_both_shown():
    one, other = trace_of(small_step()), trace_of(small_step())
    other.header["prompt"] = other.header["prompt"] | {
        "text": "/no_think hello", "template_args": {"enable_thinking": False},
    }  # fmt: skip
    for form in (views.setup_view([one, other]).text, views.setup_view([one, other]).html):
        assert "did not read the same prompt" in form
        assert "/no_think hello" in form and "enable_thinking=False" in form


def test_conventions_stand_beside_their_sources():
    trace = trace_of(small_step())
    trace.header["pair"]["drafter"] = {
        "block_size": 16,
        "block_attention": {"full_attention": "bidirectional"},
        "sources": {"block_size": "config.json", "block_attention": "dflash_config"},
    }
    text = views.setup_view([trace]).text
    assert "block_size: 16  [config.json]" in text
    assert "block_attention.full_attention: bidirectional  [dflash_config]" in text


def test_settings_are_read_as_written():
    flat = setup.flat({"layers": ["linear"] * 3 + ["full"], "mrope": [3, 3, 2], "windows": [None] * 4, "empty": []})
    assert flat == {"layers": "3 × linear, full", "mrope": "3, 3, 2", "windows": "4 × none", "empty": "none"}


# ---- what every view has to say ----------------------------------------------------------------


def test_every_view_of_the_wrong_way_says_so():
    trace = trace_of(small_step(), linear_state="flattened")
    for view in all_views(trace)[:6]:
        assert "flattened" in view.text and "flattened" in view.html, view
    assert "flattened" in trace.to_text()


def test_every_view_of_an_edited_run_says_so():
    trace = trace_of(small_step(edited=("draft",)))
    for view in all_views(trace)[:6]:
        assert "a hook replaced values (draft)" in view.text.lower(), view
        assert "a hook replaced values (draft)" in view.html.lower(), view
    assert "(edited: draft)" in trace.to_text()


def test_every_round_of_the_wrong_way_says_so_in_the_report(tmp_path):
    trace = trace_of(*[small_step(edited=("tree",))] * 3, linear_state="flattened")
    content = ddlab.report(trace, tmp_path / "r.html").read_text("utf-8")
    lines = re.findall(r'<summary class="round">.*?</summary>', content)
    assert len(lines) == 3 and all("flattened" in line and "edited: tree" in line for line in lines)


def test_a_trace_as_text_shows_every_token_and_every_end():
    trace = make_trace(5)
    text = trace.to_text()
    for step in trace.steps:
        line = rounds.round_text(trace, step.index)
        assert line in text and step.stop_reason in line
        assert all(tokens.show(i, trace.token_text) in line for i in step.emitted)
    assert f"tokens per round: {float(trace.tokens_per_round):.2f} (5 rounds)" in text
    assert f"accepted drafts per round: {float(trace.accepted_drafts):.2f} (5 rounds)" in text


def test_a_text_that_steers_a_terminal_is_made_visible():
    trace = trace_of(small_step(emitted=(50,)), table=letters(range(97)) | {50: Token(50, b"\x1b[2J")})
    assert "\x1b" not in trace.to_text() and "⟨ESC⟩[2J" in trace.to_text()


# ---- in a notebook -----------------------------------------------------------------------------


def test_a_view_shows_in_a_cell_as_a_document_and_as_text():
    view = views.tree_view(trace_of(small_step()), 0)
    bundle = view._repr_mimebundle_()
    assert bundle["text/plain"] == view.text
    (frame,) = re.findall(r'<iframe srcdoc="(.*?)" sandbox="allow-scripts"', bundle["text/html"], re.DOTALL)
    assert html.unescape(frame) == view.document()
    assert len(bundle["text/html"]) < 2_000_000 and len(repr(view)) < 80


# ---- the report --------------------------------------------------------------------------------


class Verdict:
    """As much of an audit as a report reads."""

    def __init__(self, ok):
        self.ok, self.text_equal, self.nodes, self.nodes_total = ok, ok, 4, 4

    def to_text(self):
        return "what was found <here>"

    def to_dict(self):
        return {"ok": self.ok}


def test_a_report_begins_with_its_verdicts(tmp_path):
    traces = [trace_of(small_step()), trace_of(small_step(), method="dflash")]
    content = ddlab.report(traces, tmp_path / "r.html", audits=[Verdict(True), Verdict(False)]).read_text("utf-8")
    top = html.unescape(content[: content.index("Methods side by side")])
    assert "1 of 2 runs: not what the target itself would say" in top
    assert "✓ exact" in top and "✕ NOT EXACT" in top and "what was found <here>" in top


def test_a_report_says_what_was_not_audited(tmp_path):
    traces = [trace_of(small_step()), trace_of(small_step())]
    content = ddlab.report(traces, tmp_path / "r.html", audits=[{"ok": True}, None]).read_text("utf-8")
    assert "1 of 2 runs: not audited" in content


def test_a_report_of_sixty_rounds_at_budget_64_is_small(tmp_path):
    trace = Trace(make_header(budget=64), token_text=letters(range(248320)))
    for index in range(60):
        trace.append(make_step(0, index, nodes=64, depth=15, best=8, vocab=248320))
    size = ddlab.report(trace, tmp_path / "r.html").stat().st_size
    assert size < 3_000_000, f"{size / 60:.0f} bytes a round"


def test_a_report_of_a_very_long_run_stops_drawing_and_says_so(tmp_path):
    trace = trace_of(*[make_step(0, 0, nodes=64)] * 200)
    content = ddlab.report(trace, tmp_path / "r.html").read_text("utf-8")
    assert content.count('<summary class="round">') == 200
    assert "Trees are drawn up to 8000 nodes" in content and len(content) < 8_000_000


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_report_of_next_to_nothing_is_written(tmp_path, rounds):
    header = make_header(method="ar", max_new_tokens=rounds) | {"first_token": 7 if rounds else None}
    assert Page(ddlab.report(Trace(header), tmp_path / "r.html").read_text("utf-8"))


def test_a_report_checks_its_input(tmp_path):
    with pytest.raises(ValueError, match="at least one trace"):
        ddlab.report([], tmp_path / "r.html")
    with pytest.raises(ValueError, match="2 audits for 1 traces"):
        ddlab.report(trace_of(small_step()), tmp_path / "r.html", audits=[None, None])
    with pytest.raises(FileNotFoundError, match="create it first"):
        ddlab.report(trace_of(small_step()), tmp_path / "nowhere" / "r.html")


def test_a_report_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    (tmp_path / "r.html").write_text("the old one")
    with monkeypatch.context() as broken, pytest.raises(OSError, match="no space"):
        broken.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space")))
        ddlab.report(trace_of(small_step()), tmp_path / "r.html")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("r.html", "the old one")]


def test_a_report_is_utf8_whatever_the_locale(tmp_path):
    trace = trace_of(small_step(), table=letters(range(97)) | {11: Token(11, "🙂你好".encode())})
    trace.save(tmp_path / "run")
    code = "import sys, ddlab; ddlab.report(ddlab.Trace.load(sys.argv[1]), sys.argv[2])"
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, str(tmp_path / "run"), str(tmp_path / "r.html")]
    subprocess.run(command, env=environment, check=True)
    content = (tmp_path / "r.html").read_bytes().decode("utf-8")
    assert '<meta charset="utf-8">' in content[:120] and "🙂你好" in content


def test_views_and_report_load_neither_torch_nor_transformers():
    code = "import sys, ddlab.report; print({'torch', 'transformers'} & set(sys.modules))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "set()"
