"""Does a trace say what the target itself would say?

Path replay: the target runs, without a tree, on the text and then from the root to every node, a plain step at a time;
every recorded number of every node must come out again. The nodes that became text are also held to one forward over
the whole text without any cache. Plain decoding: the target decodes the same prompt one token at a time; the text must
be the same. None of this uses ddlab's verification.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ddlab.oracle import Reader, plain_logits
from ddlab.sampling import Sampling
from ddlab.trace import Step, Trace

if TYPE_CHECKING:
    from ddlab.pair import Pair

# How far two correct evaluations of the same logits may lie apart, as a share of the logits' scale (the largest
# absolute logit of the row). float32: the recurrent, the chunk and the tree form of the delta rule differ by rounding.
# Half precision: one rounding per layer and sub-layer, so a few steps of the dtype.
BANDS = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}


OWN_ROUNDINGS = 4  # what is allowed, in differences of the target from itself, where these are more than the band

SHOWN = 6  # divergences that the text form lists


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
    notes: tuple[str, ...] = ()

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
        shown = [f"  {d}" for d in self.divergences[:SHOWN]]
        if len(self.divergences) > SHOWN:
            ties = sum(d.tie for d in self.divergences)
            shown.append(f"  … {len(self.divergences)} divergences in all, {ties} of them ties")
        return "\n".join([*lines, *shown, *(f"  note: {note}" for note in self.notes)])


def audit(
    pair: Pair, trace: Trace, *, nodes: int | None = None, logits_processor: LogitsProcessorList | None = None
) -> Audit:
    """Hold a trace to the target itself, within what rounding may do.

    A difference is allowed up to the dtype's band, or up to four times what the target differs from itself (token by
    token against one forward) where that is more: in bfloat16 rounding grows with the layers.

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
    text, output = [*trace.prompt_ids, *trace.output_ids], trace.output_ids
    own, plain = _plain_decoding(pair, trace, sampling)
    usual, rounding = (
        band(pair.dtype, hybrid="linear_attention" in pair.layer_types),
        _own_rounding(pair, trace, own, plain),
    )
    chosen, found = _spread(trace.steps, nodes), _Comparison(sampling, max(usual, OWN_ROUNDINGS * rounding))
    reader = Reader(pair)
    for step in chosen:
        reader.read(text[: step.start])
        found.compare(step, np.arange(len(step.tree)), reader.branch(step.tree), text, "path replay")
    if trace.steps:
        whole = plain_logits(pair, [text], keep=len(output))[0]  # [new tokens, vocab]
        for step in trace.steps:
            path = np.array(step.path)
            rows = torch.from_numpy(step.positions[path] - len(trace.prompt_ids))
            found.compare(step, path, whole[rows.to(whole.device)], text, "the text without a cache")
    found.compare_text(text, len(trace.prompt_ids), own, plain)
    notes = []
    if found.relative > usual:
        notes.append(
            f"token by token and in one forward the target itself differs by {rounding:.2g} of its largest logit in "
            f"{str(pair.dtype).removeprefix('torch.')}: {OWN_ROUNDINGS} times that is allowed. float32 shows more"
        )
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
        max_error=found.max_error,
        allowed=found.allowed,
        text_equal=own == output,
        divergences=tuple(found.divergences),
        notes=tuple(notes),
    )


class _Comparison:
    """Holds recorded nodes to logits from elsewhere, and keeps the worst."""

    def __init__(self, sampling: Sampling, relative: float):
        self.sampling, self.relative = sampling, relative
        self.max_error, self.allowed, self._worst = 0.0, 0.0, -np.inf
        self.divergences: list[Divergence] = []

    def compare(self, step: Step, nodes: np.ndarray, logits: Tensor, text: list[int], oracle: str) -> None:
        """Compare the recorded numbers of ``nodes`` [m] with the oracle's ``logits`` [m, vocab]."""
        tree, before = step.tree, text[: step.start]
        positions = step.positions[nodes] + 1  # of the chosen tokens
        below = [tree.children(int(node)) for node in nodes]
        children = np.concatenate(below)
        rows = np.arange(len(nodes)).repeat([len(few) for few in below])  # of their parents
        choice = self.sampling.choose(
            logits,
            positions,
            lambda row: before + tree.tokens[tree.path(int(nodes[row]))].tolist(),
            asked=(rows, tree.tokens[children]),
        )
        scale = _double(logits.abs().amax(-1))  # [m]
        # a log-probability, or a difference of two logits, moves by at most twice what a logit does
        allowed = 2 * self.relative * scale / (self.sampling.temperature or 1.0)
        chosen = choice.tokens.numpy()
        same = chosen == step.target_choice[nodes]
        self._keep(np.abs(_double(choice.log_prob) - step.target_log_prob[nodes])[same], allowed[same])
        replayed, recorded = _double(choice.asked), step.node_log_prob[children]
        both = np.isfinite(recorded) | np.isfinite(replayed)  # else banned by a processor, in both
        self._keep(np.abs(replayed - recorded)[both], allowed[rows[both]])
        for row in np.flatnonzero(~same).tolist():
            where = f"round {step.index}, node {nodes[row]}, against {oracle}"
            said = int(step.target_choice[nodes[row]])
            self.diverge(where, int(positions[row]), said, int(chosen[row]), choice.margin[row], scale[row])

    def compare_text(self, text: list[int], start: int, own: list[int], plain: Tensor) -> None:
        """Where ``text`` first leaves plain decoding: ``own`` from ``start``, chosen by ``plain`` [tokens, vocab]."""
        at = next((i for i, token in enumerate(own) if token != text[start + i]), None)
        if at is not None:
            place = start + at
            choice = self.sampling.choose(plain[at : at + 1], np.array([place]), lambda row: text[:place])
            self.diverge("text", place, text[place], own[at], choice.margin[0], float(plain[at].abs().max()))

    def diverge(self, where: str, position: int, recorded: int, oracle: int, margin: Any, scale: float) -> None:
        band = 2 * self.relative * float(scale)
        self.divergences.append(Divergence(where, position, recorded, oracle, float(margin), band))

    def _keep(self, error: np.ndarray, allowed: np.ndarray) -> None:
        """Remember the comparison that came closest to its bound, or went furthest beyond it."""
        if len(error):
            ratio = np.where(np.isnan(error), np.inf, error) / allowed
            at = int(ratio.argmax())
            if ratio[at] > self._worst:
                self._worst, self.max_error, self.allowed = float(ratio[at]), float(error[at]), float(allowed[at])


def _plain_decoding(pair: Pair, trace: Trace, sampling: Sampling) -> tuple[list[int], Tensor]:
    """As many tokens as the trace has, one at a time, and the logits [tokens, vocab] that chose them."""
    history, reader = list(trace.prompt_ids), Reader(pair)
    reader.read(history[:-1])
    plain = []
    for _ in trace.output_ids:
        logits = reader.read(history)
        assert logits is not None
        plain.append(logits)
        choice = sampling.choose(logits[None], np.array([len(history)]), lambda row: history)
        history.append(int(choice.tokens[0]))
    return history[len(trace.prompt_ids) :], torch.stack(plain) if plain else torch.zeros(0, pair.rows)


def _own_rounding(pair: Pair, trace: Trace, own: list[int], plain: Tensor) -> float:
    """How far the target is from itself: its logits token by token against those of one forward, of the largest one.

    Both are Transformers' own; what parts them is rounding, which grows with the depth of a model.
    """
    if len(own) < 2:
        return 0.0
    whole = plain_logits(pair, [[*trace.prompt_ids, *own]], keep=len(own))[0]  # after each of its tokens
    difference = (plain[1:] - whole[:-1]).abs().amax(-1) / plain[1:].abs().amax(-1).clamp_min(1e-30)
    return float(difference.max())


def _double(x: Tensor) -> np.ndarray:
    return x.double().cpu().numpy()


def _spread(steps: list[Step], nodes: int | None) -> list[Step]:
    """Rounds spread evenly over the run that together have about ``nodes`` nodes."""
    total = sum(len(step.tree) for step in steps)
    if nodes is None or total <= nodes:
        return steps
    count = max(1, round(len(steps) * nodes / total))
    return [steps[i] for i in np.linspace(0, len(steps) - 1, count).round().astype(int)]
