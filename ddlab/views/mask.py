"""What each node of a round could see, derived from the tree's parents; the committed text is one band."""

from __future__ import annotations

import numpy as np

from ddlab import tokens
from ddlab.trace import Trace
from ddlab.views.page import View, escape, notes, shorten

CELL, BAND = 11, 46  # pixels of a node and of the committed band
BOLD = ' font-weight="700"'


def mask_view(trace: Trace, round: int) -> View:
    """Rows are nodes, columns what they attend to. The element mask, never a kernel's block form of it."""
    step, (note_text, note_html) = trace.steps[round], notes(trace)
    seen = step.tree.ancestors()  # bool [n, n]
    labels = [tokens.show(int(token), trace.token_text) for token in step.tree.tokens]
    said = (
        f"round {step.index}: {len(seen)} rows (root and {len(seen) - 1} drafts) on {step.start} committed tokens. "
        f"{int(seen.sum())} of {seen.size} pairs of the tree block are visible, and every node sees the committed text."
    )
    window = _window(trace)
    lines = [said, *([window] if window else [])]
    for node, row in enumerate(seen):
        cells = "".join("█" if visible else "·" for visible in row)
        lines.append(f"{node:>4} {'✓' if node in step.path else ' '} ▒▒▒{cells} {labels[node]}")
    text = note_text + "\n".join(lines)
    top = f"<p>{escape(said)} {escape(window)}</p>"
    html = note_html + top + _picture(step.start, seen, set(step.path), labels)
    return View(f"mask of round {step.index}", text, html, height=190 + CELL * len(seen))


def mask_html(trace: Trace, round: int) -> str:
    """The picture alone, for a page that says the rest."""
    step = trace.steps[round]
    labels = [tokens.show(int(token), trace.token_text) for token in step.tree.tokens]
    return _picture(step.start, step.tree.ancestors(), set(step.path), labels)


def _window(trace: Trace) -> str:
    windows = sorted({int(w) for w in trace.header.get("pair", {}).get("windows", ()) if w})
    if not windows:
        return ""
    sizes = ", ".join(map(str, windows))
    return (
        f"Sliding-window layers see the last {sizes} positions only, counted by position and not by column."
    )


def _picture(committed: int, seen: np.ndarray, path: set[int], labels: list[str]) -> str:
    n, left = len(seen), BAND + 3
    accepted, others = [], []
    for i, j in zip(*np.nonzero(seen), strict=True):
        on_path = int(i) in path and int(j) in path
        (accepted if on_path else others).append(
            f"M{left + j * CELL} {i * CELL}h{CELL - 1}v{CELL - 1}h-{CELL - 1}z"
        )
    names = "".join(
        f'<text x="{left + n * CELL + 7}" y="{i * CELL + 9}"{BOLD if i in path else ""}>{i} {escape(shorten(label))}</text>'
        for i, label in enumerate(labels)
    )
    return (
        f'<figure><div class="scroll"><svg width="{left + n * CELL + 130}" height="{n * CELL + 1}" role="img" '
        f'aria-label="attention mask of the round">'
        f'<rect width="{BAND}" height="{n * CELL - 1}" fill="var(--root)" opacity=".28"/>'
        f'<text x="{BAND / 2}" y="{max(11, n * CELL / 2 + 4):.0f}" text-anchor="middle">{committed}</text>'
        f'<rect x="{left}" width="{n * CELL}" height="{n * CELL}" fill="none" stroke="var(--line)"/>'
        f'<path d="{"".join(others)}" fill="var(--soft)"/><path d="{"".join(accepted)}" fill="var(--accepted)"/><g class="small">{names}</g>'
        f"</svg></div><figcaption>Rows: nodes, root first. Left band: the committed tokens (their number), visible to every "
        f"row. Cells: what the node sees of the tree; coloured, and the name bold, on the accepted path.</figcaption></figure>"
    )
