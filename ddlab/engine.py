"""Engines: what runs a decoder's forwards. ``eager`` calls the modules; ``graph`` launches captured CUDA graphs.

Both compute the same on the same weights; this module says which one a pair gets, and why.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ddlab.draft_cache import DraftCache
from ddlab.names import one_of
from ddlab.top import top_tokens
from ddlab.verify import TargetState

if TYPE_CHECKING:
    from ddlab.graph import GraphEngine
    from ddlab.pair import Pair

ENGINES = ("eager", "graph")


def find_engine(pair: Pair, name: str | None = None, linear_state: str = "exact") -> EagerEngine | GraphEngine:
    """The engine of a pair by name; None: graph on CUDA where it is legal, else eager.

    Raises:
        ValueError: graph was asked for and cannot be; says why.
    """
    if name is None:
        name = "graph" if pair.device.type == "cuda" and refusal(pair, linear_state) is None else "eager"
    one_of("engine", name, ENGINES)
    if name == "eager":
        return EagerEngine(pair)
    why = refusal(pair, linear_state)
    if why is not None:
        raise ValueError(f"engine='graph' cannot run this pair: {why}. Use engine='eager'")
    kept: GraphEngine | None = pair.__dict__.get("_graph_engine")
    if kept is None or kept.signature != _signature(pair):
        from ddlab import graph  # it needs Triton

        kept = pair.__dict__["_graph_engine"] = graph.GraphEngine(pair, _signature(pair))
    return kept


def refusal(pair: Pair, linear_state: str = "exact") -> str | None:
    """Why ``engine="graph"`` cannot run this pair; None where it can."""
    if linear_state != "exact":
        return f"it computes the exact state only, not linear_state={linear_state!r}"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # kernels as numpy, on any device: for tests
    if pair.device.type != "cuda" and not interpreted:
        return f"it captures CUDA graphs, and the target is on {pair.device}"
    try:
        from ddlab.fast.layers import LAYERS, NORMS
    except ImportError as error:
        return f"its kernels need Triton ({error})"
    return _target_refusal(pair, LAYERS, NORMS) or (_drafter_refusal(pair) if pair.drafter else None)


def _target_refusal(pair: Pair, layers: Sequence[str], norms: dict[str, bool]) -> str | None:
    config = pair.text_config
    kinds = {type(layer).__name__ for layer in pair.layers} - set(layers)
    if kinds:
        return f"it knows {', '.join(layers)}, not {', '.join(sorted(kinds))}"
    if type(pair.text_model.norm).__name__ not in norms:
        return f"it does not know the norm {type(pair.text_model.norm).__name__}"
    if config.hidden_act not in ("silu", "swish"):
        return f"it knows the activation silu, not {config.hidden_act}"
    rope = getattr(pair.text_model.rotary_emb, "rope_type", "default")
    if rope not in ("default", "linear", "llama3", "yarn"):
        return f"it does not know rope_type {rope!r}, whose frequencies change with the length"
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        return "it does not know a soft cap on the logits"
    return _weights_refusal("target", pair.target, pair.device)


def _drafter_refusal(pair: Pair) -> str | None:
    drafter = pair.drafter
    assert drafter is not None
    if drafter.model.config.hidden_act not in ("silu", "swish"):
        return f"it knows the activation silu, not the drafter's {drafter.model.config.hidden_act}"
    return _weights_refusal("drafter", drafter.model, pair.device)


def _weights_refusal(part: str, model: nn.Module, device: torch.device) -> str | None:
    devices = {str(p.device) for p in model.parameters()} - {str(device)}
    if devices:
        return f"the {part}'s weights are on {', '.join(sorted(devices))} too: it wants one device"
    kinds = {p.dtype for p in model.parameters()} - {torch.float32}  # a norm or a decay may be kept in float32
    if len(kinds) > 1 or kinds - {torch.bfloat16, torch.float16}:
        return f"the {part}'s weights are {', '.join(sorted(str(kind) for kind in kinds))}"
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook"):
            return f"accelerate moves the {part}'s weights ({name or 'model'})"
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            return f"{name} is a {type(module).__name__}, not a plain linear layer"
    return None


class EagerEngine:
    """The modules themselves."""

    name = "eager"
    read_scores = None  # as Sampling.choose reads them

    def __init__(self, pair: Pair):
        self.pair = pair

    def target(self, linear_state: str, tapped: bool, tokens: int) -> TargetState:
        """An empty text that will grow to ``tokens`` tokens."""
        return TargetState(self.pair, linear_state, tapped)

    def drafts(self, tokens: int) -> DraftCache:
        return self._drafter.new_cache()

    def propose(self, drafts: DraftCache, anchor: int) -> Tensor:
        """`Pair.propose`."""
        return self.pair.propose(drafts, anchor)

    def top_tokens(self, logits: Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
        """`ddlab.top.top_tokens`."""
        return top_tokens(logits, k)

    def ingest(self, drafts: DraftCache, features: Tensor) -> None:
        """`Drafter.ingest`."""
        self._drafter.ingest(drafts, features)

    @property
    def _drafter(self) -> Any:
        return self.pair.drafter


def _signature(pair: Pair) -> tuple[Any, ...]:
    """Changes when weights are replaced or written to: captured launches know addresses, and a few copies."""
    models = [pair.target] + ([] if pair.drafter is None else [pair.drafter.model])
    return tuple((p.data_ptr(), p._version) for model in models for p in model.parameters())
