"""The replay that a page does by itself: its trees and rounds are those of ddlab.replay, to the last bit."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import models
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_report import zoo_trace
from test_tokens import TABLE

import ddlab
from ddlab import tokens, views
from ddlab.costs.model import CostModel, predict
from ddlab.replay import DenseDrafts, Replay
from ddlab.top import top_tokens
from ddlab.trace import Trace
from ddlab.views import front, tree
from ddlab.views.data import TokenTable
from ddlab.views.replayed import cost_data, drafts_data, pack, replay_data


@pytest.fixture(scope="session")
def recorded() -> tuple[Trace, Replay]:
    """A text of the embedded pair with its drafts."""
    pair = ddlab.load_pair()
    trace = ddlab.generate(pair, "Explain the theory of general relativity in detail.", budget=8, max_new_tokens=128)
    return trace, ddlab.replay(pair, trace, [4, 64])


# ---- the module alone, on random drafts ------------------------------------------------------------

ASK = """([data, text, asked]) => {
    const rows = drafts.unpack(data.drafts, data.tokens);
    const flat = ({ parent, id, depth, rank, score }) => [parent?.number ?? -1, id ?? null, depth, rank, score];
    const plain = (round) => ({ ...round, nodes: round.nodes.map(flat) });
    return asked.map((settings) => drafts.replay(data, rows, text, settings).map(plain));
}"""


@pytest.fixture(scope="session")
def drafts_module(browser: Any) -> Any:
    """A page in which the modules that only compute, `drafts.js` and `cost.js`, are `drafts`."""
    page = browser.new_context(offline=True).new_page()
    source = "".join(front.FOLDER.joinpath(f"{name}.js").read_text("utf-8") for name in ("drafts", "cost"))
    page.evaluate(
        """async (source) => {
            const place = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
            globalThis.drafts = await import(place);
        }""",
        source,
    )
    return page


def replay_both_ways(page: Any, drafts: DenseDrafts, asked: list[dict[str, Any]]) -> None:
    """Asserts that the page and Python cut the text into the same rounds with the same trees."""
    table = TokenTable(drafts.token_text)
    data = drafts_data(drafts, table) | {"tokens": table.rows}
    given_ = json.loads(json.dumps([data, drafts.text.tolist(), asked]))
    for settings, theirs in zip(asked, page.evaluate(ASK, given_), strict=True):
        options = {"fixed_width": ["width"], "cost_aware": ["cost"]}.get(settings["builder"], [])
        chosen = (settings["budget"], settings["builder"], settings["limit"])
        extra = {name: settings[name] for name in options}
        mine = Replay(drafts).run(*chosen, **extra)
        said = [(r["start"], len(r["path"]) - 1, r["gained"], r["stop"], len(r["nodes"]) - 1) for r in theirs]
        assert said == [(r.start, r.accepted, len(r.emitted), r.stop_reason, r.nodes) for r in mine], settings
        for ours, round in zip(mine, theirs, strict=True):
            tree = drafts.tree(ours.start, *chosen, **extra)
            parents, ids, depth, rank, score = zip(*round["nodes"], strict=True)
            assert list(parents) == tree.parents.tolist() and list(ids[1:]) == tree.tokens[1:].tolist()
            assert list(depth) == tree.depth.tolist() and list(rank) == tree.rank.tolist()
            assert np.array_equal(np.array(score, np.float64), tree.log_prob)
            emitted = [tree.tokens[node] for node in round["path"][1:]]
            assert (*emitted, *([] if round["bonus"] is None else [round["bonus"]])) == ours.emitted


KINDS = ("float32", "bfloat16", "ties", "far", "odd", "holes")


def random_drafts(
    seed: int, kind: str, vocab: int, depth: int, k: int, prompt: int = 3, new: int = 14, **changes: Any
) -> DenseDrafts:
    """Drafts over a random text that they often guess right. kind: of the logits.

    ties: many equal ones; far: scores below -32768, where sums round; odd: log-probabilities off the grid; holes:
    tokens at -inf, whole rows too.
    """
    rng = np.random.default_rng(seed)
    text = rng.integers(0, vocab, prompt + new)
    positions = max(0, new - 1)
    ids = np.zeros((positions, depth, k), np.int32)
    log_probs, depths = np.full(ids.shape, -np.inf), np.zeros(positions, np.int64)
    for row in range(positions):
        logits = rng.normal(0, 3, (depth, vocab)).astype(np.float32)
        if kind == "ties":
            logits = np.float32(rng.integers(-3, 4, (depth, vocab)) / 2)
        elif kind == "far":
            logits *= np.float32(rng.choice([1, 3e3, 3e8]))
        elif kind == "holes":
            logits[rng.random(logits.shape) < 0.5] = -np.inf
            logits[rng.random(depth) < 0.1] = -np.inf
        for place in range(depth):
            at = prompt + row + 1 + place
            if at < len(text) and rng.random() < 0.8:
                logits[place, text[at]] = logits[place].max() - rng.choice([-1.0, 0.0, 0.5])
        given_ = torch.from_numpy(logits).bfloat16() if kind == "bfloat16" else logits
        best, scores = top_tokens(given_, k)
        if kind == "odd":
            scores = scores / 3
        depths[row] = len(best)
        ids[row, : len(best)], log_probs[row, : len(best)] = best, scores
    known: dict[str, Any] = dict(stop_token_ids=(), max_new_tokens=new, max_positions=None)
    return DenseDrafts(text, prompt, ids, log_probs, depths, k == vocab, **(known | changes))


SETTINGS = st.fixed_dictionaries(
    {
        "builder": st.sampled_from(["best_first", "chain", "fixed_width", "cost_aware"]),
        "budget": st.integers(0, 9),
        "limit": st.none() | st.integers(0, 5),
        "width": st.integers(1, 9),
        "cost": st.floats(0, 1).filter(lambda cost: cost == 0 or cost > 1e-300),
    }
)


@given(
    seed=st.integers(0, 2**16),
    kind=st.sampled_from(KINDS),
    vocab=st.sampled_from([9, 11, 30]),
    depth=st.integers(1, 5),
    new=st.integers(0, 14),
    room=st.integers(0, 3),
    stops=st.sets(st.integers(0, 8), max_size=2),
    beyond=st.none() | st.integers(0, 3),
    asked=st.lists(SETTINGS, min_size=1, max_size=8),
)
def test_rounds_and_trees_are_those_of_python(
    drafts_module: Any, seed: int, kind: str, vocab: int, depth: int, new: int, room: int, stops: set[int],
    beyond: int | None, asked: list[dict[str, Any]],
) -> None:  # fmt: skip
    """`room` tokens more were allowed than there are: the text is not finished."""
    changes: dict[str, Any] = dict(stop_token_ids=tuple(stops), max_new_tokens=new + room)
    if beyond is not None:  # the text fits, and some of the last drafts do not
        changes["max_positions"] = 3 + new + beyond
    drafts = random_drafts(seed, kind, vocab, depth, 9, new=new, **changes)
    replay_both_ways(drafts_module, drafts, asked)


def test_a_text_of_a_model_is_replayed_to_the_last_node(drafts_module: Any, recorded: Any) -> None:
    _, replayed = recorded
    budgets = (0, 1, 3, 8, 21, 32)
    asked = [dict(builder="best_first", budget=b, limit=limit, width=1, cost=0) for b in budgets for limit in (None, 4)]
    asked += [dict(builder="chain", budget=15, limit=None, width=1, cost=0)]
    asked += [dict(builder="fixed_width", budget=32, limit=None, width=w, cost=0) for w in (1, 2, 5)]
    asked += [dict(builder="cost_aware", budget=32, limit=None, width=1, cost=cost) for cost in (0.003, 0.02, 0.3)]
    replay_both_ways(drafts_module, replayed.drafts, asked)


# ---- what is packed --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_packed_numbers_come_back_to_the_last_bit(drafts_module: Any, kind: str) -> None:
    drafts = random_drafts(7, kind, 40, 6, 24, new=30)
    table = TokenTable({})
    packed = pack(drafts, table)
    assert bool(packed["raw"]) == (kind in ("odd", "far"))
    read = """([packed, tokens]) => {
        const plain = (row) => [[...row.ids], [...row.logProbs]];
        return drafts.unpack(packed, tokens).map((rows) => rows.map(plain));
    }"""
    rows = drafts_module.evaluate(read, [packed, table.rows])
    for place, depth in enumerate(drafts.depths):
        assert len(rows[place]) == depth
        for (ids, log_probs), known, scores in zip(
            rows[place], drafts.ids[place], drafts.log_probs[place], strict=False
        ):
            n = np.count_nonzero(scores > -np.inf)
            assert ids == known[:n].tolist() and np.array_equal(np.array(log_probs, np.float64), scores[:n])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafts_of_a_long_text_are_small_whatever_they_are(dtype: torch.dtype) -> None:
    """128 tokens, a block 15 deep, 64 candidates: each row of its own, over the ids of a large vocabulary."""
    rng = np.random.default_rng(0)
    ids, log_probs = np.zeros((127, 15, 64), np.int32), np.zeros((127, 15, 64))
    for row in range(127):
        logits = torch.from_numpy(2 * rng.standard_normal((15, 4096), np.float32))
        _, log_probs[row] = top_tokens(logits.to(dtype), 64)
        ids[row] = rng.integers(0, 248320, (15, 64))
    drafts = DenseDrafts(np.zeros(140, np.int64), 12, ids, log_probs, np.full(127, 15), False, (), 128, None)
    assert sum(len(part) for part in pack(drafts, TokenTable({})).values()) < 1_200_000


def test_a_text_with_its_drafts_and_their_labels_is_small(recorded: Any) -> None:
    trace, replayed = recorded
    assert len(trace.output_ids) == 128 and replayed.drafts.ids.shape == (127, 15, 64)
    assert len(front.data("run", replay_data(trace, replayed))) < 1_500_000


# ---- what a model of cost predicts ------------------------------------------------------------------


@given(st.data(), st.integers(0, 2**16), st.integers(1, 3), st.integers(1, 4))
def test_seconds_are_those_of_the_cost_model(
    drafts_module: Any, draw: Any, seed: int, prefixes: int, sizes: int
) -> None:
    rng = np.random.default_rng(seed)
    grid = [tuple(sorted(rng.choice(np.arange(1, 80), n, replace=False).tolist())) for n in (sizes, prefixes)]
    tables = {phase: rng.random((prefixes, sizes)) for phase in ("draft", "verify", "record")}
    cost = CostModel(*grid, tables, rng.random(prefixes), float(rng.random()), rounds_up=bool(seed % 2))
    asked = [
        [draw.draw(st.integers(grid[0][0], grid[0][-1])), draw.draw(st.integers(0, 99)), draw.draw(st.integers(1, 9))]
        for _ in range(4)
    ]
    ask = """([cost, asked]) => asked.map(([rows, prefix, emitted]) =>
        [drafts.roundSeconds(cost, rows, prefix, emitted), drafts.plainSeconds(cost, prefix, prefix + 3)])"""
    answered = drafts_module.evaluate(ask, [cost_data(cost), asked])
    for (rows, prefix, emitted), (seconds, plain) in zip(asked, answered, strict=True):
        assert seconds == pytest.approx(cost.seconds_of(rows, prefix, emitted), rel=1e-12)
        assert plain == pytest.approx(cost.plain_seconds(prefix + np.arange(3)).sum(), rel=1e-12)
    beyond = [[grid[0][-1] + 1, 5, 1]]
    assert drafts_module.evaluate(ask, [cost_data(cost), beyond])[0][0] is None


@given(st.lists(st.integers(1, 10**6), max_size=300))
def test_seconds_add_up_to_the_last_digit_as_in_python(drafts_module: Any, micro: list[int]) -> None:
    seconds = [x / 1e6 for x in micro]  # 32 rounds of 25 ms are 0.8 s, and not a digit less
    assert drafts_module.evaluate("(values) => drafts.sum(values)", seconds) == math.fsum(seconds)


# ---- the panel ---------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def report(recorded: Any, tmp_path_factory: Any) -> Any:
    trace, replayed = recorded
    folder = tmp_path_factory.mktemp("replayed")
    return ddlab.report(trace, folder / "report.html", audits={"ok": True}, replays=replayed, cost=COST)


COST = CostModel.from_mapping({1: 0.02, 5: 0.02, 65: 0.05}, rest=0.005)


def set_range(page: Any, name: str, value: int) -> None:
    page.locator(".replay").get_by_label(name, exact=False).first.fill(str(value))


def shown(page: Any) -> tuple[str, str]:
    """What the page says of all rounds, and of the one it shows."""
    panel = page.locator(".replay")
    return panel.locator("p[role=status]").inner_text(), panel.locator(".heading").inner_text()


def test_moving_the_budget_cuts_the_text_anew(report: Any, recorded: Any, look: Any) -> None:
    trace, replayed = recorded
    seen = look(report)
    page = seen.page
    status, heading = shown(page)
    assert f"{replayed.tokens_per_round(8):.2f} ({trace.rounds} rounds, 127 new tokens)" in status  # the trace's own
    assert heading == tree.heading(trace.steps[0])
    assert page.locator(".replay p.wide").nth(1).inner_text() == tree.outcome(trace.steps[0], trace)
    for budget in (0, 1, 5, 64):
        set_range(page, "budget", budget)
        rounds = replayed.run(budget)
        status, heading = shown(page)
        mean = replayed.tokens_per_round(budget)
        assert f"τ, tokens per round: {mean:.2f} ({mean.rounds} rounds, 127 new tokens)" in status
        assert f"predicted: {predict(replayed, COST, budget).tokens_per_second:.1f} tokens/s" in status
        assert heading.startswith(f"round 0, root at position {rounds[0].start}: {budget} drafted")
        own = page.locator(".replay [data-at].b").count()
        assert own == sum(len(r.emitted) > r.accepted for r in rounds)
        assert page.locator(".replay [data-at].d").count() == sum(r.accepted for r in rounds)
    assert seen.requests == [report.as_uri()]


def test_every_control_changes_what_is_replayed(report: Any, recorded: Any, look: Any) -> None:
    _, replayed = recorded
    page = look(report).page
    panel = page.locator(".replay")

    def status_is(*settings: Any, **options: Any) -> None:
        mean = replayed.tokens_per_round(*settings, **options)
        assert f"{mean:.2f} ({mean.rounds} rounds, 127 new tokens)" in shown(page)[0]

    set_range(page, "depths used", 3)
    status_is(8, "best_first", 3)
    assert "3 of 15" in panel.inner_text()
    set_range(page, "depths used", 15)
    assert not panel.get_by_label("children a node").is_visible() and not panel.get_by_label("price").is_visible()
    panel.get_by_label("builder").select_option("fixed_width")
    panel.get_by_label("children a node").fill("3")
    set_range(page, "budget", 24)
    status_is(24, "fixed_width", width=3)
    panel.get_by_label("builder").select_option("cost_aware")
    panel.get_by_label("price").fill("0.1")
    status_is(24, "cost_aware", cost=0.1)
    panel.get_by_label("builder").select_option("chain")
    status_is(15, "chain")  # no chain is longer than the block


def test_keys_alone_move_the_budget_and_the_round_stays_where_the_reader_is(
    report: Any, recorded: Any, look: Any
) -> None:  # fmt: skip
    _, replayed = recorded
    page = look(report).page
    panel = page.locator(".replay")
    panel.get_by_role("button", name="next round").click()
    panel.get_by_role("button", name="next round").click()
    at = replayed.run(8)[2].start
    panel.locator("input[type=range]").first.focus()
    for press, budget in (("ArrowRight", 9), ("End", 64), ("Home", 0), ("ArrowRight", 1)):
        page.keyboard.press(press)
        begins = max(r.start for r in replayed.run(budget) if r.start <= at)
        assert f"root at position {begins}: {budget} drafted" in shown(page)[1]
    page.keyboard.press("Tab")  # past depths used, to the first of the other budgets
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert f"root at position {at}: 0 drafted" in shown(page)[1]
    panel.locator(".treebox").focus()
    page.keyboard.press("p")
    assert panel.locator(".treebox [aria-selected=true]").get_attribute("data-node") == "-1"


def test_columns_of_other_budgets_have_their_counts(report: Any, recorded: Any, look: Any) -> None:
    _, replayed = recorded
    page = look(report).page
    rows = page.locator(".replay tr:has(th[scope=row])").all()
    cells = {row.locator("th").first.inner_text(): row.locator("[data-budget]").all_inner_texts() for row in rows}
    budgets = [0, 1, 2, 4, 8, 16, 32, 64]
    means = [replayed.tokens_per_round(b) for b in budgets]
    assert cells["budget"] == [str(b) for b in budgets]
    assert cells["τ, tokens per round"] == [f"{mean:.2f}" for mean in means]
    assert cells["rounds"] == [str(mean.rounds) for mean in means]
    rates = [predict(replayed, COST, b).tokens_per_second for b in budgets]
    starred = [f"{rate:.1f}{' ★' if rate == max(rates) else ''}" for rate in rates]
    assert cells["predicted tokens/s, ★ the most"] == starred
    page.get_by_role("button", name="replay with budget 32").click()
    assert "32 drafted" in shown(page)[1]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_either_theme(report: Any, look: Any, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    page = look(report, color_scheme=theme).page
    found = axe.Axe().run(page).response["violations"]
    assert [v["id"] for v in found if v["impact"] in ("serious", "critical")] == []


def test_without_a_script_there_is_a_table(report: Any, recorded: Any, look: Any) -> None:
    _, replayed = recorded
    page = look(report, java_script_enabled=False).page
    said = page.locator("noscript table", has_text="nodes a round").inner_text()
    for budget in (4, 64):
        mean = replayed.tokens_per_round(budget)
        assert re.search(rf"best_first\s+{budget}\s+{mean:.2f}\s+{mean.rounds}\s+127\s", said)


def test_a_cell_replays_in_its_sandbox_and_says_the_same_as_text(recorded: Any, look: Any, tmp_path: Any) -> None:
    trace, replayed = recorded
    view = views.replay_view(trace, replayed)
    (tmp_path / "cell.html").write_text(f"<!doctype html>{view._repr_mimebundle_()['text/html']}", "utf-8")
    frame = look(tmp_path / "cell.html").page.frame_locator("iframe")
    mean = replayed.tokens_per_round(8)
    assert f"{mean:.2f} ({mean.rounds} rounds" in frame.locator("p[role=status]").inner_text()
    assert "predicted" not in frame.locator(".replay").inner_text()
    assert re.search(rf"best_first +64 +{replayed.tokens_per_round(64):.2f} ", view.text)


def test_a_page_begins_with_the_rounds_that_were_decoded(look: Any, tmp_path: Any) -> None:
    target = models.target("dense")
    pair = ddlab.Pair(target, models.random_drafter(target, block=6))
    for method in ("dflash", "ddtree"):
        trace = ddlab.generate(
            pair, [5, 6, 7], method=method, budget=7 if method == "ddtree" else None, max_new_tokens=9
        )
        path = tmp_path / f"{method}.html"
        path.write_text(views.replay_view(trace, ddlab.replay(pair, trace, [16])).document(), "utf-8")
        page = look(path).page
        assert shown(page)[1] == tree.heading(trace.steps[0])
        assert f"({trace.rounds} rounds, {len(trace.output_ids) - 1} new tokens)" in shown(page)[0]


def test_hostile_tokens_are_labels_in_a_replay(look: Any, tmp_path: Any) -> None:
    ids = list(TABLE)
    trace = zoo_trace()
    text = np.array([*trace.prompt_ids, *trace.output_ids])
    first, deep = len(trace.prompt_ids), len(text) - len(trace.prompt_ids) - 1
    offered = np.tile(np.array(ids, np.int32), (deep, 1, 1))
    scores = np.full(offered.shape, -4.0)
    drafts = DenseDrafts(text, first, offered, scores, np.ones(deep, np.int64), False, (), 99, None)
    seen = look(ddlab.report(trace, tmp_path / "r.html", replays=Replay(drafts, [len(ids)])))
    panel = seen.page.locator(".replay")
    set_range(seen.page, "budget", len(ids))
    names = panel.locator("[role=treeitem]").evaluate_all("all => all.map((one) => one.getAttribute('aria-label'))")
    assert {tokens.show(id, trace.token_text) for id in ids} <= {name.split(", ")[0] for name in names} | {","}
    assert panel.locator("img, b b, iframe").count() == 0
    assert seen.requests == [(tmp_path / "r.html").as_uri()]


def test_a_replay_of_another_text_is_refused(recorded: Any, tmp_path: Any) -> None:
    trace, replayed = recorded
    with pytest.raises(ValueError, match="another text"):
        ddlab.report(zoo_trace(), tmp_path / "r.html", replays=replayed)
    with pytest.raises(ValueError, match="2 replays for 1 traces"):
        ddlab.report(trace, tmp_path / "r.html", replays=[replayed, None])
    assert not list(tmp_path.iterdir())
