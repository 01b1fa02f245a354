"""The tables of a bench, in markdown: a pure function of what its JSON holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ddlab.costs.model import PHASES

SIMULATION = (
    "An oracle decides how many drafts each round accepts; the rounds do all their real work. The times are measured, "
    "the acceptance is made up."
)


def tables(data: dict[str, Any]) -> str:
    """All tables of ``ddlab.bench.Bench.data``."""
    parts = [_head(data), _cases(data)]
    parts += [_ratios(data)] if len(data["settings"]["engines"]) > 1 else []
    parts += [_simulated(data)] if data["simulated"] else []
    parts += [_trace_cost(data["trace_cost"])] if data["trace_cost"] else []
    return "\n\n".join(parts)


def _head(data: dict[str, Any]) -> str:
    pair, machine, weights, copy = (data[name] for name in ("pair", "machine", "weights", "copy"))
    layers = " + ".join(f"{count} {kind.removesuffix('_attention')}" for kind, count in pair["layers"].items())
    threads = "" if machine["device"].startswith("cuda") else f", {machine['threads']} thread(s)"
    read = ", ".join(f"{name.replace('_', ' ')} {_size(size)}" for name, size in weights.items() if size)
    floor = ", ".join(f"{_ms(seconds)} ms {name}" for name, seconds in data["floor"].items())
    lines = [
        f"# {_cell(pair['name'])}",
        *([f"**{pair['notice']}**", ""] if pair["notice"] else []),
        f"* {_cell(pair['target'])}, {layers} layers, {pair['dtype']}, attention {pair['attention']}; "
        f"drafter {_cell(pair['drafter'] or 'none')}",
        f"* {_cell(machine['name'])} ({machine['device']}{threads}), torch {data['versions']['torch']}",
        f"* a step reads: {read}",
        f"* copy bandwidth {copy['bytes_per_second'] / 1e9:.4g} GB/s read and written (median of "
        f"{copy['seconds']['n']} copies of {_size(copy['bytes'])}); the floor, weights read once: {floor}",
    ]
    return "\n".join(lines)


def _cases(data: dict[str, Any]) -> str:
    rows = []
    for case in data["cases"]:
        seconds, peak = case["seconds"], case["peak_bytes"]
        whole = seconds["round"]
        rows.append(
            [
                *_of(case),
                f"{case['rows']}",
                *(_ms(seconds[phase]["median"]) for phase in PHASES),
                _ms(whole["median"]),
                f"{_ms(whole['p10'])} to {_ms(whole['p90'])}",
                f"{whole['median'] / case['floor']:.2f}",
                "" if peak is None else _size(peak),
                f"{whole['n']}",
            ]
        )
    heads = [
        "engine",
        "method",
        "budget",
        "prefix",
        "rows",
        *PHASES,
        "round",
        "10 % to 90 %",
        "times floor",
        "peak",
        "n",
    ]
    said = (
        "Milliseconds of a round: medians of n repeats of one round, which is undone after each. record: what a round "
        "takes beyond its phases, mostly to keep the trace. rows: the root included."
    )
    return _titled("Rounds", said, data, _table(heads, rows))


def _ratios(data: dict[str, Any]) -> str:
    first, *others = data["settings"]["engines"]
    by = {(case["engine"], *_of(case)[1:]): case["seconds"] for case in data["cases"]}
    rows = []
    for (engine, *what), seconds in by.items():
        if engine != first:
            continue
        for other in others:
            theirs = by[(other, *what)]
            pairs = [(theirs[name], seconds[name]) for name in ("verify", "round")]
            n = f"{theirs['round']['n']} and {seconds['round']['n']}"
            rows.append([f"{other} / {first}", *what, *(f"{a['median'] / b['median']:.2f}" for a, b in pairs), n])
    said = f"How many times longer than {first}: ratios of medians of the same run."
    return _titled("Engines", said, data, _table(["", "method", "budget", "prefix", "verify", "round", "n"], rows))


def _simulated(data: dict[str, Any]) -> str:
    rows = []
    for run in data["simulated"]:
        own, plain = run["tokens_per_second"], _plain_rate(data, run)
        chances = " ".join(f"{p:g}" for p in run["script"].get("probabilities", ()))
        rows.append(
            [
                *_of(run),
                f"{run['script']['tau']:g}" if "tau" in run["script"] else f"accept {chances}",
                f"{run['tokens_per_round']:.2f}",
                _ms(run["seconds"] / run["rounds"]),
                f"{own:.4g}",
                "" if plain is None else f"{own / plain:.2f}",
                f"{run['rounds']}",
            ]
        )
    heads = ["engine", "method", "budget", "prefix", "script", "tokens per round", "ms a round", "tokens/s"]
    table = _table([*heads, "times ar", "rounds"], rows)
    return _titled("SIMULATED acceptance", SIMULATION, data, table)


def _plain_rate(data: dict[str, Any], run: dict[str, Any]) -> float | None:
    """Tokens per second of plain decoding under the same engine at the same prefix."""
    same = ("engine", "prefix")
    cases = (case for case in data["cases"] if case["method"] == "ar" and all(case[k] == run[k] for k in same))
    return next((case["tokens"] / case["seconds"]["round"]["median"] for case in cases), None)


def _trace_cost(cost: dict[str, Any]) -> str:
    rows = [
        [
            case["method"],
            _budget(case),
            f"{case['rounds']}",
            f"{case['tokens_per_second']['off']['median']:.4g}",
            f"{case['tokens_per_second']['on']['median']:.4g}",
            "{:+.1f} % ({:+.1f} to {:+.1f})".format(*(100 * case["lost"][at] for at in ("median", "p10", "p90"))),
            f"{100 * case['share']['median']:.1f} %",
            f"{case['lost']['n']}",
            f"{case['bytes_a_round'] / 1e3:.3g} kB",
        ]
        for case in cost["cases"]
    ]
    heads = [
        "method",
        "budget",
        "rounds",
        "tokens/s, off",
        "tokens/s, on",
        "lost",
        "beyond phases",
        "pairs",
        "kept a round",
    ]
    long = cost["long"]
    said = (
        "The same text with every round recorded and written to a folder, against nothing recorded. "
        "lost: median of the pairs of runs (10 % to 90 %). beyond phases: what a recorded run itself spent outside of "
        "its phases, median."
    )
    after = (
        f"{long['rounds']} made-up rounds at budget {long['budget']}: {_size(long['memory_bytes'])} in memory, "
        f"{_size(long['disk_bytes'])} on disk; keeping a round takes {_ms(long['first']['median'])} ms in the first "
        f"{long['first']['n']} rounds and {_ms(long['last']['median'])} ms in the last {long['last']['n']}."
    )
    return f"## What recording costs\n\n{said}\n\n{_table(heads, rows)}\n\n{after}"


def _titled(title: str, said: str, data: dict[str, Any], table: str) -> str:
    notice = f"**{data['pair']['notice']}**\n\n" if data["pair"]["notice"] else ""
    return f"## {title}\n\n{notice}{said}\n\n{table}"


def _of(case: dict[str, Any]) -> list[str]:
    return [case["engine"], case["method"], _budget(case), f"{case['prefix']}"]


def _budget(case: dict[str, Any]) -> str:
    return "" if case["budget"] is None else f"{case['budget']}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [list(heads), *map(list, rows)]
    width = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    lines = ["| " + " | ".join(cell.rjust(w) for cell, w in zip(row, width, strict=True)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 1) + ":" for w in width) + "|", *lines[1:]])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def _size(size: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size / 1e3:.3g} kB"


def _cell(text: str) -> str:
    """One line of markdown that a name from outside cannot break."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
