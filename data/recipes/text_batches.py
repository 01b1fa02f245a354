"""Batches of whole texts of about one length, drawn from (seed, step), and what is held out of them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import Corpus, user_turns
from loops import loops

STRIDE = 64  # widths of batches are multiples of it: a chunk of the delta rule


def is_held_out(question: str) -> bool:
    """One question in a hundred, with all its answers; the same ones whatever the tokenizer."""
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return int(hashlib.md5(text.encode()).hexdigest()[:6], 16) % 100 == 0


class TextBatches:
    """Every text once an epoch, in batches of at most `tokens` ids, padding included.

    ids int64 [b, t], padded on the right with 0, t a multiple of 64; length int64 [b].
    """

    def __init__(self, corpus: Corpus, device: torch.device, seed: int, tokens: int) -> None:
        self.corpus, self.device, self.seed, self.tokens = corpus, device, seed, tokens
        self.width = -(-corpus.lengths // STRIDE) * STRIDE
        if tokens < self.width.max():
            raise ValueError(f"a batch of {tokens} ids cannot hold the longest text, {self.width.max()} with padding")
        flat = np.append(corpus.tokens, np.zeros(int(self.width.max()), np.uint16))
        self.flat = torch.from_numpy(flat.astype(np.int32)).to(device)
        self.epoch, self.before, self.batches = -1, 0, list[np.ndarray]()
        self.rows = np.zeros(0, dtype=np.int64)  # of the corpus, in the batch drawn last

    def draw(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        if step < self.before:
            self.epoch, self.before, self.batches = -1, 0, []
        while step >= self.before + len(self.batches):
            self.before += len(self.batches)
            self.epoch += 1
            self.batches = self._shuffled(np.random.default_rng([self.seed, self.epoch]))
        self.rows = self.batches[step - self.before]
        return self.make(self.rows)

    def make(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        c, width = self.corpus, int(self.width[rows].max())
        offset = torch.from_numpy(c.offset[rows]).to(self.device)
        length = torch.from_numpy(c.lengths[rows]).to(self.device)
        column = torch.arange(width, device=self.device)[None]
        return torch.where(column < length[:, None], self.flat[offset[:, None] + column].long(), 0), length

    def by_length(self, order: np.ndarray) -> list[np.ndarray]:
        """Rows in `order`, of one width each, cut into batches."""
        cut = []
        for width in np.unique(self.width):
            rows = order[self.width[order] == width]
            per = self.tokens // int(width)
            cut += [rows[i : i + per] for i in range(0, len(rows), per)]
        return cut

    def _shuffled(self, rng: np.random.Generator) -> list[np.ndarray]:
        batches = self.by_length(rng.permutation(len(self.corpus)))
        return [batches[i] for i in rng.permutation(len(batches))]


Losses = Callable[[torch.Tensor], torch.Tensor]  # ids [b, t] -> -log p of ids[:, 1:] [b, t - 1]


@dataclass
class HeldOut:
    """Answers that no training text holds, and how many bytes of text each is; the stop token is none of them."""

    corpus: Corpus
    nbytes: np.ndarray  # int64 [n]
    looping: np.ndarray  # bool [n]

    @classmethod
    def read(cls, path: str | Path, tokenizer: Any, most: int = 1024) -> HeldOut:
        corpus = Corpus.load(path)
        corpus = corpus.select(np.sort(np.random.default_rng(0).permutation(len(corpus))[:most]))
        answers = [corpus.sequence(i)[corpus.plen[i] :] for i in range(len(corpus))]
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        nbytes = np.array([len(text.encode()) for text in texts])
        return cls(corpus, nbytes, np.array([loops(t, a) for t, a in zip(texts, answers, strict=True)]))

    @torch.no_grad()
    def bits_per_byte(self, losses: Losses, device: torch.device, tokens: int = 32768) -> dict[str, Any]:
        """-log2 p of the answers / their bytes, over all texts and over those that do not loop."""
        batches = TextBatches(self.corpus, device, 0, max(tokens, -(-int(self.corpus.lengths.max()) // 64) * 64))
        nats = np.zeros(len(self.corpus))
        for rows in batches.by_length(np.arange(len(self.corpus))):
            ids, length = batches.make(rows)
            place = torch.arange(1, ids.shape[1], device=device)[None]
            begin = torch.from_numpy(self.corpus.plen[rows]).to(device)[:, None]
            answer = (place >= begin) & (place < length[:, None])
            nats[rows] = (losses(ids) * answer).sum(1, dtype=torch.float64).cpu().numpy()
        bits = nats / math.log(2)
        groups = {"all": np.ones(len(nats), bool), "not looping": ~self.looping}
        return {
            name: {
                "bits_per_byte": round(float(bits[g].sum() / self.nbytes[g].sum()), 4)
                if self.nbytes[g].any()
                else None,
                "answers": int(g.sum()),
                "bytes": int(self.nbytes[g].sum()),
            }
            for name, g in groups.items()
        }


def split(corpus: Corpus, tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on, rows held out."""
    held = np.array([is_held_out(question) for question in user_turns(corpus, tokenizer)])
    return np.flatnonzero(~held), np.flatnonzero(held)
