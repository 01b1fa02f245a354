"""The cost model of this machine: rounds of every size, timed in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ddlab.costs.model import PHASES, CostModel

if TYPE_CHECKING:
    from ddlab.pair import Pair

BUDGETS = (0, 1, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # measured up to the largest that is asked for
PREFIXES = (32, 256)
TEXT = "Explain how a steam engine works, from the boiler to the wheels, and why it was replaced."


class Sample(NamedTuple):
    """One timed round: seconds by phase with ``record``, its rows, and the tokens before its root."""

    seconds: dict[str, float]
    rows: int
    prefix: int


def typical(times: Sequence[float]) -> float:
    """The mean, with times beyond three times the median cut to it.

    A median alone is no sum's part: on a machine that is busy now and then it tells how fast the quiet half is.
    """
    return float(np.minimum(times, 3 * np.median(times)).mean())


def timed_step(decoder: Any) -> Sample:
    """A round of a decoder, with what it takes beyond its phases."""
    started = time.perf_counter()
    step = decoder.step()
    wall = time.perf_counter() - started
    return Sample({**step.times, "record": wall - step.seconds}, len(step.tree), step.start)


class Calibration:
    """Rounds of every size at every prefix, timed in turns: whatever slows the machine down slows all of them.

    Args:
        max_budget: the largest to be measured; some smaller ones are too, and plain decoding.
        prefixes: tokens before the root.
        text: a prompt that is repeated until it is as long as a prefix.
    """

    def __init__(
        self,
        pair: Pair,
        max_budget: int = 256,
        prefixes: Sequence[int] = PREFIXES,
        temperature: float = 0.0,
        text: Any = TEXT,
    ) -> None:
        from ddlab.decode import Decoder

        if pair.drafter is None:
            raise ValueError("this pair has no drafter: there are no rounds to measure")
        budgets = sorted({b for b in (*BUDGETS, pair.drafter.depth) if b < max_budget} | {max_budget})
        prefixes = sorted(set(prefixes))
        if not prefixes or prefixes[0] < 1:
            raise ValueError(f"prefixes are numbers of tokens, 1 or more, not {list(prefixes)}")
        self.pair, self.temperature = pair, temperature
        ids = list(pair.encode(text if pair.tokenizer is not None else [0]).ids)
        common: dict[str, Any] = {"temperature": temperature, "stop_token_ids": ()}
        common["max_new_tokens"] = 2 * (pair.drafter.depth + 1)  # a round, and one behind it
        self.decoders: dict[tuple[int, int | None], Decoder] = {}  # by prefix and budget; None: plain decoding
        for prefix in prefixes:
            for budget in (None, *budgets):
                method = "ar" if budget is None else "ddtree"
                decoder = Decoder(pair, method=method, budget=budget, **common)
                decoder.start((ids * (prefix // len(ids) + 1))[:prefix])
                self.decoders[prefix, budget] = decoder
        self.samples: dict[tuple[int, int | None], list[Sample]] = {key: [] for key in self.decoders}
        self._order, self._waiting = np.random.default_rng(0), list(self.decoders)
        self.measure()
        for taken in self.samples.values():  # the first round warms up
            taken.clear()

    def measure(self) -> None:
        """One round of every size at every prefix."""
        for _ in self.decoders:
            self.measure_next()

    def measure_next(self) -> None:
        """One round, of the next size and prefix; undone after it, so that the prefix stays what it is."""
        if not self._waiting:
            self._waiting = [list(self.decoders)[i] for i in self._order.permutation(len(self.decoders))]
        key = self._waiting.pop()
        decoder = self.decoders[key]
        if decoder.engine == "graph":  # one text at a time has its buffers: the swap is no part of a round
            decoder.step()
            decoder.back()
        self.samples[key].append(timed_step(decoder))
        decoder.back()

    @property
    def fewest(self) -> int:
        """Rounds that every size and prefix was timed in."""
        return min(map(len, self.samples.values()))

    def model(self) -> CostModel:
        """What was measured so far. Raises ValueError before the first `measure`."""
        if not self.fewest:
            raise ValueError("nothing was measured yet: call measure() some times first")
        prefixes = sorted({prefix for prefix, _ in self.decoders})
        budgets = sorted({budget for _, budget in self.decoders if budget is not None})
        rows = [self.samples[prefixes[0], budget][0].rows for budget in budgets]
        kept = [i for i, n in enumerate(rows) if n not in rows[:i]]  # a draft may not fill the largest budgets

        def seconds(prefix: int, budget: int | None, phase: str) -> float:
            return typical([sample.seconds[phase] for sample in self.samples[prefix, budget]])

        tables = {
            phase: np.array([[seconds(prefix, budgets[i], phase) for i in kept] for prefix in prefixes])
            for phase in PHASES
        }
        tables["draft"] = np.tile(tables["draft"].mean(axis=1)[:, None], len(kept))  # rows come after it
        own = [sum(seconds(prefix, None, phase) for phase in PHASES if phase != "record") for prefix in prefixes]
        return CostModel(
            rows=tuple(rows[i] for i in kept),
            prefixes=tuple(prefixes),
            seconds=tables,
            plain=np.array(own),
            noise_seconds=_noise_seconds(self.pair.rows) if self.temperature else 0.0,
            samples=self.fewest,
            rounds_up=any(decoder.engine == "graph" for decoder in self.decoders.values()),
            source={
                "pair": self.pair.name,
                "device": str(self.pair.device),
                "dtype": str(self.pair.dtype).removeprefix("torch."),
                "attention": self.pair.attention,
                "engine": ", ".join(sorted({decoder.engine for decoder in self.decoders.values()})),
                "temperature": self.temperature,
            },
        )


def calibrate(
    pair: Pair,
    max_budget: int = 256,
    prefixes: Sequence[int] = PREFIXES,
    rounds: int = 8,
    temperature: float = 0.0,
) -> CostModel:
    """Time ``rounds`` rounds of each of some sizes up to ``max_budget``, at each prefix, in turns.

    Raises:
        ValueError: no drafter, or a prefix that does not fit the target's positions.
    """
    calibration = Calibration(pair, max_budget, prefixes, temperature)
    for _ in range(max(rounds, 1)):
        calibration.measure()
    return calibration.model()


def _noise_seconds(vocab_size: int) -> float:
    """Of one position's noise. A round measured again finds its noise kept, a text does not."""
    from ddlab.sampling import gumbel_noise

    taken = []
    for position in range(9):
        started = time.perf_counter()
        gumbel_noise.__wrapped__(0, position, vocab_size)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)
