"""What the target says on its own: plain forwards of Transformers, no tree, no mask, none of ddlab's verification."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache

from ddlab.tree import DraftTree

if TYPE_CHECKING:
    from ddlab.pair import Pair

T = TypeVar("T")
AT_ONCE = 16  # paths in one forward; each has a copy of the cache


@torch.no_grad()
def plain_logits(
    pair: Pair, ids: Sequence[Sequence[int]], keep: int, cache: DynamicCache | None = None, start: int = 0
) -> Tensor:
    """Logits [batch, keep, vocab] of the last ``keep`` positions, in float32 or better.

    Args:
        ids: token ids, rows of one length, at positions from ``start`` on.
        cache: Transformers' own, holding the ``start`` tokens before; it is extended.
    """
    batch = torch.tensor(ids, device=pair.device)
    positions = torch.arange(start, start + batch.shape[1], device=pair.device).expand(len(batch), -1)
    keywords = {"logits_to_keep": keep} if pair.keeps_logits else {}
    out = pair.target(input_ids=batch, position_ids=positions, cache=cache, use_cache=cache is not None, **keywords)
    logits = out.logits[:, -keep:]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def path_logits(pair: Pair, text: Sequence[int], tree: DraftTree) -> Tensor:
    """The target's logits [n, vocab] at every node by path replay without any cache.

    A causal model's logits at a node do not depend on what follows it, so one run on text + a leaf's path gives all
    nodes on it; the runs share a batch, padded behind, where nothing looks.

    Args:
        text: the tokens before the root.
    """
    leaves = sorted(set(range(len(tree))) - set(tree.parents.tolist()))
    paths = [tree.path(leaf) for leaf in leaves]
    width = max(len(path) for path in paths)
    logits: dict[int, Tensor] = {}
    for batch in _batches(paths):
        ids = [[*text, *tree.tokens[path].tolist(), *[0] * (width - len(path))] for path in batch]
        for path, row in zip(batch, plain_logits(pair, ids, keep=width), strict=True):
            logits.update({node: row[depth] for depth, node in enumerate(path) if node not in logits})
    return torch.stack([logits[node] for node in range(len(tree))])


class Reader:
    """A text read into Transformers' own cache, and trees whose paths branch off it one token at a time."""

    def __init__(self, pair: Pair):
        self.pair, self.cache, self.length = pair, DynamicCache(config=pair.target.config), 0

    def read(self, text: Sequence[int]) -> Tensor | None:
        """Read on to the end of ``text``, which continues what was read before. Logits [vocab] after its last token."""
        if len(text) <= self.length:
            return None
        logits = plain_logits(self.pair, [text[self.length :]], 1, self.cache, self.length)
        self.length = len(text)
        return logits[0, 0]

    def branch(self, tree: DraftTree) -> Tensor:
        """Logits [n, vocab] at every node: level by level, each node a plain step after its parent's.

        What was read stays as it is.
        """
        logits: dict[int, Tensor] = {}
        waiting = [(copy.deepcopy(self.cache), [0])]
        while waiting:
            cache, nodes = waiting.pop()
            ids = [[int(tree.tokens[node])] for node in nodes]
            out = plain_logits(self.pair, ids, 1, cache, self.length + int(tree.depth[nodes[0]]))  # [nodes, 1, vocab]
            logits.update(zip(nodes, out[:, 0], strict=True))
            rows = {node: row for row, node in enumerate(nodes)}
            children = [int(child) for node in nodes for child in tree.children(node)]
            for batch in _batches(children):
                theirs = copy.deepcopy(cache) if len(children) > AT_ONCE else cache
                theirs.reorder_cache(torch.tensor([rows[int(tree.parents[c])] for c in batch], device=self.pair.device))
                waiting.append((theirs, batch))
        return torch.stack([logits[node] for node in range(len(tree))])


def _batches(items: list[T]) -> Iterator[list[T]]:
    for first in range(0, len(items), AT_ONCE):
        yield items[first : first + AT_ONCE]
