"""What all views share: the two renderings of a view, escaping, and the one stylesheet.

Colours are custom properties named by role (Okabe-Ito, so that they differ for colour-blind readers too), once for light
and once for dark. A role never speaks by colour alone: it has a shape, a mark or a word beside it.
"""

from __future__ import annotations

import html
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ddlab.trace import Trace


@dataclass(frozen=True, repr=False)
class View:
    """One view in two renderings. `html` is a fragment for a page with `STYLE`; `height` its likely height in pixels."""

    title: str
    text: str
    html: str
    height: int = 400

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"View({self.title!r})"

    def document(self) -> str:
        """A page of its own, without a reference to anything outside it."""
        return document(self.title, f"<main>{self.html}</main>")

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        # an iframe with its document inside is the form that JupyterLab, VS Code and an exported page all show
        frame = (
            f'<iframe srcdoc="{escape(self.document())}" sandbox="allow-scripts" title="{escape(self.title)}" '
            f'style="width:100%;height:{min(self.height, 900)}px;border:0"></iframe>'
        )
        return {"text/plain": self.text, "text/html": frame}


def escape(text: object) -> str:
    """Safe inside an element and inside a quoted attribute. NUL has no legal form in HTML at all."""
    return (
        html.escape(str(text), quote=True).replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")
    )


def shorten(label: str, characters: int = 12) -> str:
    """A label as a picture has room for it; the full one belongs beside it, in a title or a list."""
    return label if len(label) <= characters else label[: characters - 1] + "…"


def token(label: str, *classes: str) -> str:
    """A token's label as an element that keeps its reading direction to itself."""
    names = " ".join(("tok", *classes))
    return f'<bdi class="{names}">{escape(label)}</bdi>'


def notes(trace: Trace) -> tuple[str, str]:
    """What every view of this trace has to say first, as text lines and as HTML; two empty strings for a clean trace."""
    text = "".join(f"! {said}\n" for said in trace.warnings)
    return text, "".join(f'<p class="note"><b>!</b> {escape(said)}</p>' for said in trace.warnings)


def table(head: Iterable[str], rows: Iterable[Iterable[str]], name: str = "") -> str:
    """An HTML table; cells are HTML already, the first of a row is its header."""
    body = "".join(
        "<tr>"
        + "".join(f"<td>{c}</td>" if i else f'<th scope="row">{c}</th>' for i, c in enumerate(row))
        + "</tr>"
        for row in rows
    )
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    return f'<div class="scroll"><table class="{name}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def document(title: str, body: str) -> str:
    # the policy makes it certain: no script, no request, whatever a token's text contains
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def write(path: str | os.PathLike[str], content: str) -> Path:
    """Writes UTF-8 through a temporary file beside the target, so that a failure leaves no half page behind."""
    target = Path(path)
    with tempfile.NamedTemporaryFile(
        "wb", dir=target.parent, prefix=f".{target.name}.", delete=False
    ) as file:
        try:
            file.write(content.encode("utf-8"))
            file.close()
            os.chmod(
                file.name, 0o666 & ~_umask()
            )  # a temporary file is private, a report is meant to be sent
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


STYLE = """
:root{color-scheme:light dark;
--page:#fff;--panel:#f7f7f4;--ink:#1b1d20;--soft:#62666d;--line:#deded8;--code:#f1f1ec;
--accepted:#009e73;--bonus:#d98c00;--root:#0072b2;--missed:#b5588a;--error:#c44f00;--good:#007a59;
--r0:#56b4e92e;--r1:#f0e44266;--r2:#cc79a72e;--r3:#009e7326}
@media (prefers-color-scheme:dark){:root{
--page:#15171a;--panel:#1c1f23;--ink:#e7e7e3;--soft:#9ca1a9;--line:#343940;--code:#23272c;
--accepted:#2cc499;--bonus:#f0ab35;--root:#6bbcee;--missed:#dd93bb;--error:#ff8b45;--good:#3ccfa6;
--r0:#56b4e940;--r1:#f0e4422b;--r2:#cc79a742;--r3:#009e7345}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 24px 64px}
h1{font-size:26px;line-height:1.2;margin:0 0 6px;letter-spacing:-.01em}
h2{font-size:19px;margin:44px 0 10px;padding-top:18px;border-top:1px solid var(--line)}
h3{font-size:15px;margin:26px 0 8px}
p{margin:6px 0 10px;max-width:78ch}
.soft,figcaption,caption{color:var(--soft);font-size:13px}
.scroll{overflow-x:auto}
code,pre,.tok,.num{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:12.5px}
.tok{unicode-bidi:isolate;white-space:pre-wrap}
pre{background:var(--code);padding:10px 12px;border-radius:6px;white-space:pre-wrap;overflow-wrap:anywhere;margin:8px 0}
table{border-collapse:collapse;margin:8px 0 4px;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:5px 18px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}
thead th{font-size:12.5px;font-weight:600;color:var(--soft)}
tbody th{font-weight:600}
table.figures td{white-space:nowrap}
table.settings th{font-weight:400;color:var(--soft);white-space:nowrap}
table.settings td{overflow-wrap:anywhere}
.note{border-left:4px solid var(--error);background:var(--panel);padding:8px 12px;max-width:none}
.note b{color:var(--error)}
.few{color:var(--soft)}
.good{color:var(--good);font-weight:600}
.bad{color:var(--error);font-weight:600}
figure{margin:10px 0}
svg{display:block;max-width:none}
svg text{fill:var(--ink);font:10.5px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
svg .soft{fill:var(--soft)}
svg .small text{font-size:9.5px}
details{border:1px solid var(--line);border-radius:6px;margin:6px 0;background:var(--page)}
details>summary{cursor:pointer;padding:6px 12px;display:flex;gap:10px;align-items:baseline;flex-wrap:wrap}
details>summary::before{content:"▸";color:var(--soft)}
details[open]>summary::before{content:"▾"}
details[open]>summary{border-bottom:1px solid var(--line);background:var(--panel)}
details>div{padding:8px 12px}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;color:var(--soft);font-size:13px;margin:4px 0 10px}
.legend svg{display:inline-block;vertical-align:-2px;margin-right:5px}
.text{line-height:2.05;white-space:pre-wrap;overflow-wrap:anywhere;background:var(--panel);padding:12px 14px;
border-radius:6px;direction:ltr}
.text bdi{unicode-bidi:isolate;padding:2px 0;text-decoration-thickness:2px;text-underline-offset:4px}
.text sup{font-size:9.5px;color:var(--soft);padding:0 1px 0 3px;line-height:0;user-select:none}
.text .p{color:var(--soft)}
.text .f{outline:1px solid var(--root);outline-offset:-1px;border-radius:2px}
.text .d{text-decoration:underline solid var(--accepted)}
.text .b{text-decoration:underline dotted var(--bonus);font-weight:650}
.text i{font:11px ui-monospace,monospace;color:var(--soft);font-style:normal;user-select:none}
.t0{background:var(--r0)}.t1{background:var(--r1)}.t2{background:var(--r2)}.t3{background:var(--r3)}
ul.tree,ul.tree ul{list-style:none;margin:0;padding:0}
ul.tree ul{padding-left:15px;border-left:1px solid var(--line);margin-left:5px}
ul.tree div{display:flex;gap:8px;align-items:baseline;padding:1px 4px;border-radius:3px}
ul.tree div:hover{background:var(--panel)}
ul.tree .tok{flex:1 1 auto;overflow-wrap:anywhere}
ul.tree .num{flex:0 0 auto;color:var(--soft);font-size:11.5px;white-space:pre;text-align:right}
ul.tree .yes>.tok{font-weight:700}
ul.tree .yes>.mark{color:var(--accepted)}
ul.tree .out>.mark{color:var(--bonus)}
ul.tree .late>.mark{color:var(--missed)}
.mark{flex:0 0 14px;text-align:center}
@media print{body{font-size:11pt}main{max-width:none;padding:0}h2{break-after:avoid}tr,figure{break-inside:avoid}
.text,pre,.note{border:1px solid var(--line)}.scroll{overflow:visible}*{print-color-adjust:exact}}
"""
