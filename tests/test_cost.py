"""The cost model on a clock that the test sets, predictions against sums by hand, advice against brute force."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import models
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlab.advice import Replayed, advise
from ddlab.costs import calibration, check
from ddlab.costs.calibration import Calibration, Sample, calibrate, typical
from ddlab.costs.counterfactual import ENDS, end_of, perfectly_ranked, ways_of
from ddlab.costs.model import PHASES, CostModel, predict, predict_plain
from ddlab.decode import Decoder, generate
from ddlab.pair import Pair, load_pair
from ddlab.replay import DenseDrafts, Replay, replay
from ddlab.tree import DraftTree

BUDGETS = (2, 12)
PROMPTS = {"p0": "Hi there! What can you do for me?", "p1": "Count to ten.", "p2": "Why is the sky blue?"}


@lru_cache
def pair() -> Pair:
    return load_pair()


@lru_cache
def recorded() -> tuple[Replayed, ...]:
    out = []
    for i, (name, prompt) in enumerate(PROMPTS.items()):
        trace = generate(pair(), prompt, budget=6, max_new_tokens=24)
        out.append(Replayed(name, "even" if i % 2 == 0 else "odd", replay(pair(), trace, [12])))
    return tuple(out)


@lru_cache
def tiny() -> Pair:
    target = models.target("hybrid")
    return Pair(target, models.random_drafter(target, block=5))


def linear(rows: float, prefix: float) -> dict[str, float]:
    """Seconds of a round on the test's clock: linear in rows and prefix, so that interpolation is exact."""
    return {
        "draft": 3.0 + 0.01 * prefix,
        "tree": 0.5 + 0.001 * rows,
        "verify": 10.0 + 0.4 * rows + 0.002 * rows * prefix,
        "accept": 0.2 + 0.02 * rows,
        "commit": 1.0,
        "record": 0.7,
    }


def a_clock(seconds: Callable[[float, float], dict[str, float]] = linear) -> Callable[[Any], Sample]:
    """Instead of `timed_step`: the round is run, its times are the test's."""

    def step(decoder: Any) -> Sample:
        taken = decoder.step()
        drafted = {} if decoder.method == "ar" else seconds(len(taken.tree), taken.start)
        return Sample(drafted or dict.fromkeys(PHASES, 1.0), len(taken.tree), taken.start)

    return step


def grid(rows: tuple[int, ...] = (1, 5, 13, 98), prefixes: tuple[int, ...] = (4, 60)) -> CostModel:
    tables = {
        phase: np.array([[linear(row, prefix)[phase] for row in rows] for prefix in prefixes]) for phase in PHASES
    }
    return CostModel(rows, prefixes, tables, plain=np.array([5.0] * len(prefixes)))


# ---- the model -------------------------------------------------------------------------------------------------------


@given(rows=st.integers(1, 98), prefix=st.integers(4, 500), emitted=st.integers(1, 5))
def test_seconds_between_measured_sizes_lie_on_the_line(rows: int, prefix: int, emitted: int) -> None:
    expected = linear(rows, prefix)
    found = grid().phases(rows, prefix, emitted)
    assert {phase: float(value) for phase, value in found.items()} == pytest.approx(expected)
    whole = sum(seconds for phase, seconds in expected.items() if phase != "record")
    assert grid().seconds_of(rows, prefix) == pytest.approx(whole)
    assert grid().seconds_of(rows, prefix, record=True) == pytest.approx(whole + expected["record"])


def test_prefixes_outside_the_measured_ones() -> None:
    cost = grid()
    assert cost.seconds_of(5, 0) == cost.seconds_of(5, 4)  # not below the shortest
    falling = CostModel((1, 9), (10, 20), {"verify": np.array([[4.0, 8.0], [3.0, 6.0]])}, plain=np.array([4.0, 3.0]))
    np.testing.assert_allclose(falling.seconds_of([9, 9, 9], [10, 20, 1000]), [8, 6, 6])  # noise is no trend
    np.testing.assert_allclose(falling.plain_seconds([0, 15, 99]), [4, 3.5, 3])


def test_more_rows_than_were_measured_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 to 99 rows, but 1 to 98 were measured: calibrate\(pair, max_budget=98\)"):
        grid().seconds_of([2, 99], 10)
    assert np.sum(grid().seconds_of([], [])) == 0


def test_captured_launches_cost_what_the_next_size_costs() -> None:
    cost = CostModel((1, 17, 33), (8,), {"verify": np.array([[2.0, 3.0, 5.0]]), "tree": np.array([[0.0, 16.0, 32.0]])})
    padded = CostModel(cost.rows, cost.prefixes, cost.seconds, rounds_up=True)
    assert [float(cost.phases(n, 8)["verify"]) for n in (1, 9, 17, 25)] == [2, 2.5, 3, 4]
    assert [float(padded.phases(n, 8)["verify"]) for n in (1, 2, 17, 18, 33)] == [2, 3, 3, 5, 5]
    assert float(padded.phases(9, 8)["tree"]) == 8  # the tree itself is as large as it is


def test_sampling_noise_is_paid_for_by_each_new_token() -> None:
    quiet = grid()
    noisy = CostModel(quiet.rows, quiet.prefixes, quiet.seconds, quiet.plain, noise_seconds=0.25)
    assert noisy.seconds_of(5, 10, 3) == pytest.approx(quiet.seconds_of(5, 10, 3) + 0.75)
    assert noisy.plain_seconds(10) == pytest.approx(quiet.plain_seconds(10) + 0.25)


def test_a_model_is_json_and_comes_back_the_same() -> None:
    cost = grid()
    back = CostModel.from_dict(json.loads(json.dumps(cost.to_dict())))
    assert back.to_dict() == cost.to_dict()
    assert back.seconds_of(7, 33, 2) == cost.seconds_of(7, 33, 2)


def test_a_model_from_figures_in_hand() -> None:
    cost = CostModel.from_mapping({1: 0.010, 65: 0.030}, rest=0.005)
    np.testing.assert_allclose(cost.seconds_of([1, 33, 65], [0, 9, 9999]), [0.015, 0.025, 0.035])
    assert float(cost.plain_seconds(50)) == 0.010
    by_prefix = CostModel.from_mapping({(2, 10): 1.0, (2, 20): 3.0})
    assert by_prefix.seconds_of(2, 15) == 2
    with pytest.raises(ValueError, match="plain decoding was not measured"):
        by_prefix.plain_seconds(15)


@pytest.mark.parametrize("figures", [{}, {(1, 5): 1.0, (2, 6): 1.0}, {1: 0.0}, {1: float("nan")}])
def test_figures_that_make_no_model_are_refused(figures: dict[Any, float]) -> None:
    with pytest.raises(ValueError, match="every row count at every prefix"):
        CostModel.from_mapping(figures)


# ---- measuring -------------------------------------------------------------------------------------------------------


def test_a_mean_is_not_moved_far_by_a_stall_and_keeps_both_halves_of_a_busy_machine() -> None:
    assert typical([1.0] * 9 + [1000.0]) == pytest.approx(1.2)
    assert typical([1.0] * 6 + [2.0] * 4) == pytest.approx(1.4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_calibration_times_every_size_at_an_unchanged_prefix(
    monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    monkeypatch.setattr(calibration, "timed_step", a_clock())
    measured = Calibration(tiny(), 12, (4, 60), temperature)
    for _ in range(3):
        measured.measure()
    for (prefix, budget), samples in measured.samples.items():
        assert [sample.prefix for sample in samples] == [prefix] * 3
        assert {sample.rows for sample in samples} == {1 if budget is None else budget + 1}
    cost = measured.model()
    assert cost.rows == (1, 2, 5, 9, 13) and cost.prefixes == (4, 60) and cost.samples == 3
    assert cost.seconds_of(7, 32) - cost.noise_seconds == pytest.approx(sum(linear(7, 32).values()) - 0.7)
    assert float(cost.plain_seconds(10) - cost.noise_seconds) == len(PHASES) - 1
    assert (cost.noise_seconds > 0) == (temperature > 0)


def test_a_draft_that_cannot_fill_the_largest_budgets_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "timed_step", a_clock())
    target = models.target("dense")
    narrow = Pair(target, models.random_drafter(target, block=2))  # one depth of 97 tokens
    assert calibrate(narrow, 256, (4,), rounds=1).rows == (1, 2, 5, 9, 17, 33, 65, 98)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="no drafter"):
        calibrate(Pair(models.target("dense")))
    with pytest.raises(ValueError, match="prefixes are numbers of tokens"):
        calibrate(tiny(), prefixes=())
    with pytest.raises(ValueError, match="positions"):
        calibrate(tiny(), prefixes=(8, 510))


def test_the_check_of_a_machine_that_is_as_it_says_finds_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (calibration, check):
        monkeypatch.setattr(module, "timed_step", a_clock())
    found = check.check(tiny(), [[5, 6, 7], [9, 8]], [2, 8], max_new_tokens=8, repeats=2)
    assert found.ok and all(abs(row["error"]) < 1e-9 for row in found.rows())
    for row in found.budgets:
        assert row.equal_rounds == row.measured.rounds and row.measured.prompts == 2
        assert row.phases["record"] == pytest.approx((700, 700))
    assert "predictions within 10%: yes" in found.to_text()


def test_the_check_finds_a_machine_that_is_slower_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "timed_step", a_clock())
    monkeypatch.setattr(check, "timed_step", a_clock(lambda r, p: {k: 1.25 * v for k, v in linear(r, p).items()}))
    found = check.check(tiny(), [[5, 6, 7]], [4], max_new_tokens=8, repeats=1)
    assert not found.ok and found.budgets[0].error == pytest.approx(0.25)
    assert "within 10%: NO" in found.to_text()


# ---- predicting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_prediction_is_the_sum_over_the_rounds_of_a_real_decode(budget: int) -> None:
    for name, _, replayed in recorded()[:2]:
        real = generate(pair(), PROMPTS[name], budget=budget, max_new_tokens=24)
        seconds = sum(sum(linear(len(s.tree), s.start).values()) - 0.7 for s in real.steps)
        found = predict(replayed, grid(), budget)
        assert (found.tokens, found.rounds) == (23, real.rounds)
        assert found.seconds == pytest.approx(seconds)
        assert found.tokens_per_second == pytest.approx(23 / seconds)
        assert found.nodes == sum(s.tree.drafted for s in real.steps)


def test_plain_decoding_takes_a_round_a_token() -> None:
    found = predict_plain(recorded()[0].replay, grid())
    assert (found.tokens, found.rounds, found.seconds) == (23, 23, pytest.approx(23 * 5.0))


# ---- oracles ---------------------------------------------------------------------------------------------------------


def decode_with_perfect_ranking(prompt: list[int], text: list[int], budget: int) -> list[tuple[int, int]]:
    """The oracle by decoding: a tree hook that drafts the text itself, as far as each depth's best tokens hold it."""
    drafted: dict[str, Any] = {}
    decoder = Decoder(pair(), budget=budget, max_new_tokens=24)
    decoder.register_hook("draft", lambda d, logits: drafted.update(logits=logits))

    def tree(d: Decoder, _: DraftTree) -> DraftTree:
        at, tokens = len(d.ids), [d.ids[-1]]
        for row in drafted["logits"]:
            best = row.argsort(descending=True, stable=True)[:budget].tolist()
            if at >= len(text) or text[at] not in best:
                break
            tokens.append(text[at])
            at += 1
        return DraftTree.from_parents(tokens, list(range(-1, len(tokens) - 1)))

    decoder.register_hook("tree", tree)
    return [(step.start, len(step.emitted)) for step in decoder.run(prompt)]


@pytest.mark.parametrize("budget", BUDGETS)
def test_perfect_ranking_is_a_decoder_whose_tree_holds_the_right_candidates(budget: int) -> None:
    for name, _, replayed in recorded()[:2]:
        text = replayed.drafts.text.tolist()
        assert perfectly_ranked(replayed.drafts, budget) == decode_with_perfect_ranking(PROMPTS[name], text, budget)


@pytest.mark.parametrize("budget", BUDGETS)
def test_ends_are_told_by_the_drafters_own_logits(budget: int) -> None:
    for name, _, replayed in recorded()[:2]:
        logits: list[Any] = []
        decoder = Decoder(pair(), budget=budget, max_new_tokens=24)
        decoder.register_hook("draft", lambda d, value, kept=logits: kept.append(value))
        steps = list(decoder.run(PROMPTS[name]))
        ends = [end_of(replayed.drafts, r, budget) for r in replayed.run(budget)]
        for step, drafted, end in zip(steps, logits, ends, strict=True):
            if step.stop_reason in ("length", "stop_token"):
                assert end == "cut"
            elif step.accepted == len(drafted):
                assert end == "full_depth"
            else:
                best = drafted[step.accepted].argsort(descending=True, stable=True)[:budget].tolist()
                assert end == ("ranked_out" if step.bonus in best else "not_drafted")


def drafts_with(ranks: list[list[int]]) -> DenseDrafts:
    """Blocks of two over a vocabulary of four, in which the text's token has these ranks: [position][depth]."""
    text = np.arange(len(ranks) + 3) % 4  # a prompt of two tokens
    ids = np.zeros((len(ranks), 2, 4), np.int32)
    for row, block in enumerate(ranks):
        for depth, rank in enumerate(block):
            right = int(text[2 + row + 1 + depth]) if 2 + row + 1 + depth < len(text) else 0
            others = [token for token in range(4) if token != right]
            ids[row, depth] = [*others[:rank], right, *others[rank:]]
    log_probs = np.broadcast_to(np.log([0.85, 0.1, 0.04, 0.01]), ids.shape)
    known = dict(stop_token_ids=(), max_new_tokens=len(ranks) + 1, max_positions=None)
    return DenseDrafts(text, 2, ids, log_probs, np.full(len(ranks), 2), complete=True, **known)


def test_a_longer_block_swallows_the_round_after_a_full_one() -> None:
    full, no = [0, 0], [3, 3]  # what the rounds at 0, 3, 6, 7, 10 draft; the others are never drafted
    starts = {0: full, 3: full, 6: no, 7: full, 10: no}
    replayed, cost = Replay(drafts_with([starts.get(i, no) for i in range(12)])), grid()
    rounds = replayed.run(2)
    assert [(r.start - 2, r.accepted) for r in rounds] == [(0, 2), (3, 2), (6, 0), (7, 2), (10, 0), (11, 0)]
    ways, ends = ways_of(replayed, cost, [2])
    seconds = [float(cost.seconds_of(3, r.start)) for r in rounds]
    longer = ways["longer_block", 2]
    assert (longer.rounds, longer.changed, longer.tokens) == (3, 3, ways["tree", 2].tokens)
    assert longer.seconds == pytest.approx(seconds[0] + seconds[3] + seconds[5])
    assert ends[2] == {"full_depth": 3, "not_drafted": 3}


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=1, max_size=14), st.integers(1, 6))
def test_a_perfect_ranking_accepts_at_least_what_the_tree_does(ranks: list[list[int]], budget: int) -> None:
    drafts = drafts_with(ranks)
    perfect = dict(perfectly_ranked(drafts, budget))
    for taken in Replay(drafts).run(budget):
        if taken.start in perfect:
            assert len(taken.emitted) <= perfect[taken.start]
    assert sum(perfect.values()) == len(ranks)


def test_free_verifies_leave_the_rest_of_the_round() -> None:
    for _, _, replayed in recorded():
        ways, _ = ways_of(replayed, grid(), [12])
        rounds = replayed.run(12)
        verify = sum(linear(r.nodes + 1, r.start)["verify"] for r in rounds)
        one_row = sum(linear(1, r.start)["verify"] for r in rounds)
        whole = ways["tree", 12].seconds
        assert ways["free_verify", 12].seconds == pytest.approx(whole - verify)
        assert ways["free_rows", 12].seconds == pytest.approx(whole - verify + one_row)


@settings(max_examples=20)
@given(stop=st.integers(1, 23), budget=st.sampled_from(BUDGETS))
def test_an_unfinished_text_is_followed_as_far_as_it_decides(stop: int, budget: int) -> None:
    whole = recorded()[1].replay.drafts
    cut = type(whole)(
        **{**vars(whole), "text": whole.text[: whole.prompt_length + stop]}
        | {name: getattr(whole, name)[: max(0, stop - 1)] for name in ("ids", "log_probs", "depths")}
    )
    known = [(s, n) for s, n in perfectly_ranked(whole, budget) if s + n < whole.prompt_length + stop]
    assert perfectly_ranked(cut, budget) == known


# ---- advice ----------------------------------------------------------------------------------------------------------


def test_the_best_option_is_the_one_of_most_tokens_per_second_over_prompts() -> None:
    found = advise(recorded(), grid(), BUDGETS)
    everything = found.kinds[0]
    assert [kind.kind for kind in found.kinds] == ["all", "even", "odd"]
    rates: dict[str, float] = {"ar": 1 / 5.0}
    for budget in BUDGETS:
        rates[f"tree {budget}"] = float(
            np.mean([predict(r.replay, grid(), budget).tokens_per_second or 0 for r in recorded()])
        )
    rates["chain"] = float(
        np.mean([predict(r.replay, grid(), None, "chain").tokens_per_second or 0 for r in recorded()])
    )
    assert {o.label: float(o.tokens_per_second) for o in everything.options} == pytest.approx(rates)
    assert everything.best.label == max(rates, key=lambda label: rates[label])
    assert sum(everything.chosen.values()) == pytest.approx(1)
    assert everything.prompts == 3 and found.kinds[1].prompts == 2


def test_counts_of_what_ended_rounds_add_up() -> None:
    for kind in advise(recorded(), grid(), BUDGETS).kinds:
        assert list(kind.ends) == list(ENDS)
        assert sum(kind.ends.values()) == kind.best_tree.tokens_per_round.rounds
        for oracle in kind.oracles:
            assert 0 <= oracle.rounds_changed <= oracle.rounds
        assert {o.name: float(o.gain) for o in kind.oracles}["free_verify"] >= 1


def test_cheap_rows_call_for_large_trees_and_dear_ones_for_none() -> None:
    free = CostModel.from_mapping({1: 1.0, 98: 1.0}, rest=0.5)
    dear = CostModel.from_mapping({1: 1.0, 98: 1000.0})
    large, none = advise(recorded(), free, BUDGETS).kinds[0], advise(recorded(), dear, BUDGETS).kinds[0]
    assert large.best_tree.budget == 12 and "ar" not in large.chosen
    assert none.best.name == "ar" and none.low_budget is None and none.chosen == {"ar": 1.0}
    assert none.limit == "free_rows" and large.limit != "free_rows"


def test_short_texts_are_left_out_and_counted() -> None:
    stops = (int(recorded()[0].replay.drafts.text[10]),)
    trace = generate(pair(), PROMPTS["p0"], budget=6, max_new_tokens=24, stop_token_ids=stops)
    assert trace.finished == "stop_token" and len(trace.output_ids) < 24
    early = Replayed("early", "even", replay(pair(), trace, [12]))
    found = advise([*recorded(), early], grid(), BUDGETS).kinds
    assert [(kind.prompts, kind.short_prompts) for kind in found] == [(3, 1), (2, 1), (1, 0)]
    with pytest.raises(ValueError, match="no text to give advice on: 1 recordings, 1 of them too short"):
        advise([early], grid(), BUDGETS)


def test_budgets_are_those_measured_and_recorded_unless_given() -> None:
    kept = Replayed("p", "k", Replay(recorded()[0].replay.drafts))
    assert [o.budget for o in advise([kept], grid((1, 5, 13))).kinds[0].options] == [None, 4, 12]
    with pytest.raises(ValueError, match="budgets of 1 or more"):
        advise(recorded(), grid(), [0, 4])


def test_advice_is_data_and_text() -> None:
    found = advise(recorded(), grid(), BUDGETS)
    assert json.loads(json.dumps(found.to_dict()))["kinds"][0]["kind"] == "all"
    assert len(found.rows()) == 3 * 4 and set(found.to_frame().kind) == {"all", "even", "odd"}
    for kind in found.kinds:
        text = kind.to_text()
        assert f"Best: {kind.best.label}" in text and f"limited by: {kind.limit}" in text
