"""The recipes of a target: sampling, tokenizer, training, loops; each part held to the plain thing it stands for."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import VOCAB, fresh_target, plain_greedy, target

RECIPES = Path(__file__).resolve().parent.parent / "data" / "recipes"
sys.path.insert(0, str(RECIPES))

import batches as drafter_batches  # noqa: E402
import corpus as recipe_corpus  # noqa: E402
import evaluate_target  # noqa: E402
import fast_hybrid  # noqa: E402
import loops  # noqa: E402
import norms  # noqa: E402
import questions  # noqa: E402
import reduce_loops  # noqa: E402
import sample_answers  # noqa: E402
import sample_corpus  # noqa: E402
import sampler  # noqa: E402
import step_kernels  # noqa: E402
import target_training  # noqa: E402
import text_batches  # noqa: E402
import train_target  # noqa: E402
import train_tokenizer  # noqa: E402
from decoders import StaticDecoder  # noqa: E402
from head_loss import HeadLoss  # noqa: E402
from sampler import Job, Sampler  # noqa: E402

from ddlab.comparing.delta_forms import chain  # noqa: E402
from ddlab.delta import delta_rule_by_node  # noqa: E402
from ddlab.pair import load_pair  # noqa: E402

CPU = torch.device("cpu")

# -- loops -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5))
def test_repeated_ngrams_are_those_that_a_search_finds(ids: list[int], n: int) -> None:
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    again = [gram in grams[:i] for i, gram in enumerate(grams)]
    row = np.array(ids, dtype=np.int64)
    assert loops.repeated_ngrams(row, n).tolist() == again
    covered = {i + j for i, repeated in enumerate(again) if repeated for j in range(n)}
    assert set(np.flatnonzero(loops.repeated_tokens(row, n)).tolist()) == covered


def test_a_text_that_goes_round_loops_and_one_that_does_not_does_not() -> None:
    draw = np.random.default_rng(0)
    fresh = draw.integers(0, 5000, 120)
    round_and_round = np.concatenate([fresh[:40], np.tile(fresh[:10], 8)])
    prose = "The lamp on the quay was lit each evening by a man whose name nobody in the village could spell."
    assert loops.loops(prose, round_and_round)
    assert not loops.loops(prose, fresh)
    assert loops.loops("It was late. " * 20, fresh)
    assert not loops.loops("", fresh[:0])


# -- questions -------------------------------------------------------------------------------------------------


def test_templates_give_different_questions_of_all_six_kinds_and_the_same_ones_again() -> None:
    found = questions.templated(600, 3)
    assert found == questions.templated(600, 3)
    assert found != questions.templated(600, 4)
    assert len({questions.key(text) for _, text in found}) == len(found)
    assert {kind for kind, _ in found} == set(recipe_corpus.KINDS[1:])
    assert not any("{" in text for _, text in found)


def test_a_self_written_question_passes_if_it_has_words_and_is_in_english() -> None:
    assert questions.usable("  What is a fjord?\n") == "What is a fjord?"
    assert questions.usable("a, b?") is None
    assert questions.usable("Что такое фьорд?") is None


# -- sampling --------------------------------------------------------------------------------------------------


def test_the_kernels_give_what_the_plain_forms_give() -> None:
    pytest.importorskip("triton")
    attention, step = step_kernels.differences(CPU)  # in Triton's interpreter
    assert attention < 1e-5
    assert step < 1e-5


@pytest.mark.parametrize(("kind", "prefix"), [("llama", [3, 9, 8]), ("dense", []), ("hybrid", [])])
def test_answers_at_temperature_0_are_the_models_greedy_ones_whatever_rows_they_share(kind: str, prefix: list) -> None:
    model, stop, draw = target(kind), 7, np.random.default_rng(0)
    jobs = [Job(draw.integers(4, VOCAB, draw.integers(1, 9)).tolist(), int(draw.integers(1, 20))) for _ in range(11)]
    found = Sampler(StaticDecoder(model, 4, 32, prefix), stop).run(jobs)
    assert len(found) == len(jobs)
    for i, job in enumerate(jobs):
        answer = plain_greedy(model, [*prefix, *job.ids], job.new_tokens)
        if stop in answer:
            answer = answer[: answer.index(stop) + 1]
        assert found[i].tolist() == [*job.ids, *answer]


def test_at_temperature_1_tokens_come_as_often_as_their_probability_says() -> None:
    model, n = target("llama"), 4000
    torch.manual_seed(0)
    found = Sampler(StaticDecoder(model, 500, 4), -1).run([Job([5, 9], 1, 1.0)] * n)
    count = np.bincount([ids[-1] for ids in found.values()], minlength=VOCAB)
    with torch.no_grad():
        p = model(input_ids=torch.tensor([[5, 9]])).logits[0, -1].softmax(-1).double().numpy()
    often = n * p >= 5  # the others as one
    expected = np.append(n * p[often], n * p[~often].sum())
    counted = np.append(count[often], count[~often].sum())
    squares = ((counted - expected) ** 2 / expected).sum()
    assert squares < often.sum() + 4 * np.sqrt(2 * often.sum())  # chi square, so many degrees of freedom


def test_a_job_that_does_not_fit_is_refused() -> None:
    small = Sampler(StaticDecoder(target("llama"), 2, 8, [3, 4]), 7)
    with pytest.raises(ValueError, match="6 positions at most"):
        small.run([Job([5, 6], 5)])
    with pytest.raises(ValueError, match="filter the prompts"):
        small.run([Job([], 2)])


def test_a_prefix_is_refused_where_it_would_be_forgotten() -> None:
    with pytest.raises(ValueError, match="recurrent"):
        StaticDecoder(target("hybrid"), 2, 8, [3])


# -- the delta rule --------------------------------------------------------------------------------------------


def delta_inputs(batch: int, length: int, k_dim: int = 8, v_dim: int = 6) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(length)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(batch, length, *size, generator=draw, dtype=torch.float64)

    return [normal(2, k_dim), normal(2, k_dim), normal(4, v_dim), -0.3 * normal(4).abs(), normal(4).sigmoid()]


@pytest.mark.parametrize(("length", "chunk"), [(5, 8), (37, 16), (64, 64), (130, 64)])
def test_the_chunk_rule_is_the_recurrence(length: int, chunk: int) -> None:
    inputs = delta_inputs(2, length)
    before = torch.randn(2, 4, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kwargs = {"initial_state": before, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    out, state = fast_hybrid.chunk_rule(*inputs, **kwargs, chunk=chunk)
    for i in range(2):
        row = [x[i : i + 1] for x in inputs]
        expected, states = delta_rule_by_node(*row, chain(length), before[i : i + 1])
        torch.testing.assert_close(out[i : i + 1], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state[i], states[-1], rtol=1e-12, atol=1e-12)


def test_the_chunk_rule_is_stable_where_a_key_repeats_and_nothing_decays() -> None:
    q, k, v, g, beta = (x.float() for x in delta_inputs(1, 128))
    k, g, beta = k[:, :1].expand_as(k).contiguous(), g * 0, beta * 0 + 1
    out, _ = fast_hybrid.chunk_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    exact = [x.double() for x in (q, k, v, g, beta)]
    expected, _ = delta_rule_by_node(*exact, chain(128), torch.zeros(1, 4, 8, 6, dtype=torch.float64))
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_chunk_rules_gradients() -> None:
    inputs = [x.requires_grad_() for x in delta_inputs(1, 11, 3, 2)]

    def rule(*x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return fast_hybrid.chunk_rule(*x, use_qk_l2norm_in_kernel=True, output_final_state=True, chunk=8)

    assert torch.autograd.gradcheck(rule, inputs)


def test_a_model_in_fast_forms_has_the_same_logits_and_gradients_and_is_itself_again_afterwards() -> None:
    model = fresh_target("hybrid").requires_grad_()
    ids = torch.randint(4, VOCAB, (3, 70), generator=torch.Generator().manual_seed(0))

    def logits_and_gradients() -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        logits = model(input_ids=ids, use_cache=False).logits
        logits.log_softmax(-1)[..., 5].mean().backward()
        return logits.detach(), [p.grad.clone() for p in model.parameters()]

    plain = logits_and_gradients()
    with fast_hybrid.fast_forms(model):
        fast = logits_and_gradients()
    assert torch.equal(logits_and_gradients()[0], plain[0])
    norms.fuse_norms(model)
    with fast_hybrid.fast_forms(model):
        fused = logits_and_gradients()
    for logits, gradients in (fast, fused):
        torch.testing.assert_close(logits, plain[0], rtol=1e-3, atol=1e-3)
        for ours, theirs in zip(gradients, plain[1], strict=True):
            assert (ours - theirs).norm() < 1e-3 * theirs.norm()


# -- loss, optimizers, batches ---------------------------------------------------------------------------------


def test_the_head_losss_own_gradient_is_autograds() -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 5, generator=draw, dtype=torch.float64) for n in (23, 17))
    labels = torch.randint(0, 17, (23,), generator=draw)
    weight = torch.rand(23, generator=draw, dtype=torch.float64)
    unlikely = torch.rand(23, generator=draw) < 0.4
    ours = [x.clone().requires_grad_() for x in (hidden, head)]
    total, each = HeadLoss.apply(*ours, labels, weight, unlikely, torch.float64, 8)
    (3 * total).backward()

    free = [x.clone().requires_grad_() for x in (hidden, head)]
    log_p = (free[0] @ free[1].T).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    losses = torch.where(unlikely, -torch.log1p(-log_p.exp()), -log_p)
    (3 * (losses * weight).sum()).backward()
    torch.testing.assert_close(each, losses.detach())
    for a, b in zip(ours, free, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_the_head_loss_in_bfloat16_gives_gradients_of_the_inputs_own_type() -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 8, generator=draw).requires_grad_() for n in (9, 17))
    labels, weight = torch.randint(0, 17, (9,), generator=draw), torch.full((9,), 1 / 9)
    total, _ = HeadLoss.apply(hidden, head, labels, weight, torch.zeros(9, dtype=torch.bool), torch.bfloat16, 4)
    total.backward()
    expected = torch.nn.functional.cross_entropy(hidden @ head.T, labels)
    torch.testing.assert_close(total, expected, rtol=0.02, atol=0.02)
    found = hidden.grad, head.grad
    for ours, theirs in zip(found, torch.autograd.grad(expected, (hidden, head)), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 0.03 * theirs.norm()


def test_the_loss_of_a_certain_token_that_is_to_be_unlikely_is_finite() -> None:
    hidden, head = torch.tensor([[60.0]], requires_grad=True), torch.tensor([[1.0], [-1.0]], requires_grad=True)
    one = torch.ones(1)
    total, _ = HeadLoss.apply(hidden, head, torch.tensor([0]), one, one.bool(), torch.float32, 8)
    total.backward()
    assert torch.isfinite(total)
    assert torch.isfinite(hidden.grad).all()


def test_the_trainers_loss_is_transformers_own() -> None:
    model = fresh_target("hybrid")
    ids = torch.randint(4, VOCAB, (2, 30), generator=torch.Generator().manual_seed(0))
    length = torch.tensor([30, 21])
    labels = ids.masked_fill(torch.arange(30)[None] >= length[:, None], -100)
    with torch.no_grad():
        theirs = model(input_ids=ids, labels=labels, use_cache=False).loss
    torch.testing.assert_close(target_training.Trainer(model).likelihood(ids, length), theirs)


def test_every_parameter_is_in_one_optimizer_and_matrices_but_the_embedding_in_muon() -> None:
    model = fresh_target("hybrid")
    muon, adam = ([p for g in o.param_groups for p in g["params"]] for o in target_training.optimizers(model, 1e-3))
    assert sorted(map(id, [*muon, *adam])) == sorted(map(id, model.parameters()))
    embedding = model.get_input_embeddings().weight
    assert all(p.ndim == 2 and p is not embedding for p in muon)
    assert any(p is embedding for p in adam)


def toy_corpus(sequences: int = 40) -> recipe_corpus.Corpus:
    draw = np.random.default_rng(0)
    lengths = draw.integers(10, 150, sequences)
    temp = np.where(np.arange(sequences) % 3, 0.0, 0.7).astype(np.float16)
    tokens = draw.integers(4, VOCAB, lengths.sum()).astype(np.uint16)
    return recipe_corpus.Corpus(tokens, lengths, np.full(sequences, 6), temp, np.zeros(sequences, np.uint8))


def test_an_epoch_holds_every_text_once_and_a_step_its_batch_whenever_it_is_asked() -> None:
    corpus = toy_corpus()
    one, two = (text_batches.TextBatches(corpus, CPU, 0, 512) for _ in range(2))
    one.draw(0)
    steps = len(one.batches)
    for epoch in range(2):
        rows = []
        for step in range(epoch * steps, (epoch + 1) * steps):
            ids, length = one.draw(step)
            rows += one.rows.tolist()
            assert ids.numel() <= 512
            assert ids.shape[1] % 64 == 0
            for row, text, n in zip(one.rows, ids, length.tolist(), strict=True):
                assert text[:n].tolist() == corpus.sequence(row).tolist()
                assert not text[n:].any()
        assert sorted(rows) == list(range(len(corpus)))
    assert torch.equal(one.draw(3)[0], two.draw(3)[0])


def test_a_batch_too_small_for_the_longest_text_is_refused() -> None:
    with pytest.raises(ValueError, match="longest text"):
        text_batches.TextBatches(toy_corpus(), CPU, 0, 64)


def test_bits_per_byte_are_those_of_one_text_at_a_time() -> None:
    model, corpus = fresh_target("hybrid"), toy_corpus(6)
    nbytes, looping = np.arange(20, 26), np.array([False, True] * 3)
    held_out = text_batches.HeldOut(corpus, nbytes, looping)
    found = held_out.bits_per_byte(target_training.Trainer(model).losses, CPU, 512)
    nats = []
    for i in range(6):
        ids = torch.from_numpy(corpus.sequence(i).astype(np.int64))[None]
        with torch.no_grad():
            log_p = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        nats.append(-log_p.gather(1, ids[0, 1:, None])[5:].sum().item())  # the answer begins at 6
    for name, group in (("all", [True] * 6), ("not looping", ~looping)):
        expected = np.array(nats)[group].sum() / np.log(2) / nbytes[group].sum()
        assert found[name]["bits_per_byte"] == pytest.approx(expected, rel=1e-4)
        assert found[name]["answers"] == np.sum(group)


def test_all_answers_to_a_question_are_held_out_or_none() -> None:
    shares = [text_batches.is_held_out(f"What is {i} + {i}?") for i in range(5000)]
    assert 20 < sum(shares) < 90  # one in a hundred


def test_a_fresh_target_is_of_the_embedded_pairs_shape_and_forgets_slowly() -> None:
    model = target_training.fresh_target(train_target.CONFIG, 0)
    embedded = load_pair().target
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in embedded.named_parameters()}
    for name, p in model.named_parameters():
        if name.endswith("dt_bias"):
            dt = torch.nn.functional.softplus(p)
            assert dt.min() > 0.00099
            assert dt.max() < 0.101


# -- from beginning to end -------------------------------------------------------------------------------------


def toy_config(folder: Path) -> Path:
    """A target of four layers with 512 ids."""
    config = json.loads(train_target.CONFIG.read_text())
    config |= {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 16}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": config["layer_types"][:4]}
    config |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    config |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    config["rope_parameters"] |= {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return file


def chat_model(folder: Path) -> Path:
    """A random Llama with a tokenizer and a chat template with a system turn."""
    from transformers import LlamaConfig, LlamaForCausalLM

    lines = [(text, "") for _, text in questions.templated(300, 9)]
    words = train_tokenizer.train_bpe(lines, 400)
    words.chat_template = "<|im_start|>system\nBe brief.<|im_end|>\n" + words.chat_template
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=len(words), bos_token_id=None, eos_token_id=2)
    LlamaForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the stages up to the tokenized corpus have run."""
    folder = tmp_path_factory.mktemp("target")
    model = chat_model(folder / "chat")
    sample = ["--model", str(model), "--out", str(folder / "sampled"), "--rows", "64", "--new-tokens", "24"]
    sample_corpus.main([*sample, "--self-written", "32", "--templates", "600", "--sampled", "0.5"])
    corpus = folder / "corpus.npz"
    arguments = [folder / "sampled" / "tokens.u16", folder / "sampled" / "meta.npz", "--target", model]
    arguments += ["--prompts", RECIPES.parent / "prompts" / "prompts.jsonl", "--out", corpus]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["corpus.py", *map(str, arguments)])
        recipe_corpus.main()
    tokenize = [str(corpus), "--source", str(model), "--out", str(folder / "data"), "--vocabulary", "400"]
    train_tokenizer.main([*tokenize, "--cut-loops"])
    toy_config(folder)
    return folder


def train(folder: Path, out: str, *more: str) -> dict:
    arguments = ["--data", str(folder / "data"), "--out", str(folder / out), "--config", str(folder / "config.json")]
    train_target.main([*arguments, "--tokens", "1024", "--every", "4", "--validate", "5", *more])
    return json.loads((folder / out / "curve.json").read_text())


def test_a_second_call_gives_the_answers_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "LOOK", 64)
    model = chat_model(tmp_path / "chat")
    arguments = ["--model", str(model), "--rows", "16", "--new-tokens", "8", "--self-written", "8", "--templates", "60"]
    found = []
    for calls in ([["--seconds", "-1"], []], [[]]):  # after 64 steps the time is over
        out = tmp_path / str(len(calls))
        counts = []
        for call in calls:
            sample_corpus.main([*arguments, "--out", str(out), *call])
            with np.load(out / "meta.npz") as meta:
                found.append({name: meta[name] for name in meta.files})
            counts.append(len(found[-1]["job"]))
            assert (out / "tokens.u16").stat().st_size == 2 * found[-1]["lengths"].sum(dtype=np.int64)
        assert counts == sorted(counts)
    first, second, whole = found
    assert 0 < len(first["job"]) < len(second["job"])
    assert np.array_equal(second["job"][: len(first["job"])], first["job"])
    assert sorted(second["job"]) == sorted(whole["job"])
    with pytest.raises(SystemExit, match="another --out"):
        sample_corpus.main([*arguments, "--out", str(tmp_path / "1"), "--seed", "1"])


def test_the_tokenized_corpus_is_the_same_text_in_other_ids(made: Path) -> None:
    from transformers import AutoTokenizer

    ours = AutoTokenizer.from_pretrained(made / "data")
    assert ours.convert_tokens_to_ids(train_tokenizer.SPECIAL) == [0, 1, 2, 3]
    assert ours.eos_token_id == 2
    message = [{"role": "user", "content": "Who?"}]
    asked = ours.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert asked == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    report = json.loads((made / "data" / "tokenized.json").read_text())
    source = AutoTokenizer.from_pretrained(made / "chat")
    whole = recipe_corpus.Corpus.load(made / "corpus.npz")
    known = {source.decode(whole.sequence(i)) for i in range(len(whole))}
    parts = [recipe_corpus.Corpus.load(made / "data" / f"{name}.npz") for name in ("train", "held_out")]
    for part in parts:
        for i in range(len(part)):
            assert ours.decode(part.sequence(i)) in known
    asked = [set(recipe_corpus.user_turns(part, ours)) for part in parts]
    assert not asked[0] & asked[1]
    looping = sum(
        round(share * n) for shares in report["looping_share_of_answers"].values() for share, n in shares.values()
    )
    assert looping > 0
    assert len(parts[0]) + len(parts[1]) + looping == len(whole)


def test_the_tokenizer_is_of_the_embedded_targets_kind(made: Path) -> None:
    made_files, embedded = made / "data", train_target.CONFIG.parent
    ours, theirs = (json.loads((f / "tokenizer.json").read_text()) for f in (made_files, embedded))
    for part in ("normalizer", "pre_tokenizer", "added_tokens"):
        assert ours[part] == theirs[part]
    assert (made_files / "chat_template.jinja").read_text() == (embedded / "chat_template.jinja").read_text()


def test_a_run_that_was_stopped_goes_on_as_if_nothing_had_happened(
    made: Path, ticking: Callable[[ModuleType], AbstractContextManager[None]]
) -> None:
    whole = train(made, "whole", "--steps", "12")
    assert whole["step"] == 12
    with ticking(train_target):
        stopped = train(made, "stopped", "--steps", "12", "--seconds", "14")
    assert 0 < stopped["step"] < 12
    assert train(made, "stopped", "--steps", "12")["step"] == 12
    one, two = (torch.load(made / name / "state.pt", weights_only=True)["model"] for name in ("whole", "stopped"))
    for name, weight in one.items():
        assert torch.equal(weight, two[name]), name


def test_without_steps_a_run_takes_what_fits_into_its_seconds(
    made: Path, monkeypatch: pytest.MonkeyPatch, ticking: Callable[[ModuleType], AbstractContextManager[None]]
) -> None:
    monkeypatch.setattr(train_target, "MEASURED", (2, 4))
    with ticking(train_target):
        curve = train(made, "timed", "--seconds", "60")
    assert curve["step"] > 4
    assert 0.8 * curve["steps"] <= curve["step"] <= curve["steps"]


def test_a_target_learns_a_corpus(tmp_path: Path) -> None:
    asked = [text for _, text in questions.templated(300, 1)]
    pairs = [(f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n", f"{q} {q}<|im_end|>") for q in asked]
    words = train_tokenizer.train_bpe(pairs, 512)
    words.save_pretrained(tmp_path / "data")
    rows = np.arange(len(pairs))
    whole = recipe_corpus.Corpus(*np.zeros((2, len(rows)), int), rows, np.zeros(len(rows)), np.zeros(len(rows)))
    corpus = train_tokenizer.retokenised(whole, rows, pairs, words, 192)
    corpus.select(rows[8:]).save(tmp_path / "data" / "train.npz")
    corpus.select(rows[:8]).save(tmp_path / "data" / "held_out.npz")
    toy_config(tmp_path)
    curve = train(tmp_path, "target", "--steps", "40", "--rate", "5e-2")
    assert curve["points"][-1][2] < 0.85 * curve["points"][0][2]
    bits = [found["all"]["bits_per_byte"] for _, found in curve["validation"]]
    assert bits[-1] < 0.9 * bits[0]


def test_grading_raises_the_good_and_lowers_the_bad_tokens_and_nothing_else_counts() -> None:
    model = fresh_target("hybrid").requires_grad_()
    trainer = target_training.Trainer(model)
    ids = torch.randint(4, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    good, bad = torch.zeros(2, *ids.shape, dtype=torch.bool)
    bad[0, 5:9], good[1, 3:12] = True, True
    loss = trainer.graded(ids, good, bad, (0.5, 0.2))
    p = (-trainer.losses(ids)).exp()
    likely, unlikely = -p[good[:, 1:]].log().mean(), -torch.log1p(-p[bad[:, 1:]]).mean()
    torch.testing.assert_close(loss, 0.5 * likely + 0.2 * unlikely)
    assert trainer.graded(ids, good & bad, good & bad, (0.5, 0.2)) == 0
    optimizer = target_training.optimizers(model, 1e-2)
    for _ in range(3):
        trainer.graded(ids, good, bad, (0.5, 0.2)).backward()
        target_training.step(model, optimizer, target_training.rates_of(optimizer), 1.0)
    after = (-trainer.losses(ids)).exp()
    assert after[bad[:, 1:]].sum() < 0.5 * p[bad[:, 1:]].sum()
    assert after[good[:, 1:]].sum() > 2 * p[good[:, 1:]].sum()


def test_answers_that_loop_are_bad_where_they_repeat_and_the_others_good(made: Path) -> None:
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(made / "data")
    ask, plain = words("user\nWho?")["input_ids"], words("Nobody knows who came.")["input_ids"]
    round_and_round = words("It was late and dark. ")["input_ids"] * 12
    answers = [np.array(ask + answer) for answer in (plain, round_and_round)]
    good, bad = reduce_loops.graded(answers, [len(ask)] * 2, words)
    assert not good[0][: len(ask)].any() and good[0][len(ask) :].all() and not bad[0].any()
    assert not good[1].any() and not bad[1][: len(ask)].any()
    assert np.array_equal(bad[1][len(ask) :], loops.repeated_tokens(np.array(round_and_round)))


def test_a_target_is_trained_on_its_own_loops(made: Path) -> None:
    trained = train(made, "first", "--steps", "2")
    given = ["--target", str(made / "first"), "--data", str(made / "data"), "--out", str(made / "second")]
    reduce_loops.main(
        [*given, "--rounds", "2", "--answers", "8", "--new-tokens", "24", "--steps", "2", "--tokens", "512"]
    )
    report = json.loads((made / "second" / "loops.json").read_text())
    assert report["before"]["all"]["bits_per_byte"] == trained["held_out"]["all"]["bits_per_byte"]
    assert [found["answers"] for found in report["rounds"]] == [8, 8]
    assert any(found["looping"] and found["own"] > 0 for found in report["rounds"])
    assert load_pair(made / "second").dtype == torch.bfloat16


def test_a_trained_target_answers_and_is_evaluated(made: Path) -> None:
    train(made, "target", "--steps", "2")
    pair = load_pair(made / "target", dtype="float32")
    out, given = made / "answers.npz", ["--target", str(made / "target"), "--data", str(made / "data")]
    sample_answers.main([*given, "--out", str(out), "--rows", "16", "--questions", "40", "--new-tokens", "16"])
    answers = recipe_corpus.Corpus.load(out)
    assert json.loads(out.with_suffix(".json").read_text())["answers"] == len(answers) >= 40
    for row in np.flatnonzero(answers.temp == 0)[:3]:
        ids, begin = answers.sequence(row).tolist(), int(answers.plen[row])
        expected = plain_greedy(pair.target, ids[:begin], 16)
        cut = expected.index(2) + 1 if 2 in expected else 16
        assert ids[begin:] == expected[:cut]
    prefix = drafter_batches.system_turn(list(pair.encode("x").ids), answers.sequence(0))
    assert prefix == []
    batch = drafter_batches.Batches(answers, prefix, CPU, 0, 4, 256).draw(0)  # what train_drafter.py draws
    assert (batch.anchors < batch.length[:, None]).all()

    prompts = made / "prompts.jsonl"
    lines = (RECIPES.parent / "prompts" / "prompts.jsonl").read_text().splitlines()[::24]
    prompts.write_text("\n".join(lines))
    evaluate_target.main([*given, "--prompts", str(prompts), "--out", str(made / "target.json"), "--new-tokens", "20"])
    found = json.loads((made / "target.json").read_text())
    trained = json.loads((made / "target" / "curve.json").read_text())["held_out"]
    assert found["held_out"]["all"]["bits_per_byte"] == pytest.approx(trained["all"]["bits_per_byte"], rel=1e-3)
    assert found["looping"]["all"]["texts"] == len(lines) == len(found["texts"])
    sure, grams = [], []
    for prompt in (json.loads(line)["prompt"] for line in lines):
        ids = list(pair.encode(prompt).ids)
        answer = plain_greedy(pair.target, ids, 20)
        answer = answer[: answer.index(2) + 1] if 2 in answer else answer
        p = pair.target(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1].softmax(-1)
        sure += p[torch.arange(len(answer)), answer].tolist()
        grams += [tuple(answer[i : i + 8]) for i in range(len(answer) - 7)]
    assert found["sure"] == pytest.approx(np.mean(sure), abs=1e-3)
    assert found["distinct_8_grams"] == pytest.approx(len(set(grams)) / len(grams), abs=1e-3)
