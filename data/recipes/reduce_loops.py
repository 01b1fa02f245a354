"""Train a target on its own greedy answers so that fewer of them loop.

    python reduce_loops.py --target FOLDER --data FOLDER --out FOLDER

The target answers questions of the corpus at T = 0. In answers that loop (`loops.loops`) the tokens of a repeated
8-gram get -log(1 - p), sequence-level unlikelihood (Welleck et al., 2020); the tokens of the other answers get -log p,
as in expert iteration: unlikelihood alone leaves a target unsure of all it says. Batches of the corpus keep their
likelihood. Every round has questions and answers of its own. A run is short, and begins from --target each time.

In the folder that is written: a target as train_target.py writes it, and loops.json: what became of the held-out bits
per byte, and of the share of looping answers round by round.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import Corpus
from decoders import StaticDecoder
from fast_hybrid import fast_forms
from loops import loops, repeated_tokens
from norms import fuse_norms
from sample_answers import distinct
from sampler import Job, Sampler
from target_training import Trainer, rates_of, save_target, step
from text_batches import STRIDE, HeldOut, TextBatches


def graded(answers: list[np.ndarray], begins: list[int], tokenizer: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Good and bad tokens of each [prompt + answer]: all of an answer that does not loop, repeats of one that does."""
    texts = tokenizer.batch_decode([ids[b:] for ids, b in zip(answers, begins, strict=True)], skip_special_tokens=True)
    good, bad = [], []
    for text, ids, begin in zip(texts, answers, begins, strict=True):
        place = np.arange(len(ids)) >= begin
        looping = loops(text, ids[begin:])
        good.append(place & (not looping))
        bad.append(np.zeros(len(ids), dtype=bool))
        if looping:
            bad[-1][begin:] = repeated_tokens(ids[begin:])
    return good, bad


def padded(rows: list[np.ndarray], device: torch.device) -> torch.Tensor:
    """[b, t], t a multiple of 64, padded on the right with 0."""
    width = -(-max(map(len, rows)) // STRIDE) * STRIDE
    return torch.from_numpy(np.stack([np.pad(row, (0, width - len(row))) for row in rows])).to(device)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--answers", type=int, default=2048, help="greedy answers of a round")
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--steps", type=int, default=12, help="training steps of a round")
    parser.add_argument("--tokens", type=int, default=32768, help="ids of a batch of the corpus, and of answers")
    parser.add_argument("--own", type=float, default=2.0, help="weight of its own answers' likelihood")
    parser.add_argument("--away", type=float, default=0.15, help="weight of the unlikelihood")
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    args, started = parser.parse_args(argv), time.time()
    from transformers import AutoTokenizer, Qwen3_5ForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = Qwen3_5ForCausalLM.from_pretrained(args.target, dtype=torch.float32).to(device).train()
    if device.type == "cuda":
        fuse_norms(model)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    corpus = Corpus.load(args.data / "train.npz")
    batches = TextBatches(corpus, device, args.seed + 1, args.tokens)
    held_out = HeldOut.read(args.data / "held_out.npz", tokenizer)
    longest = int(np.quantile(corpus.plen, 0.98))
    asked = [corpus.sequence(row)[: corpus.plen[row]].tolist() for row in distinct(corpus, longest)]
    trainer = Trainer(model)
    optimizer: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.98), weight_decay=0.0)
    ]
    rates = rates_of(optimizer)
    sampler = Sampler(StaticDecoder(model, args.answers, longest + args.new_tokens), tokenizer.eos_token_id)
    report: dict[str, Any] = {"arguments": {k: str(v) for k, v in vars(args).items()}, "rounds": []}
    args.out.mkdir(parents=True, exist_ok=True)

    rng, begun = np.random.default_rng(args.seed), time.time()
    with fast_forms(model):
        report["before"] = held_out.bits_per_byte(trainer.losses, device)
        for turn in range(args.rounds):
            spent = time.time() - begun
            if spent > args.seconds:
                break
            chosen = rng.choice(len(asked), min(args.answers, len(asked)), replace=False)
            answers = list(sampler.run([Job(asked[i], args.new_tokens) for i in chosen]).items())
            ids = [answer.astype(np.int64) for _, answer in answers]
            good, bad = graded(ids, [len(asked[chosen[i]]) for i, _ in answers], tokenizer)
            values = []
            for i in range(args.steps):
                at = turn * args.steps + i
                loss = trainer.likelihood(*batches.draw(at))
                loss.backward()
                some = rng.permutation(len(ids))[: max(1, args.tokens // sampler.decoder.length)]
                marks = (padded([x[j] for j in some], device) for x in (ids, good, bad))
                own = trainer.graded(*marks, (args.own, args.away))
                own.backward()
                values.append([loss.item(), own.item()])
                done = max((at + 1) / (args.rounds * args.steps), (time.time() - begun) / args.seconds)
                step(model, optimizer, rates, min(1.0, (at + 1) / 20) * max(0.05, 1 - done))
            corpus_loss, own_loss = np.mean(values, axis=0)
            report["rounds"].append(
                {
                    "answers": len(ids),
                    "looping": sum(not x.any() for x in good),
                    "good_tokens": round(float(np.mean([x.sum() for x in good if x.any()] or [0.0])), 1),
                    "loss": round(float(corpus_loss), 4),
                    "own": round(float(own_loss), 4),
                }
            )
            print(f"round {turn} {time.time() - begun:.0f} s", json.dumps(report["rounds"][-1]), flush=True)
        saved = save_target(model, tokenizer, args.out)
        report["after"] = held_out.bits_per_byte(Trainer(saved).losses, device)
    (args.out / "loops.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("held out before", json.dumps(report["before"]), "after", json.dumps(report["after"]))
    print(f"{time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
