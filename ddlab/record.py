"""From live objects to data: the header of a trace and the record of a round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ddlab.attention import attention_backend
from ddlab.sampling import Choice, Sampling, Walk
from ddlab.trace import Step, new_header
from ddlab.tree import DraftTree

if TYPE_CHECKING:
    from ddlab.pair import Pair, Prompt

DRAFT_BEST = 8  # how many of the drafter's candidates per depth a trace keeps


def describe_pair(pair: Pair) -> dict[str, Any]:
    """What ran: names, layer kinds, windows, dtypes, backend, and every convention of the drafter with its source."""
    config = pair.text_config
    described: dict[str, Any] = {
        "name": pair.name,
        "source": pair.source,
        "target": type(pair.target).__name__,
        "layer_types": list(pair.layer_types),
        "windows": list(pair.windows),
        "dtype": str(pair.dtype).removeprefix("torch."),
        "recurrent_state_dtype": "float32" if "linear_attention" in pair.layer_types else None,
        "device": str(pair.device),
        "attention": pair.attention,
        "rope": dict(getattr(config, "rope_parameters", None) or {}),
        "max_positions": pair.max_positions,
        "vocabulary": f"{pair.vocab_size} ids, {pair.rows} rows in the head",
        "drafter": None,
    }
    if pair.drafter is not None:
        last = len(pair.layers) - 1
        taps = pair.drafter.settings.target_layer_ids
        described["drafter"] = pair.drafter.settings.to_dict() | {
            "dtype": str(pair.drafter.model.dtype).removeprefix("torch."),
            "attention": attention_backend(pair, "drafter"),
            "tap_of_last_layer": "after the final norm" if last in taps else None,
        }
    return described


def trace_header(
    pair: Pair, sampling: Sampling, prompt: Prompt, first_token: int | None, **settings: Any
) -> dict[str, Any]:
    """The header of a trace: what ran, how it was set, and the exact prompt."""
    noise = "Gumbel, Philox keyed by (seed, position)" if sampling.temperature else None
    settings |= {
        "temperature": sampling.temperature,
        "tree_temperature": 1.0,  # the tree is built from the drafter's own probabilities
        "seed": sampling.seed,
        "noise": noise,
        "logits_processor": [type(p).__name__ for p in sampling.processors or ()],
    }
    return new_header(pair=describe_pair(pair), settings=settings, prompt=prompt.to_dict(), first_token=first_token)


def round_record(
    index: int,
    start: int,
    tree: DraftTree,
    choice: Choice,
    taken: Walk,
    best: tuple[np.ndarray, np.ndarray] | None,
    edited: list[str],
    engine: str,
    times: dict[str, float],
) -> Step:
    """One round as data.

    choice: with the log-probabilities of the drafted nodes asked for. best: ``top_tokens`` of the draft logits that the
    tree was built from.
    """
    node_log_prob = np.full(len(tree), np.nan, dtype=np.float32)
    node_log_prob[1:] = _numpy(choice.asked)
    drafted: dict[str, Any] = {}
    if best is not None and best[0].size:
        ids, log_probs = (x[:, :DRAFT_BEST] for x in best)
        drafted = {"draft_ids": ids.copy(), "draft_log_probs": log_probs.astype(np.float32)}
    return Step(
        index=index,
        start=start,
        tree=tree,
        target_choice=_numpy(choice.tokens),
        target_log_prob=_numpy(choice.log_prob),
        margin=_numpy(choice.margin),
        node_log_prob=node_log_prob,
        path=taken.path,
        bonus=taken.bonus,
        emitted=taken.emitted(tree),
        stop_reason=taken.stop_reason,
        edited=tuple(edited),
        engine=engine,
        times=dict(times),
        **drafted,
    )


def _numpy(x: Tensor) -> np.ndarray:
    """A copy that keeps no tensor alive; floats as float32."""
    return (x.float() if x.is_floating_point() else x).cpu().numpy().copy()
