"""One finished run as a row of a table, and figures over runs: by prompt, without the texts that are too short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ddlab.intervals import Estimate, Paired, estimate, is_short, paired
from ddlab.trace import Trace

if TYPE_CHECKING:
    from ddlab.sweeps.sweepfile import Spec

METRICS = ("tokens_per_round", "tokens_per_second")
REASONS = ("mismatch", "exhausted", "stop_token", "length")
PHASES = ("draft", "tree", "verify", "accept", "commit")


@dataclass(frozen=True)
class Run:
    """One finished run as a row of the table. Seconds are those of the rounds' phases, without the prompt's forward.

    finished: ``stop_token`` or ``length``. short: see `is_short`. The first new token is the prompt's, so rounds bring
    ``new_tokens - 1``. The first round counts like the others: a run may have only one, and leaving those runs out
    would leave out the best. A sweep warms up before its runs.
    """

    run: str
    prompt: str
    kind: str
    method: str
    budget: int | None
    temperature: float
    seed: int
    finished: str
    short: bool
    prompt_tokens: int
    new_tokens: int
    rounds: int
    accepted_drafts: int
    nodes: int
    mismatch: int  # rounds that ended so; with the next three
    exhausted: int
    stop_token: int
    length: int
    tokens_per_round: float | None
    tokens_per_second: float | None
    seconds: float
    first_round_seconds: float
    draft_seconds: float
    tree_seconds: float
    verify_seconds: float
    accept_seconds: float
    commit_seconds: float
    device: str
    torch: str
    created: str

    @property
    def tokens(self) -> int:
        """That the rounds brought."""
        return self.new_tokens - 1

    def parts(self, metric: str) -> tuple[float, float]:
        """Numerator and denominator of a metric."""
        return self.tokens, self.rounds if metric == "tokens_per_round" else self.seconds


def run_of(spec: Spec, trace: Trace) -> Run:
    """A row of the table."""
    steps, header, new = trace.steps, trace.header, len(trace.output_ids)
    reasons = Counter(step.stop_reason for step in steps)
    seconds, tokens = sum(step.seconds for step in steps), sum(len(step.emitted) for step in steps)
    phases: Any = {f"{phase}_seconds": sum(step.times.get(phase, 0.0) for step in steps) for phase in PHASES}
    counts: Any = {reason: reasons[reason] for reason in REASONS}
    return Run(
        run=spec.name,
        **asdict(spec),
        finished=trace.finished or "not finished",
        short=is_short(trace.finished == "stop_token", new, trace.settings["max_new_tokens"]),
        prompt_tokens=len(trace.prompt_ids),
        new_tokens=new,
        rounds=len(steps),
        accepted_drafts=sum(step.accepted for step in steps),
        nodes=sum(step.tree.drafted for step in steps),
        tokens_per_round=trace.tokens_per_round.value,
        tokens_per_second=tokens / seconds if seconds > 0 else None,
        seconds=seconds,
        first_round_seconds=steps[0].seconds if steps else 0.0,
        device=str(header.get("pair", {}).get("device")),
        torch=str(header.get("versions", {}).get("torch")),
        created=str(header.get("created")),
        **counts,
        **phases,
    )


def _values(metric: str, runs: Iterable[Run]) -> dict[str, float]:
    """By prompt: a ratio of sums over its runs."""
    sums: dict[str, list[float]] = {}
    for run in runs:
        above, below = run.parts(metric)
        total = sums.setdefault(run.prompt, [0.0, 0.0])
        total[0] += above
        total[1] += below
    return {prompt: above / below for prompt, (above, below) in sums.items() if below > 0}


def figure(metric: str, runs: Sequence[Run]) -> Estimate:
    """The mean over prompts of a metric of some runs."""
    values = _values(metric, runs)
    counted = [run for run in runs if run.prompt in values]
    return estimate(metric.replace("_", " "), values, len(counted), sum(run.rounds for run in counted))


def pair_up(metric: str, ours: Sequence[Run], theirs: Sequence[Run], names: tuple[str, str]) -> Paired:
    """Runs of two methods, prompt by prompt, over the seeds that both have and that are not short."""
    sides = [{(r.prompt, r.seed): r for r in runs if not r.short} for runs in (ours, theirs)]
    shared = sides[0].keys() & sides[1].keys()
    kept = [[run for key, run in side.items() if key in shared] for side in sides]
    every = [{run.prompt for run in side.values()} for side in sides]
    values = [_values(metric, runs) for runs in kept]
    both = values[0].keys() & values[1].keys()
    values = [{prompt: value for prompt, value in side.items() if prompt in both} for side in values]
    found = paired(
        metric.replace("_", " "),
        *values,
        names=names,
        runs=sum(map(len, kept)),
        rounds=sum(run.rounds for runs in kept for run in runs),
    )
    return Paired(**{**vars(found), "unpaired": len((every[0] | every[1]) - both)})
