"""The target's choice at each node, and the walk that follows it.

With temperature the choice is the arg-max of ``logits + T * Gumbel noise``, a sample of ``softmax(logits / T)``. The
noise depends on the seed and the absolute position of the chosen token alone, so plain decoding, DFlash and DDTree with
one seed choose the same tokens, and losslessness is checked token by token at every temperature.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ddlab.tree import DraftTree


@functools.lru_cache(maxsize=32)  # a tree's nodes share their depth's noise, and the next tree meets it again
def gumbel_noise(seed: int, position: int, vocab_size: int) -> np.ndarray:
    """Standard Gumbel noise, float64 [vocab_size], a function of (seed, position) alone on every machine.

    Philox with the key (seed, position) (Salmon et al., 2011): no state, so no order of drawing to keep.
    """
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, position], dtype=np.uint64)
    uniform = np.random.Generator(np.random.Philox(key=key)).random(vocab_size)  # [0, 1)
    noise = -np.log(-np.log(uniform + 2.0**-54))  # the offset keeps both logarithms finite
    noise.setflags(write=False)
    return noise


@functools.lru_cache(maxsize=32)
def _noise_on(seed: int, position: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    noise = torch.tensor(gumbel_noise(seed, position, vocab_size), dtype=dtype)
    return noise.to(device, non_blocking=True)


_BLOCK, _CHUNK = 64, 2**18  # columns; numbers


class Choice(NamedTuple):
    """What the target chose at each node, on the host.

    tokens int64 [n]; log_prob float [n] under the target's distribution (after processors and temperature; at T = 0
    that of T = 1); margin float [n], the first minus the second of the scores that decided, in logits; asked float [m],
    the log-probabilities that ``choose`` was asked for.
    """

    tokens: Tensor
    log_prob: Tensor
    margin: Tensor
    asked: Tensor


@dataclass(frozen=True)
class Sampling:
    """The target's own rule: greedy at ``temperature`` 0, else a sample keyed by (seed, position)."""

    temperature: float = 0.0
    seed: int = 0
    processors: LogitsProcessorList | None = None

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and np.isfinite(self.temperature)):
            raise ValueError(f"temperature must be a finite number >= 0 (0 is greedy), not {self.temperature}")

    @torch.no_grad()
    def choose(
        self,
        logits: Tensor,
        positions: np.ndarray,
        history: Callable[[int], list[int]],
        asked: tuple[np.ndarray, np.ndarray] | None = None,
        read: Callable[..., tuple[np.ndarray, ...]] | None = None,
    ) -> Choice:
        """The target's choice after each node. Of logits on a device a few numbers a node are moved, in one transfer.

        Args:
            logits: float [n, vocab].
            positions: int [n], absolute position of the token to be chosen after each node.
            history: node -> all token ids up to and including that node; asked for only when there are processors.
            asked: nodes and tokens, int [m] each: how likely were these tokens after those nodes?
            read: a faster form of ``_read_from_device``, where an engine has one.
        """
        scores = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        if self.processors:
            rows = []
            for node in range(len(scores)):
                before = torch.tensor([history(node)], device=scores.device)
                rows.append(self.processors(before, scores[node : node + 1].clone()))
            scores = torch.cat(rows)
        likely = scores / self.temperature if self.temperature else scores
        if self.temperature:
            distinct, which = np.unique(positions, return_inverse=True)
            where = (scores.shape[-1], scores.dtype, scores.device)
            noise = torch.stack([_noise_on(self.seed, int(position), *where) for position in distinct])
            scores = scores + self.temperature * noise[_moved(which, scores.device)]
        nodes, ids = np.arange(len(scores)), np.zeros(0, np.int64)
        if asked is not None:
            nodes, ids = np.concatenate([nodes, asked[0]]), asked[1]
        if scores.device.type == "cpu":
            read = _read_on_host
        elif read is None or scores.dtype != torch.float32:
            read = _read_from_device
        tokens, best, second, peak, total, picked = read(scores, likely, nodes, ids)
        with np.errstate(invalid="ignore"):  # rows of -inf, broken logits: NaN says it
            margin, log_probs = best - second, picked - peak[nodes] - total[nodes]
        n = len(tokens)
        return Choice(*map(torch.from_numpy, (tokens, log_probs[:n], margin, log_probs[n:])))


def _read_on_host(scores: Tensor, likely: Tensor, nodes: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, ...]:
    """What is read from the scores that decide and those that say how likely a token is, both [n, vocab].

    Of each row: where the maximum of ``scores`` first stands, that maximum, and the second best; of ``likely`` the
    maximum, and log(sum(exp(. - maximum))), [n] each. Then the entries of ``likely`` at the chosen tokens and at
    ``ids``, in rows ``nodes`` [n + m].
    """
    array, rows = scores.numpy(), np.arange(len(scores))
    tokens = array.argmax(1)
    best = array[rows, tokens]
    try:  # the maxima leave it for a moment: a copy would cost more than all of this
        array[rows, tokens] = -np.inf
        second = array.max(1)
    finally:
        array[rows, tokens] = best
    peak = best if likely is scores else likely.amax(-1).numpy()
    at_once = max(1, _CHUNK // likely.shape[1])  # rows that stay in the cache
    pairs = zip(likely.split(at_once), torch.from_numpy(peak)[:, None].split(at_once), strict=True)
    total = torch.cat([(some - highest).exp_().sum(-1) for some, highest in pairs]).log().numpy()
    return tokens, best, second, peak, total, likely.numpy()[nodes, np.concatenate([tokens, ids])]


def _read_from_device(scores: Tensor, likely: Tensor, nodes: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, ...]:
    """The same from a device, in one transfer."""
    tokens, best, second = two_best(scores)
    peak = best if likely is scores else likely.amax(-1)
    total = -torch.log_softmax(likely, dim=-1).amax(-1)
    asked = _moved(np.concatenate([nodes, ids]), scores.device)
    picked = likely[asked[: len(nodes)], torch.cat([tokens, asked[len(nodes) :]])]
    packed = torch.cat([tokens.to(best.dtype), best, second, peak, total, picked])  # float32 holds ids up to 2**24
    numbers = packed.cpu().numpy()
    first, *others = np.split(numbers, len(scores) * np.arange(1, 6))
    return first.astype(np.int64), *others


def _moved(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)  # does not wait for what the device has to do


def two_best(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row [n, vocab]: where its maximum first stands, int64 [n], the maximum and the second best, [n] each.

    One pass finds the maximum of every block of columns, and the rest looks at few of them; topk over a vocabulary
    takes several passes.
    """
    extra = -scores.shape[1] % _BLOCK
    if extra:
        scores = torch.nn.functional.pad(scores, (0, extra), value=-torch.inf)
    blocks = scores.unflatten(1, (-1, _BLOCK))  # [n, blocks, _BLOCK]
    peaks = blocks.amax(-1)
    block = peaks.argmax(-1, keepdim=True)  # the first that holds the maximum
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0]  # [n, _BLOCK]
    best, at = inside.max(-1, keepdim=True)
    others = torch.cat([peaks.scatter(1, block, -torch.inf), inside.scatter(1, at, -torch.inf)], 1)
    return (block * _BLOCK + at)[:, 0], best[:, 0], others.amax(-1)


class Walk(NamedTuple):
    """The path that a round took.

    path: node indices, root to the last accepted draft. bonus: the target's own token after it, or None when the round
    was cut before it. stop_reason: why the path ended, ``mismatch`` (the target chose a token that is no child),
    ``exhausted`` (a leaf was reached), ``stop_token`` (the text ended here), ``length`` (cut by max_new_tokens) or
    ``edited`` (an accept hook stopped before the path did).
    """

    path: tuple[int, ...]
    bonus: int | None
    stop_reason: str

    def emitted(self, tree: DraftTree) -> tuple[int, ...]:
        """What the round adds to the text: accepted drafts, then the bonus."""
        drafts = tuple(int(tree.tokens[node]) for node in self.path[1:])
        return drafts if self.bonus is None else (*drafts, self.bonus)


def walk(tree: DraftTree, choice: np.ndarray, stop_token_ids: Container[int], room: int) -> Walk:
    """Follow the target's choices from the root while they were drafted.

    Args:
        choice: int [n], the target's token after each node.
        stop_token_ids: the text ends with the first of these.
        room: tokens that may still be added, at least 1.
    """
    path = [0]
    nodes = {pair: node for node, pair in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))}
    inner = {parent for parent, _ in nodes}  # nodes with children
    while True:
        token = int(choice[path[-1]])
        child = nodes.get((path[-1], token))
        ended, full = token in stop_token_ids, len(path) == room
        if child is None:
            reason = "stop_token" if ended else "mismatch" if path[-1] in inner else "exhausted"
            return Walk(tuple(path), token, reason)
        path.append(child)
        if ended or full:  # the text ends with a drafted token: accepted, and nothing comes after it
            return Walk(tuple(path), None, "stop_token" if ended else "length")
