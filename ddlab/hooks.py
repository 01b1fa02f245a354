"""Hooks on the phases of a round: what one returns replaces the phase's value, and its handle takes it away."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

from ddlab.names import one_of

PHASES = ("draft", "tree", "verify", "accept", "commit")

Hook = Callable[[Any, Any], Any]  # (decoder, value) -> None, or a replacement for value


class Hooks:
    """The hooks of one decoder, by phase and in the order of their registration."""

    def __init__(self) -> None:
        self._by_phase: dict[str, OrderedDict[int, Hook]] = {phase: OrderedDict() for phase in PHASES}
        self.seconds = 0.0  # spent in hooks so far: a phase's time does not contain them

    def register(self, phase: str, hook: Hook) -> RemovableHandle:
        one_of("phase", phase, PHASES)
        handle = RemovableHandle(self._by_phase[phase])
        self._by_phase[phase][handle.id] = hook
        return handle

    def on(self, phase: str) -> bool:
        """Is there any on this phase?"""
        return bool(self._by_phase[phase])

    def run(self, phase: str, decoder: Any, value: Any, check: Callable[[Any], Any]) -> tuple[Any, bool]:
        """Hand ``value`` from hook to hook, replacements through ``check``. The last value, and whether it changed."""
        started, edited = time.perf_counter(), False
        try:
            for hook in list(self._by_phase[phase].values()):
                changed = hook(decoder, value)
                if changed is not None:
                    value, edited = check(changed), True
        finally:
            self.seconds += time.perf_counter() - started
        return value, edited

    def copy(self) -> Hooks:
        other = Hooks()
        other._by_phase = {phase: OrderedDict(hooks) for phase, hooks in self._by_phase.items()}
        return other
