"""A target by itself: bits per byte of held-out answers, how many of its greedy texts loop, and how sure it is of them.

    python evaluate_target.py --target FOLDER --data FOLDER --prompts ../prompts/prompts.jsonl --out target.json

FOLDER after --data is what train_tokenizer.py wrote, with the ids of this target. Float32. A text loops where zlib
packs it below 0.35 of its bytes, as in evaluate.py, or by the stricter rule of loops.py that the corpus was filtered
with; both are counted. `sure`: the mean probability that it gives its own greedy tokens. `distinct_8_grams`: different
ones / all, over all texts together.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import read_prompts
from evaluate import greedy
from fast_hybrid import fast_forms
from loops import NGRAM, RATIO, loops, zlib_ratio
from target_training import Trainer
from text_batches import HeldOut

from ddlab.pair import load_pair


def mean_probability(trainer: Trainer, prompts: list[list[int]], answers: list[list[int]]) -> float:
    """Of a token of the answers."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + answer], device=trainer.device)
        found.append((-trainer.losses(ids)[0, len(prompt) - 1 :]).exp())
    return torch.cat(found).mean().item()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--answers", type=int, default=1024, help="held-out answers")
    parser.add_argument("--new-tokens", type=int, default=145, help="of a greedy text; 145 is what evaluate.py makes")
    parser.add_argument("--batch", type=int, default=12)
    args, started = parser.parse_args(argv), time.time()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    pair = load_pair(args.target, dtype="float32", device=device)
    held_out = HeldOut.read(args.data / "held_out.npz", pair.tokenizer, args.answers)
    trainer = Trainer(pair.target, torch.float32)
    with fast_forms(pair.target):
        held = held_out.bits_per_byte(trainer.losses, device, 4096)
    report: dict[str, Any] = {"target": args.target, "held_out": held}
    prompts = read_prompts(args.prompts)
    encoded = [list(pair.encode(p["prompt"]).ids) for p in prompts]
    batches = [encoded[i : i + args.batch] for i in range(0, len(encoded), args.batch)]
    answers = [answer for batch in batches for answer in greedy(pair, batch, args.new_tokens)]
    texts = [pair.decode(answer) for answer in answers]
    packed = np.array([zlib_ratio(text) < RATIO for text in texts])
    strict = np.array([loops(text, np.array(answer)) for text, answer in zip(texts, answers, strict=True)])
    kinds = np.array([p["kind"] for p in prompts])
    groups = {"all": np.ones(len(kinds), bool)} | {str(kind): kinds == kind for kind in dict.fromkeys(kinds)}
    report["looping"] = {
        name: {"zlib": int(packed[g].sum()), "zlib or 8-grams": int(strict[g].sum()), "texts": int(g.sum())}
        for name, g in groups.items()
    }
    grams = [tuple(a[i : i + NGRAM]) for a in answers for i in range(len(a) - NGRAM + 1)]
    report["sure"] = round(mean_probability(trainer, encoded, answers), 3)
    report["distinct_8_grams"] = round(len(set(grams)) / max(1, len(grams)), 3)
    report["new_tokens"] = args.new_tokens
    report["ended"] = sum(answer[-1] in pair.stop_token_ids for answer in answers)
    report["texts"] = [p | {"text": t, "loops": bool(s)} for p, t, s in zip(prompts, texts, strict, strict=True)]
    args.out.write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in report.items() if k != "texts"}, indent=1))
    print(f"{time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
