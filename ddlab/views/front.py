"""The interactive front end: plain ES modules in `front/`, joined here into the one script of a page or a widget.

The files import from one another, so that they can be read and run as they are. Inside a page there is no second
file to import from: the import lines and the word `export` go, and the modules follow each other in one scope.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from ddlab.tracefile import plain

FOLDER = Path(__file__).with_name("front")
# what imports comes after what it imports
MODULES = ("dom", "round", "tree", "mask", "text", "inspector", "drafts", "cost", "replay", "layers")
STYLE = FOLDER.joinpath("inspector.css").read_text("utf-8")


def join(last: str, end: str) -> str:
    """The modules and one more, then a line that sets it going."""
    sources = (FOLDER.joinpath(f"{name}.js").read_text("utf-8") for name in (*MODULES, last))
    joined = "\n".join(re.sub(r"^import .*;\n", "", source, flags=re.MULTILINE) for source in sources)
    return re.sub(r"^export ", "", joined, flags=re.MULTILINE) + f"\n{end}\n"


PAGE = join("page", "openPage(document);")
WIDGET = join("widget", "export default { render: renderWidget };")


def digest(content: str) -> str:
    """How a content security policy names the one script or style that it lets through."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def data(name: str, value: Any) -> str:
    """JSON inside a page. `<` is written as an escape, so that no text can close the element."""
    encoded = json.dumps(plain(value), separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{encoded}</script>'


def inspector(name: str, panels: tuple[str, ...], round: int = 0) -> str:
    """Where the script puts an inspector of the run in the data element `name`."""
    return f'<div data-run="{name}" data-panels="{" ".join(panels)}" data-round="{round}"></div>'


def replay(name: str) -> str:
    """Where the script puts the replay whose data are in the element `name`."""
    return f'<div data-replay="{name}"></div>'


def layers(name: str) -> str:
    """Where the script puts the comparison by layers whose data are in the element `name`."""
    return f'<div data-layers="{name}"></div>'
