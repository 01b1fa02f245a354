"""Prompts to sweep over: a file with one JSON object a line, or the prompts that come with ddlab."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """One prompt; figures are made by kind of prompt too."""

    id: str
    kind: str
    prompt: Any  # what `Decoder.start` takes: a string, chat messages or token ids


def read_prompts(path: str | os.PathLike[str] | None = None) -> list[Entry]:
    """The prompts of a file; None: those that come with ddlab, in data/prompts.

    Each line is ``{"prompt": ...}``, with ``"id"`` (else ``line-`` and its number) and ``"kind"`` (else ``prompt``)
    where they are known. Empty lines are skipped.

    Raises ValueError that names the line for whatever does not fit, OSError where the file cannot be read.
    """
    if path is None:
        from ddlab.pair import embedded_folder

        path = embedded_folder("prompts") / "prompts.jsonl"
    path, found = Path(path), []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        where = f"{path.name}, line {number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            value = json.loads(text) if text else None
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{where}, is not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8"
            ) from None
        except ValueError as error:
            raise ValueError(f'{where}, is no JSON ({error}): write {{"id": "...", "prompt": "..."}} a line') from None
        if text:
            found.append((where, value, f"line-{number}"))
    if not found:
        raise ValueError(f'{path} holds no prompt: write {{"id": "...", "prompt": "..."}}, one a line')
    return _checked(found)


def as_entries(prompts: Iterable[Any]) -> list[Entry]:
    """Entries from what a caller has: strings, ``{"prompt": ...}`` mappings, or entries. Raises ValueError."""
    found = []
    for number, value in enumerate(prompts, 1):
        value = value._asdict() if isinstance(value, Entry) else value
        value = value if isinstance(value, Mapping) else {"prompt": value}
        found.append((f"prompt {number}", value, f"prompt-{number}"))
    if not found:
        raise ValueError("give at least one prompt to sweep over")
    return _checked(found)


def _checked(found: list[tuple[str, Any, str]]) -> list[Entry]:
    """Entries from (where it stands, value, its id if it has none)."""
    entries: list[Entry] = []
    ids: dict[str, str] = {}
    prompts: dict[str, str] = {}
    for where, value, name in found:
        if not isinstance(value, Mapping) or "prompt" not in value:
            raise ValueError(f'{where}, has no "prompt": write {{"id": "...", "prompt": "..."}}')
        prompt = value["prompt"]
        if not isinstance(prompt, str | list | tuple) or not len(prompt):
            raise ValueError(f"{where}, has no prompt to run: a string, chat messages or token ids, not {prompt!r:.40}")
        entry = Entry(str(value.get("id", name)), str(value.get("kind", "prompt")), prompt)
        if entry.id in ids:
            raise ValueError(f"{where}, has the id {entry.id!r} of {ids[entry.id]}: give each prompt its own")
        same = json.dumps(prompt, sort_keys=True, default=str)
        if same in prompts:
            raise ValueError(f"{where}, is the prompt of {prompts[same]} again: it would count twice. Take one out")
        ids[entry.id] = prompts[same] = where
        entries.append(entry)
    return entries
