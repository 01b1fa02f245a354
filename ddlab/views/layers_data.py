"""A comparison as the front end reads it: figures by layer, the rows of one call, and the masks, each once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddlab.comparing import rows as sights
from ddlab.comparing.comparison import Comparison, LayerFigures, LayerInfo

ROWS, EDGE = 64, 96  # rows of a layer that are listed, and rows of a mask that are drawn
BY_ROW = ("error", "rms", "max_abs", "cosine", "free_rms")


def panel_data(comparison: Comparison) -> dict[str, Any]:
    """Figures of every layer, and of each the rows and masks of the call that its error is from."""
    masks = _Masks(comparison)
    lengths = [len(call["parents"]) for call in comparison.calls]
    begins = np.concatenate([[0], np.cumsum(lengths)]).tolist()  # rows before each call
    backends = []
    for b in comparison.backends:
        shown = {
            str(info.index): _layer(comparison, info, b.layers[info.index], begins, masks)
            for info in comparison.layers
            if info.index in b.layers
        }
        backends.append({"name": b.name, "status": b.status, "reason": b.reason, "layers": shown})
    return {
        "layers": [
            {"index": i.index, "letter": i.letter, "name": str(i), "linear": i.kind == "linear_attention"}
            for i in comparison.layers
        ],
        "backends": backends,
        "masks": masks.drawn,
        "calls": [{"round": call["round"], "start": call["start"]} for call in comparison.calls],
        "labels": {str(token): shown for token, shown in comparison.labels.items()},
    }


def _layer(
    comparison: Comparison, info: LayerInfo, figures: LayerFigures, begins: Sequence[int], masks: _Masks
) -> dict[str, Any]:
    nodes = figures.nodes
    worst = np.nan_to_num(nodes.get("error", nodes["rms"]), nan=np.inf)
    by_call = np.maximum.reduceat(worst, begins[:-1])
    judged = np.flatnonzero(by_call == (np.inf if figures.error is None else figures.error))
    number = int(judged[0] if judged.size else by_call.argmax())
    call, first = comparison.calls[number], begins[number]
    inside = worst[first : begins[number + 1]]
    rows = np.sort(np.argsort(-inside, kind="stable")[:ROWS])
    values = {
        "error": figures.error,
        "rms": figures.rms,
        "max_abs": figures.max_abs,
        "uncosine": 1 - figures.cosine,
        "free_rms": figures.free_rms,
        "free_max_abs": figures.free_max_abs,
        "free_uncosine": 1 - figures.free_cosine,
        "seconds": figures.seconds,
        "peak_bytes": figures.peak_bytes,
    }
    kept = {name: nodes[name][first + rows] for name in BY_ROW if name in nodes}
    return {
        "values": {k: _number(v) for k, v in values.items()},
        "band": _number(figures.band),
        "verdict": figures.verdict,
        "fault": figures.fault,
        "call": number,
        "of": len(inside),
        "rows": rows.tolist(),
        "tokens": [call["tokens"][row] for row in rows],
        "depth": [call["depth"][row] for row in rows],
        "nodes": {name: [_number(v) for v in array] for name, array in kept.items()},
        "mask": masks.add(number, info, None),
        "faulty": None if figures.fault is None else masks.add(number, info, figures.fault),
    }


def _number(value: float | None) -> float | None:
    """Three digits are what a picture shows; what is no number becomes null."""
    return float(f"{value:.3g}") if value is not None and math.isfinite(value) else None


class _Masks:
    """Masks of the layers that are shown, each once: how much of the text a row sees, and which rows."""

    def __init__(self, comparison: Comparison):
        self.comparison = comparison
        self.drawn: list[dict[str, Any]] = []
        self._places: dict[Any, int | None] = {}

    def add(self, number: int, info: LayerInfo, fault: str | None) -> int | None:
        """Its place in `drawn`; None where nothing can be drawn of it."""
        key = (number, info.kind, info.window, info.sinks, fault)
        if key not in self._places:
            seen = self._seen(self.comparison.calls[number], info, fault)
            self._places[key] = None if seen is None else len(self.drawn)
            if seen is not None:
                self.drawn.append(_drawn(seen))
        return self._places[key]

    def _seen(self, call: dict[str, Any], info: LayerInfo, fault: str | None) -> np.ndarray | None:
        rows = _rows(call)
        if fault is None:
            return rows.seen(info.kind, info.window)
        if fault == sights.FLATTENED:
            return sights.chain_rows(len(rows), rows.start).seen(info.kind, None)
        handed = 0 if info.window is None else max(0, rows.start - info.window + 1)
        sight = sights.FAULTS[fault](rows, info.kind, info.window, handed) if fault in sights.FAULTS else None
        if sight is None:
            return None
        keys = np.ones_like(sight.keys) if sight.added else sight.keys  # added, a mask forbids nothing
        return np.concatenate([np.zeros((len(rows), handed), dtype=bool), keys], axis=1)


def _rows(call: dict[str, Any]) -> sights.Rows:
    parents, depth = np.array(call["parents"], np.int64), np.array(call["depth"], np.int64)
    if "among" in call:
        return sights.block_rows(len(parents), call["start"], call["among"])
    ancestors = np.zeros((len(parents), len(parents)), dtype=bool)
    for row, parent in enumerate(parents.tolist()):
        if parent >= 0:
            ancestors[row] = ancestors[parent]
        ancestors[row, row] = True
    return sights.Rows(call["start"], parents, depth, ancestors)


def _drawn(seen: np.ndarray) -> dict[str, Any]:
    """The last rows of a mask: of the keys before them from where to where each sees, and which of them it sees."""
    n = min(len(seen), EDGE)
    before, among = seen[-n:, : seen.shape[1] - n], seen[-n:, seen.shape[1] - n :]
    spans = []
    for row in before:
        there = np.flatnonzero(row)
        spans.append([int(there[0]), int(there[-1]) + 1] if len(there) else [0, 0])
    return {
        "rows": n,
        "before": before.shape[1],
        "spans": spans,
        "seen": [np.flatnonzero(row).tolist() for row in among],
        "left": len(seen) - n,
    }
