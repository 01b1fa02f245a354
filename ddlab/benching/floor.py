"""What bounds a step from below: reading its weights once, at the bandwidth that copies achieve on the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from ddlab.pair import Pair

COPIED = {"cuda": 2**31}  # bytes; on other devices 2**27
Spread = dict[str, float]
RANDOM_WEIGHTS = "RANDOM WEIGHTS: a published model's shape; its times are real, its texts and acceptance mean nothing"


def spread(taken: Sequence[float]) -> Spread:
    """Median, 10th and 90th percentile, and how many."""
    low, middle, high = (float(x) for x in np.percentile(taken, (10, 50, 90)))
    return {"median": middle, "p10": low, "p90": high, "n": len(taken)}


def weight_bytes(pair: Pair) -> dict[str, int]:
    """Bytes of the weights that a step reads: target (without its embedding table), head, drafter, and draft_head, the
    head that turns the drafter's output into logits."""
    head: Any = pair.target.get_output_embeddings()
    size = {p.data_ptr(): p.nbytes for p in pair.text_model.parameters()}
    shared = {pair.embed.data_ptr(), head.weight.data_ptr()}
    target = sum(nbytes for at, nbytes in size.items() if at not in shared)
    found = {"target": target, "head": head.weight.nbytes, "drafter": 0, "draft_head": 0}
    if pair.drafter is not None:
        own = pair.drafter.own_head
        found["drafter"] = sum(p.nbytes for p in pair.drafter.model.parameters())
        found["draft_head"] = found["head"] if own is None else own.nbytes
    return found


def copy_bandwidth(device: torch.device, repeats: int = 12) -> dict[str, Any]:
    """What copying memory on the device achieves: bytes read and written per second."""
    size = COPIED.get(device.type, 2**27)
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target, taken = torch.empty_like(source), []
    for _ in range(repeats + 2):
        synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        taken.append(time.perf_counter() - started)
    seconds = spread(taken[2:])
    return {"bytes_per_second": 2 * size / seconds["median"], "bytes": size, "seconds": seconds}


def floor_seconds(weights: dict[str, int], bytes_per_second: float) -> dict[str, float]:
    """Seconds of reading the weights once. plain: target and head; drafted: drafter, its head, target and head."""
    return {
        "plain": (weights["target"] + weights["head"]) / bytes_per_second,
        "drafted": sum(weights.values()) / bytes_per_second,
    }


def pair_facts(pair: Pair) -> dict[str, Any]:
    kinds = pair.layer_types
    return {
        "name": pair.name,
        "target": type(pair.target).__name__,
        "layers": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "dtype": str(pair.dtype).removeprefix("torch."),
        "attention": pair.attention,
        "drafter": None if pair.drafter is None else pair.drafter.name,
        "notice": RANDOM_WEIGHTS if "random" in str(pair.source.get("weights")) else None,
    }


def machine_facts(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {"device": str(device), "name": name, "threads": torch.get_num_threads()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return "CPU"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
