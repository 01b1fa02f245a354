"""The text of a run, token by token: where each came from, and what the drafter would rather have had."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ddlab import tokens
from ddlab.step import Step
from ddlab.trace import Trace


@dataclass(frozen=True)
class Piece:
    """One token of the text. `text` is what it adds to the running text, "" for a part of a character."""

    id: int
    kind: str  # "prompt" | "first" | "draft" | "bonus"
    round: int | None  # None before the first round
    text: str
    label: str
    first: str  # the drafter's first choice at this place and its probability, where the text has another token


def pieces(trace: Trace) -> list[Piece]:
    """Prompt and new tokens in order. A character over several tokens is shown where it becomes whole."""
    listed: list[tuple[int, str, int | None, str]] = [(token, "prompt", None, "") for token in trace.prompt_ids]
    if trace.first_token is not None:
        listed.append((trace.first_token, "first", None, ""))
    for step in trace.steps:
        for place, token in enumerate(step.emitted):
            kind = "draft" if place < step.accepted else "bonus"
            listed.append((token, kind, step.index, _first_choice(step, place, trace)))
    table = trace.token_text
    texts = tokens.text_pieces((token for token, *_ in listed), table)
    return [
        Piece(token, kind, number, text, tokens.show(token, table), first)
        for (token, kind, number, first), text in zip(listed, texts, strict=True)
    ]


def _first_choice(step: Step, place: int, trace: Trace) -> str:
    if place >= len(step.draft_ids) or step.draft_ids[place, 0] == step.emitted[place]:
        return ""
    label = tokens.show(int(step.draft_ids[place, 0]), trace.token_text)
    return f"{label} ({math.exp(step.draft_log_probs[place, 0]):.1%})"


def readable(text: str) -> bool:
    """Text that draws something; anything else is shown as its label."""
    return bool(text) and all(char.isprintable() or char == "\n" for char in text)
