"""A whole run as text, round by round."""

from __future__ import annotations

from ddlab import tokens
from ddlab.trace import Trace
from ddlab.views.acceptance import describe
from ddlab.views.page import notes, token
from ddlab.views.tree import tree_view


def trace_text(trace: Trace, *, trees: bool = False) -> str:
    """Settings, prompt, every round with its tokens and its end, the counts and the text."""
    settings = trace.settings
    budget = settings.get("budget")
    name = trace.header.get("pair", {}).get("name") or "unnamed pair"
    head = [trace.method, *([f"budget {budget}"] if budget is not None else []), str(name)]
    head.append(f"temperature {settings.get('temperature', '?')}, seed {settings.get('seed', '?')}")
    lines = [*notes(trace)[0].splitlines(), " · ".join(head)]
    lines.append(f"prompt ({len(trace.prompt_ids)} tokens): {_labels(trace, trace.prompt_ids)}")
    if trace.first_token is not None:
        lines.append(
            f"first token, from the prompt's forward: {tokens.show(trace.first_token, trace.token_text)}"
        )
    lines += ["", round_header()] if trace.steps else []
    for step in trace.steps:
        lines.append(round_text(trace, step.index))
        if trees:
            lines += [f"    {line}" for line in tree_view(trace, step.index).text.splitlines()]
    lines += ["", describe(trace.accepted_drafts), describe(trace.tokens_per_round)]
    lines.append(f"{len(trace.output_ids)} new tokens, {trace.finished or 'not finished'}")
    return "\n".join([*lines, "", trace.text])


def round_header() -> str:
    return "round  position  drafted  accepted  new  stop        tokens: drafts, then [the target's own]"


def round_text(trace: Trace, round: int) -> str:
    """One line: counts, stop reason, and every token that the round added."""
    step = trace.steps[round]
    drafts = [tokens.show(token, trace.token_text) for token in step.emitted[: step.accepted]]
    own = [f"[{tokens.show(token, trace.token_text)}]" for token in step.emitted[step.accepted :]]
    labels = " ".join(drafts + own)
    edited = f"  (edited: {', '.join(step.edited)})" if step.edited else ""
    return (
        f"{step.index:>5}  {step.start:>8}  {len(step.tree) - 1:>7}  {step.accepted:>8}  {len(step.emitted):>3}  "
        f"{step.stop_reason:<10}  {labels}{edited}"
    )


def round_html(trace: Trace, round: int) -> str:
    """The tokens that a round added, drafts plain and the target's own in brackets."""
    step = trace.steps[round]
    shown = [
        (tokens.show(id, trace.token_text), place >= step.accepted) for place, id in enumerate(step.emitted)
    ]
    return " ".join(token(f"[{label}]" if own else label) for label, own in shown)


def _labels(trace: Trace, ids: list[int]) -> str:
    return "".join(tokens.show(token, trace.token_text) for token in ids)
