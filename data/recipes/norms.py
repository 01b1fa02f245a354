"""RMSNorm as one kernel in a model of its own; the classes of Transformers spell it in five."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


def _llama(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm.weight.to(x.dtype), norm.variance_epsilon).to(x.dtype)


def _qwen(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), 1 + norm.weight.float(), norm.eps).to(x.dtype)


def _qwen_gated(norm: Any, x: Tensor, gate: Tensor) -> Tensor:
    normed = F.rms_norm(x.float(), (x.shape[-1],), norm.weight.float(), norm.variance_epsilon)
    return (normed * F.silu(gate.float())).to(x.dtype)


_FORWARDS: dict[str, Any] = {
    "LlamaRMSNorm": _llama,
    "MuseGlimmerAssistantRMSNorm": _llama,
    "Qwen3_5RMSNorm": _qwen,
    "Qwen3_5RMSNormGated": _qwen_gated,
}


def fuse_norms(model: nn.Module) -> None:
    """The norms of Llama, Qwen3.5 and the drafter, in this model alone."""
    for module in model.modules():
        if (forward := _FORWARDS.get(type(module).__name__)) is not None:
            module.forward = forward.__get__(module)
