"""What recording costs: runs with a trace on disk against runs that record nothing; and a long trace's size and speed.

In the JSON of a bench: ``cases``, by method and budget: rounds and tokens of a run, tokens_per_second {on, off:
spreads}, lost (a spread over pairs of runs: the share of the speed that recording took), share (a spread over runs: of
the recorded run's own time, what it spent beyond its phases, which busy neighbours change little), bytes_a_round (on
disk); ``long``, a trace of made-up rounds: rounds, budget, memory_bytes, disk_bytes, first and last (spreads of the
seconds that keeping one of the first or last rounds took).
"""

from __future__ import annotations

import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlab.benching.floor import spread
from ddlab.costs.calibration import TEXT
from ddlab.record import DRAFT_BEST
from ddlab.trace import Step, Trace, TraceWriter, new_header
from ddlab.tree import DraftTree

if TYPE_CHECKING:
    from ddlab.pair import Pair

LONG, LONG_BUDGET = 2000, 64


def trace_cost(
    pair: Pair,
    budgets: Sequence[int] = (16, 64),
    methods: Sequence[str] = ("ar", "dflash", "ddtree"),
    repeats: int = 6,
    tokens: int = 128,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure it, as the module says; ``repeats`` pairs of runs of ``tokens`` new tokens each, in turns."""
    cases = [(method, budget) for method in methods for budget in (budgets if method == "ddtree" else [None])]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for method, budget in cases:
            say(f"recording: {method} {budget or ''}")
            found.append(_case(pair, method, budget, repeats, tokens, Path(folder) / "trace"))
    say("recording: a long trace")
    return {"cases": found, "long": long_trace(pair.rows, LONG, LONG_BUDGET)}


def _case(pair: Pair, method: str, budget: int | None, repeats: int, tokens: int, folder: Path) -> dict[str, Any]:
    from ddlab.decode import Decoder

    rates: dict[str, list[float]] = {"on": [], "off": []}
    shares: list[float] = []
    rounds = size = 0
    for turn in range(repeats + 1):
        for name in ("on", "off") if turn % 2 else ("off", "on"):
            path = folder if name == "on" else None
            decoder = Decoder(pair, method, budget=budget, max_new_tokens=tokens, stop_token_ids=(), trace_path=path)
            with nullcontext() if name == "on" else _nothing_recorded():
                decoder.start(TEXT if pair.tokenizer is not None else [1])
                started = time.perf_counter()
                count = sum(1 for _ in decoder.run())
                seconds = time.perf_counter() - started
            if turn:  # the first one warms up
                rates[name].append((tokens - 1) / seconds)
            if turn and name == "on":
                shares.append(1 - sum(step.seconds for step in decoder.trace.steps) / seconds)
            if name == "on":
                rounds, size = count, (folder / "rounds.bin").stat().st_size + (folder / "trace.jsonl").stat().st_size
    lost = [1 - on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    return {
        "method": method,
        "budget": budget,
        "rounds": rounds,
        "tokens": tokens,
        "tokens_per_second": {name: spread(taken) for name, taken in rates.items()},
        "lost": spread(lost),
        "share": spread(shares),
        "bytes_a_round": size / rounds,
    }


@contextmanager
def _nothing_recorded() -> Iterator[None]:
    """In this block decoders keep of a round what the next one needs, and nothing else."""
    from ddlab import decode

    def bare(index: int, start: int, tree: DraftTree, choice: Any, taken: Any, *_: Any) -> Any:
        return SimpleNamespace(emitted=taken.emitted(tree), stop_reason=taken.stop_reason)

    record, append = decode.round_record, Trace.append
    try:
        decode.round_record, Trace.append = bare, lambda *_: None  # type: ignore[assignment, method-assign]
        yield
    finally:
        decode.round_record, Trace.append = record, append  # type: ignore[method-assign]


# ---- a long trace ----------------------------------------------------------------------------------------------------


def long_trace(vocab: int, rounds: int, budget: int) -> dict[str, Any]:
    """Size and speed of a trace of made-up rounds, whose tokens are all over the vocabulary: no run mentions more."""
    taken: list[float] = []
    _, disk = _kept(vocab, rounds, budget, taken)
    some = max(1, rounds // 10)
    tracemalloc.start()
    try:
        trace, _ = _kept(vocab, rounds, budget, [])
        memory = tracemalloc.get_traced_memory()[0]
        del trace
    finally:
        tracemalloc.stop()
    return {
        "rounds": rounds,
        "budget": budget,
        "memory_bytes": memory,
        "disk_bytes": disk,
        "first": spread(taken[:some]),
        "last": spread(taken[-some:]),
    }


def _kept(vocab: int, rounds: int, budget: int, taken: list[float]) -> tuple[Any, int]:
    """A trace with its writer, and the bytes of its files; the seconds that keeping each round took go to ``taken``."""
    trace = Trace(new_header(pair={}, settings={}, prompt={}))
    with tempfile.TemporaryDirectory() as folder:
        writer = TraceWriter(Path(folder) / "trace", trace)
        for index in range(rounds):
            step = made_up_round(index, budget, vocab)
            started = time.perf_counter()
            trace.append(step)
            writer.append(step)
            taken.append(time.perf_counter() - started)
        size = sum(file.stat().st_size for file in writer.path.iterdir())
        writer.close()
    return (trace, writer), size


def made_up_round(index: int, budget: int, vocab: int, depth: int = 15) -> Step:
    """A round as a decoder records it, of random numbers."""
    rng, n = np.random.default_rng(index), budget + 1
    parents = np.concatenate([[-1], np.maximum(0, np.arange(1, n) - rng.integers(1, 9, budget))])
    tree = DraftTree.from_parents(rng.permutation(vocab)[:n], parents, log_prob=-rng.random(n), rank=np.arange(n) - 1)
    numbers = rng.random((3, n), np.float32)
    return Step(
        index=index,
        start=10 * index,
        tree=tree,
        target_choice=rng.integers(0, vocab, n),
        target_log_prob=numbers[0],
        margin=numbers[1],
        node_log_prob=numbers[2],
        path=(0,),
        bonus=1,
        emitted=(1,),
        stop_reason="mismatch",
        times=dict.fromkeys(("draft", "tree", "verify", "accept", "commit"), 0.01),
        draft_ids=rng.integers(0, vocab, (depth, DRAFT_BEST)),
        draft_log_probs=-rng.random((depth, DRAFT_BEST), np.float32),
    )
