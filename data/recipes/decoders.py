"""One token of many rows at a time, each row at a place of its own: the target's forward for sampling answers.

Everything lies in buffers that never move, so that one CUDA graph serves every step. The weights are read where the
model has them: a model that is trained meanwhile is decoded as it is. Knows two layers of Transformers: attention (of
Llama and Qwen3.5) and the gated delta net of Qwen3.5. tests/test_recipes_target.py holds it to the model's own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from step_kernels import attend, delta_step, kernels_agree
from torch import Tensor
from torch.nn import functional as F


class StaticDecoder:
    """`step(tokens, positions)` -> logits; the text before a position must have gone in one by one.

    model: Llama or Qwen3.5 for causal language modelling. rows: texts at a time. length: positions of a text.
    prefix: ids before every text (the chat template's system turn), run once; a row's own text begins at position
    `start`. At position 0 a row forgets its recurrent state; a prefix for a model that has one is refused.
    """

    def __init__(self, model: Any, rows: int, length: int, prefix: Sequence[int] = ()) -> None:
        self.model, self.rows, self.length, self.start = model, rows, length, len(prefix)
        self.device, inner = model.device, model.model
        config = model.config
        linear = any(hasattr(layer, "linear_attn") for layer in inner.layers)
        if prefix and linear:
            raise ValueError("a prefix for a model with recurrent layers: put it before each text instead")
        with torch.no_grad():
            places = torch.arange(length, device=self.device)[None]
            tables = inner.rotary_emb(torch.zeros(1, device=self.device), places)
            self.cos, self.sin = (table.view(length, -1) for table in tables)  # [length, rotated dims]
        sizes = [config.head_dim] + ([config.linear_key_head_dim, config.linear_value_head_dim] if linear else [])
        self.fused = all(size >= 16 and size & (size - 1) == 0 for size in sizes) and kernels_agree(self.device)
        self.parts: list[AttentionStep | DeltaStep] = [
            DeltaStep(layer.linear_attn, rows, self.fused)
            if hasattr(layer, "linear_attn")
            else AttentionStep(layer.self_attn, config, rows, length, self.fused)
            for layer in inner.layers
        ]
        for place, token in enumerate(prefix):
            ids = torch.full((rows,), token, device=self.device)
            self.step(ids, torch.full_like(ids, place))

    @torch.no_grad()
    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens, positions: int64 [rows] -> logits float32 [rows, vocabulary]."""
        inner = self.model.model
        x = inner.embed_tokens(tokens)  # [rows, hidden]
        rotary = self.cos[positions].to(x.dtype)[:, None], self.sin[positions].to(x.dtype)[:, None]
        for layer, part in zip(inner.layers, self.parts, strict=True):
            x = x + part(layer.input_layernorm(x), positions, rotary)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.lm_head(inner.norm(x)).float()


class AttentionStep:
    """Attention of one new token a row over the row's own keys [rows, kv heads, length, dim]."""

    def __init__(self, module: Any, config: Any, rows: int, length: int, fused: bool) -> None:
        self.module = module
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim, self.fused = config.head_dim, fused
        like = self.module.k_proj.weight
        self.keys = torch.zeros(rows, self.kv_heads, length, self.dim, dtype=like.dtype, device=like.device)
        self.values = torch.zeros_like(self.keys)
        self.row = torch.arange(rows, device=like.device)
        self.gated = self.module.q_proj.out_features == 2 * self.heads * self.dim  # Qwen3.5

    def __call__(self, x: Tensor, positions: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        m, rows = self.module, len(x)
        q, gate = m.q_proj(x).view(rows, self.heads, -1), None
        if self.gated:
            q, gate = q.chunk(2, dim=-1)
        k = m.k_proj(x).view(rows, self.kv_heads, self.dim)
        if hasattr(m, "q_norm"):
            q, k = m.q_norm(q), m.k_norm(k)
        self.keys[self.row, :, positions] = _rotated(k, *rotary)
        self.values[self.row, :, positions] = m.v_proj(x).view(rows, self.kv_heads, self.dim)
        q = _rotated(q, *rotary).view(rows, self.kv_heads, -1, self.dim)
        out = attend(q, self.keys, self.values, positions, self.fused).reshape(rows, -1)
        if gate is not None:
            out = out * torch.sigmoid(gate.reshape(rows, -1))
        return m.o_proj(out)


class DeltaStep:
    """One step of the gated delta rule a row; window [rows, channels, kernel], state float32 [rows, heads, k, v]."""

    def __init__(self, module: Any, rows: int, fused: bool) -> None:
        m = self.module = module
        like = m.in_proj_qkv.weight
        self.window = torch.zeros(rows, m.conv_dim, m.conv_kernel_size, dtype=like.dtype, device=like.device)
        self.state = torch.zeros(rows, m.num_v_heads, m.head_k_dim, m.head_v_dim, device=like.device)
        self.fused = fused

    def __call__(self, x: Tensor, positions: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        m = self.module
        rows, kept = len(x), (positions > 0)[:, None]
        self.window.copy_(torch.cat([self.window[:, :, 1:] * kept[:, :, None], m.in_proj_qkv(x)[:, :, None]], dim=2))
        mixed = F.silu((self.window * m.conv1d.weight[:, 0]).sum(2)).float()
        q, k, v = mixed.split([m.key_dim, m.key_dim, m.value_dim], dim=1)
        q, k = (y.view(rows, m.num_k_heads, m.head_k_dim) for y in (q, k))
        q, k = (y * torch.rsqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        decay = torch.exp(-m.A_log.float().exp() * F.softplus(m.in_proj_a(x).float() + m.dt_bias)) * kept
        beta = m.in_proj_b(x).float().sigmoid()  # [rows, v heads], as decay
        v = v.view(rows, m.num_v_heads, m.head_v_dim)
        out = delta_step(self.state, q * m.head_k_dim**-0.5, k, v, decay, beta, self.fused).to(x.dtype)
        z = m.in_proj_z(x).view(-1, m.head_v_dim)
        return m.out_proj(m.norm(out.reshape(-1, m.head_v_dim), z).view(rows, -1))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on the first dims of x [rows, heads, dim], as many as cos [rows, 1, dims] has."""
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    a, b = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-b, a], dim=-1) * sin, rest], dim=-1)
