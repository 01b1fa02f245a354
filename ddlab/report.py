"""One HTML file that can be sent to someone: no script, no request, everything it shows is in it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddlab.trace import Trace
from ddlab.tracefile import plain
from ddlab.views import acceptance, mask, page, path, rounds, setup, summary, tree

NODES_DRAWN = (
    8000  # of a trace; later rounds keep their line, but not their tree: a page of 100 MB helps nobody
)


def report(
    trace_or_traces: Trace | Sequence[Trace],
    path: str | os.PathLike[str],
    *,
    audits: Sequence[Any] | Any | None = None,
    title: str | None = None,
) -> Path:
    """Writes the report of one or several runs and returns its path.

    Args:
        audits: one per trace, in their order (`ddlab.audit`, or the dict it was saved as); None for a trace without.

    Raises:
        ValueError: no trace, or another number of audits than of traces.
        FileNotFoundError: the folder of `path` does not exist.
    """
    traces = [trace_or_traces] if isinstance(trace_or_traces, Trace) else list(trace_or_traces)
    single = audits is not None and (isinstance(audits, dict) or not isinstance(audits, Sequence))
    verdicts: list[Any] = [audits] if single else [None] * len(traces) if audits is None else list(audits)
    if not traces:
        raise ValueError("a report needs at least one trace")
    if len(verdicts) != len(traces):
        raise ValueError(
            f"{len(verdicts)} audits for {len(traces)} traces: give one per trace, None for none"
        )
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"no folder {target.parent} to write {target.name} into: create it first")
    return page.write(target, _document(traces, verdicts, title or _title(traces)))


def _title(traces: Sequence[Trace]) -> str:
    pairs = {str(trace.header.get("pair", {}).get("name") or "unnamed pair") for trace in traces}
    return f"{', '.join(sorted(pairs))}: {', '.join(dict.fromkeys(trace.method for trace in traces))}"


def _document(traces: Sequence[Trace], audits: Sequence[Any], title: str) -> str:
    names = summary.names(traces)
    created = ", ".join(sorted({str(trace.header.get("created", "at an unknown time")) for trace in traces}))
    links = " · ".join(f'<a href="#run{i}">{page.escape(name)}</a>' for i, name in enumerate(names))
    body = [
        f"<h1>{page.escape(title)}</h1>",
        f'<p class="soft">Speculative decoding, recorded {page.escape(created)}. Runs: {links}</p>',
        "".join(_verdict(*run) for run in zip(traces, names, audits, strict=True)),
        "<h2>Methods side by side</h2>",
        summary.summary_view(traces, audits).html,
    ]
    body += [_run(i, trace, name) for i, (trace, name) in enumerate(zip(traces, names, strict=True))]
    body += ["<h2>Setup</h2>", setup.setup_view(traces).html, _data(traces, audits)]
    return page.document(title, f"<main>{''.join(body)}</main>")


def _verdict(trace: Trace, name: str, audit: Any) -> str:
    """The first thing to read: is this text the target's own, and was every node what the target says alone?"""
    word = summary.verdict(audit)
    mark, style = {"exact": ("✓", "good"), "NOT EXACT": ("✕", "bad")}.get(word, ("–", "few"))
    said = (
        ""
        if audit is None
        else audit.to_text()
        if hasattr(audit, "to_text")
        else json.dumps(plain(audit), indent=1)
    )
    detail = f"<details{'' if word == 'exact' else ' open'}><summary>what was checked</summary><div><pre>"
    detail = f"{detail}{page.escape(said)}</pre></div></details>" if said else ""
    line = f'<p><span class="{style}">{mark} {word}</span> {page.escape(name)}</p>'
    return f"{line}{page.notes(trace)[1]}{detail}"


def _run(number: int, trace: Trace, name: str) -> str:
    parts = [
        f'<h2 id="run{number}">{page.escape(name)}</h2>',
        "<h3>Text by round</h3>",
        path.path_view(trace).html,
    ]
    if not trace.steps:
        return "".join([*parts, "<p>No round was needed.</p>"])
    if all(len(step.tree) == 1 for step in trace.steps):
        count = f"{trace.rounds} round{'s' if trace.rounds != 1 else ''}"
        return "".join([*parts, f"<p>Nothing was drafted: {count} of one token each, the target's own.</p>"])
    parts += ["<h3>Acceptance</h3>", acceptance.acceptance_view(trace).html]
    parts += ["<h3>Rounds</h3>", page.notes(trace)[1], tree.LEGEND]
    drawn = 0
    for step in trace.steps:
        drawn += len(step.tree)
        parts.append(_round(trace, step.index, drawn <= NODES_DRAWN))
    if drawn > NODES_DRAWN:
        parts.append(
            f'<p class="soft">Trees are drawn up to {NODES_DRAWN} nodes a run; the trace holds all of them.</p>'
        )
    return "".join(parts)


def _round(trace: Trace, number: int, draw: bool) -> str:
    step = trace.steps[number]
    flags = [f"edited: {', '.join(step.edited)}"] if step.edited else []
    flags += ["flattened"] if trace.settings.get("linear_state") == "flattened" else []
    flag = "".join(f' <span class="bad">{page.escape(said)}</span>' for said in flags)
    line = (
        f'<b>{number}</b><span class="soft">position {step.start}, {len(step.tree) - 1} drafted</span>'
        f"<span>{step.accepted} accepted, {len(step.emitted)} new, {step.stop_reason}</span>"
        f"<span>{rounds.round_html(trace, number)}</span>{flag}"
    )
    if not draw:
        return f"<details><summary>{line}</summary></details>"
    seen = f"<details><summary>what each node could see</summary><div>{mask.mask_html(trace, number)}</div></details>"
    return f"<details><summary>{line}</summary><div>{tree.tree_html(trace, number)}{seen}</div></details>"


def _data(traces: Sequence[Trace], audits: Sequence[Any]) -> str:
    """The figures for a program to read. `<` is written as an escape, so that no text can close the element."""
    runs = []
    for trace, audit in zip(traces, audits, strict=True):
        pace = summary.speed(trace)
        runs.append(
            {
                "header": trace.header,
                "output_ids": trace.output_ids,
                "text": trace.text,
                "finished": trace.finished,
                "rounds": trace.rounds,
                "accepted_drafts": [step.accepted for step in trace.steps],
                "new_tokens": [len(step.emitted) for step in trace.steps],
                "stop_reasons": [step.stop_reason for step in trace.steps],
                "seconds": pace.seconds,
                "first_round_seconds": pace.warm_up,
                "warnings": trace.warnings,
                "audit": audit if audit is None or isinstance(audit, dict) else audit.to_dict(),
            }
        )
    encoded = json.dumps(plain({"runs": runs}), separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="ddlab-report">{encoded}</script>'
