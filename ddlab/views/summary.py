"""Runs side by side. Every figure stands beside the number of rounds or tokens that it rests on, or is not shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddlab.trace import Mean, Trace
from ddlab.views.page import View, escape, notes, table

LEAST_ROUNDS, LEAST_TOKENS = 8, 32  # after the warm-up round, for a speed to be shown
LOOP = 0.25  # share of repeated 4-grams from which a text is called a loop


@dataclass(frozen=True)
class Speed:
    """Seconds of a run's rounds, the first one apart: it pays for caches, allocations and compiled kernels."""

    seconds: float
    warm_up: float
    rounds: int  # without the first
    tokens: int  # of those rounds

    @property
    def enough(self) -> bool:
        return self.rounds >= LEAST_ROUNDS and self.tokens >= LEAST_TOKENS and self.seconds > self.warm_up

    @property
    def rate(self) -> float | None:
        """Tokens per second without the warm-up round; None on too little to go by."""
        return self.tokens / (self.seconds - self.warm_up) if self.enough else None


def speed(trace: Trace) -> Speed:
    steps = trace.steps
    return Speed(
        seconds=sum(step.seconds for step in steps),
        warm_up=steps[0].seconds if steps else 0.0,
        rounds=max(len(steps) - 1, 0),
        tokens=sum(len(step.emitted) for step in steps[1:]),
    )


def loop_share(ids: Sequence[int]) -> float | None:
    """Share of 4-grams that occurred before; None for fewer than two of them."""
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return 1 - len(set(grams)) / len(grams) if len(grams) > 1 else None


def names(traces: Sequence[Trace]) -> list[str]:
    """A name for each run that no other run in the list has."""
    out: list[str] = []
    for trace in traces:
        budget = trace.settings.get("budget")
        name = trace.method + (f", budget {budget}" if budget is not None else "")
        name += ", flattened" if trace.settings.get("linear_state") == "flattened" else ""
        same = sum(1 for other in out if other == name or other.startswith(f"{name} ("))
        out.append(f"{name} ({same + 1})" if same else name)
    return out


def field(audit: Any, name: str) -> Any:
    """A field of an audit, which may be an object or the dict that it was saved as."""
    return audit.get(name) if isinstance(audit, dict) else getattr(audit, name, None)


def verdict(audit: Any) -> str:
    return "not audited" if audit is None else "exact" if field(audit, "ok") else "NOT EXACT"


def same_text(trace: Trace, audit: Any, traces: Sequence[Trace]) -> str:
    """Is this the target's own text? The audit knows; without one, an `ar` run of the same prompt and seed does."""
    if audit is not None and field(audit, "text_equal") is not None:
        return "yes" if field(audit, "text_equal") else "NO"
    keys = ("temperature", "seed", "max_new_tokens", "stop_token_ids")
    for other in traces:
        same_run = all(other.settings.get(key) == trace.settings.get(key) for key in keys)
        if other.method == "ar" and other.prompt_ids == trace.prompt_ids and same_run:
            if other is trace:
                return "is plain decoding"
            mine, plain = trace.output_ids, other.output_ids
            if mine == plain:
                return "yes, as the ar run"
            at = next((i for i, (a, b) in enumerate(zip(mine, plain, strict=False)) if a != b), len(mine))
            return f"NO, from new token {at + 1} on"
    return "not checked"


HEAD = (
    "method", "audit", "text = plain decoding", "new tokens", "rounds", "accepted drafts per round",
    "tokens per round, τ", "seconds", "first round", "tokens/s after it", "repeated 4-grams",
)  # fmt: skip


def cells(trace: Trace, name: str, audit: Any, traces: Sequence[Trace]) -> list[str]:
    pace, loops = speed(trace), loop_share(trace.output_ids)
    rate = "not timed" if not pace.seconds else "not enough data" if pace.rate is None else f"{pace.rate:.1f}"
    return [
        name,
        verdict(audit),
        same_text(trace, audit, traces),
        str(len(trace.output_ids)),
        str(trace.rounds),
        _figure(trace.accepted_drafts),
        _figure(trace.tokens_per_round),
        f"{pace.seconds:.2f}" if pace.seconds else "not timed",
        f"{pace.warm_up:.2f}" if pace.seconds else "not timed",
        rate,
        "too short" if loops is None else f"{loops:.0%}{' loops' if loops >= LOOP else ''}",
    ]


def summary_view(traces: Sequence[Trace], audits: Sequence[Any] | None = None) -> View:
    """Methods side by side; the text form is what the command line prints."""
    audits = list(audits) if audits is not None else [None] * len(traces)
    rows = [
        cells(trace, name, audit, traces)
        for trace, name, audit in zip(traces, names(traces), audits, strict=True)
    ]
    shown = (0, 1, 2, 3, 4, 6, 9)  # a terminal is narrow
    lines = [[row[i] for i in shown] for row in [list(HEAD), *rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(shown))]
    text = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
    warnings = "".join(notes(trace)[0] for trace in traces)
    few = any(not trace.tokens_per_round.enough for trace in traces)
    body = [
        [_cell(i, cell, trace) for i, cell in enumerate(row)] for row, trace in zip(rows, traces, strict=True)
    ]
    remarks = [
        "τ is the papers' acceptance length: accepted drafts + 1, the target's own token; a last round that was cut "
        "counts what it added. The first new token comes from the prompt's forward and belongs to no round.",
        "Seconds are those of the rounds, without the prompt's forward. The first round pays for warming up and is kept "
        f"apart; a speed needs {LEAST_ROUNDS} rounds and {LEAST_TOKENS} tokens after it.",
    ]
    if few:
        remarks.append("Greyed figures rest on fewer than 30 rounds.")
    if any(row[-1].endswith("loops") for row in rows):
        remarks.append(
            f"A text in which {LOOP:.0%} or more of the 4-grams are repeats loops, and a loop is easy to draft."
        )
    return View(
        title="methods side by side",
        text=warnings + text,
        html=table(HEAD, body, "figures") + "".join(f'<p class="soft">{remark}</p>' for remark in remarks),
        height=180 + 34 * len(rows),
    )


def _figure(mean: Mean) -> str:
    return "no rounds" if mean.value is None else f"{mean.value:.2f} ({mean.rounds} rounds)"


def _cell(column: int, text: str, trace: Trace) -> str:
    shown = escape(text)
    if column == 1:
        mark, style = {"exact": ("✓ ", "good"), "NOT EXACT": ("✕ ", "bad")}.get(text, ("", "few"))
        return f'<span class="{style}">{mark}{shown}</span>'
    if text.startswith("NO") or text.endswith("loops"):
        return f'<span class="bad">{shown}</span>'
    grey = (column in (5, 6) and not trace.tokens_per_round.enough) or text.startswith("not ")
    return f'<span class="few">{shown}</span>' if grey else shown
