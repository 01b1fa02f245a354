"""What ddlab itself takes of a round, on the embedded pair and one thread: ``python tests/bench_host.py``.

First plain decoding against Transformers' ``generate``, in turns. Then, by method: milliseconds of a round, and of them
those beyond the models' forwards (target, drafter with its head, and the context that the drafter reads): ddlab's own
arithmetic on whole tensors (the states after the path, the draft's top-k with its normaliser, maxima and normalisers of
the target's logits), and the rest, which is Python. In wall and in CPU time, which busy neighbours inflate less.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import ddlab
from ddlab import sampling, tree, verify
from ddlab.pair import Pair

PROMPT, TOKENS, TURNS = "Why is the sky blue?", 128, 9
CLOCKS = {"wall": time.perf_counter, "CPU": time.thread_time}


class Inside:
    """Seconds by clock spent in the wrapped calls; of calls within calls the outermost alone."""

    def __init__(self) -> None:
        self.seconds, self.deep = dict.fromkeys(CLOCKS, 0.0), False

    def wrap(self, owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.deep:
                return call(*args, **kwargs)
            self.deep, started = True, {name: clock() for name, clock in CLOCKS.items()}
            try:
                return call(*args, **kwargs)
            finally:
                self.deep = False
                for clock, at in started.items():
                    self.seconds[clock] += CLOCKS[clock]() - at

        setattr(owner, name, timed)


def rounds(pair: Pair, forwards: Inside, arithmetic: Inside, method: str, budget: int | None) -> None:
    decoder = ddlab.Decoder(pair, method, budget=budget, max_new_tokens=200, stop_token_ids=())
    decoder.start(PROMPT)
    taken: dict[tuple[str, str], list[float]] = {}
    while not decoder.finished:
        before = [dict(inside.seconds) for inside in (forwards, arithmetic)]
        started = {name: clock() for name, clock in CLOCKS.items()}
        decoder.step()
        for name, at in started.items():
            whole = CLOCKS[name]() - at
            models, own = (
                now.seconds[name] - was[name] for now, was in zip((forwards, arithmetic), before, strict=True)
            )
            for part, seconds in (("round", whole), ("beyond", whole - models), ("rest", whole - models - own)):
                taken.setdefault((name, part), []).append(1e3 * seconds)
    cells = "".join(f"{statistics.median(several):>12.2f}" for several in taken.values())
    print(f"{method:<8}{budget or '':>6}{decoder.trace.rounds:>8}{cells}")


def against_generate(pair: Pair) -> None:
    ids = list(pair.encode(PROMPT).ids)
    stop = {"eos_token_id": -1, "pad_token_id": 0}

    def theirs() -> Any:
        return pair.target.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False, use_cache=True, **stop)

    def ours() -> Any:
        decoder = ddlab.Decoder(pair, "ar", max_new_tokens=TOKENS, stop_token_ids=())
        list(decoder.run(ids))
        return decoder.ids

    assert theirs()[0].tolist() == ours()
    taken: dict[str, dict[str, list[float]]] = {"ours": {}, "theirs": {}}
    calls: list[tuple[str, Callable[[], Any]]] = [("ours", ours), ("theirs", theirs)]
    for turn in range(TURNS):
        for who, call in calls if turn % 2 else calls[::-1]:
            started = {name: clock() for name, clock in CLOCKS.items()}
            call()
            for name, at in started.items():
                taken[who].setdefault(name, []).append(CLOCKS[name]() - at)
    for name in CLOCKS:
        ratios = sorted(a / b for a, b in zip(taken["ours"][name], taken["theirs"][name], strict=True))
        print(
            f"ar / generate, {name} time: {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}; "
            f"median and range of {TURNS} pairs of {TOKENS} tokens)"
        )


def main() -> None:
    torch.set_num_threads(1)
    pair = ddlab.load_pair()
    against_generate(pair)
    forwards, arithmetic = Inside(), Inside()
    assert pair.drafter is not None
    for owner, name in ((pair.target, "forward"), (pair.drafter.model, "forward"), (pair, "bare_head")):
        forwards.wrap(owner, name)
    forwards.wrap(pair.drafter, "ingest")
    for owner, name in ((verify.TargetCache, "commit"), (tree, "_torch_top"), (sampling, "_read_on_host")):
        arithmetic.wrap(owner, name)
    heads = "".join(f"{f'{part} {name}':>12}" for name in ("wall", "CPU") for part in ("all", "beyond", "rest"))
    print(f"\n{'method':<8}{'budget':>6}{'rounds':>8}{heads}")
    for method, budget in (("ar", None), ("dflash", None), ("ddtree", 16), ("ddtree", 64)):
        for _ in range(2):
            rounds(pair, forwards, arithmetic, method, budget)


if __name__ == "__main__":
    main()
