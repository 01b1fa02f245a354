"""The graph engine: captured CUDA graphs over static buffers, in as many launches a round as there are phases.

Its target state is a `TargetState` whose forwards over trees are launches; everything else (a prompt, a round in which
modules are watched, going back) is the eager code on the same buffers, so the two can take turns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ddlab.draft_cache import DraftCache
from ddlab.fast import choice, layers
from ddlab.top import top_tokens
from ddlab.verify import Committed, TargetState

if TYPE_CHECKING:
    from ddlab.pair import Pair
    from ddlab.tree import DraftTree

_ROUND_UP = 1024  # tokens by which buffers grow
_WIDEST = 640  # rows of a tree that there is room for from the start


class GraphEngine:
    """Buffers and captured launches of one pair. One text at a time has the buffers; another that comes swaps in."""

    name = "graph"
    read_scores = staticmethod(choice.read)

    def __init__(self, pair: Pair, signature: tuple[Any, ...]):
        self.pair, self.signature = pair, signature  # of the weights: captured launches know their addresses
        self._proposed: Tensor | None = None
        self.buffers: Any = None
        self.draft: Any = None
        self._forwards: dict[int, Any] = {}
        self._launches: dict[Any, Callable[[], None]] = {}
        self._pool: Any = None
        self.owner: weakref.ref[GraphTarget] | None = None
        self.drafts_owner: weakref.ref[GraphDrafts] | None = None
        models = [pair.text_model] + ([] if pair.drafter is None else [pair.drafter.model])
        kinds = ("_forward_hooks", "_forward_pre_hooks")
        self._hooks = [[getattr(m, kind) for m in model.modules() for kind in kinds] for model in models]

    def target(self, linear_state: str, tapped: bool, tokens: int) -> TargetState:
        return GraphTarget(self, tapped, tokens)

    def drafts(self, tokens: int) -> DraftCache:
        return GraphDrafts(self, tokens)

    def propose(self, drafts: DraftCache, anchor: int) -> Tensor:
        assert isinstance(drafts, GraphDrafts)
        drafts.enter(drafts.length)
        drafts.eager = self.watched(1)
        if drafts.eager:
            return self.pair.propose(drafts, anchor)
        self.draft.address(anchor, drafts.length)
        self.launch("draft", self.draft.run)
        self._proposed = proposed = self.draft.logits.clone()
        return proposed

    def top_tokens(self, logits: Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
        if logits is not self._proposed:  # a hook's, or another text has drafted since
            return top_tokens(logits, k)
        return top_tokens(logits, k, self._read_top)

    def _read_top(self, n: int) -> np.ndarray:
        self.launch(("top", n), lambda: self.draft.run_top(n))
        packed: np.ndarray = self.draft.tops[n].cpu().numpy()
        return packed

    def ingest(self, drafts: DraftCache, features: Tensor) -> None:
        assert isinstance(drafts, GraphDrafts)
        drafts.enter(drafts.length + len(features))
        if len(features) > len(self.draft.features) or self.watched(1):
            self._drafter.ingest(drafts, features)
        elif len(features):
            self.draft.address_context(features, drafts.length)
            self.launch("context", self.draft.run_context)
            drafts.length += len(features)

    @property
    def _drafter(self) -> Any:
        return self.pair.drafter

    def watched(self, part: int) -> bool:
        """Does anybody look at modules of the target (0) or the drafter (1)? A captured launch would pass them by."""
        return any(self._hooks[part])

    # ---- rows and launches -----------------------------------------------------------------------------------------

    def rows_for(self, tree: DraftTree) -> int:
        """How many rows are launched for a tree: the root alone, a block, or 32, 64, 128 and so on behind the root."""
        n, block = len(tree), 0 if self.pair.drafter is None else self.pair.drafter.block_size
        if n == 1 or n == block:
            return n
        return 1 + max(16, 1 << (n - 2).bit_length())

    def forward(self, rows: int) -> Any:
        if rows not in self._forwards:
            drafter = self.pair.drafter
            taps = () if drafter is None else drafter.settings.target_layer_ids
            self._forwards[rows] = layers.TargetForward(self.pair, self.buffers, rows, taps)
        return self._forwards[rows]

    @torch.no_grad()
    def launch(self, key: Any, run: Callable[[], None]) -> None:
        """Run it once: captured the first time, launched from then on."""
        if key in self._launches:
            self._launches[key]()
        else:
            self._launches[key] = self._captured(run)

    def _captured(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs it for real, once (a commit moves rows: twice is wrong), and gives what launches it again."""
        device = self.pair.device
        if device.type != "cuda":
            run()
            return run
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # compiles kernels and sets libraries up; a capture may not, and runs nothing
            run()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if not self._launches:  # a pool ends with the last graph in it
            self._pool = torch.cuda.graph_pool_handle()  # one pool: launches never overlap
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph.replay

    # ---- buffers ---------------------------------------------------------------------------------------------------

    def reserve(self, tokens: int) -> None:
        """Room for so many tokens. Captured launches end with the buffers that they know."""
        if self.buffers is not None and self.buffers.capacity >= tokens:
            return
        old, capacity = self.buffers, -(-tokens // _ROUND_UP) * _ROUND_UP
        self.buffers = layers.TargetBuffers(self.pair, capacity)
        if old is not None:
            for new, was in ((self.buffers.keys, old.keys), (self.buffers.values, old.values)):
                new[:, :, : old.capacity] = was
            self.buffers.state.copy_(old.state)
            self.buffers.window.copy_(old.window)
        self._forwards.clear()
        self._forget(drafts=False)

    def reserve_drafts(self, tokens: int) -> None:
        if self.draft is not None and self.draft.capacity >= tokens:
            return
        old, self.draft = self.draft, layers.DraftForward(self.pair, -(-tokens // _ROUND_UP) * _ROUND_UP)
        if old is not None:
            self.draft.keys[:, :, : old.capacity] = old.keys
            self.draft.values[:, :, : old.capacity] = old.values
        self._forget(drafts=True)

    def _forget(self, drafts: bool) -> None:
        """Drop the launches that know the drafter's buffers, or the target's."""
        for key in [key for key in self._launches if (key in ("draft", "context") or key[0] == "top") == drafts]:
            del self._launches[key]


class GraphTarget(TargetState):
    """A `TargetState` whose forwards over trees are launches of the engine.

    While another text has the buffers, ``_saved`` holds this one's keys and values.
    """

    def __init__(self, engine: GraphEngine, tapped: bool, tokens: int = 0):
        super().__init__(engine.pair, "exact", tapped)
        self.engine, self._tokens = engine, tokens
        self._saved: tuple[Tensor, Tensor] | None = None
        self._loaded: Committed | None = None  # whose linear states the buffers hold
        self._tree: DraftTree | None = None  # verified by launch, not committed yet
        self._kept: tuple[list[int], Tensor] | None = None  # a committed path and the features of its rows
        self.eager = False

    def prefill(self, ids: Sequence[int]) -> Tensor:
        self._enter(self.length + len(ids))
        self._tree = None
        logits = super().prefill(ids)
        self._load()
        return logits

    def verify(self, tree: DraftTree) -> Tensor:
        self.eager = self.engine.watched(0)
        rows = self.engine.rows_for(tree)
        self._enter(self.length + rows)
        if self.eager:
            self._tree = None
            return super().verify(tree)
        forward = self.engine.forward(rows)
        forward.address(tree, self.length)
        self.engine.launch(("verify", rows), forward.run)
        self._tree, self._features, self._kept = tree, None, None
        logits: Tensor = forward.logits[: len(tree)]
        wide = torch.promote_types(logits.dtype, torch.float32)
        return logits.clone() if logits.dtype == wide else logits.to(wide)

    def commit(self, path: Sequence[int]) -> None:
        if self._tree is None:
            super().commit(path)
            self._load()
            return
        path = [int(node) for node in path]
        if self._owner() is not self:  # another text came in between and used the rows
            self.verify(self._tree)
        rows = self.engine.rows_for(self._tree)
        forward, start = self.engine.forward(rows), self.length
        forward.address_path(path, start)
        self.engine.launch(("commit", rows), forward.run_commit)
        self._kept, self._tree = (path, forward.features_kept), None
        self.cache.committed = self._loaded = Committed(
            start + len(path), _States(self.engine.buffers, self.pair.layer_types)
        )

    @property
    def tapped_features(self) -> Tensor:
        if self._features is None and self.tapped and self._tree is not None:
            forward = self.engine.forward(self.engine.rows_for(self._tree))
            return forward.features[: len(self._tree)].flatten(1)
        return super().tapped_features

    def features_of(self, path: Sequence[int]) -> Tensor:
        if self._kept is not None and self._kept[0] == list(path):
            return self._kept[1][: len(path)].flatten(1)
        return super().features_of(path)

    def expect(self, tokens: int) -> None:
        self._tokens = max(self._tokens, tokens)

    def restore(self, committed: Committed) -> None:
        super().restore(committed)
        self._tree = None
        if self._owner() is self:
            self._load()

    def fork(self) -> TargetState:
        other = GraphTarget(self.engine, self.tapped, self._tokens)
        other.cache.committed = self.cache.committed
        other._saved = self._contents()
        return other

    # ---- whose text the buffers hold ---------------------------------------------------------------------------------

    def _owner(self) -> GraphTarget | None:
        return None if self.engine.owner is None else self.engine.owner()

    def _enter(self, tokens: int) -> None:
        """Have the buffers, with room for so many tokens."""
        engine, owner = self.engine, self._owner()
        if owner is not None and owner is not self:
            owner._saved = owner._contents()
            owner._loaded = None
        before = engine.buffers
        engine.reserve(max(tokens, self._tokens + _WIDEST))
        if owner is self and before is engine.buffers:
            return
        engine.owner = weakref.ref(self)
        slot = 0
        for layer, kind in zip(self.cache.layers, self.pair.layer_types, strict=True):
            if kind != "linear_attention":  # the eager code grows a buffer of its own only beyond this one
                layer.keys, layer.values = engine.buffers.keys[slot][None], engine.buffers.values[slot][None]
                layer.is_initialized = True
                slot += 1
        if self._saved is not None:
            for there, saved in zip((engine.buffers.keys, engine.buffers.values), self._saved, strict=True):
                there[:, :, : saved.shape[2]] = saved
            self._saved = None
        self._load()

    def _contents(self) -> tuple[Tensor, Tensor] | None:
        if self._saved is not None:
            return self._saved[0].clone(), self._saved[1].clone()
        if self._owner() is not self:
            return None  # nothing was ever run
        buffers = self.engine.buffers
        return buffers.keys[:, :, : self.length].clone(), buffers.values[:, :, : self.length].clone()

    def _load(self) -> None:
        """Put the committed linear states where launches read them."""
        committed, buffers = self.cache.committed, self.engine.buffers
        if self._loaded is committed:
            return
        if isinstance(committed.linear, _States):
            buffers.window.copy_(committed.linear.windows)
            buffers.state.copy_(committed.linear.states)
        else:
            for slot, (window, state) in enumerate(state for state in committed.linear if state is not None):
                buffers.window[slot].copy_(window[0])
                buffers.state[slot].copy_(state[0])
        self._loaded = committed


class _States(Sequence[tuple[Tensor, Tensor] | None]):
    """`Committed.linear` of all layers in two tensors; a copy of the buffers'."""

    def __init__(self, buffers: Any, layer_types: Sequence[str]):
        self.windows, self.states, self._kinds = buffers.window.clone(), buffers.state.clone(), layer_types

    def __len__(self) -> int:
        return len(self._kinds)

    def __getitem__(self, layer: Any) -> Any:
        if self._kinds[layer] != "linear_attention":
            return None
        slot = self._kinds[:layer].count("linear_attention")
        return self.windows[slot][None], self.states[slot][None]


class GraphDrafts(DraftCache):
    """A `DraftCache` in the engine's buffers."""

    def __init__(self, engine: GraphEngine, tokens: int):
        self.engine, self._tokens, self.length = engine, tokens, 0
        self._saved: tuple[Tensor, Tensor] | None = None
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.eager = False

    def enter(self, tokens: int) -> None:
        """Have the buffers, with room for so many tokens and two blocks."""
        engine = self.engine
        owner = None if engine.drafts_owner is None else engine.drafts_owner()
        if owner is not None and owner is not self:
            owner._saved = owner._contents()
        before = engine.draft
        engine.reserve_drafts(max(tokens, self._tokens) + 2 * engine.pair.drafter.block_size)  # type: ignore[union-attr]
        if owner is self and before is engine.draft:
            return
        engine.drafts_owner = weakref.ref(self)
        self.keys, self.values = ([x[None] for x in buffer] for buffer in (engine.draft.keys, engine.draft.values))
        if self._saved is not None:
            for there, saved in zip((engine.draft.keys, engine.draft.values), self._saved, strict=True):
                there[:, :, : saved.shape[2]] = saved
            self._saved = None

    def reserve(self, rows: int) -> None:
        self.enter(rows)

    def clone(self) -> GraphDrafts:
        other = GraphDrafts(self.engine, self._tokens)
        other.length, other._saved = self.length, self._contents()
        return other

    def _contents(self) -> tuple[Tensor, Tensor] | None:
        if self._saved is not None:
            return self._saved[0].clone(), self._saved[1].clone()
        if not self.keys:
            return None  # nothing was ever ingested
        draft = self.engine.draft
        return draft.keys[:, :, : self.length].clone(), draft.values[:, :, : self.length].clone()
