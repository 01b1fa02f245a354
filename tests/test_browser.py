"""What people see, in a real headless Chromium: the report from a file, a view in a cell, the widget in JupyterLab."""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request

import nbformat
import numpy as np
import pytest
from test_report import HOSTILE, small_step, trace_of, zoo_trace
from test_tokens import TABLE
from test_trace import letters, make_header

import ddlab
from ddlab import tokens, views
from ddlab.step import Step
from ddlab.trace import Trace
from ddlab.tree import DraftTree
from ddlab.views import tree

sync_api = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")


# ---- what is looked at -------------------------------------------------------------------------


@pytest.fixture(scope="session")
def runs():
    """A short real run on the embedded pair, as it should be and the wrong way."""
    pair = ddlab.load_pair()
    prompt = "Explain the theory of general relativity in detail."
    options = dict(max_new_tokens=40, budget=64)
    return [ddlab.generate(pair, prompt, linear_state=state, **options) for state in ("exact", "flattened")]


@pytest.fixture(scope="session")
def report(runs, tmp_path_factory):
    return ddlab.report(runs, tmp_path_factory.mktemp("report") / "report.html", audits=[{"ok": True}, None])


def drafted_round(index, nodes, depth=15, vocab=97, seed=0, taken=4):
    """A round with a best-first tree, first children accepted `taken` deep, then a token that was not drafted there."""
    rng = np.random.default_rng([seed, index])
    logits = 2 * rng.normal(size=(depth, vocab))
    draft = DraftTree.best_first(logits, nodes, root_token=5)
    n, path = len(draft), [0]
    choice = rng.integers(0, vocab, n)
    while len(path) <= taken and len(draft.children(path[-1])):
        path.append(int(draft.children(path[-1])[0]))
        choice[draft.parents[path[-1]]] = draft.tokens[path[-1]]
    below = set(draft.tokens[draft.children(path[-1])].tolist())
    bonus = next(token for token in choice.tolist() if token not in below)
    choice[path[-1]] = bonus
    best = np.argsort(-logits, axis=1)[:, :8]
    log_probs = np.take_along_axis(logits - np.log(np.exp(logits).sum(1, keepdims=True)), best, 1)
    return Step(
        index=index, start=40 + 10 * index, tree=draft, target_choice=choice, target_log_prob=-rng.random(n),
        margin=rng.random(n), node_log_prob=np.array([np.nan, *-rng.random(n - 1)]), path=tuple(path), bonus=bonus,
        emitted=(*draft.tokens[path[1:]].tolist(), bonus),
        stop_reason="mismatch" if below else "exhausted",
        times={"draft": 0.01, "verify": 0.03}, draft_ids=best, draft_log_probs=log_probs,
    )  # fmt: skip


def drafted_run(rounds, nodes, **pair):
    trace = Trace(make_header(budget=nodes), token_text=letters(range(97)))
    trace.header["pair"] |= pair
    for index in range(rounds):
        trace.append(drafted_round(index, nodes))
    return trace


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "windows": [12, None]}


# ---- the report --------------------------------------------------------------------------------


def test_a_report_asks_nothing_of_the_network_and_complains_of_nothing(report, look):
    seen = look(report)
    assert seen.requests == [report.as_uri()]
    assert seen.complaints == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_report_shows_tree_mask_and_text_in_both_themes(report, look, theme):
    page = look(report, color_scheme=theme).page
    assert page.locator(".inspector").count() == 2
    first = page.locator(".inspector").first
    assert first.locator("[role=treeitem]").count() >= 65
    assert first.locator("canvas[role=img]").bounding_box()["width"] > 200
    assert first.locator(".text .d").count() > 10
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (theme == "light")
    ink = page.evaluate("c => c.getContext('2d').getImageData(c.width / 2, c.height / 2, 1, 1).data.slice(0, 3)",
                        first.locator("canvas[role=img]").element_handle())  # fmt: skip
    assert (sum(list(ink.values()) if isinstance(ink, dict) else ink) > 384) == (theme == "light")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_a_report(report, look, theme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    page = look(report, color_scheme=theme).page
    found = axe.Axe().run(page).response["violations"]
    serious = [
        (v["id"], [n["html"][:160] for n in v["nodes"][:3]]) for v in found if v["impact"] in ("serious", "critical")
    ]
    assert serious == []


def test_a_report_is_readable_without_a_script(report, runs, look):
    page = look(report, java_script_enabled=False).page
    for run in runs:
        for step in run.steps:
            assert step.stop_reason in page.inner_text("body")
    assert page.locator("summary.round").count() == sum(run.rounds for run in runs)
    page.locator("summary.round").first.click()
    assert page.locator("ul.tree").first.is_visible() or page.locator("details svg").first.is_visible()


def test_a_policy_lets_no_other_script_run(report, look, tmp_path):
    content = report.read_text("utf-8").replace("</main>", "<script>window.broken = 1</script></main>", 1)
    (tmp_path / "r.html").write_text(content, "utf-8")
    seen = look(tmp_path / "r.html")
    assert seen.page.evaluate("window.broken") is None
    assert seen.complaints and all("Content Security Policy" in said for said in seen.complaints)
    seen.complaints.clear()


def test_columns_of_a_chart_and_tokens_of_the_comparison_lead_to_their_rounds(report, runs, look):
    page = look(report).page
    second = page.locator(".inspector").nth(1)
    last = runs[1].rounds - 1
    page.locator(f"g[data-goto='run1-data'][data-number='{last}']").dispatch_event("click")
    assert f"round {last}," in second.locator(".heading").inner_text()
    page.locator("td[data-goto='run1-data'][data-number='1']").first.click()
    assert "round 1," in second.locator(".heading").inner_text()


def test_runs_with_next_to_nothing_in_them_are_shown_without_complaint(look, tmp_path):
    unknown = np.full(2, np.nan, np.float32)
    two = DraftTree.from_parents([1, 5], [-1, 0])
    bare = small_step(tree=two, target_choice=np.array([5, 9]), target_log_prob=unknown, margin=unknown,
                      node_log_prob=unknown, path=(0, 1), bonus=None, emitted=(5,), stop_reason="length")  # fmt: skip
    alone = small_step(tree=two.truncate(0), target_choice=np.array([5]), target_log_prob=unknown[:1],
                       margin=unknown[:1], node_log_prob=unknown[:1], path=(0,), bonus=5, emitted=(5,),
                       stop_reason="exhausted")  # fmt: skip
    for steps, said in (((), "No round"), ((bare,), "nothing comes after"), ((alone, alone), "nothing was drafted")):
        page = look(one(trace_of(*steps), tmp_path)).page
        assert said in page.locator(".inspector").inner_text()
        if not steps:
            continue
        page.locator(".treebox").focus()
        for key in ("p", "p", "ArrowDown", "ArrowRight", "ArrowLeft", "End", "Home", "Enter", "]", "+", "0"):
            page.keyboard.press(key)


# ---- walking a tree ----------------------------------------------------------------------------


def focused(page):
    return int(page.locator(".treebox [aria-selected=true]").first.get_attribute("data-node"))


def press(page, *keys):
    for key in keys:
        page.keyboard.press(key)
    return focused(page)


def one(trace, tmp_path, view=views.rounds_view):
    path = tmp_path / "view.html"
    path.write_text(view(trace, 0).document(), "utf-8")
    return path


def test_keys_walk_the_tree(look, tmp_path):
    trace = drafted_run(2, 40)
    step = trace.steps[0]
    page = look(one(trace, tmp_path)).page
    page.locator(".treebox").focus()
    assert focused(page) == 0
    assert [press(page, "p") for _ in step.path[1:]] == list(step.path[1:])
    assert press(page, "p") == -1  # the target's own token
    assert press(page, "ArrowLeft") == step.path[-1]
    assert press(page, "Home") == 0
    child = press(page, "ArrowRight")
    assert step.tree.parents[child] == 0
    sibling = press(page, "ArrowDown")
    assert step.tree.parents[sibling] == 0 and sibling != child
    assert press(page, "ArrowUp") == child and press(page, "ArrowLeft") == 0
    page.keyboard.press("]")
    assert "round 1" in page.locator(".heading").inner_text()
    page.keyboard.press("[")
    assert "round 0" in page.locator(".heading").inner_text()


def test_play_goes_from_round_to_round_and_stops_at_the_last(look, tmp_path):
    page = look(one(drafted_run(3, 8), tmp_path)).page
    page.get_by_role("button", name="play the rounds").click()
    page.locator(".heading", has_text="round 2,").wait_for(timeout=10_000)
    page.get_by_role("button", name="play the rounds").wait_for(timeout=10_000)


def test_a_printed_report_has_every_round_in_words(report, runs, look):
    page = look(report).page
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.get_by_text(views.round_text(runs[0], runs[0].rounds - 1).strip()[:20]).first.is_visible()
    assert not page.locator(".bar").first.is_visible()


def test_a_folded_subtree_hides_and_comes_back(look, tmp_path):
    trace = drafted_run(1, 40)
    page = look(one(trace, tmp_path)).page
    page.locator(".treebox").focus()
    before = page.locator("[role=treeitem]").count()
    page.keyboard.press("Enter")
    assert page.locator("[role=treeitem]").count() == 1
    assert page.locator("[data-node='0']").get_attribute("aria-expanded") == "false"
    page.keyboard.press("p")  # the next node of the path opens what hides it
    assert page.locator("[role=treeitem]").count() == before


def test_rows_of_subtrees_never_overlap(look, tmp_path):
    page = look(one(drafted_run(1, 120), tmp_path)).page
    boxes = page.evaluate("""[...document.querySelectorAll('[role=treeitem]')].map(item => {
        const text = item.querySelector('text').getBoundingClientRect();
        return [text.left, text.top, text.right, text.bottom]; })""")
    boxes.sort(key=lambda box: box[1])
    for place, (left, top, right, bottom) in enumerate(boxes):
        for other in boxes[place + 1 :]:
            if other[1] >= bottom:
                break
            apart = other[0] >= right or other[2] <= left or min(bottom, other[3]) - max(top, other[1]) < 2
            assert apart, ((left, top, right, bottom), other)


def test_details_say_what_is_known_of_a_node(look, tmp_path):
    trace = drafted_run(1, 40)
    step = trace.steps[0]
    page = look(one(trace, tmp_path)).page
    node = int(step.tree.children(0)[1])
    page.locator(f"[data-node='{node}']").click(position={"x": 12, "y": 12})
    said = page.locator(".details").inner_text()
    token = int(step.tree.tokens[node])
    assert tokens.show(token, trace.token_text) in said and f"node {node}" in said
    assert re.search(rf"token id\s+{token}\s", said)
    assert trace.token_text[token].raw.hex(" ").upper() in said
    assert f"{np.exp(step.tree.log_prob[node]):.1%}, #{step.tree.rank[node] + 1} at depth 1" in said
    assert f"{step.tree.log_prob[node]:.2f}" in said and "product of per-depth marginals" in said
    assert f"{np.exp(step.node_log_prob[node]):.1%} after its parent" in said
    assert f"margin {step.margin[node]:.2f}" in said


def test_search_finds_tokens_by_text_and_id(look, tmp_path):
    trace = drafted_run(1, 40)
    step = trace.steps[0]
    token = int(step.tree.tokens[7])
    holding = np.flatnonzero(step.tree.tokens == token)
    page = look(one(trace, tmp_path)).page
    page.locator("input[type=search]").fill(str(token))
    shown = int(re.match(r"\d+", page.locator("output.soft").inner_text()).group())
    assert shown >= len(holding)  # " w7" also holds 7's text in 17
    page.locator("input[type=search]").press("Enter")
    assert str(token) in tokens.show(int(step.tree.tokens[focused(page)]), trace.token_text)


def shown_walk(page):
    return page.locator(".heading").inner_text(), page.locator("p.wide").inner_text()


@pytest.mark.parametrize("number", range(3))
def test_picture_and_text_give_the_same_reason(look, runs, tmp_path, number):
    trace = runs[0]
    path = tmp_path / "view.html"
    path.write_text(views.rounds_view(trace, number).document(), "utf-8")
    heading, outcome = shown_walk(look(path).page)
    assert heading == tree.heading(trace.steps[number])
    assert outcome == tree.outcome(trace.steps[number], trace)


def test_a_smaller_budget_ends_the_walk_where_its_tree_does(look, tmp_path):
    trace = drafted_run(1, 40)
    step = trace.steps[0]
    page = look(one(trace, tmp_path)).page
    for budget in (0, 1, max(step.path) - 1, max(step.path), 40):
        page.locator("input[type=range]").fill(str(budget))
        small = step.tree.truncate(budget)
        node, accepted = 0, 0
        while True:  # the walk itself, on the smaller tree
            children = small.children(node).tolist()
            taken = [child for child in children if small.tokens[child] == step.target_choice[node]]
            if not taken:
                break
            node, accepted = taken[0], accepted + 1
        heading, outcome = shown_walk(page)
        assert f"{budget} drafted, {accepted} accepted + bonus" in heading
        assert outcome.startswith("mismatch" if children else "exhausted")
        assert page.locator("[role=treeitem]").count() == len(small) + 1


# ---- the mask ----------------------------------------------------------------------------------


def test_full_and_sliding_layers_stand_side_by_side(look, tmp_path):
    page = look(one(drafted_run(1, 40, **SLIDING), tmp_path)).page
    boxes = [box.bounding_box() for box in page.locator(".maskbox").all()]
    assert len(boxes) == 2 and boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]


@pytest.mark.parametrize("layer", [0, 1])
def test_the_mask_of_every_node_is_that_of_its_ancestors_within_the_window(look, tmp_path, layer):
    trace = drafted_run(1, 40, layer_types=["sliding_attention", "full_attention"], windows=[3, None])
    step, window = trace.steps[0], (None, 3)[layer]
    page = look(one(trace, tmp_path)).page
    canvas = page.locator("canvas[role=img]").nth(layer)
    picture = canvas.evaluate("""c => { const d = c.getContext('2d').getImageData(0, 0, c.width, c.height);
        return [c.width, c.height, [...d.data]]; }""")
    width, height, pixels = picture
    pixels = np.array(pixels, np.uint8).reshape(height, width, 4)[..., :3].astype(int)
    n = len(step.tree)
    cell, left = (height - 1) // n, 88
    block = pixels[cell // 2 : n * cell : cell, left + cell // 2 : left + n * cell : cell]  # [n, n, 3]
    empty = np.abs(block - pixels[cell // 2, left + (n - 1) * cell + cell // 2]).sum(-1) == 0
    expected = step.tree.ancestors()
    if window is not None:
        expected &= step.tree.depth[:, None] - step.tree.depth[None, :] < window
    assert np.array_equal(~empty, expected)


def test_a_row_of_the_mask_leads_to_its_node_and_back(look, tmp_path):
    page = look(one(drafted_run(1, 40), tmp_path)).page
    canvas = page.locator("canvas[role=img]").first
    box, n = canvas.bounding_box(), 41
    cell = (box["height"] - 1) // n
    canvas.click(position={"x": 5, "y": 7 * cell + cell / 2})
    page.mouse.move(0, 0)
    assert focused(page) == 7
    page.locator(".treebox").focus()
    node = press(page, "p")
    assert f"Row {node} at position" in page.locator(".maskbox + p").first.inner_text()


# ---- the text ----------------------------------------------------------------------------------


def test_a_token_of_the_text_tells_the_drafters_first_choice_and_opens_its_round(look, runs, tmp_path):
    trace = runs[0]
    step = next(s for s in trace.steps[1:] if s.bonus is not None and s.accepted + 1 <= len(s.draft_ids)
                and s.draft_ids[s.accepted, 0] != s.bonus)  # fmt: skip
    page = look(one(trace, tmp_path)).page
    own = page.locator(".text .b").nth([s.index for s in trace.steps].index(step.index))
    own.hover()
    first = tokens.show(int(step.draft_ids[step.accepted, 0]), trace.token_text)
    assert f"the drafter's first choice was {first}" in page.locator(".said").inner_text()
    own.click()
    assert f"round {step.index}," in page.locator(".heading").inner_text()
    assert focused(page) == -1


# ---- hostile tokens ----------------------------------------------------------------------------


def test_every_token_of_the_zoo_is_shown_as_itself_in_every_view(look, tmp_path):
    trace = zoo_trace()
    seen = look(ddlab.report(trace, tmp_path / "r.html"))
    page = seen.page
    labels = {tokens.show(id, trace.token_text) for id in TABLE}
    for id, label in ((id, tokens.show(id, trace.token_text)) for id in TABLE):
        node = 1 + list(TABLE).index(id)
        name = page.locator(f"[data-node='{node}']").first.get_attribute("aria-label")
        assert name.startswith(f"{label}, ")
        page.locator(f"[data-node='{node}']").first.dispatch_event("click")
        assert page.locator(".details .tok").inner_text() == label
    assert len(labels) == len({page.locator(f"[data-node='{n}']").first.get_attribute("aria-label") for n in
                               range(1, len(TABLE) + 1)})  # fmt: skip
    assert page.locator("img, b b, iframe").count() == 0 and page.evaluate("typeof alert") == "function"
    assert HOSTILE.replace("\ud83d", "?").split("\u2028")[0] in page.locator("pre").first.inner_text()
    assert seen.requests == [(tmp_path / "r.html").as_uri()]


def test_tokens_keep_their_direction_and_their_order(look, tmp_path):
    table = dict(enumerate([b"abc", "שלום".encode(), b",", b" 12", "مرحبا".encode()]))
    trace = trace_of(table={i: tokens.Token(i, raw) for i, raw in table.items()})
    trace.header |= {"first_token": None, "prompt": {"ids": [0, 1, 2, 3, 4, 2, 3]}}
    path = tmp_path / "view.html"
    path.write_text(views.path_view(trace).document(), "utf-8")
    lefts = look(path).page.evaluate(
        "[...document.querySelectorAll('.text [data-at]')].map(e => e.getBoundingClientRect().left)"
    )
    assert len(lefts) == 7 and lefts == sorted(lefts)


# ---- in cells, and how large and fast ------------------------------------------------------------


def test_a_view_in_a_cell_runs_in_its_sandbox(look, tmp_path):
    trace = drafted_run(1, 20)
    for view in (
        views.tree_view(trace, 0),
        views.mask_view(trace, 0),
        views.rounds_view(trace),
        views.path_view(trace),
    ):
        path = tmp_path / "cell.html"
        path.write_text(f"<!doctype html><meta charset=utf-8>{view._repr_mimebundle_()['text/html']}", "utf-8")
        seen = look(path)
        frame = seen.page.frame_locator("iframe")
        assert frame.locator(".inspector").count() == 1
        assert [url for url in seen.requests if url.startswith("http")] == []


OF_RUNS = (views.setup_view, views.summary_view)


@pytest.mark.parametrize("make", [views.path_view, views.acceptance_view, views.time_view, views.rounds_view, *OF_RUNS])
def test_a_cell_of_a_notebook_shows_all_of_a_view(cut_off, runs, make):
    for view in map(make, [runs, runs[:1]] if make in OF_RUNS else runs):
        assert not cut_off(view._repr_mimebundle_()["text/html"], 1071)  # a cell of an exported notebook, and margins


def test_sixty_rounds_open_at_once_and_a_thousand_nodes_draw_at_once(look, tmp_path):
    """Measured, with room for a busy machine: the aims are 2 s and 200 ms."""
    sixty = ddlab.report(drafted_run(60, 64), tmp_path / "sixty.html")
    assert sixty.stat().st_size < 3_000_000
    page = look(sixty).page
    assert page.evaluate("performance.getEntriesByType('navigation')[0].domComplete") < 8000
    page = look(one(drafted_run(2, 1024, **SLIDING), tmp_path)).page
    times = page.evaluate("""async () => { const times = [];
        for (const name of ['next round', 'previous round', 'next round', 'previous round']) {
            const before = performance.now();
            document.querySelector(`button[aria-label="${name}"]`).click();
            document.body.getBoundingClientRect();
            times.push(performance.now() - before);
            await new Promise(requestAnimationFrame);
        } return times; }""")
    assert min(times) < 1000, times
    assert "1024 drafted" in page.locator(".heading").inner_text()


def test_a_large_tree_is_drawn_where_it_is_looked_at(look, tmp_path):
    page = look(one(drafted_run(1, 1024), tmp_path)).page
    assert 20 < page.locator("[role=treeitem]").count() < 500
    page.locator(".treebox").evaluate("box => { box.scrollTop = box.scrollHeight; }")
    page.locator("[data-node='0']").wait_for(state="detached")
    assert page.locator("[role=treeitem]").count() > 5


# ---- JupyterLab --------------------------------------------------------------------------------

CELLS = [
    "import ddlab\nfrom ddlab.widget import TreeInspector\npair = ddlab.load_pair()",
    "decoder = ddlab.Decoder(pair, budget=12, max_new_tokens=60)\n"
    "decoder.start('Explain the theory of general relativity in detail.')\n"
    "inspector = TreeInspector(decoder)\ninspector",
    "print('rounds', decoder.trace.rounds, '|', inspector.selected)",
]


@pytest.fixture
def lab(tmp_path):
    pytest.importorskip("jupyterlab", reason="needs jupyterlab")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, tmp_path / "walk.ipynb")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--no-browser", "--allow-root", "--ServerApp.port_retries=0", "--IdentityProvider.token="]
    options += [f"--port={port}", "--ServerApp.ip=127.0.0.1", f"--ServerApp.root_dir={tmp_path}"]
    command = [sys.executable, "-m", "jupyterlab", *options]
    private = {f"JUPYTER_{name}_DIR": str(tmp_path / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    environment = os.environ | private | {"OMP_NUM_THREADS": "1", "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings")}
    with (tmp_path / "lab.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            until = time.monotonic() + 60
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/api", timeout=2)
                    break
                except OSError:
                    assert server.poll() is None and time.monotonic() < until, (tmp_path / "lab.log").read_text()
                    time.sleep(0.3)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(20)


def run_cell(page, number):
    """Run a cell by hand. JupyterLab drops keys while it is still starting, so look whether it took them."""
    cell = page.locator(".jp-Cell").nth(number)
    for _ in range(20):
        cell.locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")
        try:
            sync_api.expect(cell.locator(".jp-InputPrompt")).not_to_have_text("[ ]:", timeout=5_000)
            return
        except AssertionError:
            continue
    raise AssertionError(f"JupyterLab never ran cell {number}")


def test_the_inspector_decodes_and_is_read_back_in_jupyterlab(browser, lab):
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.goto(f"{lab}/lab/tree/walk.ipynb")
    page.locator(".jp-Notebook .jp-Cell").nth(2).wait_for()
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").first.wait_for()
    run_cell(page, 0)
    run_cell(page, 1)
    widget = page.locator(".inspector")
    widget.get_by_role("button", name="decode the next round").click()
    widget.locator("[data-node='1']").wait_for()
    widget.get_by_role("button", name="decode the next round").click()
    page.wait_for_function("document.querySelector('.inspector .heading').textContent.startsWith('round 1')")
    widget.locator(".treebox").focus()
    page.keyboard.press("p")
    page.keyboard.press("ArrowLeft")  # which JupyterLab must not take for its own
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.className").startswith("box treebox")
    assert widget.locator("[role=treeitem]").count() == 1
    page.keyboard.press("Enter")
    widget.locator("[data-node='2'] text").first.click()
    widget.locator(".headline", has_text="node 2").wait_for()
    run_cell(page, 2)
    output = page.locator(".jp-Cell").nth(2).locator(".jp-OutputArea-output")
    output.wait_for()
    said = output.inner_text()
    assert re.search(r"rounds 2 \| Selected\(round=1, node=2, token=\d+, label='.+', path=\(.*\)\)", said), said
    widget.get_by_role("button", name="make this round again without this branch").click()
    page.wait_for_function("document.querySelector('.inspector .heading').textContent.includes('edited: tree')")
    context.close()
