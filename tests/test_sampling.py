"""The target's choice and the walk."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import parent_lists, tree_of
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper

from ddlab.sampling import Sampling, _read_from_device, _read_on_host, gumbel_noise, walk
from ddlab.tree import DraftTree


def no_history(node: int) -> list[int]:
    raise AssertionError("asked for only when there are processors")


def test_choices_follow_the_targets_distribution() -> None:
    """Chi-square over 20,000 positions of one toy row at temperature 0.7, 99.9 % quantile of 4 degrees of freedom."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])
    n, temperature = 20_000, 0.7
    chosen = Sampling(temperature, seed=3).choose(logits.expand(n, -1), np.arange(n), no_history).tokens
    expected = n * torch.softmax(logits / temperature, -1).numpy()
    observed = np.bincount(chosen.numpy(), minlength=5)
    assert ((observed - expected) ** 2 / expected).sum() < 18.47


def test_the_first_token_after_a_prompt_varies_with_the_seed_as_softmax_says() -> None:
    logits = torch.tensor([[1.0, 0.0, 0.5]])
    n = 4000
    tokens = [int(Sampling(1.0, seed).choose(logits, np.array([7]), no_history).tokens) for seed in range(n)]
    expected = n * torch.softmax(logits[0], -1).numpy()
    assert ((np.bincount(tokens, minlength=3) - expected) ** 2 / expected).sum() < 13.82  # 99.9 %, 2 degrees


def test_noise_depends_on_seed_and_position_alone() -> None:
    assert np.array_equal(gumbel_noise(5, 9, 50), gumbel_noise.__wrapped__(5, 9, 50))
    assert not np.array_equal(gumbel_noise(5, 9, 50), gumbel_noise(5, 10, 50))
    assert not np.array_equal(gumbel_noise(5, 9, 50), gumbel_noise(6, 9, 50))
    assert np.isfinite(gumbel_noise(-1, 0, 10_000)).all()


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_zero_and_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = torch.randn(40, 97, generator=torch.Generator().manual_seed(0))
    choice = Sampling(temperature).choose(logits, np.arange(40), no_history)
    assert torch.equal(choice.tokens, logits.argmax(-1))


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_a_temperature_that_cannot_be_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="finite number >= 0"):
        Sampling(temperature)


def test_margin_is_the_distance_of_the_two_best_scores() -> None:
    choice = Sampling().choose(torch.tensor([[3.0, 1.0, 2.5], [0.0, 0.0, -1.0]]), np.array([1, 2]), no_history)
    assert choice.margin.tolist() == [0.5, 0.0]
    assert Sampling().choose(torch.zeros(1, 1), np.array([1]), no_history).margin.tolist() == [float("inf")]


def test_each_node_is_processed_with_its_own_path_as_history() -> None:
    logits = torch.tensor([[5.0, 4.9, 0.0], [5.0, 4.9, 0.0]])
    penalty = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])
    choice = Sampling(processors=penalty).choose(logits, np.array([3, 3]), lambda node: [[2, 0], [2, 1]][node])
    assert choice.tokens.tolist() == [1, 0]
    assert logits[0].tolist() == pytest.approx([5.0, 4.9, 0.0])  # the caller's logits are not written to


def test_banned_tokens_are_never_sampled() -> None:
    processors = LogitsProcessorList([TopKLogitsWarper(1)])
    logits = torch.tensor([[0.0, 0.1, 0.0]]).expand(200, -1)
    assert set(Sampling(5.0, 1, processors).choose(logits, np.arange(200), lambda n: [0]).tokens.tolist()) == {1}


@given(parent_lists(), st.integers(0, 2**16), st.integers(1, 9))
def test_the_walk_takes_the_targets_choices_and_says_why_it_ended(parents: list[int], seed: int, room: int) -> None:
    vocab = 30
    tree = tree_of(parents, seed, vocab)
    rng = np.random.default_rng(seed)
    choice = rng.integers(0, vocab, len(tree))
    for node in range(1, len(tree)):  # make hits likely
        if rng.random() < 0.6:
            choice[tree.parents[node]] = tree.tokens[node]
    stops = {int(rng.integers(vocab))} if rng.random() < 0.5 else set()
    taken = walk(tree, choice, stops, room)
    emitted = taken.emitted(tree)
    # the target's own text from the root, as far as the tree says what the target chooses
    plain, node = [], 0
    while node is not None and len(plain) < room:
        plain.append(int(choice[node]))
        if plain[-1] in stops:
            break
        hits = [int(c) for c in tree.children(node) if tree.tokens[c] == choice[node]]
        node = hits[0] if hits else None
    assert list(emitted) == plain
    assert taken.path[0] == 0 and all(tree.parents[b] == a for a, b in pairwise(taken.path))
    last = taken.path[-1]
    match taken.stop_reason:
        case "stop_token":
            assert emitted[-1] in stops
        case "length":
            assert len(emitted) == room and taken.bonus is None
        case "mismatch":
            assert len(tree.children(last)) and taken.bonus == choice[last]
        case "exhausted":
            assert not len(tree.children(last)) and taken.bonus == choice[last]


def test_equal_drafts_behind_a_wrong_one_are_not_accepted() -> None:
    tree = DraftTree.from_parents([0, 5, 6, 7, 8], [-1, 0, 1, 2, 3])
    taken = walk(tree, np.array([5, 9, 7, 8, 1]), set(), 10)
    assert (taken.path, taken.bonus, taken.stop_reason) == ((0, 1), 9, "mismatch")


def test_a_wrong_first_draft_leaves_only_the_bonus() -> None:
    tree = DraftTree.from_parents([0, 5], [-1, 0])
    assert walk(tree, np.array([6, 5]), set(), 10) == ((0,), 6, "mismatch")
    assert walk(tree, np.array([5, 6]), set(), 10) == ((0, 1), 6, "exhausted")


def test_the_right_sampling_rule_keeps_the_distribution_and_the_greedy_draft_its_acceptance() -> None:
    """p = [.5, .3, .2] against a draft that always says 0: the text keeps p, half of the drafts are accepted."""
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    n = 20_000
    tokens = Sampling(1.0, 0).choose(logits.expand(n, -1), np.arange(n), no_history).tokens.numpy()
    tree = DraftTree.from_parents([9, 0], [-1, 0])
    accepted = np.mean([len(walk(tree, np.array([t, 1]), set(), 9).path) - 1 for t in tokens])
    assert accepted == pytest.approx(0.5, abs=0.015)


# ---- how the scores are read -----------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 300), st.integers(0, 2**16), st.sampled_from([0.5, 4.0, 1000.0]))
def test_host_and_device_read_the_same_and_what_the_definitions_say(n: int, vocab: int, seed: int, grid: float) -> None:
    """The device's way works on any device; a coarse grid makes ties, also of the best and across blocks."""
    noise = torch.Generator().manual_seed(seed)
    scores = (torch.randn(n, vocab, generator=noise) * grid).round() / grid
    scores[torch.rand(n, vocab, generator=noise) < 0.2] = -torch.inf
    scores[:, 0] = 0.0
    rng = np.random.default_rng(seed)
    nodes = np.concatenate([np.arange(n), rng.integers(0, n, 6)])
    ids = rng.integers(0, vocab, 6)
    before = scores.clone()
    own = _read_on_host(scores, scores, nodes, ids)
    for one, other in zip(own, _read_from_device(scores, scores, nodes, ids), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    assert torch.equal(scores, before)
    tokens, best, second, peak, total, picked = own
    assert tokens.tolist() == scores.argmax(-1).tolist()
    ordered = torch.cat([scores, torch.full((n, 1), -torch.inf)], 1).sort(-1, descending=True).values
    assert best.tolist() == peak.tolist() == ordered[:, 0].tolist() and second.tolist() == ordered[:, 1].tolist()
    log_probs = torch.log_softmax(scores.double(), -1).numpy()
    at = np.concatenate([tokens, ids])
    np.testing.assert_allclose(picked - peak[nodes] - total[nodes], log_probs[nodes, at], rtol=1e-5, atol=1e-5)


def test_likelihoods_that_are_asked_for_are_those_of_the_tempered_distribution() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    nodes, ids = np.array([0, 2, 2, 1]), np.array([4, 4, 0, 49])
    for temperature in (0.0, 0.7):
        choice = Sampling(temperature).choose(logits, np.arange(3), no_history, asked=(nodes, ids))
        log_probs = torch.log_softmax(logits / (temperature or 1.0), -1)
        assert torch.allclose(choice.asked, log_probs[nodes, ids], atol=1e-6)
        assert torch.allclose(choice.log_prob, log_probs.gather(1, choice.tokens[:, None])[:, 0], atol=1e-6)


def test_half_precision_scores_choose_what_they_say() -> None:
    logits = torch.zeros(2, 9, dtype=torch.bfloat16)
    logits[1, 8] = 3
    choice = Sampling().choose(logits, np.arange(2), no_history)
    assert choice.tokens.tolist() == [0, 8] and choice.margin.tolist() == [0.0, 3.0]


@pytest.mark.filterwarnings("error")
def test_rows_without_a_choice_give_nan_and_no_warning() -> None:
    logits = torch.tensor([[-torch.inf, -torch.inf], [torch.inf, 0.0], [torch.nan, 0.0]], requires_grad=True)
    choice = Sampling().choose(logits, np.arange(3), no_history, asked=(np.arange(3), np.zeros(3, np.int64)))
    assert choice.tokens.tolist() == logits.argmax(-1).tolist() and torch.isnan(choice.asked).all()
