"""Batches for training a drafter: answers from a corpus, with anchors to draft from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from corpus import Corpus

EARLY = 128  # answer tokens within which an early batch puts its anchors
SAMPLED_WEIGHT = 0.25  # of an answer sampled at T > 0, against one at T = 0
ASKED_WEIGHT = 1.6  # of an answer to a question in one of the six kinds, against a self-written one
EARLY_WIDTH = 208  # tokens of a sequence in such a batch, what comes before the answer included
HELD_OUT = 512  # sequences never trained on


def system_turn(ids: list[int], sequence: np.ndarray) -> list[int]:
    """What the chat template puts before the user turn: the ids before `sequence`'s first two in a rendered prompt."""
    header = sequence[:2].tolist()
    return ids[: next(i for i in range(len(ids)) if ids[i : i + 2] == header)]


class Batch(NamedTuple):
    ids: torch.Tensor  # [b, t], padded on the right
    length: torch.Tensor  # [b]
    anchors: torch.Tensor  # [b, a]
    rows: torch.Tensor  # [b], of the corpus


@dataclass
class Batches:
    """Batches drawn from (seed, step), of two fixed shapes."""

    corpus: Corpus
    prefix: list[int]  # put before every sequence: the chat template's system turn
    device: torch.device
    seed: int
    anchors: int
    tokens: int  # of a batch, padding included
    rows: np.ndarray = field(init=False)
    held_out: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        c = self.corpus
        usable = np.flatnonzero(c.lengths - c.plen >= 4)
        greedy = usable[c.temp[usable] == 0]
        held_out = min(HELD_OUT, len(greedy) // 4)
        self.held_out = np.sort(np.random.default_rng(self.seed).permutation(greedy)[:held_out])
        self.rows = np.setdiff1d(usable, self.held_out)
        weight = np.where(c.temp == 0, 1.0, SAMPLED_WEIGHT) * np.where(c.kind == 0, 1.0, ASKED_WEIGHT)
        self.cumulative = np.cumsum(weight[self.rows])
        self.longest = -(-(len(self.prefix) + int(c.lengths.max())) // 64) * 64
        self.early = min(EARLY_WIDTH, self.longest)
        self.flat = torch.from_numpy(np.append(c.tokens, np.zeros(self.longest)).astype(np.int32)).to(self.device)

    def draw(self, step: int) -> Batch:
        rng = np.random.default_rng([self.seed, step])
        width = self.early if step % 3 else self.longest
        place = rng.random(self.tokens // width) * self.cumulative[-1]
        return self.make(self.rows[np.searchsorted(self.cumulative, place)], width, rng)

    def make(self, rows: np.ndarray, width: int, rng: np.random.Generator) -> Batch:
        """Sequences `rows` cut at `width` tokens; anchors uniform over the answer, or over its first EARLY tokens."""
        ids, length = self.texts(rows, width)
        first = np.minimum(self.corpus.plen[rows] + len(self.prefix), length - 2)
        last = length - 2  # the last anchor with a token after it
        if width < self.longest:
            last = np.minimum(last, first + EARLY - 1)
        span = (last - first + 1)[:, None]
        anchors = first[:, None] + (rng.random((len(rows), self.anchors)) * span).astype(np.int64)
        return Batch(ids, *(torch.from_numpy(x).to(self.device) for x in (length, anchors, rows)))

    def texts(self, rows: np.ndarray, width: int) -> tuple[torch.Tensor, np.ndarray]:
        """ids [b, width] of sequences `rows` after the prefix, cut at `width` or padded with 0, and their lengths."""
        lead = len(self.prefix)
        length = np.minimum(self.corpus.lengths[rows] + lead, width)
        offset = torch.from_numpy(self.corpus.offset[rows]).to(self.device)[:, None]
        column = torch.arange(width - lead, device=self.device)[None]
        limit = torch.from_numpy(length).to(self.device)[:, None] - lead
        ids = torch.where(column < limit, self.flat[offset + column].long(), 0)
        head = torch.tensor(self.prefix, device=self.device, dtype=torch.long).expand(len(rows), -1)
        return torch.cat([head, ids], 1), length
