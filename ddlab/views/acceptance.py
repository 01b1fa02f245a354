"""How much each round accepted, how the rounds ended, and the means with the number of rounds behind them."""

from __future__ import annotations

from collections import Counter

from ddlab.trace import ENOUGH_ROUNDS, Mean, Trace
from ddlab.views.page import View, escape, notes, table

STOPS = {
    "mismatch": ("×", "the target chose a token that was not drafted there"),
    "exhausted": ("|", "the path reached a leaf: a deeper tree might have gone on"),
    "stop_token": ("■", "the text ended with a stop token"),
    "length": ("▲", "the text reached the length asked for"),
}
BAR, UNIT = 14, 11  # pixels of a round and of a token in the picture


def acceptance_view(trace: Trace) -> View:
    note_text, note_html = notes(trace)
    steps = trace.steps
    histogram = Counter(step.accepted for step in steps)
    reasons = Counter(step.stop_reason for step in steps)
    means = [trace.accepted_drafts, trace.tokens_per_round]
    lines = [describe(mean) for mean in means]
    lines += ["", "round  drafted  accepted  new tokens"]
    for step in steps:
        bar = "█" * step.accepted + ("▒" if step.bonus is not None else "")
        lines.append(
            f"{step.index:>5}  {len(step.tree) - 1:>7}  {step.accepted:>8}  {len(step.emitted):>3} {bar}"
            f" {STOPS.get(step.stop_reason, ('?', ''))[0]}{' edited' if step.edited else ''}"
        )
    lines += ["", "accepted drafts: rounds"]
    lines += [f"{count:>15}: {histogram[count]}" for count in range(max(histogram, default=-1) + 1)]
    lines += ["", "stop reason: rounds"]
    lines += [
        f"{reason:>11}: {reasons[reason]}  ({said})" for reason, (_, said) in STOPS.items() if reasons[reason]
    ]
    body = "".join(
        f'<p class="{"" if mean.enough else "few"}">{escape(describe(mean))}</p>' for mean in means
    )
    return View(
        title=f"acceptance ({trace.method})",
        text=note_text + "\n".join(lines),
        html=note_html
        + body
        + (_bars(trace) + _histogram(trace, histogram) + _stops(reasons) if steps else ""),
        height=560,
    )


def describe(mean: Mean) -> str:
    """The mean with its rounds, and why it is greyed where it is."""
    symbol = "τ, " if mean.name == "tokens per round" else ""
    few = (
        ""
        if mean.enough or mean.value is None
        else f": fewer than {ENOUGH_ROUNDS} rounds, too few to rest on"
    )
    return f"{symbol}{mean}{few}"


def _bars(trace: Trace) -> str:
    """A column a round: accepted drafts, the target's own token on top, the stop reason as a mark below."""
    most = max(len(step.emitted) for step in trace.steps)
    unit = min(UNIT, max(3.0, 150 / most))
    base, left = 16 + most * unit, 34
    out = [f'<path d="M{left - 6} {base + 0.5}H{left + BAR * trace.rounds}" stroke="var(--line)"/>']
    for tick in sorted({0, most, most // 2}):
        y = base - tick * unit
        out.append(f'<text x="{left - 10}" y="{y + 4:.1f}" text-anchor="end" class="soft">{tick}</text>')
    for step in trace.steps:
        x = left + BAR * step.index
        own = len(step.emitted) - step.accepted
        drafts_top = base - step.accepted * unit
        tip = f"round {step.index}, position {step.start}: {step.accepted} accepted drafts, {len(step.emitted)} new tokens, {step.stop_reason}"
        group = f"<g><title>{escape(tip)}</title>"
        if step.accepted:
            group += f'<rect x="{x}" y="{drafts_top:.1f}" width="{BAR - 3}" height="{step.accepted * unit:.1f}" fill="var(--accepted)"/>'
        if own:
            group += f'<rect x="{x + 0.75}" y="{drafts_top - unit + 0.75:.1f}" width="{BAR - 4.5}" height="{unit - 2:.1f}" fill="none" stroke="var(--bonus)" stroke-width="1.5"/>'
        mark = STOPS.get(step.stop_reason, ("?", ""))[0]
        group += f'<text x="{x + 5.5}" y="{base + 14:.1f}" text-anchor="middle" class="soft">{mark}</text>'
        if step.edited:
            group += f'<text x="{x + 5.5}" y="{base + 38:.1f}" text-anchor="middle">e</text>'
        if step.index % 10 == 0:
            group += f'<text x="{x + 5.5}" y="{base + 27:.1f}" text-anchor="middle" class="soft">{step.index}</text>'
        out.append(group + "</g>")
    width, height = left + BAR * trace.rounds + 10, base + (42 if any(s.edited for s in trace.steps) else 31)
    caption = (
        "New tokens of each round: <b>■</b> filled, accepted drafts; <b>□</b> outlined, the target's own token. Below: "
        + ", ".join(f"<b>{mark}</b> {reason}" for reason, (mark, _) in STOPS.items())
        + ("; <b>e</b> edited" if any(step.edited for step in trace.steps) else "")
        + "; then the round's number."
    )
    return (
        f'<figure><div class="scroll"><svg width="{width}" height="{height:.0f}" role="img" '
        f'aria-label="new tokens of each round">{"".join(out)}</svg></div><figcaption>{caption}</figcaption></figure>'
    )


def _histogram(trace: Trace, histogram: Counter[int]) -> str:
    most = max(histogram.values())
    few = "" if trace.rounds >= ENOUGH_ROUNDS else ' class="few"'
    rows = []
    for count in range(max(histogram) + 1):
        y, width = 4 + 16 * count, 300 * histogram[count] / most
        rows.append(
            f'<text x="22" y="{y + 10}" text-anchor="end">{count}</text>'
            f'<rect x="30" y="{y}" width="{width:.1f}" height="12" fill="{"var(--soft)" if few else "var(--accepted)"}"/>'
            f'<text x="{34 + width:.1f}" y="{y + 10}" class="soft">{histogram[count]}</text>'
        )
    return (
        f'<figure><svg width="380" height="{8 + 16 * (max(histogram) + 1)}" role="img" aria-label="rounds by accepted drafts">'
        f"{''.join(rows)}</svg><figcaption{few}>Rounds by number of accepted drafts ({trace.rounds} rounds"
        f"{', too few for a shape to rest on' if few else ''}).</figcaption></figure>"
    )


def _stops(reasons: Counter[str]) -> str:
    rows = (
        [f"{STOPS[reason][0]} {reason}", str(reasons[reason]), escape(STOPS[reason][1])]
        for reason in STOPS
        if reasons[reason]
    )
    return table(("stop reason", "rounds", "meaning"), rows, "figures")
