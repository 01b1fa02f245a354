"""How runs were set up: settings, pair, the drafter's conventions with their sources, versions, the exact prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddlab.trace import Trace
from ddlab.views.page import View, escape, table
from ddlab.views.summary import names

SECTIONS = ("settings", "pair", "versions")


def flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested settings as one line each: `drafter.rope.theta`."""
    if isinstance(value, Mapping) and value:
        parts = (flat(item, f"{prefix}.{key}" if prefix else str(key)) for key, item in value.items())
        return {key: item for part in parts for key, item in part.items()}
    return {prefix: _brief(value)}


def _brief(value: Any) -> str:
    if isinstance(value, list | tuple):
        runs: list[list[Any]] = []  # [item, how often in a row]
        for item in value:
            if runs and runs[-1][0] == item:
                runs[-1][1] += 1
            else:
                runs.append([item, 1])
        return ", ".join(str(item) if times == 1 else f"{times} × {item}" for item, times in runs) or "none"
    return "none" if value is None else str(value)


def setup_view(traces: Sequence[Trace]) -> View:
    """One table for what all runs share, one for what sets them apart, and every different prompt in full."""
    text, html = [], []
    for section in SECTIONS:
        columns = [flat(trace.header.get(section, {})) for trace in traces]
        sources = {}
        if section == "pair":  # where each convention of the drafter comes from stands beside its value
            for column in columns:
                sources |= {
                    k.replace(".sources.", "."): column.pop(k) for k in list(column) if ".sources." in k
                }
        keys = list(dict.fromkeys(key for column in columns for key in column if key))
        shared = [key for key in keys if len({column.get(key, "") for column in columns}) == 1]
        apart = [key for key in keys if key not in shared]
        text.append(f"\n{section}")
        text += [f"  {k}: {columns[0][k]}{f'  [{sources[k]}]' if k in sources else ''}" for k in shared]
        html.append(f"<h3>{section}</h3>")
        if apart:
            text += [f"  {k}: " + " | ".join(column.get(k, "not there") for column in columns) for k in apart]
            rows = [[escape(k), *(escape(column.get(k, "not there")) for column in columns)] for k in apart]
            html.append(table(["differs", *(escape(name) for name in names(traces))], rows, "settings"))
        rows = [
            [escape(k), escape(columns[0][k]), *([escape(sources.get(k, ""))] if sources else [])]
            for k in shared
        ]
        html.append(table(["same in all", "value", *(["source"] if sources else [])], rows, "settings"))
    prompts, same = _prompts(traces)
    text.append("\nprompt")
    html.append("<h3>prompt, as the target read it</h3>")
    if not same:
        html.append('<p class="note"><b>!</b> The runs did not read the same prompt.</p>')
        text.append("! The runs did not read the same prompt.")
    for name, prompt in prompts:
        ids = ", ".join(map(str, prompt.get("ids", ())))
        arguments = flat(prompt.get("template_args") or {}, "").items()
        said = (
            ", ".join(f"{key}={value}" for key, value in arguments if key)
            or "none given, the template's defaults"
        )
        head = f"{name}: {len(prompt.get('ids', ()))} tokens; template arguments: {said}"
        text += [f"{head}\n{prompt.get('text') or '(given as token ids)'}"]
        html.append(f"<p>{escape(head)}</p><pre>{escape(prompt.get('text') or '(given as token ids)')}</pre>")
        html.append(f"<details><summary>token ids</summary><div class='num'>{escape(ids)}</div></details>")
    return View("setup", "\n".join(text).strip(), "".join(html), height=900)


def _prompts(traces: Sequence[Trace]) -> tuple[list[tuple[str, dict[str, Any]]], bool]:
    """Each different prompt once, under the names of the runs that read it."""
    found: list[tuple[list[str], dict[str, Any]]] = []
    for name, trace in zip(names(traces), traces, strict=True):
        prompt = trace.header.get("prompt", {})
        for readers, known in found:
            if known == prompt:
                readers.append(name)
                break
        else:
            found.append(([name], prompt))
    if len(found) == 1:
        return [("all runs" if len(traces) > 1 else found[0][0][0], found[0][1])], True
    return [("; ".join(readers), prompt) for readers, prompt in found], not found
