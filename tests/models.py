"""Tiny models, drafters and a tokenizer built in the process: seed 0, evaluation mode, read only, no network.

Weights are scaled so that the models are functions worth testing: logits differ clearly by context, the gated
delta rule remembers (steps of 0.001 to 0.1), attention sinks are not zero, norms are not ones.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ddlab.drafter import Drafter

VOCAB = 97
KINDS = (
    "dense",
    "tied",
    "llama",
    "swa",
    "gemma3",
    "hybrid",
    "hybrid8",
    "vlm",
    "qwen3_moe",
    "qwen3_5_moe",
    "qwen3_next",
    "gpt_oss",
)

_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_LINEAR: dict[str, Any] = dict(
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
    rope_parameters={**_ROPE, "partial_rotary_factor": 0.5},
)
_MROPE = {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
_EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


def target_config(kind: str) -> Any:
    """The configuration of `target(kind)`."""
    t = transformers
    match kind:
        case "dense" | "tied":
            return t.Qwen3Config(**{**_SIZES, "rope_parameters": _ROPE, "tie_word_embeddings": kind == "tied"})
        case "llama":
            return t.LlamaConfig(**_SIZES, rope_parameters=_ROPE)
        case "swa":
            return t.Qwen3Config(
                **_SIZES,
                rope_parameters=_ROPE,
                layer_types=_ALTERNATING,
                use_sliding_window=True,
                sliding_window=8,
            )
        case "gemma3":
            sizes = {**_SIZES, "pad_token_id": 0, "tie_word_embeddings": True}
            return t.Gemma3TextConfig(
                **sizes,
                layer_types=_ALTERNATING,
                sliding_window=8,
                query_pre_attn_scalar=16,
                final_logit_softcapping=4.0,
            )
        case "hybrid" | "hybrid8":
            sizes = {
                **_SIZES,
                **_LINEAR,
                "rope_parameters": _MROPE,
                "num_hidden_layers": 8 if kind == "hybrid8" else 4,
            }
            return t.Qwen3_5TextConfig(**sizes)
        case "vlm":
            vision = dict(
                depth=1, hidden_size=32, intermediate_size=32, num_heads=2, patch_size=4, out_hidden_size=64,
                num_position_embeddings=16,
            )  # fmt: skip
            special = dict(image_token_id=93, video_token_id=94, vision_start_token_id=95, vision_end_token_id=96)
            text = target_config("hybrid").to_dict()
            return t.Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False, **special)
        case "qwen3_moe":
            return t.Qwen3MoeConfig(**_SIZES, **_EXPERTS, rope_parameters=_ROPE, norm_topk_prob=True)
        case "qwen3_5_moe":
            sizes = {k: v for k, v in _SIZES.items() if k != "intermediate_size"}
            merged = {**sizes, **_LINEAR, **_EXPERTS, "rope_parameters": _MROPE}
            return t.Qwen3_5MoeTextConfig(**merged, shared_expert_intermediate_size=32)
        case "qwen3_next":
            return t.Qwen3NextConfig(**_SIZES, **_LINEAR, **_EXPERTS, shared_expert_intermediate_size=32)
        case "gpt_oss":
            return t.GptOssConfig(
                **_SIZES,
                num_local_experts=4,
                num_experts_per_tok=2,
                layer_types=_ALTERNATING,
                sliding_window=8,
                rope_parameters=_ROPE,
            )
    raise ValueError(f"unknown kind {kind!r}; known: {', '.join(KINDS)}")


_CLASSES = {
    "dense": "Qwen3ForCausalLM",
    "tied": "Qwen3ForCausalLM",
    "swa": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "hybrid": "Qwen3_5ForCausalLM",
    "hybrid8": "Qwen3_5ForCausalLM",
    "vlm": "Qwen3_5ForConditionalGeneration",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}


def fresh_target(kind: str, dtype: torch.dtype = torch.float32, attention: str | None = None) -> PreTrainedModel:
    """A new target with the same weights every time, for tests that change it."""
    config = target_config(kind)
    if attention is not None:
        config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, _CLASSES[kind])(config)
        randomize(model)
    model.generation_config.eos_token_id = None
    return model.to(dtype).eval().requires_grad_(False)


@cache
def target(kind: str, dtype: torch.dtype = torch.float32, attention: str | None = None) -> PreTrainedModel:
    """The shared, read-only target of one kind (see KINDS)."""
    return fresh_target(kind, dtype, attention)


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Weights in place, in the order of `named_parameters`, from torch's global generator."""
    scaled = "Gemma" in type(model).__name__  # multiplies its embedding rows by sqrt(hidden)
    for name, p in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "A_log":
            p.copy_(torch.empty_like(p).uniform_(1.0, 16.0).log())
        elif leaf == "dt_bias":  # inverse softplus of a step drawn log-uniformly from 0.001 to 0.1
            dt = torch.empty_like(p).uniform_(math.log(0.001), math.log(0.1)).exp()
            p.copy_(dt + torch.log(-torch.expm1(-dt)))
        elif leaf == "sinks":
            p.normal_(0.0, 1.0)
        elif "conv1d" in name:
            p.normal_(0.0, 0.5)
        elif "embed_tokens" in name or "lm_head" in name:
            p.normal_(0.0, 0.12 if scaled else 0.3)
        elif p.ndim == 1:  # norms keep their centre (one, or zero where the module adds one), biases have none
            p.add_(torch.randn_like(p) * 0.1)
        else:
            p.normal_(0.0, 1.2 / math.sqrt(p.shape[-1]))


def drafter_config(
    model: PreTrainedModel,
    *,
    block: int = 5,
    taps: tuple[int, ...] = (1, 3),
    layers: int = 2,
    layer_types: tuple[str, ...] | None = None,
    window: int = 8,
    mask_token_id: int = 0,
) -> dict[str, Any]:
    """A config.json in the layout of z-lab's newer checkpoints that fits the target; default: full layers."""
    text = model.config.get_text_config()
    kinds = list(layer_types or ("full_attention",) * layers)
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": block,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "hidden_size": text.hidden_size,
        "intermediate_size": 96,
        "num_hidden_layers": len(kinds),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_target_layers": text.num_hidden_layers,
        "vocab_size": text.vocab_size,
        "layer_types": kinds,
        "use_sliding_window": "sliding_attention" in kinds,
        "sliding_window": window,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": list(taps)},
    }


def drafter_state(config: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Random tensors under z-lab's names for a config made by `drafter_config`."""
    h, m, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    taps = config.get("dflash_config", config)["target_layer_ids"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, len(taps) * h),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for i in range(config["num_hidden_layers"]):
        attn = {
            "q_proj": (q, h),
            "k_proj": (kv, h),
            "v_proj": (kv, h),
            "o_proj": (h, q),
            "q_norm": (d,),
            "k_norm": (d,),
        }
        mlp = {"gate_proj": (m, h), "up_proj": (m, h), "down_proj": (h, m)}
        shapes |= {f"layers.{i}.self_attn.{k}.weight": s for k, s in attn.items()}
        shapes |= {f"layers.{i}.mlp.{k}.weight": s for k, s in mlp.items()}
        shapes |= {f"layers.{i}.{k}.weight": (h,) for k in ("input_layernorm", "post_attention_layernorm")}
    rng = torch.Generator().manual_seed(seed)
    return {
        name: (
            1 + 0.1 * torch.randn(shape, generator=rng)
            if len(shape) == 1
            else torch.randn(shape, generator=rng) * 1.2 / math.sqrt(shape[-1])
        ).to(dtype)
        for name, shape in shapes.items()
    }


def random_drafter(model: PreTrainedModel, *, seed: int = 0, **settings: Any) -> Drafter:
    """A random DFlash drafter for the target, in the target's dtype; settings as in `drafter_config`."""
    config = drafter_config(model, **settings)
    return Drafter.from_state(config, drafter_state(config, seed, model.dtype))


@torch.no_grad()
def path_logits(model: PreTrainedModel, ids: Any) -> torch.Tensor:
    """Logits [len(ids), vocab] of one plain forward over the ids, no cache: the oracle for a path."""
    row = torch.as_tensor([int(i) for i in ids], device=model.get_input_embeddings().weight.device)
    return model(input_ids=row[None], use_cache=False).logits[0]


def plain_greedy(model: PreTrainedModel, ids: Any, n: int) -> list[int]:
    """The n tokens the target chooses greedily after ids, each by a full forward with no cache."""
    text = [int(i) for i in ids]
    for _ in range(n):
        text.append(int(path_logits(model, text)[-1].argmax()))
    return text[len(text) - n :]


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
_LINES = [
    "What is a tree? The root of a tree is a node, and a node has a parent.",
    "user assistant system",
    "A draft, a path, one more token: 2 + 3 = 5.",
]


@cache
def tokenizer(size: int = VOCAB, chat: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained here, at most `size` ids, with `<think>`, `<|im_end|>` (its stop token).

    Below 270 ids the alphabet is what the training lines hold (other bytes are dropped), then all 256 bytes.
    With chat, it has a ChatML template that opens or skips a thinking part by `enable_thinking`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet() if size >= 270 else []
    lines = [*_LINES, "\n\n"]
    bpe.train_from_iterator(
        lines,
        trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|im_start|>")
    fast.chat_template = CHAT_TEMPLATE if chat else None
    return fast
