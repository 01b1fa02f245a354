"""A whole run, round by round: as text, as a static list, and as an inspector."""

from __future__ import annotations

from ddlab import tokens
from ddlab.trace import Trace
from ddlab.views import mask, path, tree
from ddlab.views.acceptance import describe
from ddlab.views.data import run_data
from ddlab.views.page import View, escape, notes, token
from ddlab.views.tree import tree_view

NODES_DRAWN = 8000  # in a static list; later rounds keep their line, but not their tree: nobody reads 100 MB
NODES_IN_A_CELL = 20000  # of a notebook


def rounds_view(trace: Trace, round: int = 0) -> View:
    """Text, tree and mask of every round in one layout, as the widget has them; begins with `round`.

    Of a very long run only the rounds around it, so that a cell stays small: a report holds them all.
    """
    chosen = range(trace.rounds)
    number = chosen[round] if chosen else 0  # IndexError for an unknown one; -1 is the last
    while len(chosen) > 1 and sum(len(trace.steps[i].tree) for i in chosen) > NODES_IN_A_CELL:
        chosen = chosen[1:] if number - chosen[0] > chosen[-1] - number else chosen[:-1]
    text = trace_text(trace)
    run = run_data(trace, None if len(chosen) == trace.rounds else chosen)
    if len(chosen) < trace.rounds:
        run["notes"] = [*run["notes"], f"Rounds {chosen[0]} to {chosen[-1]} of {trace.rounds}; a report has them all."]
    return View(
        title=f"rounds ({trace.method})",
        text=text,
        html=f"{path.LEGEND}{path.text_html(trace)}<pre>{escape(text)}</pre>",
        height=40 + max((tree.height(step) + mask.height(step) for step in trace.steps), default=400),
        run=run,
        round=number - chosen[0] if chosen else 0,
    )


def run_html(trace: Trace) -> str:
    """Text and rounds without a script: a line a round that opens on its tree and mask."""
    parts = [notes(trace)[1], path.LEGEND, path.text_html(trace), tree.LEGEND]
    drawn = 0
    for step in trace.steps:
        drawn += len(step.tree)
        parts.append(_opening(trace, step.index, drawn <= NODES_DRAWN))
    if drawn > NODES_DRAWN:
        parts.append(f'<p class="soft">Trees are drawn up to {NODES_DRAWN} nodes a run; the trace holds them all.</p>')
    return "".join(parts)


def _opening(trace: Trace, number: int, draw: bool) -> str:
    step = trace.steps[number]
    flags = [f"edited: {', '.join(step.edited)}"] if step.edited else []
    flags += ["flattened"] if trace.settings.get("linear_state") == "flattened" else []
    flag = "".join(f' <span class="bad">{escape(said)}</span>' for said in flags)
    counts = (f"position {step.start}", f"{len(step.tree) - 1} drafted", f"{step.accepted} accepted")
    line = f"<b>{number}</b>{''.join(f'<span>{count}</span>' for count in counts)}"
    line += f"<span>{len(step.emitted)} new</span><span>{step.stop_reason}</span>"
    line = f'<summary class="round">{line}<span>{round_html(trace, number)}{flag}</span></summary>'
    if not draw:
        return f"<details>{line}</details>"
    seen = f"<summary>what each node could see</summary><div>{mask.mask_html(trace, number)}</div>"
    return f"<details>{line}<div>{tree.tree_html(trace, number)}<details>{seen}</details></div></details>"


def trace_text(trace: Trace, *, trees: bool = False) -> str:
    """Settings, prompt, every round with its tokens and its end, the counts and the text."""
    lines = head_lines(trace)
    for step in trace.steps:
        lines.append(round_text(trace, step.index))
        if trees:
            lines += [f"    {line}" for line in tree_view(trace, step.index).text.splitlines()]
    return "\n".join([*lines, *tail_lines(trace)])


def head_lines(trace: Trace) -> list[str]:
    """What a run is, before its rounds; ends with the head of the table of rounds."""
    settings, budget = trace.settings, trace.settings.get("budget")
    parts = [trace.method, *([f"budget {budget}"] if budget is not None else [])]
    parts.append(str(trace.header.get("pair", {}).get("name") or "unnamed pair"))
    parts.append(f"temperature {settings.get('temperature', '?')}, seed {settings.get('seed', '?')}")
    prompt = "".join(tokens.show(id, trace.token_text) for id in trace.prompt_ids)
    lines = [
        *notes(trace)[0].splitlines(),
        " · ".join(parts),
        f"prompt ({len(trace.prompt_ids)} tokens): {prompt}",
    ]
    if trace.first_token is not None:
        first = tokens.show(trace.first_token, trace.token_text)
        lines.append(f"first token, from the prompt's forward: {first}")
    return [
        *lines,
        "",
        "round  position  drafted  accepted  new  stop        drafts, then [the target's own]",
    ]


def tail_lines(trace: Trace) -> list[str]:
    """What came of it, after the rounds; ends with the text."""
    counts = [describe(trace.accepted_drafts), describe(trace.tokens_per_round)]
    end = f"{len(trace.output_ids)} new tokens, {trace.finished or 'not finished'}"
    return ["", *counts, end, "", tokens.printable(trace.text)]


def round_text(trace: Trace, round: int) -> str:
    """One line: counts, stop reason, and every token that the round added."""
    step = trace.steps[round]
    labels = [tokens.show(id, trace.token_text) for id in step.emitted]
    shown = [*labels[: step.accepted], *(f"[{label}]" for label in labels[step.accepted :])]
    drafted, new = len(step.tree) - 1, len(step.emitted)
    counts = f"{step.index:>5}  {step.start:>8}  {drafted:>7}  {step.accepted:>8}  {new:>3}"
    edited = f"  (edited: {', '.join(step.edited)})" if step.edited else ""
    return f"{counts}  {step.stop_reason:<10}  {' '.join(shown)}{edited}"


def round_html(trace: Trace, round: int) -> str:
    """The tokens that a round added, drafts plain and the target's own in brackets."""
    step = trace.steps[round]
    labels = [tokens.show(id, trace.token_text) for id in step.emitted]
    return " ".join(token(f"[{x}]" if place >= step.accepted else x) for place, x in enumerate(labels))
