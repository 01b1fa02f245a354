"""One HTML file that can be sent to someone: no request, everything it shows is in it, readable without a script."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlab.tokens import printable
from ddlab.trace import Trace
from ddlab.tracefile import plain
from ddlab.views import acceptance, aligned, data, front, page, path, rounds, setup, summary, timeline
from ddlab.views.replayed import replay_view

if TYPE_CHECKING:
    from ddlab.costs.model import CostModel
    from ddlab.replay import Replay


def report(
    trace_or_traces: Trace | Sequence[Trace],
    path: str | os.PathLike[str],
    *,
    audits: Sequence[Any] | Any | None = None,
    replays: Sequence[Replay | None] | Replay | None = None,
    cost: CostModel | None = None,
    views: Sequence[page.View] = (),
    title: str | None = None,
) -> Path:
    """Writes the report of one or several runs and returns its path.

    Args:
        audits: one per trace, in their order: `ddlab.audit`, the dict it was saved as, or None.
        replays: one per trace: `ddlab.replay` or None. The page then replays other budgets by itself.
        cost: what rounds cost, for the tokens per second that a replay predicts.
        views: more to be shown before the runs: budgets, comparisons.

    Raises:
        ValueError: no trace, another number of audits or replays than of traces, or a replay of another text.
        FileNotFoundError: the folder of `path` does not exist.
    """
    traces = [trace_or_traces] if isinstance(trace_or_traces, Trace) else list(trace_or_traces)
    if not traces:
        raise ValueError("a report needs at least one trace")
    verdicts, replayed = _each("audits", audits, traces), _each("replays", replays, traces)
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"no folder {target.parent} to write {target.name} into: create it first")
    budgets = [None if r is None else replay_view(trace, r, cost) for trace, r in zip(traces, replayed, strict=True)]
    return page.write(target, _document(traces, verdicts, budgets, views, title or _title(traces)))


def _each(what: str, given: Any, traces: Sequence[Trace]) -> list[Any]:
    """One a trace."""
    if given is None:
        return [None] * len(traces)
    listed = list(given) if isinstance(given, Sequence) else [given]
    if len(listed) != len(traces):
        raise ValueError(f"{len(listed)} {what} for {len(traces)} traces: give one per trace, None for none")
    return listed


def _title(traces: Sequence[Trace]) -> str:
    pairs = {str(trace.header.get("pair", {}).get("name") or "unnamed pair") for trace in traces}
    methods = dict.fromkeys(trace.method for trace in traces)
    return printable(f"{', '.join(sorted(pairs))}: {', '.join(methods)}")


def _document(
    traces: Sequence[Trace],
    audits: Sequence[Any],
    budgets: Sequence[page.View | None],
    views: Sequence[page.View],
    title: str,
) -> str:
    names = summary.names(traces)
    created = min(str(trace.header.get("created", "at an unknown time")) for trace in traces)
    created = created.replace("T", " ").replace("+00:00", " UTC")
    links = " · ".join(f'<a href="#run{i}">{page.escape(name)}</a>' for i, name in enumerate(names))
    body = [
        f"<h1>{page.escape(title)}</h1>",
        f'<p class="soft">Recorded {page.escape(created)}. Runs: {links} · <a href="#setup">setup</a></p>',
        _headline(audits),
        *(_verdict(*run) for run in zip(traces, names, audits, strict=True)),
        "<h2>Methods side by side</h2>",
        summary.summary_view(traces, audits).html,
        aligned.aligned_view(traces, [_data_name(i) for i in range(len(traces))]).html,
        *(f"<h2>{page.escape(view.title)}</h2>{view.fragment(f'view{i}')}" for i, view in enumerate(views)),
        '<h2 id="setup">Setup</h2>',
        setup.setup_view(traces).html,
        *(_run(i, *run) for i, run in enumerate(zip(traces, names, budgets, strict=True))),
        _data(traces, audits),
    ]
    return page.document(title, f"<main>{''.join(body)}</main>", script=True)


def _headline(audits: Sequence[Any]) -> str:
    """The first thing to read: is this what the target says by itself?"""
    wrong = sum(summary.verdict(audit) == "NOT EXACT" for audit in audits)
    missing = sum(audit is None for audit in audits)
    if wrong:
        return f'<p class="bad">✕ {wrong} of {len(audits)} runs: not what the target itself would say.</p>'
    if missing:
        return f'<p class="few">– {missing} of {len(audits)} runs: not audited.</p>'
    return '<p class="good">✓ Every run is what the target itself would say.</p>'


def _verdict(trace: Trace, name: str, audit: Any) -> str:
    word = summary.verdict(audit)
    mark, style = {"exact": ("✓", "good"), "NOT EXACT": ("✕", "bad")}.get(word, ("–", "few"))
    line = f'<span class="{style}">{mark} {word}</span> <b>{page.escape(name)}</b>'
    if audit is None:
        return f"{page.notes(trace)[1]}<p>{line}</p>"
    said = audit.to_text() if hasattr(audit, "to_text") else json.dumps(plain(audit), indent=1)
    replayed, total = summary.field(audit, "nodes"), summary.field(audit, "nodes_total")
    text = {True: "text equal to plain decoding", False: "text differs from plain decoding"}
    parts = [text.get(summary.field(audit, "text_equal"), "")]
    parts += [f"{replayed} of {total} nodes replayed"] if total is not None else []
    brief = f'<span class="soft">{", ".join(part for part in parts if part)}</span>'
    opened = "" if word == "exact" else " open"
    detail = f"<summary>{line}{brief}</summary><div><pre>{page.escape(said)}</pre></div>"
    return f"{page.notes(trace)[1]}<details{opened}>{detail}</details>"


def _data_name(number: int) -> str:
    return f"run{number}-data"


def _run(number: int, trace: Trace, name: str, budgets: page.View | None) -> str:
    parts = [f'<h2 id="run{number}">{page.escape(name)}</h2>']
    others = _budgets(f"run{number}-drafts", budgets)
    if not trace.steps:
        return "".join([*parts, path.path_view(trace).html, "<p>No round was needed.</p>"])
    if all(len(step.tree) == 1 for step in trace.steps):
        count = f"{trace.rounds} round{'s' if trace.rounds != 1 else ''}"
        said = f"<p>Nothing was drafted: {count} of one token each, the target's own.</p>"
        return "".join([*parts, path.path_view(trace).html, said, others])
    named = _data_name(number)
    text = page.escape(rounds.trace_text(trace))
    parts += [
        "<h3>Text and rounds</h3>",
        front.inspector(named, ("text", "tree", "mask")),
        front.data(named, data.run_data(trace)),
        f"<noscript>{rounds.run_html(trace)}</noscript>",
        f'<details class="rounds"><summary>every round as text</summary><div><pre>{text}</pre></div></details>',
        "<h3>Acceptance</h3>",
        acceptance.acceptance_html(trace, named),
        "<h3>Time</h3>",
        timeline.time_view(trace).html,
        others,
    ]
    return "".join(parts)


def _budgets(name: str, view: page.View | None) -> str:
    """The same text under other budgets: replayed in the page, or a table where no script runs."""
    if view is None:
        return ""
    return f"<h3>Other budgets</h3>{view.fragment(name)}"


def _data(traces: Sequence[Trace], audits: Sequence[Any]) -> str:
    """The figures, for a program."""
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
    return front.data("ddlab-report", {"runs": runs})
