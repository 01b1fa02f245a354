"""What a hook may put in place of a phase's value: checked at once, so a wrong edit fails where it was made."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

from ddlab.sampling import Walk
from ddlab.tree import DraftTree


def draft_logits(value: Any, rows: int) -> Tensor:
    """Float logits [depth, rows] for the tree builder."""
    logits = torch.as_tensor(value)
    if logits.ndim != 2 or logits.shape[1] != rows or not logits.is_floating_point():
        raise ValueError(f"a draft hook returns float logits [depth, {rows}], not {logits.dtype} {list(logits.shape)}")
    return logits


def tree(value: Any, root: int, rows: int, positions_left: int | None) -> DraftTree:
    """A tree on the last committed token whose drafts are real ids at positions that the target has."""
    if not isinstance(value, DraftTree) or int(value.tokens[0]) not in (root, -1):
        raise ValueError(f"a tree hook returns a DraftTree whose root is the last committed token, {root}")
    beyond = [int(token) for token in value.tokens[1:] if not 0 <= token < rows]
    if beyond:
        raise ValueError(f"the tree drafts ids outside the target's 0..{rows - 1}: {beyond[:8]}")
    deepest = int(value.depth.max())
    if positions_left is not None and deepest > positions_left:
        raise ValueError(f"the tree is {deepest} deep; the target has {positions_left} more positions: truncate it")
    return value.with_root(root)


def logits(value: Any, nodes: int, rows: int) -> Tensor:
    """Float logits [nodes, rows] in place of the target's."""
    if not isinstance(value, Tensor) or list(value.shape) != [nodes, rows] or not value.is_floating_point():
        raise ValueError(f"a verify hook returns float logits [{nodes}, {rows}]")
    return value


def walk(value: Any, own: Walk, chosen: list[int], stop_token_ids: Container[int]) -> Walk:
    """A walk that is the target's ``own`` or stops earlier on the same path, with the target's choice as bonus.

    A bonus of None is filled in; the reason is ``edited``, unless the bonus ends the text.
    """
    if not isinstance(value, Walk):
        raise ValueError("an accept hook returns a Walk(path, bonus, stop_reason)")
    path = tuple(value.path)
    if not path or path != own.path[: len(path)]:
        raise ValueError(
            f"an accept hook may only stop earlier: {path} is no beginning of the target's path {own.path}"
        )
    if path == own.path and own.bonus is None:  # the text ends here: nothing comes after
        return own
    bonus = chosen[path[-1]]
    if value.bonus not in (None, bonus):
        raise ValueError(f"the bonus after node {path[-1]} is the target's own choice, {bonus}")
    if path == own.path:
        return own
    return Walk(path, bonus, "stop_token" if bonus in stop_token_ids else "edited")
