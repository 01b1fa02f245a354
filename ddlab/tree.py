"""DraftTree and its builders.

A block drafter gives one distribution per depth, whatever stands before it, so the score of a drafted prefix
is a product of per-depth marginals. DDTree verifies the ``budget`` most probable prefixes; they form a tree.

Which prefixes those are is a rule, so that a saved trace replays on every machine:

1. the higher score, the sum of the per-depth log-probabilities in path order (float64);
2. among equal scores the shallower prefix;
3. among those the lexicographically smaller path of token ids.

The log-probabilities are rounded to multiples of 2**-38 (4e-12), which makes float64 sums of them exact:
equal scores come from the drafter, never from a sum that lost its last bits.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlab.top import GRID, top_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    import graphviz

_LOWEST = float(np.finfo(np.float64).min)  # a floor that every score but -inf reaches
_FEW = 128  # tokens of each depth that even a tree of thousands of nodes seldom goes beyond
_DETOURS = 32  # nodes beside the greedy path from which the first estimate of the floor looks further


@dataclass(frozen=True, eq=False, repr=False)
class DraftTree:
    """Drafted tokens and their parents, parents first; n rows, the root included. The arrays are read-only.

    Made by ``best_first``, ``chain`` or ``from_parents``, which see to it that siblings differ.
    """

    tokens: np.ndarray  # int64 [n]; tokens[0]: the last committed token, -1 where not given
    parents: np.ndarray  # int64 [n]; parents[0] == -1, parents[i] < i
    depth: np.ndarray  # int64 [n]; depth[0] == 0
    log_prob: np.ndarray  # float64 [n]; of the path: the sum of its marginals; root 0; NaN where unknown
    rank: np.ndarray  # int64 [n]; of the token in its depth's draft, 0 = first choice; -1 root or unknown

    def __post_init__(self) -> None:
        for field in fields(self):
            array = np.array(getattr(self, field.name), np.float64 if field.name == "log_prob" else np.int64)
            array.setflags(write=False)
            object.__setattr__(self, field.name, array)

    @classmethod
    def best_first(cls, logits: Any, budget: int | None = None, *, root_token: int = -1) -> DraftTree:
        """The ``budget`` most probable prefixes, most probable first (DDTree); fewer where there are no more.

        logits: [depth, vocab], torch (any float dtype, any device) or numpy; a constant added to a row does
            not matter. A token at -inf is never drafted; a row of nothing else ends the tree above it. For a
            tree temperature pass ``logits / temperature``.
        budget: most nodes, the root not counted; None: the depth of the logits (block size - 1).

        Nodes are stored in the order of selection, so a smaller budget's tree is a prefix: see ``truncate``.

        Raises ValueError for a negative budget, and for NaN or +inf in the logits, naming the row.
        """
        budget = _checked_budget(len(logits) if budget is None else budget)
        return best_first(lambda k: top_tokens(logits, k), budget, root_token=root_token)

    @classmethod
    def chain(cls, logits: Any, *, root_token: int = -1) -> DraftTree:
        """The first choice of every depth, ties to the lowest id (DFlash), down to a row that is all -inf.

        Takes and raises what ``best_first`` does; equals it where every first choice beats every detour.
        """
        return grow(*top_tokens(logits, 1), len(logits), root_token=root_token)

    @classmethod
    def from_parents(cls, tokens: Any, parents: Any, *, log_prob: Any = None, rank: Any = None) -> DraftTree:
        """A tree by hand or from a file: node 0 is the root, ``parents[0] == -1`` and ``parents[i] < i``.

        Raises ValueError for lengths that differ, a parent that does not come before its child (so for any
        cycle), a drafted token below 0, and two siblings with one token.
        """
        tokens, parents = _integers("tokens", tokens), _integers("parents", parents)
        n = len(parents)
        rank = np.full(n, -1) if rank is None else _integers("rank", rank)
        if log_prob is None:
            log_prob = np.where(np.arange(n) == 0, 0.0, np.nan)
        lengths = {"tokens": len(tokens), "parents": n, "rank": len(rank), "log_prob": len(log_prob)}
        if n == 0 or len(set(lengths.values())) > 1:
            raise ValueError(f"a tree takes one entry a node, the root's first, in each of {lengths}")
        if parents[0] != -1:
            raise ValueError(f"node 0 is the root: parents[0] must be -1, not {parents[0]}")
        depth = np.zeros(n, np.int64)
        nodes: dict[tuple[int, int], int] = {}  # by parent and token
        for node in range(1, n):
            parent, token = int(parents[node]), int(tokens[node])
            if not 0 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}: parents come before their children")
            if token < 0:
                raise ValueError(f"node {node} has token {token}: only the root may be without a token")
            twin = nodes.setdefault((parent, token), node)
            if twin != node:
                raise ValueError(f"nodes {twin} and {node} are token {token} below node {parent}: merge them")
            depth[node] = depth[parent] + 1
        return cls(tokens, parents, depth, log_prob, rank)

    def truncate(self, budget: int) -> DraftTree:
        """The first ``budget`` drafted nodes; of a best-first tree, the best-first tree of that budget."""
        rows = slice(_checked_budget(budget) + 1)
        return DraftTree(*(getattr(self, field.name)[rows] for field in fields(self)))

    def with_root(self, token: int) -> DraftTree:
        """The same tree below another root token."""
        return replace(self, tokens=np.concatenate(([token], self.tokens[1:])))

    @property
    def drafted(self) -> int:
        """How many nodes were drafted: all but the root."""
        return len(self) - 1

    def ancestors(self) -> np.ndarray:
        """Ancestor-or-self, bool [n, n]: [i, j] says that node j lies on the path from the root to i."""
        rows = [1]  # each the bits of a row, in one integer
        for node, parent in enumerate(self.parents[1:].tolist(), 1):
            rows.append(rows[parent] | 1 << node)
        size = len(rows) // 8 + 1  # bytes
        packed = np.frombuffer(b"".join(row.to_bytes(size, "little") for row in rows), np.uint8)
        return np.unpackbits(packed.reshape(-1, size), 1, len(rows), "little").view(bool)

    def children(self, node: int) -> np.ndarray:
        """The node's children, int64, in stored order."""
        return np.flatnonzero(self.parents == self._checked(node))

    def path(self, node: int) -> list[int]:
        """The nodes from the root to ``node``, both included."""
        path = [self._checked(node)]
        while path[-1]:
            path.append(int(self.parents[path[-1]]))
        return path[::-1]

    def to_graphviz(self, labels: list[str] | None = None) -> graphviz.Digraph:
        """The tree as a graph for papers, one label a node (default: the token ids): depth to the right, lines as
        wide as the draft held the token likely. It draws SVG, PDF and PNG, with Graphviz's dot or, without it, with
        pygraphviz.

        A label is drawn as it is, never read as markup, escape or entity; a control character as its picture (a
        newline as ␊).

        Raises ImportError where the graphviz package is missing, ValueError where labels are.
        """
        try:
            import graphviz
        except ImportError as error:
            raise ImportError("to_graphviz needs the graphviz package: pip install graphviz") from error
        from ddlab.views.dot import TreeGraph

        labels = [str(token) for token in self.tokens.tolist()] if labels is None else labels
        if len(labels) != len(self):
            raise ValueError(f"{len(labels)} labels for {len(self)} nodes: give one each, the root's first")
        graph = TreeGraph()
        for node, label in enumerate(labels):
            graph.node(str(node), graphviz.escape(label.translate(_LITERAL)))
            if node:
                parent = int(self.parents[node])
                prob = np.exp(self.log_prob[node] - self.log_prob[parent])
                width = {} if np.isnan(prob) else {"penwidth": f"{0.5 + 4 * min(prob, 1.0):.2f}"}
                graph.edge(str(parent), str(node), **width)
        return graph

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DraftTree):
            return NotImplemented
        both = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return all(np.array_equal(mine, theirs, equal_nan=True) for mine, theirs in both)

    def __repr__(self) -> str:
        return f"<DraftTree: {self.drafted} drafted, {self.depth.max()} deep, root token {self.tokens[0]}>"

    def _checked(self, node: int) -> int:
        node = operator.index(node)
        if not 0 <= node < len(self):
            raise IndexError(f"no node {node}: the tree has nodes 0 to {len(self) - 1}")
        return node


# DOT reads entities in plain labels too, and control characters as line breaks, as nothing or as errors.
_LITERAL = {code: chr(0x2400 + code) for code in range(32)} | {127: "␡", ord("&"): "&amp;"}


def best_first(top: Callable[[int], tuple[np.ndarray, np.ndarray]], budget: int, *, root_token: int = -1) -> DraftTree:
    """``DraftTree.best_first`` from ``top``, k -> ``top_tokens(logits, k)``.

    Large trees are deep rather than wide: few columns are asked for first, and more only where the tree may need them.
    """
    if budget > 2 * _FEW:
        ids, log_probs = top(_FEW)
        tree = _grow(ids, log_probs, budget, root_token, all_there=ids.shape[1] < _FEW)
        if tree is not None:
            return tree
    return grow(*top(budget), budget, root_token=root_token)


def grow(ids: np.ndarray, log_probs: np.ndarray, budget: int, *, root_token: int = -1) -> DraftTree:
    """The ``budget`` most probable prefixes of tokens among those given, as ``top_tokens`` returns them."""
    tree = _grow(ids, log_probs, budget, root_token, all_there=True)
    assert tree is not None
    return tree


def _grow(ids: np.ndarray, log_probs: np.ndarray, budget: int, root_token: int, *, all_there: bool) -> DraftTree | None:
    """The same; None where tokens beyond those given may be among the best, unless all are there.

    Level by level, each in path order, go on with the prefixes that may be among the best: those that reach
    a floor under the ``budget``-th best score. Levels come shallow first, so a stable sort by score does the
    rest.
    """
    if not budget or not log_probs.size:
        return DraftTree.from_parents([root_token], [-1])
    if log_probs.shape[1] == 1:  # no node has a sibling
        depth = np.arange(min(len(ids), budget) + 1)
        tokens, score = np.full(depth.size, root_token), np.zeros(depth.size)
        tokens[1:], score[1:] = ids[: depth[-1], 0], log_probs[: depth[-1], 0].cumsum()
        return DraftTree(tokens, depth - 1, depth, score, np.where(depth, 0, -1))
    greedy = np.concatenate(([0.0], log_probs[:, 0].cumsum()))  # [depth + 1] scores of the greedy path
    once = greedy[:-1, None] + log_probs  # [depth, k] scores of the greedy path to a depth, then any token
    floor = _score_floor(greedy, once, budget)
    if not all_there and np.any(once[:, -1] >= floor):  # no parent does better than the greedy path
        return None
    widths = np.count_nonzero(once >= floor, axis=1).tolist()
    score = np.zeros(1)  # of the level's prefixes; at first of the root
    scores, parents, ranks = [score], [np.array([-1])], [np.array([-1])]  # parents are numbered through the levels
    seen, most = 1, budget + budget // 4
    for row_ids, row, width in zip(ids, log_probs, widths, strict=True):
        order = row_ids[:width].argsort()  # by id, which leaves the children in path order
        total = np.add.outer(score, row[order])  # [level, width]
        above, column = (total >= floor).nonzero()
        if not above.size:
            break
        parents.append(above + (seen - score.size))
        score = total[above, column]
        scores.append(score)
        ranks.append(order[column])
        seen += score.size
        if seen > most:  # prefixes with many detours: the floor was low
            floor = max(floor, _nth_best(np.concatenate(scores[1:]), budget))
            most = seen + budget // 4
    depth = np.arange(len(scores)).repeat([level.size for level in scores])
    score, parent, rank = (np.concatenate(levels) for levels in (scores, parents, ranks))
    order = _falling(score)[: budget + 1]  # the root stays first: no score is above its 0
    place = np.zeros(seen, np.int64)
    place[order] = np.arange(order.size)
    places, rank, depth = place[parent[order]], rank[order], depth[order]
    tokens = np.full(order.size, root_token)
    places[0], tokens[1:] = -1, ids[depth[1:] - 1, rank[1:]]
    return DraftTree(tokens, places, depth, score[order], rank)


def _falling(score: np.ndarray) -> np.ndarray:
    """A stable order by falling score. Scores are whole multiples of 1 / GRID, so it is a sort of integers."""
    bits = score.size.bit_length()
    if -score.min() >= 2.0 ** (62 - bits) / GRID:
        return np.argsort(-score, kind="stable")
    keys = (score * -GRID).astype(np.int64) << bits | np.arange(score.size)
    keys.sort()
    order: np.ndarray = keys & ((1 << bits) - 1)
    return order


def _score_floor(greedy: np.ndarray, once: np.ndarray, budget: int) -> float:
    """A score that at least ``budget`` prefixes reach, near the ``budget``-th best one.

    Few of the best prefixes leave the greedy path more than twice, and those that do so once or twice need no
    search: a detour costs the same before every continuation, so two detours are a sum of one and one.
    """
    scores = once.ravel()
    floor = _nth_best(scores, budget)
    reached = np.flatnonzero(scores >= floor)
    scores, (at, rank) = scores[reached], np.divmod(reached, once.shape[1])
    detours = np.flatnonzero(rank)
    detours = detours[np.argsort(-scores[detours])[:_DETOURS]]
    length = at[detours] + 1
    twice = (scores[detours] - greedy[length])[:, None] + scores  # [detours, reached]
    twice = twice[(at >= length[:, None]) & (twice >= floor)]
    floor = _nth_best(np.concatenate((scores, twice)), budget)
    return max(floor * (1 + 2.0**-44), _LOWEST)  # below -32768 sums do round, and here in another order


def _nth_best(scores: np.ndarray, n: int) -> float:
    nth = scores.size - n
    return float(np.partition(scores, nth)[nth]) if nth >= 0 else -np.inf


def _checked_budget(budget: int) -> int:
    budget = operator.index(budget)
    if budget < 0:
        raise ValueError(f"budget is the most nodes to draft, 0 or more, not {budget}")
    return budget


def _integers(name: str, values: Any) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a list of integers, one a node, not {values!r:.80}")
    return array.astype(np.int64)
