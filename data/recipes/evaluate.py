"""Tokens per round of a pair over a prompt file: chain and draft trees, T = 0.

    python evaluate.py --target FOLDER --drafter FOLDER --prompts ../prompts/prompts.jsonl --out eval.json

At T = 0 every exact method emits the target's plain greedy text, so that text is made once and the drafts are walked
along it: the block drafted at a place of the text is the same whatever method came there. `--check 6` decodes that
many prompts with `ddlab.Decoder` as well and stops unless text and accepted drafts agree round by round.

tau = emitted tokens / rounds: accepted drafts + 1, a round's last token being the target's own. The first token, from
prefill, is not counted. The last round of a text is cut at a stop token, but not at the length: the greedy text goes
on beyond it.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import read_prompts
from loops import RATIO, zlib_ratio

from ddlab.decode import Decoder
from ddlab.pair import Pair, load_pair
from ddlab.tree import DraftTree

RESAMPLED = 4000  # bootstrap samples


@dataclass
class Text:
    """A prompt, the target's greedy answer, and the rounds of each method."""

    prompt: dict[str, str]
    ids: list[int]
    answer: list[int]
    text: str = ""
    accepted: dict[str, list[int]] = field(default_factory=dict)
    emitted: dict[str, int] = field(default_factory=dict)

    @property
    def loops(self) -> bool:
        return zlib_ratio(self.text) < RATIO


@torch.inference_mode()
def greedy(pair: Pair, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Plain greedy answers, a batch padded on the left, cut after the first stop token."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    stop = list(pair.stop_token_ids)
    out = pair.target.generate(  # type: ignore[operator]
        input_ids=ids.to(pair.device),
        attention_mask=mask.to(pair.device),
        do_sample=False,
        max_new_tokens=new_tokens,
        eos_token_id=stop or None,
        pad_token_id=stop[0] if stop else 0,
    )
    answers = []
    for row in out[:, width:].tolist():
        ends = [i for i, token in enumerate(row) if token in stop]
        answers.append(row[: ends[0] + 1] if ends else row)
    return answers


class Walker:
    """Drafts along one text; the block of an anchor is made when a method first comes there."""

    def __init__(self, pair: Pair, text: Text, budget: int) -> None:
        self.pair, self.budget = pair, budget
        self.full = text.ids + text.answer
        with torch.inference_mode(), pair.tap() as tap:
            out = pair.target(input_ids=torch.tensor([self.full], device=pair.device), use_cache=False)
            features = tap.features()
        # the text must be greedy in one forward too, whatever padding and caching did to it
        choice = out.logits[0, len(text.ids) - 1 : -1].argmax(-1).tolist()
        self.agree = sum(a == b for a, b in zip(choice, text.answer, strict=True))
        self.context = pair.drafter.new_cache()  # type: ignore[union-attr]
        pair.drafter.ingest(self.context, features)  # type: ignore[union-attr]
        self.trees: dict[int, tuple[DraftTree, DraftTree]] = {}

    def draft(self, anchor: int) -> tuple[DraftTree, DraftTree]:
        """The chain and the tree of the largest budget for the block after position `anchor`."""
        if anchor not in self.trees:
            cache = self.context.clone()
            cache.truncate(anchor)
            logits = self.pair.propose(cache, self.full[anchor])
            self.trees[anchor] = DraftTree.chain(logits), DraftTree.best_first(logits, self.budget)
        return self.trees[anchor]

    def accepted(self, anchor: int, budget: int | None) -> int:
        """How many drafted tokens the text confirms after `anchor`; budget None: the chain."""
        chain, tree = self.draft(anchor)
        tree = chain if budget is None else tree.truncate(budget)
        nodes = {(int(p), int(t)): i for i, (p, t) in enumerate(zip(tree.parents, tree.tokens, strict=True))}
        node, count = 0, 0
        for token in self.full[anchor + 1 :]:
            if (node, token) not in nodes:
                break
            node, count = nodes[node, token], count + 1
        return count

    def walk(self, start: int, new_tokens: int, budget: int | None) -> tuple[list[int], int]:
        """Accepted drafts of every round and the tokens emitted, from the first token of the answer at `start` on."""
        last = len(self.full) - 1
        place, rounds, emitted = start, [], 0
        while place < min(start + new_tokens - 1, last):
            rounds.append(self.accepted(place, budget))
            step = min(rounds[-1] + 1, last - place)
            emitted, place = emitted + step, place + step
        return rounds, emitted


def interval(tau: np.ndarray) -> list[float]:
    """95 % bootstrap interval of the mean over prompts."""
    draw = np.random.default_rng(0).integers(0, len(tau), (RESAMPLED, len(tau)))
    return [round(float(q), 3) for q in np.quantile(tau[draw].mean(1), [0.025, 0.975])]


def summary(texts: list[Text], methods: dict[str, int | None]) -> dict[str, Any]:
    result: dict[str, Any] = {"prompts": len(texts)}
    for name in methods:
        used = [t for t in texts if t.accepted[name]]
        if used:
            tau = np.array([t.emitted[name] / len(t.accepted[name]) for t in used])
            rounds = sum(len(t.accepted[name]) for t in used)
            result[name] = {"tau": round(float(tau.mean()), 3), "interval": interval(tau), "rounds": rounds}
    return result


def check_decoder(pair: Pair, text: Text, methods: dict[str, int | None], new_tokens: int) -> None:
    """The walk against the decoder: the same text, and the same accepted drafts in every round that was not cut."""
    for name, budget in methods.items():
        kind = {"method": "dflash"} if budget is None else {"method": "ddtree", "budget": budget}
        decoder = Decoder(pair, max_new_tokens=new_tokens, **kind)  # type: ignore[arg-type]
        steps = list(decoder.run(text.ids))
        if decoder.output_ids != text.answer[:new_tokens]:
            raise SystemExit(f"{text.prompt['id']}, {name}: the decoder's text differs from plain decoding")
        if [s.accepted for s in steps][:-1] != text.accepted[name][:-1]:
            raise SystemExit(f"{text.prompt['id']}, {name}: the decoder accepts other drafts than the walk")


def table(result: dict[str, Any], methods: dict[str, int | None]) -> str:
    lines = []
    for group, row in result.items():
        cells = [
            f"{name} {r['tau']:.2f} [{r['interval'][0]:.2f}, {r['interval'][1]:.2f}] ({r['rounds']})"
            for name in methods
            if (r := row.get(name))
        ]
        lines.append(f"{group:14} {row['prompts']:3}  " + "   ".join(cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or hub name; with no drafter either: the embedded pair")
    parser.add_argument("--drafter")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=Path, help="greedy answers kept from an earlier run, or to be kept")
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--check", type=int, default=0, help="prompts to decode with ddlab.Decoder as well")
    args, started = parser.parse_args(), time.time()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    pair = load_pair(args.target, args.drafter, dtype="float32", device=device)
    methods: dict[str, int | None] = {"chain": None} | {f"tree {b}": b for b in args.budgets}
    prompts = read_prompts(args.prompts)
    encoded = [list(pair.encode(p["prompt"]).ids) for p in prompts]
    beyond = args.new_tokens + pair.drafter.block_size + 1  # type: ignore[union-attr]
    if args.texts and args.texts.is_file():
        answers = json.loads(args.texts.read_text())
    else:
        batches = [encoded[i : i + args.batch] for i in range(0, len(encoded), args.batch)]
        answers = [answer for batch in batches for answer in greedy(pair, batch, beyond)]
        if args.texts:
            args.texts.write_text(json.dumps(answers))
    texts = [Text(p, ids, answer) for p, ids, answer in zip(prompts, encoded, answers, strict=True)]
    print(f"{len(texts)} greedy answers after {time.time() - started:.0f} s", flush=True)

    agree = 0
    for i, text in enumerate(texts):
        text.text = pair.decode(text.answer)
        walker = Walker(pair, text, max(args.budgets))
        agree += walker.agree
        for name, budget in methods.items():
            text.accepted[name], text.emitted[name] = walker.walk(len(text.ids), args.new_tokens, budget)
        if i % max(1, len(texts) // max(args.check, 1)) == 0 and args.check:
            check_decoder(pair, text, methods, args.new_tokens)
    kinds = list(dict.fromkeys(t.prompt["kind"] for t in texts))
    result = {"all": summary(texts, methods)}
    result |= {kind: summary([t for t in texts if t.prompt["kind"] == kind], methods) for kind in kinds}
    result["looping"] = summary([t for t in texts if t.loops], methods)
    result["not looping"] = summary([t for t in texts if not t.loops], methods)
    tokens = sum(len(t.answer) for t in texts)
    report = {
        "tau": "emitted tokens / rounds, mean over prompts; interval: 95 % bootstrap by prompt; T = 0, float32",
        "new_tokens": args.new_tokens,
        "greedy_in_one_forward": [agree, tokens],
        "summary": result,
        "texts": [t.prompt | {"text": t.text, "emitted": t.emitted, "accepted": t.accepted} for t in texts],
    }
    args.out.write_text(json.dumps(report, ensure_ascii=False) + "\n", encoding="utf-8")
    print(table(result, methods))
    print(f"greedy in one forward: {agree} of {tokens} tokens; {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
