"""The two drafters' configs in z-lab's format, and fresh weights for them."""

from __future__ import annotations

import math
from typing import Any

import torch

from ddlab.checkpoint import RENAMED

_COMMON: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 16,
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "use_sliding_window": True,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
_IN_BLOCK = {"sliding_attention": "causal", "full_attention": "bidirectional"}
_PAIRS: dict[str, dict[str, Any]] = {
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "num_target_layers": 30,
        "vocab_size": 49152,
        "sliding_window": 128,
        "max_window_layers": 4,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "dflash_config": {"mask_token_id": 16, "target_layer_ids": [1, 8, 15, 22, 28]},
    },
    "tiny-hybrid": {
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_target_layers": 8,
        "vocab_size": 8192,
        "sliding_window": 64,
        "max_window_layers": 4,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 2, 4, 5, 6]},
    },
}


def pair_config(pair: str) -> dict[str, Any]:
    """The drafter's config.json, with the in-block attention spelled out (see docs of `Drafter.masks`)."""
    config = {**_COMMON, **_PAIRS[pair]}
    config["dflash_config"] = {**config["dflash_config"], "block_attention": _IN_BLOCK}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    return config


def fresh_state(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Random weights under z-lab's names: normal, std 0.02, smaller where a layer writes to the residual stream."""
    draw = torch.Generator().manual_seed(seed)
    hidden, inter, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layers = config["num_hidden_layers"]
    shapes = {"fc": (hidden, hidden * len(config["dflash_config"]["target_layer_ids"]))}
    gains = {"hidden_norm": hidden, "norm": hidden}
    for i in range(layers):
        at = f"layers.{i}."
        shapes |= {f"{at}self_attn.q_proj": (queries, hidden), f"{at}self_attn.o_proj": (hidden, queries)}
        shapes |= {f"{at}self_attn.{n}_proj": (keys, hidden) for n in "kv"}
        shapes |= {f"{at}mlp.{n}_proj": (inter, hidden) for n in ("gate", "up")}
        shapes[f"{at}mlp.down_proj"] = (hidden, inter)
        gains |= {f"{at}self_attn.{n}_norm": head for n in "qk"}
        gains |= {f"{at}{n}_layernorm": hidden for n in ("input", "post_attention")}
    state = {f"{name}.weight": torch.ones(size) for name, size in gains.items()}
    for name, shape in shapes.items():
        writes = name.endswith(("o_proj", "down_proj"))
        std = 0.02 / math.sqrt(2 * layers) if writes else 0.02
        state[f"{name}.weight"] = torch.randn(shape, generator=draw) * std
    return state


def zlab_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of Transformers' class under z-lab's names."""
    back = {ours: theirs for theirs, ours in RENAMED.items()}
    return {back.get(name, name): tensor.contiguous() for name, tensor in state.items()}
