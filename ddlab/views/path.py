"""The text as rounds made it: which tokens were drafts, which the target's own, where a round begins."""

from __future__ import annotations

from ddlab.trace import Trace
from ddlab.views.data import run_data
from ddlab.views.page import View, escape, lines_of, notes
from ddlab.views.pieces import Piece, pieces, readable

TINTS = 4  # background tints that rounds take in turn


def path_view(trace: Trace, *, prompt: bool = True) -> View:
    """The text coloured by round: drafts underlined, the target's own tokens bold over a dotted line."""
    note_text, note_html = notes(trace)
    shown = [piece for piece in pieces(trace) if prompt or piece.kind != "prompt"]
    run = run_data(trace)
    run["text"] = run["text"][-len(shown) :] if shown else []
    return View(
        title=f"text by round ({trace.method})",
        text=note_text + _as_text(shown),
        html=f"{note_html}{LEGEND}{text_html(trace, prompt=prompt)}",
        height=105 + 29 * lines_of("".join(piece.text for piece in shown)),
        run=run,
        panels=("text",),
    )


def text_html(trace: Trace, *, prompt: bool = True) -> str:
    """The text alone, for a page that has the legend already."""
    shown = [piece for piece in pieces(trace) if prompt or piece.kind != "prompt"]
    return f'<div class="text" dir="ltr">{_as_html(shown)}</div>'


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
        tip = f' title="the drafter\'s first choice was {escape(piece.first)}"' if piece.first else ""
        out.append(f'<bdi class="{piece.kind[0]}{tint}"{tip}>{_visible(piece)}</bdi>')
    return "".join(out)


def _visible(piece: Piece) -> str:
    """Running text, where a line break also has a mark; or the label."""
    if readable(piece.text):
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
