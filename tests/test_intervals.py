"""Intervals by prompt against enumeration and simulation; pairs against their own mirror image."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlab.intervals import LEVEL, RESAMPLED, bounds, estimate, is_short, paired, resampled_means

VALUES = st.lists(st.floats(0.5, 20), min_size=1, max_size=12)


def named(values: list[float]) -> dict[str, float]:
    return {f"prompt {i}": value for i, value in enumerate(values)}


# ---- one method ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [[1.0, 2.0, 4.0], [3.0, 3.5, 9.0, 1.0], [2.0, 2.0, 2.0, 8.0]])
def test_draws_are_those_of_all_equally_likely_ones(values: list[float]) -> None:
    every = np.array([np.mean(draw) for draw in itertools.product(values, repeat=len(values))])
    ours = resampled_means(np.array(values))
    for mean in np.unique(every.round(9)):
        share, expected = np.isclose(ours, mean).mean(), np.isclose(every, mean).mean()
        assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / RESAMPLED) + 1e-12


def test_columns_are_drawn_together() -> None:
    values = np.random.default_rng(1).normal(size=(9, 2))
    both = resampled_means(values)
    assert both.shape == (RESAMPLED, 2)
    np.testing.assert_allclose(resampled_means(values[:, 0]), both[:, 0])
    np.testing.assert_allclose(resampled_means(values @ [2.0, -1.0]), both @ [2.0, -1.0])


def test_more_prompts_than_fit_in_one_block_are_drawn_alike() -> None:
    means = resampled_means(np.arange(1000.0))
    assert abs(means.mean() - 499.5) < 1 and abs(means.std() - 1000 / math.sqrt(12 * 1000)) < 0.5


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rng, inside = np.random.default_rng(2), 0
    for _ in range(100):
        low, high = bounds(resampled_means(rng.exponential(1.0, 20)))
        inside += low <= 1.0 <= high
    assert LEVEL - 0.1 < inside / 100 <= 1.0


@settings(max_examples=20)
@given(VALUES)
def test_an_estimate_is_the_mean_inside_its_interval_with_its_counts(values: list[float]) -> None:
    found = estimate("tokens per round", named(values), runs=7, rounds=99)
    assert found.value == pytest.approx(np.mean(values))
    assert (found.prompts, found.runs, found.rounds) == (len(values), 7, 99)
    if len(values) == 1:
        assert found.low is None and found.high is None
    else:
        assert found.low is not None and found.high is not None and found.value is not None
        assert min(values) <= found.low <= found.value + 1e-9 and found.value - 1e-9 <= found.high <= max(values)


def test_no_prompts_have_no_mean() -> None:
    found = estimate("tokens per round", {}, 0, 0)
    assert found.value is None and math.isnan(float(found)) and not found.enough
    assert str(found) == "tokens per round: no prompts (0 prompts, 0 runs, 0 rounds)"


@pytest.mark.parametrize("prompts, rounds, enough", [(8, 30, True), (7, 300, False), (20, 29, False)])
def test_few_prompts_or_rounds_are_not_enough(prompts: int, rounds: int, enough: bool) -> None:
    assert estimate("x", named([1.0] * prompts), prompts, rounds).enough == enough


# ---- two methods -----------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.lists(st.tuples(st.floats(0.5, 20), st.floats(0.5, 20)), min_size=1, max_size=10))
def test_the_other_way_round_is_the_mirror_image(values: list[tuple[float, float]]) -> None:
    ours, theirs = (named(list(side)) for side in zip(*values, strict=True))
    there, back = paired("x", ours, theirs), paired("x", theirs, ours)
    assert (there.wins, there.ties, there.losses) == (back.losses, back.ties, back.wins)
    assert there.wins + there.ties + there.losses == len(values)
    assert float(there.difference) == pytest.approx(-float(back.difference))
    assert float(there.ratio) == pytest.approx(1 / float(back.ratio))
    if len(values) > 1:
        assert there.ratio.low == pytest.approx(1 / back.ratio.high)  # type: ignore[operator]
        assert there.difference.low == pytest.approx(-back.difference.high)  # type: ignore[operator]


def test_what_prompts_share_is_not_in_the_interval_of_a_pair() -> None:
    theirs = named([1.0, 5.0, 20.0, 80.0])
    found = paired("x", {prompt: 1.5 * value for prompt, value in theirs.items()}, theirs)
    assert found.ratio.value == pytest.approx(1.5) == found.ratio.low == found.ratio.high
    assert (found.wins, found.losses) == (4, 0)


def test_prompts_that_only_one_has_are_counted_and_left_out() -> None:
    found = paired("x", {"a": 2.0, "b": 3.0}, {"b": 1.0, "c": 9.0})
    assert (found.ratio.value, found.ratio.prompts, found.unpaired) == (pytest.approx(3.0), 1, 2)


# ---- short texts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stopped, new, most, short",
    [
        (True, 31, 128, True),
        (True, 32, 128, False),
        (False, 31, 128, False),
        (True, 15, 16, True),
        (True, 16, 16, False),
    ],
)
def test_a_text_is_short_when_a_stop_token_ended_it_early(stopped: bool, new: int, most: int, short: bool) -> None:
    assert is_short(stopped, new, most) == short
