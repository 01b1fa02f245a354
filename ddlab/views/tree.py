"""The tree of one round: what was drafted, how likely both models held it, which path was taken."""

from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass

import numpy as np

from ddlab import tokens
from ddlab.step import Step
from ddlab.trace import Trace
from ddlab.views.data import run_data
from ddlab.views.page import View, escape, label, notes, shorten, svg, token

COLUMN, ROW = 92, 17  # pixels of a depth and of a leaf in the picture


@dataclass(frozen=True)
class Node:
    """A row of the tree view. Probabilities are None where they are unknown."""

    node: int
    depth: int
    label: str
    draft_prob: float | None  # of the token at its depth: a drafter has one distribution a depth, whatever the path
    path_prob: float | None  # product of those from the root
    rank: int | None  # among the drafter's tokens at that depth, 0 = first
    target_prob: float | None  # the target's, after the node's parent
    mark: str  # "root" | "accepted" | "" | "missed": the target would choose it there, but the path never came
    children: tuple[int, ...]


def nodes(step: Step, trace: Trace) -> list[Node]:
    """Every node of a round's tree, in the tree's order; of its children one on the path comes first."""
    tree, path, out = step.tree, set(step.path), []
    for node in range(len(tree)):
        parent = int(tree.parents[node])
        chosen = parent >= 0 and int(step.target_choice[parent]) == int(tree.tokens[node])
        children = sorted(map(int, tree.children(node)), key=lambda child: (child not in path, child))
        out.append(
            Node(
                node=node,
                depth=int(tree.depth[node]),
                label=tokens.show(int(tree.tokens[node]), trace.token_text),
                draft_prob=_prob(float(tree.log_prob[node]) - float(tree.log_prob[parent])) if node else None,
                path_prob=_prob(tree.log_prob[node]) if node else None,
                rank=int(tree.rank[node]) if tree.rank[node] >= 0 else None,
                target_prob=_prob(step.node_log_prob[node]) if node else None,
                mark="root" if not node else "accepted" if node in path else "missed" if chosen else "",
                children=tuple(children),
            )
        )
    return out


def outcome(step: Step, trace: Trace) -> str:
    """Why the path ended, in words, with the target's own token there."""
    end = step.path[-1]
    choice = tokens.show(int(step.target_choice[end]), trace.token_text)
    prob = _percent(_prob(step.target_log_prob[end]))
    if step.bonus is None:
        what = "a stop token was accepted" if step.stop_reason == "stop_token" else "the length was reached"
        return f"{step.stop_reason}: {what}, nothing comes after it"
    why = {
        "mismatch": "was not drafted here",
        "exhausted": "comes after a leaf" if len(step.tree) > 1 else "comes next: nothing was drafted",
        "stop_token": "ends the text",
        "length": "is the last token asked for",
        "edited": "came after a hook had ended the round",
    }.get(step.stop_reason, "")
    near = near_miss(step, trace, end) if step.stop_reason in ("mismatch", "exhausted") else ""
    said = f"{step.stop_reason}: the target's own {choice} ({prob}, margin {step.margin[end]:.2f}) {why}"
    return f"{said}; {near}" if near else said


def near_miss(step: Step, trace: Trace, node: int) -> str:
    """Why the target's choice after `node` was not drafted there, as far as the draft can tell; "" if it was.

    Drafted below another parent; or ranked by the drafter at that depth, with the score its path would have had
    beside that of the last node that the budget had room for; or beyond the depth of the draft.
    """
    tree, choice, depth, best = step.tree, int(step.target_choice[node]), int(step.tree.depth[node]), step.draft_ids
    same = (tree.tokens == choice) & (tree.depth == depth + 1)  # bool [n]
    if np.any(same & (tree.parents == node)) or not len(best):
        return ""
    if depth >= len(best):
        return f"the draft ended at depth {len(best)}"
    said, others = [], np.flatnonzero(same).tolist()
    if others:
        parents = [f"{tokens.show(int(tree.tokens[tree.parents[i]]), trace.token_text)} (node {i})" for i in others]
        said.append(f"drafted after {', '.join(parents[:3])}{', …' if len(parents) > 3 else ''} instead")
    ranks = np.flatnonzero(best[depth] == choice).tolist()
    if ranks:
        log_prob, last = float(step.draft_log_probs[depth, ranks[0]]), float(tree.log_prob[-1])
        score = float(tree.log_prob[node]) + log_prob
        here = f"the drafter's #{ranks[0] + 1} at depth {depth + 1} ({_percent(_prob(log_prob))})"
        known = len(tree) > 1 and not math.isnan(score + last)
        said.append(f"{here}: path {score:.2f}, the last node drafted has {last:.2f}" if known else here)
    elif not others:
        said.append(f"not among the drafter's first {best.shape[1]} at depth {depth + 1}")
    return "; ".join(said)


def heading(step: Step) -> str:
    drafted, accepted = len(step.tree) - 1, step.accepted
    counts = (
        f"{drafted} drafted, {accepted} accepted + bonus"
        if step.bonus is not None
        else f"{drafted} drafted, {accepted} accepted"
    )
    return f"round {step.index}, root at position {step.start}: {counts} = {len(step.emitted)} new tokens"


def height(step: Step) -> int:
    """Pixels of the picture and what stands around it: a row for each leaf, in a box that scrolls beyond 540."""
    leaves = len(step.tree) - len(set(step.tree.parents.tolist()) - {-1})
    return max(430, 290 + min(540, 30 * (leaves + 1)))


def tree_view(trace: Trace, round: int) -> View:
    """The tree of a round as a nested list and, in HTML, as a picture; IndexError for an unknown round."""
    step, (note_text, note_html) = trace.steps[round], notes(trace)
    rows = nodes(step, trace)
    said = f"{heading(step)}\n{outcome(step, trace)}"
    edited = f"\nedited by a hook: {', '.join(step.edited)}" if step.edited else ""
    return View(
        title=f"tree of round {step.index}",
        text="\n".join([f"{note_text}{said}{edited}", *_text_lines(step, rows, trace)]),
        html=f"{note_html}<p>{escape(heading(step))}{escape(edited)}</p>{LEGEND}{tree_html(trace, round)}",
        height=height(step),
        run=run_data(trace, [round]),
        panels=("tree",),
    )


def tree_html(trace: Trace, round: int) -> str:
    """Outcome, picture and list of one round, for a page that has the legend already."""
    step = trace.steps[round]
    rows = nodes(step, trace)
    picture = _picture(step, rows, trace) if len(rows) > 1 else ""
    nested = _nested_list(step, rows, trace)
    listed = f"<details><summary>every node, as a list</summary><div>{nested}</div></details>"
    return f'<p class="wide">{escape(outcome(step, trace))}</p>{picture}{listed}'


# ---- text --------------------------------------------------------------------------------------

_MARKS = {"root": "◆", "accepted": "✓", "missed": "=", "": "·"}


def _text_lines(step: Step, rows: list[Node], trace: Trace) -> list[str]:
    lines: list[tuple[str, str]] = []

    def walk(node: Node, lead: str, branch: str) -> None:
        numbers = "" if node.mark == "root" else _numbers(node)
        lines.append((f"{lead}{branch}{_MARKS[node.mark]} {node.label}", numbers))
        below = lead + ("" if not branch else "│ " if branch == "├─" else "  ")
        if step.bonus is not None and node.node == step.path[-1]:
            said = f"{'':16} target {_percent(_prob(step.target_log_prob[node.node])):>5}  the target's own"
            tail = "├─" if node.children else "└─"
            lines.append((f"{below}{tail}→ {tokens.show(step.bonus, trace.token_text)}", said))
        for position, child in enumerate(node.children):
            walk(rows[child], below, "└─" if position == len(node.children) - 1 else "├─")

    walk(rows[0], "", "")
    width = min(max(_width(left) for left, _ in lines), 72)
    return [f"{left}{' ' * (width - _width(left))}  {right}".rstrip() for left, right in lines]


def _numbers(node: Node) -> str:
    rank = "" if node.rank is None else f"#{node.rank + 1}"
    return f"draft {_percent(node.draft_prob):>5} {rank:<4} target {_percent(node.target_prob):>5}"


def _width(text: str) -> int:
    """Columns of a terminal: wide characters take two, accents none."""
    widths = (2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text if not unicodedata.combining(c))
    return sum(widths)


# ---- HTML --------------------------------------------------------------------------------------


def _nested_list(step: Step, rows: list[Node], trace: Trace) -> str:
    classes = {"root": "", "accepted": "yes", "missed": "late", "": ""}

    def line(style: str, mark: str, name: str, numbers: str) -> str:
        opened = f'<div class="{style}">' if style else "<div>"
        return f'{opened}<i>{mark}</i>{token(name)}<span class="num">{numbers}</span></div>'

    def item(node: Node) -> str:
        numbers = "root" if node.mark == "root" else escape(_numbers(node))
        inner = [item(rows[child]) for child in node.children]
        if step.bonus is not None and node.node == step.path[-1]:
            prob = escape(_percent(_prob(step.target_log_prob[node.node])))
            own = tokens.show(step.bonus, trace.token_text)
            inner.insert(0, f"<li>{line('out', '→', own, f'the target&#x27;s own  target {prob:>5}')}</li>")
        below = f"<ul>{''.join(inner)}</ul>" if inner else ""
        return f"<li>{line(classes[node.mark], _MARKS[node.mark], node.label, numbers)}{below}</li>"

    return f'<ul class="tree">{item(rows[0])}</ul>'


def _picture(step: Step, rows: list[Node], trace: Trace) -> str:
    """Depth to the right, one row a leaf; the accepted path runs straight along the top."""
    place: dict[int, tuple[int, int]] = {}
    next_row = 0

    def put(node: Node) -> None:
        nonlocal next_row
        row = next_row
        place[node.node] = (node.depth, row)
        if step.bonus is not None and node.node == step.path[-1]:
            place[_OWN] = (node.depth + 1, row)  # the target's own token goes straight on
            next_row += 1
        for child in node.children:
            put(rows[child])
        next_row = max(next_row, row + 1)

    put(rows[0])
    parents = {node.node: int(step.tree.parents[node.node]) for node in rows} | {_OWN: step.path[-1]}
    edges, marks = [], []
    for node, (depth, row) in place.items():
        x, y = 10 + depth * COLUMN, 20 + row * ROW
        mark = "bonus" if node == _OWN else rows[node].mark
        if node != 0:
            from_depth, from_row = place[parents[node]]
            bend = f"M{10 + from_depth * COLUMN} {20 + from_row * ROW}"
            bend += f"H{x}" if from_row == row else f"V{y - 5}q0 5 5 5H{x}"
            edges.append(f'<path d="{bend}"{_EDGES.get(mark, "")}/>')
        if node == _OWN:
            name, tip = tokens.show(step.bonus or 0, trace.token_text), "the target's own token"
        else:
            name, tip = rows[node].label, _tip(rows[node])
        taken = mark in ("root", "accepted", "bonus")
        marks.append(_shape(mark, x, y))
        marks.append(label(x + 7, y - 4, shorten(name), "on" if taken else "", f"{name}  {tip}"))
    width = 24 + (max(depth for depth, _ in place.values()) + 1) * COLUMN
    height = 14 + ROW * (1 + max(row for _, row in place.values()))
    body = f'<g fill="none" stroke="var(--edge)">{"".join(edges)}</g>{"".join(marks)}'
    return f'<div class="scroll">{svg(width, height, heading(step), body)}</div>'


_OWN = -1  # the place of the target's own token, which is no node
_EDGES = {
    "accepted": ' stroke="var(--accepted)" stroke-width="2.5"',
    "bonus": ' stroke="var(--bonus)" stroke-width="2.5" stroke-dasharray="3 3"',
}


def _shape(mark: str, x: int, y: int) -> str:
    """A shape per role, so that the picture reads without colour."""
    if mark == "root":
        return f'<path d="M{x} {y - 5}l5 5-5 5-5-5z" fill="var(--root)"/>'
    if mark == "accepted":
        return f'<circle cx="{x}" cy="{y}" r="4.5" fill="var(--accepted)"/>'
    if mark == "bonus":
        return f'<rect x="{x - 4}" y="{y - 4}" width="8" height="8" fill="var(--bonus)"/>'
    if mark == "missed":
        ring = 'r="3" fill="var(--page)" stroke="var(--missed)" stroke-width="2.5"'
    else:
        ring = 'r="2.5" fill="var(--page)" stroke="var(--soft)"'
    return f'<circle cx="{x}" cy="{y}" {ring}/>'


def _legend() -> str:
    entries = {
        "root": "root: the last committed token",
        "accepted": "accepted draft",
        "bonus": "the target's own token",
        "": "draft, not taken",
        "missed": "what the target would choose there, but the path never came",
    }
    shown = (
        f'<span><svg width="12" height="12">{_shape(mark, 6, 6)}</svg>{said}</span>' for mark, said in entries.items()
    )
    return f'<div class="legend">{"".join(shown)}</div>'


def _tip(node: Node) -> str:
    if node.mark == "root":
        return "root"
    path = _percent(node.path_prob)
    return f"depth {node.depth}, {_numbers(node)}, path {path} (product of per-depth marginals)"


def _prob(log_prob: float) -> float | None:
    return None if math.isnan(log_prob) else math.exp(log_prob)


def _percent(prob: float | None) -> str:
    if prob is None:
        return "?"
    return f"{prob:.1%}" if prob >= 0.001 or prob == 0 else "<0.1%"


LEGEND = _legend()
