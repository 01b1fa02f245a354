"""Rounding or wrong: one layer's output against its plain form in float64, and which known fault it shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddlab.audit import BANDS
from ddlab.comparing.layerwise import Bench, Scene, Site
from ddlab.comparing.rows import FLATTENED, distinct_faults

# Kernels sum in other orders and round in other places than the plain form does: a layer may lie so many times as far
# from float64 as that form in the model's own dtype, on the same inputs, and at least so many roundings.
TIMES, ROUNDINGS = 4, 4


class Referee:
    """What a layer should have given for one call: ``out`` float64 [n, hidden], and the ``band`` that is rounding.

    Args:
        call: the arguments of its mixer. dtype: of its output.

    Raises:
        ValueError: the layer's weights are not in memory.
    """

    def __init__(self, scene: Scene, site: Site, call: tuple[tuple[Any, ...], dict[str, Any]], dtype: torch.dtype):
        self.site = site
        self._bench = Bench(scene, site, call, referee=True)
        self.out = self._bench.right()
        plain = Bench(scene, site, call, referee=False).right()
        self.band = layer_band(dtype, float(errors(plain, self.out).max()), linear=site.linear)

    def faults(self, out: Tensor) -> list[str]:
        """The known faults that give this output [n, hidden]."""
        bench, site = self._bench, self.site
        if site.linear:
            shows = bench.scene.rows.branches and self._fits(out, bench.linear("flattened"))
            return [FLATTENED] if shows else []
        faults = distinct_faults(bench.scene.rows, site.kind, site.window, site.sinks, site.first)
        return [said for said, sight in faults.items() if self._fits(out, bench.attention(sight))]

    def _fits(self, out: Tensor, faulty: Tensor) -> bool:
        return bool(errors(out, faulty).max() <= self.band)


def layer_band(dtype: torch.dtype, spread: float, *, linear: bool = False) -> float:
    """How far from float64 a layer may lie, relative to its activation.

    spread: how far the plain form in the same dtype lies from it. Norms run in float32 whatever the dtype, and so does
    the delta rule, whose forms lie as far apart as `ddlab.audit` allows (float32's band).
    """
    unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) / 2
    least = BANDS[torch.float32] if linear else ROUNDINGS * unit
    return max(least, TIMES * spread)


def errors(out: Tensor, right: Tensor) -> np.ndarray:
    """Of each row, the RMS distance from ``right`` relative to its RMS (at least that of all rows). float64 [n]."""
    return apart(right, out)["rms"]


def apart(one: Tensor, other: Tensor) -> dict[str, np.ndarray]:
    """max_abs, rms (relative to the activation ``one``) and cosine of each row, float64 [n]; both are [n, hidden]."""
    one, other = one.double(), other.to(one.device).double()
    difference = other - one
    size = one.pow(2).mean(-1)  # [n]
    scale = torch.maximum(size, size.mean()).sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    cosine = torch.nn.functional.cosine_similarity(one, other, dim=-1, eps=1e-300)
    same = (difference == 0).all(-1)  # also where a row is zero throughout
    found = {
        "max_abs": difference.abs().amax(-1),
        "rms": difference.pow(2).mean(-1).sqrt() / scale,
        "cosine": torch.where(same, torch.ones_like(cosine), cosine.clamp(-1.0, 1.0)),
    }
    return {name: values.cpu().numpy() for name, values in found.items()}
