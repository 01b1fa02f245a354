"""The drafter's context: keys and values of committed tokens, made once, kept bit for bit."""

from __future__ import annotations

from typing import Any

import torch


class DraftCache:
    """A growing buffer [1, kv heads, capacity, head dim] of keys and one of values per layer.

    Rows below `length` are context; from there on they are scratch, where a block is written to be drafted.
    """

    eager = True  # was the last block run by the drafter's modules?

    def __init__(self, layers: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.length = 0
        self.keys = [self._empty((1, heads, 0, head_dim), dtype, device) for _ in range(layers)]
        self.values = list(self.keys)  # no rows yet: `reserve` gives every layer its own

    @staticmethod
    def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch.inference_mode(False):  # writable later, in and out of inference mode
            return torch.empty(shape, dtype=dtype, device=device)

    def reserve(self, rows: int) -> None:
        """Room for `rows` rows; the context keeps its bits."""
        for buffers in (self.keys, self.values):
            for i, old in enumerate(buffers):
                if rows > old.shape[2]:
                    capacity = max(rows, 2 * old.shape[2], 64)
                    new = self._empty((*old.shape[:2], capacity, old.shape[3]), old.dtype, old.device)
                    new[:, :, : self.length] = old[:, :, : self.length]
                    buffers[i] = new

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Rows [1, kv heads, m, head dim] at `length`, without moving it."""
        end = self.length + keys.shape[2]
        self.keys[layer][:, :, self.length : end] = keys
        self.values[layer][:, :, self.length : end] = values

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on; the rows below stay as they are, bit for bit."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a draft cache of {self.length} tokens to {length}")
        self.length = length

    def clone(self) -> DraftCache:
        """An independent copy."""
        first = self.keys[0]
        copy = DraftCache(len(self.keys), first.shape[1], first.shape[3], first.dtype, first.device)
        copy.reserve(self.length)
        for i in range(len(self.keys)):
            copy.write(i, self.keys[i][:, :, : self.length], self.values[i][:, :, : self.length])
        copy.length = self.length
        return copy


class BlockCache:
    """What the class's forward takes for its cache: stores the block's rows, gives context and block."""

    def __init__(self, cache: DraftCache, first: list[int]) -> None:
        self.cache, self.first = cache, first  # first context row of each layer

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.cache.write(layer_idx, keys, values)
        rows = slice(self.first[layer_idx], self.cache.length + keys.shape[2])
        return self.cache.keys[layer_idx][:, :, rows], self.cache.values[layer_idx][:, :, rows]
