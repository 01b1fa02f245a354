"""Where the time of each round went: draft, tree, verify, accept, commit."""

from __future__ import annotations

from statistics import median

from ddlab.step import Step
from ddlab.trace import Trace
from ddlab.views.page import View, escape, figure, label, notes, svg, table

PHASES = ("draft", "tree", "verify", "accept", "commit")
COLUMN, TALL, LEFT = 14, 130, 64  # pixels


def time_view(trace: Trace) -> View:
    """Seconds by stage: of the run, of its median round, and of every round. The first round also warms up."""
    (note_text, note_html), rows = notes(trace), _rows(trace.steps)
    if not rows:
        return View(f"time ({trace.method})", f"{note_text}not timed", f"{note_html}<p>Not timed.</p>", 120)
    head = ("stage", "seconds", "share", "median round, ms", "first round, ms")
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in (head, *rows)]
    cells = [[f'<span class="key {row[0]}"></span>{row[0]}', *map(escape, row[1:])] for row in rows]
    return View(
        title=f"time ({trace.method})",
        text=note_text + "\n".join(lines),
        html=f'{note_html}<div class="side">{_columns(trace.steps)}<div>{table(head, cells, "figures")}</div></div>',
        height=430,
    )


def _rows(steps: list[Step]) -> list[tuple[str, ...]]:
    total = sum(step.seconds for step in steps)
    if not total:
        return []
    names = [*PHASES, *sorted({phase for step in steps for phase in step.times} - {*PHASES})]
    rows: list[tuple[str, ...]] = []
    for phase in names:
        times = [step.times.get(phase, 0.0) for step in steps]
        if any(times):
            later = times[1:] or times
            seconds, middle, first = sum(times), 1e3 * median(later), 1e3 * times[0]
            rows.append((phase, f"{seconds:.3f}", f"{seconds / total:.0%}", f"{middle:.1f}", f"{first:.1f}"))
    return rows


def _columns(steps: list[Step]) -> str:
    """A column a round, its stages in their order from below; a very long first round is cut and says so."""
    later = max((step.seconds for step in steps[1:]), default=steps[0].seconds) or steps[0].seconds
    scale = TALL / (1.15 * later)
    base, body = TALL + 12, []
    right = LEFT + COLUMN * len(steps)
    body.append(f'<path d="M{LEFT - 6} {base + 0.5}H{right}" stroke="var(--edge)"/>')
    body.append(label(LEFT - 10, base + 4, "0", "soft end"))
    body.append(label(LEFT - 10, base - later * scale + 4, f"{1e3 * later:.0f} ms", "soft end"))
    for place, step in enumerate(steps):
        x, y = LEFT + COLUMN * place, float(base)
        said = ", ".join(f"{phase} {1e3 * seconds:.1f} ms" for phase, seconds in step.times.items())
        column = [f"<title>{escape(f'round {step.index}: {said}')}</title>"]
        for phase in PHASES:
            tall = min(step.times.get(phase, 0.0) * scale, y - 12)
            y -= tall
            if tall > 0.05:
                column.append(f'<rect class="{phase}" x="{x}" y="{y:.1f}" width="{COLUMN - 3}" height="{tall:.1f}"/>')
        if step.seconds > 1.15 * later:
            column.append(label(x + 5.5, 9, "↑", "soft mid"))
        if step.index % 10 == 0:
            column.append(label(x + 5.5, base + 14, step.index, "soft mid"))
        body.append(f"<g>{''.join(column)}</g>")
    caption = "Time of each round, stages from below in the order of the table. ↑ a first round off the scale."
    return figure(svg(right + 10, base + 20, "time of each round by stage", "".join(body)), caption)
