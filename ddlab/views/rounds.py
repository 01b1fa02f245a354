"""A whole run as text, round by round."""

from __future__ import annotations

from ddlab import tokens
from ddlab.trace import Trace
from ddlab.views.acceptance import describe
from ddlab.views.page import notes, token
from ddlab.views.tree import tree_view


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
