"""Outputs of named modules while a block of code runs: scoped hooks, strict names, nothing left behind."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ddlab.names import hint


class Capture(dict[str, list[Tensor]]):
    """``with Capture(modules, patterns) as seen``: ``seen[name]`` lists the outputs of that module, one per call.

    Modules that return a tuple give its first entry. Tensors stay on their device, detached; ``clear()`` frees them,
    and so does an exception inside the block. The hooks go with the block; other hooks on the modules are not touched.

    Args:
        modules: name -> module.
        patterns: names, or patterns with ``*`` and ``?`` (``layers.*.self_attn``). Each must match.

    Raises:
        ValueError: a pattern matches no module; near matches are listed.
    """

    def __init__(self, modules: Mapping[str, nn.Module], patterns: Iterable[str]):
        super().__init__()
        self._modules = {name: modules[name] for name in matching(modules, patterns)}
        self._handles: list[Any] = []

    def __enter__(self) -> Capture:
        for name, module in self._modules.items():
            self[name] = []
            self._handles.append(module.register_forward_hook(self._keeper(name)))
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if kind is not None:
            self.clear()

    def _keeper(self, name: str) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor):
                self[name].append(first.detach())

        return keep


def matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The names that the patterns match, in the order of ``names``. Raises ValueError for a pattern without a match."""
    names = [name for name in names if name]
    found: set[str] = set()
    for pattern in patterns:
        hits = fnmatch.filter(names, pattern)
        if not hits:
            otherwise = f"modules are named like {', '.join(names[:4])}"
            raise ValueError(f"no module is named {pattern!r}: {hint(pattern, names, otherwise)}")
        found.update(hits)
    return [name for name in names if name in found]
