"""The cost model held to real decodes: predicted against measured tokens per second, timed in turns.

python -m ddlab sweep OUT --check
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlab.costs.calibration import Calibration, Sample, timed_step, typical
from ddlab.costs.model import PHASES, CostModel
from ddlab.intervals import Estimate, estimate

if TYPE_CHECKING:
    from ddlab.pair import Pair
    from ddlab.replay import Replay
    from ddlab.trace import Trace

WITHIN = 0.10  # a prediction holds when it is no further off than this
LEAST_SAMPLES = 5  # rounds behind each figure of the cost model


@dataclass(frozen=True)
class BudgetCheck:
    """One budget. Tokens per second of whole steps, recording included, over all rounds of the prompts.

    error: predicted / measured - 1, of the means over prompts. equal_rounds: rounds that the replay has as the decoder
    had them. phases: milliseconds a round, measured and predicted.
    """

    budget: int
    measured: Estimate
    predicted: Estimate
    error: float
    worst_prompt: float  # the largest error of one prompt, with its sign
    equal_rounds: int
    phases: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Check:
    """What `check` found; ``ok`` when every budget is predicted within WITHIN."""

    budgets: tuple[BudgetCheck, ...]
    cost: CostModel
    repeats: int

    @property
    def ok(self) -> bool:
        return all(abs(row.error) <= WITHIN for row in self.budgets)

    def rows(self) -> list[dict[str, Any]]:
        """One row a budget."""
        return [
            {
                "budget": row.budget,
                "measured": row.measured.value,
                "predicted": row.predicted.value,
                "error": row.error,
                "worst_prompt": row.worst_prompt,
                "prompts": row.measured.prompts,
                "rounds": row.measured.rounds,
                "equal_rounds": row.equal_rounds,
                "repeats": self.repeats,
                **{f"{phase}_ms": measured for phase, (measured, _) in row.phases.items()},
                **{f"{phase}_ms_predicted": predicted for phase, (_, predicted) in row.phases.items()},
            }
            for row in self.budgets
        ]

    def to_text(self) -> str:
        first = self.budgets[0].measured
        lines = [
            f"tokens per second of whole steps, mean of {first.prompts} prompts; each round's time is the mean of "
            f"{self.repeats} decodes, each phase of the model that of {self.cost.samples} rounds or more",
            f"{'budget':>6}  {'measured':>9}  {'predicted':>9}  {'error':>7}  {'worst prompt':>12}  {'rounds':>6}  "
            "milliseconds a round, measured → predicted",
        ]
        for row in self.budgets:
            parts = " ".join(f"{phase} {a:.2f}→{b:.2f}" for phase, (a, b) in row.phases.items())
            lines.append(
                f"{row.budget:>6}  {float(row.measured):>9.2f}  {float(row.predicted):>9.2f}  {row.error:>+7.1%}  "
                f"{row.worst_prompt:>+12.1%}  {row.measured.rounds:>6}  {parts}"
            )
        equal, rounds = sum(r.equal_rounds for r in self.budgets), sum(r.measured.rounds for r in self.budgets)
        lines.append(f"replayed rounds equal to the decoder's: {equal} of {rounds}")
        lines.append(f"{'✓' if self.ok else '✕'} predictions within {WITHIN:.0%}: {'yes' if self.ok else 'NO'}")
        return "\n".join(lines)


def check(
    pair: Pair,
    prompts: Sequence[Any],
    budgets: Sequence[int] = (4, 16, 64),
    *,
    max_new_tokens: int = 64,
    repeats: int = 3,
    temperature: float = 0.0,
) -> Check:
    """Predict tokens per second at some budgets and measure them, in one run on this machine.

    Every prompt is decoded ``repeats`` times at every budget. In between as many rounds of the cost model's are timed,
    so that whatever else runs on the machine slows both down; both count with the mean of their repeats. The
    prediction rests on one recording a prompt (of the largest budget), replayed.

    Raises:
        ValueError: no drafter, no prompt, no budget, or a prompt that does not fit.
    """
    from ddlab.decode import Decoder
    from ddlab.replay import replay

    if not len(prompts) or not len(budgets) or min(budgets) < 0:
        raise ValueError("give at least one prompt and one budget, 0 or more, to check")
    budgets = sorted(set(budgets))
    lengths = [len(pair.encode(prompt).ids) for prompt in prompts]
    calibration = Calibration(
        pair, budgets[-1], (min(lengths), max(lengths) + max_new_tokens), temperature, text=prompts[0]
    )
    taken: dict[tuple[int, int], list[list[Sample]]] = {(b, i): [] for b in budgets for i in range(len(prompts))}
    traces: dict[tuple[int, int], Trace] = {}
    for turn in range(max(repeats, 1)):
        for i, prompt in enumerate(prompts):
            for budget in budgets[turn % len(budgets) :] + budgets[: turn % len(budgets)]:
                decoder = Decoder(pair, budget=budget, max_new_tokens=max_new_tokens, temperature=temperature)
                decoder.start(prompt)
                timed = []
                while not decoder.finished:
                    timed.append(timed_step(decoder))
                    if decoder.engine == "eager":
                        calibration.measure_next()
                if decoder.engine == "graph":  # texts that take turns would have to swap buffers
                    for _ in timed:
                        calibration.measure_next()
                taken[budget, i].append(timed)
                traces[budget, i] = decoder.trace
    while calibration.fewest < LEAST_SAMPLES:
        calibration.measure()
    cost = calibration.model()
    replays = [replay(pair, traces[budgets[-1], i], budgets) for i in range(len(prompts))]
    rows = []
    for budget in budgets:
        texts = [_Text(replays[i], cost, traces[budget, i], _means(taken[budget, i])) for i in range(len(prompts))]
        texts = [text for text in texts if text.rounds]
        if not texts:
            raise ValueError("no text has a round to time: give other prompts or more max_new_tokens")
        rows.append(_row(budget, texts))
    return Check(tuple(rows), cost, max(repeats, 1))


class _Text:
    """One prompt at one budget: tokens per second and seconds by phase, measured and predicted."""

    def __init__(self, replayed: Replay, cost: CostModel, trace: Trace, seconds: dict[str, np.ndarray]):
        self.rounds, foretold = trace.rounds, replayed.run(trace.settings["budget"])
        self.equal = sum(
            (r.start, r.emitted) == (s.start, s.emitted) for r, s in zip(foretold, trace.steps, strict=False)
        )
        size, start, new = (
            [r.nodes + 1 for r in foretold],
            [r.start for r in foretold],
            [len(r.emitted) for r in foretold],
        )
        parts = cost.phases(size, start, new)
        self.phases = {phase: (float(seconds[phase].sum()), float(parts[phase].sum())) for phase in PHASES}
        tokens = len(trace.output_ids) - 1
        self.measured, self.predicted = (tokens / sum(part[i] for part in self.phases.values()) for i in (0, 1))


def _row(budget: int, texts: Sequence[_Text]) -> BudgetCheck:
    rounds = sum(text.rounds for text in texts)
    measured, predicted = (
        estimate("tokens per second", {str(i): v for i, v in enumerate(values)}, len(texts), rounds)
        for values in ([text.measured for text in texts], [text.predicted for text in texts])
    )
    phases = {p: tuple(1000 * sum(text.phases[p][i] for text in texts) / rounds for i in (0, 1)) for p in PHASES}
    return BudgetCheck(
        budget=budget,
        measured=measured,
        predicted=predicted,
        error=float(predicted) / float(measured) - 1,
        worst_prompt=max((text.predicted / text.measured - 1 for text in texts), key=abs),
        equal_rounds=sum(text.equal for text in texts),
        phases={phase: (a, b) for phase, (a, b) in phases.items()},
    )


def _means(decodes: list[list[Sample]]) -> dict[str, np.ndarray]:
    """Seconds of each round, the mean of its repeats: by phase [rounds]."""
    return {p: np.array([typical([s.seconds[p] for s in r]) for r in zip(*decodes, strict=True)]) for p in PHASES}
