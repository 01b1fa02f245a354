"""Probes here, or in a child process: what may end a process ends one that says after every probe how it went.

Compilers and packages with kernels of their own may do so. A crash then costs one probe, and is a result like others.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddlab.comparing import ways
from ddlab.comparing.delta_forms import FORMS
from ddlab.comparing.probe import REPEATS, Case, Probe, Subject
from ddlab.comparing.ways import Way

PATIENCE = 240.0  # seconds that a child may take over the probes of one backend
MARK, SILENT = "ddlab-probe ", "no answer"


def probes(
    subjects: Sequence[Subject], chosen: Iterable[Way], repeats: int = REPEATS, *, small: bool = True
) -> list[Probe]:
    """Every way on every subject whose layers it computes, in every call; the risky ones in a child, if small."""
    found: list[Probe] = []
    cases: dict[tuple[int, str], Callable[[Way, int], Probe]] = {}
    for way in chosen:
        wanted = [(i, what) for i, s in enumerate(subjects) if s.linear == way.linear for what in s.calls]
        device = subjects[0].pair.device.type
        if risky(way) and way.missing(device) is None:
            found += in_a_child(subjects, way, wanted, repeats) if small else _untried(subjects, way, wanted)
            continue
        for i, what in wanted:
            if (i, what) not in cases:
                cases[i, what] = case(subjects[i], what)
            found.append(cases[i, what](way, repeats))
    return found


def case(subject: Subject, what: str) -> Callable[[Way, int], Probe]:
    """How to probe one call; a call that not even eager can make is an error of every backend."""
    try:
        return Case(subject, what).probe
    except Exception as error:
        said = f"on eager: {ways.verbatim(error)}"
        return lambda way, _: Probe(subject.part, subject.layers, subject.kind, what, way.name, "error", said)


def risky(way: Way) -> bool:
    return way.name in ways.RISKY or (way.linear and FORMS[way.name].fla)


def _untried(subjects: Sequence[Subject], way: Way, wanted: Sequence[tuple[int, str]]) -> list[Probe]:
    said = "it may end the process, and there is no miniature to try it on in a child"
    tried = [(subjects[i], what) for i, what in wanted]
    return [Probe(s.part, s.layers, s.kind, what, way.name, "not tried", said) for s, what in tried]


def in_a_child(
    subjects: Sequence[Subject],
    way: Way,
    wanted: Sequence[tuple[int, str]],
    repeats: int = REPEATS,
    patience: float = PATIENCE,
) -> list[Probe]:
    """The same probes in a process of their own; after a crash another one goes on with the rest."""
    found: list[Probe] = []
    left = list(wanted)
    while left:
        lines, ended = _run_child(pickle.dumps((list(subjects), way, left, repeats)), patience)
        done = [Probe(**(line | {"layers": tuple(line["layers"])})) for line in lines]
        found += done
        left = left[len(done) :]
        if left and not ended:
            raise RuntimeError(f"the probes of {way.name!r} ended before they were done")
        verdict = "crashed"
        while left:
            i, what = left.pop(0)
            subject = subjects[i]
            found.append(Probe(subject.part, subject.layers, subject.kind, what, way.name, verdict, ended))
            if not ended.startswith(SILENT):
                break  # another child goes on; a silent one would cost as much time again
            verdict = "not tried"
    return found


def _run_child(given: bytes, patience: float) -> tuple[list[dict[str, Any]], str]:
    """What the child said, a probe a line, and how it ended: "" where it finished by itself."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environment |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        with out.open("wb") as to_out, err.open("wb") as to_err:
            command = [sys.executable, "-c", "from ddlab.comparing.children import child; child()"]
            running = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=to_out, stderr=to_err, env=environment)
            try:
                running.communicate(given, timeout=patience)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()
                ended = f"{SILENT} within {patience:g} seconds"
            else:
                ended = _how(running.returncode, err.read_text("utf-8", "replace"))
        lines = [line for line in out.read_text("utf-8", "replace").splitlines() if line.startswith(MARK)]
    return [json.loads(line.removeprefix(MARK)) for line in lines], ended


def _how(code: int, said: str) -> str:
    if code == 0:
        return ""
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        return f"the process was ended by {name}" + (f": {last[: ways.LONGEST]}" if last else "")
    return f"the process ended with status {code}: {last[: ways.LONGEST]}"


def child() -> None:
    """The child's side: the probes come in as a pickle of its own parent, results go out as lines of JSON."""
    subjects, way, wanted, repeats = pickle.loads(sys.stdin.buffer.read())
    for i, what in wanted:
        result = asdict(case(subjects[i], what)(way, repeats))
        sys.stdout.write(f"\n{MARK}{json.dumps(result)}\n")
        sys.stdout.flush()
