"""A trace as the front end reads it: arrays by node, tokens as places in one table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddlab import tokens
from ddlab.step import Step
from ddlab.tokens import Token
from ddlab.trace import Trace
from ddlab.views.pieces import pieces, readable

KINDS = ("prompt", "first", "draft", "bonus")  # of a piece of the text, by number


def run_data(trace: Trace, rounds: Sequence[int] | None = None) -> dict[str, Any]:
    """What an inspector shows of a run, or of some of its rounds; then without the text.

    `tokens`: [id, label] each, and the bytes in hexadecimal (None: there are none) where they are not those of the
    label with ␣ as a space. Every other token is a place in this list. `rounds`: one dict each, arrays by node.
    `text`: [kind, round or -1, token, text or None where only a label can show it].
    """
    table = TokenTable(trace.token_text)
    steps = trace.steps if rounds is None else [trace.steps[number] for number in rounds]
    shown = pieces(trace) if rounds is None else []
    return {
        "text": [
            [
                KINDS.index(piece.kind),
                -1 if piece.round is None else piece.round,
                table[piece.id],
                piece.text if readable(piece.text) else None,
            ]
            for piece in shown
        ],
        "rounds": [_round(step, table) for step in steps],
        "tokens": table.rows,
        "layers": layers(trace),
        "notes": trace.warnings,
    }


class TokenTable:
    """Places of token ids, handed out as they are met."""

    def __init__(self, known: Mapping[int, Token]):
        self._text = known
        self._places: dict[int, int] = {}
        self.rows: list[list[Any]] = []

    def __getitem__(self, token: int) -> int:
        if token not in self._places:
            known = self._text.get(token)
            label = tokens.show(token, self._text)
            raw = None if known is None or known.raw is None else known.raw
            self._places[token] = len(self.rows)
            self.rows.append([token, label])
            if raw != label.replace("␣", " ").encode():
                self.rows[-1].append(None if raw is None else raw.hex())
        return self._places[token]

    def all(self, ids: Iterable[int]) -> list[int]:
        return [self[int(token)] for token in ids]


def _round(step: Step, table: TokenTable) -> dict[str, Any]:
    tree = step.tree
    return {
        "index": step.index,
        "start": step.start,
        "parents": tree.parents.tolist(),
        "tokens": table.all(tree.tokens),
        "log_prob": _numbers(tree.log_prob),
        "rank": tree.rank.tolist(),
        "choice": table.all(step.target_choice),
        "choice_log_prob": _numbers(step.target_log_prob),
        "margin": _numbers(step.margin),
        "node_log_prob": _numbers(step.node_log_prob),
        "path": list(step.path),
        "bonus": None if step.bonus is None else table[step.bonus],
        "stop": step.stop_reason,
        "edited": list(step.edited),
        "best": [table.all(row) for row in step.draft_ids],
        "best_log_prob": [_numbers(row) for row in step.draft_log_probs],
    }


def _numbers(values: Any) -> list[float | None]:
    """Four decimals are more than a picture shows; what is no number becomes null."""
    return [round(value, 4) if math.isfinite(value) else None for value in map(float, values)]


def layers(trace: Trace) -> list[dict[str, Any]]:
    """The target's kinds of layers: `window` in positions or None, `seen` whether the kind has a mask at all."""
    pair = trace.header.get("pair", {})
    types = list(pair.get("layer_types") or ["full_attention"])
    windows = list(pair.get("windows") or [None] * len(types))
    counts: dict[tuple[str, int | None], int] = {}
    for kind, window in zip(types, windows, strict=False):
        key = (kind, int(window) if window else None)
        counts[key] = counts.get(key, 0) + 1
    said: list[dict[str, Any]] = []
    for (kind, window), count in sorted(counts.items(), key=lambda item: (item[0][1] or 0, item[0][0])):
        several = f"{count} layer{'s' if count != 1 else ''}"
        if kind == "linear_attention":
            flattened = trace.settings.get("linear_state") == "flattened"
            said.append({"name": f"{several}: {_LINEAR[flattened]}", "window": None, "seen": False})
        elif window is None:
            said.append({"name": f"full attention, {several}", "window": None, "seen": True})
        else:
            said.append({"name": f"sliding window of {window}, {several}", "window": window, "seen": True})
    return said


_LINEAR = {
    False: "linear attention has no mask. Each node goes on from its parent's state, so it rests on the same nodes.",
    True: "linear attention, flattened on purpose: each node went on from the row before it, whatever its parent.",
}
