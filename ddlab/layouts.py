"""The published config layouts of DFlash drafters, read into settings that say where each of them is from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from transformers import MuseGlimmerAssistantConfig

LAYER_KINDS = ("full_attention", "sliding_attention")
IN_BLOCK = ("causal", "bidirectional")
DRAFTS_FROM = ("mask", "anchor")
TWICE = "the drafter's config says two things: "
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
_DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


@dataclass(frozen=True)
class DrafterSettings:
    """The conventions of one drafter; `sources` names the config field (or default) behind each."""

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # l = output of decoder layer l; of the last layer: after the final norm
    layer_types: tuple[str, ...]
    sliding_window: int | None  # a sliding layer sees a key if |query position - key position| < window
    block_attention: dict[str, str]  # layer type -> "causal" | "bidirectional", between the tokens of a block
    drafts_from: str  # "mask": slot 0 is the anchor, slots 1..B-1 are drafts | "anchor": slot 0 drafts too
    rope: dict[str, Any]
    layout: str
    vocab: str  # whose head: "target head" | "own head, N rows"
    vocab_size: int | None  # ids the drafter was made for
    num_target_layers: int | None
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        """Drafted positions of a block."""
        return self.block_size - (self.drafts_from == "mask")

    @property
    def scales_logits(self) -> bool:
        """Whether the drafter scales or caps its logits itself; it then wants the bare output embedding."""
        return self.output_multiplier != 1.0 or self.final_logit_softcapping is not None

    def to_dict(self) -> dict[str, Any]:
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}


def read_config(
    config: dict[str, Any],
    state: Mapping[str, torch.Tensor],
    *,
    drafts_from: str | None = None,
    block_attention: dict[str, str] | None = None,
) -> tuple[MuseGlimmerAssistantConfig, DrafterSettings]:
    """Any known layout -> Transformers' config and the settings. The keyword arguments overrule the config.

    Raises ValueError naming the field that is missing or says two things, or the format ddlab does not run.
    """
    layout = _layout(config, state)
    read = _Fields(config, layout)
    lacking = [name for name in _SIZES if read(name) is None]
    if lacking:
        raise ValueError(f"the drafter's config lacks {', '.join(lacking)}")
    hidden, layers = read("hidden_size"), read("num_hidden_layers")
    if read("target_hidden_size", hidden) != hidden:
        raise ValueError(
            f"the drafter adapts features of width {read('target_hidden_size')} to its own {hidden} "
            "(target_hidden_size); ddlab runs drafters of the target's hidden size only"
        )
    settings = DrafterSettings(
        block_size=_block_size(read),
        mask_token_id=_mask_token_id(read),
        target_layer_ids=_target_layer_ids(read, layers),
        layer_types=(types := _layer_types(read, layers)),
        sliding_window=_sliding_window(read, types),
        block_attention=_block_attention(read, block_attention),
        drafts_from=_drafts_from(read, drafts_from),
        rope=_rope(read),
        layout=layout,
        vocab=f"own head, {len(state['d2t'])} rows" if "d2t" in state else "target head",
        vocab_size=read("vocab_size"),
        num_target_layers=read("num_target_layers"),
        input_embedding_scale=float(read("input_embedding_scale", 1.0)),
        output_multiplier=float(read("output_multiplier", 1.0)),
        final_logit_softcapping=read("final_logit_softcapping") or None,  # 0 says none
    )
    names = {f.name for f in fields(settings)}
    settings = replace(settings, sources={k: v for k, v in read.sources.items() if k in names})
    model_config = MuseGlimmerAssistantConfig(
        **{name: read(name) for name in _SIZES},
        rms_norm_eps=read("rms_norm_eps", 1e-5 if layout == "transformers" else 1e-6),
        hidden_act=read("hidden_act", "silu"),
        max_position_embeddings=read("max_position_embeddings", 32768),
        rope_parameters=dict(settings.rope),
        layer_types=list(types),
        sliding_window=settings.sliding_window or 1,  # the class wants a number even if no layer slides
        block_size=settings.block_size,
        mask_token_id=settings.mask_token_id,
        target_layer_ids=list(settings.target_layer_ids),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return model_config, settings


class _Fields:
    """Looks a field up in dflash_config and at the top level, and remembers where it was."""

    def __init__(self, config: dict[str, Any], layout: str) -> None:
        self.layout = layout
        self.places = {"dflash_config.": config.get("dflash_config") or {}, "": config}
        self.sources: dict[str, str] = {}

    def __call__(self, name: str, default: Any = None) -> Any:
        found = {place + name: d[name] for place, d in self.places.items() if d.get(name) is not None}
        if len({json.dumps(v, sort_keys=True) for v in found.values()}) > 1:
            raise ValueError(TWICE + _both(found))
        self.sources[name] = next(iter(found), f"default ({default})")
        return next(iter(found.values()), default)


def _both(found: Mapping[str, Any]) -> str:
    return " and ".join(f"{where} = {value}" for where, value in found.items())


def _layout(config: dict[str, Any], state: Mapping[str, torch.Tensor]) -> str:
    nested, names = config.get("dflash_config") or {}, config.get("architectures") or []
    marks = [name for name in names if name.startswith("DFlash2")]
    marks += [name for name in _DFLASH2 if name in nested or name in config]
    marks += [name for name in state if "candidate_selector" in name or "_conv." in name]
    if marks:
        raise ValueError(
            f"this is a DFlash2 checkpoint ({marks[0]}), and ddlab does not run its convolutions and "
            "candidate selector: use a DFlash checkpoint"
        )
    if names:
        name = names[0]
    elif config.get("model_type") == "muse_glimmer_assistant":
        name = "MuseGlimmerAssistantModel"
    else:
        name = "DFlashDraftModel" if nested or "target_layer_ids" in config else None
    if name not in FORMATS:
        raise ValueError(f"unknown drafter architecture {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name](config)


def _z_lab(config: dict[str, Any]) -> str:
    where = "dflash_config" if config.get("dflash_config") else "top-level fields"
    return f"z-lab ({where}, {'rope_parameters' if config.get('rope_parameters') else 'rope_theta'})"


# architecture -> the name of its layout
FORMATS: dict[str, Callable[[dict[str, Any]], str]] = {
    "DFlashDraftModel": _z_lab,  # z-lab's checkpoints and JetSpec's
    "MuseGlimmerAssistantModel": lambda config: "transformers",
}


def _block_size(read: _Fields) -> int:
    size = read("block_size")
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"the drafter's block_size is {size!r}: it must be a number of at least 1")
    return size


def _mask_token_id(read: _Fields) -> int:
    mask, vocab = read("mask_token_id"), read("vocab_size")
    if not isinstance(mask, int) or isinstance(mask, bool):
        raise ValueError(
            f"the drafter's mask_token_id is {mask!r}: put the id it was trained with"
            f"{f' (0..{vocab - 1})' if vocab else ''} into its config; another one drafts, but worse"
        )
    return mask


def _target_layer_ids(read: _Fields, layers: int) -> tuple[int, ...]:
    ids, target = read("target_layer_ids"), read("num_target_layers")
    if ids is None:  # what the first checkpoints relied on: evenly from layer 1 to the third from the end
        if target is None:
            raise ValueError("the drafter's config has neither target_layer_ids nor num_target_layers")
        span = target - 4
        ids = [target // 2] if layers == 1 else [round(1 + i * span / (layers - 1)) for i in range(layers)]
        read.sources["target_layer_ids"] = f"default spacing of target_layer_ids over {target} target layers"
    where = read.sources["target_layer_ids"]
    if not isinstance(ids, Sequence) or not ids or not all(isinstance(i, int) for i in ids):
        raise ValueError(f"{where} must be a list of layer numbers, not {ids!r}")
    if len(set(ids)) < len(ids):
        raise ValueError(f"{where} repeats layers: {list(ids)}; name distinct ones in target_layer_ids")
    for i in ids:
        if i < 0 or (target is not None and i >= target):
            raise ValueError(f"{where} names layer {i}, but the target has {target} layers (num_target_layers)")
    return tuple(ids)


def _layer_types(read: _Fields, layers: int) -> tuple[str, ...]:
    types, windowed = read("layer_types"), read("use_sliding_window")
    if types is None and read.layout == "transformers":
        types = ["sliding_attention"] * layers
        read.sources["layer_types"] = "default of MuseGlimmerAssistantConfig"
    elif types is None:  # Qwen3Config's rule
        first = read("max_window_layers", layers) if windowed else layers
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
        rule = "use_sliding_window, max_window_layers"
        read.sources["layer_types"] = rule if windowed else "default (all full_attention)"
    if isinstance(types, str) or len(types) != layers or not set(types) <= set(LAYER_KINDS):
        kinds = ", ".join(LAYER_KINDS)
        raise ValueError(f"the drafter's layer_types must be a list of {layers} out of {kinds}, not {types!r}")
    if "sliding_attention" in types and windowed is False:
        raise ValueError(TWICE + "layer_types has sliding layers, use_sliding_window is false")
    return tuple(types)


def _sliding_window(read: _Fields, types: tuple[str, ...]) -> int | None:
    if "sliding_attention" not in types:
        return None
    window = read("sliding_window")
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"the drafter has sliding layers, but its sliding_window is {window!r}")
    return window


def _block_attention(read: _Fields, argument: dict[str, str] | None) -> dict[str, str]:
    """In-block attention by layer type: a table, or one flag for all layers, or the layout's default."""
    default = dict.fromkeys(LAYER_KINDS, "bidirectional")
    if read.layout != "transformers":
        default["sliding_attention"] = "causal"
    said = {}
    for flag in ("is_causal", "causal", "causal_head"):
        value = read(flag)
        if value is not None:
            said[read.sources[flag]] = dict.fromkeys(LAYER_KINDS, "causal" if value else "bidirectional")
    table = read("block_attention")
    if table is not None:
        said[read.sources["block_attention"]] = {**default, **table}
    if argument is not None:
        said = {"argument block_attention": {**default, **argument}}
    for where, value in said.items():
        if not set(value) <= set(LAYER_KINDS) or not set(value.values()) <= set(IN_BLOCK):
            kinds, ways = " and ".join(LAYER_KINDS), " or ".join(IN_BLOCK)
            raise ValueError(f"{where} must map {kinds} to {ways}, not {value}")
    if any(value != next(iter(said.values())) for value in said.values()):
        raise ValueError(TWICE + _both(said))
    read.sources["block_attention"] = next(iter(said), f"default of the layout {read.layout}")
    return next(iter(said.values()), default)


def _drafts_from(read: _Fields, argument: str | None) -> str:
    value = argument or read("drafts_from", "mask")
    if argument:
        read.sources["drafts_from"] = "argument drafts_from"
    if value not in DRAFTS_FROM:
        raise ValueError(f"drafts_from is {value!r}: it must be one of {', '.join(DRAFTS_FROM)}")
    return value


def _rope(read: _Fields) -> dict[str, Any]:
    """rope_theta and rope_scaling (old layout), rope_parameters (new), or both where they agree."""
    theta, old, new = read("rope_theta"), read("rope_scaling"), read("rope_parameters")
    if new and any(isinstance(v, dict) for v in new.values()):
        raise ValueError(f"the drafter's rope_parameters differ by layer type, its class has one for all: {new}")
    if new and old and _scaling(new) != _scaling(old):
        raise ValueError(TWICE + _both({"rope_parameters": new, "rope_scaling": old}))
    thetas = {"rope_parameters.rope_theta": (new or {}).get("rope_theta"), "rope_theta": theta}
    thetas = {where: float(value) for where, value in thetas.items() if value is not None}
    if len(set(thetas.values())) > 1:
        raise ValueError(TWICE + _both(thetas))
    default = 500000.0 if read.layout == "transformers" else 10000.0  # of the config class behind each layout
    said = " = ".join(thetas) or f"default ({default})"
    scaled = "rope_parameters" if new else "rope_scaling" if old else "none"
    read.sources["rope"] = f"theta: {said}; scaling: {scaled}"
    return {**_scaling(new or old or {}), "rope_theta": next(iter(thetas.values()), default)}


def _scaling(raw: dict[str, Any]) -> dict[str, Any]:
    rest = {k: v for k, v in raw.items() if k not in ("type", "rope_type", "rope_theta")}
    return {"rope_type": raw.get("rope_type", raw.get("type", "default")), **rest}
