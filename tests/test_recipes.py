"""The training recipes, held to the package: what a drafter is trained on is what it meets when it decodes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from models import VOCAB, random_drafter, target

from ddlab.pair import Pair, load_pair

RECIPES = Path(__file__).resolve().parent.parent / "data" / "recipes"
sys.path.insert(0, str(RECIPES))

import batches as recipe_batches  # noqa: E402
import blocks  # noqa: E402
import configs  # noqa: E402
import corpus as recipe_corpus  # noqa: E402
import evaluate  # noqa: E402
import losses  # noqa: E402
import train_drafter  # noqa: E402

from ddlab.drafter import Drafter  # noqa: E402

PROMPTS = RECIPES.parent / "prompts" / "prompts.jsonl"


def small_pair(kind: str = "hybrid", **settings: object) -> Pair:
    model = target(kind)
    return Pair(model, random_drafter(model, **settings))


def random_corpus(sequences: int = 12) -> recipe_corpus.Corpus:
    draw = np.random.default_rng(0)
    lengths = draw.integers(12, 60, sequences)
    tokens = draw.integers(4, VOCAB, lengths.sum()).astype(np.uint16)
    temp = np.where(np.arange(sequences) % 3, 0.0, 0.7).astype(np.float16)
    return recipe_corpus.Corpus(tokens, lengths, np.full(sequences, 5), temp, np.zeros(sequences, np.uint8))


# -- blocks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts_from", ["mask", "anchor"])
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_block_of_a_training_batch_is_the_block_that_decoding_proposes(kind: str, drafts_from: str) -> None:
    pair = small_pair(kind, layer_types=("sliding_attention", "full_attention"))
    drafter = pair.drafter
    assert drafter is not None
    drafter.settings = replace(drafter.settings, drafts_from=drafts_from)
    ids = torch.randint(4, VOCAB, (3, 40), generator=torch.Generator().manual_seed(1))
    anchors = torch.tensor([[3, 17, 30], [9, 10, 33], [1, 20, 21]])
    with torch.no_grad():
        features, _ = blocks.target_pass(pair, ids, drafter.settings.target_layer_ids)
        hidden = blocks.block_hidden(drafter, features, ids, anchors, pair.embed, torch.float32)
    for row in range(len(ids)):
        with torch.inference_mode(), pair.tap() as tap:
            pair.target(input_ids=ids[row : row + 1], use_cache=False)
            committed = tap.features()
        for column, anchor in enumerate(anchors[row].tolist()):
            cache = drafter.new_cache()
            drafter.ingest(cache, committed[:anchor])
            proposed = pair.propose(cache, int(ids[row, anchor]))
            torch.testing.assert_close(pair.head(hidden[row, column]), proposed, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_kept_passes_are_those_of_the_texts(kind: str) -> None:
    pair = small_pair(kind)
    assert pair.drafter is not None
    taps = pair.drafter.settings.target_layer_ids
    drawn = recipe_batches.Batches(random_corpus(), [1, 2], torch.device("cpu"), 0, 3, 256)
    kept = blocks.KeptPasses(pair, drawn, taps, tokens=3 * drawn.longest)
    assert blocks.KeptPasses.size(pair, drawn, taps) == kept.features.nbytes + kept.last.nbytes
    for width in (drawn.longest, 20):
        batch = drawn.make(np.array([4, 0, 11]), width, np.random.default_rng(0))
        inside = torch.arange(width) < batch.length[:, None]
        with torch.no_grad():
            passed = blocks.target_pass(pair, batch.ids, taps)
        for found, expected in zip(kept(batch.rows, width), passed, strict=True):
            assert torch.isfinite(found).all()
            torch.testing.assert_close(found[inside], expected[inside], rtol=1e-4, atol=1e-4)


def test_block_masks_are_the_drafters_own_for_every_block() -> None:
    pair = small_pair("dense", layer_types=("sliding_attention", "full_attention"))
    drafter = pair.drafter
    assert drafter is not None
    size, context, anchors = drafter.block_size, 40, torch.tensor([[0, 7, 31]])
    masks = blocks.block_masks(drafter, anchors, context)
    for i, anchor in enumerate(anchors[0].tolist()):
        rows = slice(i * size, (i + 1) * size)
        for kind, expected in drafter.masks(anchor).items():
            mask = masks[kind][0, rows]
            assert torch.equal(mask[:, :anchor], expected[:, :anchor])
            assert torch.equal(mask[:, context:][:, rows], expected[:, anchor:])
            assert int(mask.sum()) == int(expected.sum())  # nothing else is visible


# -- loss ------------------------------------------------------------------------------------------------------


def test_the_losss_own_gradient_is_autograds() -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, teacher = (torch.randn(7, 4, 16, generator=draw, dtype=torch.float64) for _ in range(2))
    head = torch.randn(31, 16, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, 31, (7, 4), generator=draw)
    valid = torch.rand(7, 4, generator=draw) < 0.8
    ours = hidden.clone().requires_grad_()
    loss, _, _ = losses.Distill.apply(ours, teacher, head, labels, valid, 0.3, 8, False)
    loss.backward()

    free = hidden.clone().requires_grad_()
    log_q = torch.log_softmax((free @ head.T).float(), -1)
    hard = -log_q.gather(-1, labels[..., None])[..., 0]
    soft = -(torch.softmax((teacher @ head.T).float(), -1) * log_q).sum(-1)
    weight = losses.slot_weights(-hard.detach(), valid) / len(hidden)
    expected = (weight * (0.3 * soft + 0.7 * hard)).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected.to(loss.dtype), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.grad, free.grad, rtol=1e-4, atol=1e-6)


def test_slot_weights_sum_to_one_a_block_and_leave_padding_out() -> None:
    log_p = -torch.rand(5, 6, generator=torch.Generator().manual_seed(0)) * 3
    valid = torch.arange(6)[None] < torch.tensor([6, 4, 1, 5, 2])[:, None]
    weight = losses.slot_weights(log_p, valid)
    torch.testing.assert_close(weight.sum(1), torch.ones(5))
    assert not weight[~valid].any()


def test_a_block_likely_to_be_accepted_puts_more_weight_on_its_late_slots() -> None:
    log_p = torch.tensor([[-0.01] * 6, [-3.0] * 6])
    sure, unsure = losses.slot_weights(log_p, torch.ones(2, 6, dtype=torch.bool))
    assert sure[-1] > 2 * unsure[-1]
    assert unsure[0] > sure[0]


# -- batches ---------------------------------------------------------------------------------------------------


def test_a_step_draws_the_same_batch_whenever_it_is_asked() -> None:
    make = lambda: recipe_batches.Batches(random_corpus(), [1, 2], torch.device("cpu"), 0, 3, 256)  # noqa: E731
    one, two = make(), make()
    one.draw(3)
    a, b = one.draw(7), two.draw(7)
    assert torch.equal(a.ids, b.ids)
    assert torch.equal(a.anchors, b.anchors)


def test_anchors_lie_in_the_answer_with_a_token_after_them() -> None:
    corpus = random_corpus()
    drawn = recipe_batches.Batches(corpus, [1, 2], torch.device("cpu"), 0, 50, 256)
    for step in range(12):
        batch = drawn.draw(step)
        assert (batch.anchors >= 2 + 5).all()
        assert (batch.anchors + 1 < batch.length[:, None]).all()
        assert (batch.ids[:, :2] == torch.tensor([1, 2])).all()


def test_held_out_sequences_are_greedy_and_never_drawn() -> None:
    corpus = random_corpus()
    drawn = recipe_batches.Batches(corpus, [], torch.device("cpu"), 0, 2, 256)
    assert len(drawn.held_out)
    assert (corpus.temp[drawn.held_out] == 0).all()
    assert not set(drawn.held_out) & set(drawn.rows)


# -- training --------------------------------------------------------------------------------------------------


def test_a_drafter_that_was_stopped_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, ticking: Callable[[ModuleType], AbstractContextManager[None]]
) -> None:
    target_folder = RECIPES.parent / "tiny-hybrid" / "target"
    pair = load_pair(target_folder)
    asked = [list(pair.encode(f"Say {n}.").ids) for n in range(12)]
    draw = np.random.default_rng(0)
    texts = [np.array([*ids, *draw.integers(4, 8192, 30)], np.uint16) for ids in asked]
    sizes, plen = np.array([len(t) for t in texts]), np.array([len(ids) for ids in asked])
    corpus = recipe_corpus.Corpus(np.concatenate(texts), sizes, plen, np.zeros(12), np.zeros(12))
    corpus.save(tmp_path / "corpus.npz")

    def train(out: str, *more: str) -> dict:
        arguments = ["--pair", "tiny-hybrid", "--target", str(target_folder), "--corpus", str(tmp_path / "corpus.npz")]
        shape = ["--steps", "4", "--tokens", "128", "--anchors", "2", "--every", "1", "--validate", "2"]
        train_drafter.main([*arguments, *shape, "--out", str(tmp_path / out), *more])
        return json.loads((tmp_path / out / "curve.json").read_text())

    whole = train("whole")
    with ticking(train_drafter):
        assert 0 < train("stopped", "--seconds", "4")["step"] < 4
    assert train("stopped")["step"] == 4
    one, two = (torch.load(tmp_path / name / "state.pt", weights_only=True)["model"] for name in ("whole", "stopped"))
    assert all(torch.equal(weight, two[name]) for name, weight in one.items())
    assert [at for at, _ in whole["validation"]] == [2, 4]
    assert whole["points"][-1][2] < whole["points"][0][2]
    assert load_pair(target_folder, tmp_path / "whole").drafter.block_size == 16


# -- corpus and prompts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "question",
    [
        "What is 12 + 7?",
        "what is 37+58",
        "Solve for x: 9x + 1 = 100.",
        "Write a story about a dragon who is afraid of fire.",
    ],
)
def test_the_same_question_with_other_numbers_or_a_few_other_words_is_a_near_duplicate(question: str) -> None:
    prompts = [
        "What is 37 + 58?",
        "Solve for x: 3x + 12 = 45.",
        "Tell me a story about a dragon who is afraid of fire.",
    ]
    assert recipe_corpus.NearDuplicates(prompts).find(question) is not None


@pytest.mark.parametrize(
    "question", ["What is 37 - 58?", "Write a story about a fire.", "What is the capital of Peru?"]
)
def test_another_question_is_not_a_near_duplicate(question: str) -> None:
    prompts = ["What is 37 + 58?", "Tell me a story about a dragon who is afraid of fire."]
    assert recipe_corpus.NearDuplicates(prompts).find(question) is None


def test_the_prompts_are_at_least_sixty_in_six_kinds_and_differ() -> None:
    prompts = recipe_corpus.read_prompts(PROMPTS)
    counts = {kind: sum(p["kind"] == kind for p in prompts) for kind in recipe_corpus.KINDS[1:]}
    assert len(prompts) >= 60
    assert min(counts.values()) >= 10
    assert len({p["id"] for p in prompts}) == len({p["prompt"] for p in prompts}) == len(prompts)
    relativity = "Explain the theory of general relativity in detail. Include the mathematical framework."
    assert relativity in {p["prompt"] for p in prompts}


def test_a_selection_of_a_corpus_keeps_the_sequences() -> None:
    corpus = random_corpus()
    chosen = corpus.select(np.array([4, 1]))
    assert chosen.sequence(0).tolist() == corpus.sequence(4).tolist()
    assert chosen.sequence(1).tolist() == corpus.sequence(1).tolist()


# -- evaluation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_the_walk_along_the_greedy_text_is_what_the_decoder_does(kind: str) -> None:
    pair = small_pair(kind)
    ids = [5, 9, 11, 40, 7]
    text = evaluate.Text({"id": "x"}, ids, evaluate.greedy(pair, [ids], 30)[0])
    walker = evaluate.Walker(pair, text, 12)
    methods = {"chain": None, "tree 5": 5, "tree 12": 12}
    for name, budget in methods.items():
        text.accepted[name], text.emitted[name] = walker.walk(len(ids), 24, budget)
        assert text.emitted[name] >= 23
    evaluate.check_decoder(pair, text, methods, 24)  # exits where they differ


@pytest.mark.parametrize("name", ["smollm2", "tiny-hybrid"])
def test_fresh_weights_load_and_go_back_to_the_names_of_the_format(name: str) -> None:
    config = configs.pair_config(name)
    state = configs.fresh_state(config, 0)
    drafter = Drafter.from_state(config, state)
    assert drafter.depth == 15
    assert configs.zlab_state(drafter.model.state_dict()).keys() == state.keys()
