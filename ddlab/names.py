"""Names are matched strictly: a wrong one is an error that lists near matches."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def hint(name: str, known: Iterable[str], otherwise: str) -> str:
    """``did you mean 'sdpa'?``, or ``otherwise`` where nothing is near."""
    near = get_close_matches(str(name), list(known), n=3)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else otherwise


def one_of(what: str, name: str, allowed: Iterable[str]) -> None:
    """Raises ValueError when ``name`` is not ``allowed``."""
    if name not in allowed:
        listed = ", ".join(allowed)
        raise ValueError(f"unknown {what} {name!r}, it is one of {listed}: {hint(name, allowed, 'choose one')}")
