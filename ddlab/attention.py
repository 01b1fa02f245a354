"""Which attention backend runs: how a pair's models are set to one, and which calls a pair would ask it for.

A backend is a function in Transformers' own registry plus the rules of `ddlab.backends`. A call that breaks a rule is
refused before any kernel runs, and the message names what to use. Whatever was set before can be set again.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import flex_attention_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import (
    is_flash_attn_2_available,
    is_flash_attn_3_available,
    is_flash_attn_4_available,
    is_torch_flex_attn_available,
)

from ddlab.backends import BACKENDS, CALLS, HALF, Backend, Call, find
from ddlab.flash_tree import causal_mask, flash_tree_forward
from ddlab.names import hint, one_of
from ddlab.sdpa_kernels import SDPA_KERNELS, flex_forward, sdpa_forward

if TYPE_CHECKING:
    from ddlab.drafter import Drafter
    from ddlab.pair import Pair

__all__ = [
    "BACKENDS",
    "CALLS",
    "Backend",
    "Call",
    "attention_backend",
    "available",
    "best",
    "calls_of",
    "check",
    "check_attention",
    "drafter_calls",
    "find",
    "refusal",
    "set_attention",
    "use",
]

PARTS = ("target", "drafter")
OWN = tuple(name for name in BACKENDS if name not in ("eager", "sdpa"))  # Transformers cannot load a model with these

for _name, _function, _mask in (
    ("flash_tree", flash_tree_forward, causal_mask),
    ("flex", flex_forward, flex_attention_mask),
    *((name, sdpa_forward(name), sdpa_mask) for name in SDPA_KERNELS),
):
    AttentionInterface.register(BACKENDS[_name].implementation, _function)
    AttentionMaskInterface.register(BACKENDS[_name].implementation, _mask)


def available(name: str) -> str | None:
    """None, or why the backend is not there on this machine. Runs no kernel."""
    cuda = torch.cuda.is_available()
    match find(name).name:
        case "sdpa:efficient" | "sdpa:cudnn" if not cuda:
            return "it needs a CUDA device, and PyTorch sees none"
        case "flash_tree" | "sdpa:flash" if cuda and not torch.backends.cuda.is_flash_attention_available():
            return "this PyTorch was built without flash attention"
        case "flex":
            return _flex_available(cuda)
        case "flash_attention_2":
            return _package_available("flash-attn", is_flash_attn_2_available)
        case "flash_attention_3":
            return _package_available("flash-attn-3", is_flash_attn_3_available)
        case "flash_attention_4":
            return _package_available("flash-attn-4", is_flash_attn_4_available)
    return None


def _package_available(package: str, found: Any) -> str | None:
    if not torch.cuda.is_available():
        return f"it needs a CUDA device and the package {package}; PyTorch sees no CUDA device"
    return None if found() else f"the package {package} is not installed"


def _flex_available(cuda: bool) -> str | None:
    if not is_torch_flex_attn_available():
        return "this PyTorch has no flex attention"
    if cuda:
        return None if importlib.util.find_spec("triton") else "triton compiles it, and is not installed"
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    return None if found else "a C++ compiler compiles it, and none is on the PATH"


# -- what a pair asks for ------------------------------------------------------------------------------------


def calls_of(pair: Pair, part: str = "target") -> list[tuple[int, Call]]:
    """The attention calls of decoding with this pair: (layer index, call), for every layer with attention.

    A target is asked for prefill, step and verify, a drafter (``part="drafter"``) for draft.
    """
    one_of("part", part, PARTS)
    if part == "drafter":
        return [] if pair.drafter is None else drafter_calls(pair.drafter)
    found = []
    layers = zip(pair.layer_types, pair.windows, pair.layers, strict=True)
    for index, (layer_type, window, layer) in enumerate(layers):
        if layer_type != "linear_attention":
            call = _call(layer.self_attn, pair.text_config, window, pair.dtype, pair.device)
            found += [(index, replace(call, kind=kind)) for kind in ("prefill", "step", "verify")]
    return found


def drafter_calls(drafter: Drafter) -> list[tuple[int, Call]]:
    """The attention calls of a drafter on its own: (layer index, call)."""
    s, found = drafter.settings, []
    for index, (layer_type, layer) in enumerate(zip(s.layer_types, drafter.model.layers, strict=True)):
        window = s.sliding_window if layer_type == "sliding_attention" else None
        found.append((index, _call(layer.self_attn, drafter.model.config, window, drafter.dtype, drafter.device)))
    return found


def _call(module: Any, config: Any, window: int | None, dtype: torch.dtype, device: torch.device) -> Call:
    """What a drafted block asks of this attention module."""
    weight = next(module.parameters(), None)  # a model may be spread over devices; an offloaded part is on none
    on = device if weight is None or weight.device.type == "meta" else weight.device
    heads = config.num_attention_heads
    return Call(
        kind="draft",
        window=window,
        sinks=getattr(module, "sinks", None) is not None,
        dtype=dtype,
        head_dim=getattr(module, "head_dim", None) or config.hidden_size // heads,
        device=on.type,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        softcap=getattr(config, "attn_logit_softcapping", None),
    )


def refusal(name: str, calls: Iterable[tuple[int, Call]], kinds: Collection[str] = CALLS) -> str | None:
    """Why a backend cannot serve these calls, of these kinds (the first that it refuses); None: it can."""
    backend = find(name)
    for layer, call in calls:
        if call.kind in kinds and (why := backend.refusal(call)) is not None:
            return f"layer {layer}: {why}"
    return None


def best(pair: Pair, part: str = "target") -> str:
    """The rule of ``attention="auto"``: flash_tree on CUDA in half precision, else sdpa, else eager, what is legal."""
    calls, model = calls_of(pair, part), _model(pair, part)
    fast = all(call.device == "cuda" and call.dtype in HALF for _, call in calls)
    if fast and available("flash_tree") is None and refusal("flash_tree", calls) is None:
        return "flash_tree"
    return "sdpa" if getattr(model, "_supports_sdpa", False) and refusal("sdpa", calls) is None else "eager"


# -- checks ----------------------------------------------------------------------------------------------------


def check_name(name: str) -> None:
    """Raises ValueError for a name that nobody knows, and for a backend that can take no tree's rows."""
    ours = BACKENDS.get(name)
    foreign = ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    if ours.maskless if ours else any(word in name for word in ("flash", "flex", "paged", "/")):
        raise ValueError(
            f"attention {name!r} takes no tree mask, and tree verification needs one: "
            'use attention="flash_tree", attention="sdpa" or attention="eager"'
        )
    if ours is None and name not in foreign:
        near = hint(name, BACKENDS, f"choose one of {', '.join(BACKENDS)}")
        raise ValueError(f"unknown attention {name!r}: {near}")


def check(name: str, calls: Iterable[tuple[int, Call]], kinds: Collection[str] = CALLS, whose: str = "") -> None:
    """Raises ValueError where a backend is not on this machine or cannot serve these calls, of these kinds."""
    if (missing := available(name)) is not None:
        raise ValueError(f"attention {name!r} is not available: {missing}")
    if (why := refusal(name, calls, kinds)) is not None:
        raise ValueError(f"{whose}{why}")


def check_attention(pair: Pair) -> None:
    """Raises ValueError where what a pair's models are set to now cannot serve their calls."""
    for part in PARTS if pair.drafter else PARTS[:1]:
        name = attention_backend(pair, part)
        check_name(name)
        if name in BACKENDS and (why := refusal(name, calls_of(pair, part))) is not None:
            raise ValueError(f"the {part}'s {why}")


# -- what is set ---------------------------------------------------------------------------------------------


def attention_backend(pair: Pair, part: str = "target") -> str:
    """What is set now: a name of `BACKENDS`, or the name of a foreign function in Transformers' registry."""
    return name_of(_model(pair, part))


def name_of(model: PreTrainedModel) -> str:
    """`attention_backend` of one model."""
    implementation = str(model.config._attn_implementation)
    return next((b.name for b in BACKENDS.values() if b.implementation == implementation), implementation)


def set_attention(pair: Pair, name: str, part: str = "target") -> None:
    """Set one part of a pair to a backend, for good. Of a nested target its text decoder alone.

    Raises:
        ValueError: an unknown name, a backend that is not there, or one of the pair's calls is illegal on it, or the
            model's class cannot be set; nothing is changed then.
    """
    check(name, calls_of(pair, part), whose=f"the {part}'s ")
    _set(_model(pair, part), name)


@contextmanager
def use(pair: Pair, name: str, part: str = "target", kinds: Collection[str] = CALLS) -> Iterator[None]:
    """Run a block of code with another backend; whatever was set before is set again, also after an exception.

    Args:
        part: ``"target"``, ``"drafter"`` or ``"both"`` (of a pair without a drafter: the target).
        kinds: the calls that the block will make, out of `CALLS`; all of the pair's of these kinds are checked first.

    Raises:
        ValueError: as `set_attention`.
    """
    one_of("part", part, (*PARTS, "both"))
    both = PARTS if pair.drafter else PARTS[:1]
    parts = both if part == "both" else (part,)
    models = [_model(pair, each) for each in parts]
    for each in parts:
        check(name, calls_of(pair, each), kinds, whose=f"the {each}'s ")
    before = [entry for model in models for entry in _settings(model)]
    try:
        for model in models:
            _set(model, name)
        yield
    finally:
        _restore(before)


def _model(pair: Pair, part: str) -> PreTrainedModel:
    one_of("part", part, PARTS)
    if part == "target":
        return pair.text_model
    if pair.drafter is None:
        raise ValueError("this pair has no drafter")
    return pair.drafter.model


def _set(model: PreTrainedModel, name: str) -> None:
    implementation, before = find(name).implementation, _settings(model)
    try:
        model.set_attn_implementation(implementation)
        if model.config._attn_implementation != implementation:
            raise ValueError(f"{type(model).__name__} does not let its attention be set to {name!r}")
    except BaseException:
        _restore(before)
        raise


def _settings(model: PreTrainedModel) -> list[tuple[Any, str | None]]:
    """(config, what it is set to) of a model and of the models inside it."""
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    return [(config, config._attn_implementation) for config in configs.values()]


def _restore(settings: list[tuple[Any, str | None]]) -> None:
    for config, implementation in settings:
        config._attn_implementation = implementation
