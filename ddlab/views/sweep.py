"""A sweep in figures: every one with its interval and what stands behind it; what is left out is counted beside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddlab.intervals import ENOUGH_PROMPTS, ENOUGH_ROUNDS, LEAST_TOKENS, Estimate, Paired
from ddlab.views import page
from ddlab.views.budgets import budgets_view
from ddlab.views.page import View, escape, table

if TYPE_CHECKING:
    from ddlab.advice import Advice
    from ddlab.sweeps.results import Group, SameText, Sweep

SUMMARY = (
    "method",
    "T",
    "prompts",
    "runs",
    "rounds",
    "tokens per round, τ",
    "tokens/s",
    "ended by a stop token",
    "too short: left out",
    "their τ",
    "failed",
)
PAIRS = ("compared", "prompts", "rounds", "ratio (×)", "difference", "won", "tied", "lost", "unpaired")
TEXTS = ("method", "T", "equal to ar", "first differences, by the margin of plain decoding in logits")


def sweep_view(sweep: Sweep, by_kind: bool = True) -> View:
    """Figures by method (and by kind of prompt), comparisons by prompt, texts against plain decoding, what failed."""
    parts = [
        ("", SUMMARY, [_summary(group) for group in sweep.summary()]),
        *((f"{name.replace('_', ' ')}, by prompt", PAIRS, rows) for name, rows in _comparisons(sweep).items()),
        ("texts, token by token", TEXTS, [_same(same) for same in sweep.texts()]),
    ]
    kinds = dict.fromkeys(group.kind for group in sweep.summary(by_kind=True))
    if by_kind and len(kinds) > 1:
        rows = [[str(group.kind), *_summary(group)] for group in sweep.summary(by_kind=True)]
        parts.append(("by kind of prompt", ("kind", *SUMMARY), rows))
    if sweep.failed:
        rows = [[str(failed["run"]), str(failed["error"])] for failed in sweep.failed]
        parts.append(("failed runs", ("run", "error"), rows))
    parts = [part for part in parts if part[2]]
    said = [*sweep.notes, *_remarks(sweep)]
    head = f"{len(sweep.runs)} of {sweep.planned} runs, {len(sweep.failed)} failed, {len(sweep.pending)} pending"
    text = [head, *(_text(*part) for part in parts), "\n".join(said)]
    html = [
        f"<p>{escape(head)}</p>",
        *(_html(*part) for part in parts),
        *(f'<p class="soft">{escape(s)}</p>' for s in said),
    ]
    rows_shown = sum(len(rows) for _, _, rows in parts)
    return View("sweep", "\n\n".join(text), "".join(html), height=300 + 34 * rows_shown)


def sweep_report(sweep: Sweep, path: str | os.PathLike[str], advice: Advice | None = None) -> Path:
    """Writes the page; raises FileNotFoundError where its folder does not exist."""
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"no folder {target.parent} to write {target.name} into: create it first")
    title = f"{sweep.manifest['pair'].get('name') or 'unnamed pair'}: {len(sweep.files.entries)} prompts"
    body = [f"<h1>{escape(title)}</h1>", table(("", ""), _settings(sweep), "settings"), sweep_view(sweep).html]
    if advice is not None:
        shown = advice.cost.source.get("temperature", min(sweep.settings["temperatures"]))
        groups = [g for g in [*sweep.summary(), *sweep.summary(by_kind=True)] if g.temperature == shown]
        body += [f"<h2>Which budget, T = {shown:g}</h2>", budgets_view(advice, groups).html]
    return page.write(target, page.document(title, f"<main>{''.join(body)}</main>"))


def _settings(sweep: Sweep) -> list[list[str]]:
    pair, versions = sweep.manifest["pair"], sweep.manifest["versions"]
    said = {"begun": sweep.manifest["created"], "dtype": pair.get("dtype"), "attention": pair.get("attention")}
    said |= {"devices": sorted({run.device for run in sweep.runs})} | sweep.settings
    said |= {name: versions.get(name) for name in ("ddlab", "torch", "transformers")}
    lists = {name: ", ".join(map(str, v)) if isinstance(v, list) else v for name, v in said.items()}
    return [[escape(name.replace("_", " ")), escape(value)] for name, value in lists.items()]


def _summary(group: Group) -> list[str]:
    long = group.tokens_per_round
    return [
        group.name,
        f"{group.temperature:g}",
        str(long.prompts),
        str(group.runs),
        str(long.rounds),
        _figure(long),
        _figure(group.tokens_per_second),
        f"{group.stopped_runs} of {group.runs}",
        str(group.short_runs),
        f"{group.short.figure} ({group.short.rounds} rounds)" if group.short_runs else "-",
        str(group.failed_runs),
    ]


def _comparisons(sweep: Sweep) -> dict[str, list[list[str]]]:
    """By metric: speed against the first method that was run, tokens per round against the first that drafts."""
    keys = list(dict.fromkeys(key[:2] for key in sweep.keys))
    drafting = [key for key in keys if key[0] != "ar"]
    out = {"tokens_per_second": [_pair(p) for p in sweep.compare("tokens_per_second", keys[0])]}
    if len(drafting) > 1:
        found = sweep.compare("tokens_per_round", drafting[0])
        out["tokens_per_round"] = [_pair(p) for p in found if not p.ours.startswith("ar")]
    return out


def _pair(found: Paired) -> list[str]:
    ratio, counts = found.ratio, (found.wins, found.ties, found.losses, found.unpaired)
    names = f"{found.ours} against {found.theirs}"
    return [
        names,
        str(ratio.prompts),
        str(ratio.rounds),
        _figure(ratio),
        _figure(found.difference),
        *map(str, counts),
    ]


def _same(same: SameText) -> list[str]:
    told = [
        f"{d['run']} at token {d['index'] + 1}: "
        + ("no margin" if d["margin"] is None else f"{d['margin']:.3g}")
        + {True: ", a tie", False: ", NO TIE", None: ", not judged"}[d["tie"]]
        for d in same.differences[:4]
    ]
    more = [f"… {len(same.differences)} in all"] if len(same.differences) > 4 else []
    equal = f"{'✓' if same.equal == same.compared else '✕'} {same.equal} of {same.compared}"
    return [same.name, f"{same.temperature:g}", equal, "; ".join(told + more) or "-"]


def _figure(found: Estimate) -> str:
    return found.figure + ("" if found.enough or found.value is None else " (few)")


def _remarks(sweep: Sweep) -> list[str]:
    shortest = min(LEAST_TOKENS, sweep.settings["max_new_tokens"])
    return [
        "Figures are means over prompts, each counted once, with the middle 95 % of 4000 resamples of the prompts. "
        f"(few): fewer than {ENOUGH_PROMPTS} prompts or {ENOUGH_ROUNDS} rounds, the interval is likely too narrow.",
        f"A text that a stop token ended before {shortest} new tokens is left out of every figure but its own. Seconds "
        "are those of the rounds, without the prompt's forward and the recording; each process warmed up before.",
        "Ratios are geometric means over the prompts that both have; won: the first one has more on that prompt.",
    ]


def _text(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join(([f"{title}:"] if title else []) + shown)


def _html(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[_cell(cell) for cell in row] for row in rows]
    return (f"<h2>{escape(title)}</h2>" if title else "") + table(map(escape, head), cells, "figures")


def _cell(text: str) -> str:
    style = (
        "few" if text.endswith("(few)") or text == "-" else "bad" if text.startswith("✕") or "NO TIE" in text else ""
    )
    return f'<span class="{style}">{escape(text)}</span>' if style else escape(text)
