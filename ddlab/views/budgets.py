"""Which budget? What each way to decode brings, predicted and measured, over prompts, with intervals and counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddlab.costs.check import WITHIN
from ddlab.costs.counterfactual import ENDS, ORACLES
from ddlab.intervals import ENOUGH_PROMPTS, Estimate
from ddlab.views.curves import Choice, curves, ends, whiskers
from ddlab.views.page import View, columns, escape, table

if TYPE_CHECKING:
    from ddlab.advice import Advice, KindAdvice
    from ddlab.costs.check import Check

METHODS = {"ar": "ar", "dflash": "chain", "ddtree": "tree"}  # a measured method's name among the options of an advice
SAID = (
    "Every prompt counts once; [ ] and whiskers are 95 % bootstrap intervals over prompts. τ is tokens per round; "
    "predicted: replayed rounds at the measured cost of their rows."
)


def choices(advice: KindAdvice | None, groups: Iterable[Any]) -> list[Choice]:
    """Options of an advice and measured groups of the same prompts, put together by method and budget."""
    measured = {(METHODS.get(g.method, g.method), g.budget): g for g in groups}
    found = []
    for option in () if advice is None else advice.options:
        group = measured.pop((option.name, option.budget), None)
        found.append(
            Choice(
                option.name,
                option.budget,
                option.tokens_per_round,
                None if group is None else group.tokens_per_round,
                option.tokens_per_second,
                None if group is None else group.tokens_per_second,
                0.0 if advice is None else advice.chosen.get(option.label, 0.0),
                advice is not None and option == advice.best,
            )
        )
    for (name, budget), group in measured.items():
        tau, speed = group.tokens_per_round, group.tokens_per_second
        found.append(Choice(name, budget, None, tau, None, speed, math.nan, False))
    return found


def budgets_view(advice: Advice | None = None, groups: Sequence[Any] = (), kind: str = "all") -> View:
    """τ and speed against budget, all ways to decode by speed, the kinds of prompts, and what stands in the way.

    Args:
        advice: what `ddlab.advise` predicts.
        groups: what `Sweep.summary` measured, of one temperature; both of them (by kind and not) if there are.
        kind: of the prompts that pictures and table are of.

    Raises:
        ValueError: nothing to show, or an unknown kind.
    """
    kinds = {} if advice is None else {known.kind: known for known in advice.kinds}
    known = list(dict.fromkeys([*kinds, *(group.kind or "all" for group in groups)]))
    if kind not in known:
        raise ValueError(
            f"nothing is known of prompts of kind {kind!r}: {', '.join(known) or 'give an advice or groups'}"
        )
    mine, measured = kinds.get(kind), [group for group in groups if (group.kind or "all") == kind]
    temperatures = sorted({group.temperature for group in measured})
    if len(temperatures) > 1:
        raise ValueError(f"groups of several temperatures, {temperatures}: show one at a time")
    found = sorted(choices(mine, measured), key=lambda choice: -choice.speed)
    remarks = " ".join([SAID, *_remarks(found, mine, measured)])
    text = [remarks, "", columns(HEAD, [_cells(choice) for choice in found])]
    html = [f'<p class="soft">{escape(remarks)}</p>', curves(found), _forest(found)]
    if mine is not None:
        rows = [_kind_cells(each) for each in kinds.values()]
        text += ["", columns(KIND_HEAD, rows), "", *_limits(mine)]
        grey = [not each.best.tokens_per_second.enough for each in kinds.values()]
        cells = [[_grey(cell, few) for cell in row] for row, few in zip(rows, grey, strict=True)]
        html += ["<h3>By kind of prompt</h3>", table(KIND_HEAD, cells, "figures")]
        html += ["<h3>What stands in the way</h3>", _limits_html(mine)]
    return View(
        title="which budget" + ("" if kind == "all" else f" ({kind})"),
        text="\n".join(text),
        html="".join(html),
        height=380 + 33 * len(found) + (0 if mine is None else 800 + 33 * len(kinds)),
    )


def _remarks(found: Sequence[Choice], advice: KindAdvice | None, groups: Sequence[Any]) -> Iterator[str]:
    """What is not in the figures, and why they are greyed."""
    short = sum(group.short_runs for group in groups)
    failed = sum(group.failed_runs for group in groups)
    if advice is not None and advice.short_prompts:
        yield f"Left out of the predictions: {advice.short_prompts} prompts whose text stopped early."
    if short or failed:
        yield f"Left out of what was measured: {short} runs that stopped early, {failed} that failed."
    if any(not estimate.enough for choice in found for estimate in choice.known):
        yield f"Figures on fewer than {ENOUGH_PROMPTS} prompts are greyed: too few to rest on."


# ---- the table -------------------------------------------------------------------------------------

HEAD = ("way", "predicted tokens/s", "measured tokens/s", "τ, tokens per round", "prompts", "rounds", "best in")


def _cells(choice: Choice) -> list[str]:
    counted = choice.known[0]
    measured = "-" if choice.measured is None else choice.measured.figure
    if choice.measured is not None and _counts(choice.measured) != _counts(counted):
        measured += " ({} prompts, {} rounds)".format(*_counts(choice.measured))
    return [
        choice.label + (" ★" if choice.best else ""),
        "-" if choice.predicted is None else choice.predicted.figure,
        measured,
        "-" if choice.tau is None else choice.tau.figure,
        *map(str, _counts(counted)),
        "-" if math.isnan(choice.share) else f"{choice.share:.0%}",
    ]


def _counts(estimate: Estimate) -> tuple[int, int]:
    return estimate.prompts, estimate.rounds


def _forest(found: Sequence[Choice]) -> str:
    speeds = [e for choice in found for e in (choice.predicted, choice.measured) if e is not None]
    most = max((ends(estimate)[1] for estimate in speeds if estimate.value is not None), default=1.0)
    rows = []
    for choice in found:
        name, *cells = _cells(choice)
        grey = any(not estimate.enough for estimate in choice.known)
        rows.append([escape(name), whiskers(choice, most), *(_grey(cell, grey) for cell in cells)])
    said = "Tokens per second: ○ predicted, ◆ measured; ★ most predicted. “best in”: share of resamples of the prompts."
    return table((HEAD[0], "", *HEAD[1:]), rows, "figures") + f'<p class="soft">{said}</p>'


def _grey(text: str, few: bool) -> str:
    shown = escape(text)
    return f'<span class="few">{shown}</span>' if few else shown


# ---- kinds and limits --------------------------------------------------------------------------------

KIND_HEAD = (
    "kind",
    "prompts",
    "left out",
    "best way",
    "predicted tokens/s",
    "τ there",
    "rounds",
    "best budgets",
    "limited by",
)


def _kind_cells(kind: KindAdvice) -> list[str]:
    best = kind.best
    return [
        kind.kind,
        str(kind.prompts),
        str(kind.short_prompts),
        best.label,
        best.tokens_per_second.figure,
        best.tokens_per_round.figure,
        str(best.tokens_per_round.rounds),
        "-" if kind.low_budget is None else f"{kind.low_budget} to {kind.high_budget}",
        kind.limit.replace("_", " "),
    ]


LIMIT_HEAD = ("if this were perfect", "budget", "tokens/s", "gain", "rounds changed", "meaning")


def _oracle_rows(kind: KindAdvice) -> list[list[str]]:
    return [
        [
            oracle.name.replace("_", " "),
            str(oracle.budget),
            oracle.tokens_per_second.figure,
            f"{oracle.gain.figure} ×",
            f"{oracle.rounds_changed} of {oracle.rounds}",
            ORACLES.get(oracle.name, ""),
        ]
        for oracle in kind.oracles
    ]


def _end_rows(ends: Mapping[str, int]) -> list[list[str]]:
    total = sum(ends.values())
    return [[ENDS.get(end, end), f"{n} of {total}", f"{n / total:.0%}"] for end, n in ends.items()] if total else []


def _limits(kind: KindAdvice) -> list[str]:
    ended = ("rounds ended because", f"of {kind.best_tree.label}", "")
    return [_limit(kind), "", columns(LIMIT_HEAD, _oracle_rows(kind)), "", columns(ended, _end_rows(kind.ends))]


def _limits_html(kind: KindAdvice) -> str:
    against = f"Gains are over {kind.best_tree.label}, prompt by prompt (geometric mean); each at its own best budget."
    rows = [[escape(cell.replace(" ", "\xa0") if "[" in cell else cell) for cell in row] for row in _oracle_rows(kind)]
    ends = table(("rounds ended because", f"of {kind.best_tree.label}", ""), _end_rows(kind.ends), "figures")
    return f'<p>{escape(_limit(kind))}</p>{table(LIMIT_HEAD, rows)}<p class="soft">{against}</p>{ends}'


def _limit(kind: KindAdvice) -> str:
    if kind.limit not in ORACLES:
        return "Limited by none of these for sure: each gain's interval reaches 1."
    return f"Limited by: {kind.limit.replace('_', ' ')} ({ORACLES[kind.limit]})."


# ---- predicted against measured ----------------------------------------------------------------------

CHECK_HEAD = (
    "budget",
    "measured tokens/s",
    "predicted tokens/s",
    "error",
    "worst prompt",
    "prompts",
    "rounds",
    "equal rounds",
)


def check_view(check: Check) -> View:
    """Predicted against measured tokens per second, by budget."""
    rows = [
        [
            str(row.budget),
            row.measured.figure,
            row.predicted.figure,
            f"{row.error:+.1%}",
            f"{row.worst_prompt:+.1%}",
            str(row.measured.prompts),
            str(row.measured.rounds),
            str(row.equal_rounds),
        ]
        for row in check.budgets
    ]
    said = (
        f"Whole rounds, with what it takes to record them. A round's time is the mean of {check.repeats} decodes, a "
        f"cost that of {check.cost.samples} rounds or more. Equal rounds: as the replay has them, so the decoder did."
    )
    verdict = f"{'✓' if check.ok else '✕'} predictions within {WITHIN:.0%}: {'yes' if check.ok else 'NO'}"
    return View(
        title="predicted and measured",
        text=f"{said}\n\n{columns(CHECK_HEAD, rows)}\n{verdict}",
        html=f'<p class="soft">{said}</p>{table(CHECK_HEAD, [map(escape, row) for row in rows], "figures")}'
        f'<p class="{"good" if check.ok else "bad"}">{verdict}</p>',
        height=170 + 34 * len(rows),
    )
