"""How long a round takes, stage by stage, and how far that is from what the memory's bandwidth allows.

`bench` gives a `Bench`: ``data`` is what its JSON holds, and its tables show the same numbers. Times are seconds, sizes
bytes. A *spread* is ``{"median", "p10", "p90", "n"}``: n rounds stand behind it.

* ``schema`` "ddlab.bench", ``version`` 1, ``created``, ``versions``, ``machine`` {device, name, threads},
  ``pair`` {name, target, layers (by kind), dtype, attention, drafter, notice (RANDOM WEIGHTS, or null)};
* ``settings``: prefixes, budgets, methods, engines, repeats, seed; scripts, rounds (of the simulation);
* ``weights``: bytes of what one step reads: target (its layers), head, drafter, draft_head (the head again, or the
  drafter's own); ``copy``: bytes_per_second (read and written) and ``seconds`` (a spread) of copies of ``bytes``;
* ``floor``: seconds that reading these weights once takes at that bandwidth, for a round without a draft (plain) and
  with one (drafted);
* ``cases``: one for each engine, method, budget (null: ar, dflash) and prefix (tokens before the root): rows (root
  included), tokens (that the round brought), seconds {draft, tree, verify, accept, commit, record, round: spreads},
  floor (seconds), peak_bytes (null: not known). Every repeat is the same round: it is undone after it was timed.
  record: what a round takes beyond its phases, mostly to keep the trace;
* ``simulated``: runs with scripted acceptance (see `ddlab.benching.scripted`): label "SIMULATED", engine, method,
  budget, prefix, script {tau or probabilities}, expected and tokens_per_round (reached), rounds, tokens, seconds,
  tokens_per_second;
* ``cost``: by engine with two budgets or more, a model that `ddlab.costs.model.CostModel.from_dict` takes;
* ``trace_cost``: see `ddlab.benching.trace_cost`; null where it was not asked for.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ddlab.benching.floor import copy_bandwidth, floor_seconds, machine_facts, pair_facts, spread, weight_bytes
from ddlab.benching.scripted import SIMULATED, Script
from ddlab.costs.calibration import TEXT, typical
from ddlab.costs.model import PHASES, CostModel
from ddlab.names import one_of
from ddlab.trace import new_header

if TYPE_CHECKING:
    from ddlab.decode import Decoder
    from ddlab.pair import Pair

METHODS = ("ar", "dflash", "ddtree")
VISITS = 4  # each case is measured in so many turns: whatever slows the machine down slows all of them


class Case(NamedTuple):
    """What is timed together; budget: None but for ddtree."""

    engine: str
    method: str
    budget: int | None
    prefix: int


@dataclass(frozen=True)
class Bench:
    """What was measured; ``data`` as the module says."""

    data: dict[str, Any]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the JSON."""
        Path(path).write_text(json.dumps(self.data, indent=1) + "\n", "utf-8")
        return Path(path)

    def to_text(self) -> str:
        """The tables, in markdown."""
        from ddlab.benching.table import tables  # reads what this module writes

        return tables(self.data)

    def cost(self, engine: str) -> CostModel:
        """What rounds cost under an engine, for `ddlab.advise`. Raises KeyError where it was not measured."""
        return CostModel.from_dict(self.data["cost"][engine])


def bench(
    pair: Pair,
    *,
    prefixes: Sequence[int] = (512,),
    budgets: Sequence[int] = (16, 64),
    methods: Sequence[str] = METHODS,
    engines: Sequence[str] | None = None,
    repeats: int = 20,
    scripts: Sequence[Script] = (),
    rounds: int = 24,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Bench:
    """Time rounds of every engine, method, budget and prefix, and run the scripts.

    Args:
        engines: None: the one that the pair gets unasked, and eager. Beside another, eager has a quarter of repeats.
        scripts: scripted acceptance, with the first engine, at the shortest prefix.
        rounds: of each scripted run.
        say: told what is being done.

    Raises:
        ValueError: what cannot be measured; nothing has run then.
    """
    for method in methods:
        one_of("method", method, METHODS)
    engines = list(engines or own_engines(pair))
    _check(pair, prefixes, budgets, methods, engines, repeats, scripts, rounds)
    say("copy bandwidth")
    copy, weights = copy_bandwidth(pair.device), weight_bytes(pair)
    cases = [
        Case(engine, method, budget, prefix)
        for engine in engines
        for prefix in sorted(set(prefixes), reverse=True)  # the longest first: buffers are made once
        for method in methods
        for budget in (sorted(set(budgets)) if method == "ddtree" else [None])
    ]
    measured = _measure(pair, cases, repeats, seed, say)
    floor = floor_seconds(weights, copy["bytes_per_second"])
    for found in measured:
        found["floor"] = floor["plain" if found["method"] == "ar" else "drafted"]
    simulated = []
    for script in scripts:
        for case in cases:
            if case.engine == engines[0] and case.prefix == min(prefixes) and case.method != "ar":
                simulated.append(_simulate(pair, case, script, rounds, seed, say))
    settings = {"prefixes": prefixes, "budgets": budgets, "methods": methods, "engines": engines, "repeats": repeats}
    settings |= {"seed": seed, "scripts": [_described(script) for script in scripts], "rounds": rounds}
    header = new_header(pair=pair_facts(pair), settings=settings, prompt={})
    data = {"schema": "ddlab.bench", "version": 1} | {k: header[k] for k in ("created", "versions", "pair", "settings")}
    data |= {"machine": machine_facts(pair.device), "weights": weights, "copy": copy, "floor": floor}
    costs = {engine: _cost(pair, engine, measured) for engine in engines}
    data |= {"cases": [{k: v for k, v in found.items() if k != "samples"} for found in measured]}
    data |= {"simulated": simulated, "cost": {k: v for k, v in costs.items() if v is not None}, "trace_cost": None}
    return Bench(data)


def own_engines(pair: Pair) -> list[str]:
    """The engines to compare on a pair: the one that it gets unasked, and eager."""
    from ddlab.engine import find_engine

    return list(dict.fromkeys([find_engine(pair).name, "eager"]))


def _check(
    pair: Pair,
    prefixes: Sequence[int],
    budgets: Sequence[int],
    methods: Sequence[str],
    engines: Sequence[str],
    repeats: int,
    scripts: Sequence[Script],
    rounds: int,
) -> None:
    from ddlab.engine import find_engine

    for engine in engines:
        find_engine(pair, engine)
    drafting = [method for method in methods if method != "ar"]
    if drafting and pair.drafter is None:
        raise ValueError(f"this pair has no drafter for {' and '.join(drafting)}: give one, or --method ar")
    if not prefixes or min(prefixes) < 1:
        raise ValueError(f"prefixes are numbers of tokens, 1 or more, not {list(prefixes)}")
    if "ddtree" in methods and (not budgets or min(budgets) < 1):
        raise ValueError(f"budgets are numbers of drafted nodes, 1 or more, not {list(budgets)}")
    if repeats < 1 or rounds < 1:
        raise ValueError(f"{repeats} repeats and {rounds} rounds: both are 1 or more")
    if scripts and not drafting:
        raise ValueError("scripted acceptance needs a method that drafts: add --method dflash or ddtree")
    depth = 0 if pair.drafter is None else pair.drafter.depth
    for script in scripts:
        for budget in budgets if "ddtree" in methods else [depth]:
            script.expected(min(depth, budget))  # raises where it cannot be
    tokens = max(prefixes) + _new_tokens(pair, 1)
    if scripts:
        tokens = max(tokens, min(prefixes) + _new_tokens(pair, rounds))
    if pair.max_positions is not None and tokens > pair.max_positions:
        raise ValueError(f"up to {tokens} positions are needed, the target has {pair.max_positions}: shorter prefixes")


# ---- rounds ----------------------------------------------------------------------------------------------------------


def _measure(
    pair: Pair, cases: Sequence[Case], repeats: int, seed: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    decoders: dict[Case, Decoder] = {}
    for case in cases:
        say(f"prompt of {case.prefix} tokens: {_name(case)}")
        decoders[case] = _decoder(pair, case, 1)
        decoders[case].start(prompt_ids(pair, case.prefix, seed))
    some = len({case.engine for case in cases}) > 1
    wanted = {case: max(1, repeats // 4) if some and case.engine == "eager" else repeats for case in cases}
    samples: dict[Case, list[dict[str, float]]] = {case: [] for case in cases}
    found: dict[Case, dict[str, Any]] = {case: {"peak_bytes": None} for case in cases}
    for visit in range(VISITS):
        for case, decoder in decoders.items():
            share = wanted[case] * (visit + 1) // VISITS - len(samples[case])
            if not share:
                continue
            say(f"turn {visit + 1} of {VISITS}: {_name(case)}")
            timed_round(decoder)  # the first one after another case fills caches and buffers
            decoder.back()
            if pair.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(pair.device)
            for _ in range(share):
                samples[case].append(timed_round(decoder))
                step = decoder.trace.steps[-1]
                found[case] |= {"rows": len(step.tree), "tokens": len(step.emitted)}
                decoder.back()
            if pair.device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(pair.device)
                found[case]["peak_bytes"] = max(peak, found[case]["peak_bytes"] or 0)
    for case, several in samples.items():
        columns = {name: [sample[name] for sample in several] for name in several[0]}
        found[case] |= {"seconds": {name: spread(taken) for name, taken in columns.items()}, "samples": columns}
    return [case._asdict() | found[case] for case in cases]


def timed_round(decoder: Decoder) -> dict[str, float]:
    """A round's seconds by phase; record, what it takes beyond its phases and hooks; and round, all of them."""
    hooks, started = decoder._hooks.seconds, time.perf_counter()
    step = decoder.step()
    whole = time.perf_counter() - started - (decoder._hooks.seconds - hooks)
    return {**step.times, "record": whole - step.seconds, "round": whole}


def _new_tokens(pair: Pair, rounds: int) -> int:
    """As many as so many rounds, and one before them, may bring without an end of the text."""
    return (rounds + 1) * (1 if pair.drafter is None else pair.drafter.depth + 1) + 2


def _decoder(pair: Pair, case: Case, rounds: int) -> Decoder:
    from ddlab.decode import Decoder

    return Decoder(
        pair,
        case.method,
        budget=case.budget,
        engine=case.engine,
        max_new_tokens=_new_tokens(pair, rounds),
        stop_token_ids=(),
    )


def prompt_ids(pair: Pair, length: int, seed: int = 0) -> list[int]:
    """So many tokens: a text over and over, or random ids where there is no tokenizer."""
    if pair.tokenizer is None:
        return np.random.default_rng(seed).integers(0, pair.vocab_size, length).tolist()
    ids = list(pair.encode(TEXT).ids)
    return (ids * (length // len(ids) + 1))[:length]


def _simulate(
    pair: Pair, case: Case, script: Script, rounds: int, seed: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """A run whose acceptance is scripted; the first round is not counted."""
    assert pair.drafter is not None
    say(f"{SIMULATED}, {script}: {_name(case)}")
    depth, script = pair.drafter.depth, script.again()
    decoder = _decoder(pair, case, rounds)
    decoder.start(prompt_ids(pair, case.prefix, seed))
    with script.on(decoder):
        decoder.step()
        taken = [timed_round(decoder) for _ in range(rounds)]
    steps, seconds = decoder.trace.steps[1:], sum(sample["round"] for sample in taken)
    tokens = sum(len(step.emitted) for step in steps)
    reach = depth if case.budget is None else min(depth, case.budget)
    return (
        {"label": SIMULATED}
        | case._asdict()
        | {
            "script": _described(script),
            "expected": script.expected(reach),
            "tokens_per_round": tokens / rounds,
            "rounds": rounds,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
        }
    )


def _cost(pair: Pair, engine: str, measured: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """A cost model of an engine's ddtree rounds, as JSON; None with fewer than two sizes."""
    mine = [found for found in measured if found["engine"] == engine]
    grid = {(f["prefix"], f["rows"]): f for f in mine if f["method"] == "ddtree"}
    prefixes, rows = (sorted({key[i] for key in grid}) for i in (0, 1))
    if len(rows) < 2 or len(grid) < len(prefixes) * len(rows):
        return None
    tables = {
        phase: np.array([[typical(grid[p, r]["samples"][phase]) for r in rows] for p in prefixes]) for phase in PHASES
    }
    plain = {
        f["prefix"]: sum(typical(f["samples"][phase]) for phase in PHASES[:-1]) for f in mine if f["method"] == "ar"
    }
    return CostModel(
        rows=tuple(rows),
        prefixes=tuple(prefixes),
        seconds=tables,
        plain=np.array([plain[p] for p in prefixes]) if plain else None,
        samples=min(f["seconds"]["round"]["n"] for f in mine),
        rounds_up=engine == "graph",
        source={"from": "ddlab bench", "pair": pair.name, "device": str(pair.device), "engine": engine},
    ).to_dict()


def _name(case: Case) -> str:
    budget = "" if case.budget is None else f" {case.budget}"
    return f"{case.method}{budget}, {case.engine}, prefix {case.prefix}"


def _described(script: Script) -> dict[str, Any]:
    return {"tau": script.tau} if script.tau is not None else {"probabilities": list(script.probabilities or ())}
