"""The decoder: phases, hooks, undoing, turns, ends of a text, and what bad input leaves untouched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import models
import numpy as np
import pytest
import torch
from strategies import scripted
from test_exact import pair_of, plain_text
from torch import nn
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from ddlab.audit import audit
from ddlab.decode import Decoder, generate
from ddlab.pair import Pair
from ddlab.sampling import Sampling, Walk
from ddlab.trace import Trace
from ddlab.tree import DraftTree

PROMPT = [5, 17, 40, 3]
KINDS = ["dense", "swa", "hybrid"]


def decoder_on(
    kind: str, drafts: str = "mixed", *, depth: int = 5, text: list[int] | None = None, **kw: Any
) -> Decoder:
    """A decoder with a scripted drafter that knows the target's text."""
    pair = pair_of(kind)
    kw = {"method": "ddtree", "budget": 12, "max_new_tokens": 20, "stop_token_ids": (), **kw}
    decoder = Decoder(pair, **kw)
    if text is None:
        text = plain_text(pair, PROMPT, 60, Sampling(kw.get("temperature", 0.0), kw.get("seed", 0)))
    if decoder.method != "ar":
        decoder.register_hook("draft", scripted(text, depth, models.VOCAB, drafts, seed=1))
    return decoder


def state_of(decoder: Decoder) -> tuple[Any, ...]:
    """Everything committed, as comparable values."""
    target = decoder._text.target
    tensors = [t for pair in target.cache.committed.linear if pair is not None for t in pair]
    for layer in target.cache.layers:
        if getattr(layer, "keys", None) is not None:
            tensors += [layer.keys[:, :, : target.length], layer.values[:, :, : target.length]]
    return decoder.ids, decoder.finished, target.length, decoder.trace.rounds, [t.clone() for t in tensors]


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return a[:-1] == b[:-1] and all(torch.equal(x, y) for x, y in zip(a[-1], b[-1], strict=True))


def hook_counts(module: nn.Module) -> dict[str, int]:
    return {
        n: len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for n, m in module.named_modules()
    }


# ---- how long a text is --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("new", [0, 1, 2, 7, 8, 9, 17])
def test_exactly_max_new_tokens_and_a_cache_one_token_behind(kind: str, new: int) -> None:
    text = plain_text(pair_of(kind), PROMPT, 40, Sampling())
    decoder = decoder_on(kind, "oracle", text=text, max_new_tokens=new)
    steps = list(decoder.run(PROMPT))
    assert decoder.output_ids == text[len(PROMPT) : len(PROMPT) + new]
    assert decoder.finished == "length"
    assert len(decoder.output_ids) == min(new, 1) + sum(len(s.emitted) for s in steps)
    assert decoder._text.target.length == len(decoder.ids) - min(new, 1)
    decoder.extend(max_new_tokens=5)
    list(decoder.run())
    assert decoder.ids == text[: len(PROMPT) + new + 5]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafts", ["oracle", "adversarial", "mixed"])
def test_a_stop_token_ends_the_text_wherever_it_falls_in_a_block(kind: str, drafts: str) -> None:
    pair = pair_of(kind)
    text = plain_text(pair, PROMPT, 60, Sampling())
    for at in range(len(PROMPT), len(PROMPT) + 9):
        stop = text[at]
        if stop in text[len(PROMPT) : at]:
            continue
        decoder = decoder_on(kind, drafts, text=text, stop_token_ids=[stop])
        list(decoder.run(PROMPT))
        assert decoder.ids == text[: at + 1]
        assert decoder.finished == "stop_token" == decoder.trace.finished
        decoder.extend([8, 9, 10, 11], max_new_tokens=8)  # the next turn starts from what the user saw
        list(decoder.run())
        expected = plain_text(pair, [*text[: at + 1], 8, 9, 10, 11], 8, Sampling())
        end = expected.index(stop, at + 5) + 1 if stop in expected[at + 5 :] else len(expected)
        assert decoder.ids == expected[:end]


@pytest.mark.parametrize("kind", ["dense", "hybrid", "vlm", "swa"])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
def test_prompts_shorter_than_the_conv_kernel_with_drafts_that_are_always_wrong(kind: str, length: int) -> None:
    pair = pair_of(kind)
    prompt = [7, 7, 1, 30, 2, 8, 50, 3, 3][:length]
    text = plain_text(pair, prompt, 20, Sampling())
    decoder = Decoder(pair, "ddtree", budget=8, max_new_tokens=11, stop_token_ids=())
    decoder.register_hook("draft", scripted(text, 4, models.VOCAB, "adversarial"))
    steps = list(decoder.run(prompt))
    assert len(steps) == 10 and decoder.ids == text[: length + 11]
    for state in decoder._text.target.cache.committed.linear:
        assert state is None or state[0].shape[-1] == 4


def test_a_prompt_that_is_only_a_stop_token_decodes() -> None:
    decoder = decoder_on("dense", stop_token_ids=[3])
    assert list(decoder.run([3])) and decoder.output_ids


def test_tokens_per_round_and_accepted_drafts_are_two_numbers() -> None:
    oracle = list(decoder_on("dense", "oracle", depth=4, method="dflash", max_new_tokens=21).run(PROMPT))
    assert {(s.accepted, len(s.emitted)) for s in oracle} == {(4, 5)}
    wrong = list(decoder_on("dense", "adversarial", depth=4, method="dflash").run(PROMPT))
    assert {(s.accepted, len(s.emitted)) for s in wrong} == {(0, 1)}


# ---- a second prompt, a second turn --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hybrid", "vlm"])
def test_a_second_prompt_finds_nothing_of_the_first(kind: str) -> None:
    pair = pair_of(kind)
    used, fresh = decoder_on(kind), decoder_on(kind)
    list(used.run([1, 2, 3, 4, 5, 6, 7]))
    if kind == "vlm":
        pair.target.model.rope_deltas = torch.tensor([[1000]])
    a, b = list(used.run([9, 8, 7, 6, 5])), list(fresh.run([9, 8, 7, 6, 5]))
    if kind == "vlm":
        pair.target.model.rope_deltas = None
    assert [s.emitted for s in a] == [s.emitted for s in b]
    assert all(np.array_equal(x.margin, y.margin) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_second_turn_drafts_as_if_the_whole_text_were_one_prompt(kind: str) -> None:
    target = models.target(kind)
    pair = Pair(target, models.random_drafter(target, block=5))
    decoder = Decoder(pair, "ddtree", budget=6, max_new_tokens=12, stop_token_ids=())
    list(decoder.run([5, 6, 7, 8] * 3))
    decoder.extend([1, 2, 3, 4, 5, 6], max_new_tokens=6)
    fresh = Decoder(pair, "ddtree", budget=6, max_new_tokens=6, stop_token_ids=())
    fresh.start(decoder.ids[:-1])
    assert fresh.output_ids == decoder.output_ids
    assert torch.allclose(decoder.draft(), fresh.draft(), atol=1e-5)


def test_prefill_is_the_same_for_every_method() -> None:
    target = models.target("hybrid")
    pair = Pair(target, models.random_drafter(target, block=5))
    states = []
    for method in ("ar", "dflash", "ddtree"):
        decoder = Decoder(pair, method, stop_token_ids=())
        decoder.start(PROMPT)
        states.append(state_of(decoder))
    assert same(states[0], states[1]) and same(states[1], states[2])


# ---- going back, forking -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_back_undoes_rounds_bit_for_bit_also_across_the_end_of_the_text(kind: str) -> None:
    target = models.target(kind)
    pair = Pair(target, models.random_drafter(target, block=5))
    decoder = Decoder(pair, "ddtree", budget=10, max_new_tokens=14, stop_token_ids=())
    decoder.start(PROMPT)
    states, steps = [state_of(decoder)], []
    while not decoder.finished:
        steps.append(decoder.step())
        states.append(state_of(decoder))
    for rounds in range(len(steps) - 1, -1, -1):
        decoder.back()
        assert same(state_of(decoder), states[rounds])
    again = list(decoder.run())
    for a, b in zip(steps, again, strict=True):
        assert a.tree == b.tree and a.path == b.path and np.array_equal(a.margin, b.margin)
        assert np.array_equal(a.draft_log_probs, b.draft_log_probs)
    assert same(state_of(decoder), states[-1])


def test_back_drops_a_round_under_way_first_and_says_when_nothing_is_left() -> None:
    decoder = decoder_on("hybrid")
    decoder.start(PROMPT)
    before = state_of(decoder)
    decoder.draft()
    decoder.build()
    decoder.back()
    assert same(state_of(decoder), before)
    with pytest.raises(ValueError, match="nothing to undo"):
        decoder.back()


@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_is_independent(kind: str) -> None:
    decoder = decoder_on(kind)
    decoder.start(PROMPT)
    decoder.step()
    fork = decoder.fork()
    before = state_of(decoder)
    list(fork.run())
    assert same(state_of(decoder), before)
    fork.back()
    list(decoder.run())
    assert [s.emitted for s in decoder.trace.steps][: fork.trace.rounds] == [s.emitted for s in fork.trace.steps]


def test_a_fork_may_take_another_budget_and_says_so() -> None:
    decoder = decoder_on("dense", budget=12)
    decoder.start(PROMPT)
    decoder.step()
    fork = decoder.fork(budget=2)
    assert len(fork.step().tree) == 3 and len(decoder.step().tree) == 13
    assert fork.trace.settings["budget"] == 2 and decoder.trace.settings["budget"] == 12
    assert fork.trace.settings["budget_before_fork"] == {"budget": 12, "rounds": 1}
    with pytest.raises(AttributeError, match=r"fork\(budget"):
        decoder.budget = 3
    with pytest.raises(ValueError, match="budget must be >= 0"):
        decoder.fork(budget=-2)


# ---- hooks ---------------------------------------------------------------------------------------------------------


def test_hooks_see_each_phase_in_order_and_leave_with_their_handle() -> None:
    decoder = decoder_on("dense")
    seen: list[str] = []
    handles = [
        decoder.register_hook(phase, lambda d, v, phase=phase: seen.append(f"{phase}:{type(v).__name__}"))
        for phase in ("draft", "tree", "verify", "accept", "commit")
    ]
    decoder.start(PROMPT)
    step = decoder.step()
    assert seen == ["draft:Tensor", "tree:DraftTree", "verify:Tensor", "accept:Walk", "commit:Step"]
    assert step.edited == ("draft",)  # the scripted drafter; looking is no edit
    for handle in handles:
        handle.remove()
    decoder.step()
    assert len(seen) == 5
    with decoder.register_hook("commit", lambda d, v: seen.append("once")):
        decoder.step()
    decoder.step()
    assert seen[5:] == ["once"]


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_edits_of_draft_tree_and_walk_change_the_rounds_and_never_the_text(kind: str) -> None:
    text = plain_text(pair_of(kind), PROMPT, 60, Sampling())
    plain = list(decoder_on(kind, "oracle").run(PROMPT))

    def injected(decoder: Decoder, tree: DraftTree) -> DraftTree:
        return DraftTree.from_parents([int(tree.tokens[0]), 11, 12, text[len(decoder.ids)]], [-1, 0, 1, 0])

    def first_only(decoder: Decoder, taken: Walk) -> Walk | None:
        return Walk(taken.path[:2], None, "") if len(taken.path) > 2 else None

    for phase, hook in (("tree", injected), ("accept", first_only), ("tree", lambda d, t: t.truncate(1))):
        decoder = decoder_on(kind, "oracle")
        decoder.register_hook(phase, hook)
        steps = list(decoder.run(PROMPT))
        assert decoder.ids == text[: len(PROMPT) + 20]
        assert len(steps) > len(plain) and phase in steps[0].edited
        assert decoder.trace.warnings
        assert phase != "accept" or steps[0].stop_reason == "edited"
    assert audit(pair_of(kind), decoder.trace).ok


def test_a_verify_edit_changes_the_text_and_the_trace_says_so() -> None:
    decoder = decoder_on("dense")

    def ban(decoder: Decoder, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(
            1, torch.tensor([decoder.trace.steps[0].emitted[0] if decoder.trace.steps else 0]), -1e9
        )

    decoder.register_hook("verify", ban)
    list(decoder.run(PROMPT))
    assert all("verify" in step.edited for step in decoder.trace.steps)
    assert "replaced the target's logits" in audit(pair_of("dense"), decoder.trace).to_text()


@pytest.mark.parametrize(
    ("phase", "bad", "message"),
    [
        ("draft", lambda d, v: torch.zeros(3, 5), "float logits"),
        ("draft", lambda d, v: torch.full((3, models.VOCAB), torch.nan), "NaN|nan"),
        ("tree", lambda d, v: "tree", "DraftTree"),
        ("tree", lambda d, v: DraftTree.from_parents([1, 2], [-1, 0]).with_root(96), "last committed token"),
        (
            "tree",
            lambda d, v: DraftTree.from_parents([int(v.tokens[0]), 500], [-1, 0]),
            "outside the target's",
        ),
        ("verify", lambda d, v: v[:-1], "float logits"),
        ("accept", lambda d, v: Walk((0, 99), 1, "mismatch"), "stop earlier"),
        ("accept", lambda d, v: Walk((0,), (v.bonus or 0) + 1, "mismatch"), "target's own choice"),
    ],
)
def test_an_edit_that_cannot_be_is_refused_and_leaves_the_decoder_as_it_was(phase: str, bad: Any, message: str) -> None:
    decoder = decoder_on("hybrid", "adversarial")
    decoder.start(PROMPT)
    decoder.step()
    before = state_of(decoder)
    with decoder.register_hook(phase, bad), pytest.raises(ValueError, match=message):
        decoder.step()
    assert same(state_of(decoder), before)
    list(decoder.run())
    assert decoder.ids == plain_text(pair_of("hybrid"), PROMPT, 20, Sampling())


# ---- when something goes wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["draft", "tree", "verify", "accept", "commit"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_exception_in_any_phase_leaves_the_last_committed_round(phase: str, error: type[BaseException]) -> None:
    target = models.target("hybrid")
    pair = Pair(target, models.random_drafter(target, block=5))
    decoder, undisturbed = (Decoder(pair, "ddtree", budget=10, max_new_tokens=16, stop_token_ids=()) for _ in range(2))
    expected = list(undisturbed.run(PROMPT))
    decoder.start(PROMPT)
    decoder.step()
    before, hooks = state_of(decoder), hook_counts(target)

    def fail(decoder: Decoder, value: Any) -> None:
        raise error

    with decoder.register_hook(phase, fail), pytest.raises(error):
        decoder.step()
    if phase == "commit":  # the round was committed when its hook was called
        assert decoder.trace.rounds == 2
    else:
        assert same(state_of(decoder), before)
    assert hook_counts(target) == hooks
    list(decoder.run())
    assert [s.emitted for s in decoder.trace.steps] == [s.emitted for s in expected]


@pytest.mark.parametrize("layer", [0, 3])
def test_an_exception_inside_the_target_frees_captures_and_keeps_foreign_hooks(layer: int) -> None:
    target = models.target("hybrid")
    pair = Pair(target, models.random_drafter(target, block=5))
    decoder = Decoder(pair, "ddtree", budget=6, max_new_tokens=12, stop_token_ids=())
    decoder.start(PROMPT)
    calls: list[int] = []
    foreign = target.model.layers[1].register_forward_hook(lambda m, a, o: calls.append(1))
    hooks, before = hook_counts(target), state_of(decoder)

    def interrupt(module: nn.Module, args: Any, output: Any) -> None:
        raise KeyboardInterrupt

    broken = target.model.layers[layer].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), decoder.capture("layers.*") as seen:
        decoder.step()
    broken.remove()
    assert not seen and hook_counts(target) == hooks and same(state_of(decoder), before)
    calls.clear()
    decoder.step()
    assert calls == [1]  # still there, once per forward
    foreign.remove()


def test_a_failed_start_keeps_the_text_before() -> None:
    decoder = decoder_on("dense")
    list(decoder.run(PROMPT))
    before = state_of(decoder)
    for bad in ([], [models.VOCAB], [1] * 600):
        with pytest.raises(ValueError):
            decoder.start(bad)
    assert same(state_of(decoder), before)


def test_a_failed_second_turn_keeps_the_first() -> None:
    decoder = decoder_on("hybrid")
    list(decoder.run(PROMPT))
    before = state_of(decoder)
    broken = pair_of("hybrid").target.model.norm.register_forward_hook(lambda m, a, o: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decoder.extend([1, 2, 3])
    broken.remove()
    assert same(state_of(decoder), before)


# ---- looking inside ------------------------------------------------------------------------------------------------


def test_capture_gives_what_the_named_modules_put_out() -> None:
    decoder = decoder_on("hybrid")
    decoder.start(PROMPT)
    with decoder.capture("layers.*.self_attn", "layers.1.linear_attn", "norm") as seen:
        step = decoder.step()
    assert list(seen) == ["layers.1.linear_attn", "layers.3.self_attn", "norm"]
    assert all(len(outputs) == 1 and outputs[0].shape == (1, len(step.tree), 64) for outputs in seen.values())
    decoder.step()
    assert len(seen["norm"]) == 1


def test_a_name_that_matches_no_module_lists_near_ones() -> None:
    decoder = decoder_on("hybrid")
    with pytest.raises(ValueError, match=r"layers\.3\.self_attn"):
        decoder.capture("layers.3.self_atn")


# ---- sampling and processors through the decoder -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 2.0])
def test_one_seed_gives_the_same_tokens_under_every_method(kind: str, temperature: float) -> None:
    target = models.target(kind)
    pair = Pair(target, models.random_drafter(target, block=5))
    texts = {
        (method, seed): generate(
            pair,
            PROMPT,
            method=method,
            budget=16,
            temperature=temperature,
            seed=seed,
            max_new_tokens=20,
            stop_token_ids=(),
        ).output_ids
        for method in ("ar", "dflash", "ddtree")
        for seed in (1, 2)
    }
    for seed in (1, 2):
        assert texts["ar", seed] == texts["dflash", seed] == texts["ddtree", seed]
    assert (texts["ar", 1] == texts["ar", 2]) == (temperature == 0)


@pytest.mark.parametrize("method", ["dflash", "ddtree"])
def test_processors_see_prompt_and_path(method: str) -> None:
    pair = pair_of("dense")
    penalty = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])
    text = plain_text(pair, PROMPT, 30, Sampling(processors=penalty))
    assert text != plain_text(pair, PROMPT, 30, Sampling())
    decoder = decoder_on("dense", text=text, method=method, logits_processor=penalty)
    list(decoder.run(PROMPT))
    assert decoder.ids == text[: len(PROMPT) + 20]
    assert audit(pair, decoder.trace, logits_processor=penalty).ok
    with pytest.raises(ValueError, match="pass the same logits_processor"):
        audit(pair, decoder.trace)


# ---- settings and order --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "ddtre"}, "did you mean 'ddtree'"),
        ({"linear_state": "flat"}, "one of exact, flattened"),
        ({"budget": -1}, "budget must be >= 0"),
        ({"temperature": -0.5}, "temperature"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"stop_token_ids": [500]}, "outside the target's ids"),
    ],
)
def test_settings_that_cannot_be_are_refused_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Decoder(pair_of("dense"), **settings)


def test_phases_run_in_order_and_step_finishes_a_round_under_way() -> None:
    decoder = decoder_on("dense")
    with pytest.raises(RuntimeError, match="call start"):
        decoder.step()
    decoder.start(PROMPT)
    with pytest.raises(RuntimeError, match=r"next phase of this round is draft\(\)"):
        decoder.verify()
    decoder.draft()
    decoder.build()
    with pytest.raises(RuntimeError, match=r"next phase of this round is verify\(\)"):
        decoder.commit()
    step = decoder.step()
    assert step.index == 0 and set(step.times) == {"draft", "tree", "verify", "accept", "commit"}
    list(decoder.run())
    with pytest.raises(RuntimeError, match="finished"):
        decoder.step()
    with pytest.raises(ValueError, match="did you mean 'verify'"):
        decoder.register_hook("verfy", lambda d, v: None)


def test_a_pair_without_a_drafter_says_what_to_do() -> None:
    decoder = Decoder(pair_of("dense"), "ddtree", stop_token_ids=())
    decoder.start(PROMPT)
    with pytest.raises(ValueError, match="no drafter"):
        decoder.step()
    with pytest.raises(ValueError, match="method='ar' drafts nothing"):
        Decoder(pair_of("dense"), "ar").register_hook("draft", lambda d, v: None)


def test_a_text_that_does_not_fit_the_context_is_refused_and_trees_stay_inside_it() -> None:
    pair = pair_of("dense")
    limit = pair.max_positions
    assert limit == 512
    prompt = (PROMPT * 200)[: limit - 4]
    with pytest.raises(ValueError, match=f"the target has {limit}"):
        Decoder(pair, "ar", max_new_tokens=5).start(prompt)
    decoder = Decoder(pair, "ddtree", budget=20, max_new_tokens=4, stop_token_ids=())
    decoder.register_hook("draft", scripted([0] * limit, 6, models.VOCAB, "random"))
    steps = list(decoder.run(prompt))
    assert max(int(step.positions.max()) for step in steps) < limit and len(decoder.output_ids) == 4


# ---- the trace on disk ---------------------------------------------------------------------------------------------


def test_the_trace_is_on_disk_after_every_round_and_follows_back(tmp_path: Any) -> None:
    decoder = decoder_on("dense", trace_path=tmp_path / "run")
    decoder.start(PROMPT)
    for _ in range(3):
        decoder.step()
    assert Trace.load(tmp_path / "run").output_ids == decoder.output_ids
    decoder.back()
    decoder.step()
    assert Trace.load(tmp_path / "run").steps == decoder.trace.steps


def test_no_tensor_of_an_earlier_round_is_kept() -> None:
    """A decoder keeps no logits and no hidden states of earlier rounds."""
    import gc

    def tensors() -> int:
        gc.collect()
        return sum(type(o) is torch.Tensor for o in gc.get_objects())

    decoder = decoder_on("hybrid", "adversarial", max_new_tokens=120)
    decoder.start(PROMPT)
    for _ in range(40):  # more than the rounds that `back` keeps
        decoder.step()
    counted = tensors()
    for _ in range(40):
        decoder.step()
    assert tensors() <= counted + 4


def test_times_do_not_contain_hooks() -> None:
    import time

    decoder = decoder_on("dense")
    decoder.register_hook("verify", lambda d, v: time.sleep(0.5))
    decoder.start(PROMPT)
    assert decoder.step().times["verify"] < 0.5


def iterate(decoder: Decoder) -> Iterator[int]:
    yield from (len(step.emitted) for step in decoder.run(PROMPT))


def test_a_run_can_be_left_and_taken_up_again() -> None:
    decoder = decoder_on("dense")
    for _ in iterate(decoder):
        break
    assert decoder.trace.rounds == 1 and decoder.finished is None
    list(decoder.run())
    assert decoder.ids == plain_text(pair_of("dense"), PROMPT, 20, Sampling())
