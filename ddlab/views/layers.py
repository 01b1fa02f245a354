"""Backends side by side, layer by layer: verdicts, a heatmap over the layers, and what it comes to in the end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ddlab.comparing.comparison import BackendResult, Comparison, LayerFigures, LayerInfo
from ddlab.trace import ENOUGH_ROUNDS
from ddlab.views.layers_data import panel_data
from ddlab.views.page import View, escape, figure, label, svg, table

# name -> what is said of it, and how it is written; all but times and bytes are drawn by powers of ten
METRICS: dict[str, tuple[str, str]] = {
    "error": ("error of the layer: RMS distance from float64, relative", "teacher-forced"),
    "rms": ("RMS difference, relative to the activation", "teacher-forced"),
    "max_abs": ("largest difference", "teacher-forced"),
    "uncosine": ("1 - cosine", "teacher-forced"),
    "free_rms": ("RMS difference of the layer's output, relative", "free-running"),
    "free_max_abs": ("largest difference of the layer's output", "free-running"),
    "free_uncosine": ("1 - cosine of the layer's output", "free-running"),
    "seconds": ("time of the layer, of the first backend's", "measured"),
    "peak_bytes": ("peak memory of the layer, of the first backend's", "measured"),
}
CELL, LEFT = 18, 108  # pixels of the static picture
LOW, HIGH = -8, 0  # powers of ten between which a cell is coloured


def layers_view(comparison: Comparison) -> View:
    """Verdicts by layer, what the difference does in the end, and, where a script may run, every row and mask."""
    found = _found(comparison)
    if any(f.verdict == "same" for b in comparison.backends for f in b.layers.values()):
        found.append("=      the backend does not compute this layer")
    lines = [*_head(comparison), "", *_table(comparison), *([""] if found else []), *found, "", *_ends(comparison)]
    shown = sum(b.status == "ok" for b in comparison.backends)
    return View(
        title=f"{comparison.what}, layer by layer",
        text="\n".join(lines),
        html=_html(comparison),
        height=730 + 64 * shown + 22 * len(found),
        layers=_panel(comparison),
    )


# ---- as text ---------------------------------------------------------------------------------------------------------


def counted(comparison: Comparison) -> str:
    """What the figures rest on."""
    rows, calls = comparison.rows, len(comparison.calls)
    several = "one call" if comparison.what in ("prefill", "step") else _rounds(calls)
    return f"{several}, {rows} row{'s' * (rows != 1)}"


def _head(comparison: Comparison) -> list[str]:
    lines = [
        f"{comparison.what}: {counted(comparison)}; {len(comparison.layers)} layers, {comparison.dtype} on "
        f"{comparison.device}, {comparison.pair}",
        f"Each layer with {comparison.first.name}'s inputs, against float64 on the CPU: relative RMS at the worst row."
        + (f" Linear layers run as {comparison.linear_form!r}." if comparison.linear_form else ""),
    ]
    return [*lines, *(f"! {note}" for note in comparison.notes)]


def _table(comparison: Comparison) -> list[str]:
    ran = [b for b in comparison.backends if b.status == "ok"]
    width = max((len(b.name) for b in ran), default=0)
    width = max(width, 17)
    kinds = max(len(str(info)) for info in comparison.layers)
    lines = [f"layer    {'kind':<{kinds}}  " + "  ".join(f"{b.name:<{width}}" for b in ran)]
    for info in comparison.layers:
        cells = [f"{cell(b.layers.get(info.index)):<{width}}" for b in ran]
        lines.append(f"{info.index:>5}  {info.letter} {info!s:<{kinds}}  {'  '.join(cells)}".rstrip())
    return lines


def cell(figures: LayerFigures | None) -> str:
    """A verdict with its error, as a table has room for it."""
    if figures is None:
        return "-"
    if figures.verdict == "same":
        return "="
    if figures.error is None:
        return f"? {figures.rms:.1e}"
    return f"{'WRONG' if figures.verdict == 'wrong' else 'rounding'} {figures.error:.1e}"


def _found(comparison: Comparison) -> list[str]:
    lines: list[str] = []
    for b in comparison.backends:
        for fault, layers in b.faults.items():
            lines.append(f"WRONG  {b.name}, {spans(layers)}: {fault or 'no known fault gives these numbers'}")
        if b.status != "ok":
            lines.append(f"{b.status:<6} {b.name}: {b.reason}")
    return lines


def spans(layers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "layers 0-2, 5"."""
    runs: list[list[int]] = []
    for i in layers:
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    said = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"layer{'s' * (len(layers) != 1)} {said}"


HEAD = (
    "backend",
    "other choice",
    "KL, mean and largest",
    "other path",
    "τ, tokens per round",
    "path replay, its choices and logits",
    "time",
)


def _end_rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    whole = comparison.first.seconds
    for b in comparison.backends:
        end = b.end
        if end is None:
            continue
        yield (
            b.name,
            f"{end.flips} of {end.rows} rows",
            f"{_small(end.kl_mean)}, {_small(end.kl_max)} nats",
            "-" if end.paths is None else f"{end.paths} of {_rounds(end.rounds)}",
            "-" if end.tau is None or end.tau.value is None else f"{end.tau.value:.2f} ({_rounds(end.tau.rounds)})",
            "-" if end.replayed is None else _replayed(b),
            "-" if b.seconds is None or not whole else f"{b.seconds * 1e3:.1f} ms, {b.seconds / whole:.2f} x",
        )


def _small(value: float) -> str:
    return "not a number" if math.isnan(value) else f"{value:.1e}" if value else "0"


def _replayed(backend: BackendResult) -> str:
    assert backend.end is not None and backend.end.replayed is not None
    said = backend.end.replayed
    verdict = "right" if said.right else "WRONG"
    return (
        f"{verdict}: {said.agree} of {said.nodes} choices, logits off by {said.worst:.0e} (allowed {said.allowed:.0e})"
    )


def _rounds(count: int) -> str:
    return f"{count} round{'s' * (count != 1)}"


def _after(comparison: Comparison) -> list[str]:
    """What the table of the ends needs to be read."""
    ends = [b.end for b in comparison.backends if b.end is not None]
    said = [f"Whole forwards, each by itself; choices, KL and paths against {comparison.first.name}."]
    rounds = max((end.rounds for end in ends if end.tau is not None), default=0)
    if rounds:
        few = f", fewer than {ENOUGH_ROUNDS}: too few to rest on" if rounds < ENOUGH_ROUNDS else ""
        said.append(f"τ: on {_rounds(rounds)}, each from the recorded text{few}.")
    replays = [end.replayed for end in ends if end.replayed is not None]
    if replays:
        said.append(f"Path replay, of the {_rounds(replays[0].rounds)} in dispute: plain forwards on eager, no tree.")
    if comparison.timed:
        said.append(f"Time: {comparison.timed}.")
    return said


def _ends(comparison: Comparison) -> list[str]:
    rows = [HEAD, *_end_rows(comparison)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return ["In the end", " ".join(_after(comparison)), "", *lines]


# ---- as a page without a script --------------------------------------------------------------------------------------


def _html(comparison: Comparison) -> str:
    first, *others = _head(comparison)
    found = "".join(f"<li>{escape(line)}</li>" for line in _found(comparison))
    parts = [
        f"<p><b>{escape(first)}</b></p>",
        *(f'<p class="soft">{escape(line)}</p>' for line in others),
        figure(_heatmap(comparison), LEGEND),
        f"<ul>{found}</ul>" if found else "",
        ends_html(comparison),
    ]
    return "".join(parts)


LEGEND = (
    "A column a layer, a row a backend. A number is the power of ten of the relative error from float64; ✕ wrong, "
    "· not computed by this backend. L linear attention, F full, S sliding window."
)


def ends_html(comparison: Comparison) -> str:
    said = " ".join(_after(comparison))
    rows = (map(escape, row) for row in _end_rows(comparison))
    return f'<h3>In the end</h3>{table(HEAD, rows, "figures")}<p class="soft">{escape(said)}</p>'


def _heatmap(comparison: Comparison) -> str:
    ran = [b for b in comparison.backends if b.status == "ok"]
    body = []
    for column, info in enumerate(comparison.layers):
        x = LEFT + column * CELL
        body.append(label(x + CELL / 2, 12, info.index, "soft mid"))
        body.append(label(x + CELL / 2, 26, info.letter, "mid on", str(info)))
    for line, b in enumerate(ran):
        y = 34 + line * CELL
        body.append(label(LEFT - 8, y + 13, b.name, "end"))
        for column, info in enumerate(comparison.layers):
            body.append(_square(LEFT + column * CELL, y, info, b.layers.get(info.index), b.name))
    width, height = LEFT + CELL * len(comparison.layers) + 4, 38 + CELL * len(ran)
    return svg(width, height, "error of each layer by backend", "".join(body))


def _square(x: float, y: float, info: LayerInfo, figures: LayerFigures | None, name: str) -> str:
    if figures is None or figures.verdict == "same":
        return label(x + CELL / 2, y + 13, "·", "soft mid")
    wrong, value = figures.verdict == "wrong", figures.rms if figures.error is None else figures.error
    power = _power(value)
    shade = 0.0 if power is None else min(1.0, max(0.0, (power - LOW) / (HIGH - LOW)))
    colour = "var(--error)" if wrong else "var(--root)"
    tip = f"{name}, layer {info.index}, {info}: {cell(figures)}"
    box = f'<rect x="{x + 0.5}" y="{y + 0.5}" width="{CELL - 1}" height="{CELL - 1}" fill="{colour}"'
    said = "✕" if wrong else "" if power is None else str(round(power))
    return f'<g class="small"><title>{escape(tip)}</title>{box} opacity="{0.12 + 0.68 * shade:.2f}"/>' + (
        label(x + CELL / 2, y + 13, said, "mid") + "</g>"
    )


def _power(value: float) -> float | None:
    return math.log10(value) if value and math.isfinite(value) else None


def _panel(comparison: Comparison) -> dict[str, Any]:
    """What a page with a script is given, see `front/layers.js`."""
    return panel_data(comparison) | {
        "head": _head(comparison),
        "metrics": [{"key": key, "name": name, "how": how} for key, (name, how) in METRICS.items()],
        "found": _found(comparison),
        "end": {"head": list(HEAD), "rows": [list(row) for row in _end_rows(comparison)]},
        "after": " ".join(_after(comparison)),
    }


# ---- plotly ----------------------------------------------------------------------------------------------------------


def layers_figure(comparison: Comparison) -> Any:
    """Layers by metrics, a heatmap for each backend that ran, as a `plotly.graph_objects.Figure`.

    Raises ImportError, naming the cure, without plotly.
    """
    try:
        from plotly.subplots import make_subplots
    except ImportError as error:
        raise ImportError("layers_figure needs plotly: pip install plotly") from error
    drawn = [key for key in METRICS if key not in ("seconds", "peak_bytes")]
    ran = [b for b in comparison.backends if b.status == "ok"]
    names = [f"{info.index} {info.letter}" for info in comparison.layers]
    made = make_subplots(rows=len(ran), cols=1, subplot_titles=[b.name for b in ran], shared_xaxes=True)
    for line, b in enumerate(ran, start=1):
        values = [
            [_power(_value(b.layers.get(info.index), key)) for info in comparison.layers] for key in reversed(drawn)
        ]
        made.add_heatmap(
            z=values,
            x=names,
            y=list(reversed(drawn)),
            zmin=LOW,
            zmax=HIGH,
            colorscale="Blues",
            showscale=line == 1,
            colorbar={"title": "log10"},
            row=line,
            col=1,
        )
    made.update_layout(title=f"{comparison.what}: {counted(comparison)}", height=120 + 190 * len(ran))
    return made


def _value(figures: LayerFigures | None, key: str) -> float:
    if figures is None or (key == "error" and figures.error is None):
        return 0.0
    if key.endswith("uncosine"):
        return 1 - float(getattr(figures, key.replace("uncosine", "cosine")))
    return float(getattr(figures, key))
