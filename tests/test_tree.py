"""Draft trees: which prefixes they hold, in which order, and what they refuse."""

from __future__ import annotations

import html
import itertools
import re
import shutil
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from bench_tree import heap_best_first
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import parent_lists, tree_of

from ddlab.top import _numpy_largest, largest, top_tokens
from ddlab.tree import DraftTree, grow

INF = float("inf")
KINDS = {  # what a drafter's logits come as, and how well their float64 log-softmax is met
    "numpy float16": (lambda x: x.astype(np.float16), 2e-6),
    "numpy float32": (lambda x: x.astype(np.float32), 2e-6),
    "numpy float64": (lambda x: x, 2e-12),
    "torch bfloat16": (lambda x: torch.from_numpy(x).bfloat16(), 2e-6),
    "torch float16": (lambda x: torch.from_numpy(x).half(), 2e-6),
    "torch float32": (lambda x: torch.from_numpy(x).float(), 2e-6),
    "torch float64": (lambda x: torch.from_numpy(x), 2e-12),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def as_kind(rows: Any, kind: str) -> Any:
    return KINDS[kind][0](np.array(rows, np.float64))


def enumerate_prefixes(log_probs: np.ndarray) -> list[tuple[float, int, tuple[int, ...]]]:
    """Every prefix of finite score as (-score, depth, path), in the order of the written rule."""
    level, found = [(0.0, ())], []
    for row in log_probs.tolist():
        level = [
            (score + log_prob, (*path, token))
            for score, path in level
            for token, log_prob in enumerate(row)
            if log_prob > -INF
        ]
        found += [(-score, len(path), path) for score, path in level]
    return sorted(found)


def prefixes(tree: DraftTree) -> list[tuple[float, int, tuple[int, ...]]]:
    """The tree's nodes but the root, as stored, in the same form."""
    paths = [tuple(tree.tokens[tree.path(node)[1:]].tolist()) for node in range(1, len(tree))]
    return [(-s, d, path) for s, d, path in zip(tree.log_prob[1:], tree.depth[1:], paths, strict=True)]


def table(logits: Any) -> np.ndarray:
    """The builder's own log-probabilities of every token, [depth, vocab]."""
    ids, log_probs = top_tokens(logits, logits.shape[1])
    by_id = np.empty_like(log_probs)
    np.put_along_axis(by_id, ids, log_probs, axis=1)
    return by_id


def log_softmax(logits: Any) -> np.ndarray:
    return torch.as_tensor(logits).double().log_softmax(-1).numpy()


LATTICE = [0.0, 0.25, 0.5, 1.0, 1.0, 2.0, -1.0, -3.0]  # ties within rows, between paths and between depths
NASTY = [-INF, -INF, 5e-324, 1e-20, -1e-20, 1e-13, -3e4, 6e4, 3.0000001]


@st.composite
def drafts(draw: st.DrawFn, values: list[float] | None = None, max_depth: int = 4, max_vocab: int = 6) -> Any:
    """Draft logits of every kind: lattice values with ties, floats, banned tokens and other extremes."""
    depth, vocab = draw(st.integers(0, max_depth)), draw(st.integers(1, max_vocab))
    value = st.sampled_from(values or LATTICE + NASTY)
    if values is None and draw(st.booleans()):
        value = st.one_of(value, st.floats(-30, 30, width=16))
    rows = draw(st.lists(st.lists(value, min_size=vocab, max_size=vocab), min_size=depth, max_size=depth))
    return as_kind(np.reshape(rows, (depth, vocab)), draw(st.sampled_from(sorted(KINDS))))


# Best-first: which nodes, in which order


@given(drafts(), st.lists(st.integers(0, 60), min_size=1, max_size=4))
def test_best_first_is_the_beginning_of_the_enumeration_in_the_written_order(logits, budgets):
    expected = enumerate_prefixes(table(logits))
    for budget in [*budgets, len(expected), len(expected) + 3]:
        assert prefixes(DraftTree.best_first(logits, budget)) == expected[:budget]


@pytest.mark.parametrize("seed", range(8))
def test_best_first_equals_enumeration_at_every_budget(seed):
    rng = np.random.default_rng(seed)
    for _ in range(25):
        depth, vocab = rng.integers(1, 5), rng.integers(1, 4)
        logits = rng.choice([rng.normal(size=(depth, vocab)) * 3, rng.integers(-2, 2, (depth, vocab)) * 1.0])
        expected = enumerate_prefixes(table(logits))
        for budget in range(len(expected) + 2):
            assert prefixes(DraftTree.best_first(logits, budget)) == expected[:budget]


@given(drafts(), st.integers(0, 40))
def test_scores_are_the_largest_under_the_float64_log_softmax(logits, budget):
    best = [-cost for cost, _, _ in enumerate_prefixes(log_softmax(logits))[:budget]]
    found = DraftTree.best_first(logits, budget).log_prob[1:]
    assert np.allclose(found, best, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("spread", [0.02, 0.5, 2.0, 6.0])
@pytest.mark.parametrize("step", [0.0, 1 / 4])  # 1/4: ties everywhere, as coarse floats make them
def test_best_first_equals_a_plain_heap_on_wide_drafts(spread, step):
    rng = np.random.default_rng(int(100 * spread))
    for depth, vocab in ((15, 2), (15, 10), (15, 97), (7, 1000), (15, 3000)):
        logits = rng.normal(size=(depth, vocab)) * spread
        logits = np.round(logits / step) * step if step else logits
        for budget in (1, 3, 16, 64, 257, 1024):
            ids, log_probs = top_tokens(logits, budget)
            tree = grow(ids, log_probs, budget)
            expected = heap_best_first(ids, log_probs, budget)
            for found, right in zip((tree.parents, tree.depth, tree.log_prob, tree.rank), expected, strict=True):
                assert np.array_equal(found, right)
            assert DraftTree.best_first(logits, budget) == tree  # looks at fewer columns first


@given(drafts(), st.integers(0, 60), st.integers(0, 60))
def test_truncating_gives_exactly_the_tree_of_the_smaller_budget(logits, one, other):
    small, large = sorted((one, other))
    assert DraftTree.best_first(logits, large).truncate(small) == DraftTree.best_first(logits, small)


@given(drafts(), st.integers(1, 60))
def test_every_parent_precedes_its_children_and_no_siblings_are_alike(logits, budget):
    tree = DraftTree.best_first(logits, budget, root_token=7)
    again = DraftTree.from_parents(tree.tokens, tree.parents, log_prob=tree.log_prob, rank=tree.rank)
    assert again == tree


def test_worked_example():
    logits = np.log([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1]])
    tree = DraftTree.best_first(logits, 5, root_token=42)
    assert np.exp(tree.log_prob) == pytest.approx([1, 0.6, 0.3, 0.3, 0.24, 0.15])
    assert tree.tokens[0] == 42
    # 0.6 * 0.5 and 0.3 are equal up to rounding, so their order is not for a test to say
    assert sorted(path for _, _, path in prefixes(tree)) == [(0,), (0, 0), (0, 1), (1,), (1, 0)]
    assert sorted(zip(tree.depth[1:].tolist(), tree.rank[1:].tolist(), strict=True)) == [
        *((1, 0), (1, 1)),
        *((2, 0), (2, 0), (2, 1)),
    ]


# The tie rule


@kinds
def test_all_zero_logits_give_the_lowest_ids_of_the_shallowest_depth_first(kind):
    logits = as_kind(np.zeros((3, 4)), kind)
    for _ in range(2):
        tree = DraftTree.best_first(logits, 8)
        assert tree.tokens[1:].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
        assert tree.parents[1:].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_among_equal_scores_the_shallower_prefix_comes_first():
    logits = np.array([[0.0, 0.0, -INF], [-INF, -INF, 5.0]])  # the second depth costs nothing
    tree = DraftTree.best_first(logits, 4)
    assert tree.log_prob[1:] == pytest.approx([-np.log(2)] * 4)
    assert [path for _, _, path in prefixes(tree)] == [(0,), (1,), (0, 2), (1, 2)]


def test_among_equal_scores_and_depths_the_path_of_smaller_ids_comes_first_whatever_its_ranks():
    logits = np.array([[0.0, 1.0], [0.0, 1.0]])  # (0, 1) and (1, 0) score alike; by ranks (1, 0) would be first
    tree = DraftTree.best_first(logits, 6)
    assert [path for _, depth, path in prefixes(tree) if depth == 2] == [(1, 1), (0, 1), (1, 0), (0, 0)]


def test_equal_scores_stay_equal_in_whatever_order_they_were_added():
    row = np.log([0.7, 0.2, 0.1])
    tree = DraftTree.best_first(np.array([row, row, row]), 1000)
    by_multiset: dict[tuple[int, ...], set[float]] = {}
    for cost, _, path in prefixes(tree):
        by_multiset.setdefault(tuple(sorted(path)), set()).add(cost)
    assert all(len(costs) == 1 for costs in by_multiset.values())


@kinds
@pytest.mark.parametrize("k", [1, 3, 64])
def test_a_cut_through_equal_tokens_keeps_the_lowest_ids(kind, k):
    rng = np.random.default_rng(0)
    rows = np.stack([np.zeros(5000), rng.integers(0, 3, 5000) * 1.0, np.full(5000, -1e4)])
    rows[2, rng.permutation(5000)[:2]] = 0.0
    ids, _ = top_tokens(as_kind(rows, kind), k)
    for row, found in zip(rows, ids, strict=True):
        assert found.tolist() == sorted(range(5000), key=lambda i, row=row: (-row[i], i))[:k]


def test_logits_closer_than_the_grid_are_ties_at_the_cut_too():
    logits = np.array([[0.0, 1e-16, 2e-16, 3e-16] + [1e-17] * 60])
    assert top_tokens(logits, 2)[0].tolist() == [[0, 1]]


# What goes in: dtypes, shifts, temperatures


@kinds
def test_log_probabilities_are_the_log_softmax_of_the_whole_row(kind):
    logits = as_kind(np.random.default_rng(0).normal(size=(5, 4000)) * 4, kind)
    ids, log_probs = top_tokens(logits, 50)
    exact = np.take_along_axis(log_softmax(logits), ids, axis=1)
    assert np.abs(log_probs - exact).max() < KINDS[kind][1]


@given(drafts(LATTICE), st.integers(0, 30))
def test_logits_shifted_logits_and_log_softmax_give_one_tree(logits, budget):
    logits = torch.as_tensor(logits).double()
    tree = DraftTree.best_first(logits, budget)
    assert DraftTree.best_first(logits + 100, budget) == tree
    assert DraftTree.best_first(logits - 7 * torch.arange(len(logits))[:, None], budget) == tree
    assert DraftTree.best_first(logits.log_softmax(-1), budget).log_prob == pytest.approx(tree.log_prob)


def test_log_softmax_gives_the_tree_of_the_logits():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    tree, again = (DraftTree.best_first(x, 40) for x in (logits, logits.log_softmax(-1)))
    assert np.array_equal(tree.tokens, again.tokens) and np.array_equal(tree.parents, again.parents)
    assert np.allclose(tree.log_prob, again.log_prob, atol=1e-5)


def test_temperature_is_a_scaling_of_the_logits_and_changes_the_nodes():
    logits = np.array([[3.0, 2, 0], [2.5, 0, -1], [2, 1.9, 0]])
    cold, warm = (DraftTree.best_first(logits / temperature, 6) for temperature in (1, 2))
    assert [path for _, _, path in prefixes(cold)] == [(0,), (0, 0), (0, 0, 0), (0, 0, 1), (1,), (1, 0)]
    assert [path for _, _, path in prefixes(warm)] == [(0,), (0, 0), (1,), (1, 0), (0, 0, 0), (0, 0, 1)]


@given(drafts(), st.integers(1, 60))
def test_the_children_of_a_node_are_together_no_more_probable_than_the_node(logits, budget):
    tree = DraftTree.best_first(logits, budget)
    for node in range(len(tree)):
        below = np.exp(tree.log_prob[tree.children(node)]).sum()
        assert below <= np.exp(tree.log_prob[node]) * (1 + 1e-6)


@given(drafts(LATTICE), st.integers(1, 60))
def test_a_token_has_one_marginal_per_depth_under_whichever_parent(logits, budget):
    tree = DraftTree.best_first(logits, budget)
    marginals: dict[tuple[int, int], set[tuple[float, int]]] = {}
    for node in range(1, len(tree)):
        marginal = tree.log_prob[node] - tree.log_prob[tree.parents[node]]
        key = int(tree.depth[node]), int(tree.tokens[node])
        marginals.setdefault(key, set()).add((marginal, int(tree.rank[node])))
    assert all(len(seen) == 1 for seen in marginals.values())


def test_logits_that_require_grad_or_are_strided_are_read_as_they_are():
    logits = torch.randn(9, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    tree, again = (DraftTree.best_first(x, 12) for x in (logits.T, logits.detach().T.contiguous()))
    assert np.array_equal(tree.tokens, again.tokens) and np.array_equal(tree.parents, again.parents)


# Banned tokens, broken logits, odd sizes


@kinds
def test_tokens_of_probability_zero_are_never_drafted(kind):
    tree = DraftTree.best_first(as_kind([[0, -INF, -INF], [0, 1, -INF]], kind), 20)
    assert sorted(path for _, _, path in prefixes(tree)) == [(0,), (0, 0), (0, 1)]
    assert np.isfinite(tree.log_prob).all()


@kinds
@pytest.mark.parametrize("build", [lambda x: DraftTree.best_first(x, 50), DraftTree.chain])
def test_a_row_of_banned_tokens_ends_the_tree_above_it(kind, build):
    for row in range(3):
        rows = np.zeros((3, 2))
        rows[row] = -INF
        tree = build(as_kind(rows, kind))
        assert tree.depth.max() == row == len(top_tokens(as_kind(rows, kind), 2)[0])
        assert tree == build(as_kind(rows[:row], kind))


@kinds
@pytest.mark.parametrize("bad", [float("nan"), INF])
@pytest.mark.parametrize("build", [lambda x: DraftTree.best_first(x, 2), DraftTree.chain])
def test_nan_and_overflow_are_refused_by_row(kind, bad, build):
    rows = np.zeros((4, 40))
    rows[1] = -INF  # the tree would not reach the broken row
    rows[2, 39] = bad
    with pytest.raises(ValueError, match=r"(NaN|\+inf) .*row 2"):
        build(as_kind(rows, kind))


def test_numpy_warns_of_nothing_on_extreme_logits(recwarn):
    lowest = float(np.finfo(np.float32).min)
    rows = np.array([[0, lowest, -INF], [-lowest, 0, lowest], [-INF] * 3], np.float32)
    tree = DraftTree.best_first(rows, 9)
    assert [path for _, _, path in prefixes(tree)][:2] == [(0,), (0, 0)]
    assert not recwarn.list


@kinds
@pytest.mark.parametrize(("vocab", "depth", "budget", "nodes"), [(3, 2, 100, 12), (1, 3, 10, 3), (5, 1, 9, 5)])
def test_a_budget_is_a_ceiling(kind, vocab, depth, budget, nodes):
    tree = DraftTree.best_first(as_kind(np.zeros((depth, vocab)), kind), budget)
    assert tree.drafted == nodes == len(tree) - 1
    assert tree.ancestors().shape == (1 + nodes, 1 + nodes)


def test_a_vocabulary_of_one_gives_a_chain_at_no_cost():
    tree = DraftTree.best_first(np.full((3, 1), 5.0), 10)
    assert tree.parents.tolist() == [-1, 0, 1, 2] and tree.log_prob.tolist() == [0, 0, 0, 0]


def test_budget_none_is_the_depth_of_the_draft():
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    assert DraftTree.best_first(logits, None) == DraftTree.best_first(logits) == DraftTree.best_first(logits, 5)


def test_budget_zero_drafts_nothing_and_budget_one_the_first_choice():
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    assert DraftTree.best_first(logits, 0, root_token=3) == DraftTree.from_parents([3], [-1])
    assert DraftTree.best_first(logits, 1).tokens.tolist() == [-1, logits[0].argmax()]


def test_a_negative_or_broken_budget_is_refused():
    for build in (
        lambda b: DraftTree.best_first(np.zeros((2, 2)), b),
        DraftTree.from_parents([1], [-1]).truncate,
    ):
        with pytest.raises(ValueError, match=r"budget .* not -1"):
            build(-1)
        with pytest.raises(TypeError):
            build(1.5)


def test_a_draft_of_no_depth_gives_the_root_alone():
    for build in (DraftTree.best_first, DraftTree.chain):
        for logits in (np.zeros((0, 7)), torch.zeros(0, 7)):
            assert build(logits, root_token=3) == DraftTree.from_parents([3], [-1])


def test_a_draft_of_one_depth_gives_a_star_of_the_best_tokens():
    tree = DraftTree.best_first(np.array([[1.0, 5, 3, 2, 4]]), 4)
    assert tree.tokens.tolist() == [-1, 1, 4, 2, 3] and tree.parents.tolist() == [-1, 0, 0, 0, 0]


@pytest.mark.parametrize("shape", [(4,), (1, 3, 4), (3, 0)])
def test_logits_of_another_shape_are_refused(shape):
    for logits in (np.zeros(shape), torch.zeros(shape)):
        with pytest.raises(ValueError, match=r"\[depth, vocab\], not \["):
            DraftTree.best_first(logits, 2)


# Chain


@kinds
def test_the_chain_takes_the_argmax_of_every_depth_and_the_lowest_id_of_equals(kind):
    rows = [[0, 2, 1, 2], [3, 3, 3, 3], [-INF, 0, -1, 4]]
    chain = DraftTree.chain(as_kind(rows, kind), root_token=9)
    assert chain.tokens.tolist() == [9, 1, 0, 3] and chain.parents.tolist() == [-1, 0, 1, 2]
    assert chain.rank.tolist() == [-1, 0, 0, 0]
    assert chain.log_prob[1:] == pytest.approx(log_softmax(np.array(rows)).max(axis=1).cumsum())


def test_best_first_is_the_chain_on_sharp_logits_and_not_on_flat_ones():
    flat = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    assert DraftTree.best_first(flat * 1000) == DraftTree.chain(flat * 1000)
    assert DraftTree.best_first(flat) != DraftTree.chain(flat)


# Trees by hand


def test_from_parents_derives_depth_and_leaves_the_draft_unknown():
    tree = DraftTree.from_parents([5, 1, 2, 1], [-1, 0, 1, 2])
    assert tree.depth.tolist() == [0, 1, 2, 3]
    assert tree.log_prob[0] == 0 and np.isnan(tree.log_prob[1:]).all()
    assert tree.rank.tolist() == [-1, -1, -1, -1]


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([1, 7, 7], [-1, 0, 0], "nodes 1 and 2 are token 7 below node 0"),
        ([1, 2, 3], [-1, 2, 0], "node 1 has parent 2"),
        ([1, 2, 3], [-1, 2, 1], "node 1 has parent 2"),  # a cycle
        ([1, 2, 3], [-1, 1, 0], "node 1 has parent 1"),
        ([1, 2, 3], [-1, -1, 0], "node 1 has parent -1"),
        ([1, 2], [0, 0], "parents\\[0\\] must be -1"),
        ([1, -1], [-1, 0], "node 1 has token -1"),
        ([1, 2, 3], [-1, 0], "one entry a node"),
        ([], np.zeros(0, int), "tokens must be"),
        (np.zeros(0, int), np.zeros(0, int), "one entry a node"),
        ([1.0, 2.0], [-1, 0], "tokens must be a list of integers"),
        ([[1, 2]], [-1, 0], "tokens must be a list of integers"),
    ],
)
def test_from_parents_refuses_what_is_no_tree(tokens, parents, message):
    with pytest.raises(ValueError, match=message):
        DraftTree.from_parents(tokens, parents)


@pytest.mark.parametrize("name", ["log_prob", "rank"])
def test_from_parents_refuses_columns_of_another_length(name):
    with pytest.raises(ValueError, match="one entry a node"):
        DraftTree.from_parents([1, 2], [-1, 0], **{name: [0]})


def test_equal_tokens_under_different_parents_are_no_twins():
    assert len(DraftTree.from_parents([7, 7, 7], [-1, 0, 1])) == 3


# Reading a tree


@given(parent_lists(), st.integers(0, 2**16))
@example([-1], 0)
def test_ancestors_children_and_paths_say_the_same(parents, seed):
    tree = tree_of(parents, seed, vocab=30)
    ancestors = tree.ancestors()
    assert ancestors.dtype == bool and ancestors.shape == (len(tree), len(tree))
    for node in range(len(tree)):
        path = tree.path(node)
        assert path[0] == 0 and path[-1] == node and len(path) == 1 + tree.depth[node]
        assert all(below in tree.children(above) for above, below in itertools.pairwise(path))
        assert np.flatnonzero(ancestors[node]).tolist() == path
    assert sorted(itertools.chain(*map(tree.children, range(len(tree))))) == list(range(1, len(tree)))


@given(parent_lists(), st.integers(0, 30))
def test_a_truncated_tree_keeps_its_first_nodes_as_they_are(parents, budget):
    tree = tree_of(parents, 0, vocab=30)
    cut = tree.truncate(budget)
    assert cut.drafted == min(budget, tree.drafted)
    assert cut == DraftTree.from_parents(tree.tokens[: budget + 1], tree.parents[: budget + 1])


def test_another_root_token_changes_nothing_below():
    tree = DraftTree.best_first(np.zeros((2, 3)), 5)
    assert tree.with_root(8) == DraftTree.best_first(np.zeros((2, 3)), 5, root_token=8)


@pytest.mark.parametrize("node", [-1, 3])
def test_a_node_outside_the_tree_is_refused(node):
    tree = DraftTree.from_parents([1, 2, 3], [-1, 0, 0])
    for ask in (tree.children, tree.path):
        with pytest.raises(IndexError, match=f"no node {node}: .* 0 to 2"):
            ask(node)


def test_a_tree_cannot_be_changed_nor_follows_its_input():
    tokens = np.array([1, 2, 3])
    tree = DraftTree.from_parents(tokens, [-1, 0, 0])
    tokens[1] = 99
    assert tree.tokens.tolist() == [1, 2, 3]
    for built in (tree, DraftTree.best_first(np.zeros((2, 3)), 4), tree.truncate(1), tree.with_root(4)):
        for field in fields(built):
            with pytest.raises(ValueError, match="read-only"):
                getattr(built, field.name)[0] = 5
    with pytest.raises(FrozenInstanceError):
        tree.tokens = tokens


def test_equality_is_by_content_with_unknown_equal_to_unknown():
    tree = DraftTree.from_parents([1, 2, 3], [-1, 0, 0])
    assert tree == DraftTree.from_parents([1, 2, 3], [-1, 0, 0])
    assert tree != DraftTree.from_parents([1, 2, 3], [-1, 0, 1])
    assert tree != DraftTree.from_parents([1, 2, 4], [-1, 0, 0])
    assert tree != DraftTree.from_parents([1, 2, 3], [-1, 0, 0], log_prob=[0, -1, -2])
    assert tree != "tree"


def test_repr_is_one_short_line_at_any_size():
    text = repr(DraftTree.best_first(np.zeros((3, 300)), 500, root_token=17))
    assert text == "<DraftTree: 500 drafted, 2 deep, root token 17>"


# Drawing

LABELS = [
    *(
        "<think>",
        "</think>",
        "<|im_end|>",
        "<b>",
        "<> <>",
        "<",
        '"',
        "{a|b}",
        "&",
        "&lt;",
        "&#65;",
        "",
        "🙂",
        "\ufffd",
    ),
    *("\\", 'a"b\\', '\\"', "\\N", "\\n", "\\l", "\\\\", "node", "1.5", "a:b", "\u200f", "two words"),
]
CONTROLS = {"\n": "␊", "\t": "␉", "\0": "␀", "\x7f": "␡", "a\r\nb": "a␍␊b"}


def comb(labels: list[str]) -> DraftTree:
    return DraftTree.from_parents(range(len(labels)), [-1] + [0] * (len(labels) - 1))


def drawn_labels(source: str) -> list[str]:
    """What Graphviz would draw, by the rules of its language: quoting, escapes, entities."""
    labels = []
    for label in re.findall(r'^\t\d+ \[label=("(?:[^"\\]|\\.)*"|[^"<\]]+)\]$', source, re.MULTILINE | re.DOTALL):
        text = label[1:-1] if label.startswith('"') else label
        text = re.sub(r"\\(.)", lambda escape: {"\\": "\\", '"': '"'}[escape[1]], text, flags=re.DOTALL)
        labels.append(html.unescape(text))
    return labels


def test_labels_come_out_as_they_went_in():
    assert drawn_labels(comb(LABELS).to_graphviz(LABELS).source) == LABELS


def test_control_characters_are_drawn_as_pictures():
    labels = list(CONTROLS)
    assert drawn_labels(comb(labels).to_graphviz(labels).source) == list(CONTROLS.values())


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz's dot is not installed")
def test_graphviz_draws_the_labels_as_they_went_in():
    labels = [*LABELS, *CONTROLS]
    svg = ElementTree.fromstring(comb(labels).to_graphviz(labels).pipe("svg"))
    space = "{http://www.w3.org/2000/svg}"
    nodes = [group for group in svg.iter(f"{space}g") if group.get("class") == "node"]
    drawn = {group.findtext(f"{space}title"): group.findtext(f"{space}text", "") for group in nodes}
    expected = [*LABELS, *CONTROLS.values()]
    assert {node: text.replace("\xa0", " ") for node, text in drawn.items()} == {
        str(node): label for node, label in enumerate(expected)
    }


def test_the_graph_has_the_tree_s_edges_and_token_ids_by_default():
    source = DraftTree.from_parents([5, 6, 7], [-1, 0, 1]).to_graphviz().source
    assert drawn_labels(source) == ["5", "6", "7"]
    assert re.findall(r"(\d+) -> (\d+)", source) == [("0", "1"), ("1", "2")]


def test_missing_labels_are_refused():
    with pytest.raises(ValueError, match="1 labels for 2 nodes"):
        DraftTree.from_parents([5, 6], [-1, 0]).to_graphviz(["a"])


def test_a_missing_graphviz_package_is_named_with_its_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "graphviz", None)
    with pytest.raises(ImportError, match="pip install graphviz"):
        DraftTree.from_parents([5], [-1]).to_graphviz()


def test_trees_from_arrays_need_neither_torch_nor_graphviz():
    code = (
        "import sys; sys.modules.update(torch=None, transformers=None, graphviz=None)\n"
        "import numpy as np; from ddlab.tree import DraftTree\n"
        "assert DraftTree.best_first(np.zeros((3, 4)), 8).drafted == 8"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@given(st.integers(1, 40), st.sampled_from([0, 32, 64, 128, None]), st.integers(0, 2**16), st.sampled_from([1.0, 1e6]))
def test_the_largest_are_those_of_topk_whatever_the_blocks(n, width, seed, grid):
    """A coarse grid makes ties, also at the cut and across blocks; equals of the last may be any of them."""
    logits = (torch.randn(3, 6144, generator=torch.Generator().manual_seed(seed)) * grid).round() / grid
    logits[1, : 6144 - n] = -torch.inf
    expected = logits.topk(n).values
    for values, ids in (largest(logits, n, width), map(torch.from_numpy, _numpy_largest(logits.numpy(), n))):
        assert torch.equal(values, expected) and torch.equal(logits.gather(1, ids), expected)
        assert all(len(set(row)) == n for row in ids.tolist())


@pytest.mark.parametrize("budget", [1, 8, 40, 200])
def test_a_chain_of_one_candidate_a_depth_is_cut_by_the_budget(budget):
    logits = torch.randn(12, 30, generator=torch.Generator().manual_seed(0))
    tree = grow(*top_tokens(logits, 1), budget, root_token=4)
    n = min(12, budget)
    assert tree.tokens.tolist() == [4, *logits.argmax(-1)[:n].tolist()] and tree.parents.tolist() == [*range(-1, n)]
    assert tree.depth.tolist() == [*range(n + 1)] and tree.rank.tolist() == [-1, *[0] * n]
    log_probs = torch.log_softmax(logits.double(), -1).amax(-1)
    assert np.allclose(tree.log_prob[1:], log_probs.cumsum(0)[:n], atol=1e-6)
