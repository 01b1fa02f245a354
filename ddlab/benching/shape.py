"""Pairs of a published model's shape with random weights: what a round costs there does not depend on what it says.

Sizes of Qwen3.6-27B's text model and of z-lab/Qwen3.6-27B-DFlash, from their config files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from ddlab.drafter import Drafter
from ddlab.names import one_of
from ddlab.pair import Pair


@dataclass(frozen=True)
class Shape:
    """target: arguments of ``Qwen3_5TextConfig``; drafter: a config.json as z-lab publishes it."""

    target: dict[str, Any]
    drafter: dict[str, Any]


SHAPES = {
    "qwen3.6-27b": Shape(
        target=dict(
            vocab_size=248320,
            hidden_size=5120,
            intermediate_size=17408,
            num_hidden_layers=64,  # every fourth is full attention, the others are gated delta nets
            num_attention_heads=24,
            num_key_value_heads=4,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=48,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_conv_kernel_dim=4,
            max_position_embeddings=262144,
            tie_word_embeddings=False,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=1e7,
                partial_rotary_factor=0.25,
                mrope_section=[11, 11, 10],
                mrope_interleaved=True,
            ),
        ),
        drafter=dict(
            architectures=["DFlashDraftModel"],
            model_type="qwen3",
            hidden_size=5120,
            intermediate_size=17408,
            num_hidden_layers=5,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            layer_types=["sliding_attention"] * 4 + ["full_attention"],
            sliding_window=2048,
            use_sliding_window=True,
            rope_theta=1e7,
            rms_norm_eps=1e-6,
            max_position_embeddings=262144,
            vocab_size=248320,
            num_target_layers=64,
            block_size=16,
            dflash_config=dict(mask_token_id=248070, target_layer_ids=[1, 16, 31, 46, 61]),
        ),
    )
}


def random_pair(shape: str | Shape, device: torch.device | str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Pair:
    """A pair of that shape, made on the device: seed 0, no tokenizer, no checkpoint.

    Every product keeps its input's scale, so activations stay finite through any number of layers.

    Raises:
        ValueError: an unknown name, or a device without room for the weights.
    """
    if isinstance(shape, str):
        one_of("shape", shape, SHAPES)
        name, shape = shape, SHAPES[shape]
    else:
        name = "own shape"
    device = torch.device(device)
    _check_room(name, shape, device, dtype)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device), torch.no_grad():
        torch.manual_seed(0)
        config = Qwen3_5TextConfig(**shape.target, bos_token_id=None, eos_token_id=None, pad_token_id=None)
        target = Qwen3_5ForCausalLM._from_config(config, dtype=dtype)
        for weight in target.parameters():
            if weight.ndim >= 2:
                _fill(weight)
        tensors = {key: _fill(torch.empty(size, dtype=dtype)) for key, size in drafter_tensors(shape.drafter)}
    target.generation_config.eos_token_id = None
    drafter = Drafter.from_state(shape.drafter, tensors, device=device)
    drafter.name = f"{name}, random weights"
    source = {"target": name, "weights": "random, seed 0", "drafter": {"name": name, "weights": "random, seed 0"}}
    return Pair(target.eval().requires_grad_(False), drafter, name=f"{name}, random weights", source=source)


def drafter_tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and sizes of a z-lab checkpoint's tensors."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    yield "fc.weight", (hidden, len(config["dflash_config"]["target_layer_ids"]) * hidden)
    yield "hidden_norm.weight", (hidden,)
    yield "norm.weight", (hidden,)
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for i in range(config["num_hidden_layers"]):
        yield from ((f"layers.{i}.{part}.weight", size) for part, size in layer.items())


def _fill(weight: Tensor) -> Tensor:
    """Random where it is a matrix, with rows of length 1 on average; ones where it is a norm's."""
    return weight.normal_(0, 1 / math.sqrt(weight[0].numel())) if weight.ndim >= 2 else weight.fill_(1)


def _check_room(name: str, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
    with torch.device("meta"):
        target = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**shape.target))
    numbers = sum(p.numel() for p in target.parameters())
    numbers += sum(math.prod(size) for _, size in drafter_tensors(shape.drafter))
    need = numbers * dtype.itemsize
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"{name} takes {need / 2**30:.0f} GiB of a GPU's memory, and PyTorch sees no GPU here")
        free = torch.cuda.mem_get_info(device)[0]
        if free < 1.1 * need:
            raise ValueError(
                f"{name} takes {need / 2**30:.0f} GiB and some to work with; {device} has {free / 2**30:.0f}"
            )
