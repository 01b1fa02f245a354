"""ddlab: a workbench for looking inside DFlash / DDTree speculative decoding."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

try:
    __version__ = version("ddlab")
except PackageNotFoundError:  # running from a checkout that was never installed
    __version__ = "0+unknown"

# name -> module that defines it; resolved on first use, so that `import ddlab` loads neither torch nor transformers
_EXPORTS = {
    "Audit": "audit",
    "Decoder": "decode",
    "DraftTree": "tree",
    "Drafter": "drafter",
    "Pair": "pair",
    "Step": "trace",
    "Trace": "trace",
    "TreeInspector": "widget",
    "Walk": "sampling",
    "advise": "advice",
    "audit": "audit",
    "calibrate": "costs.calibration",
    "compare": "compare",
    "doctor": "doctor",
    "generate": "decode",
    "load_pair": "pair",
    "replay": "replay",
    "report": "report",
    "sweep": "sweep",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'ddlab' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"ddlab.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """Some functions are named like the module that defines them; importing that module must not hide them."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _EXPORTS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
