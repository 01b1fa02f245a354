"""A pair in miniature: its own classes, head shapes, layer kinds, dtype and device, with small and random weights.

A probe needs the shapes that a kernel sees, not what the model has learnt. So hidden size, vocabulary and windows are
cut down, and there is one layer, of one kind: what one kind of layer does tells nothing of another.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MuseGlimmerAssistantModel

from ddlab.drafter import Drafter
from ddlab.pair import Pair

if TYPE_CHECKING:
    from ddlab.verify import TargetState

WINDOW, VOCAB, EXPERTS = 24, 64, 4
# config fields that a probe can do with less of
_SMALL = {
    "vocab_size": VOCAB,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
}
_NONE = ("pad_token_id", "bos_token_id", "eos_token_id")  # ids outside of so few


def small_target(pair: Pair, layer: int) -> Pair:
    """A pair whose target has one layer, of the kind of the given one; behind a linear one comes an attention layer.

    Raises:
        ValueError, TypeError, AttributeError: the class of the target cannot be made small in this way.
    """
    config: Any = copy.deepcopy(pair.text_config)
    kinds = [pair.layer_types[layer]]
    if kinds == ["linear_attention"]:  # Transformers sizes its masks by an attention layer
        kinds.append(next(kind for kind in pair.layer_types if kind != "linear_attention"))
    for name, value in _SMALL.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, min(value, getattr(config, name)))
    for name in _NONE:
        setattr(config, name, None)
    heads = config.num_attention_heads
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    config.hidden_size = heads * max(1, math.ceil(64 / heads))
    config.num_hidden_layers = len(kinds)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = kinds
    window = pair.windows[layer]
    if window is not None:
        config.sliding_window = min(WINDOW, window)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    own = type(pair.target) if pair.target.config is pair.text_config else None
    kind: Any = own or MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise ValueError(f"{type(pair.target).__name__} has no causal class for its text config")
    config._attn_implementation = "eager"
    target: Any = _random(kind(config)).to(pair.device, pair.dtype)
    target.generation_config.eos_token_id = None
    return Pair(target.eval().requires_grad_(False), name=pair.name)


def small_drafter(pair: Pair, layer: int, target: Pair) -> Pair:
    """``target`` with a drafter that has one layer, like the given one of the pair's own."""
    assert pair.drafter is not None
    settings, hidden = pair.drafter.settings, target.text_config.hidden_size
    kind = settings.layer_types[layer]
    window = None if kind != "sliding_attention" else min(WINDOW, settings.sliding_window or WINDOW)
    config: Any = copy.deepcopy(pair.drafter.model.config)
    config.hidden_size, config.intermediate_size, config.vocab_size = hidden, 64, VOCAB
    config.num_hidden_layers, config.layer_types, config.target_layer_ids = 1, [kind], [0]
    config.sliding_window = window or 1  # the class wants a number even if no layer slides
    config._attn_implementation = "eager"
    model = _random(MuseGlimmerAssistantModel(config)).to(pair.drafter.device, pair.drafter.dtype)
    small = replace(
        settings,
        layer_types=(kind,),
        sliding_window=window,
        target_layer_ids=(0,),
        mask_token_id=1,
        vocab_size=None,
        num_target_layers=None,
    )
    drafter = Drafter(model.eval().requires_grad_(False), small, name=pair.drafter.name)
    return Pair(target.target, drafter, name=pair.name)


def kinds_of(pair: Pair, part: str) -> dict[int, list[int]]:
    """The first layer of each kind (type and window) -> all layers of that kind."""
    if part == "drafter":
        assert pair.drafter is not None
        s = pair.drafter.settings
        keys: list[Any] = list(s.layer_types)
    else:
        keys = list(zip(pair.layer_types, pair.windows, strict=True))
    found: dict[Any, list[int]] = {}
    for index, key in enumerate(keys):
        found.setdefault(key, []).append(index)
    return {layers[0]: layers for layers in found.values()}


@torch.no_grad()
def _random(model: nn.Module) -> nn.Module:
    """Weights of a size at which attention is neither uniform nor a single key, the same every time."""
    draw = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "sinks":
            weight.copy_(torch.randn(weight.shape, generator=draw))
        elif weight.ndim > 1 and "conv1d" not in name:
            scale = 1.0 if "embed" in name else 1.2 / math.sqrt(weight.shape[-1])
            weight.copy_(torch.randn(weight.shape, generator=draw) * scale)
    return model


def read(state: TargetState, tokens: int) -> list[int]:
    """Reads a text of so many tokens; they are the same every time."""
    ids = torch.randint(2, VOCAB, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    state.prefill(ids)
    return ids
