"""Attention of tree rows over a long committed text: flash over what every row sees, dense over the rest, joined.

A draft tree needs a mask only where its rows differ: among themselves, and at the far end of a sliding window. The
committed keys between are seen by every row, so they go through PyTorch's flash kernel with no mask at all. Both parts
return the log of their softmax's denominator; as further columns of one softmax these join the parts exactly
(FlashAttention, Dao et al. 2022, section 3.1; the join of partial results is that of Flash-Decoding).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import eager_mask

from ddlab.backends import HALF

WINDOW_ROWS = 256  # rows of a windowed prefill that are worked on at once
Part = tuple[Tensor, Tensor]  # out [batch, kv heads, rows, dim], log-sum-exp [batch, kv heads, rows]


@dataclass(frozen=True)
class CausalWindow:
    """What `causal_mask` hands over in place of a mask: row i sees the ``window`` keys up to its own."""

    window: int


def flash_tree_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | CausalWindow | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function behind ``attention="flash_tree"``, called by Transformers' attention modules.

    Args:
        query: [batch, heads, n, dim]; key, value: [batch, kv heads, keys, dim], the last n keys are the rows' own.
        attention_mask: None: causal over the last n keys, every key before them is seen (with ``sliding_window`` or
            `CausalWindow`: as far as the window reaches). Else additive or boolean [batch or 1, heads or 1, n, m] over
            the first m - n and the last n keys; those between are seen by every row. m == keys: a whole mask.
        s_aux: [heads], a logit per head that takes part in the softmax and has no value (attention sinks).

    Returns:
        [batch, n, heads, dim] in the dtype of ``query``, joined in float32 (float64 for float64).

    Raises:
        ValueError: nothing that this function can compute; no kernel has run then.
    """
    check_call(query, key, value, attention_mask, dropout, softcap, position_bias)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(attention_mask, Tensor):
        edge = attention_mask.shape[3] - query.shape[2]
        return tree_attention(query, key, value, attention_mask, edge=edge, scale=scale, sinks=s_aux), None
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    window = attention_mask.window if isinstance(attention_mask, CausalWindow) else sliding_window
    if causal:
        return causal_attention(query, key, value, scale=scale, window=window, sinks=s_aux), None
    parts = [_flash(_folded(query, key.shape[1]), key, value, scale)]
    return _joined(query, parts, None, None, s_aux), None


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    edge: int,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Rows that see every key but those which ``mask`` covers: the first ``edge`` and the last m - edge keys.

    Args and result otherwise as in `flash_tree_forward`. Shapes decide everything: nothing waits for the device.
    """
    n, keys, groups, covered = query.shape[2], key.shape[2], key.shape[1], mask.shape[3]
    rows = _folded(query, groups)  # [batch, kv heads, group * n, dim]
    parts = []
    if keys > covered:
        shared = slice(edge, keys - covered + edge)
        parts.append(_flash(rows, key[:, :, shared], value[:, :, shared], scale))
    wide = _accumulator(query.dtype)
    key, value = (_ends(x, edge, covered - edge).to(wide) for x in (key, value))  # [batch, kv heads, covered, dim]
    scores = (rows.to(wide) @ key.transpose(2, 3)).unflatten(2, (-1, n))  # [batch, kv heads, group, n, covered]
    own = mask[:, :, None] if mask.shape[1] == 1 else mask.unflatten(1, (groups, -1))
    if own.dtype == torch.bool:
        scores = (scores * scale).masked_fill(~own, torch.finfo(wide).min)
    else:
        scores = torch.add(own, scores, alpha=scale).to(wide)
    return _joined(query, parts, scores.flatten(2, 3), value, sinks)


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Rows one after the other behind the keys before them: prefill, with or without cached keys, or one step."""
    n, keys, groups = query.shape[2], key.shape[2], key.shape[1]
    before = keys - n
    if window is not None and keys > window:
        return _windowed(query, key, value, scale, window, sinks)
    if n == 1:
        return _joined(query, [_flash(_folded(query, groups), key, value, scale)], None, None, sinks)
    out, lse = _flash(query, key[:, :, before:], value[:, :, before:], scale, causal=True)
    if before == 0 and sinks is None:
        return out.transpose(1, 2)
    parts = [(_folded(out, groups), lse.reshape(lse.shape[0], groups, -1))]
    if before:
        parts.append(_flash(_folded(query, groups), key[:, :, :before], value[:, :, :before], scale))
    return _joined(query, parts, None, None, sinks)


def _windowed(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, sinks: Tensor | None) -> Tensor:
    """`causal_attention` where the window leaves keys out: a few rows at a time, as if they were a tree's."""
    n, keys = query.shape[2], key.shape[2]
    before, out = keys - n, []
    for first in range(0, n, WINDOW_ROWS):
        last = min(n, first + WINDOW_ROWS)
        oldest = max(0, before + first - window + 1)  # that the first row of the block sees
        shared = min(max(oldest, before + last - window), before + first)  # from here on all of its rows see it
        row = torch.arange(before + first, before + last, device=key.device)
        covered = torch.cat([torch.arange(oldest, shared, device=key.device), row])
        seen = (covered <= row[:, None]) & (row[:, None] - covered < window)  # [rows, covered]
        reach = slice(oldest, before + last)
        block = query[:, :, first:last], key[:, :, reach], value[:, :, reach], seen[None, None]
        out.append(tree_attention(*block, edge=shared - oldest, scale=scale, sinks=sinks))
    return torch.cat(out, dim=1)


def _flash(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool = False) -> Part:
    """PyTorch's flash kernel; at least one key (with none the CPU kernel divides by zero and ends the process).

    On CUDA it splits the keys over the multiprocessors by itself where the rows are few.
    """
    kernel = _flash_cuda if query.device.type == "cuda" else _flash_cpu
    return kernel(query, key, value, scale, causal)


def _flash_cuda(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Part:
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(query, key, value, 0.0, causal, False, scale=scale)[:2]


def _flash_cpu(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Part:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, 0.0, causal, attn_mask=None, scale=scale)


def _folded(query: Tensor, kv_heads: int) -> Tensor:
    """[batch, heads, n, dim] -> [batch, kv heads, group * n, dim]: the heads that share keys, as further rows."""
    batch, heads, n, dim = query.shape
    return query.reshape(batch, kv_heads, heads // kv_heads * n, dim)


def _ends(x: Tensor, first: int, last: int) -> Tensor:
    """The first and the last keys of [batch, kv heads, keys, dim]."""
    if first + last == x.shape[2]:
        return x
    tail = x[:, :, x.shape[2] - last :]
    return torch.cat([x[:, :, :first], tail], dim=2) if first else tail


def _joined(
    query: Tensor, parts: list[Part], scores: Tensor | None, value: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """One softmax over the parts' log-sum-exps, the sinks and the dense scores [batch, kv heads, rows, m].

    Returns [batch, n, heads, dim] in the dtype of ``query`` [batch, heads, n, dim].
    """
    batch, heads, n, dim = query.shape
    wide = _accumulator(query.dtype)
    columns = [lse[..., None].to(wide) for _, lse in parts]
    if sinks is not None:
        groups = parts[0][1].shape[1] if parts else scores.shape[1]  # type: ignore[union-attr]
        columns.append(sinks.to(wide).view(1, groups, -1, 1).expand(batch, -1, -1, n).flatten(2)[..., None])
    if scores is not None:
        columns.append(scores)
    total = parts[0][0] if parts else None
    if len(columns) > 1 or not parts:
        weights = torch.cat(columns, dim=-1).softmax(-1)  # [batch, kv heads, rows, parts + sinks + m]
        total = None if value is None else weights[..., weights.shape[-1] - value.shape[2] :] @ value
        for i, (out, _) in enumerate(parts):
            weight = weights[..., i : i + 1]
            total = weight * out if total is None else torch.addcmul(total, weight, out)
    assert total is not None
    result = query.new_empty(batch, n, heads, dim)
    result.copy_(total.reshape(batch, heads, n, dim).transpose(1, 2))
    return result


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    dropout: float = 0.0,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
) -> None:
    """Raises ValueError for a call that `flash_tree_forward` would get wrong; looks at shapes and types only."""
    n, keys, dim = query.shape[2], key.shape[2], query.shape[3]
    for what, given in (("dropout", dropout), ("softcap", softcap), ("position_bias", position_bias)):
        if given is not None and not (isinstance(given, float) and given == 0.0):
            raise ValueError(f'flash_tree knows no {what}: use attention="eager"')
    if query.requires_grad and torch.is_grad_enabled():
        raise ValueError('flash_tree is for inference: run it under torch.no_grad(), or use attention="sdpa"')
    if query.device.type == "cuda" and query.dtype not in HALF:
        raise ValueError(f'flash_tree on CUDA knows bfloat16 and float16, not {query.dtype}: use attention="sdpa"')
    if key.shape[1] == 0 or query.shape[1] % key.shape[1] or not dim == key.shape[3] == value.shape[3]:
        raise ValueError(
            f"flash_tree: query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} do not fit: "
            "[batch, heads, rows, dim] with one dim, heads a multiple of the key/value heads"
        )
    if keys < n:
        raise ValueError(f"flash_tree: {n} rows with {keys} keys; the last keys must be the rows' own")
    if mask is None or isinstance(mask, CausalWindow):
        return
    wanted = f"[1, 1, {n}, m], {n} <= m <= {keys}: the first m - {n} and the last {n} of {keys} keys"
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"flash_tree takes a mask {wanted}; got {shape}")
    fits = mask.shape[0] in (1, query.shape[0]) and mask.shape[1] in (1, query.shape[1])
    if not (fits and mask.shape[2] == n and n <= mask.shape[3] <= keys):
        raise ValueError(f"flash_tree takes a mask {wanted}; got {list(mask.shape)}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"flash_tree takes a boolean or an additive mask (0 and the dtype's minimum), not {mask.dtype}"
        )


def causal_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = False,
    local_size: int | None = None,
    config: Any = None,
    **keywords: Any,
) -> Tensor | CausalWindow | None:
    """The mask that Transformers' models make where none is given: none, or a window, for a plainly causal call.

    Anything else (padding, packed or bidirectional sequences, a static cache) gets a whole additive mask.
    """
    plain = (
        allow_is_causal_skip
        and isinstance(q_offset, int)
        and q_offset + q_length == kv_offset + kv_length
        and getattr(config, "attention_chunk_size", None) is None
        and (attention_mask is None or bool(attention_mask.all()))
    )
    if plain:
        return None if local_size is None or kv_length <= local_size else CausalWindow(local_size)
    return eager_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        config=config,
        **keywords,
    )
