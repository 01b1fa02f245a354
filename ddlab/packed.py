"""Products of several rows on a CPU, from copies of the weights in the layout that the product wants.

A float32 product of a few rows spends much of its time on getting the weight into shape, every time anew. A copy that
has the shape takes the weight's memory once more, and is made when it is first asked for:

* the head over a vocabulary: by oneDNN, for any number of rows but one;
* the other layers: by MKL (x86 builds of PyTorch), for as many rows as a drafted block has, so for drafting and for
  trees with a node a drafted position, ``budget=None``. MKL packs for one number of rows. Only where all of
  them together are at most 2 GiB.

One row is a pass over the weight in any layout: plain decoding has no copies and needs none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

if TYPE_CHECKING:
    from ddlab.pair import Pair

_LEAST, _MOST = 2**16, 2**29  # numbers in a weight that is worth a copy, and in all weights that get one


@contextmanager
def packed_layers(pair: Pair) -> Iterator[None]:
    """In this block the layers of target and drafter compute from copies what is faster so."""
    layers = []
    try:
        for packed in _packed(pair):
            if "forward" not in packed.layer.__dict__:  # else it is not the layer's own: accelerate's, say
                layers.append(packed.layer)
                packed.layer.__dict__["forward"] = packed
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _packed(pair: Pair) -> list[_Packed]:
    """The layers that may have copies; made once a pair and head."""
    if pair.device.type != "cpu" or pair.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return []
    if is_in_torch_dispatch_mode():  # a memory tracker, say: a copy is a tensor without a storage that it could ask for
        return []
    head: Any = pair.target.get_output_embeddings()
    kept: tuple[Any, list[_Packed]] = pair.__dict__.get("_packed", (None, []))
    if kept[0] is not head:
        found = [_Packed(head, None)] if _fits(head) else []
        if pair.drafter is not None and torch.backends.mkl.is_available():
            modules = dict.fromkeys([*pair.target.modules(), *pair.drafter.model.modules()])
            others: list[Any] = [module for module in modules if module is not head and _fits(module)]
            if sum(layer.weight.numel() for layer in others) <= _MOST:
                found += [_Packed(layer, pair.drafter.block_size) for layer in others]
        kept = pair.__dict__["_packed"] = head, found
    return kept[1]


def _fits(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.weight.numel() >= _LEAST


class _Packed:
    """A linear layer's forward from a copy of its weight, made again when the weight was replaced or written to.

    rows: for which MKL packs; None: oneDNN's copy, for any number of rows but one.
    """

    def __init__(self, layer: nn.Linear, rows: int | None):
        self.layer, self.rows = layer, rows
        self._copy: Tensor | None = None
        self._made_from: tuple[Tensor | None, int] = None, -1  # holds the memory, so that its address stays taken

    def __call__(self, hidden: Tensor) -> Tensor:
        weight, bias = self.layer.weight, self.layer.bias
        rows = hidden.numel() // hidden.shape[-1]
        wanted = rows == self.rows if self.rows else rows > 1
        wanted &= hidden.shape[-1] == weight.shape[1] and not (torch.is_grad_enabled() or weight.is_inference())
        if not (wanted and _plain(hidden) and _plain(weight)):
            return F.linear(hidden, weight, bias)
        source, version = self._made_from
        if source is None or source.data_ptr() != weight.data_ptr() or version != weight._version:
            self._copy = None  # first, or there would be two for a moment
            self._copy = self._pack(weight.detach())
            self._made_from = weight.detach(), weight._version
        out: Tensor
        if self.rows:
            out = torch.ops.mkl._mkl_linear(hidden, self._copy, weight, bias, rows)
        else:
            out = torch.ops.mkldnn._linear_pointwise(hidden, self._copy, bias, "none", [], "")
        return out

    def __getstate__(self) -> dict[str, Any]:
        """Of a pair that is copied or saved: without the copy, a tensor that can be neither."""
        return {**self.__dict__, "_copy": None, "_made_from": (None, -1)}

    def _pack(self, weight: Tensor) -> Any:
        if self.rows:
            return torch.ops.mkl._mkl_reorder_linear_weight(weight, self.rows)
        return torch.ops.mkldnn._reorder_linear_weight(weight, 16)  # rows that the layout is best for


def _plain(x: Tensor) -> bool:
    """float32 numbers on a CPU, and no subclass that computes in its own way."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and type(x) in (Tensor, nn.Parameter)
