"""Runs of one prompt over one another, aligned by position: where they part, and in which round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ddlab.trace import Trace
from ddlab.views.page import View, escape, shorten, token
from ddlab.views.path import TINTS
from ddlab.views.pieces import Piece, pieces
from ddlab.views.summary import names

COLUMNS = 400  # new tokens of a run that are shown; the inspector has them all


def aligned_view(traces: Sequence[Trace], runs: Sequence[str] = ()) -> View:
    """New tokens of every run, a column a position, tinted by round; what differs is marked.

    Runs are compared where they read the same prompt, with plain decoding if it is among them, else with the first.
    `runs`: names of their inspectors on the page, to which the tokens lead.
    """
    text, html = [], []
    for group in _groups(traces, runs or [""] * len(traces)):
        rows = [Row(name, trace, _new(trace), run) for name, trace, run in group]
        base = next((row for row in rows if row.trace.method == "ar"), rows[0])
        said = [_difference(row, base) for row in rows if row is not base]
        text += said
        html += [f'<p class="{"bad" if ": parts from" in line else "few"}">{escape(line)}</p>' for line in said]
        html.append(_table(rows, base))
    return View(
        "runs by position", "\n".join(text) or "no two runs of one prompt", "".join(html), height=160 + 40 * len(traces)
    )


class Row(NamedTuple):
    name: str
    trace: Trace
    pieces: list[Piece]
    run: str


def _groups(traces: Sequence[Trace], runs: Sequence[str]) -> list[list[tuple[str, Trace, str]]]:
    groups: list[list[tuple[str, Trace, str]]] = []
    for name, trace, run in zip(names(traces), traces, runs, strict=True):
        known = next((group for group in groups if group[0][1].prompt_ids == trace.prompt_ids), None)
        if known is None:
            groups.append([(name, trace, run)])
        else:
            known.append((name, trace, run))
    return [group for group in groups if len(group) > 1]


def _new(trace: Trace) -> list[Piece]:
    return [piece for piece in pieces(trace) if piece.kind != "prompt"]


def first_difference(mine: Sequence[Piece], other: Sequence[Piece]) -> int | None:
    """The place of the first new token that differs, None where one text begins with the other."""
    both = enumerate(zip(mine, other, strict=False))
    return next((place for place, (a, b) in both if a.id != b.id), None)


def _difference(row: Row, base: Row) -> str:
    name, trace, mine = row.name, row.trace, row.pieces
    other, its = base.name, base.pieces
    place = first_difference(mine, its)
    if place is None:
        shorter = min(len(mine), len(its))
        more = "" if len(mine) == len(its) else f", of {len(mine)} here and {len(its)} there"
        return f"{name}: the same {shorter} tokens as {other}{more}"
    piece, position = mine[place], len(trace.prompt_ids) + place
    where = f"token {place + 1}, position {position}"
    where += "" if piece.round is None else f", round {piece.round}"
    role = {"draft": "an accepted draft", "bonus": "the target's own token there"}.get(piece.kind, "the first token")
    return f"{name}: parts from {other} at {where}: {piece.label}, {role}, instead of {its[place].label}"


def _table(rows: Sequence[Row], base: Row) -> str:
    count = min(COLUMNS, max(len(row.pieces) for row in rows))
    start = len(base.trace.prompt_ids)
    head = "".join(f"<td>{start + i}</td>" if i % 10 == 0 else "<td></td>" for i in range(count))
    body = []
    for row in rows:
        parts = first_difference(row.pieces, base.pieces)
        places = range(min(count, len(row.pieces)))
        cells = "".join(_cell(row, place, parts is not None and place >= parts) for place in places)
        body.append(f'<tr><th scope="row">{escape(row.name)}</th>{cells}</tr>')
    left = f'<p class="soft">The first {COLUMNS} new tokens.</p>' if count == COLUMNS else ""
    said = "A column a position. A line on the left begins a round. Struck through from where a run parts."
    top = f'<thead><tr><th scope="col">position</th>{head}</tr></thead>'
    table = f'<table class="aligned">{top}<tbody>{"".join(body)}</tbody></table>'
    return f'<div class="scroll">{table}</div>{left}<p class="soft">{said}</p>'


def _cell(row: Row, place: int, apart: bool) -> str:
    piece, before = row.pieces[place], row.pieces[place - 1] if place else None
    begins = piece.round is not None and (before is None or before.round != piece.round)
    tint = "" if piece.round is None else f"t{piece.round % TINTS}"
    style = " ".join(filter(None, (tint, "begins" if begins else "", "apart" if apart else "")))
    tip = piece.kind if piece.round is None else f"round {piece.round}, {piece.kind}"
    leads = row.run and piece.round is not None and row.trace.method != "ar"
    link = f' data-goto="{row.run}" data-number="{piece.round}"' if leads else ""
    return f'<td class="{style}" title="{tip}"{link}>{token(shorten(piece.label, 14), piece.kind[0])}</td>'
