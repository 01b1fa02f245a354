"""Attention functions with a fault each, registered in Transformers for the length of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, sinks: Tensor | None = None) -> Any:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(2, 3) * scaling).float() if q.dtype != torch.float64 else q @ k.transpose(2, 3) * scaling
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]].to(q.dtype)
    return (weights @ v).transpose(1, 2).contiguous(), None


def _causal(q: Tensor, k: Tensor) -> Tensor:
    n, keys = q.shape[2], k.shape[2]
    return torch.full((n, keys), -torch.inf, dtype=q.dtype).triu(keys - n + 1)[None, None]


def no_window(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **more: Any) -> Any:
    """Sliding layers attend as full ones: the mask is not looked at, and neither is the window."""
    if more.get("sliding_window") is not None:
        mask = _causal(q, k)
    return plain(q, k, v, mask, scaling, more.get("s_aux"))


def no_sinks(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **swallowed: Any) -> Any:
    """Takes any keyword and does not use it, so attention sinks are gone."""
    return plain(q, k, v, mask, scaling)


def as_bool(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **more: Any) -> Any:
    """Eager with a boolean mask: it is added, as ones and zeros."""
    return plain(q, k, v, None if mask is None else mask == 0, scaling, more.get("s_aux"))


def as_chain(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **more: Any) -> Any:
    """A causal kernel: the rows of a tree are read as a chain."""
    return plain(q, k, v, _causal(q, k), scaling, more.get("s_aux"))


def old_kernel(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, dropout: Any, scaling: Any):
    """PyTorch's CPU flash kernel behind a signature without `sliding_window` and `s_aux`, as an older release had it.

    No "flash" in its name: Transformers would take it for the flash-attn package.
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, False, scale=scaling)[0]
    return out.transpose(1, 2).contiguous(), None


FUNCTIONS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (no_window, no_sinks, as_bool, as_chain, old_kernel)}


@contextmanager
def registered(*names: str) -> Iterator[None]:
    """These functions, under their own names, with eager's masks."""
    with ExitStack() as undo:
        for name in names:
            AttentionInterface.register(name, FUNCTIONS[name])
            AttentionMaskInterface.register(name, eager_mask)
            for registry in (AttentionInterface, AttentionMaskInterface):
                undo.callback(registry._global_mapping.pop, name)
        yield
