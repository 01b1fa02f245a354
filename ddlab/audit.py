"""Oracles: does a trace say what the target itself would say?

Path replay: the target is run, without a tree, on the text + the tokens from the root to a leaf; every recorded number
of every node on that path must come out again. The text before the root is read once into Transformers' own cache, from
which the paths branch off; the first and the last round are replayed without any cache. Plain decoding: the target
decodes the same prompt one token at a time; the text must be the same. Neither uses ddlab's verification.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList

from ddlab.sampling import Sampling
from ddlab.trace import Step, Trace
from ddlab.tree import DraftTree

if TYPE_CHECKING:
    from ddlab.pair import Pair

PATHS_AT_ONCE = 16  # each has a copy of the cache

# How far two correct evaluations of the same logits may lie apart, as a share of the logits' scale (the largest
# absolute logit of the row). float32: the recurrent, the chunk and the tree form of the delta rule differ by rounding.
# Half precision: one rounding per layer and sub-layer, so a few steps of the dtype.
BANDS = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}


def band(dtype: torch.dtype, *, hybrid: bool = False) -> float:
    """Relative band of ``dtype``. A hybrid in float64 gets float32's: Transformers runs its delta rule in float32."""
    return BANDS[torch.float32] if hybrid and dtype == torch.float64 else BANDS[dtype]


@dataclass(frozen=True)
class Divergence:
    """A place where the trace and an oracle choose different tokens.

    where: round and node, or ``text``. margin: by how much the oracle preferred its own token, in logits. A ``tie``
    is a margin within the dtype's band; anything else is an error.
    """

    where: str
    position: int
    recorded: int
    oracle: int
    margin: float
    band: float

    @property
    def tie(self) -> bool:
        return self.margin <= self.band

    def __str__(self) -> str:
        verdict = "a tie within the band" if self.tie else "an error, beyond the band"
        return (
            f"{self.where}, position {self.position}: recorded token {self.recorded}, the target alone chooses "
            f"{self.oracle} by a margin of {self.margin:.3g} logits, {verdict} of {self.band:.3g}"
        )


@dataclass(frozen=True)
class Audit:
    """The verdict on one trace; ``ok`` when nothing differs beyond ties.

    nodes of nodes_total were replayed. max_error: the difference of a recorded log-probability from the replayed one,
    in nats, that came closest to what the dtype's band permits there, and allowed: that bound.
    """

    method: str
    dtype: str
    nodes: int
    nodes_total: int
    rounds: int
    rounds_total: int
    tokens: int
    max_error: float
    allowed: float
    text_equal: bool
    divergences: tuple[Divergence, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return self.max_error <= self.allowed and all(d.tie for d in self.divergences)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, with the verdict."""
        described = [asdict(d) | {"tie": d.tie} for d in self.divergences]
        return asdict(self) | {"ok": self.ok, "divergences": described, "notes": list(self.notes)}

    def to_text(self) -> str:
        sampled = "" if self.nodes == self.nodes_total else " (a sample)"
        text = "equal to plain decoding" if self.text_equal else "differs from plain decoding"
        lines = [
            f"{'exact' if self.ok else 'NOT EXACT'}: {self.method}, {self.dtype}",
            f"  text: {text}, {self.tokens} new tokens",
            f"  path replay: {self.nodes} of {self.nodes_total} nodes in {self.rounds} of {self.rounds_total} "
            f"rounds{sampled}, largest difference {self.max_error:.2g} nats (allowed {self.allowed:.2g})",
        ]
        return "\n".join([*lines, *(f"  {d}" for d in self.divergences), *(f"  note: {n}" for n in self.notes)])


def audit(
    pair: Pair, trace: Trace, *, nodes: int | None = None, logits_processor: LogitsProcessorList | None = None
) -> Audit:
    """Hold a trace to the target itself.

    Args:
        nodes: replay about so many nodes, in rounds spread evenly over the run; None: every node.
        logits_processor: the processors that the trace was made with, if it was made with any.

    Raises:
        ValueError: the trace was made with processors and none are given.
    """
    settings = trace.settings
    named = settings.get("logits_processor") or []
    if named and not logits_processor:
        raise ValueError(f"this trace was made with {', '.join(named)}: pass the same logits_processor")
    sampling = Sampling(settings["temperature"], settings["seed"], logits_processor)
    relative = band(pair.dtype, hybrid="linear_attention" in pair.layer_types)
    replay = _Replay(pair, sampling, relative)
    chosen = _spread(trace.steps, nodes)
    text = list(trace.prompt_ids) + trace.output_ids
    for step in chosen:
        replay.round(text[: step.start], step, cached=step not in (chosen[0], chosen[-1]))
    plain = _plain_decoding(pair, sampling, trace)
    divergences = replay.divergences
    output = trace.output_ids
    equal = plain.tokens == output
    if not equal:
        at = next(i for i, (a, b) in enumerate(zip(plain.tokens, output, strict=False)) if a != b)
        found = Divergence(
            "text",
            len(trace.prompt_ids) + at,
            output[at],
            plain.tokens[at],
            plain.margins[at],
            relative * plain.scales[at],
        )
        divergences = [found, *divergences]
    notes = []
    if any("verify" in step.edited for step in trace.steps):
        notes.append("a hook replaced the target's logits: the text is not the target's own")
    if settings.get("linear_state") == "flattened":
        notes.append("linear_state='flattened': the linear layers ignored the tree on purpose")
    return Audit(
        method=trace.method,
        dtype=str(pair.dtype).removeprefix("torch."),
        nodes=sum(len(step.tree) for step in chosen),
        nodes_total=sum(len(step.tree) for step in trace.steps),
        rounds=len(chosen),
        rounds_total=trace.rounds,
        tokens=len(output),
        max_error=replay.max_error,
        allowed=replay.allowed,
        text_equal=equal,
        divergences=tuple(divergences),
        notes=tuple(notes),
    )


def path_logits(
    pair: Pair, text: list[int], tree: DraftTree, run: Callable[[list[list[int]]], Tensor] | None = None
) -> Tensor:
    """The target's logits at every node by path replay, [n, vocab]: no tree and no mask.

    A causal model's logits at a node do not depend on what follows it, so one run on each leaf's path gives all nodes
    on it; the runs share a batch, padded behind, where nothing looks.

    Args:
        text: the tokens before the root.
        run: paths (ids, all of one length, root first) -> logits [paths, length, vocab]; None: the target on
            text + path without any cache.
    """
    leaves = sorted(set(range(len(tree))) - set(tree.parents.tolist()))
    paths = [tree.path(leaf) for leaf in leaves]
    width = max(len(path) for path in paths)
    padded = [[int(tree.tokens[node]) for node in path] + [0] * (width - len(path)) for path in paths]
    run = run or (lambda batch: _run(pair, [[*text, *path] for path in batch], keep=width))
    logits: dict[int, Tensor] = {}
    for first in range(0, len(paths), PATHS_AT_ONCE):
        chosen = slice(first, first + PATHS_AT_ONCE)
        for path, row in zip(paths[chosen], run(padded[chosen]), strict=True):
            logits.update({node: row[depth] for depth, node in enumerate(path) if node not in logits})
    return torch.stack([logits[node] for node in range(len(tree))])


@torch.no_grad()
def _run(
    pair: Pair, ids: Sequence[Sequence[int]], keep: int, cache: DynamicCache | None = None, start: int = 0
) -> Tensor:
    """Logits of the last ``keep`` positions [batch, keep, vocab], in float32 or better."""
    batch = torch.tensor(ids, device=pair.device)
    positions = torch.arange(start, start + batch.shape[1], device=pair.device).expand(len(batch), -1)
    keywords = {"logits_to_keep": keep} if pair.keeps_logits else {}
    out = pair.target(input_ids=batch, position_ids=positions, cache=cache, use_cache=cache is not None, **keywords)
    logits = out.logits[:, -keep:]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class _Prefix:
    """The text so far on Transformers' own cache, and paths that branch off it."""

    def __init__(self, pair: Pair):
        self.pair, self.cache, self.length = pair, DynamicCache(config=pair.target.config), 0

    def read(self, text: list[int]) -> None:
        """Read on to the end of ``text``, which continues what was read before."""
        if len(text) > self.length:
            _run(self.pair, [text[self.length :]], 1, self.cache, self.length)
            self.length = len(text)

    def paths(self, batch: list[list[int]]) -> Tensor:
        """Logits [paths, length, vocab] of paths that all begin here; what was read stays as it is."""
        cache = copy.deepcopy(self.cache)
        cache.reorder_cache(torch.zeros(len(batch), dtype=torch.int64, device=self.pair.device))
        return _run(self.pair, batch, len(batch[0]), cache, self.length)


class _Replay:
    """Compares recorded rounds with path replay and gathers the worst."""

    def __init__(self, pair: Pair, sampling: Sampling, relative: float):
        self.pair, self.sampling, self.relative = pair, sampling, relative
        self.prefix = _Prefix(pair)
        self.max_error, self.allowed = 0.0, 0.0
        self.divergences: list[Divergence] = []
        self._worst = -np.inf

    def round(self, text: list[int], step: Step, *, cached: bool) -> None:
        tree = step.tree
        self.prefix.read(text)
        logits = path_logits(self.pair, text, tree, self.prefix.paths if cached else None)
        positions = step.start + 1 + tree.depth
        choice = self.sampling.choose(
            logits, positions, lambda node: text + [int(tree.tokens[i]) for i in tree.path(node)]
        )
        scale = logits.abs().amax(-1).double().cpu().numpy()  # [n]
        temperature = self.sampling.temperature or 1.0
        allowed = 2 * self.relative * scale / temperature  # a log-probability moves by at most twice its logits
        oracle = choice.tokens.cpu().numpy()
        same = oracle == step.target_choice
        self._compare(np.abs(choice.log_prob.double().cpu().numpy() - step.target_log_prob)[same], allowed[same])
        if len(tree) > 1:
            parents, tokens = tree.parents[1:], tree.tokens[1:]
            replayed = choice.log_probs.cpu()[torch.from_numpy(parents.copy()), torch.from_numpy(tokens.copy())]
            recorded = step.node_log_prob[1:]
            both_out = np.isneginf(recorded) & np.isneginf(replayed.numpy())  # banned by a processor, in both
            self._compare(np.abs(replayed.double().numpy() - recorded)[~both_out], allowed[parents][~both_out])
        for node in np.flatnonzero(~same):
            margin = float(choice.margin[node])
            self.divergences.append(
                Divergence(
                    f"round {step.index}, node {node}",
                    int(positions[node]),
                    int(step.target_choice[node]),
                    int(oracle[node]),
                    margin,
                    2 * self.relative * float(scale[node]),
                )
            )

    def _compare(self, error: np.ndarray, allowed: np.ndarray) -> None:
        """Keep the comparison that came closest to its bound, or went furthest beyond."""
        if not len(error):
            return
        ratio = np.where(np.isnan(error), np.inf, error) / allowed
        at = int(ratio.argmax())
        if ratio[at] > self._worst:
            self._worst = float(ratio[at])
            self.max_error, self.allowed = float(error[at]), float(allowed[at])


@dataclass(frozen=True)
class _Plain:
    tokens: list[int]
    margins: list[float]
    scales: list[float]


def _plain_decoding(pair: Pair, sampling: Sampling, trace: Trace) -> _Plain:
    """As many tokens as the trace has, one at a time, on Transformers' own cache."""
    prefix, history = _Prefix(pair), list(trace.prompt_ids)
    margins: list[float] = []
    scales: list[float] = []
    prefix.read(history[:-1])
    for _ in trace.output_ids:
        logits = _run(pair, [history[prefix.length :]], 1, prefix.cache, prefix.length)[0]
        prefix.length = len(history)
        choice = sampling.choose(logits, np.array([len(history)]), lambda node: history)
        history.append(int(choice.tokens[0]))
        margins.append(float(choice.margin[0]))
        scales.append(float(logits.abs().max()))
    tokens = history[len(trace.prompt_ids) :]
    return _Plain(tokens, margins, scales)


def _spread(steps: list[Step], nodes: int | None) -> list[Step]:
    """Rounds spread evenly over the run that together have about ``nodes`` nodes."""
    total = sum(len(step.tree) for step in steps)
    if nodes is None or total <= nodes:
        return steps
    count = max(1, round(len(steps) * nodes / total))
    return [steps[i] for i in np.linspace(0, len(steps) - 1, count).round().astype(int)]
