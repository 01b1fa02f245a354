"""Views over budgets: every figure with its counts, pictures where the numbers are, and the same as text."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

import models
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_report import Page, small_step, trace_of

import ddlab
from ddlab import views
from ddlab.advice import Advice, KindAdvice, Option, Oracle
from ddlab.costs.check import BudgetCheck, Check
from ddlab.costs.counterfactual import ENDS, ORACLES
from ddlab.costs.model import CostModel
from ddlab.intervals import Estimate
from ddlab.pair import Pair
from ddlab.sweeps.results import Group
from ddlab.views import curves, depths, page, rates

COST = CostModel.from_mapping({1: 0.02, 65: 0.05}, rest=0.005)


def figure(value: float | None, half: float = 0.5, prompts: int = 12, rounds: int = 240) -> Estimate:
    low, high = (None, None) if value is None or prompts < 2 else (value - half, value + half)
    return Estimate("tokens per second", value, low, high, prompts, prompts, rounds)


def option(name: str, budget: int | None, speed: float, tau: float, **counts: int) -> Option:
    return Option(name, budget, figure(speed, 3.0, **counts), figure(tau, **counts), 10.0, 0.05)


def kind_of(name: str, speeds: dict[int, float], limit: str = "free_rows", **counts: int) -> KindAdvice:
    options = [option("ar", None, 10.0, 1.0, **counts), option("chain", None, 24.0, 3.2, **counts)]
    options += [option("tree", budget, speed, 3 + budget / 32, **counts) for budget, speed in speeds.items()]
    best = max(options, key=lambda o: float(o.tokens_per_second))
    tree = max(options[2:], key=lambda o: float(o.tokens_per_second))
    oracles = tuple(Oracle(o, 16, figure(50.0), figure(6.0), figure(1.6, 0.2), 30, 200) for o in ORACLES)
    ends = dict(zip(ENDS, (3, 120, 60, 17), strict=True))
    shares = {best.label: 0.8, "chain": 0.2}
    return KindAdvice(
        name, best.tokens_per_second.prompts, 2, tuple(options), best, tree, 8, 16, shares, oracles, ends, limit
    )


def advice(*kinds: KindAdvice) -> Advice:
    return Advice(kinds or (kind_of("all", {4: 25.0, 16: 31.0, 64: 22.0}),), COST)


def group(method: str, budget: int | None, speed: float, **changes: Any) -> Group:
    known = Group(method, budget, 0.0, None, 12, 2, 1, 0, figure(4.0), figure(speed, 2.0), figure(1.5, prompts=1))
    return replace(known, **changes)


# ---- the table -------------------------------------------------------------------------------------


def test_ways_are_listed_by_speed_each_with_interval_and_counts() -> None:
    text = views.budgets_view(advice()).text
    found = re.findall(
        r"^(ar|chain|tree \d+)( ★)? +([\d.]+) \[([\d.]+), ([\d.]+)\] .* (\d+) +(\d+) +(\d+)%$", text, re.M
    )
    assert [(name, bool(best)) for name, best, *_ in found] == [
        ("tree 16", True), ("tree 4", False), ("chain", False), ("tree 64", False), ("ar", False),
    ]  # fmt: skip
    assert found[0][2:] == ("31.00", "28.00", "34.00", "12", "240", "80")


def test_what_was_measured_stands_beside_what_was_predicted() -> None:
    groups = [group("ddtree", 16, 29.0), group("dflash", None, 23.0), group("ddtree", 5, 27.0)]
    view = views.budgets_view(advice(), groups)
    for shown in (view.text, view.html):
        assert re.search(r"tree 16 ★.*31\.00 \[28\.00, 34\.00\].*29\.00 \[27\.00, 31\.00\]", shown, re.S)
        assert "tree 5" in shown and "27.00 [25.00, 29.00]" in shown
        assert "3 runs that stopped early, 0 that failed" in shown and "2 prompts whose text stopped early" in shown


def test_measured_runs_alone_are_enough_and_their_own_counts_are_said_where_they_differ() -> None:
    alone = views.budgets_view(groups=[group("ddtree", 16, 29.0), group("ar", None, 11.0)])
    assert "29.00 [27.00, 31.00]" in alone.text and "What stands in the way" not in alone.html
    fewer = group("ddtree", 16, 29.0, tokens_per_second=figure(29.0, 2.0, prompts=10, rounds=180))
    assert "29.00 [27.00, 31.00] (10 prompts, 180 rounds)" in views.budgets_view(advice(), [fewer]).text


@pytest.mark.parametrize(("prompts", "grey"), [(7, True), (8, False)])
def test_figures_on_few_prompts_are_greyed_and_it_is_said(prompts: int, grey: bool) -> None:
    view = views.budgets_view(advice(kind_of("all", {4: 25.0, 16: 31.0}, prompts=prompts)))
    assert ("fewer than 8 prompts" in view.text) == ("fewer than 8 prompts" in view.html) == grey
    assert ('<figcaption class="few"><b>τ against budget' in view.html) == grey
    assert bool(re.search(r'<span class="few">31\.00 \[', view.html)) == grey


def test_one_prompt_has_no_interval_and_no_prompt_no_figure() -> None:
    one = views.budgets_view(groups=[group("ddtree", 16, 1.0, tokens_per_second=figure(29.0, prompts=1))])
    assert re.search(r"29\.00 \(1 prompts", one.text)
    none = figure(None, prompts=0, rounds=0)
    view = views.budgets_view(groups=[group("ddtree", 16, 1.0, tokens_per_second=none, tokens_per_round=none)])
    assert "no prompts" in view.text and "NaN" not in view.html and "nan" not in view.html


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(ValueError, match="give an advice or groups"):
        views.budgets_view()
    with pytest.raises(ValueError, match="'poems': all, code"):
        views.budgets_view(advice(kind_of("all", {4: 9.0}), kind_of("code", {4: 9.0})), kind="poems")
    with pytest.raises(ValueError, match="several temperatures"):
        views.budgets_view(groups=[group("ar", None, 9.0), group("ar", None, 9.0, temperature=0.8)])


# ---- the pictures ------------------------------------------------------------------------------------


def marks(html: str) -> dict[str, tuple[float, float]]:
    """Where the marks of predicted trees stand, by what their tips say, of the second picture."""
    picture = re.findall(r'<svg[^>]*aria-label="tokens per second against budget">.*?</svg>', html, re.S)[0]
    found = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"[^>]*><title>(tree \d+)', picture)
    return {name: (float(x), float(y)) for x, y, name in found}


@given(st.dictionaries(st.integers(1, 1024), st.floats(1, 200), min_size=2, max_size=9))
def test_marks_stand_where_their_numbers_are(speeds: dict[int, float]) -> None:
    html = views.budgets_view(advice(kind_of("all", speeds))).html
    placed = marks(html)
    assert len(placed) == len(speeds)
    bottom = curves.TOP + curves.TALL
    level = {b: (bottom - placed[f"tree {b}"][1]) / speed for b, speed in speeds.items()}  # pixels a token per second
    assert max(level.values()) - min(level.values()) <= 0.2 / min(speeds.values())
    across = [placed[f"tree {b}"][0] for b in sorted(speeds)]
    assert across == sorted(across) and across[0] > curves.LEFT and across[-1] == curves.LEFT + curves.WIDE
    assert all(curves.TOP <= y <= bottom for _, y in placed.values())


def test_intervals_reach_from_their_low_to_their_high_end() -> None:
    row = curves.whiskers(
        curves.Choice("tree", 4, None, None, figure(20.0, 5.0), figure(18.0, 2.0), math.nan, False), most=40.0
    )
    spans = [tuple(map(float, span)) for span in re.findall(r"M([\d.]+) \d+H([\d.]+)", row)]
    scale = (curves.ROW - 8) / 40
    assert spans == [pytest.approx((15 * scale, 25 * scale), abs=0.1), pytest.approx((16 * scale, 20 * scale), abs=0.1)]
    assert "<circle" in row and "var(--bonus)" in row  # another shape, not another colour alone


# ---- kinds and limits ----------------------------------------------------------------------------------


def test_each_kind_has_its_own_best_way_and_its_limit() -> None:
    several = advice(kind_of("all", {4: 25.0, 16: 31.0}), kind_of("<i>poems", {4: 33.0, 16: 30.0}, "none", prompts=3))
    view = views.budgets_view(several)
    assert re.search(r"^all +12 +2 +tree 16 .* 8 to 16 +free rows$", view.text, re.M)
    assert re.search(r"^<i>poems +3 +2 +tree 4 .* 240 +8 to 16 +none$", view.text, re.M)
    assert "&lt;i&gt;poems" in view.html and "<i>" not in view.html
    assert "Limited by: free rows" in view.text
    theirs = views.budgets_view(several, kind="<i>poems")
    assert "none of these for sure" in theirs.text and theirs.title == "which budget (<i>poems)"
    assert re.search(r"^tree 4 ★ +33", theirs.text, re.M)


def test_what_ended_rounds_and_what_perfection_would_give_have_their_counts() -> None:
    view = views.budgets_view(advice())
    for said in [*ENDS.values(), *ORACLES.values()]:
        assert said in view.text and page.escape(said) in view.html
    assert re.search(r"not in the tree +120 of 200 +60%", view.text)
    assert re.search(r"perfect ranking +16 +50\.00 .* 1\.60 \[1\.40, 1\.80\] × +30 of 200", view.text)


def test_predictions_are_held_to_what_was_measured() -> None:
    row = BudgetCheck(16, figure(20.0), figure(21.0), 0.05, -0.12, 239, {})
    for error, said in ((0.05, "✓ predictions within 10%: yes"), (0.2, "✕ predictions within 10%: NO")):
        view = views.check_view(Check((replace(row, error=error),), COST, 3))
        assert re.search(rf"16 +20\.00 .* 21\.00 .* \+{error:.1%} +-12\.0% +12 +240 +239", view.text)
        assert said in view.text and said in view.html


# ---- acceptance by depth ---------------------------------------------------------------------------------


@lru_cache
def tiny(seed: int) -> Pair:
    target = models.target("dense")
    return Pair(target, models.random_drafter(target, seed=seed, block=5))


@settings(max_examples=8)
@given(
    prompt=st.lists(st.integers(3, 90), min_size=1, max_size=8),
    seed=st.integers(0, 2),
    budget=st.sampled_from([0, 1, 6, 40]),
    new=st.integers(0, 16),
    stops=st.booleans(),
)
def test_replayed_depths_are_those_of_the_decoded_rounds(
    prompt: list[int], seed: int, budget: int, new: int, stops: bool
) -> None:
    pair = tiny(seed)
    ends = tuple(range(0, models.VOCAB, 5)) if stops else ()
    trace = ddlab.generate(pair, prompt, budget=budget, max_new_tokens=new, stop_token_ids=ends)
    replayed = ddlab.replay(pair, trace, [budget])
    counted = depths.by_depth([replayed, replayed], budget)
    assert [(r.name, r.hits / 2, r.count / 2) for r in counted] == [
        (r.name, r.hits, r.count) for r in rates.by_depth(trace.steps)
    ]


def test_depths_are_shown_with_counts_and_greyed_on_few_rounds() -> None:
    pair = tiny(0)
    trace = ddlab.generate(pair, [5, 6, 7], budget=40, max_new_tokens=16, stop_token_ids=())
    view = views.depths_view([ddlab.replay(pair, trace, [40])], 40)
    assert re.search(rf"depth 1: \d+ of {trace.rounds} = \d+% \(\d+% to \d+%\)", view.text)
    assert f"Of the {trace.rounds} rounds of 1 text" in view.text and "greyed" in view.html
    nothing = views.depths_view([ddlab.replay(pair, trace, [40])], 0)
    assert "No round had a draft" in nothing.html


# ---- in a report ---------------------------------------------------------------------------------------


@pytest.fixture
def report(tmp_path: Any) -> Any:
    shown = [views.budgets_view(advice(), [group("ddtree", 16, 29.0)])]
    return ddlab.report(trace_of(*[small_step()] * 4), tmp_path / "r.html", views=shown)


def test_a_report_carries_views_that_stay_well_formed(report: Any) -> None:
    document = Page(report.read_text("utf-8"))
    assert "which budget" in document.inside["h2"]
    assert any("31.00 [28.00, 34.00]" in cell for cell in document.inside["td"])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_either_theme(report: Any, look: Any, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    seen = look(report, color_scheme=theme)
    found = axe.Axe().run(seen.page).response["violations"]
    assert [v["id"] for v in found if v["impact"] in ("serious", "critical")] == []
    assert seen.requests == [report.as_uri()]
