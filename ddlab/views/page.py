"""What all views share: the two renderings of a view, escaping, and the one page around them.

Stylesheets name colours by role and follow the reader's light or dark theme (`front/inspector.css`, `style.css`).
"""

from __future__ import annotations

import html
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddlab.trace import Trace
from ddlab.views import front

STYLE = front.STYLE + Path(__file__).with_name("style.css").read_text("utf-8")
NOTE, HIGHEST = 60, 1600  # pixels of a note above a view, and of the highest frame in a notebook


@dataclass(frozen=True, repr=False)
class View:
    """One view, rendered twice, and a third time where a script may run.

    `html` is a fragment for a page with `STYLE`, `height` its likely pixels, the trace's notes not counted. With `run`
    (made by `data.run_data`) a page shows `panels` of an inspector instead, with `replay` (by `replayed.replay_data`) a
    replay, and `html` where scripts are off.
    """

    title: str
    text: str
    html: str
    height: int = 400
    run: dict[str, Any] | None = None
    panels: tuple[str, ...] = ("text", "tree", "mask")
    round: int = 0  # that the inspector begins with: a place in the run's rounds
    replay: dict[str, Any] | None = None
    layers: dict[str, Any] | None = None  # of a comparison: a page with a script shows its panel

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"View({self.title!r})"

    def fragment(self, name: str = "run") -> str:
        """Inside a page with a script; its data are in an element called `name`."""
        if self.layers is not None:
            shown, given = front.layers(name), self.layers
        elif self.replay is not None:
            shown, given = front.replay(name), self.replay
        elif self.run is not None:
            shown, given = front.inspector(name, self.panels, self.round), self.run
        else:
            return self.html
        return f"{shown}<noscript>{self.html}</noscript>{front.data(name, given)}"

    def document(self) -> str:
        """A page of its own, without a reference to anything outside it."""
        script = any(given is not None for given in (self.run, self.replay, self.layers))
        return document(self.title, f'<main class="cell">{self.fragment()}</main>', script=script)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        # a document inside an iframe is the form that JupyterLab, VS Code and an exported page all show
        high = min(self.height + NOTE * self.html.count('<p class="note">'), HIGHEST)
        size = f"width:100%;height:{high}px;border:0"
        inner, title = escape(self.document()), escape(self.title)
        frame = f'<iframe srcdoc="{inner}" sandbox="allow-scripts" title="{title}" style="{size}"></iframe>'
        return {"text/plain": self.text, "text/html": frame}


def escape(text: object) -> str:
    """Safe inside an element and inside a quoted attribute. NUL has no legal form in HTML at all."""
    safe = html.escape(str(text), quote=True).replace("\0", "\ufffd")
    return safe.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair is no UTF-8


def shorten(label: str, characters: int = 12) -> str:
    """A label as a picture has room for it; the full one belongs beside it, in a title or a list."""
    return label if len(label) <= characters else label[: characters - 1] + "…"


def token(label: str, *classes: str) -> str:
    """A token's label as an element that keeps its reading direction to itself."""
    names = " ".join(("tok", *classes))
    return f'<bdi class="{names}">{escape(label)}</bdi>'


def notes(trace: Trace) -> tuple[str, str]:
    """What every view of this trace says first, as text and as HTML; empty for a clean trace."""
    text = "".join(f"! {said}\n" for said in trace.warnings)
    return text, "".join(f'<p class="note"><b>!</b> {escape(said)}</p>' for said in trace.warnings)


def lines_of(text: str) -> int:
    """How many lines a text takes in a notebook's cell, where long ones are wrapped."""
    return sum(1 + len(line) // 115 for line in text.split("\n"))


def table(head: Iterable[str], rows: Iterable[Iterable[str]], name: str = "") -> str:
    """An HTML table; cells are HTML already, the first of a row is its header."""
    body = "".join(
        "<tr>" + "".join(f"<td>{c}</td>" if i else f'<th scope="row">{c}</th>' for i, c in enumerate(row)) + "</tr>"
        for row in rows
    )
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    content = f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table class="{name}">{content}</table></div>'


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same as lines of text."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows))
    return "\n".join(line.rstrip() for line in padded)


def svg(width: float, height: float, name: str, body: str) -> str:
    """A picture with a name for those who cannot see it."""
    size = f'width="{width:.0f}" height="{height:.0f}"'
    return f'<svg {size} role="img" aria-label="{escape(name)}">{body}</svg>'


def label(x: float, y: float, text: object, style: str = "", tip: str = "") -> str:
    """A text of a picture, with a longer one that shows when it is pointed at."""
    inner = escape(text) + (f"<title>{escape(tip)}</title>" if tip else "")
    return f'<text x="{x:g}" y="{y:g}"' + (f' class="{style}"' if style else "") + f">{inner}</text>"


def figure(picture: str, caption: str, style: str = "") -> str:
    """A picture over its caption, which is HTML already."""
    said = f'<figcaption class="{style}">' if style else "<figcaption>"
    return f'<figure><div class="scroll">{picture}</div>{said}{caption}</figcaption></figure>'


def document(title: str, body: str, *, script: bool = False) -> str:
    """A whole page. With `script`, the front end runs in it and opens its inspectors."""
    # the policy makes it certain: no request, and no script or style but ours, whatever a token's text contains
    allowed = f"script-src {front.digest(front.PAGE)}; " if script else ""
    policy = f"default-src 'none'; {allowed}style-src {front.digest(STYLE)}; img-src data:"
    code = f'<script type="module">{front.PAGE}</script>' if script else ""
    return (
        '<!doctype html><html lang="en" class="ddlab"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>{body}{code}</body></html>\n"
    )


def write(path: str | os.PathLike[str], content: str) -> Path:
    """Writes UTF-8 through a temporary file beside the target: a failure leaves no half page behind."""
    target = Path(path)
    with tempfile.NamedTemporaryFile("wb", dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
        try:
            file.write(content.encode("utf-8"))
            file.close()
            os.chmod(file.name, 0o666 & ~_umask())  # temporary files are private, a report is to be sent
            os.replace(file.name, target)
        except BaseException:
            file.close()
            Path(file.name).unlink(missing_ok=True)
            raise
    return target


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
