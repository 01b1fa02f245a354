"""The distillation loss of drafted slots through the target's frozen head: plain PyTorch, and fused with Triton.

Per slot: soft * (cross entropy with the target's distribution) + (1 - soft) * (cross entropy with the text's token).
A tree needs good ranks below the first, hence the first term; the second is what the walk tests.

Slots are weighted by how likely a round is to get there. reach_j = product over the slots i before j of sqrt(p_i), p_i
being the drafter's probability of the text's token (no gradient flows through it): a root, because a tree goes on
where a chain has ended. Half of the weight is the fixed decay exp(-j / decay) instead, so that late slots are never
forgotten. A block's weights sum to 1, so that an easy block (a loop, a list) counts no more than a hard one.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # the plain form is all there is
    triton = None


def slot_weights(log_p: torch.Tensor, valid: torch.Tensor, decay: float = 4.0) -> torch.Tensor:
    """log_p [blocks, depth] of the text's tokens, valid [blocks, depth] -> weights [blocks, depth], rows sum to 1."""
    reach = (0.5 * (log_p.cumsum(1) - log_p)).exp()
    fixed = torch.exp(-torch.arange(log_p.shape[1], device=log_p.device) / decay)
    shares = [w * valid for w in (reach, fixed.expand_as(reach))]
    return sum(0.5 * w / w.sum(1, keepdim=True).clamp(min=1e-9) for w in shares)  # type: ignore[return-value]


class Distill(torch.autograd.Function):
    """hidden, teacher [blocks, depth, hidden], head [rows, hidden], labels and valid [blocks, depth] ->

    (mean loss of a block, cross entropy [blocks, depth], hit [blocks, depth]). The gradient is made in the forward, so
    that logits live for `chunk` slots only. fused: the Triton kernels.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        teacher: torch.Tensor,
        head: torch.Tensor,
        labels: torch.Tensor,
        valid: torch.Tensor,
        soft: float,
        chunk: int,
        fused: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        blocks, depth, size = hidden.shape
        per = max(1, chunk // depth)  # blocks at a time: a block's weights need all its slots
        gradient = torch.empty(hidden.shape, dtype=head.dtype, device=hidden.device)
        entropy = torch.empty(blocks, depth, device=hidden.device)
        hit = torch.empty(blocks, depth, device=hidden.device)
        total = torch.zeros((), device=hidden.device)
        kernels = _fused if fused else _plain
        for i in range(0, blocks, per):
            part = slice(i, min(i + per, blocks))
            student = hidden[part].reshape(-1, size).to(head.dtype) @ head.T  # [slots, rows]
            target = teacher[part].reshape(-1, size).to(head.dtype) @ head.T
            hard, softer, hits, differentiate = kernels(student, target, labels[part].reshape(-1), soft)
            shape = valid[part].shape
            weight = slot_weights(-hard.view(shape), valid[part]) / blocks
            entropy[part], hit[part] = hard.view(shape), hits.view(shape)
            total += (weight.view(-1) * (soft * softer + (1 - soft) * hard)).sum()
            gradient[part] = (differentiate(weight.view(-1)) @ head).view(gradient[part].shape)
            del student, target, differentiate
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(entropy, hit)
        return total, entropy, hit

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grad, *[None] * 7)


def _plain(student: torch.Tensor, target: torch.Tensor, labels: torch.Tensor, soft: float) -> tuple[Any, ...]:
    """Logits [slots, rows] -> hard and soft cross entropy, hit [slots], and weight [slots] -> d loss / d logits."""
    log_q = torch.log_softmax(student.float(), dim=1)
    p = torch.softmax(target.float(), dim=1)
    hard = -log_q.gather(1, labels[:, None])[:, 0]
    softer = -(p * log_q).sum(1)
    hit = (log_q.argmax(1) == labels).float()

    def differentiate(weight: torch.Tensor) -> torch.Tensor:
        g = log_q.exp() - soft * p
        g.scatter_add_(1, labels[:, None], torch.full_like(labels[:, None], soft - 1, dtype=g.dtype))
        return (g * weight[:, None]).to(student.dtype)

    return hard, softer, hit, differentiate


def _fused(student: torch.Tensor, target: torch.Tensor, labels: torch.Tensor, soft: float) -> tuple[Any, ...]:
    """As `_plain`; the gradient takes the place of the student's logits."""
    slots, rows = student.shape
    block = min(4096, triton.next_power_of_2(rows))
    hard, softer, hit, log_z, log_t = torch.empty(5, slots, device=student.device).unbind(0)
    _statistics[(slots,)](student, target, labels, hard, softer, hit, log_z, log_t, rows, BLOCK=block, num_warps=8)

    def differentiate(weight: torch.Tensor) -> torch.Tensor:
        _gradient[(slots,)](
            student, target, labels, weight.contiguous(), log_z, log_t, soft, rows, BLOCK=block, num_warps=8
        )
        return student

    return hard, softer, hit, differentiate


if triton is not None:

    @triton.jit
    def _statistics(S, T, LABEL, HARD, SOFT, HIT, LOG_Z, LOG_T, rows, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """One program a slot: online log-sum-exp of both rows, and sum of p_target * student logit beside it."""
        r = tl.program_id(0).to(tl.int64)
        o = tl.arange(0, BLOCK)
        label = tl.load(LABEL + r).to(tl.int32)
        m_s = -1e30
        z_s = 0.0
        m_t = -1e30
        z_t = 0.0
        dot = 0.0
        own = 0.0
        best = 0
        for c in range(0, rows, BLOCK):
            ok = c + o < rows
            s = tl.load(S + r * rows + c + o, mask=ok, other=-1e30).to(tl.float32)
            t = tl.load(T + r * rows + c + o, mask=ok, other=-1e30).to(tl.float32)
            top = tl.max(s, 0)
            best = tl.where(top > m_s, c + tl.argmax(s, 0), best)
            m = tl.maximum(m_s, top)
            z_s = z_s * tl.exp(m_s - m) + tl.sum(tl.exp(s - m), 0)
            m_s = m
            m = tl.maximum(m_t, tl.max(t, 0))
            e = tl.exp(t - m)
            z_t = z_t * tl.exp(m_t - m) + tl.sum(e, 0)
            dot = dot * tl.exp(m_t - m) + tl.sum(tl.where(ok, e * s, 0.0), 0)
            m_t = m
            own += tl.sum(tl.where(c + o == label, s, 0.0), 0)
        log_z = m_s + tl.log(z_s)
        tl.store(HARD + r, log_z - own)
        tl.store(SOFT + r, log_z - dot / z_t)
        tl.store(HIT + r, tl.where(best == label, 1.0, 0.0))
        tl.store(LOG_Z + r, log_z)
        tl.store(LOG_T + r, m_t + tl.log(z_t))

    @triton.jit
    def _gradient(S, T, LABEL, WEIGHT, LOG_Z, LOG_T, soft, rows, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """weight * (q - soft * p - (1 - soft) * onehot), written over the student's logits."""
        r = tl.program_id(0).to(tl.int64)
        o = tl.arange(0, BLOCK)
        label = tl.load(LABEL + r).to(tl.int32)
        weight = tl.load(WEIGHT + r)
        log_z = tl.load(LOG_Z + r)
        log_t = tl.load(LOG_T + r)
        for c in range(0, rows, BLOCK):
            ok = c + o < rows
            s = tl.load(S + r * rows + c + o, mask=ok, other=-1e30).to(tl.float32)
            t = tl.load(T + r * rows + c + o, mask=ok, other=-1e30).to(tl.float32)
            g = tl.exp(s - log_z) - soft * tl.exp(t - log_t) - tl.where(c + o == label, 1.0 - soft, 0.0)
            tl.store(S + r * rows + c + o, (weight * g).to(S.dtype.element_ty), mask=ok)


def check_fused(head: torch.Tensor, depth: int = 15, soft: float = 0.5) -> float:
    """Relative difference of the fused gradient from the plain one on random slots; 1.0 where it cannot run."""
    if triton is None or not head.is_cuda:
        return 1.0
    draw = torch.Generator(head.device).manual_seed(0)
    size = (16, depth, head.shape[1])
    hidden, teacher = (torch.randn(size, device=head.device, generator=draw) for _ in range(2))
    labels = torch.randint(0, len(head), size[:2], device=head.device, generator=draw)
    valid = torch.rand(size[:2], device=head.device, generator=draw) < 0.9
    gradients = []
    for fused in (False, True):
        leaf = hidden.clone().requires_grad_()
        Distill.apply(leaf, teacher, head, labels, valid, soft, 4 * depth, fused)[0].backward()
        gradients.append(leaf.grad)
    return ((gradients[0] - gradients[1]).norm() / gradients[0].norm()).item()
