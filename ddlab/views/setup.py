"""How runs were set up: the exact prompt, settings, target, the drafter's conventions, versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddlab.trace import Trace
from ddlab.views.page import View, escape, lines_of, table
from ddlab.views.summary import names


def setup_view(traces: Sequence[Trace]) -> View:
    """What sets the runs apart, every different prompt in full, then all they share."""
    prompt_text, prompt_html = _prompts(traces)
    shown = "\n".join(line for line in prompt_text.split("\n") if not line.startswith("ids: "))  # the ids are folded
    text, html, height = [prompt_text], [prompt_html], 262 + 22 * lines_of(shown)
    for title, parts in _sections(traces).items():
        columns = [flat(part) for part in parts]
        sources: dict[str, str] = {}  # where a convention comes from stands beside its value
        for column in columns:
            found = {key: column.pop(key) for key in list(column) if key.startswith("sources.")}
            sources |= {key.removeprefix("sources."): value for key, value in found.items()}
        keys = list(dict.fromkeys(key for column in columns for key in column if key))
        shared = [key for key in keys if len({column.get(key) for column in columns}) == 1]
        apart = [key for key in keys if key not in shared]
        text.append(f"\n{title}")
        if apart:
            text += [f"  {key}: {' | '.join(column.get(key, '-') for column in columns)}" for key in apart]
            rows = [[escape(key), *(escape(column.get(key, "-")) for column in columns)] for key in apart]
            head = ["differs", *map(escape, names(traces))]
            html.append(f"<h3>{escape(title)}</h3>{table(head, rows, 'settings')}")
            height += 75 + 34 * (1 + len(rows))
        if shared:
            said = [(key, columns[0][key], _source(key, sources)) for key in shared]
            text += [f"  {key}: {value}{f'  [{source}]' if source else ''}" for key, value, source in said]
            head = [title, "value", *(["from"] if sources else [])]
            rows = [[escape(cell) for cell in row[: len(head)]] for row in said]
            same = " the same in all runs" if len(traces) > 1 else ""
            summary = f"<summary>{escape(title)}<span class='soft'>{len(shared)} values{same}</span></summary>"
            html.append(f"<details>{summary}<div>{table(head, rows, 'settings')}</div></details>")
    return View("setup", "\n".join(text), "".join(html), height)


def _sections(traces: Sequence[Trace]) -> dict[str, list[Any]]:
    pairs = [trace.header.get("pair", {}) for trace in traces]
    return {
        "settings": [trace.settings for trace in traces],
        "target": [{key: value for key, value in pair.items() if key != "drafter"} for pair in pairs],
        "drafter": [pair.get("drafter") or {} for pair in pairs],
        "versions": [trace.header.get("versions", {}) for trace in traces],
    }


def flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested settings as one line each: `rope.rope_theta`."""
    if isinstance(value, Mapping) and value:
        parts = (flat(item, f"{prefix}.{key}" if prefix else str(key)) for key, item in value.items())
        return {key: item for part in parts for key, item in part.items()}
    return {prefix: _brief(value)}


def _brief(value: Any) -> str:
    """One line; names that repeat in a row are counted, numbers never."""
    if value is None or value in ([], (), {}):
        return "none"
    if not isinstance(value, list | tuple):
        return str(value)
    runs: list[list[Any]] = []  # [item, how often in a row]
    for item in value:
        if runs and runs[-1][0] == item and not isinstance(item, int | float):
            runs[-1][1] += 1
        else:
            runs.append([item, 1])
    return ", ".join(_brief(item) if times == 1 else f"{times} × {_brief(item)}" for item, times in runs)


def _source(key: str, sources: Mapping[str, str]) -> str:
    """The source of `block_attention.full_attention` may be given for `block_attention` as a whole."""
    while key and key not in sources:
        key = key.rpartition(".")[0]
    return sources.get(key, "")


def _prompts(traces: Sequence[Trace]) -> tuple[str, str]:
    """Each different prompt once, exactly as the target read it, under the names of the runs that read it."""
    readers: list[tuple[list[str], Mapping[str, Any]]] = []
    for name, trace in zip(names(traces), traces, strict=True):
        prompt = trace.header.get("prompt", {})
        known = next((names for names, other in readers if other == prompt), None)
        if known is None:
            readers.append(([name], prompt))
        else:
            known.append(name)
    text, html = ["prompt"], ["<h3>Prompt, exactly as the target read it</h3>"]
    if len(readers) > 1:
        text.append("! The runs did not read the same prompt.")
        html.append('<p class="note"><b>!</b> The runs did not read the same prompt.</p>')
    for who, prompt in readers:
        ids, rendered = list(prompt.get("ids", ())), prompt.get("text") or "(given as token ids)"
        arguments = ", ".join(f"{key}={value}" for key, value in (prompt.get("template_args") or {}).items())
        left = ", ".join(f"{key}={value}" for key, value in (prompt.get("template_defaults") or {}).items())
        head = f"{'; '.join(who)}: {len(ids)} tokens; template arguments: {arguments or 'none'}"
        head += f"; read by the template but not given: {left}" if left else ""
        shown = ", ".join(map(str, ids))
        text += [head, str(rendered), f"ids: {shown}"]
        html.append(f"<p class='soft'>{escape(head)}</p><pre dir='auto'>{escape(rendered)}</pre>")
        html.append(f"<details><summary>token ids</summary><div class='num'>{escape(shown)}</div></details>")
    return "\n".join(text), "".join(html)
