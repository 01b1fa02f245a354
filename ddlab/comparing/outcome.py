"""The end of a comparison: what other logits do to choices, paths and tokens per round, and what path replay says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ddlab.attention import use
from ddlab.audit import band
from ddlab.comparing.comparison import End, Replayed
from ddlab.oracle import Reader
from ddlab.sampling import Sampling, walk
from ddlab.trace import Mean, Step, Trace
from ddlab.tree import DraftTree

if TYPE_CHECKING:
    from ddlab.pair import Pair

BUDGET = 16  # of a drafted tree, where the trace has none of its own
AT_ONCE = 32  # rows of the vocabulary in float64


@dataclass
class _Tally:
    rows: int = 0
    flips: int = 0
    kl: list[np.ndarray] = field(default_factory=list)  # nats, by row
    paths: int = 0
    emitted: list[int] = field(default_factory=list)  # tokens of each round that could be walked
    first_emitted: list[int] = field(default_factory=list)
    rounds: int = 0
    replayed: list[tuple[int, int, float]] = field(default_factory=list)  # nodes, agreeing, worst


class Outcome:
    """Adds up, call by call, what each backend's logits lead to. The first one added of a call is held against."""

    def __init__(self, pair: Pair, trace: Trace | None, what: str):
        self.pair, self.trace, self.what = pair, trace, what
        self.notes: list[str] = []
        self._tallies: dict[str, _Tally] = {}
        self._reader: Reader | None = None
        settings = {} if trace is None else trace.settings
        self._sampling = Sampling(settings.get("temperature", 0.0), settings.get("seed", 0))
        self._walks = what in ("draft", "verify") and trace is not None
        if self._walks and settings.get("logits_processor"):
            self._walks = False
            self.notes.append("the trace was made with logits processors, so no paths are walked here")
        self._allowed = band(pair.dtype, hybrid="linear_attention" in pair.layer_types)

    def add(self, step: Step | None, logits: dict[str, Tensor], disputed: bool) -> None:
        """One call. logits: [m, vocab] by backend, the first one first. disputed: some layer of it is wrong."""
        first = next(iter(logits.values()))
        walks = self._walks and step is not None
        taken = {name: self._walk(step, each) if walks else None for name, each in logits.items()}
        mine = next(iter(taken.values()))
        flipped = False
        for name, each in logits.items():
            tally = self._tallies.setdefault(name, _Tally())
            flips = int((each.argmax(-1) != first.argmax(-1)).sum())
            flipped |= flips > 0
            tally.rows += len(each)
            tally.flips += flips
            tally.kl.append(_kl(first, each))
            own = taken[name]
            tally.rounds += step is not None
            if own is not None and mine is not None:
                tally.paths += own != mine
                tally.emitted.append(len(own[1]))
                tally.first_emitted.append(len(mine[1]))
        if self.what == "verify" and step is not None and (flipped or disputed):
            self._replay(step, logits)

    def end(self, name: str) -> End:
        tally = self._tallies[name]
        kl = np.concatenate(tally.kl)
        walked = bool(tally.emitted)
        return End(
            rows=tally.rows,
            flips=tally.flips,
            kl_mean=float(kl.mean()),
            kl_max=float(kl.max()),
            rounds=len(tally.emitted) if walked else tally.rounds,
            paths=tally.paths if walked else None,
            tau=_mean(tally.emitted) if walked else None,
            first_tau=_mean(tally.first_emitted) if walked else None,
            replayed=self._replayed(tally),
        )

    # ---- paths -------------------------------------------------------------------------------------------------------

    def _walk(self, step: Step | None, logits: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The accepted path (of a draft: its tokens) and the tokens that the round would add; None: not known."""
        trace = self.trace
        assert trace is not None and step is not None
        settings, first = trace.settings, len(trace.prompt_ids)
        stops = settings.get("stop_token_ids", ())
        room = first + settings["max_new_tokens"] - step.start - 1
        text = [*trace.prompt_ids, *trace.output_ids]
        if self.what == "verify":
            tree, positions = step.tree, step.positions + 1
            choice = self._sampling.choose(logits, positions, lambda node: []).tokens.cpu().numpy()
        elif torch.isnan(logits).any():
            return None
        else:
            tree = self._tree(logits, text[step.start])
            known = np.concatenate([np.array(text), np.full(len(logits) + 1, -1)])  # nothing is known behind the text
            choice = known[step.start + 1 + tree.depth]
        taken = walk(tree, choice, stops, room)
        if taken.bonus == -1:
            return None
        path = taken.path if self.what == "verify" else tuple(tree.tokens[list(taken.path)].tolist())
        return path, taken.emitted(tree)

    def _tree(self, logits: Tensor, root: int) -> DraftTree:
        assert self.trace is not None
        if self.trace.method == "dflash":
            return DraftTree.chain(logits, root_token=root)
        budget = self.trace.settings.get("budget") if self.trace.method == "ddtree" else BUDGET
        return DraftTree.best_first(logits, len(logits) if budget is None else budget, root_token=root)

    # ---- path replay -------------------------------------------------------------------------------------------------

    def _replay(self, step: Step, logits: dict[str, Tensor]) -> None:
        assert self.trace is not None
        text = [*self.trace.prompt_ids, *self.trace.output_ids]
        with use(self.pair, "eager", "target", ("prefill", "step")):
            self._reader = self._reader or Reader(self.pair)
            self._reader.read(text[: step.start])
            right = self._reader.branch(step.tree)  # [n, vocab]
        scale = right.abs().amax(-1)
        for name, each in logits.items():
            agree = int((each.argmax(-1) == right.argmax(-1)).sum())
            worst = ((each - right).abs().amax(-1) / scale).max()
            self._tallies[name].replayed.append((len(right), agree, float(worst)))

    def _replayed(self, tally: _Tally) -> Replayed | None:
        if not tally.replayed:
            return None
        nodes, agree, worst = zip(*tally.replayed, strict=True)
        return Replayed(len(nodes), sum(nodes), sum(agree), float(np.max(worst)), self._allowed)


def _mean(counts: list[int]) -> Mean:
    return Mean("tokens per round", sum(counts) / len(counts) if counts else None, len(counts))


def _kl(first: Tensor, other: Tensor) -> np.ndarray:
    """Of each row, the divergence of the other's distribution from the first one's, in nats, float64 [m]."""
    found = []
    for one, two in zip(first.split(AT_ONCE), other.split(AT_ONCE), strict=True):
        p, q = one.double().log_softmax(-1), two.double().log_softmax(-1)
        # an id that cannot be drafted is left out of both
        apart = torch.where(torch.isfinite(p), p.exp() * (p - q), torch.zeros_like(p)).sum(-1)
        found.append(apart.clamp_min(0.0).cpu().numpy())
    return np.concatenate(found)
