"""A replay is what a decoder would have done, round by round; the oracle is the decoder itself."""

from __future__ import annotations

import itertools
import json
from functools import lru_cache
from typing import Any

import models
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlab.decode import Decoder, generate
from ddlab.pair import Pair, embedded_folder, load_pair
from ddlab.replay import BUILDERS, Candidates, DenseDrafts, Replay, dense_drafts, replay
from ddlab.top import top_tokens
from ddlab.trace import Trace
from ddlab.tree import DraftTree

BUDGETS = (0, 1, 8, 16, 64)


def rounds_of(trace: Trace) -> list[tuple[Any, ...]]:
    return [(s.start, s.accepted, s.emitted, s.stop_reason, s.tree.drafted) for s in trace.steps]


def assert_equal_up_to_ties(replayed: Replay, builder: str, real: Trace) -> None:
    """Round by round the same. Where a round is not, its trees swapped prefixes of one score to float32's last bits."""
    budget = real.settings["budget"] if builder == "best_first" else None
    mine, theirs = replayed.run(budget, builder), rounds_of(real)
    if mine != theirs:
        at = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)
        ours, tree = replayed.drafts.tree(theirs[at][0], budget, builder), real.steps[at].tree
        assert set(paths(ours)) != set(paths(tree)), f"equal trees, but {mine[at]} is not {theirs[at]}"
        np.testing.assert_allclose(np.sort(ours.log_prob), np.sort(tree.log_prob), rtol=0, atol=1e-4)


def check_against_decodes(pair: Pair, prompt: Any, replayed: Replay, **settings: Any) -> None:
    for budget in (*BUDGETS, None):
        assert_equal_up_to_ties(replayed, "best_first", generate(pair, prompt, budget=budget, **settings))
    assert_equal_up_to_ties(replayed, "chain", generate(pair, prompt, method="dflash", **settings))


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens[tree.path(node)[1:]].tolist()) for node in range(1, len(tree))]


# ---- the embedded pair -------------------------------------------------------------------------------------------


@lru_cache
def embedded() -> Pair:
    return load_pair()


@lru_cache
def embedded_prompts() -> tuple[str, ...]:
    lines = (embedded_folder("prompts") / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line)["prompt"] for line in lines)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("which", [0, 24])
def test_one_recording_gives_the_rounds_of_every_budget(which: int, temperature: float) -> None:
    pair, prompt = embedded(), embedded_prompts()[which]
    settings = dict(temperature=temperature, seed=3, max_new_tokens=48)
    decoded = {budget: generate(pair, prompt, budget=budget, **settings) for budget in BUDGETS}
    replayed = replay(pair, decoded[8], BUDGETS)
    for budget, real in decoded.items():
        assert replayed.run(budget) == rounds_of(real)
        assert replayed.tokens_per_round(budget) == real.tokens_per_round
    assert replayed.run(None, "chain") == rounds_of(generate(pair, prompt, method="dflash", **settings))


def test_it_does_not_matter_which_method_was_recorded() -> None:
    pair, prompt = embedded(), embedded_prompts()[8]
    recorded = [
        generate(pair, prompt, method=method, budget=budget, max_new_tokens=24)
        for method, budget in [("ar", None), ("dflash", None), ("ddtree", 5)]
    ]
    ar, dflash, ddtree = (replay(pair, trace, [64]) for trace in recorded)
    for budget in (4, 64):
        assert ar.run(budget) == dflash.run(budget) == ddtree.run(budget)
    assert dflash.run(None, "chain") == rounds_of(recorded[1])
    assert ddtree.run(5) == rounds_of(recorded[2])


def test_a_trace_from_a_folder_replays_like_the_one_in_memory(tmp_path: Any) -> None:
    pair = embedded()
    trace = generate(pair, embedded_prompts()[0], max_new_tokens=20)
    loaded = Trace.load(trace.save(tmp_path / "trace"))
    assert replay(pair, loaded, [16]).run(16) == replay(pair, trace, [16]).run(16)


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("builder", ["best_first", "chain"])
def test_a_depth_limit_is_a_decoder_whose_draft_is_cut(depth: int, builder: str) -> None:
    pair, prompt = embedded(), embedded_prompts()[8]
    method = "ddtree" if builder == "best_first" else "dflash"
    decoder = Decoder(pair, method=method, budget=16, max_new_tokens=32)
    decoder.register_hook("draft", lambda d, logits: logits[:depth])
    for _ in decoder.run(prompt):
        pass
    assert any(step.edited for step in decoder.trace.steps)  # edits of a draft leave the text the target's own
    budget = 16 if builder == "best_first" else None
    assert replay(pair, decoder.trace, [16], depth=depth).run(budget, builder) == rounds_of(decoder.trace)
    assert replay(pair, decoder.trace, [16]).run(budget, builder, depth=depth) == rounds_of(decoder.trace)


@pytest.mark.parametrize("name, options", [("fixed_width", {"width": 3}), ("cost_aware", {"cost": 0.05})])
def test_other_builders_are_a_decoder_whose_tree_hook_builds_that_tree(name: str, options: dict[str, Any]) -> None:
    pair, prompt = embedded(), embedded_prompts()[16]
    drafted: dict[str, torch.Tensor] = {}
    decoder = Decoder(pair, max_new_tokens=32)
    decoder.register_hook("draft", lambda d, logits: drafted.update(logits=logits))

    def build(decoder: Decoder, tree: DraftTree) -> DraftTree:
        whole = Candidates(*top_tokens(drafted["logits"], 8192), complete=True)
        return BUILDERS[name](whole, 24, int(tree.tokens[0]), **options)

    decoder.register_hook("tree", build)
    for _ in decoder.run(prompt):
        pass
    assert replay(pair, decoder.trace, [24]).run(24, name, **options) == rounds_of(decoder.trace)


# ---- tiny random pairs -------------------------------------------------------------------------------------------


@lru_cache
def tiny(kind: str, seed: int = 0, sliding: bool = False, block: int = 6) -> Pair:
    target = models.target(kind)
    kinds = ("sliding_attention", "full_attention") if sliding else None
    return Pair(target, models.random_drafter(target, seed=seed, layer_types=kinds, block=block))


PROMPTS = st.lists(st.integers(3, models.VOCAB - 5), min_size=1, max_size=14)


@pytest.mark.parametrize("kind", ["dense", "swa", "hybrid"])
@settings(max_examples=6)
@given(
    prompt=PROMPTS,
    drafter=st.integers(0, 3),
    sliding=st.booleans(),
    temperature=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 99),
    new=st.integers(0, 14),
    stops=st.booleans(),
)
def test_random_pairs_replay_exactly(
    kind: str, prompt: list[int], drafter: int, sliding: bool, temperature: float, seed: int, new: int, stops: bool
) -> None:
    pair = tiny(kind, drafter, sliding)
    settings: dict[str, Any] = dict(temperature=temperature, seed=seed, max_new_tokens=new)
    settings["stop_token_ids"] = tuple(range(0, models.VOCAB, 7)) if stops else ()
    recorded = generate(pair, prompt, method="ar", **settings)
    check_against_decodes(pair, prompt, replay(pair, recorded, BUDGETS), **settings)


def test_no_draft_reaches_beyond_the_targets_positions() -> None:
    pair = tiny("dense", block=8)
    prompt = np.random.default_rng(0).integers(3, 90, 500).tolist()  # of 512 positions
    settings = dict(max_new_tokens=12, stop_token_ids=())
    recorded = generate(pair, prompt, method="ar", **settings)
    check_against_decodes(pair, prompt, replay(pair, recorded, BUDGETS), **settings)


def test_a_processed_text_replays_without_its_processors() -> None:
    from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

    pair, prompt = tiny("dense"), [5, 6, 7]
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)])
    settings = dict(max_new_tokens=16, logits_processor=processors)
    recorded = generate(pair, prompt, method="ar", **settings)
    check_against_decodes(pair, prompt, replay(pair, recorded, BUDGETS), **settings)


def test_a_second_turn_is_replayed_as_its_own_text() -> None:
    decoder = Decoder(tiny("hybrid"), budget=16, max_new_tokens=8)
    for _ in decoder.run([5, 6, 7]):
        pass
    decoder.extend([8, 9], max_new_tokens=10)
    for _ in decoder.run():
        pass
    assert replay(decoder.pair, decoder.trace, [16]).run(16) == rounds_of(decoder.trace)


def test_an_unfinished_text_is_replayed_as_far_as_it_decides() -> None:
    pair, prompt = embedded(), embedded_prompts()[8]
    whole = replay(pair, generate(pair, prompt, max_new_tokens=40), [64])
    decoder = Decoder(pair, budget=8, max_new_tokens=40)
    decoder.start(prompt)
    for _ in range(4):
        decoder.step()
    part = replay(pair, decoder.trace, [64])
    assert part.run(8) == rounds_of(decoder.trace)
    for budget in (0, 1, 64):
        rounds, known = whole.run(budget), len(decoder.ids)
        decided = itertools.takewhile(lambda r, known=known: r.start + len(r.emitted) < known, rounds)
        assert part.run(budget) == list(decided)


# ---- builders ----------------------------------------------------------------------------------------------------


@st.composite
def drafts(draw: st.DrawFn) -> tuple[Candidates, np.ndarray]:
    """A draft over its whole vocabulary, with ties, and its log-probabilities [depth, vocab]."""
    depth, vocab = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    logits = rng.integers(-4, 5, (depth, vocab)) / 2.0
    return Candidates(*top_tokens(logits, vocab), complete=True), logits


def products(drafted: Candidates, width: int) -> list[tuple[float, int, tuple[int, ...]]]:
    """(minus score, length, path) of every prefix in the product of the `width` best tokens, best first."""
    rows = [list(zip(s[:width], i[:width], strict=True)) for i, s in zip(drafted.ids, drafted.log_probs, strict=True)]
    found = []
    for depth in range(1, len(rows) + 1):
        for path in itertools.product(*rows[:depth]):
            found.append((-sum(float(s) for s, _ in path), depth, tuple(int(t) for _, t in path)))
    return sorted(found)


@given(draft=drafts(), budget=st.integers(0, 40), width=st.integers(1, 5))
def test_fixed_width_is_the_best_of_the_product_by_enumeration(
    draft: tuple[Candidates, np.ndarray], budget: int, width: int
) -> None:
    tree = BUILDERS["fixed_width"](draft[0], budget, width=width)
    assert paths(tree) == [path for _, _, path in products(draft[0], width)][:budget]


@given(draft=drafts(), budget=st.integers(0, 40), cost=st.floats(0, 1))
def test_cost_aware_keeps_exactly_the_prefixes_that_pay(
    draft: tuple[Candidates, np.ndarray], budget: int, cost: float
) -> None:
    best = products(draft[0], 5)[:budget]
    paying = [path for minus_score, _, path in best if np.exp(-minus_score) >= cost]
    assert paths(BUILDERS["cost_aware"](draft[0], budget, cost=cost)) == paying


@given(draft=drafts(), budget=st.integers(0, 12))
def test_chain_and_best_first_are_the_decoders_trees(draft: tuple[Candidates, np.ndarray], budget: int) -> None:
    drafted, logits = draft
    assert BUILDERS["best_first"](drafted, budget, 7) == DraftTree.best_first(logits, budget, root_token=7)
    assert BUILDERS["chain"](drafted, budget, 7) == DraftTree.chain(logits, root_token=7).truncate(budget)


@given(seed=st.integers(0, 2**16), budget=st.integers(0, 12), width=st.integers(1, 14))
def test_the_best_candidates_of_a_larger_budget_build_the_trees_of_a_smaller_one(
    seed: int, budget: int, width: int
) -> None:
    logits = np.random.default_rng(seed).normal(size=(4, 40))
    kept, whole = (Candidates(*top_tokens(logits, k), complete=k == 40) for k in (12, 40))
    for builder, options in [("best_first", {}), ("fixed_width", {"width": width}), ("cost_aware", {"cost": 0.01})]:
        assert BUILDERS[builder](kept, budget, **options) == BUILDERS[builder](whole, budget, **options)


# ---- the table, and drafts as data -------------------------------------------------------------------------------


@lru_cache
def tiny_replay() -> Replay:
    pair = tiny("dense")
    return replay(pair, generate(pair, [5, 6, 7], method="ar", max_new_tokens=12), [4, 8], ["best_first", "chain"])


def test_the_table_has_a_row_for_each_builder_and_budget_with_its_counts() -> None:
    table = tiny_replay().to_frame()
    assert list(zip(table.builder, table.budget, strict=True)) == [
        ("best_first", 4),
        ("best_first", 8),
        ("chain", 4),
        ("chain", 8),
    ]
    assert (table.new_tokens == 11).all()
    assert (table.new_tokens == table.rounds * table.tokens_per_round).all()
    assert (table.mismatch + table.exhausted + table.stop_token + table.length == table.rounds).all()


def test_a_replay_needs_only_the_dense_drafts() -> None:
    known = tiny_replay()
    drafts = DenseDrafts(**vars(known.drafts))
    assert Replay(drafts).run(8) == known.run(8)


def test_no_rounds_have_no_mean() -> None:
    pair = tiny("dense")
    for new in (0, 1):
        replayed = replay(pair, generate(pair, [5], max_new_tokens=new))
        assert replayed.run(8) == []
        assert replayed.tokens_per_round(8).value is None
        assert replayed.rows()[0]["rounds"] == 0


# ---- what is refused ---------------------------------------------------------------------------------------------


def test_a_text_whose_logits_a_hook_replaced_is_refused() -> None:
    decoder = Decoder(tiny("dense"), max_new_tokens=8)
    decoder.register_hook("verify", lambda d, logits: logits.roll(1, -1))
    for _ in decoder.run([5, 6, 7]):
        pass
    with pytest.raises(ValueError, match="not the target's own"):
        replay(decoder.pair, decoder.trace)


def test_a_flattened_run_is_refused() -> None:
    trace = generate(tiny("hybrid"), [5, 6, 7], linear_state="flattened", max_new_tokens=4)
    with pytest.raises(ValueError, match="flattened"):
        replay(tiny("hybrid"), trace)


def test_a_pair_without_drafter_is_refused() -> None:
    pair = Pair(models.target("dense"))
    with pytest.raises(ValueError, match="no drafter"):
        replay(pair, generate(pair, [5, 6, 7], method="ar", max_new_tokens=4))


def test_a_trace_recorded_without_a_drafter_is_enough() -> None:
    pair = tiny("dense")
    alone = generate(Pair(pair.target), [5, 6, 7], method="ar", max_new_tokens=8)
    assert replay(pair, alone).run(8) == rounds_of(generate(pair, [5, 6, 7], budget=8, max_new_tokens=8))


def test_another_kind_of_target_is_refused_by_its_header() -> None:
    trace = generate(tiny("dense"), [5, 6, 7], max_new_tokens=4)
    with pytest.raises(ValueError, match="layer_types"):
        replay(tiny("swa"), trace)
    half = models.target("dense", torch.bfloat16)
    with pytest.raises(ValueError, match="dtype"):
        replay(Pair(half, models.random_drafter(half)), trace)


def test_other_weights_of_the_same_shape_are_refused_by_the_text() -> None:
    trace = generate(tiny("dense"), [5, 6, 7], max_new_tokens=8)
    other = models.fresh_target("dense")
    with torch.no_grad():
        other.lm_head.weight.copy_(other.lm_head.weight.roll(1, 0))
    with pytest.raises(ValueError, match="at position 3"):
        replay(Pair(other, models.random_drafter(other, block=6)), trace)


def test_another_drafter_is_replayed_with_a_warning() -> None:
    trace = generate(tiny("dense"), [5, 6, 7], budget=8, max_new_tokens=8)
    other = tiny("dense", block=4)
    with pytest.warns(UserWarning, match="another drafter"):
        replayed = replay(other, trace)
    assert replayed.run(8) == rounds_of(generate(other, [5, 6, 7], budget=8, max_new_tokens=8))


def test_more_candidates_than_were_kept_are_refused() -> None:
    replayed = tiny_replay()
    with pytest.raises(ValueError, match=r"8 best tokens of each depth were kept.*budgets=\[9\]"):
        replayed.run(9)
    assert replayed.run(60, "fixed_width", width=8)  # needs no more than its width


def test_wrong_names_and_values_name_the_cure() -> None:
    replayed, pair = tiny_replay(), tiny("dense")
    with pytest.raises(ValueError, match="did you mean 'best_first'"):
        replayed.run(8, "best-first")
    with pytest.raises(ValueError, match="did you mean 'width'"):
        replayed.run(8, "fixed_width", widht=3)
    with pytest.raises(ValueError, match="has no option 'cost'"):
        replayed.run(8, cost=0.1)
    for call in (dict(budget=-1), dict(budget=8, depth=-1), dict(budget=8, builder="fixed_width", width=0)):
        with pytest.raises(ValueError, match="or more"):
            replayed.run(**call)
    with pytest.raises(ValueError, match="at least one budget"):
        replay(pair, generate(pair, [5], max_new_tokens=2), [])
    with pytest.raises(IndexError, match="rounds start at 3 to 13"):
        dense_drafts(pair, generate(pair, [5, 6, 7], method="ar", max_new_tokens=12)).tree(14, 8)
