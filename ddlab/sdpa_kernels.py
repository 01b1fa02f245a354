"""One kernel of PyTorch at a time, as a function for Transformers' registry: SDPA's four, and flex attention.

`scaled_dot_product_attention` chooses among its kernels by itself; these pin one, so that a difference can be laid at
its door. A call that the kernel does not take is refused, never handed to another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import repeat_kv

SDPA_KERNELS = {
    "sdpa:math": SDPBackend.MATH,
    "sdpa:flash": SDPBackend.FLASH_ATTENTION,
    "sdpa:efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa:cudnn": SDPBackend.CUDNN_ATTENTION,
}


def sdpa_forward(name: str) -> Callable[..., tuple[Tensor, None]]:
    """The attention function of one SDPA kernel (a name of `SDPA_KERNELS`).

    It takes query [batch, heads, n, dim], key and value [batch, kv heads, keys, dim], and no mask (causal, as many keys
    as rows or one row) or a boolean or additive one [batch or 1, heads or 1, n, keys]; it gives [batch, n, heads, dim].
    """
    kernel = SDPA_KERNELS[name]

    def forward(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        s_aux: Tensor | None = None,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        n, keys = query.shape[2], key.shape[2]
        _refuse_unknown(name, s_aux=s_aux, **keywords)
        causal = n > 1 and attention_mask is None
        causal = causal and (is_causal if is_causal is not None else getattr(module, "is_causal", True))
        if causal and keys != n:
            raise ValueError(
                f"{name}: without a mask, {n} rows over {keys} keys are causal over the first keys: give a mask"
            )
        if attention_mask is not None:
            check_whole_mask(name, attention_mask, n, keys)
            if kernel == SDPBackend.FLASH_ATTENTION and query.device.type == "cuda":
                raise ValueError(f'{name} takes no mask on CUDA: use attention="flash_tree" or attention="sdpa"')
        grouped = attention_mask is None and kernel != SDPBackend.EFFICIENT_ATTENTION
        if not grouped:  # with a mask as Transformers' own sdpa does, too
            key, value = (repeat_kv(x, query.shape[1] // x.shape[1]) for x in (key, value))
        try:
            with sdpa_kernel(kernel):
                out = F.scaled_dot_product_attention(
                    query, key, value, attention_mask, dropout, causal, scale=scaling, enable_gqa=grouped
                )
        except RuntimeError as error:
            if not ("No available kernel" in str(error) or "No viable backend" in str(error)):  # on CUDA, on the CPU
                raise
            raise ValueError(
                f"{name} has no kernel for query {list(query.shape)}, {keys} keys, {query.dtype} on {query.device}: "
                'use attention="sdpa" or attention="eager"'
            ) from error
        return out.transpose(1, 2).contiguous(), None

    return forward


def flex_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **keywords: Any
) -> tuple[Tensor, Tensor | None]:
    """Transformers' flex attention that also takes ddlab's masks [1, 1, n, keys]: they become block masks.

    Never a dense mask in the compiled kernel: on the CPU that has ended the process.
    """
    n, keys = query.shape[2], key.shape[2]
    if isinstance(attention_mask, Tensor):
        check_whole_mask("flex", attention_mask, n, keys)
        if attention_mask.shape[:2] != (1, 1):
            raise ValueError(
                f"flex takes one mask for all heads, [1, 1, {n}, {keys}]; got {list(attention_mask.shape)}"
            )
        mask = attention_mask[0, 0]
        seen = mask if mask.dtype == torch.bool else mask == 0  # [n, keys]
        attention_mask = create_block_mask(
            lambda batch, head, row, column: seen[row, column], None, None, n, keys, device=query.device
        )
    elif attention_mask is not None and attention_mask.seq_lengths != (n, keys):
        raise ValueError(f"flex: a block mask over {attention_mask.seq_lengths} for {n} rows and {keys} keys")
    elif attention_mask is None and n > 1 and getattr(module, "is_causal", True):
        raise ValueError("flex without a mask lets every row see every key: give a mask")
    return flex_attention_forward(module, query, key, value, attention_mask, **keywords)


def check_whole_mask(name: str, mask: Tensor, n: int, keys: int) -> None:
    """Raises ValueError for a mask that is no [batch or 1, heads or 1, n, keys], boolean or additive."""
    if mask.ndim != 4 or mask.shape[2:] != (n, keys):
        raise ValueError(f"{name} takes a mask [1, 1, {n}, {keys}] (rows, keys); got {list(mask.shape)}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"{name} takes a boolean or an additive mask (0 and the dtype's minimum), not {mask.dtype}")


def _refuse_unknown(name: str, **given: Any) -> None:
    """A keyword that would change the result and that SDPA has no slot for."""
    for what in ("s_aux", "softcap", "position_bias"):
        if given.get(what) is not None:
            raise ValueError(f'{name} would drop {what} without a word: use attention="eager"')
