"""The loss of a target's hidden states through its own head, likelihood and unlikelihood, logits in pieces only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CERTAIN = 1e-5  # 1 - p below which the unlikelihood is cut off


class HeadLoss(torch.autograd.Function):
    """hidden [n, h], head [v, h], labels [n], weight [n], unlikely bool [n] -> sum of weight * loss, loss [n].

    A token's loss is -log p, or -log(1 - p) where it is unlikely (Welleck et al., 2020). The gradient is made in the
    forward, so that logits live for `piece` tokens only; they are products in `dtype`, all else is float32 (float64
    for float64).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        weight: Tensor,
        unlikely: Tensor,
        dtype: torch.dtype,
        piece: int,
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(dtype, torch.float32)
        h, matrix = hidden.to(dtype), head.to(dtype)
        of_hidden = torch.empty_like(h)
        of_head = torch.zeros(head.shape, dtype=exact, device=head.device)
        loss = torch.empty(len(h), dtype=exact, device=h.device)
        for i in range(0, len(h), piece):
            part = slice(i, i + piece)
            p = torch.log_softmax((h[part] @ matrix.T).to(exact), dim=1)
            label = labels[part, None]
            log_p = p.gather(1, label)
            p = p.exp_()
            own = p.gather(1, label)
            rest = (1 - own).clamp(min=CERTAIN)
            away = unlikely[part, None]
            loss[part] = torch.where(away, -rest.log(), -log_p)[:, 0]
            p.scatter_(1, label, own - 1)  # d(-log p) / d logits
            p *= weight[part, None].to(exact) * torch.where(away, -own / rest, 1.0)
            p = p.to(dtype)
            of_hidden[part] = p @ matrix
            of_head += p.T @ h[part]
        ctx.save_for_backward(of_hidden.to(hidden.dtype), of_head.to(head.dtype))
        ctx.mark_non_differentiable(loss)
        return (loss * weight).sum(), loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        of_hidden, of_head = ctx.saved_tensors
        return of_hidden * grads[0], of_head * grads[0], None, None, None, None, None
