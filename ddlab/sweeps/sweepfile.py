"""The folder of a sweep: what is to be run, what has run, and who runs what.

* `sweep.json`: settings, prompts, pair and versions; written once, and every later call has to want the same;
* `runs/NAME`: the trace of a finished run; it is written round by round under `partial/`, and moved when it is done;
* `failed/NAME.json`: the error of a run that could not be made;
* `differences/NAME.json`: the target's verdict where a run's text is not plain decoding's;
* `claims/NAME`: held with a lock of the operating system by the process that makes the run. The lock is gone with
  its process, however that ends, so whatever it had begun is free for the next;
* `results.parquet`, `report.html`: made from the runs, and made again at any time.

Processes share nothing else. What is whole is moved into place in one step.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddlab.sweeps.promptfile import Entry
from ddlab.tracefile import plain

SCHEMA_VERSION = 1
MANIFEST = "sweep.json"
_ELSEWHERE = ("device", "device_map")  # a sweep may go on on another device; each trace says on which it ran


@dataclass(frozen=True)
class Spec:
    """One run of a sweep."""

    prompt: str  # its id
    kind: str
    method: str
    budget: int | None  # of ddtree
    temperature: float
    seed: int

    @property
    def name(self) -> str:
        """A folder name that no other run of the sweep has."""
        safe = re.sub(r"[^A-Za-z0-9_-]", "_", self.prompt)[:60]
        if safe != self.prompt:
            safe += "-" + hashlib.sha256(self.prompt.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        method = self.method if self.budget is None else f"{self.method}-{self.budget}"
        return f"{safe}.{method}.t{self.temperature:g}.s{self.seed}"

    @property
    def group(self) -> tuple[str, float, int]:
        """Runs of one group have the same text; one process makes them one after the other."""
        return self.prompt, self.temperature, self.seed


def plan(settings: Mapping[str, Any], entries: Sequence[Entry]) -> list[Spec]:
    """Every run, prompt by prompt. ar and dflash have no budget, and temperature 0 no seeds but the first."""
    return [
        Spec(entry.id, entry.kind, method, budget, temperature, seed)
        for entry in entries
        for temperature in settings["temperatures"]
        for seed in (settings["seeds"] if temperature else settings["seeds"][:1])
        for method in settings["methods"]
        for budget in (settings["budgets"] if method == "ddtree" else [None])
    ]


class SweepFolder:
    """The files of one sweep. Opening reads the manifest alone."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.manifest: dict[str, Any] = _read_manifest(self.path)
        self.entries = [Entry(**entry) for entry in self.manifest["prompts"]]
        self.specs = plan(self.manifest["settings"], self.entries)

    @classmethod
    def create(cls, path: str | os.PathLike[str], manifest: Mapping[str, Any]) -> SweepFolder:
        """A new folder, or the one that is there, if it is a sweep of the same settings, prompts and pair.

        Raises:
            FileExistsError: other files are there.
            ValueError: a sweep of something else is there; it says of what.
        """
        folder = Path(path)
        if folder.is_file():
            raise FileExistsError(f"{folder} is a file; a sweep is a folder: choose another name")
        foreign = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
        foreign = [name for name in foreign if not name.startswith(f".{MANIFEST}.")]  # another process is about to
        if foreign and not (folder / MANIFEST).is_file():
            raise FileExistsError(f"{folder} holds other files ({', '.join(foreign[:3])}): choose an empty folder")
        folder.mkdir(parents=True, exist_ok=True)
        wanted = plain({"schema_version": SCHEMA_VERSION, **manifest})
        own = folder / f".{MANIFEST}.{socket.gethostname()}-{os.getpid()}"
        own.write_text(json.dumps(wanted, indent=1), encoding="utf-8")
        with suppress(FileExistsError):
            os.link(own, folder / MANIFEST)  # whole, and only if no other process was first
        own.unlink()
        found = cls(folder)
        differ = differences(found.manifest, wanted)
        if differ:
            raise ValueError(f"{folder} is a sweep of something else: {'; '.join(differ)}. Give another folder to it")
        return found

    # ---- runs ------------------------------------------------------------------------------------

    def run_path(self, name: str) -> Path:
        return self.path / "runs" / name

    def done(self) -> set[str]:
        """Names of the finished runs."""
        return _names(self.path / "runs")

    def failed(self) -> set[str]:
        return {name.removesuffix(".json") for name in _names(self.path / "failed") if name.endswith(".json")}

    def failure(self, name: str) -> dict[str, Any]:
        return _read_json(self.path / "failed" / f"{name}.json")

    @contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Whether the run (or another task) is this process's own while the block runs."""
        try:
            import fcntl
        except ImportError:  # not on Windows: there one process at a time may work on a sweep
            yield True
            return
        path = self.path / "claims" / name
        path.parent.mkdir(exist_ok=True)
        with path.open("a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            file.truncate(0)
            file.write(f"{socket.gethostname()} {os.getpid()}\n".encode())  # for who looks; only the lock counts
            file.flush()
            yield True

    def begin(self, name: str) -> Path:
        """Where to write the trace of a claimed run."""
        path = self.path / "partial" / name
        shutil.rmtree(path, ignore_errors=True)  # of a process that was lost
        path.parent.mkdir(exist_ok=True)
        return path

    def finish(self, name: str) -> None:
        """Moves the whole trace of a claimed run to where finished runs are."""
        target = self.run_path(name)
        target.parent.mkdir(exist_ok=True)
        (self.path / "partial" / name).rename(target)
        (self.path / "failed" / f"{name}.json").unlink(missing_ok=True)

    def fail(self, spec: Spec, error: Exception) -> None:
        """Records why a claimed run could not be made."""
        shutil.rmtree(self.path / "partial" / spec.name, ignore_errors=True)
        said = {"error": f"{type(error).__name__}: {error}", "traceback": "".join(traceback.format_exception(error))}
        said |= {"run": spec.name, "created": _now(), **asdict(spec)}
        (self.path / "failed").mkdir(exist_ok=True)
        write_json(self.path / "failed" / f"{spec.name}.json", said)

    # ---- texts that differ -----------------------------------------------------------------------

    def judgement(self, name: str) -> dict[str, Any]:
        """What the target was found to say where a run's text leaves plain decoding's; empty: it was not asked."""
        path = self.path / "differences" / f"{name}.json"
        return _read_json(path) if path.is_file() else {}

    def judge(self, name: str, said: Mapping[str, Any]) -> None:
        (self.path / "differences").mkdir(exist_ok=True)
        write_json(self.path / "differences" / f"{name}.json", said)


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What two manifests do not agree on, a line each; versions, times and devices may differ."""
    out = []
    for part in ("settings", "pair"):
        mine, theirs = _flat(wanted.get(part), part), _flat(found.get(part), part)
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key) and key.rsplit(".", 1)[-1] not in _ELSEWHERE:
                out.append(f"{key} is {theirs.get(key)!r:.60} there, not {mine.get(key)!r:.60}")
    old = {entry["id"]: entry for entry in found.get("prompts", [])}
    new = {entry["id"]: entry for entry in wanted.get("prompts", [])}
    changed = [name for name in old.keys() & new.keys() if old[name] != new[name]]
    for what, names in (("lacks", new.keys() - old.keys()), ("has", old.keys() - new.keys()), ("changed", changed)):
        if names:
            shown = ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
            told = {"lacks": "it lacks the prompts", "has": "it has other prompts", "changed": "it has other texts for"}
            out.append(f"{told[what]} {shown}")
    if not out and list(old) != list(new):
        out.append("its prompts are in another order")
    return out


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, json.dumps(plain(value), indent=1).encode())


def write_bytes(path: Path, content: bytes) -> None:
    """In one step: who reads finds the old file or the new one."""
    own = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}")
    own.write_bytes(content)
    own.replace(path)


def _names(folder: Path) -> set[str]:
    return {name for name in os.listdir(folder) if not name.startswith(".")} if folder.is_dir() else set()


def _read_json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def _read_manifest(path: Path) -> dict[str, Any]:
    """Raises FileNotFoundError where there is no sweep, ValueError for one that cannot be read."""
    if not (path / MANIFEST).is_file():
        raise FileNotFoundError(f"no sweep in {path}: expected a folder with {MANIFEST} in it")
    try:
        manifest = _read_json(path / MANIFEST)
        version = manifest["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / MANIFEST} is damaged ({error!r})") from None
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"{path} was written with sweep schema {version}, this ddlab reads {SCHEMA_VERSION}: update it"
        )
    return manifest


def _flat(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: value}
    items = (_flat(item, f"{name}.{key}") for key, item in value.items())
    return {key: item for flat in items for key, item in flat.items()}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
