"""What the trainings have in common: of a target from nothing, of its loops away, and in part of a drafter."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from head_loss import HeadLoss
from torch import Tensor, nn


def fresh_target(config: Path, seed: int) -> Any:
    """A Qwen3_5ForCausalLM of that config.json with random float32 weights.

    The steps dt of the delta rule begin log-uniform in 0.001 to 0.1: with Transformers' `dt_bias` of 1 a layer forgets
    almost at once. Matrices that write to the residual stream begin smaller, by 1 / sqrt(2 * layers).
    """
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(seed)
    settings = Qwen3_5TextConfig(**json.loads(config.read_text(encoding="utf-8")))
    model = Qwen3_5ForCausalLM(settings).float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.copy_(torch.empty_like(p).uniform_(1, 16).log())
            elif name.endswith("dt_bias"):
                dt = torch.empty_like(p).uniform_(math.log(0.001), math.log(0.1)).exp()
                p.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus of it is dt
            elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                p.mul_(1 / math.sqrt(2 * settings.num_hidden_layers))
    return model


def optimizers(model: Any, rate: float) -> list[torch.optim.Optimizer]:
    """Matrices by Muon (steps of AdamW's size); the embedding, the convolutions and what has one dimension by AdamW."""
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    gains = [p for p in model.parameters() if p.ndim != 2]
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": [embedding], "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return [muon, torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))]


@dataclass
class Trainer:
    """Losses of a model in float32. amp: what it computes in; None: bfloat16 by autocast on CUDA, else float32."""

    model: Any
    amp: torch.dtype | None = None
    piece: int = 8192  # tokens whose logits are in memory at a time

    def __post_init__(self) -> None:
        if self.amp is None:
            self.amp = torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def device(self) -> torch.device:
        return self.model.device

    def _loss(self, ids: Tensor, weight: Tensor, unlikely: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """ids [b, t], weight and unlikely of ids[:, 1:], [b, t - 1] -> weighted sum of losses, losses [b, t - 1]."""
        with torch.autocast(self.device.type, self.amp, enabled=self.amp != torch.float32):
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        flags = torch.zeros_like(weight, dtype=torch.bool) if unlikely is None else unlikely
        head = self.model.get_output_embeddings().weight
        inputs = hidden[:, :-1].flatten(0, 1), head, ids[:, 1:].flatten(), weight.flatten(), flags.flatten()
        total, losses = HeadLoss.apply(*inputs, self.amp, self.piece)
        return total, losses.view(weight.shape)

    def likelihood(self, ids: Tensor, length: Tensor) -> Tensor:
        """Mean -log p of a token."""
        weight = (torch.arange(1, ids.shape[1], device=ids.device)[None] < length[:, None]).float()
        return self._loss(ids, weight / weight.sum())[0]

    def graded(self, ids: Tensor, good: Tensor, bad: Tensor, weight: tuple[float, float]) -> Tensor:
        """weight[0] * mean -log p of the good tokens + weight[1] * mean -log(1 - p) of the bad ones.

        good, bad: bool [b, t], of which the first column does not count.
        """
        shares = [w * mark[:, 1:] / mark[:, 1:].sum().clamp(min=1) for w, mark in zip(weight, (good, bad), strict=True)]
        return self._loss(ids, shares[0] + shares[1], bad[:, 1:])[0]

    @torch.no_grad()
    def losses(self, ids: Tensor) -> Tensor:
        """-log p of every token but the first, [b, t - 1]."""
        return self._loss(ids, torch.zeros(ids[:, 1:].shape, device=ids.device))[1]


def schedule(at: int, steps: int | None, up: int) -> float:
    """Factor of the learning rate: `up` steps up, level, then the last 60 % of the run down to 2 % along a cosine."""
    down = 0.0 if steps is None else min(1.0, max(0.0, (at / steps - 0.4) / 0.6))
    return min(1.0, (at + 1) / up) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * down)))


def step(model: nn.Module, optimizer: list[torch.optim.Optimizer], rates: list[list[float]], factor: float) -> Tensor:
    """One step at `factor` of the rates, with what the gradients hold; -> their norm before clipping at 1."""
    for o, base in zip(optimizer, rates, strict=True):
        for group, rate in zip(o.param_groups, base, strict=True):
            group["lr"] = rate * factor
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for o in optimizer:
        o.step()
        o.zero_grad(set_to_none=True)
    return norm


def rates_of(optimizer: list[torch.optim.Optimizer]) -> list[list[float]]:
    return [[group["lr"] for group in o.param_groups] for o in optimizer]


def save_target(model: Any, tokenizer: Any, folder: Path) -> Any:
    """bfloat16 weights, config and tokenizer; -> the model as it was saved, in float32."""
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    rounded.config.dtype = torch.bfloat16
    rounded.generation_config.eos_token_id = rounded.config.eos_token_id
    rounded.generation_config.pad_token_id = rounded.config.pad_token_id
    rounded.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return rounded.float().eval()
