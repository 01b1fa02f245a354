"""A target's own answers to the questions of its corpus, for training a drafter.

    python sample_answers.py --target FOLDER --data FOLDER --out answers.npz --seconds 80

FOLDER after --data is what train_tokenizer.py wrote. Every question is answered once at T = 0, and some, in a share of
--sampled-share, once more at T = 0.8. answers.npz is a corpus as corpus.py describes it. Questions come in an order
drawn from --seed; those that had no time are left out, and a report beside the file says how many.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from corpus import Corpus
from decoders import StaticDecoder
from norms import fuse_norms
from sampler import Job, Sampler

TEMPERATURE = 0.8


def distinct(corpus: Corpus, most: int) -> np.ndarray:
    """A row for each different user turn of at most `most` ids."""
    found: dict[bytes, int] = {}
    for row in np.flatnonzero(corpus.plen <= most).tolist():
        found.setdefault(corpus.sequence(row)[: corpus.plen[row]].tobytes(), row)
    return np.array(list(found.values()))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--rows", type=int, default=8192, help="answers at a time")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--sampled-share", type=float, default=0.1)
    parser.add_argument("--questions", type=int, help="at most so many; left out: all")
    parser.add_argument("--seed", type=int, default=0)
    args, started = parser.parse_args(argv), time.time()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True  # float32 all the same: in bfloat16 many best logits are equal
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).to(device).eval()
    if device.type == "cuda":
        fuse_norms(model)
    corpus = Corpus.load(args.data / "train.npz")
    longest = int(np.quantile(corpus.plen, 0.98))
    rng = np.random.default_rng(args.seed)
    rows = rng.permutation(distinct(corpus, longest))[: args.questions]
    again = rows[rng.random(len(rows)) < args.sampled_share]
    source = np.concatenate([rows, again])
    temperature = np.repeat([0.0, TEMPERATURE], [len(rows), len(again)])
    order = rng.permutation(len(source))
    source, temperature = source[order], temperature[order]
    jobs = [
        Job(corpus.sequence(row)[: corpus.plen[row]].tolist(), args.new_tokens, float(t))
        for row, t in zip(source, temperature, strict=True)
    ]
    decoder = StaticDecoder(model, min(args.rows, len(jobs)), longest + args.new_tokens)
    print(f"{len(jobs)} answers to give, fused {decoder.fused}, ready after {time.time() - started:.0f} s", flush=True)
    stop = AutoTokenizer.from_pretrained(args.target).eos_token_id
    found = Sampler(decoder, stop).run(jobs, args.seconds, "answers")
    at = np.array(sorted(found), dtype=np.int64)
    if not len(at):
        raise SystemExit("no answer ended: give more --seconds")
    sequences = [found[i].astype(np.uint16) for i in at.tolist()]
    lengths = np.array([len(s) for s in sequences])
    answers = Corpus(
        np.concatenate(sequences),
        lengths,
        corpus.plen[source[at]],
        temperature[at].astype(np.float16),
        corpus.kind[source[at]],
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    answers.save(args.out)
    report = {
        "arguments": {k: str(v) for k, v in vars(args).items()},
        "answers_asked_for": len(jobs),
        "answers": len(answers),
        "answers_at_temperature_0": int((answers.temp == 0).sum()),
        "answers_that_end_with_the_stop_token": int(sum(s[-1] == stop for s in sequences)),
        "answer_tokens": int((lengths - answers.plen).sum()),
        "seconds": round(time.time() - started, 1),
    }
    args.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
