"""One call of a model by layers: run it, give every layer the inputs of another run, hold one layer to the referee.

A `Scene` is a call that can be run again and again, because nothing of it is committed. What is compared of a layer is
its mixer, the attention or linear-attention module: the one part that a backend changes.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ddlab.comparing import reference
from ddlab.comparing import rows as sights
from ddlab.comparing.delta_forms import FORMS
from ddlab.comparing.rows import Rows, Sight
from ddlab.delta import TREE_ROWS, TreeRows
from ddlab.tree import DraftTree
from ddlab.verify import TargetState

if TYPE_CHECKING:
    from ddlab.drafter import DraftCache
    from ddlab.pair import Pair


@dataclass(frozen=True, eq=False)
class Site:
    """One layer. window: in positions, None for full attention. first: the oldest key that its cache hands out."""

    index: int
    kind: str
    window: int | None
    layer: nn.Module
    mixer: nn.Module
    first: int = 0

    @property
    def linear(self) -> bool:
        return self.kind == "linear_attention"

    @property
    def sinks(self) -> bool:
        return getattr(self.mixer, "sinks", None) is not None


@dataclass(frozen=True, eq=False)
class Scene:
    """A call of a model on what is committed.

    run: the whole forward, logits [m, vocab]. past: of a layer, (keys, values) [1, kv_heads, start, dim] or
    (conv window, recurrent state), or None where nothing is committed.
    """

    what: str
    part: str
    rows: Rows
    sites: tuple[Site, ...]
    run: Callable[[], Tensor]
    past: Callable[[int], tuple[Tensor, Tensor] | None]
    tokens: tuple[int, ...]  # of the rows


def target_scene(
    pair: Pair, state: TargetState, what: str, tokens: Sequence[int], tree: DraftTree | None = None
) -> Scene:
    """A call of the target behind what ``state`` has committed: rows of a text (one row: a step), or of a tree."""
    start = state.length
    if tree is None and len(tokens) == 1:
        tree = DraftTree.from_parents([tokens[0]], [-1])

    def run() -> Tensor:
        if tree is not None:
            return state.verify(tree)
        return state._forward(tokens, torch.arange(start, start + len(tokens)))

    def past(index: int) -> tuple[Tensor, Tensor] | None:
        if not start:
            return None
        if pair.layer_types[index] == "linear_attention":
            return state.cache.committed.linear[index]
        held = state.cache.layers[index]
        return held.keys[:, :, :start], held.values[:, :, :start]

    sites = []
    for i, (kind, window, layer) in enumerate(zip(pair.layer_types, pair.windows, pair.layers, strict=True)):
        mixer: Any = layer.linear_attn if kind == "linear_attention" else layer.self_attn
        sites.append(Site(i, kind, window, layer, mixer, getattr(state.cache.layers[i], "first", 0)))
    rows = sights.tree_rows(tree, start) if tree is not None else sights.chain_rows(len(tokens), start)
    return Scene(what, "target", rows, tuple(sites), run, past, tuple(int(t) for t in tokens))


def draft_scene(pair: Pair, cache: DraftCache, anchor: int) -> Scene:
    """The drafter's block behind the context of ``cache``."""
    drafter, context = pair.drafter, cache.length
    assert drafter is not None
    settings = drafter.settings
    among = {kind: settings.block_attention[kind] for kind in dict.fromkeys(settings.layer_types)}
    sites = []
    for i, (kind, layer) in enumerate(zip(settings.layer_types, drafter.model.layers, strict=True)):
        window = settings.sliding_window if kind == "sliding_attention" else None
        first = 0 if window is None else max(0, context - window + 1)
        mixer: Any = layer.self_attn
        sites.append(Site(i, kind, window, layer, mixer, first))

    def run() -> Tensor:
        cache.truncate(context)
        return pair.propose(cache, anchor)

    def past(index: int) -> tuple[Tensor, Tensor] | None:
        return (cache.keys[index][:, :, :context], cache.values[index][:, :, :context]) if context else None

    rows = sights.block_rows(settings.block_size, context, among)
    return Scene("draft", "drafter", rows, tuple(sites), run, past, tuple(drafter.block_ids(anchor)))


# ---- one forward, watched --------------------------------------------------------------------------------------------


@dataclass
class Watched:
    """What went through the layers of one forward: a mixer's call, its output and its layer's, each [n, hidden]."""

    calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    mixed: dict[int, Tensor] = field(default_factory=dict)
    out: dict[int, Tensor] = field(default_factory=dict)
    logits: Tensor | None = None


def watch(scene: Scene, given: Mapping[int, Tensor] | None = None, *, calls: bool = False) -> Watched:
    """Run the scene. given: by layer, hidden states [1, n, hidden] that its mixer gets in place of its own.

    calls: keep what each mixer was called with. Raises what the forward raises; the hooks go in any case.
    """
    seen, handles = Watched(), []

    def before(index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if given is not None:
                args, kwargs = _with_hidden(args, kwargs, given[index])
            if calls:
                seen.calls[index] = args, dict(kwargs)
            return args, kwargs

        return hook

    def after(index: int, kept: dict[int, Tensor]) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            kept[index] = first[0].detach()

        return hook

    try:
        for site in scene.sites:
            handles.append(site.mixer.register_forward_pre_hook(before(site.index), with_kwargs=True))
            handles.append(site.mixer.register_forward_hook(after(site.index, seen.mixed)))
            handles.append(site.layer.register_forward_hook(after(site.index, seen.out)))
        with torch.no_grad():
            seen.logits = scene.run()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def hidden_states(call: tuple[tuple[Any, ...], dict[str, Any]]) -> Tensor:
    """[1, n, hidden] that a mixer was called with."""
    args, kwargs = call
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def _with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    own = hidden_states((args, kwargs))
    hidden = hidden.to(own.device, own.dtype)
    if "hidden_states" in kwargs:
        return args, kwargs | {"hidden_states": hidden}
    return (hidden, *args[1:]), kwargs


# ---- one layer by itself ---------------------------------------------------------------------------------------------


class Bench:
    """One mixer outside of its model: plain attention or the plain recurrence, under a mask of our own.

    referee: a copy in float64 on the CPU; else the model's own weights, dtype and device, which is how much the
    dtype's rounding alone costs there.

    Raises:
        ValueError: the layer's weights are not in memory.
    """

    def __init__(self, scene: Scene, site: Site, call: tuple[tuple[Any, ...], dict[str, Any]], *, referee: bool):
        self.scene, self.site = scene, site
        weight = next(site.mixer.parameters())
        if weight.device.type == "meta":
            raise ValueError("the layer's weights are offloaded")
        self.device, self.dtype = (torch.device("cpu"), torch.float64) if referee else (weight.device, weight.dtype)
        self.mixer = _copied(site.mixer).to(self.device, self.dtype) if referee else copy.copy(site.mixer)
        if not site.linear:
            config: Any = copy.deepcopy(site.mixer.config)
            config._attn_implementation = reference.NAME
            self.mixer.config = config
        past = scene.past(site.index)
        self.past = None if past is None else tuple(self._own(x) for x in past)
        args, kwargs = call
        self.args = tuple(self._own(x) for x in args)
        self.kwargs = {k: self._own(v) for k, v in kwargs.items() if k not in ("cache", "attention_mask", TREE_ROWS)}

    def attention(self, sight: Sight) -> Tensor:
        """The output [n, hidden] of an attention layer whose rows see what ``sight`` says."""
        return self._run(attention_mask=sight)

    def linear(self, form: str = "by_node") -> Tensor:
        """The output [n, hidden] of a gated-delta-net layer in one of its forms."""
        tree = self.scene.rows
        more = {TREE_ROWS: TreeRows(tree.parents, tree.ancestors)} if tree.branches else {}
        with FORMS[form].use():
            return self._run(attention_mask=None, **more)

    def right(self) -> Tensor:
        site = self.site
        if site.linear:
            return self.linear()
        return self.attention(sights.right(self.scene.rows, site.kind, site.window))

    @torch.no_grad()
    def _run(self, **more: Any) -> Tensor:
        # the class's own forward: no hook of anybody runs on this
        out = type(self.mixer).forward(self.mixer, *self.args, **self.kwargs, cache=_Past(self.past), **more)
        return (out[0] if isinstance(out, tuple) else out)[0]

    def _own(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.detach().to(self.device, self.dtype if x.is_floating_point() else None)
        if isinstance(x, (tuple, list)):
            return type(x)(self._own(item) for item in x)
        return x


class _Past:
    """A cache of one layer that gives what was committed and keeps nothing."""

    def __init__(self, held: tuple[Any, ...] | None):
        self.held = held

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.held is None:
            return keys, values
        old_keys, old_values = self.held
        return torch.cat([old_keys, keys], dim=2), torch.cat([old_values, values], dim=2)

    def get_conv_state(self, *_: Any, **__: Any) -> Tensor | None:
        return None if self.held is None else self.held[0]

    def get_recurrent_state(self, *_: Any, **__: Any) -> Tensor | None:
        return None if self.held is None else self.held[1]

    def update_conv_state(self, columns: Tensor, *_: Any, **__: Any) -> Tensor:
        return columns if self.held is None else torch.cat([self.held[0], columns], dim=-1)

    def update_recurrent_state(self, state: Any, *_: Any, **__: Any) -> Any:
        return state

    def is_recording_past(self, *_: Any) -> bool:
        return True


def _copied(module: nn.Module) -> nn.Module:
    """A copy without anybody's hooks."""
    without: dict[int, Any] = {}
    for part in module.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks):
            without[id(hooks)] = OrderedDict()
    other = copy.deepcopy(module, without)
    if any(hasattr(part, "_hf_hook") for part in other.modules()):
        from accelerate.hooks import remove_hook_from_module

        remove_hook_from_module(other, recurse=True)
    return other
