"""Attention backends and the calls that are legal on each: what is *right* on a backend, not what is fast.

* eager adds whatever mask it gets, so a boolean mask is silently wrong there: ddlab's masks are additive;
* flash kernels take no mask, and the flash-attn packages read a 4-D one as padding: no tree, no drafted block;
* SDPA with no mask and more keys than rows is causal over the *first* keys;
* a kernel that does not list attention sinks (``s_aux``) drops them without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ddlab.names import hint

CALLS = ("prefill", "step", "draft", "verify")
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Call:
    """One attention call, as far as legality goes.

    kind: a prompt with nothing cached before it (``prefill``), one token after a text (``step``), a drafted block
    (``draft``) or the rows of a tree (``verify``). window: None for full attention, else the sliding window in
    positions. device: ``"cpu"``, ``"cuda"``. sinks: the layer gives ``s_aux``. softcap: the layer caps its scores.
    """

    kind: str
    window: int | None
    sinks: bool
    dtype: torch.dtype
    head_dim: int
    device: str
    heads: int
    kv_heads: int
    softcap: float | None = None

    def __str__(self) -> str:
        layer = "full" if self.window is None else f"sliding ({self.window})"
        layer += " with sinks" * self.sinks
        what = f"{self.kind}, {layer} attention, {str(self.dtype).removeprefix('torch.')}"
        return f"{what}, head size {self.head_dim}, {self.device}"


Rule = Callable[[Call], str | None]  # why a call breaks it, as the rest of a sentence that begins with the name


@dataclass(frozen=True)
class Backend:
    """A way to compute attention: its name here, its name in Transformers' registry, and the rules of its calls.

    dense_part: in ``draft`` and ``verify`` it takes its mask over the keys on which the rows differ only, see
    `ddlab.flash_tree`.
    """

    name: str
    implementation: str
    rules: tuple[Rule, ...] = ()
    dense_part: bool = False

    @property
    def maskless(self) -> bool:
        """It can verify no tree, whatever the layers are."""
        return _no_mask in self.rules

    def refusal(self, call: Call) -> str | None:
        """Why this call is illegal, naming what to use instead; None: legal. Runs no kernel."""
        why = self._broken(call)
        if why is None:
            return None
        others = [name for name in INSTEAD if name != self.name and BACKENDS[name]._broken(call) is None]
        return f"{self.name} {why} ({call}): use " + " or ".join(f'attention="{name}"' for name in others)

    def _broken(self, call: Call) -> str | None:
        return next((why for rule in self.rules if (why := rule(call)) is not None), None)


def _no_mask(call: Call) -> str | None:
    if call.kind == "verify":
        return "takes no tree mask, and tree verification needs one"
    return "takes no mask, and a drafted block needs one" if call.kind == "draft" else None


def _no_mask_on_cuda(call: Call) -> str | None:
    if call.device == "cpu":
        return None
    return _no_mask(call) or (None if call.window is None else "takes no mask, and a sliding window needs one on CUDA")


def _no_sinks(call: Call) -> str | None:
    return "drops attention sinks (s_aux) without a word" if call.sinks else None


def _no_sinks_on_cpu(call: Call) -> str | None:
    return "has no log-sum-exp on the CPU to join attention sinks with" if call.sinks and call.device == "cpu" else None


def _no_softcap(call: Call) -> str | None:
    return None if call.softcap is None else "knows no soft cap of the scores"


def _on(*devices: str) -> Rule:
    return lambda call: None if call.device in devices else f"does not run on {call.device}"


def _half_on_cuda(call: Call) -> str | None:
    if call.device != "cuda" or call.dtype in HALF:
        return None
    return f"on CUDA knows bfloat16 and float16, not {str(call.dtype).removeprefix('torch.')}"


def _no_double(call: Call) -> str | None:
    return "knows no float64" if call.dtype == torch.float64 else None


def _heads(most: int, step: int = 8) -> Rule:
    """Head sizes on CUDA: multiples of ``step`` up to ``most``."""

    def rule(call: Call) -> str | None:
        fits = call.device != "cuda" or (call.head_dim <= most and call.head_dim % step == 0)
        return None if fits else f"on CUDA knows head sizes up to {most} in steps of {step}, not {call.head_dim}"

    return rule


def _eights(call: Call) -> str | None:
    fits = call.head_dim % 8 == 0
    return None if fits else f"knows head sizes in steps of 8, not {call.head_dim}"


# what a refusal sends people to, where it is legal
INSTEAD = ("flash_tree", "sdpa", "eager")
_PLAIN: tuple[Rule, ...] = (_no_sinks, _no_softcap)
_FLASH_PACKAGE: tuple[Rule, ...] = (_on("cuda"), _no_mask, _half_on_cuda)
# In Transformers' registry a name with "flash" in it is taken for the flash-attn package: ours have none.
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("eager", "eager"),
        Backend("sdpa", "sdpa", _PLAIN),
        Backend("flash_tree", "ddlab_tree", (_on("cpu", "cuda"), _half_on_cuda, _heads(256), _no_softcap), True),
        Backend("sdpa:math", "ddlab_sdpa_math", _PLAIN),
        Backend(
            "sdpa:flash",
            "ddlab_sdpa_fa",
            (_on("cpu", "cuda"), _no_mask_on_cuda, _half_on_cuda, _heads(256, 1), *_PLAIN),
        ),
        Backend("sdpa:efficient", "ddlab_sdpa_efficient", (_on("cuda"), _no_double, _eights, *_PLAIN)),
        Backend("sdpa:cudnn", "ddlab_sdpa_cudnn", (_on("cuda"), _half_on_cuda, _heads(256), *_PLAIN)),
        Backend("flex", "ddlab_flex", (_on("cpu", "cuda"), _no_double, _no_sinks_on_cpu, _no_softcap)),
        Backend("flash_attention_2", "flash_attention_2", (*_FLASH_PACKAGE, _heads(256), _no_sinks)),
        Backend("flash_attention_3", "flash_attention_3", (*_FLASH_PACKAGE, _heads(256), _no_sinks)),
        Backend("flash_attention_4", "flash_attention_4", (*_FLASH_PACKAGE, _heads(256))),
    )
}


def find(name: str) -> Backend:
    """The backend of that name. Raises ValueError for another one, with near matches."""
    if name not in BACKENDS:
        otherwise = f"choose one of {', '.join(BACKENDS)}"
        raise ValueError(f"unknown attention {name!r}: {hint(name, BACKENDS, otherwise)}")
    return BACKENDS[name]
