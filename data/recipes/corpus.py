"""A corpus of token sequences (user turn + answer), without near-duplicates of the evaluation prompts.

    python corpus.py TOKENS.u16 META.npz --target FOLDER --prompts ../prompts/prompts.jsonl --out corpus.npz

TOKENS.u16: the sequences' ids, uint16, one after the other. META.npz: lengths, plen (ids of the user turn, the
answer's header included), temp (the temperature the answer was sampled at), kind. The same names are in the file that
is written; a report of what was dropped lies beside it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("self-written", "chat", "explanation", "code", "arithmetic", "story", "list")


@dataclass
class Corpus:
    """Sequences in one flat array: sequence i is tokens[offset[i] : offset[i] + lengths[i]]."""

    tokens: np.ndarray  # uint16 [all ids]
    lengths: np.ndarray  # int64 [n]
    plen: np.ndarray  # int64 [n]: where the answer begins
    temp: np.ndarray  # float16 [n]
    kind: np.ndarray  # uint8 [n], index into KINDS

    def __post_init__(self) -> None:
        self.lengths, self.plen = self.lengths.astype(np.int64), self.plen.astype(np.int64)
        self.offset = np.concatenate([[0], np.cumsum(self.lengths)])[:-1]

    def __len__(self) -> int:
        return len(self.lengths)

    def sequence(self, i: int) -> np.ndarray:
        return self.tokens[self.offset[i] : self.offset[i] + self.lengths[i]]

    def select(self, rows: np.ndarray) -> Corpus:
        """The sequences `rows`, in that order."""
        tokens = np.concatenate([self.sequence(i) for i in rows])
        return Corpus(tokens, self.lengths[rows], self.plen[rows], self.temp[rows], self.kind[rows])

    def save(self, path: str | Path) -> None:
        np.savez(
            path,
            tokens=self.tokens,
            lengths=self.lengths.astype(np.uint16),
            plen=self.plen.astype(np.uint16),
            temp=self.temp,
            kind=self.kind,
        )

    @classmethod
    def load(cls, path: str | Path) -> Corpus:
        with np.load(path) as z:
            return cls(**{name: z[name] for name in ("tokens", "lengths", "plen", "temp", "kind")})


# -- near-duplicates --------------------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    """Lower-case words and operators; every number is `#`, so that other numbers make no other question."""
    return re.findall(r"[a-z]+|#|[+*/=%^-]", re.sub(r"\d+(?:[.,]\d+)*", "#", text.lower().replace("'", "")))


def trigrams(text: str) -> frozenset[tuple[str, ...]]:
    """Three consecutive words, begin and end marked: a text of n words has n + 2 of them at most."""
    padded = ["", "", *words(text), ""]
    return frozenset(tuple(padded[i : i + 3]) for i in range(len(padded) - 2))


class NearDuplicates:
    """Answers whether a question nearly duplicates one of `prompts`.

    It does when the two share at least `threshold` of their word trigrams (Jaccard index), numbers made equal.
    """

    def __init__(self, prompts: list[str], threshold: float = 0.5) -> None:
        self.threshold = threshold
        self.grams = [trigrams(p) for p in prompts]
        self.where: dict[tuple[str, ...], list[int]] = {}
        for i, grams in enumerate(self.grams):
            for gram in grams:
                self.where.setdefault(gram, []).append(i)

    def find(self, text: str) -> int | None:
        """The index of the prompt most like `text`, or None when none is near."""
        grams = trigrams(text)
        shared = Counter(i for gram in grams for i in self.where.get(gram, ()))
        likeness = {i: n / (len(grams) + len(self.grams[i]) - n) for i, n in shared.items()}
        best = max(likeness, key=lambda i: likeness[i], default=None)
        return best if best is not None and likeness[best] >= self.threshold else None


def user_turns(corpus: Corpus, tokenizer: Any, chunk: int = 8192) -> Iterator[str]:
    """What was asked, sequence by sequence, without the chat template's headers."""
    for i in range(0, len(corpus), chunk):
        rows = range(i, min(i + chunk, len(corpus)))
        heads = [corpus.sequence(j)[: corpus.plen[j]].tolist() for j in rows]
        for text in tokenizer.batch_decode(heads, skip_special_tokens=True):
            yield text.strip().removeprefix("user\n").removesuffix("assistant").strip()


def without_near_duplicates(
    corpus: Corpus, tokenizer: Any, prompts: list[str]
) -> tuple[np.ndarray, list[tuple[str, str]]]:
    """Rows to keep [n], and what was left out as (question, prompt)."""
    near = NearDuplicates(prompts)
    keep, dropped = [], []
    for row, text in enumerate(user_turns(corpus, tokenizer)):
        match = near.find(text)
        if match is None:
            keep.append(row)
        else:
            dropped.append((text, prompts[match]))
    return np.array(keep, dtype=np.int64), dropped


def read_prompts(path: str | Path) -> list[dict[str, str]]:
    """JSON lines with id, kind and prompt."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("meta", type=Path)
    parser.add_argument("--target", required=True, help="folder whose tokenizer made the ids")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sampled-share", type=float, default=1.0, help="part of the T > 0 answers to keep")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    with np.load(args.meta) as meta:
        corpus = Corpus(np.fromfile(args.tokens, np.uint16), *(meta[k] for k in ("lengths", "plen", "temp", "kind")))
    prompts = [p["prompt"] for p in read_prompts(args.prompts)]
    keep, dropped = without_near_duplicates(corpus, AutoTokenizer.from_pretrained(args.target), prompts)
    kept = corpus.select(keep)
    chosen = (kept.temp == 0) | (np.random.default_rng(0).random(len(kept)) < args.sampled_share)
    result = kept.select(np.flatnonzero(chosen))
    result.save(args.out)
    report = {
        "sequences": len(corpus),
        "dropped_as_near_duplicates": len(dropped),
        "dropped_by_prompt": dict(Counter(prompt for _, prompt in dropped).most_common()),
        "kept": len(result),
        "kept_at_temperature_0": int((result.temp == 0).sum()),
        "answer_tokens": int((result.lengths - result.plen).sum()),
    }
    Path(args.out).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
