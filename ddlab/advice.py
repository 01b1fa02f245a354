"""Which budget, and what stands in the way of a better one: replayed rounds at measured costs, with intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ddlab.costs.counterfactual import ENDS, ORACLES, Way, ways_of
from ddlab.costs.model import CostModel
from ddlab.intervals import Estimate, estimate, is_short, paired, resampled_means

if TYPE_CHECKING:
    import pandas

    from ddlab.replay import DenseDrafts, Replay

JUDGED = ("perfect_ranking", "longer_block", "free_rows")  # some forward of the target every method has to pay for


class Replayed(NamedTuple):
    """One prompt's recording, to be replayed at other budgets."""

    prompt: str
    kind: str
    replay: Replay


@dataclass(frozen=True)
class Option:
    """A way to decode: ``ar``, ``chain`` (as deep as the block), or ``tree`` with a budget."""

    name: str
    budget: int | None
    tokens_per_second: Estimate
    tokens_per_round: Estimate
    nodes_per_round: float
    seconds_per_round: float

    @property
    def label(self) -> str:
        return self.name if self.budget is None else f"{self.name} {self.budget}"


@dataclass(frozen=True)
class Oracle:
    """What one thing made perfect would give, at the budget that is then best.

    gain: tokens per second over those of the best tree that there is, prompt by prompt (geometric mean).
    rounds_changed: of these rounds, those that are no rounds of the real tree of that budget (perfect_ranking), or that
    swallowed one more (longer_block); the costs alone change in the others.
    """

    name: str  # a key of ORACLES
    budget: int
    tokens_per_second: Estimate
    tokens_per_round: Estimate
    gain: Estimate
    rounds_changed: int
    rounds: int


@dataclass(frozen=True)
class KindAdvice:
    """The prompts of one kind.

    best: the option of most tokens per second; best_tree: of the trees alone. chosen: how large a share of the
    resamples of the prompts chooses each option, by label; low_budget to high_budget: where 95 % of the budgets lie
    that are chosen so. ends: rounds of the best tree by what ended them, they add up to all. limit: the oracle of
    JUDGED that gains most, where its interval lies above 1, else ``none``.
    """

    kind: str
    prompts: int
    short_prompts: int  # left out: their texts are too short (`is_short`)
    options: tuple[Option, ...]
    best: Option
    best_tree: Option
    low_budget: int | None
    high_budget: int | None
    chosen: dict[str, float]
    oracles: tuple[Oracle, ...]
    ends: dict[str, int]
    limit: str

    def to_text(self) -> str:
        left_out = f", {self.short_prompts} left out (stopped early)" if self.short_prompts else ""
        picked = ", ".join(f"{label} {share:.0%}" for label, share in self.chosen.items())
        lines = [
            f"{self.kind}: {self.prompts} prompts{left_out}. Best: {self.best.label}, "
            f"{self.best.tokens_per_second.figure} predicted tokens/s",
            f"  best in resamples of the prompts: {picked}"
            + ("" if self.low_budget is None else f"; budgets {self.low_budget} to {self.high_budget}"),
            f"  {'':16} {'budget':>6}  {'tokens/s':>22}  {'tokens per round':>18}  {'rounds':>6}  {'ms a round':>10}",
        ]
        for o in self.options:
            budget = "" if o.budget is None else o.budget
            lines.append(
                f"  {o.name:16} {budget:>6}  {o.tokens_per_second.figure:>22}  {o.tokens_per_round.figure:>18}  "
                f"{o.tokens_per_round.rounds:>6}  {1000 * o.seconds_per_round:>10.1f}"
                + (" *" if o == self.best else "")
            )
        lines.append(f"  if one thing were perfect (gain over {self.best_tree.label}):")
        for oracle in self.oracles:
            lines.append(
                f"  {oracle.name:16} {oracle.budget:>6}  {oracle.tokens_per_second.figure:>22}  "
                f"{oracle.tokens_per_round.figure:>18}  {oracle.rounds:>6}  gain {oracle.gain.figure}"
                f", {oracle.rounds_changed} rounds changed"
            )
        total = sum(self.ends.values())
        ended = ", ".join(f"{ENDS[end]} {n}" for end, n in self.ends.items())
        lines.append(f"  what ended the {total} rounds of {self.best_tree.label}: {ended}")
        lines.append(f"  limited by: {self.limit}" + (f" ({ORACLES[self.limit]})" if self.limit in ORACLES else ""))
        return "\n".join(lines)


@dataclass(frozen=True)
class Advice:
    """By kind of prompt; the first is ``all``."""

    kinds: tuple[KindAdvice, ...]
    cost: CostModel

    def rows(self) -> list[dict[str, Any]]:
        """One row for each kind and option."""
        rows = []
        for kind in self.kinds:
            for option in kind.options:
                row: dict[str, Any] = {"kind": kind.kind, "option": option.label, "budget": option.budget}
                row |= {"best": option == kind.best, "chosen": kind.chosen.get(option.label, 0.0)}
                for name in ("tokens_per_second", "tokens_per_round"):
                    figure: Estimate = getattr(option, name)
                    row |= {name: figure.value, f"{name}_low": figure.low, f"{name}_high": figure.high}
                row |= {"nodes_per_round": option.nodes_per_round, "seconds_per_round": option.seconds_per_round}
                rows.append(row | {"prompts": kind.prompts, "rounds": option.tokens_per_round.rounds})
        return rows

    def to_frame(self) -> pandas.DataFrame:
        """`rows` as a table. Raises ImportError, naming the cure, without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("Advice.to_frame needs pandas: pip install pandas") from error
        return pandas.DataFrame(self.rows()).astype({"budget": "Int64"})

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"kinds": [asdict(kind) for kind in self.kinds], "cost": self.cost.to_dict()}

    def to_text(self) -> str:
        return "\n\n".join(kind.to_text() for kind in self.kinds)


def advise(replayed: Sequence[Replayed], cost: CostModel, budgets: Sequence[int] | None = None) -> Advice:
    """The best budget, for all prompts and for each kind of them, and what limits it. Nothing is decoded.

    Args:
        replayed: one recording a prompt, see `ddlab.sweeps.results.Sweep.replays`. Texts that are too short
            (`is_short`) are left out and counted.
        cost: of this machine, see `ddlab.calibrate`.
        budgets: of trees; None: those that the cost model was measured at and the replays have candidates for.

    Raises:
        ValueError: no prompt, no budget, more candidates than were kept, or more rows than were measured.

    What each oracle means, with everything else as it is, each at the budget where it gives most:

    * perfect_ranking: a depth's token is accepted wherever it is among the ``budget`` most probable of its depth, which
      are all that a tree of that budget can choose from.
    * longer_block: a round that accepted its whole block and the round after it are one, and again where that one did.
      Tokens and the tree's size stay, the seconds of the later rounds are saved. A bound: a real longer block drafts
      its far end worse than the next round, which has seen the text up to there.
    * free_rows: a verify takes as long as one of a single row. What is left is drafting, building and choosing.
    * free_verify: a verify takes no time. A bound on what any speed-up of the target can give.
    """
    if budgets is None:
        kept = min((r.replay.drafts.ids.shape[2] for r in replayed), default=0)
        budgets = [rows - 1 for rows in cost.rows if 1 < rows <= kept + 1]
    budgets = sorted(set(budgets))
    if not budgets or budgets[0] < 1:
        raise ValueError(f"give budgets of 1 or more to choose from, not {budgets}")
    short = Counter(r.kind for r in replayed if _is_short(r.replay.drafts))
    texts = [_Text(r, cost, budgets) for r in replayed if not _is_short(r.replay.drafts)]
    texts = [text for text in texts if all(way.rounds for way in text.ways.values())]
    if not texts:
        raise ValueError(f"no text to give advice on: {len(replayed)} recordings, {short.total()} of them too short")
    kinds = list(dict.fromkeys(text.kind for text in texts))
    advice = [_advise("all", texts, short.total())]
    if len(kinds) > 1:
        advice += [_advise(kind, [text for text in texts if text.kind == kind], short[kind]) for kind in kinds]
    return Advice(tuple(advice), cost)


def _is_short(drafts: DenseDrafts) -> bool:
    new = len(drafts.text) - drafts.prompt_length
    return is_short(new > 0 and int(drafts.text[-1]) in drafts.stop_token_ids, new, drafts.max_new_tokens)


class _Text:
    def __init__(self, replayed: Replayed, cost: CostModel, budgets: Sequence[int]):
        self.prompt, self.kind = replayed.prompt, replayed.kind
        self.ways, self.ends = ways_of(replayed.replay, cost, budgets)


Key = tuple[str, int | None]


def _advise(kind: str, texts: Sequence[_Text], short: int) -> KindAdvice:
    keys = [key for key in texts[0].ways if key[0] not in ORACLES]
    options = [_option(key, [text.ways[key] for text in texts], texts) for key in keys]
    rates = np.array([[text.ways[key].tokens_per_second for key in keys] for text in texts])  # [prompts, options]
    picks = resampled_means(rates).argmax(axis=1)  # [resamples]
    shares = np.bincount(picks, minlength=len(keys)) / len(picks)
    trees = [budget for budget in (options[i].budget for i in picks) if budget is not None]
    low, high = (int(np.quantile(trees, q, method="inverted_cdf")) for q in (0.025, 0.975)) if trees else (None, None)
    tree = max((o for o in options if o.budget is not None), key=_speed)
    oracles = tuple(_oracle(name, texts, ("tree", tree.budget)) for name in ORACLES if _takes_time(name, texts))
    judged = max((oracle for oracle in oracles if oracle.name in JUDGED), key=lambda oracle: float(oracle.gain))
    surely = judged.gain.value if judged.gain.low is None else judged.gain.low
    ends = sum((text.ends[tree.budget] for text in texts if tree.budget is not None), Counter[str]())
    return KindAdvice(
        kind=kind,
        prompts=len(texts),
        short_prompts=short,
        options=tuple(options),
        best=max(options, key=_speed),
        best_tree=tree,
        low_budget=low,
        high_budget=high,
        chosen={option.label: float(share) for option, share in zip(options, shares, strict=True) if share},
        oracles=oracles,
        ends={end: ends[end] for end in ENDS},
        limit=judged.name if surely is not None and surely > 1 else "none",
    )


def _takes_time(name: str, texts: Sequence[_Text]) -> bool:
    """False for a free verify where the cost model has verifying alone: there is no speed to give."""
    return all(way.seconds > 0 for text in texts for key, way in text.ways.items() if key[0] == name)


def _speed(option: Option | Oracle) -> float:
    return float(option.tokens_per_second)


def _figures(ways: Sequence[Way], texts: Sequence[_Text]) -> tuple[Estimate, Estimate]:
    """Tokens per second and per round."""
    runs, rounds = len(ways), sum(way.rounds for way in ways)
    named = {text.prompt: way for text, way in zip(texts, ways, strict=True)}
    fast = estimate("tokens per second", {p: way.tokens_per_second for p, way in named.items()}, runs, rounds)
    return fast, estimate("tokens per round", {p: way.tokens_per_round for p, way in named.items()}, runs, rounds)


def _option(key: Key, ways: Sequence[Way], texts: Sequence[_Text]) -> Option:
    rounds = sum(way.rounds for way in ways)
    nodes, seconds = sum(way.nodes for way in ways) / rounds, sum(way.seconds for way in ways) / rounds
    return Option(*key, *_figures(ways, texts), nodes, seconds)


def _oracle(name: str, texts: Sequence[_Text], real: Key) -> Oracle:
    found = []
    for key in texts[0].ways:
        if key[0] == name and key[1] is not None:
            ways = [text.ways[key] for text in texts]
            fast, long = _figures(ways, texts)
            ours = {text.prompt: way.tokens_per_second for text, way in zip(texts, ways, strict=True)}
            theirs = {text.prompt: text.ways[real].tokens_per_second for text in texts}
            gain = paired("tokens per second", ours, theirs, runs=fast.runs, rounds=fast.rounds).ratio
            found.append(Oracle(name, key[1], fast, long, gain, sum(way.changed for way in ways), fast.rounds))
    return max(found, key=_speed)
