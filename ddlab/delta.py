"""The gated delta rule and the causal convolution of a linear-attention layer, on a tree of tokens.

A plain linear layer runs over rows in order and knows nothing of a tree mask: every row whose parent is not the row
before it reads the wrong recurrent state and the wrong convolution window. Here each row reads its own ancestors.
The rule is the chunk form of the gated delta rule (Yang et al., 2024) with the causal mask replaced by the
ancestor mask, so no state per node is ever built: a commit needs the keys, the writes and the decays of one path.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.activations import ACT2FN

TREE_ROWS = "ddlab_tree_rows"  # keyword of a model call that carries TreeRows down to its linear layers


class TreeRows:
    """Which row of a target call follows which: parents first, row 0 is the root.

    Args:
        parents: int [n], ``parents[0] == -1`` and ``parents[i] < i``.
        ancestors: bool [n, n], ancestor-or-self.
    """

    def __init__(self, parents: np.ndarray, ancestors: np.ndarray):
        self.parents = np.asarray(parents, dtype=np.int64)
        self._ancestors = torch.from_numpy(np.array(ancestors, dtype=bool))
        self._on: dict[Any, Tensor] = {}

    def __len__(self) -> int:
        return len(self.parents)

    def ancestors(self, device: torch.device) -> Tensor:
        """bool [n, n] on ``device``."""
        if device not in self._on:
            self._on[device] = self._ancestors.to(device)
        return self._on[device]

    def conv_table(self, kernel: int, window: int, device: torch.device) -> Tensor:
        """int64 [n, kernel]: for each row the columns it convolves, oldest first, in ``cat(window, rows)``.

        A row's window is itself, its nearest ancestors, then the committed columns from the last one back.
        """
        key = (kernel, window, device)
        if key not in self._on:
            before = np.concatenate([np.arange(-1, window - 1), window + self.parents])  # column -> the one before it
            before[window] = window - 1  # the root follows the last committed column
            table = np.empty((len(self), kernel), dtype=np.int64)
            table[:, -1] = window + np.arange(len(self))
            for tap in range(kernel - 1, 0, -1):
                table[:, tap - 1] = before[table[:, tap]]
            self._on[key] = torch.from_numpy(table).to(device)
        return self._on[key]


def tree_causal_conv(
    columns: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, rows: TreeRows
) -> Tensor:
    """Depthwise causal convolution in which every row sees its own ancestors.

    Args:
        columns: [1, channels, window + n], the committed window followed by the new rows; window >= kernel - 1.
        weight: [channels, kernel].

    Returns:
        [1, channels, n] in the dtype of ``columns``; summed in float32 or better.
    """
    dtype = torch.promote_types(columns.dtype, torch.float32)
    kernel = weight.shape[-1]
    table = rows.conv_table(kernel, columns.shape[-1] - len(rows), columns.device)
    out = torch.zeros((*columns.shape[:2], len(rows)), dtype=dtype, device=columns.device)
    for tap in range(kernel):
        out += columns.index_select(2, table[:, tap]).to(dtype) * weight[:, tap, None].to(dtype)
    if bias is not None:
        out += bias[:, None].to(dtype)
    out = out.to(columns.dtype)
    return out if activation is None else ACT2FN[activation](out)


@dataclass(frozen=True)
class TreeWrites:
    """What the rows of one tree would write into a layer's recurrent state; enough for the state after any path.

    keys [k_heads, n, k_dim], writes [v_heads, n, v_dim], log_decay [v_heads, n] (summed from the root, inclusive),
    before [1, v_heads, k_dim, v_dim]: the committed state. n * (k + v) numbers per layer, not a state per node.
    """

    keys: Tensor
    writes: Tensor
    log_decay: Tensor
    before: Tensor

    def state_after(self, path: Tensor) -> Tensor:
        """State [1, v_heads, k_dim, v_dim] once the rows of ``path`` (root first) are committed."""
        return states_after([self], path)[0]

    @property
    def nbytes(self) -> int:
        """Bytes that this call holds beyond the committed state."""
        return self.keys.nbytes + self.writes.nbytes + self.log_decay.nbytes


def states_after(layers: Sequence[TreeWrites], path: Tensor) -> tuple[Tensor, ...]:
    """``state_after`` of layers of one shape, on one device, in as many calls as one layer takes."""
    keys = torch.stack([layer.keys[:, path] for layer in layers])  # [layers, k_heads, m, k_dim]
    writes = torch.stack([layer.writes[:, path] for layer in layers]).flatten(0, 1)  # [layers * v_heads, m, v_dim]
    decay = torch.stack([layer.log_decay[:, path] for layer in layers])  # [layers, v_heads, m]
    left = (decay[..., -1:] - decay).exp()  # how much of each write is left at the end of the path
    wide = keys[:, :, None] * left.unflatten(1, (keys.shape[1], -1)).unsqueeze(-1)  # [layers, k_heads, group, m, k_dim]
    states = torch.cat([layer.before for layer in layers]).to(wide.dtype)  # [layers, v_heads, k_dim, v_dim], a copy
    states.mul_(decay[..., -1:, None].exp())
    states.flatten(0, 1).baddbmm_(wide.flatten(0, 2).transpose(1, 2), writes)
    return states.split(1)


def tree_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    rows: TreeRows,
    initial_state: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = True,
) -> tuple[Tensor, TreeWrites]:
    """Gated delta rule on a tree, every row from its own ancestors' state, in one pass.

    With G the log decay summed from the root, ``D_ij = exp(G_i - G_j)`` where j is an ancestor of i (or i itself) and
    0 elsewhere::

        (I + strict(D * (beta k) k^T)) U = beta v - (beta k e^G) S0      unit lower triangular, parents first
        out = (q e^G) S0 + (D * q k^T) U

    Args:
        query, key: [1, n, k_heads, k_dim]; value: [1, n, v_heads, v_dim]; each key head serves
            ``v_heads / k_heads`` consecutive value heads.
        g: [1, n, v_heads] log decay (<= 0); beta: [1, n, v_heads] write strength.
        initial_state: [1, v_heads, k_dim, v_dim], the state after the committed text.

    Returns:
        out [1, n, v_heads, v_dim] in the dtype of ``query``, and the writes. Computed in float32, or in float64 when
        ``query`` is float64.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    heads = value.shape[2]
    q, k, v, b, decay = (x[0].to(dtype).transpose(0, 1) for x in (query, key, value, beta, g))  # [heads, n(, dim)]
    q, k = _scaled(q, k, use_qk_l2norm_in_kernel)
    ancestors = rows.ancestors(query.device)  # [n, n]
    total = decay @ ancestors.to(dtype).T  # [v_heads, n]
    between = (total[:, :, None] - total[:, None, :]).masked_fill(~ancestors, -torch.inf).exp()  # [v_heads, n, n]
    state = initial_state[0].to(dtype)
    from_root = total.exp().unsqueeze(-1)  # [v_heads, n, 1]
    k_wide = _per_value_head(k, heads)
    system = (
        _per_value_head(k @ k.transpose(1, 2), heads) * between * b.unsqueeze(-1)
    )  # only its strict lower part is read
    writes = torch.linalg.solve_triangular(
        system, b.unsqueeze(-1) * (v - from_root * (k_wide @ state)), upper=False, unitriangular=True
    )  # [v_heads, n, v_dim]
    out = from_root * (_per_value_head(q, heads) @ state)
    out = out + (_per_value_head(q @ k.transpose(1, 2), heads) * between) @ writes
    return out.transpose(0, 1).unsqueeze(0).to(query.dtype), TreeWrites(k, writes, total, initial_state)


def delta_rule_by_node(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, rows: TreeRows, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    """The plain form of :func:`tree_delta_rule`: one state per node, one step of the recurrence from its parent's.

    Returns out [1, n, v_heads, v_dim] and states [n, v_heads, k_dim, v_dim]. The oracle for the fast form.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    heads = value.shape[2]
    q, k, v, b, decay = (x[0].to(dtype).transpose(0, 1) for x in (query, key, value, beta, g))
    q, k = (_per_value_head(x, heads) for x in _scaled(q, k, True))
    states: list[Tensor] = []
    out: list[Tensor] = []
    for node, parent in enumerate(rows.parents.tolist()):
        state = (initial_state[0].to(dtype) if parent < 0 else states[parent]) * decay[:, node].exp()[:, None, None]
        known = (state * k[:, node, :, None]).sum(1)  # [v_heads, v_dim] what the state already predicts
        write = (v[:, node] - known) * b[:, node, None]
        states.append(state + k[:, node, :, None] * write[:, None])
        out.append((states[-1] * q[:, node, :, None]).sum(1))
    return torch.stack(out).unsqueeze(0).to(query.dtype), torch.stack(states)


def _scaled(q: Tensor, k: Tensor, normalise: bool) -> tuple[Tensor, Tensor]:
    if normalise:  # the model's own L2 norm
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    return q * q.shape[-1] ** -0.5, k


def _per_value_head(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[0] == heads else x.repeat_interleave(heads // x.shape[0], dim=0)


def teach_tree_rows(linear_attention: torch.nn.Module) -> None:
    """Let the modeling module of a gated-delta-net layer understand :data:`TREE_ROWS`.

    Transformers passes the keywords of a model call through to the two functions wrapped here. Wrapped once per
    modeling module and inert without the keyword, so other users of the same model see no change.

    Raises:
        ValueError: the module does not run Transformers' gated delta rule.
    """
    module = sys.modules[type(linear_attention).__module__]
    conv, rule, one_row = "causal_conv1d_fn", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
    if not (hasattr(module, conv) and hasattr(module, rule)):
        raise ValueError(
            f"{type(linear_attention).__name__} of {module.__name__} does not use Transformers' `{conv}` and `{rule}`; "
            "exact tree verification knows the gated delta rule of Qwen3-Next and Qwen3.5 only"
        )
    _wrap(module, conv, _conv_on_rows)
    _wrap(module, rule, _rule_on_rows)
    if hasattr(module, one_row):
        _wrap(module, one_row, _rule_on_rows)


_form: Callable[..., Any] | None = None  # a global and no context variable, because torch.compile reads it too


@contextmanager
def delta_form(form: Callable[..., Any]) -> Iterator[None]:
    """In this block linear layers compute by ``form(name, plain, rows, *args, **kwargs)``, see `comparing.delta_forms`.

    name, plain: of the function that a layer called, and Transformers' own. rows: the call's TreeRows, or None.
    """
    global _form
    before, _form = _form, form
    try:
        yield
    finally:
        _form = before


def _wrap(module: ModuleType, name: str, on_rows: Any) -> None:
    plain = getattr(module, name)
    if getattr(plain, "_ddlab", False):
        return

    @functools.wraps(plain)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        rows = kwargs.pop(TREE_ROWS, None)
        if _form is not None:
            return _form(name, plain, rows, *args, **kwargs)
        return plain(*args, **kwargs) if rows is None else on_rows(rows, *args, **kwargs)

    dispatch._ddlab = True  # type: ignore[attr-defined]
    setattr(module, name, dispatch)


def _conv_on_rows(
    rows: TreeRows,
    columns: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    # the caller keeps the last n columns; the committed window in front of them is not its business
    return tree_causal_conv(columns, weight, bias, activation, rows)


def _rule_on_rows(
    rows: TreeRows,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, TreeWrites]:
    return tree_delta_rule(
        query, key, value, g, beta, rows, initial_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel
    )
