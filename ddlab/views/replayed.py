"""A replay that moves: a page carries the drafts of a text and cuts it into the rounds of any budget by itself."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlab.costs.model import CostModel, predict
from ddlab.trace import ENOUGH_ROUNDS, Trace
from ddlab.views.data import TokenTable, layers
from ddlab.views.page import HIGHEST, View, columns, escape, notes, table
from ddlab.views.pieces import pieces, readable

if TYPE_CHECKING:
    from ddlab.replay import DenseDrafts, Replay  # they load torch, which a report does without

_GRID = 2.0**38  # log-probabilities are multiples of 1 / _GRID, see ddlab/tree.py
STOPS = ("mismatch", "exhausted", "stop_token", "length")
RAW = 63  # in the place of a shift: the row's log-probabilities stand in `raw`


def replay_view(trace: Trace, replayed: Replay, cost: CostModel | None = None) -> View:
    """The text under any budget, builder and depth limit: what the page is asked for, it builds and walks itself.

    Without a script, and as text: τ at the replay's budgets. With a cost model also the tokens per second that it
    predicts.
    """
    text, html = _fixed(trace, replayed, cost)
    return View(
        title=f"other budgets ({trace.method})",
        text=text,
        html=html,
        height=HIGHEST,
        replay=replay_data(trace, replayed, cost),
    )


HEAD = ("builder", "budget", "τ, tokens per round", "rounds", "new tokens", "nodes a round", *STOPS)


def _fixed(trace: Trace, replayed: Replay, cost: CostModel | None) -> tuple[str, str]:
    """What can be read without a script: a row for each builder and budget that the replay was made for."""
    head, rows = [*HEAD, *(["predicted tokens/s"] if cost else [])], []
    for row in replayed.rows():
        tau, drafted = row["tokens_per_round"], row["nodes_per_round"]
        cells = [row["builder"], "depth of the draft" if row["budget"] is None else str(row["budget"])]
        cells += ["no rounds" if tau is None else f"{tau:.2f}", str(row["rounds"]), str(row["new_tokens"])]
        cells += ["-" if drafted is None else f"{drafted:.1f}", *(str(row[stop]) for stop in STOPS)]
        rows.append([*cells, *([_predicted(replayed, cost, row["budget"], row["builder"])] if cost else [])])
    said = [f"One text of {len(trace.output_ids)} new tokens, cut into the rounds of other budgets."]
    said.append("Rounds are counted by the reason for which they ended.")
    if replayed.depth is not None:
        said.append(f"Only the first {replayed.depth} depths of each draft are used.")
    if any(row["rounds"] < ENOUGH_ROUNDS for row in replayed.rows()):
        said.append(f"Figures on fewer than {ENOUGH_ROUNDS} rounds are too few to rest on.")
    if cost:
        said.append(f"Seconds of a round: {cost_data(cost)['said']}.")
    (note_text, note_html), remarks = notes(trace), " ".join(said)
    shown = table(head, [map(escape, row) for row in rows], "figures")
    return f"{note_text}{remarks}\n\n{columns(head, rows)}", f'{note_html}<p class="soft">{escape(remarks)}</p>{shown}'


def _predicted(replayed: Replay, cost: CostModel, budget: int | None, builder: str) -> str:
    try:
        rate = predict(replayed, cost, budget, builder).tokens_per_second
    except ValueError:  # more rows than were measured
        return "not measured"
    return "-" if rate is None else f"{rate:.1f}"


# ---- what the page is given ----------------------------------------------------------------------


def replay_data(trace: Trace, replayed: Replay, cost: CostModel | None = None) -> dict[str, Any]:
    """A text and its drafts, for the front end; the trees that it builds are those of `DenseDrafts.tree`.

    `text`: [token, text or None where only a label can show it, log-probability and margin of the target's choice]
    each, tokens as places in `tokens`, the prompt's first. `drafts`: see `pack`.

    Raises ValueError where the replay is of another text than the trace's.
    """
    drafts = replayed.drafts
    if [*trace.prompt_ids, *trace.output_ids] != drafts.text.tolist():
        raise ValueError("this replay is of another text than the trace: ddlab.replay(pair, trace) makes its own")
    ids, counts = np.unique(drafts.ids, return_counts=True)
    places = TokenTable({**drafts.token_text, **trace.token_text})
    places.all(ids[np.argsort(-counts, kind="stable")])  # frequent ids get places of few digits
    chosen = _chosen(trace)
    return {
        "text": [
            [places[piece.id], piece.text if readable(piece.text) else None, *chosen.get(at, (None, None))]
            for at, piece in enumerate(pieces(trace))
        ],
        **drafts_data(drafts, places),
        "builder": "chain" if trace.method == "dflash" else "best_first",
        "budget": _first_budget(trace, replayed),
        "limit": replayed.depth,
        "cost": None if cost is None else cost_data(cost),
        "tokens": places.rows,
        "layers": layers(trace),
        "notes": trace.warnings,
    }


def drafts_data(drafts: DenseDrafts, places: TokenTable) -> dict[str, Any]:
    """What decides the rounds, beside the tokens of the text."""
    return {
        "prompt": drafts.prompt_length,
        "end": drafts.prompt_length + drafts.max_new_tokens,  # how long the text may become
        "stops": [int(token) for token in drafts.stop_token_ids],
        "positions": drafts.max_positions,
        "depth": drafts.ids.shape[1],
        "kept": drafts.ids.shape[2],
        "drafts": pack(drafts, places),
    }


def _first_budget(trace: Trace, replayed: Replay) -> int:
    """The trace's own where that can be answered, so that the page begins with the rounds that are known."""
    drafts, own = replayed.drafts, trace.settings.get("budget")
    if trace.method == "dflash":
        return drafts.ids.shape[1]
    most = max((b for b in replayed.budgets if b is not None), default=drafts.ids.shape[1])
    return int(own if own is not None and (drafts.complete or own <= drafts.ids.shape[2]) else most)


def _chosen(trace: Trace) -> dict[int, tuple[float | None, float | None]]:
    """By place in the text: the log-probability and the margin with which the target chose that token."""
    known: dict[int, tuple[float | None, float | None]] = {}
    for step in trace.steps:
        for place, node in enumerate(step.path[: len(step.emitted)]):
            numbers = float(step.target_log_prob[node]), float(step.margin[node])
            logprob, margin = (round(x, 4) if math.isfinite(x) else None for x in numbers)
            known[step.start + 1 + place] = logprob, margin
    return known


def cost_data(cost: CostModel) -> dict[str, Any]:
    """A cost model as the page computes with it: one table a phase of those that `seconds_of` counts."""
    known = cost.to_dict()
    counted = [phase for phase in known["seconds"] if phase != "record"]
    rounded = counted.index("verify") if cost.rounds_up else None  # which table takes the next size that was measured
    measured = f"mean of {cost.samples} rounds or more each" if cost.samples else "given, not measured"
    where = ", ".join(f"{name} {value}" for name, value in cost.source.items())
    return {name: known[name] for name in ("rows", "prefixes", "plain", "noise_seconds")} | {
        "seconds": [known["seconds"][phase] for phase in counted],
        "rounds_up": rounded,
        "said": f"{measured}; {where}",
    }


def pack(drafts: DenseDrafts, places: TokenTable) -> dict[str, Any]:
    """Candidates as varints in base64, without loss: trees depend on the last bit of a log-probability.

    For each position and each depth it has: how many candidates are not -inf, their places in the table, and their
    log-probabilities. These are multiples of 2**-38, so integers, and never rise along a row: stored are the first and
    the steps down, divided by the power of two (the *shift*) that all steps of the row share. Logits in float32 or less
    have few bits below it, so a candidate takes about five bytes. A row of other numbers goes into `raw`, as float64.
    """
    tokens: list[np.ndarray] = []
    numbers: list[np.ndarray] = []
    raw: list[np.ndarray] = []
    place = {int(token): places[int(token)] for token in np.unique(drafts.ids)}
    for ids, log_probs, depth in zip(drafts.ids, drafts.log_probs, drafts.depths.tolist(), strict=True):
        for row, scores in zip(ids[:depth], log_probs[:depth], strict=True):
            n = int(np.count_nonzero(scores > -np.inf))
            tokens.append(np.array([n, *(place[token] for token in row[:n].tolist())], np.int64))
            units = _units(scores[:n])
            if units is None:
                raw.append(scores[:n])
                numbers.append(np.array([RAW], np.int64))
            elif n:
                numbers.append(units)
    return {
        "depths": drafts.depths.tolist(),
        "tokens": _varints(tokens),
        "numbers": _varints(numbers),
        "raw": _base64(np.concatenate(raw).astype("<f8").tobytes() if raw else b""),
    }


def _units(scores: np.ndarray) -> np.ndarray | None:
    """shift, the first as an integer, then the steps down without the bits they share; None: not such numbers."""
    scaled = -scores * _GRID
    if not scores.size or scaled[0] < 0 or scaled[-1] >= 2**53 or np.any(scaled != np.rint(scaled)):
        return None if scores.size else np.zeros(0, np.int64)
    units = scaled.astype(np.int64)
    steps = np.diff(units)
    if np.any(steps < 0):
        return None
    shared = int(np.bitwise_or.reduce(steps)) if steps.any() else 0
    shift = (shared & -shared).bit_length() - 1 if shared else 0
    return np.concatenate([[shift, units[0]], steps >> shift])


def _varints(parts: Sequence[np.ndarray]) -> str:
    """Integers of 0 and more, seven bits a byte from the lowest, the highest bit set where more follow; in base64."""
    values = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    columns = [values]
    while np.any(columns[-1] >> 7):
        columns.append(columns[-1] >> 7)
    stacked = np.stack(columns, 1)  # [values, bytes]: what is left of each value
    digits = (stacked & 127) | ((stacked > 127) << 7)
    used = (stacked > 0) | (np.arange(len(columns)) == 0)
    return _base64(digits[used].astype(np.uint8).tobytes())


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
