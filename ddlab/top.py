"""The most likely tokens of each depth of a draft, with their log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

GRID = 2.0**38  # log-probabilities are whole multiples of 1 / GRID, so that sums of them are exact


def top_tokens(logits: Any, k: int, read: Callable[[int], np.ndarray] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The ``k`` best tokens of each depth: ids int64, log-probabilities float64, each [depth, min(k, vocab)].

    Best first, equals by ascending id, also at the cut: top-k kernels promise no order among equals. A row
    may end in tokens at -inf; a row of nothing else is left out, with those below it. The normaliser runs
    over the whole row, in float32 or the logits' own precision if that is higher.

    Takes and raises what ``DraftTree.best_first`` does. Of logits on a device only a few entries are moved.

    read: n -> ``packed_top(logits, n)`` on the host, where a device has it ready.
    """
    is_torch = hasattr(logits, "detach")
    logits = logits.detach() if is_torch else np.asarray(logits)
    if logits.ndim != 2 or not logits.shape[1]:
        raise ValueError(f"draft logits are [depth, vocab], not {list(logits.shape)}")
    vocab = logits.shape[1]
    k = min(k, vocab)
    if not k or not len(logits):
        return np.zeros((0, k), np.int64), np.zeros((0, k))
    n = k + k // 8 + 8  # bfloat16 logits tie often: some more, so that the cut rarely needs a second look
    while True:
        n = min(n, vocab)
        with np.errstate(invalid="ignore", over="ignore"):  # rows of -inf; spreads beyond the float range
            if read is not None:
                peak, total, values, ids = _unpacked(read(n), n)
            else:
                peak, total, values, ids = (_torch_top if is_torch else _numpy_top)(logits, n)
            log_probs = np.rint((values - peak - np.log(total)) * GRID) / GRID + 0.0  # + 0.0: no -0.0
        broken = np.flatnonzero(~(peak < np.inf))
        if broken.size:
            found = "NaN" if np.isnan(peak[broken[0], 0]) else "+inf"
            raise ValueError(f"{found} in the draft logits, depth row {broken[0]}: the drafter is broken")
        depth = int(np.cumprod(peak > -np.inf).sum())
        ids, log_probs = ids[:depth], log_probs[:depth]
        last = log_probs[:, -1]
        if n == vocab or not np.any((last == log_probs[:, k - 1]) & (last > -np.inf)):
            break
        n *= 4  # more equals of the k-th may follow
    differ = log_probs[:, 1:] != log_probs[:, :-1]
    if not (differ | (ids[:, 1:] > ids[:, :-1])).all():
        run = np.zeros((depth, n), np.int64)  # numbers the runs of equals
        np.cumsum(differ, axis=1, out=run[:, 1:])
        ids = np.sort(run * vocab + ids, axis=1) - run * vocab
    return ids[:, :k], log_probs[:, :k]


def _torch_top(logits: Any, n: int) -> tuple[np.ndarray, ...]:
    """Of each row: maximum and sum of exp(logit - maximum), [depth, 1]; n best logits and ids, [depth, n]."""
    if logits.device.type != "cpu":
        return _unpacked(packed_top(logits, n).cpu().numpy(), n)  # the one transfer
    logits, peak, total = _normaliser(logits)
    values, ids = _numpy_largest(logits.numpy(), n)
    return peak.double().numpy(), total.double().numpy(), values.astype(np.float64), ids


def packed_top(logits: Any, n: int) -> Any:
    """The same in one tensor [depth, 2 + 2 * n], on the device of the logits."""
    import torch

    logits, peak, total = _normaliser(logits)
    values, ids = largest(logits, n)
    return torch.cat([peak, total, values, ids.to(logits.dtype)], -1)  # float32 holds ids up to 2**24


def _unpacked(packed: np.ndarray, n: int) -> tuple[np.ndarray, ...]:
    rows = packed.astype(np.float64)
    return rows[:, :1], rows[:, 1:2], rows[:, 2 : 2 + n], rows[:, 2 + n :].astype(np.int64)


def _normaliser(logits: Any) -> tuple[Any, Any, Any]:
    """Logits in float32 or better; of each row the maximum, NaN where it holds one, and the sum of exp(. - maximum)."""
    import torch

    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    peak = logits.amax(-1, keepdim=True)
    return logits, peak, (logits - peak).exp_().sum(-1, keepdim=True)


def largest(logits: Any, n: int, width: int | None = None) -> tuple[Any, Any]:
    """``torch.topk`` of logits on a device: the ``n`` largest of each row [depth, vocab] and where they stand.

    Faster on a vocabulary: one pass finds the maximum of each block of ``width`` columns (None: a good one; 0: plain
    topk). No block but the ``n`` with the largest maxima can hold one of the ``n`` largest, except for equals of the
    last.
    """
    vocab = logits.shape[1]
    if width is None:
        sizes = ((128, 12), (64, 12), (32, 6))  # wide blocks if there are many more of them than n
        width = next((w for w, enough in sizes if vocab % w == 0 and vocab >= enough * w * n), 0)
    if not width:
        return logits.topk(n)
    blocks = logits.unflatten(1, (-1, width))  # [depth, blocks, width]
    chosen = blocks.amax(-1).topk(n, sorted=False).indices  # [depth, n]
    values, at = blocks.gather(1, chosen[:, :, None].expand(-1, -1, width)).flatten(1).topk(n)
    return values, chosen.gather(1, at // width) * width + at % width


def _numpy_top(logits: np.ndarray, n: int) -> tuple[np.ndarray, ...]:
    """The same for an array."""
    logits = logits.astype(np.promote_types(logits.dtype, np.float32), copy=False)
    peak = logits.max(-1, keepdims=True)
    total = np.exp(logits - peak).sum(-1, keepdims=True, dtype=np.float64)
    values, ids = _numpy_largest(logits, n)
    return peak.astype(np.float64), total, values.astype(np.float64), ids


def _numpy_largest(logits: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``n`` largest of each row and where they stand, best first.

    The ``n``-th largest maximum of disjoint blocks is a floor that at least ``n`` numbers reach, and few more do.
    """
    depth, vocab = logits.shape
    blocks = vocab // 32
    if vocab % 32 or blocks < 2 * n:
        ids = np.argpartition(logits, vocab - n)[:, vocab - n :]
        values = np.take_along_axis(logits, ids, 1)
        order = np.argsort(-values)
        return np.take_along_axis(values, order, 1), np.take_along_axis(ids, order, 1)
    floors = np.partition(logits.reshape(depth, 32, blocks).max(1), blocks - n)[:, blocks - n]
    found = np.flatnonzero(~(logits < floors[:, None]))  # NaN is found too
    rows, values = found // vocab, logits.reshape(-1)[found]
    order = np.lexsort((-values, rows))
    best = order[np.searchsorted(rows, np.arange(depth))[:, None] + np.arange(n)]  # [depth, n]
    return values[best], found[best] % vocab
