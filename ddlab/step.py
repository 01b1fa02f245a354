"""One round of decoding as data: the draft, the target's choice at each node, the path and its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddlab import tracefile
from ddlab.tree import DraftTree


def _nothing_drafted() -> np.ndarray:
    return np.zeros((0, 0), np.int64)


@dataclass(frozen=True, eq=False, repr=False)
class Step:
    """One round: what was drafted, what the target chose at each node, the path taken and why it ended.

    `n` counts the root (node 0). Log-probabilities are natural logarithms; times are seconds.
    """

    index: int  # round number, from 0
    start: int  # absolute position of the root, whose K/V this round writes
    tree: DraftTree
    target_choice: np.ndarray  # int64 [n]: the target's own token at each node
    target_log_prob: np.ndarray  # float32 [n]: of that choice, after processors and temperature
    margin: np.ndarray  # float32 [n]: best minus second best of the scores that decided, in logits
    node_log_prob: np.ndarray  # float32 [n]: the target's, of the node's own token at its parent; root NaN
    path: tuple[int, ...]  # node indices, root .. last accepted
    bonus: int | None  # the target's token after the path; None when the round was cut before it
    emitted: tuple[int, ...]  # what the round added to the text
    stop_reason: str  # "mismatch" | "exhausted" | "stop_token" | "length" | "edited"
    edited: tuple[str, ...] = ()  # phases whose value a hook replaced
    engine: str | None = None  # what ran its forwards, "eager" or "graph"; None: a file that does not say
    times: dict[str, float] = field(default_factory=dict)  # seconds: draft, tree, verify, accept, commit
    draft_ids: np.ndarray = field(default_factory=_nothing_drafted)  # int64 [depth, k]: the drafter's best
    draft_log_probs: np.ndarray = field(default_factory=_nothing_drafted)  # float [depth, k]
    extra: dict[str, Any] = field(default_factory=dict)  # what a file holds beyond this version's fields: kept

    @property
    def accepted(self) -> int:
        """Accepted drafts: drafted nodes on the path (the root is not a draft)."""
        return len(self.path) - 1

    @property
    def positions(self) -> np.ndarray:
        """int64 [n]: absolute position of each node."""
        return self.start + self.tree.depth

    @property
    def seconds(self) -> float:
        return float(sum(self.times.values()))

    def token_ids(self) -> set[int]:
        """Every token id this round mentions."""
        ids = {*self.tree.tokens.tolist(), *self.target_choice.tolist(), *self.draft_ids.ravel().tolist()}
        ids.update(self.emitted if self.bonus is None else (*self.emitted, self.bonus))
        ids.discard(-1)  # a root that was not given
        return ids

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Step):
            return NotImplemented
        (record, arrays), (other_record, other_arrays) = to_record(self), to_record(other)
        # as they are stored: arrays by content, NaN equal to NaN
        return tracefile.plain(record) == tracefile.plain(other_record) and (
            tracefile.pack_arrays(arrays) == tracefile.pack_arrays(other_arrays)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"Step({self.index}: {len(self.tree) - 1} nodes, {self.accepted} accepted, "
            f"{len(self.emitted)} new tokens, {self.stop_reason})"
        )


# ---- one round as a JSON record and arrays -------------------------------------------------------

_SCALARS = ("index", "start", "path", "bonus", "emitted", "stop_reason", "edited", "engine", "times")
_ARRAYS = ("target_choice", "target_log_prob", "margin", "node_log_prob", "draft_ids", "draft_log_probs")
_TREE = ("tokens", "parents", "log_prob", "rank")


def to_record(step: Step) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    arrays = {name: np.asarray(getattr(step, name)) for name in _ARRAYS}
    arrays |= {f"tree.{name}": np.asarray(getattr(step.tree, name)) for name in _TREE}
    arrays |= {name: value for name, value in step.extra.items() if isinstance(value, np.ndarray)}
    record = {name: value for name, value in step.extra.items() if not isinstance(value, np.ndarray)}
    return record | {name: getattr(step, name) for name in _SCALARS}, arrays


def from_record(record: dict[str, Any], stored: dict[str, np.ndarray]) -> Step:
    arrays = {k: v.astype(np.int64) if v.dtype.kind == "i" else v for k, v in stored.items()}
    tree = DraftTree.from_parents(**{name: arrays.pop(f"tree.{name}") for name in _TREE})
    record = {"engine": None} | record  # which files of before do not have
    known = {name: record.pop(name) for name in _SCALARS} | {name: arrays.pop(name) for name in _ARRAYS}
    known |= {name: tuple(known[name]) for name in ("path", "emitted", "edited")}
    return Step(tree=tree, extra=record | arrays, **known)
