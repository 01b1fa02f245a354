"""Figures over prompts with their counts and bootstrap intervals, paired comparisons, and texts too short for either.

Prompts are what a set of runs samples: rounds of one text are alike, and seeds of one prompt too. So every prompt has
one value and counts once, and an interval comes from drawing prompts with replacement (Efron, 1979; the percentile
form), always the same draws for the same number of prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

RESAMPLED, LEVEL = 4000, 0.95
ENOUGH_PROMPTS, ENOUGH_ROUNDS = 8, 30  # a figure on fewer is shown, but greyed: its interval is likely too narrow
LEAST_TOKENS = 32  # a text that a stop token ended before so many says little about acceptance
_BLOCK = 1_000_000  # drawn counts held at a time


def is_short(stopped: bool, new_tokens: int, max_new_tokens: int) -> bool:
    """Did a stop token end the text before min(LEAST_TOKENS, max_new_tokens) new tokens?

    Such a text is counted, and has figures of its own, but is in no mean and no comparison. The rule goes by tokens,
    not by rounds: the text is the same under every method, so it is short under all of them or under none.
    """
    return stopped and new_tokens < min(LEAST_TOKENS, max_new_tokens)


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its 95 % interval and what stands behind it.

    value is None on no prompts, low and high on fewer than two.
    """

    name: str
    value: float | None
    low: float | None
    high: float | None
    prompts: int
    runs: int
    rounds: int

    @property
    def enough(self) -> bool:
        return self.prompts >= ENOUGH_PROMPTS and self.rounds >= ENOUGH_ROUNDS

    def __float__(self) -> float:
        return math.nan if self.value is None else self.value

    def __str__(self) -> str:
        counts = ", ".join(
            f"{n} {what}{'' if n == 1 else 's'}"
            for n, what in ((self.prompts, "prompt"), (self.runs, "run"), (self.rounds, "round"))
        )
        return f"{self.name}: {self.figure} ({counts})"

    @property
    def figure(self) -> str:
        """``5.34 [4.80, 5.91]``"""
        if self.value is None:
            return "no prompts"
        return f"{self.value:.2f}" + ("" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def resampled_means(values: np.ndarray) -> np.ndarray:
    """Means of ``values`` [prompts, ...] over draws of as many prompts, with replacement: [RESAMPLED, ...]."""
    values = np.asarray(values, float)
    prompts = len(values)
    rng, flat = np.random.default_rng(0), values.reshape(prompts, -1)
    blocks, left = [], RESAMPLED
    while left:
        draws = min(left, max(1, _BLOCK // prompts))
        counts = rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=draws)  # how often each prompt is drawn
        blocks.append(counts @ flat / prompts)
        left -= draws
    return np.concatenate(blocks).reshape(RESAMPLED, *values.shape[1:])


def bounds(means: np.ndarray) -> tuple[float, float]:
    """The middle LEVEL of resampled means."""
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def estimate(name: str, values: Mapping[str, float], runs: int, rounds: int) -> Estimate:
    """The mean of one value a prompt.

    Args:
        runs, rounds: what the values were made from.
    """
    array = np.array(list(values.values()), float)
    low, high = bounds(resampled_means(array)) if len(array) > 1 else (None, None)
    return Estimate(name, float(array.mean()) if len(array) else None, low, high, len(array), runs, rounds)


@dataclass(frozen=True)
class Paired:
    """``ours`` against ``theirs`` on the prompts that both have.

    difference: mean of ours - theirs. ratio: geometric mean of ours / theirs, so that the other way round it is one
    over it. wins, ties, losses: prompts on which ours is larger, equal, smaller. unpaired: prompts that one lacks.
    """

    name: str
    ours: str
    theirs: str
    difference: Estimate
    ratio: Estimate
    wins: int
    ties: int
    losses: int
    unpaired: int

    def __str__(self) -> str:
        return (
            f"{self.name}, {self.ours} against {self.theirs}: {self.ratio.figure} times, difference "
            f"{self.difference.figure}; of {self.ratio.prompts} prompts {self.wins} won, {self.ties} tied, "
            f"{self.losses} lost" + (f", {self.unpaired} without a partner" if self.unpaired else "")
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def paired(
    name: str,
    ours: Mapping[str, float],
    theirs: Mapping[str, float],
    *,
    names: tuple[str, str] = ("ours", "theirs"),
    runs: int = 0,
    rounds: int = 0,
) -> Paired:
    """Compare two methods prompt by prompt; values are above 0.

    Args:
        runs, rounds: behind both sides together.
    """
    shared = [prompt for prompt in ours if prompt in theirs]
    pairs = {prompt: (ours[prompt], theirs[prompt]) for prompt in shared}
    difference = estimate(f"difference of {name}", {p: a - b for p, (a, b) in pairs.items()}, runs, rounds)
    logs = estimate(f"ratio of {name}", {p: math.log(a / b) for p, (a, b) in pairs.items()}, runs, rounds)
    value, low, high = (None if x is None else math.exp(x) for x in (logs.value, logs.low, logs.high))
    return Paired(
        name=name,
        ours=names[0],
        theirs=names[1],
        difference=difference,
        ratio=Estimate(logs.name, value, low, high, logs.prompts, runs, rounds),
        wins=sum(a > b for a, b in pairs.values()),
        ties=sum(a == b for a, b in pairs.values()),
        losses=sum(a < b for a, b in pairs.values()),
        unpaired=len(ours.keys() | theirs.keys()) - len(shared),
    )
