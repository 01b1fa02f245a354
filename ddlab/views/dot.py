"""A tree for papers: a Graphviz graph that also draws where the `dot` program is missing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import graphviz

GRAPH = {"rankdir": "LR", "nodesep": "0.07", "ranksep": "0.35"}
NODE = {
    "shape": "box",
    "style": "rounded",
    "fontsize": "11",
    "height": "0.25",
    "margin": "0.08,0.02",
    "color": "gray40",
}
EDGE = {"arrowhead": "none", "color": "gray40"}


class TreeGraph(graphviz.Digraph):
    """A `graphviz.Digraph` whose `pipe`, `render` and display fall back on pygraphviz, which carries the layout engine.

    Raises:
        RuntimeError: neither `dot` nor pygraphviz is installed; `source` is the DOT text all the same.
    """

    def __init__(self) -> None:
        super().__init__(graph_attr=GRAPH, node_attr=NODE, edge_attr=EDGE)

    def pipe(self, format: str | None = None, *args: Any, encoding: str | None = None, **kwargs: Any) -> Any:
        try:
            return super().pipe(format, *args, encoding=encoding, **kwargs)
        except graphviz.ExecutableNotFound as error:
            drawn = _draw(self.source, format or self.format, kwargs.get("engine") or self.engine, error)
            return drawn if encoding is None else drawn.decode(encoding)

    def render(self, filename: str | os.PathLike[str] | None = None, *args: Any, **kwargs: Any) -> str:
        try:
            return super().render(filename, *args, **kwargs)
        except graphviz.ExecutableNotFound as error:  # the source was written by then
            format = kwargs.get("format") or self.format
            drawn = _draw(self.source, format, kwargs.get("engine") or self.engine, error)
            target = Path(kwargs.get("outfile") or f"{self.filepath}.{format}")
            target.write_bytes(drawn)
            if kwargs.get("cleanup"):
                Path(self.filepath).unlink()
            return str(target)

    def _repr_mimebundle_(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return super()._repr_mimebundle_(*args, **kwargs)
        except RuntimeError as error:  # in a cell: the hint and the source, rather than a traceback
            return {"text/plain": f"{error}\n\n{self.source}"}


def _draw(source: str, format: str, engine: str, missing: Exception) -> bytes:
    try:
        import pygraphviz  # type: ignore[import-untyped]
    except ImportError:
        raise RuntimeError("drawing this needs Graphviz's dot program, or: pip install pygraphviz") from missing
    return pygraphviz.AGraph(string=source).draw(format=format, prog=engine)
