"""One target forward over a tree: masks per layer kind, positions, and a cache whose commit gathers.

A forward never changes what is committed. Key/value rows are written behind the committed length, linear layers leave
what their rows would write, and :meth:`TargetState.commit` keeps the rows of one path, for every layer kind at once.
So an interrupted forward costs nothing, and going back is dropping what came after.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ddlab.attention import BACKENDS, check_attention
from ddlab.delta import TREE_ROWS, TreeRows, TreeWrites, states_after, teach_tree_rows
from ddlab.packed import packed_layers
from ddlab.tree import DraftTree

if TYPE_CHECKING:
    from ddlab.pair import Pair

LINEAR_STATES = ("exact", "flattened")


@dataclass(frozen=True)
class Committed:
    """The committed text as the target holds it: how many tokens, and the states of the linear layers after them.

    ``linear``: per layer (conv window [1, channels, kernel], recurrent state [1, v_heads, k_dim, v_dim]), or None for
    an attention layer or an empty text. The tensors are never written to, so keeping this object keeps a snapshot.
    """

    length: int
    linear: Sequence[tuple[Tensor, Tensor] | None]


class _KeyValues(CacheLayerMixin):
    """Keys and values of one attention layer in a growing buffer [1, heads, capacity, dim].

    Rows below the committed length are never written again. A sliding layer keeps its old rows too (going back needs
    them) and hands out only what a window can reach.
    """

    def __init__(self, cache: TargetCache, window: int | None):
        super().__init__()
        self.cache, self.window = cache, window
        self.is_sliding = window is not None

    @property
    def first(self) -> int:
        """The oldest committed position that the next row can see."""
        return 0 if self.window is None else max(0, self.cache.committed.length - self.window + 1)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = key_states.new_empty((*key_states.shape[:2], 0, key_states.shape[3]))
        self.values = value_states.new_empty((*value_states.shape[:2], 0, value_states.shape[3]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.cache.committed.length
        end = start + key_states.shape[2]
        self.keys, self.values = (_grown(x, start, end) for x in (self.keys, self.values))
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, self.first : end], self.values[:, :, self.first : end]

    def gather(self, rows: _Rows) -> None:
        """Move the kept rows of the forward under way to the front of it."""
        start = self.cache.committed.length
        for x in (self.keys, self.values):
            forward = x[:, :, start:]
            forward[:, :, : len(rows)] = forward.index_select(2, rows.on(x.device))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.committed.length - self.first + query_length, self.first

    def get_seq_length(self) -> int:
        return self.cache.committed.length

    def get_max_length(self) -> int:
        return -1


def _grown(x: Tensor, used: int, need: int) -> Tensor:
    """``x`` with room for ``need`` rows; the first ``used`` are kept."""
    if x.shape[2] >= need:
        return x
    bigger = x.new_empty((*x.shape[:2], max(need + 64, 2 * x.shape[2]), x.shape[3]))
    bigger[:, :, :used] = x[:, :, :used]
    return bigger


class _LinearState:
    """What the forward under way did in one gated-delta-net layer; the committed states live in :class:`Committed`."""

    def __init__(self) -> None:
        # [1, channels, kernel + n]: the committed window and the rows; without a window for the first rows of a text
        self.columns: Tensor | None = None
        self.kernel = 0
        self.after: Tensor | TreeWrites | None = None

    def window_after(self, rows: _Rows | None) -> Tensor:
        """The conv window after the kept rows; None: all rows, in order."""
        columns, kernel = self.columns, self.kernel
        assert columns is not None
        if rows is not None:
            return columns.index_select(2, rows.window(kernel, columns.device))
        if columns.shape[2] < kernel:  # a text shorter than the kernel starts behind zeros
            return torch.nn.functional.pad(columns, (kernel - columns.shape[2], 0))
        return columns[:, :, -kernel:].clone()


class _Rows:
    """The rows that a commit keeps, made once for all layers: increasing, the root's first."""

    def __init__(self, path: Sequence[int]):
        self.path = list(path)
        self.moved = self.path != list(range(len(self.path)))
        self._on: dict[Any, Tensor] = {}

    def __len__(self) -> int:
        return len(self.path)

    def on(self, device: torch.device) -> Tensor:
        """int64 [m] on ``device``."""
        return self._made(device, self.path, device)

    def window(self, kernel: int, device: torch.device) -> Tensor:
        """int64 [kernel]: the last columns of the committed window and the kept rows behind it."""
        columns = [*range(kernel), *(kernel + row for row in self.path)][-kernel:]
        return self._made((kernel, device), columns, device)

    def _made(self, key: Any, values: list[int], device: torch.device) -> Tensor:
        if key not in self._on:
            self._on[key] = torch.tensor(values).to(device, non_blocking=True)
        return self._on[key]


class TargetCache(Cache):
    """The cache that a target model is called with; see the module's first lines.

    With ``flattened`` the linear layers keep every row of a forward, also the rejected ones: the labelled wrong way.
    """

    def __init__(self, pair: Pair, flattened: bool = False):
        self.flattened = flattened
        kinds = zip(pair.layer_types, pair.windows, strict=True)
        super().__init__(layers=[_LinearState() if k == "linear_attention" else _KeyValues(self, w) for k, w in kinds])
        self.committed = Committed(0, (None,) * len(self.layers))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        state = self.committed.linear[layer_idx]
        return None if state is None else state[0]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        state = self.committed.linear[layer_idx]
        return None if state is None else state[1]

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int = 0,
        **kwargs: Any,
    ) -> Tensor:
        layer, window = self.layers[layer_idx], self.get_conv_state(layer_idx)
        layer.kernel = conv_kernel_size
        layer.columns = conv_states if window is None else torch.cat([window, conv_states], dim=-1)
        return layer.columns

    def update_recurrent_state(
        self, recurrent_states: Tensor | TreeWrites, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Any:
        self.layers[layer_idx].after = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """True: a linear layer must not take the one-row path that overwrites its conv window in place."""
        return True

    def commit(self, path: Sequence[int] | None, count: int) -> None:
        """Keep ``count`` rows of the forward under way: those of ``path`` (increasing), or all of them."""
        linear: list[tuple[Tensor, Tensor] | None] = [None] * len(self.layers)
        rows = None if path is None else _Rows(path)
        states = self._states_after(rows)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, _LinearState):
                linear[index] = layer.window_after(None if self.flattened else rows), states[index]
            elif rows is not None and rows.moved:
                layer.gather(rows)
        self.committed = Committed(self.committed.length + count, tuple(linear))
        for layer in self.layers:
            if isinstance(layer, _LinearState):
                layer.columns = layer.after = None

    def _states_after(self, rows: _Rows | None) -> dict[int, Tensor]:
        """The recurrent states after the kept rows, by layer; those of a tree in one go for all layers of a device."""
        states: dict[int, Tensor] = {}
        trees: dict[torch.device, dict[int, TreeWrites]] = {}
        for index, layer in enumerate(self.layers):
            after = layer.after if isinstance(layer, _LinearState) else None
            if isinstance(after, TreeWrites):
                trees.setdefault(after.writes.device, {})[index] = after
            elif after is not None:
                states[index] = after
        for device, writes in trees.items():
            assert rows is not None
            states |= zip(writes, states_after(list(writes.values()), rows.on(device)), strict=True)
        return states

    def pending_nbytes(self) -> int:
        """Bytes that the forward under way keeps for its commit in the linear layers."""
        total = 0
        for layer in self.layers:
            if isinstance(layer, _LinearState) and layer.columns is not None and layer.after is not None:
                total += layer.columns.nbytes + layer.after.nbytes
        return total

    def copy(self, pair: Pair) -> TargetCache:
        """An independent copy of what is committed."""
        other = TargetCache(pair, self.flattened)
        other.committed = self.committed
        for mine, its in zip(self.layers, other.layers, strict=True):
            if isinstance(mine, _KeyValues) and mine.is_initialized:
                its.keys, its.values, its.is_initialized = mine.keys.clone(), mine.values.clone(), True
        return other


def tree_masks(
    tree: DraftTree,
    start: int,
    kinds: Sequence[tuple[str, int | None]],
    dtype: torch.dtype,
    device: torch.device,
    *,
    dense_part: bool = False,
    ancestors: np.ndarray | None = None,
) -> dict[str, Tensor]:
    """Additive masks [1, 1, n, keys] by layer kind: 0 where a row may look, the dtype's minimum elsewhere.

    Committed keys are visible, tree rows by ancestry. In a sliding layer the distance is measured in positions
    (``start + depth``), not in slots, and the keys that no row can reach are left out in front. Additive, because it is
    legal on every masked backend: eager adds whatever mask it gets, also a boolean one. ``dense_part`` leaves out the
    committed keys that every row sees, as `ddlab.flash_tree` wants it: of those only the far end of a window is left.
    ancestors: the tree's own, where they are at hand.
    """
    ancestors, depth = tree.ancestors() if ancestors is None else ancestors, tree.depth  # [n, n], [n]
    masks = {}
    for kind, window in kinds:
        seen = ancestors
        first = 0 if window is None else max(0, start - window + 1)
        end = start  # committed keys from here on have no column
        if dense_part:
            end = first if window is None else min(start, max(first, start + int(depth.max()) - window + 1))
        mask = torch.zeros((1, 1, len(tree), end - first + len(tree)), dtype=dtype, device=device)
        columns = mask[..., end - first :]  # the rows' own: without a window every committed key is seen
        if window is not None:
            committed = (start + depth)[:, None] - np.arange(first, end)[None, :] < window
            seen = np.concatenate([committed, ancestors & (depth[:, None] - depth[None, :] < window)], axis=1)
            columns = mask
        masks[kind] = mask
        columns.masked_fill_(torch.from_numpy(~seen).to(device, non_blocking=True), torch.finfo(dtype).min)
    return masks


class TargetState:
    """A target in the middle of a text: prefill, verify a tree, commit a path, go back.

    Args:
        pair: target and where its parts are.
        linear_state: ``"exact"``, or ``"flattened"``: the labelled wrong way, which runs the linear layers over the
            rows in node order as if they were a chain and keeps every rejected token in their state.
        tapped: collect the drafter's context features in every forward.
    """

    eager = True  # was the last forward over a tree run by the target's modules?

    def __init__(self, pair: Pair, linear_state: str = "exact", tapped: bool = False):
        self.pair, self.linear_state, self.tapped = pair, linear_state, tapped
        self.cache = TargetCache(pair, flattened=linear_state == "flattened")
        self._features: list[Tensor] | None = None  # by tap, [rows, hidden]
        self._checked: str | None = None  # the attention backend whose calls were found legal
        attention = dict.fromkeys(zip(pair.layer_types, pair.windows, strict=True))
        self._kinds = [(kind, window) for kind, window in attention if kind != "linear_attention"]
        if len({kind for kind, _ in self._kinds}) != len(self._kinds):
            raise ValueError(
                f"layers of one kind have different windows, which no mask by kind can express: {self._kinds}"
            )
        for layer, kind in zip(pair.layers, pair.layer_types, strict=True):
            if kind == "linear_attention":
                teach_tree_rows(layer.linear_attn)  # type: ignore[arg-type]

    @property
    def length(self) -> int:
        """Tokens whose keys, values and states are committed."""
        return self.cache.committed.length

    @property
    def tapped_features(self) -> Tensor:
        """The drafter's context features of the last forward, [rows, taps * hidden]."""
        if self._features is None:
            raise RuntimeError("no features: this state was made without tapped=True, or nothing has run")
        return torch.cat(self._features, dim=-1)

    def prefill(self, ids: Sequence[int]) -> Tensor:
        """Run tokens that are text already and commit them. Returns the last token's logits [vocab]."""
        positions = torch.arange(self.length, self.length + len(ids))
        logits = self._forward(ids, positions, last_only=True)
        self.cache.commit(None, len(ids))
        return logits[-1]

    def verify(self, tree: DraftTree) -> Tensor:
        """Logits [n, vocab] of the target at every node, in float32 or better. Commits nothing."""
        positions = torch.from_numpy(self.length + tree.depth)
        if len(tree) == 1:  # a plain step, in the model's own arithmetic
            return self._forward(tree.tokens, positions)
        device, dtype = self.pair.device, self.pair.dtype
        dense_part = self._backend_takes_trees()
        ancestors = tree.ancestors()
        masks = tree_masks(tree, self.length, self._kinds, dtype, device, dense_part=dense_part, ancestors=ancestors)
        mask: Any = masks if len(self._kinds) > 1 else next(iter(masks.values()), None)
        keywords: dict[str, Any] = {"attention_mask": mask}
        linear = any(kind == "linear_attention" for kind in self.pair.layer_types)
        exact = linear and self.linear_state == "exact"
        if exact:
            keywords[TREE_ROWS] = TreeRows(tree.parents, ancestors)
        logits = self._forward(tree.tokens, positions, **keywords)
        if exact:
            self._check_linear_layers_saw_the_tree()
        return logits

    def commit(self, path: Sequence[int]) -> None:
        """Keep the rows of ``path`` (node indices, root first) of the tree that was just verified."""
        self.cache.commit(path, len(path))

    def _backend_takes_trees(self) -> bool:
        """Does the attention backend that is set now want a mask's dense part? ValueError if it can take no tree."""
        name = self.pair.attention
        if name != self._checked:
            check_attention(self.pair)
            self._checked = name
        return name in BACKENDS and BACKENDS[name].dense_part

    def features_of(self, path: Sequence[int]) -> Tensor:
        """Rows ``path`` of `tapped_features`, [len(path), taps * hidden]."""
        if self._features is None:
            return self.tapped_features[list(path)]
        rows = torch.tensor(list(path), device=self._features[0].device)
        return torch.cat([some.index_select(0, rows) for some in self._features], dim=-1)

    def expect(self, tokens: int) -> None:
        """The text will grow to so many tokens."""

    def _check_linear_layers_saw_the_tree(self) -> None:
        for index, layer in enumerate(self.cache.layers):
            if isinstance(layer, _LinearState) and not isinstance(layer.after, TreeWrites):
                raise RuntimeError(
                    f"layer {index} ran its linear attention without the tree: its kernel was replaced after loading. "
                    "Load the target without `use_kernels`, or decode with method='ar'"
                )

    @torch.no_grad()
    def _forward(self, ids: Any, positions: Tensor, *, last_only: bool = False, **keywords: Any) -> Tensor:
        pair = self.pair
        tap = pair.tap() if self.tapped else nullcontext()
        if last_only and pair.keeps_logits:
            keywords["logits_to_keep"] = 1
        several = packed_layers(pair) if len(ids) > 1 else nullcontext()
        with several, tap as tapped:
            out = pair.target(
                input_ids=torch.tensor(np.asarray(ids), device=pair.device)[None],
                position_ids=positions.to(pair.device)[None],
                cache=self.cache,
                use_cache=True,
                **keywords,
            )
        self._features = None if tapped is None else tapped.outputs()
        logits: Tensor = out.logits[0]  # [n, vocab]
        return logits if logits.dtype == torch.float64 else logits.float()

    def snapshot(self) -> Committed:
        return self.cache.committed

    def restore(self, committed: Committed) -> None:
        """Go back to an earlier snapshot of this same state, bit for bit."""
        self.cache.committed = committed

    def fork(self) -> TargetState:
        other = TargetState(self.pair, self.linear_state, self.tapped)
        other.cache = self.cache.copy(self.pair)
        return other
