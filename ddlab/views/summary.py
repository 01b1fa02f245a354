"""Runs side by side. A figure stands beside the number of rounds that it rests on, or is not shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddlab.trace import ENOUGH_ROUNDS, Mean, Trace
from ddlab.views.page import View, escape, notes, table

LEAST_ROUNDS, LEAST_TOKENS = 8, 32  # after the warm-up round, for a speed to be shown
LOOP = 0.25  # share of repeated 4-grams from which a text is called a loop


@dataclass(frozen=True)
class Speed:
    """Seconds of a run's rounds, the first one apart: it pays for allocations and compiled kernels."""

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
    """A name for each run that no other run has; it tells the wrong way and edited runs from the rest."""
    out: list[str] = []
    for trace in traces:
        budget = trace.settings.get("budget")
        name = trace.method + (f", budget {budget}" if budget is not None else "")
        name += ", flattened" if trace.settings.get("linear_state") == "flattened" else ""
        name += ", edited" if any(step.edited for step in trace.steps) else ""
        same = sum(other == name or other.startswith(f"{name} (") for other in out)
        out.append(f"{name} ({same + 1})" if same else name)
    return out


def field(audit: Any, name: str) -> Any:
    """A field of an audit, which may be an object or the dict that it was saved as."""
    return audit.get(name) if isinstance(audit, dict) else getattr(audit, name, None)


def verdict(audit: Any) -> str:
    return "not audited" if audit is None else "exact" if field(audit, "ok") else "NOT EXACT"


def plain_run(trace: Trace, traces: Sequence[Trace]) -> Trace | None:
    """The plain-decoding run of the same prompt and settings among `traces`, if there is one."""
    keys = ("temperature", "seed", "max_new_tokens", "stop_token_ids")
    for other in traces:
        same = all(other.settings.get(key) == trace.settings.get(key) for key in keys)
        if other.method == "ar" and other.prompt_ids == trace.prompt_ids and same:
            return other
    return None


def same_text(trace: Trace, audit: Any, traces: Sequence[Trace]) -> str:
    """Is this the target's own text? The audit knows; without one, a plain run of the same prompt does."""
    if audit is not None and field(audit, "text_equal") is not None:
        return "yes" if field(audit, "text_equal") else "NO"
    plain = plain_run(trace, traces)
    if plain is None or plain is trace:
        return "not checked"
    mine, its = trace.output_ids, plain.output_ids
    differ = (i for i, (a, b) in enumerate(zip(mine, its, strict=False)) if a != b)
    return "yes, as ar" if mine == its else f"NO, from token {next(differ, min(len(mine), len(its))) + 1}"


HEAD = (
    "method",
    "audit",
    "text equals plain decoding",
    "new tokens",
    "rounds",
    "accepted drafts per round",
    "tokens per round, τ",
    "seconds (first round)",
    "tokens/s after it",
    "against ar",
    "repeated 4-grams",
)
SHORT = (0, 1, 2, 3, 4, 6, 8)  # what a terminal has room for


def cells(trace: Trace, name: str, audit: Any, traces: Sequence[Trace]) -> list[str]:
    pace, loops, plain = speed(trace), loop_share(trace.output_ids), plain_run(trace, traces)
    timed, few = pace.seconds > 0, "not enough data"
    rate, its = pace.rate, speed(plain).rate if plain is not None else None
    ratio = "-" if plain is None or plain is trace else few if rate is None or its is None else f"{rate / its:.2f} ×"
    return [
        name,
        verdict(audit),
        same_text(trace, audit, traces),
        str(len(trace.output_ids)),
        str(trace.rounds),
        _figure(trace.accepted_drafts),
        _figure(trace.tokens_per_round),
        f"{pace.seconds:.2f} ({pace.warm_up:.2f})" if timed else "not timed",
        "not timed" if not timed else few if rate is None else f"{rate:.1f}",
        ratio if timed else "-",
        "too short" if loops is None else f"{loops:.0%}{' loops' if loops >= LOOP else ''}",
    ]


def summary_view(traces: Sequence[Trace], audits: Sequence[Any] | None = None) -> View:
    """Methods side by side; the text form has the columns that a terminal has room for."""
    verdicts = list(audits) if audits is not None else [None] * len(traces)
    runs = list(zip(traces, names(traces), verdicts, strict=True))
    rows = [cells(trace, name, audit, traces) for trace, name, audit in runs]
    lines = [[row[i] for i in SHORT] for row in [list(HEAD), *rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(SHORT))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    body = [[_cell(i, cell, run[0]) for i, cell in enumerate(row)] for row, run in zip(rows, runs, strict=True)]
    remarks = "".join(f'<p class="soft">{escape(remark)}</p>' for remark in _remarks(traces, rows))
    said = [notes(trace) for trace in traces]
    return View(
        title="methods side by side",
        text="".join(text for text, _ in said) + "\n".join("  ".join(line).rstrip() for line in padded),
        html="".join(html for _, html in said) + table(HEAD, body, "figures") + remarks,
        height=265 + 34 * len(rows),
    )


def _remarks(traces: Sequence[Trace], rows: list[list[str]]) -> list[str]:
    said = [
        "τ is what papers call acceptance length: accepted drafts and the target's own token. A last round "
        "that was cut counts what it added. The first new token is the prompt's forward's, not a round's.",
        "Seconds are those of the rounds, without the prompt's forward. The first round also warms up and is "
        f"kept apart; a speed needs {LEAST_ROUNDS} rounds and {LEAST_TOKENS} tokens after it.",
    ]
    if any(not trace.tokens_per_round.enough for trace in traces):
        said.append(f"Greyed means rest on fewer than {ENOUGH_ROUNDS} rounds.")
    if any(row[-1].endswith("loops") for row in rows):
        said.append(f"A text loops when {LOOP:.0%} or more of its 4-grams are repeats. Loops are easy to draft.")
    return said


def _figure(mean: Mean) -> str:
    rounds = f"{mean.rounds} round{'' if mean.rounds == 1 else 's'}"
    return "no rounds" if mean.value is None else f"{mean.value:.2f} ({rounds})"


def _cell(column: int, text: str, trace: Trace) -> str:
    shown = escape(text)
    if column == 1:
        mark, style = {"exact": ("✓ ", "good"), "NOT EXACT": ("✕ ", "bad")}.get(text, ("", "few"))
        return f'<span class="{style}">{mark}{shown}</span>'
    if text.startswith("NO") or text.endswith("loops"):
        return f'<span class="bad">{shown}</span>'
    grey = text.startswith("not ") or (column in (5, 6) and not trace.tokens_per_round.enough)
    return f'<span class="few">{shown}</span>' if grey else shown
