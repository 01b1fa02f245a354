"""The text as rounds made it: which tokens were drafts, which the target's own, where a round begins."""

from __future__ import annotations

from dataclasses import dataclass

from ddlab import tokens
from ddlab.trace import Trace
from ddlab.views.page import View, escape, notes

TINTS = 4  # background tints that rounds take in turn


@dataclass(frozen=True)
class Piece:
    """One token of the text. `text` is what it adds to the running text, "" for a part of a character."""

    id: int
    kind: str  # "prompt" | "first" | "draft" | "bonus"
    round: int | None  # None before the first round
    text: str
    label: str


def pieces(trace: Trace) -> list[Piece]:
    """Prompt and new tokens in order. A character over several tokens is shown where it becomes whole."""
    listed: list[tuple[int, str, int | None]] = [(token, "prompt", None) for token in trace.prompt_ids]
    if trace.first_token is not None:
        listed.append((trace.first_token, "first", None))
    for step in trace.steps:
        for place, token in enumerate(step.emitted):
            listed.append((token, "draft" if place < step.accepted else "bonus", step.index))
    table = trace.token_text
    texts = tokens.text_pieces((token for token, _, _ in listed), table)
    return [
        Piece(token, kind, number, text, tokens.show(token, table))
        for (token, kind, number), text in zip(listed, texts, strict=True)
    ]


def path_view(trace: Trace, *, prompt: bool = True) -> View:
    """The text coloured by round: drafts underlined, the target's own tokens bold over a dotted line."""
    note_text, note_html = notes(trace)
    shown = [piece for piece in pieces(trace) if prompt or piece.kind != "prompt"]
    return View(
        title=f"text by round ({trace.method})",
        text=note_text + _as_text(shown),
        html=f'{note_html}{LEGEND}<div class="text" dir="ltr">{_as_html(shown)}</div>',
        height=160 + 31 * (1 + sum(len(piece.text) for piece in shown) // 120),
    )


def _as_text(shown: list[Piece]) -> str:
    """A line for the prompt, one for the first token, one a round; the target's own tokens in brackets."""
    lines: dict[str, list[str]] = {}
    for piece in shown:
        name = piece.kind if piece.round is None else f"{piece.round:>5}"
        lines.setdefault(name, []).append(f"[{piece.label}]" if piece.kind == "bonus" else piece.label)
    return "\n".join(f"{name:<6} {' '.join(labels)}" for name, labels in lines.items())


def _as_html(shown: list[Piece]) -> str:
    out, last = [], None
    for piece in shown:
        if piece.round is not None and piece.round != last:
            out.append(f"<sup>{piece.round}</sup>")
            last = piece.round
        tint = "" if piece.round is None else f" t{piece.round % TINTS}"
        out.append(f'<bdi class="{piece.kind[0]}{tint}">{_visible(piece)}</bdi>')
    return "".join(out)


def _visible(piece: Piece) -> str:
    """Running text; a line break also has a mark, and what draws nothing is shown as its label."""
    if piece.text and all(char.isprintable() or char == "\n" for char in piece.text):
        return escape(piece.text).replace("\n", "<i>↵</i>\n")
    return f"<i>{escape(piece.label)}</i>"


def _legend() -> str:
    kinds = {
        "p": "prompt",
        "f": "first token, from the prompt's own forward",
        "d": "accepted draft",
        "b": "the target's own token, one a round",
    }
    swatch = '<span><span class="text"><bdi class="{}">word</bdi></span> {}</span>'
    swatches = "".join(swatch.format(kind, said) for kind, said in kinds.items())
    tints = "".join(f'<span class="t{i}">&nbsp;{i}&nbsp;</span>' for i in range(TINTS))
    return f'<div class="legend">{swatches}<span>{tints} a tint and a number for each round</span></div>'


LEGEND = _legend()
