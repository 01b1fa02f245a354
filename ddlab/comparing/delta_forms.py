"""The forms in which a gated-delta-net layer can be computed, so that they can be held to one another.

A form is a function in a table. It replaces the layer's rule and its convolution for a block of code
(`ddlab.delta.delta_form`); everything else of the layer, and of the model, stays as it is.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddlab.delta import TreeRows, TreeWrites, delta_form, delta_rule_by_node, tree_causal_conv, tree_delta_rule

PIECE = 64  # rows of a chain whose states `by_node` holds at a time
WIDEST = 2048  # rows that the tree form takes: it holds [value heads, rows, rows]

# (plain, q, k, v, g, beta, rows, state) -> out, and the state after the last row; arguments as in tree_delta_rule
Rule = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Form:
    """One arithmetic of the gated delta rule.

    says: what it is, in a line. follows_tree: it takes rows that branch. wrong_on_trees: it may be asked to run on
    them all the same. fla: it needs the package flash-linear-attention.
    """

    name: str
    says: str
    rule: Rule
    follows_tree: bool = False
    wrong_on_trees: bool = False
    fla: bool = False

    def refusal(self, rows: int, branches: bool) -> str | None:
        """Why it cannot run a call of so many rows; None: it can. Runs nothing."""
        if branches and not (self.follows_tree or self.wrong_on_trees):
            return f"the {self.name} form reads its rows as one chain, these rows branch: use 'tree' or 'by_node'"
        if self.name == "tree" and rows > WIDEST:
            return f"the tree form holds rows x rows numbers per head, {rows} rows are too many: use 'chunk'"
        return None

    def missing(self, device: str) -> str | None:
        """Why it is not on this machine; None: it is."""
        if not self.fla:
            return None
        if importlib.util.find_spec("fla") is None:
            return "No module named 'fla' (flash-linear-attention)"
        return None if device == "cuda" else "flash-linear-attention's kernels run on CUDA only"

    @contextmanager
    def use(self) -> Iterator[None]:
        """In this block every gated-delta-net layer computes by this form. No tree is to be committed after it."""
        with delta_form(self._call):
            yield

    def _call(self, name: str, plain: Any, rows: TreeRows | None, *args: Any, **kwargs: Any) -> Any:
        torch_only = plain if self.fla else inspect.unwrap(plain)
        if "conv1d" in name:
            return self._conv(torch_only, rows, *args, **kwargs)
        return self._rule(plain, rows, *args, **kwargs)

    def _conv(
        self,
        plain: Any,
        rows: TreeRows | None,
        columns: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        if rows is None or not self.follows_tree:
            return plain(columns, weight, bias, activation)
        return tree_causal_conv(columns, weight, bias, activation, rows)

    def _rule(
        self,
        plain: Any,
        rows: TreeRows | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Any]:
        follows = chain(query.shape[1]) if rows is None or not self.follows_tree else rows
        if initial_state is None:
            kind = torch.promote_types(query.dtype, torch.float32)
            shape = (1, value.shape[2], key.shape[3], value.shape[3])
            initial_state = torch.zeros(shape, dtype=kind, device=query.device)
        out, after = self.rule(plain, query, key, value, g, beta, follows, initial_state)
        if rows is None:
            return out, after
        # what a verification wants to see of a layer that ran
        return out, TreeWrites(query[0, :0], value[0, :0], g[0, :0], initial_state)


def chain(rows: int) -> TreeRows:
    """Each row after the one before it."""
    return TreeRows(np.arange(rows) - 1, np.tril(np.ones((rows, rows), dtype=bool)))


def _functions(plain: Any, name: str) -> Any:
    """What a modeling module calls by that name, under ddlab's wrapper."""
    return getattr(sys.modules[inspect.unwrap(plain).__module__], name).__wrapped__


def _transformers(name: str, own: bool) -> Rule:
    """Transformers' function of that name: its own in PyTorch, or the kernel that it takes where that is installed."""

    def rule(
        plain: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: TreeRows, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        function = _functions(plain, name)
        function = inspect.unwrap(function) if own else function
        more = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return function(q, k, v, g=g, beta=beta, **more)

    return rule


def _tree(
    plain: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: TreeRows, state: Tensor
) -> tuple[Tensor, Tensor]:
    out, writes = tree_delta_rule(q, k, v, g, beta, rows, state)
    return out, writes.state_after(torch.arange(len(rows), device=q.device))


def _by_node(
    plain: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: TreeRows, state: Tensor
) -> tuple[Tensor, Tensor]:
    if (rows.parents != np.arange(len(rows)) - 1).any():
        out, states = delta_rule_by_node(q, k, v, g, beta, rows, state)
        return out, states[-1:]
    parts = []  # of a chain only the last state is needed further on
    for first in range(0, len(rows), PIECE):
        part = slice(first, first + PIECE)
        piece = chain(min(PIECE, len(rows) - first))
        given, states = delta_rule_by_node(q[:, part], k[:, part], v[:, part], g[:, part], beta[:, part], piece, state)
        parts.append(given)
        state = states[-1:]
    return torch.cat(parts, dim=1), state


CHUNK, RECURRENT = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"

# in the order shown to users
FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        Form("chunk", "Transformers' chunk form, chunks of 64", _transformers(CHUNK, own=True)),
        Form("recurrent", "Transformers' recurrence, row by row", _transformers(RECURRENT, own=True)),
        Form("tree", "ddlab's one-pass form on a tree", _tree, follows_tree=True),
        Form("by_node", "ddlab's recurrence, a state per node", _by_node, follows_tree=True),
        Form("fla_chunk", "flash-linear-attention, chunks", _transformers(CHUNK, own=False), fla=True),
        Form(
            "fla_recurrent", "flash-linear-attention, fused recurrence", _transformers(RECURRENT, own=False), fla=True
        ),
        Form(
            "flattened",
            "the wrong way: the rows of a tree as a chain",
            _transformers(CHUNK, own=True),
            wrong_on_trees=True,
        ),
    )
}


def default_form(what: str, rows: int) -> str:
    """The form that ddlab runs such a call in."""
    if what == "verify" and rows > 1:
        return "tree"
    name = "chunk" if rows > 1 else "recurrent"
    return f"fla_{name}" if importlib.util.find_spec("fla") is not None else name
