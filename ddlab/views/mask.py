"""What each node of a round could see, derived from the tree's parents; the committed text is one band."""

from __future__ import annotations

import numpy as np

from ddlab import tokens
from ddlab.step import Step
from ddlab.trace import Trace
from ddlab.views.data import run_data
from ddlab.views.page import View, escape, figure, label, notes, shorten, svg

CELL, BAND = 11, 46  # pixels of a node and of the committed band


def height(step: Step) -> int:
    """Pixels of the picture and what stands around it."""
    return 290 + CELL * min(len(step.tree), 56)


def mask_view(trace: Trace, round: int) -> View:
    """Rows are nodes, columns what they attend to. The element mask, never a kernel's block form of it."""
    step, (note_text, note_html) = trace.steps[round], notes(trace)
    seen = step.tree.ancestors()  # bool [n, n]
    said = [
        f"Round {step.index}: the root and {len(seen) - 1} drafts on {step.start} committed tokens, which "
        f"every node sees. Of the {seen.size} pairs of the tree block {int(seen.sum())} are visible."
    ]
    windows = sorted({int(w) for w in trace.header.get("pair", {}).get("windows", ()) if w})
    if windows:
        sizes = ", ".join(map(str, windows))
        said.append(f"Sliding-window layers see the last {sizes} positions only, counted by position.")
    lines = []
    for node, row in enumerate(seen):
        cells = "".join("█" if visible else "·" for visible in row)
        name = tokens.show(int(step.tree.tokens[node]), trace.token_text)
        lines.append(f"{node:>4} {'✓' if node in step.path else ' '} ▒▒▒{cells} {name}")
    return View(
        title=f"mask of round {step.index}",
        text=note_text + "\n".join(said + lines),
        html=f"{note_html}<p>{escape(' '.join(said))}</p>{mask_html(trace, round)}",
        height=height(step),
        run=run_data(trace, [round]),
        panels=("mask",),
    )


def mask_html(trace: Trace, round: int) -> str:
    """The picture alone, for a page that says the rest."""
    step = trace.steps[round]
    seen, path = step.tree.ancestors(), set(step.path)
    n, left = len(seen), BAND + 3
    right, bottom = left + n * CELL, n * CELL
    taken: list[str] = []
    others: list[str] = []
    for i, j in zip(*np.nonzero(seen), strict=True):
        cell = f"M{left + j * CELL} {i * CELL}h{CELL - 1}v{CELL - 1}h-{CELL - 1}z"
        (taken if int(i) in path else others).append(cell)
    names = (tokens.show(int(token), trace.token_text) for token in step.tree.tokens)
    body = [
        f'<rect width="{BAND}" height="{bottom}" fill="var(--root)" opacity=".28"/>',
        label(BAND / 2, max(9, bottom / 2 + 4), step.start, "mid"),
        f'<rect x="{left}" width="{n * CELL}" height="{bottom}" fill="none" stroke="var(--line)"/>',
        f'<path d="{"".join(others)}" fill="var(--soft)"/>',
        f'<path d="{"".join(taken)}" fill="var(--accepted)"/>',
        '<g class="small">',
        *(
            label(right + 7, i * CELL + 9, f"{i} {shorten(name)}", "on" if i in path else "")
            for i, name in enumerate(names)
        ),
        "</g>",
    ]
    caption = (
        "A row a node, the root first. Left band: the committed tokens (their number). Cells: the nodes that "
        "it sees; coloured, and its name bold, on the accepted path."
    )
    return figure(svg(right + 130, bottom + 1, "attention mask of the round", "".join(body)), caption)
