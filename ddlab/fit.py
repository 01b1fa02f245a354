"""What a pair must be for ddlab to decode it exactly: each check raises ValueError, before any forward."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from . import attention
from .drafter import Drafter

LAYER_KINDS = ("full_attention", "sliding_attention", "linear_attention")


def check_target(target: PreTrainedModel) -> None:
    """A causal decoder with a head, in evaluation mode."""
    kind = type(target).__name__
    if getattr(target.config, "is_encoder_decoder", False):
        raise ValueError(f"{kind} is an encoder-decoder; ddlab decodes decoder-only models")
    if target.get_output_embeddings() is None:
        raise ValueError(f"{kind} has no language-model head: load it with AutoModelForCausalLM")
    if getattr(target.config.get_text_config(decoder=True), "use_bidirectional_attention", False) is True:
        raise ValueError(f"{kind} attends in both directions (use_bidirectional_attention): it is no decoder")
    if target.training:
        raise ValueError("the target is in training mode: call target.eval() first")


def find_text_model(target: PreTrainedModel, text_config: Any) -> PreTrainedModel:
    """The inner decoder, however deep it is nested: the one whose `.layers` are the text config's."""
    for module in target.modules():
        layers = getattr(module, "layers", None)
        if not isinstance(layers, nn.ModuleList) or not isinstance(module, PreTrainedModel):
            continue
        own = module.get_input_embeddings() is target.get_input_embeddings()
        if own and len(layers) == text_config.num_hidden_layers:
            return module
    raise ValueError(f"{type(target).__name__} has no decoder with {text_config.num_hidden_layers} layers")


def check_layer(i: int, kind: str, layer: nn.Module) -> None:
    """A layer kind whose state ddlab can verify a tree on."""
    what = f"layer {i} ({type(layer).__name__}) is of kind {kind!r}"
    if kind not in LAYER_KINDS:
        raise ValueError(f"{what}; ddlab verifies trees on {', '.join(LAYER_KINDS)}")
    if kind != "linear_attention":
        if not hasattr(layer, "self_attn"):
            raise ValueError(f"{what} but has no self_attn module")
        return
    mixer = getattr(layer, "linear_attn", None)
    delta = all(hasattr(mixer, name) for name in ("conv1d", "A_log", "dt_bias"))
    if not delta or not (hasattr(mixer, "in_proj_qkv") or hasattr(mixer, "in_proj_qkvz")):
        mixers = [type(m).__name__ for name, m in layer.named_children() if not ("norm" in name or "mlp" in name)]
        raise ValueError(
            f"{what} with {', '.join(mixers) or 'no mixer'}: of the linear kinds, ddlab verifies trees only "
            "on the gated delta rule of Qwen3-Next and Qwen3.5"
        )


def check_attention(name: str | None) -> None:
    """A backend that can take a tree's rows, judged by its name; nothing is loaded or changed for the check."""
    if name not in (None, "auto"):
        attention.check_name(name)


def count_real_ids(rows: int, tokenizer: Any) -> int:
    """How many of the embedding's rows are ids that the tokenizer knows; the rest is padding."""
    if tokenizer is None:
        return rows
    base = tokenizer.vocab_size  # without added tokens, a few of which may lie beyond the rows (Gemma 3 1B)
    if base > rows:
        raise ValueError(f"vocabulary mismatch: the tokenizer has {base} ids, the target's embedding {rows} rows")
    return min(rows, max(tokenizer.get_vocab().values()) + 1)


def find_stop_ids(target: PreTrainedModel, text_config: Any, tokenizer: Any, rows: int) -> tuple[int, ...]:
    """The union of what generation config, config and tokenizer call the end of a text."""
    sources = {
        "generation_config.eos_token_id": getattr(target.generation_config, "eos_token_id", None),
        "config.eos_token_id": getattr(target.config, "eos_token_id", None),
        "text_config.eos_token_id": getattr(text_config, "eos_token_id", None),
        "tokenizer.eos_token_id": getattr(tokenizer, "eos_token_id", None),
    }
    ids: set[int] = set()
    for where, value in sources.items():
        for i in value if isinstance(value, (list, tuple)) else [value]:
            if i is None:
                continue
            if not 0 <= i < rows:
                raise ValueError(f"{where} names stop id {i}, outside the target's ids (0..{rows - 1})")
            ids.add(int(i))
    return tuple(sorted(ids))


def check_drafter(
    drafter: Drafter,
    *,
    hidden: int,
    layers: int,
    rows: int,
    real: int | None,
    stop_token_ids: tuple[int, ...],
) -> None:
    """Sizes, taps, mask id and vocabulary against the target's. Warns when the mask id is a stop id.

    real: how many ids the tokenizer knows, None without one.
    """
    s = drafter.settings
    own = drafter.model.config.hidden_size
    if own != hidden:
        raise ValueError(f"the drafter's hidden_size is {own}, the target's {hidden}: they are no pair")
    for tap in s.target_layer_ids:
        if tap >= layers:
            raise ValueError(
                f"{s.sources['target_layer_ids']} names layer {tap}, but the target has {layers} layers "
                f"(0 to {layers - 1})"
            )
    if s.num_target_layers not in (None, layers):
        raise ValueError(
            f"the drafter was made for a target of {s.num_target_layers} layers "
            f"({s.sources['num_target_layers']}), this one has {layers}: they are no pair"
        )
    mask = f"{s.sources['mask_token_id']} is {s.mask_token_id}"
    if not 0 <= s.mask_token_id < rows:
        raise ValueError(f"{mask}, outside the target's embedding (0..{rows - 1})")
    if s.vocab_size is not None and not (real or 0) <= s.vocab_size <= rows:
        raise ValueError(
            f"vocabulary mismatch: the drafter was made for {s.vocab_size} ids ({s.sources['vocab_size']}), "
            f"the target has {rows} rows" + (f", {real} of them ids of its tokenizer" if real else "")
        )
    if drafter.d2t is not None and int(drafter.d2t.max()) >= rows:
        raise ValueError(f"the drafter's d2t map names id {int(drafter.d2t.max())}, the target has {rows} rows")
    if s.mask_token_id in stop_token_ids:
        warnings.warn(
            f"{mask}, a stop id of the target: check the drafter's config, drafts are likely to be poor",
            stacklevel=3,
        )
