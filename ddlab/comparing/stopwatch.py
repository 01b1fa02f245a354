"""Time and memory of each layer, by backend: runs in turn, a first one that does not count, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from ddlab.comparing.layerwise import Scene
    from ddlab.comparing.ways import Way
    from ddlab.pair import Pair


@dataclass
class Times:
    """By (backend, layer): seconds of the mixer, and bytes that it needed at once beyond what was held before."""

    layers: dict[tuple[str, int], float] = field(default_factory=dict)
    peaks: dict[tuple[str, int], int] = field(default_factory=dict)
    whole: dict[str, float] = field(default_factory=dict)  # by backend, seconds of the forward
    said: str = "not timed"


def measure(pair: Pair, scene: Scene, ways: Sequence[Way], repeats: int) -> Times:
    """Every way once in each of ``repeats`` + 1 turns, so that a busy machine is fair to all; the first is dropped."""
    times = Times()
    if repeats < 1 or not ways:
        return times
    laps: dict[tuple[str, int], list[float]] = {}
    for turn in range(repeats + 1):
        for way in ways:
            with way.use(pair, scene.part, scene.what):
                for index, seconds in _one_run(scene).items():
                    if turn:
                        laps.setdefault((way.name, index), []).append(seconds)
    for (name, index), several in laps.items():
        if index < 0:
            times.whole[name] = statistics.median(several)
        else:
            times.layers[name, index] = statistics.median(several)
    for way in ways:
        with way.use(pair, scene.part, scene.what):
            times.peaks |= {(way.name, index): peak for index, peak in _peaks(scene).items()}
    rows = len(scene.rows)
    counted = f"{rows} row{'s' * (rows != 1)} behind {scene.rows.start} tokens"
    times.said = f"median of {repeats} run{'s' * (repeats != 1)} in turn, one more to warm up; {counted}"
    return times


def _one_run(scene: Scene) -> dict[int, float]:
    """Seconds by layer, and of the whole forward under -1."""
    marks: dict[int, tuple[Any, Any]] = {}
    devices = {p.device for site in scene.sites for p in site.mixer.parameters() if p.device.type == "cuda"}

    def mark(device: torch.device | None) -> Any:
        if device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def before(index: int, module: nn.Module) -> Any:
        return mark(_cuda(module))

    def after(index: int, module: nn.Module, begun: Any) -> None:
        marks[index] = begun, mark(_cuda(module))

    for device in devices:
        torch.cuda.synchronize(device)
    with _around(scene, before, after), torch.no_grad():
        begun = time.perf_counter()
        scene.run()
        for device in devices:
            torch.cuda.synchronize(device)
        whole = time.perf_counter() - begun
    seconds = {
        i: end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3
        for i, (start, end) in marks.items()
    }
    return seconds | {-1: whole}


def _peaks(scene: Scene) -> dict[int, int]:
    """Bytes by layer; of layers on the CPU none, because PyTorch's CPU allocator keeps no peak."""
    found: dict[int, int] = {}

    def before(index: int, module: nn.Module) -> Any:
        device = _cuda(module)
        if device is None:
            return None
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)

    def after(index: int, module: nn.Module, begun: Any) -> None:
        if begun is not None:
            found[index] = torch.cuda.max_memory_allocated(_cuda(module)) - begun

    with _around(scene, before, after), torch.no_grad():
        scene.run()
    return found


@contextmanager
def _around(scene: Scene, before: Any, after: Any) -> Iterator[None]:
    """``before(index, mixer)`` and ``after(index, mixer, what before gave)`` around every mixer."""
    handles: list[Any] = []
    begun: dict[int, Any] = {}

    def enter(index: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            begun[index] = before(index, module)

        return hook

    def leave(index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            after(index, module, begun.pop(index))

        return hook

    try:
        for site in scene.sites:
            handles.append(site.mixer.register_forward_pre_hook(enter(site.index)))
            handles.append(site.mixer.register_forward_hook(leave(site.index)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _cuda(module: nn.Module) -> torch.device | None:
    device = next(module.parameters()).device
    return device if device.type == "cuda" else None
