"""DFlash block drafting on Transformers' own DFlash assistant class.

A block is the last committed token (the anchor) and B-1 mask tokens. Its queries see the context keys and
values made from the target's hidden states, computed once per committed token, and the block itself, under a
mask that is built here and can be looked at (`Drafter.masks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import (
    MuseGlimmerAssistantRotaryEmbedding,
    rotate_half,
)

from . import checkpoint
from .attention import BACKENDS, check, check_name, drafter_calls, find, name_of
from .draft_cache import BlockCache, DraftCache
from .layouts import DrafterSettings, read_config

__all__ = ["DraftCache", "Drafter", "DrafterSettings", "FeatureTap"]


class Drafter:
    """A DFlash drafter: `ingest` the features of committed tokens, `propose` logits for the next block.

    The embedding and the head are the target's and are given to `propose`; a drafter with a head over a
    reduced vocabulary keeps its own (`own_head` [rows, hidden]) and `d2t` [rows], the target id of each row.
    """

    def __init__(
        self,
        model: MuseGlimmerAssistantModel,
        settings: DrafterSettings,
        *,
        own_head: torch.Tensor | None = None,
        d2t: torch.Tensor | None = None,
        name: str = "drafter",
        source: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.settings = model, settings
        self.own_head, self.d2t = own_head, d2t
        self.name, self.source = name, dict(source or {})
        self._last_masks: dict[str, Any] = {}  # by layer kind: what it was made for, and the mask

    def __repr__(self) -> str:
        s = self.settings
        parts = f"{len(s.layer_types)} layers, block {s.block_size}, taps {s.target_layer_ids}"
        return f"Drafter({self.name!r}: {parts})"

    @property
    def block_size(self) -> int:
        return self.settings.block_size

    @property
    def depth(self) -> int:
        """Drafted positions of a block."""
        return self.settings.depth

    @property
    def device(self) -> torch.device:
        return self.model.encoder.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.encoder.fc.weight.dtype

    def to(self, device: torch.device | str) -> Drafter:
        """Moves the drafter in place."""
        self.model.to(device)
        self.own_head = None if self.own_head is None else self.own_head.to(device)
        self.d2t = None if self.d2t is None else self.d2t.to(device)
        return self

    # -- context -------------------------------------------------------------------------------------------

    def new_cache(self) -> DraftCache:
        c = self.model.config
        return DraftCache(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, self.dtype, self.device)

    @torch.no_grad()
    def ingest(self, cache: DraftCache, features: torch.Tensor) -> None:
        """Append context: features [m, taps * hidden] of the next m tokens, from position cache.length on."""
        width = self.model.encoder.fc.in_features
        if features.ndim != 2 or features.shape[1] != width:
            raise ValueError(
                f"features are {list(features.shape)}; this drafter takes [tokens, {width}] (taps * hidden)"
            )
        m, start, head_dim = len(features), cache.length, self.model.config.head_dim
        if m == 0:
            return
        features = features.to(self.device, self.dtype)[None]
        context = self.model.encoder(features)  # [1, m, hidden], the same for all layers
        positions = torch.arange(start, start + m, device=self.device)[None]
        cos, sin = (t[:, None] for t in self.model.rotary_emb(context, positions))  # [1, 1, m, head_dim]
        cache.reserve(start + m)
        for i, layer in enumerate(self.model.layers):
            attention: Any = layer.self_attn
            keys = attention.k_norm(attention.k_proj(context).view(1, m, -1, head_dim)).transpose(1, 2)
            values = attention.v_proj(context).view(1, m, -1, head_dim).transpose(1, 2)
            cache.write(i, keys * cos + rotate_half(keys) * sin, values)  # [1, kv heads, m, head_dim] each
        cache.length = start + m

    # -- one block -----------------------------------------------------------------------------------------

    def block_ids(self, anchor: int) -> list[int]:
        """The ids looked up for a block: the anchor in slot 0, the mask in the others."""
        return [int(anchor)] + [self.settings.mask_token_id] * (self.block_size - 1)

    def masks(self, context: int) -> dict[str, torch.Tensor]:
        """Who sees whom after `context` committed tokens: bool [B, context + B] by layer type, True: visible.

        Sliding layers see keys closer than the window, measured in absolute positions from each query.
        """
        keys = torch.arange(context + self.block_size, device=self.device)
        return {kind: self._visible(kind, context, keys) for kind in dict.fromkeys(self.settings.layer_types)}

    def _visible(self, kind: str, context: int, keys: torch.Tensor) -> torch.Tensor:
        """bool [B, m]: which keys, given by position [m], the block behind `context` tokens sees in a layer kind."""
        s = self.settings
        query = torch.arange(context, context + s.block_size, device=self.device)[:, None]  # [B, 1]
        visible = torch.ones_like(query - keys, dtype=torch.bool)
        if kind == "sliding_attention":
            visible &= (query - keys).abs() < (s.sliding_window or 0)
        if s.block_attention[kind] == "causal":
            visible &= keys <= query
        return visible

    def _keys(self, kind: str, context: int, first: int, dense_part: bool) -> torch.Tensor:
        """Positions [m] of a mask's columns: keys from `first` on, or of those the ones that not every row sees."""
        s, end = self.settings, context
        if dense_part:
            reach = context + s.block_size - (s.sliding_window or 0)  # the oldest key that every row sees
            end = min(context, max(first, reach)) if kind == "sliding_attention" else first
        positions = torch.arange(context + s.block_size, device=self.device)
        return torch.cat([positions[first:end], positions[context:]])

    @torch.no_grad()
    def propose(
        self,
        cache: DraftCache,
        anchor: int,
        embed: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """One block -> float32 logits [depth, rows]; row j is for position cache.length + 1 + j.

        anchor: the last committed token; its position is cache.length. embed: the target's embedding weight
        [rows, hidden]. head: hidden [..., hidden] -> logits [..., rows]; the bare output embedding if
        `settings.scales_logits`. Ids the drafter does not know are -inf. The cache's context is not changed.
        """
        s, context, weight = self.settings, cache.length, self.model.encoder.fc.weight
        ids = torch.tensor(self.block_ids(anchor), device=embed.device)
        rows = F.embedding(ids, embed)  # [B, hidden]
        if s.input_embedding_scale != 1.0:
            rows = rows * s.input_embedding_scale
        noise = rows[None].to(weight.device, weight.dtype)
        out_of_reach = max(0, context - (s.sliding_window or 0) + 1)  # context rows no sliding query can see
        first = {"full_attention": 0, "sliding_attention": out_of_reach}
        backend = BACKENDS.get(name_of(self.model))
        dense_part = backend is not None and backend.dense_part
        masks = {}
        for kind in dict.fromkeys(s.layer_types):
            masks[kind] = self._mask(kind, context, first[kind], dense_part)
        cache.reserve(context + s.block_size)
        out = self.model(
            noise_embeds=noise,
            context_hidden_states=noise.new_empty(1, 0, weight.shape[1]),
            attention_mask=masks,
            position_ids=torch.arange(context, context + s.block_size, device=weight.device)[None],
            cache=BlockCache(cache, [first[kind] for kind in s.layer_types]),
        )
        hidden = out.last_hidden_state[0, s.block_size - s.depth :]  # [depth, hidden]
        return self._logits(hidden, embed, head)

    def _mask(self, kind: str, context: int, first: int, dense_part: bool) -> torch.Tensor:
        """Additive mask [1, 1, B, m] of a layer kind; behind a full window it is the one of the block before."""
        s, weight = self.settings, self.model.encoder.fc.weight
        if kind == "full_attention" and s.block_attention[kind] != "causal":
            columns = s.block_size if dense_part else context - first + s.block_size
            return weight.new_zeros((1, 1, s.block_size, columns))
        made_for = (context - first, dense_part, s.sliding_window, s.block_attention[kind], weight.device, weight.dtype)
        if self._last_masks.get(kind, (None,))[0] != made_for:
            visible = self._visible(kind, context, self._keys(kind, context, first, dense_part))
            self._last_masks[kind] = made_for, self._additive(visible)
        mask: torch.Tensor = self._last_masks[kind][1]
        return mask

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        """bool [B, keys] -> 0 or the dtype's lowest [1, 1, B, keys]: legal on eager and on sdpa alike."""
        mask = torch.zeros_like(visible, dtype=self.dtype)
        return mask.masked_fill_(~visible, torch.finfo(self.dtype).min)[None, None]

    def _logits(
        self, hidden: torch.Tensor, embed: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        s = self.settings
        if self.own_head is None:
            logits = head(hidden.to(embed.dtype)).float()  # [depth, rows]
        else:
            logits = F.linear(hidden, self.own_head).float()  # [depth, own rows]
        if s.output_multiplier != 1.0:
            logits = logits * s.output_multiplier
        if s.final_logit_softcapping is not None:
            logits = torch.tanh(logits / s.final_logit_softcapping) * s.final_logit_softcapping
        if self.own_head is not None and self.d2t is not None:
            full = logits.new_full((len(hidden), embed.shape[0]), -torch.inf)  # [depth, rows]
            return full.index_copy_(1, self.d2t, logits)
        if s.vocab_size is not None and s.vocab_size < logits.shape[1]:
            logits[:, s.vocab_size :] = -torch.inf
        return logits

    # -- where it comes from -------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, name: str | Path, *, revision: str | None = None, **arguments: Any) -> Drafter:
        """A folder, or a hub name (pin its revision), with config.json and safetensors.

        Further arguments as in `from_state`.
        """
        folder, commit = checkpoint.find_folder(name, revision)
        drafter = cls.from_state(*checkpoint.read_folder(folder), **arguments)
        drafter.name = str(name)
        drafter.source = {"name": str(name), "revision": revision, "commit": commit}
        return drafter

    @classmethod
    def from_state(
        cls,
        config: dict[str, Any],
        state: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        attention: str = "sdpa",
        drafts_from: str | None = None,
        block_attention: dict[str, str] | None = None,
        allow_unexpected: Sequence[str] = (),
    ) -> Drafter:
        """A drafter from a config.json and its tensors (kept, not copied, if they fit), in any known layout.

        dtype None: the checkpoint's. attention: a name of `ddlab.attention.BACKENDS`. drafts_from ("mask", "anchor")
        and block_attention (layer type -> "causal", "bidirectional") overrule the config; allow_unexpected names
        tensors to leave out. Raises ValueError for a config that does not fit, and one that lists all tensors that do
        not.
        """
        check_name(attention)
        model_config, settings = read_config(config, state, drafts_from=drafts_from, block_attention=block_attention)
        model = _empty_model(model_config, find(attention).implementation, bias=bool(config.get("attention_bias")))
        d2t = checkpoint.draft_to_target(state, settings.vocab_size)
        own = () if d2t is None else ("d2t", "t2d")
        tensors = {k: v for k, v in checkpoint.rename(state).items() if k not in (*own, *allow_unexpected)}
        expected = {name: t.shape for name, t in model.state_dict().items()}
        if d2t is not None:
            expected["lm_head.weight"] = torch.Size((len(d2t), model_config.hidden_size))
        checkpoint.check_state(expected, tensors)
        dtype = checkpoint.as_dtype(dtype) or tensors["encoder.fc.weight"].dtype
        tensors = {k: v.to(dtype) for k, v in tensors.items()}
        own_head = tensors.pop("lm_head.weight", None) if d2t is not None else None
        model.load_state_dict(tensors, assign=True)
        model.rotary_emb = MuseGlimmerAssistantRotaryEmbedding(model_config)
        model.eval().requires_grad_(False)
        drafter = cls(model, settings, own_head=own_head, d2t=d2t).to(device)
        check(attention, drafter_calls(drafter), whose="the drafter's ")
        return drafter


def _empty_model(config: MuseGlimmerAssistantConfig, attention: str, bias: bool) -> MuseGlimmerAssistantModel:
    """The class on the meta device; its attention projections get the biases that it has no setting for."""
    config._attn_implementation = attention
    with torch.device("meta"):
        model = MuseGlimmerAssistantModel(config)
        if bias:
            for layer in model.layers:
                for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                    old = getattr(layer.self_attn, name)
                    setattr(layer.self_attn, name, nn.Linear(old.in_features, old.out_features))
    return model


class FeatureTap:
    """Context manager: collects the outputs of decoder layers during a target forward, for `Drafter.ingest`.

    Layer l is the output of decoder layer l, as Transformers' hidden_states[l + 1]: for the last layer that
    is the output of the final norm. Only this tap's own hooks are removed on the way out.
    """

    def __init__(self, text_model: Any, layer_ids: Sequence[int], *, device: torch.device | None = None) -> None:
        last = len(text_model.layers) - 1
        self._modules = [text_model.norm if i == last else text_model.layers[i] for i in layer_ids]
        self._ids, self._device = tuple(layer_ids), device
        self._seen: dict[int, torch.Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> FeatureTap:
        for slot, module in enumerate(self._modules):
            self._handles.append(module.register_forward_hook(self._collect(slot)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if error is not None:
            self._seen.clear()

    def _collect(self, slot: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output  # [batch, rows, hidden]
            self._seen[slot] = hidden[0].detach().to(self._device or hidden.device)

        return hook

    def outputs(self) -> list[torch.Tensor]:
        """Of the last forward, [rows, hidden] each, in the order the layers were listed."""
        lost = [i for slot, i in enumerate(self._ids) if slot not in self._seen]
        if lost:
            raise RuntimeError(f"no forward of the target went through layers {lost} while they were tapped")
        device = self._seen[0].device
        return [self._seen[slot].to(device) for slot in range(len(self._ids))]

    def features(self) -> torch.Tensor:
        """`outputs` side by side: [rows, taps * hidden]."""
        return torch.cat(self.outputs(), dim=-1)
