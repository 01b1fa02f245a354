"""What the doctor found: a table for each kind of layer, what is used, and the reason for everything that is not ok."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ddlab.views.page import View, escape, table

if TYPE_CHECKING:
    from ddlab.comparing.probe import Probe
    from ddlab.doctor import Choice, Findings

UNMASKED = "draft, no mask"  # as in ddlab/probe.py, which loads torch
MARKS = {"ok": "ok", "wrong": "WRONG", "error": "ERROR", "crashed": "CRASHED"}
WIDTH = 110  # characters of a line that an issue shows without scrolling


def findings_view(findings: Findings) -> View:
    """As text it can be pasted into an issue; it names no folder and no person."""
    groups = list(_groups(findings))
    lines = [_headline(findings), ""]
    lines += [f"  {name}: {value}" for name, value in findings.machine.items()]
    lines += [f"! {fault}" for fault in findings.faults] + [f"! {note}" for note in findings.notes]
    lines += ["", *(line for choice in findings.choices for line in _wrapped(choice_line(choice, findings), "  "))]
    for title, calls, rows in groups:
        lines += ["", title, *_columns(["", *calls], rows)]
    lines += ["", *(line for said in _reasons(findings) for line in _wrapped(said, "    "))]
    return View("doctor", "\n".join(lines).rstrip(), _html(findings, groups), height=_height(findings, groups))


def _height(findings: Findings, groups: Sequence[tuple[str, list[str], list[list[str]]]]) -> int:
    """Pixels, with two tables beside each other."""
    rows = max((len(rows) for _, _, rows in groups), default=0)
    return 330 + (len(groups) + 1) // 2 * (120 + 34 * rows) + 34 * len(_reasons(findings))


def _headline(findings: Findings) -> str:
    if findings.ok:
        return f"ddlab doctor: {findings.pair} can decode exactly on this machine"
    tried = " with any backend that was tried" if findings.probes else ""
    return f"ddlab doctor: {findings.pair} CANNOT decode exactly on this machine{tried}"


def choice_line(choice: Choice, findings: Findings) -> str:
    """What one part of the pair runs on, and what that costs."""
    said = [f"{choice.part}: set to {choice.now}{'' if choice.works else _not_ok(choice, findings)}"]
    tried = any(p.part == choice.part and p.backend == choice.auto for p in findings.probes)
    bad = ", which is not right here" if tried and choice.auto not in choice.usable else ""
    said.append(f'attention="auto" takes {choice.auto}{bad}')
    if choice.slower is not None and choice.fastest != choice.auto:
        cost = f"{choice.slower:.2f} times the time of {choice.fastest}, the fastest that is right here"
        said.append(f"it takes {cost} (miniature, median of {choice.repeats})")
    elif choice.slower is not None:
        said.append(f"the fastest that is right here (miniature, median of {choice.repeats})")
    right = ", ".join(choice.usable) if choice.usable else "NONE of those tried"
    return f"{'; '.join(said)}. Right in every call: {right}."


def _not_ok(choice: Choice, findings: Findings) -> str:
    own = [p for p in findings.probes if p.part == choice.part and p.backend == choice.now and p.what != UNMASKED]
    if not own:
        return " (not tried)"
    bad = dict.fromkeys(p.verdict for p in own if not p.works)
    return f", which is {' and '.join(bad)} here" if bad else ""


def _groups(findings: Findings) -> Iterable[tuple[str, list[str], list[list[str]]]]:
    """Of each kind of layer: a title, the calls, and a row of verdicts for each backend."""
    for (part, kind, layers), probes in _by(findings.probes, lambda p: (p.part, p.kind, p.layers)):
        calls = list(dict.fromkeys(p.what for p in probes))
        rows, missing = [], []
        for name, own in _by(probes, lambda p: p.backend):
            said = {p.what: _short(p) for p in own}
            if {p.verdict for p in own} == {"not installed"}:
                missing.append(name)
            else:
                rows.append([name, *(said.get(call, "-") for call in calls)])
        if missing:
            rows.append([f"not installed: {', '.join(missing)}"])
        numbers = ", ".join(map(str, layers))
        yield f"{part}, {kind} (layer{'s' * (len(layers) != 1)} {numbers})", calls, rows


def _by(probes: Sequence[Probe], key: Callable[[Probe], Any]) -> list[tuple[Any, list[Probe]]]:
    found: dict[Any, list[Probe]] = {}
    for p in probes:
        found.setdefault(key(p), []).append(p)
    return list(found.items())


def _short(probe: Probe) -> str:
    mark = MARKS.get(probe.verdict, probe.verdict)
    return f"{mark} {probe.ratio:.2f}x" if probe.ratio is not None else mark


def _reasons(findings: Findings) -> list[str]:
    """Everything that is not ok, each reason once, with who gives it and where it holds."""
    found: dict[tuple[str, str], tuple[dict[str, None], dict[str, None]]] = {}
    for p in findings.probes:
        if not p.works:
            off = "" if p.error is None else f"off by {p.error:.1e}, rounding costs {p.band:.1e}"
            said = ": ".join(part for part in (p.diagnosis, p.said or off) if part)
            names, places = found.setdefault((p.verdict, said), ({}, {}))
            names[p.backend] = None
            if p.verdict != "not installed":
                places[f"{p.part} {p.kind}, {p.what}"] = None
    lines = []
    for (verdict, said), (names, places) in found.items():
        where = f" [{'; '.join(places)}]" if places else ""
        lines.append(f"{MARKS.get(verdict, verdict)} {', '.join(names)}: {said}{where}")
    if any(p.what == UNMASKED for p in findings.probes):
        lines.append(f"{UNMASKED}: a call that code outside of ddlab may make; ddlab gives the drafter a mask always.")
    times = {p.repeats for p in findings.probes if p.ratio is not None}
    if times:
        said = "time of the layer, of eager's (of a linear layer: of the form in use)"
        lines.append(f"x: {said}, medians of {max(times)} in turn.")
    return lines


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    every = [list(head), *map(list, rows)]
    count = len(head)
    widths = [max(len(row[i]) for row in every if len(row) == count) for i in range(count)]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=False)).rstrip() for row in every]


def _wrapped(text: str, indent: str) -> list[str]:
    lines, line = [], ""
    for word in text.split(" "):
        if line and len(line) + 1 + len(word) > WIDTH:
            lines.append(line)
            line = indent + word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line]


def _html(findings: Findings, groups: Sequence[tuple[str, list[str], list[list[str]]]]) -> str:
    style, mark = ("good", "✓") if findings.ok else ("bad", "✕")
    parts = [f'<p class="{style}">{mark} {escape(_headline(findings))}</p>']
    parts += [f'<p class="note"><b>!</b> {escape(said)}</p>' for said in findings.faults]
    parts += [f'<p class="soft">{escape(said)}</p>' for said in findings.notes]
    parts += [f"<p>{escape(choice_line(choice, findings))}</p>" for choice in findings.choices]
    kinds = []
    for title, calls, rows in groups:
        cells = ([escape(row[0]), *map(_cell, row[1:])] for row in rows if len(row) > 1)
        shown = table(["backend", *map(escape, calls)], cells, "figures")
        missing = "".join(f'<p class="few">– {escape(row[0])}</p>' for row in rows if len(row) == 1)
        kinds.append(f"<div><h3>{escape(title)}</h3>{shown}{missing}</div>")
    reasons = "".join(f"<li>{escape(said)}</li>" for said in _reasons(findings))
    facts = ((escape(name), escape(value)) for name, value in findings.machine.items())
    parts += [f'<div class="rates">{"".join(kinds)}</div>', f"<h3>Why</h3><ul>{reasons}</ul>" if reasons else ""]
    parts.append(f"<details><summary>machine</summary><div>{table(('', ''), facts, 'settings')}</div></details>")
    return "".join(parts)


def _cell(said: str) -> str:
    style = "good" if said.startswith("ok") else "bad" if said.split(" ")[0] in ("WRONG", "ERROR", "CRASHED") else "few"
    mark = {"good": "✓ ", "bad": "✕ "}.get(style, "– ")
    return f'<span class="{style}">{mark}{escape(said)}</span>'
