"""The rows of one model call, and whom each may see: in numpy, from positions, windows and the tree alone.

No backend's mask, cache slice or kernel has a part in it, so a judge that rests on this cannot share a backend's fault.
Known faults have their own sight, which tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ddlab.tree import DraftTree


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one call: where they stand and which of them each may see.

    start: committed tokens before them. parents: int [n], -1: the row follows the committed text. block: by layer
    kind, bool [n, n], where rows see one another otherwise than by ancestry (a drafted block); its windows reach both
    ways.
    """

    start: int
    parents: np.ndarray
    depth: np.ndarray  # int [n]: a row's position is start + depth
    ancestors: np.ndarray  # bool [n, n], a row among them
    block: Mapping[str, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def branches(self) -> bool:
        """They are no chain."""
        return self.block is None and bool((self.parents != np.arange(len(self)) - 1).any())

    def seen(self, kind: str, window: int | None) -> np.ndarray:
        """Whom each row may see, of the committed tokens and then of the rows: bool [n, start + n]."""
        among = self.ancestors if self.block is None or kind not in self.block else self.block[kind]
        seen = np.concatenate([np.ones((len(self), self.start), dtype=bool), among], axis=1)
        if window is None:
            return seen
        own = self.start + self.depth
        apart = own[:, None] - np.concatenate([np.arange(self.start), own])[None]  # in positions
        return seen & ((apart if self.block is None else np.abs(apart)) < window)


def tree_rows(tree: DraftTree, start: int) -> Rows:
    return Rows(start, tree.parents, tree.depth, tree.ancestors())


def chain_rows(rows: int, start: int) -> Rows:
    """Tokens of a text, one after the other."""
    at = np.arange(rows)
    return Rows(start, at - 1, at, np.tri(rows, dtype=bool))


def block_rows(size: int, start: int, among: Mapping[str, str]) -> Rows:
    """A drafted block. among: layer kind -> "causal" or "bidirectional"."""
    rows = chain_rows(size, start)
    every = np.ones((size, size), dtype=bool)
    return replace(rows, block={kind: rows.ancestors if how == "causal" else every for kind, how in among.items()})


# ---- what a layer's rows see, right or wrong -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Sight:
    """What a layer's rows see: bool [n, m], of the last m keys.

    added: the mask is added as ones and zeros. sinks: they are used, where the layer has any.
    """

    keys: np.ndarray
    added: bool = False
    sinks: bool = True

    def like(self, other: Sight, sinks: bool) -> bool:
        """No difference to a layer with or without ``sinks``."""
        if self.added != other.added or (sinks and self.sinks != other.sinks):
            return False
        return np.array_equal(self.keys, other.keys)


# Takes rows, layer kind, window, and the first key that the layer is handed (a sliding layer's cache gives out no more
# than a window can reach). None: that fault makes no difference to such a layer.
Fault = Callable[[Rows, str, "int | None", int], "Sight | None"]


def right(rows: Rows, kind: str, window: int | None, first: int = 0) -> Sight:
    return Sight(rows.seen(kind, window)[:, first:])


def _no_window(rows: Rows, kind: str, window: int | None, first: int) -> Sight | None:
    return None if window is None else right(rows, kind, None, first)


def _no_sinks(rows: Rows, kind: str, window: int | None, first: int) -> Sight:
    return replace(right(rows, kind, window, first), sinks=False)


def _neither(rows: Rows, kind: str, window: int | None, first: int) -> Sight | None:
    return None if window is None else _no_sinks(rows, kind, None, first)


def _added(rows: Rows, kind: str, window: int | None, first: int) -> Sight:
    return replace(right(rows, kind, window, first), added=True)


def _no_mask(rows: Rows, kind: str, window: int | None, first: int) -> Sight:
    return Sight(np.ones((len(rows), rows.start + len(rows) - first), dtype=bool))


def _first_keys(rows: Rows, kind: str, window: int | None, first: int) -> Sight:
    return Sight(np.tri(len(rows), rows.start + len(rows) - first, dtype=bool))


def _as_chain(rows: Rows, kind: str, window: int | None, first: int) -> Sight:
    return right(chain_rows(len(rows), rows.start), kind, window, first)


def _chain_no_window(rows: Rows, kind: str, window: int | None, first: int) -> Sight:
    return _as_chain(rows, kind, None, first)


def _by_slot(rows: Rows, kind: str, window: int | None, first: int) -> Sight | None:
    if window is None:
        return None
    slot = np.arange(rows.start + len(rows))
    near = slot[rows.start :, None] - slot[None] < window
    return Sight((rows.seen(kind, None) & near)[:, first:])


NO_MASK = "the mask is ignored: every row sees every key"


def _no_order(rows: Rows, kind: str, window: int | None, first: int) -> Sight | None:
    if rows.block is None:
        return None
    every = np.ones((len(rows), len(rows)), dtype=bool)
    return right(replace(rows, block={kind: every}), kind, window, first)


FLATTENED = "the rows are read as a chain (flattened)"  # of a linear layer
# what is said of it -> what its rows see
FAULTS: dict[str, Fault] = {
    "the window is ignored": _no_window,
    "attention sinks (s_aux) are dropped": _no_sinks,
    "the window is ignored and attention sinks (s_aux) are dropped": _neither,
    "the mask is added as ones and zeros, as eager does with a boolean one": _added,
    NO_MASK: _no_mask,
    "the mask is ignored: causal over the first keys only": _first_keys,
    "the rows are read as a chain, each sees all before it": _as_chain,
    "the rows are read as a chain, without the window": _chain_no_window,
    "the window is counted in slots, not in positions": _by_slot,
    "rows of the block see later ones too": _no_order,
}


def distinct_faults(rows: Rows, kind: str, window: int | None, sinks: bool, first: int = 0) -> dict[str, Sight]:
    """The faults that would show in such a layer, each with what its rows see; of two that look alike, the first."""
    taken = [right(rows, kind, window, first)]
    found: dict[str, Sight] = {}
    for said, fault in FAULTS.items():
        sight = fault(rows, kind, window, first)
        if sight is not None and not any(sight.like(other, sinks) for other in taken):
            taken.append(sight)
            found[said] = sight
    return found
