"""Plain attention under a mask of our own, as a function in Transformers' registry: the referee of attention layers.

In float64 it is what a layer should give, in the model's own dtype it is what rounding alone costs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from ddlab.comparing.rows import Sight

NAME = "ddlab_reference"  # in Transformers' registry
AT_ONCE = 256  # rows whose scores are held at a time


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sight: Sight,
    scaling: float,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Softmax attention as it is written down, some rows at a time.

    Args:
        query: [1, heads, n, dim]; key, value: [1, kv_heads, keys, dim]; sinks: [heads], a logit with no value.

    Returns:
        [1, n, heads, dim]. Every step in the dtype of ``query``, the softmax in float32 or better: what an eager model
        does.
    """
    groups, seen = query.shape[1] // key.shape[1], torch.from_numpy(sight.keys).to(query.device)
    key, value = (x[:, :, -seen.shape[1] :].repeat_interleave(groups, dim=1) for x in (key, value))
    wide = torch.promote_types(query.dtype, torch.float32)
    out = []
    for first in range(0, query.shape[2], AT_ONCE):
        part, mine = query[:, :, first : first + AT_ONCE], seen[first : first + AT_ONCE]  # [rows, keys]
        scores = (part @ key.transpose(2, 3)) * scaling  # [1, heads, rows, keys]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores + mine.to(scores.dtype) if sight.added else scores.masked_fill(~mine, -torch.inf)
        if sinks is not None and sight.sinks:
            column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = scores.softmax(-1, dtype=wide).to(query.dtype)[..., : key.shape[2]]
        out.append(weights @ value)
    return torch.cat(out, dim=2).transpose(1, 2).contiguous()


def _forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Sight,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = getattr(module, "sinks", None) if s_aux is None else s_aux
    return attend(query, key, value, attention_mask, scaling, sinks, softcap), None


AttentionInterface.register(NAME, _forward)
