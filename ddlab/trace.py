"""A recorded run: `Step` is one round, `Trace` the run, `TraceWriter` puts it on disk a round at a time.

Views, the report and the audit read traces and nothing else. How a folder is written: `tracefile.py`.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlab import tokens, tracefile
from ddlab.step import Step, from_record, to_record
from ddlab.tokens import Token
from ddlab.tracefile import SCHEMA_VERSION

if TYPE_CHECKING:
    import pandas

ENOUGH_ROUNDS = 30  # an acceptance figure on fewer rounds is shown, but greyed


@dataclass(frozen=True)
class Mean:
    """A mean that carries its name and the number of rounds behind it; `value` is None on no rounds."""

    name: str
    value: float | None
    rounds: int

    @property
    def enough(self) -> bool:
        return self.rounds >= ENOUGH_ROUNDS

    def __float__(self) -> float:
        return float("nan") if self.value is None else self.value

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else str(self)

    def __str__(self) -> str:
        counted = f"{self.rounds} round{'' if self.rounds == 1 else 's'}"
        return f"{self.name}: " + ("no rounds" if self.value is None else f"{self.value:.2f} ({counted})")


@dataclass(repr=False)
class Trace:
    """A run: header (versions, pair, settings, prompt, first_token), rounds, and the text of their tokens."""

    header: dict[str, Any]
    steps: list[Step] = field(default_factory=list)
    token_text: dict[int, Token] = field(default_factory=dict)
    lost_rounds: int = 0  # not wholly in the file: a process was killed, or a copy is incomplete

    def append(self, step: Step, tokenizer: Any = None) -> None:
        """Adds a round and the text of its tokens. `tokenizer` None: token ids are shown without text."""
        if step.index != len(self.steps):
            raise ValueError(f"round {step.index} cannot follow {self.rounds} rounds: append them in order")
        self.describe(step.token_ids(), tokenizer)
        self.steps.append(step)

    def truncate(self, rounds: int) -> None:
        """Keeps the first `rounds` rounds (going back). The text of tokens already described stays."""
        if not 0 <= rounds <= len(self.steps):
            raise ValueError(f"cannot keep {rounds} of {len(self.steps)} rounds")
        del self.steps[rounds:]

    def describe(self, ids: Iterable[int], tokenizer: Any) -> None:
        """Adds the text of `ids` to `token_text` where it is missing."""
        missing = set(ids).difference(self.token_text)
        if missing:
            self.token_text.update(tokens.describe(tokenizer, missing))

    # ---- what it says ----------------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        return self.header.get("settings", {})

    @property
    def method(self) -> str:
        return str(self.settings.get("method", "unknown"))

    @property
    def prompt_ids(self) -> list[int]:
        return list(self.header.get("prompt", {}).get("ids", ()))

    @property
    def first_token(self) -> int | None:
        return self.header.get("first_token")

    @property
    def output_ids(self) -> list[int]:
        """New tokens only: the first one (it comes from the prompt's forward), then what each round added."""
        first = [] if self.first_token is None else [self.first_token]
        return first + [token for step in self.steps for token in step.emitted]

    @property
    def text(self) -> str:
        """The new text without special tokens; a character that is not complete yet is held back."""
        return tokens.join_text(self.output_ids, self.token_text, skip_special=True)

    @property
    def finished(self) -> str | None:
        """Why the text ended, "stop_token" or "length"; None while there is more to decode."""
        if self.steps and self.steps[-1].stop_reason in ("stop_token", "length"):
            return self.steps[-1].stop_reason
        if not self.steps and self.first_token in self.settings.get("stop_token_ids", ()):
            return "stop_token"
        limit = self.settings.get("max_new_tokens")
        return "length" if limit is not None and len(self.output_ids) >= limit else None

    @property
    def rounds(self) -> int:
        return len(self.steps)

    @property
    def accepted_drafts(self) -> Mean:
        return self._mean("accepted drafts per round", [step.accepted for step in self.steps])

    @property
    def tokens_per_round(self) -> Mean:
        """τ: accepted drafts + 1; a last round that was cut counts what it added."""
        return self._mean("tokens per round", [len(step.emitted) for step in self.steps])

    def _mean(self, name: str, values: Sequence[int]) -> Mean:
        return Mean(name, sum(values) / len(values) if values else None, len(values))

    @property
    def warnings(self) -> list[str]:
        """What every view has to say: the wrong way on purpose, edited rounds, missing rounds."""
        said = []
        if self.settings.get("linear_state") == "flattened":
            said.append(
                'linear_state="flattened": the linear layers ignored the tree, on purpose. '
                "The text is not the target's own."
            )
        edited = [step.index for step in self.steps if step.edited]
        if edited:
            phases = sorted({phase for step in self.steps for phase in step.edited})
            shown = ", ".join(map(str, edited[:8])) + (", …" if len(edited) > 8 else "")
            where = f"{len(edited)} of {self.rounds} rounds: {shown}"
            said.append(f"Edited: a hook replaced values ({', '.join(phases)}) in {where}.")
            if "verify" in phases:
                said.append("The target's own logits were edited: the text need not be the target's own.")
        watched = [step.index for step in self.steps if step.engine == "eager" != self.settings.get("engine", "eager")]
        if watched:
            shown = ", ".join(map(str, watched[:8])) + (", …" if len(watched) > 8 else "")
            said.append(
                f"Modules were watched in {len(watched)} of {self.rounds} rounds, which ran eager for it: {shown}. "
                "Their times are not the graph engine's."
            )
        if self.lost_rounds:
            said.append(f"Rounds at the end that could not be read, the file stops before them: {self.lost_rounds}.")
        return said

    def differences(self, other: Trace) -> list[str]:
        """Where two runs were set up differently, e.g. `prompt.text`. Creation times are no difference."""
        mine, theirs = _flatten(self.header), _flatten(other.header)
        keys = (mine.keys() | theirs.keys()) - {"created"}
        return sorted(key for key in keys if mine.get(key) != theirs.get(key))

    # ---- tables and text -------------------------------------------------------------------------

    def to_frame(self) -> pandas.DataFrame:
        """One row a round. Raises ImportError, naming the cure, without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("Trace.to_frame needs pandas: pip install pandas") from error
        rows = [
            {
                "round": step.index,
                "start": step.start,
                "nodes": len(step.tree) - 1,
                "tree_depth": int(step.tree.depth.max()),
                "accepted_drafts": step.accepted,
                "new_tokens": len(step.emitted),
                "stop_reason": step.stop_reason,
                "bonus": step.bonus,
                "margin_at_end": float(step.margin[step.path[-1]]),
                "edited": ",".join(step.edited),
                **{f"{phase}_seconds": seconds for phase, seconds in step.times.items()},
                "text": tokens.join_text(step.emitted, self.token_text),
            }
            for step in self.steps
        ]
        frame = pandas.DataFrame(rows)
        return frame.astype({"bonus": "Int64"}) if rows else frame

    def to_text(self, *, trees: bool = False) -> str:
        """Round by round: path, bonus, stop reason and counts; with `trees` also every node of every tree."""
        from ddlab import views  # views read traces, so they come second

        return views.trace_text(self, trees=trees)

    def __repr__(self) -> str:
        state = self.finished or "not finished"
        return f"Trace({self.method}, {len(self.output_ids)} new tokens, {self.tokens_per_round}, {state})"

    # ---- disk ------------------------------------------------------------------------------------

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Writes the report of this trace: one HTML file with all views, see `ddlab.report`."""
        from ddlab.report import report  # reports read traces, so they come second

        return report(self, path)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes a folder through a temporary one; replaces an older trace, refuses any other folder."""
        folder = Path(path)
        tracefile.refuse_foreign(folder)
        partial, old = (folder.with_name(f".{folder.name}.{name}-{os.getpid()}") for name in ("new", "old"))
        shutil.rmtree(partial, ignore_errors=True)
        with TraceWriter(partial, self) as writer:
            for step in self.steps:
                writer.append(step)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
        return folder

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Raises FileNotFoundError where there is no trace, ValueError if it is newer or damaged."""
        header, rounds, lost = tracefile.read_folder(Path(path))
        trace = cls(header, lost_rounds=lost)
        for record in [header, *(record for record, _ in rounds)]:
            described = record.pop("tokens", {})
            trace.token_text |= {int(i): tokens.from_json(int(i), value) for i, value in described.items()}
        for number, (record, arrays) in enumerate(rounds):
            try:
                step = from_record(record, arrays)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}: round {number} is not as a trace has it ({error!r})") from error
            if step.index != number:
                raise ValueError(f"{path}: round {step.index} in the place of round {number}: lines are missing")
            trace.steps.append(step)
        return trace


def new_header(
    *, pair: dict[str, Any], settings: dict[str, Any], prompt: dict[str, Any], first_token: int | None = None
) -> dict[str, Any]:
    """A header as a trace wants it, with the schema version, the time and the versions of what ran."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("ddlab", "torch", "transformers", "numpy", "safetensors"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed as a package"
    header = {"schema_version": SCHEMA_VERSION, "created": datetime.now(UTC).isoformat(timespec="seconds")}
    header |= {"versions": versions, "pair": pair, "settings": settings, "prompt": prompt}
    plain: dict[str, Any] = tracefile.plain(header | {"first_token": first_token})
    return plain


class TraceWriter:
    """Writes a trace to a folder a round at a time; a context manager.

    The header is written at once, rounds only when appended. The text of a token is taken from the trace's
    `token_text` and written with the first round that mentions it.
    """

    def __init__(self, path: str | os.PathLike[str], trace: Trace) -> None:
        self.path, self._trace = Path(path), trace
        first = () if trace.first_token is None else (trace.first_token,)
        self._described: dict[int, int] = {}  # ids whose text was written, and the round it was written with
        self._file = tracefile.FolderWriter(self.path, trace.header, self._text_of({*trace.prompt_ids, *first}, -1))

    @property
    def rounds(self) -> int:
        return self._file.rounds

    def append(self, step: Step) -> None:
        if step.index != self.rounds:
            raise ValueError(f"round {step.index} cannot follow {self.rounds} written rounds")
        record, arrays = to_record(step)
        try:
            self._file.append(record, self._text_of(step.token_ids(), step.index), tracefile.pack_arrays(arrays))
        except BaseException:  # also an interrupt: the next round must find the files at the last whole one
            self.truncate(step.index)
            raise

    def truncate(self, rounds: int) -> None:
        self._file.truncate(rounds)
        while self._described and self._described[next(reversed(self._described))] >= rounds:
            self._described.popitem()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _text_of(self, ids: set[int], round_index: int) -> dict[str, Any]:
        table = self._trace.token_text
        # the trace's own integers: equal ones would take 32 bytes each once more
        new = {table[i].id: table[i] for i in sorted(ids.difference(self._described)) if i in table}
        self._described.update(dict.fromkeys(new, round_index))
        return {"tokens": {i: tokens.to_json(token) for i, token in new.items()}} if new else {}


def _flatten(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: tracefile.plain(value)}
    items = (_flatten(item, f"{name}.{key}" if name else str(key)) for key, item in value.items())
    return {key: item for flat in items for key, item in flat.items()}
