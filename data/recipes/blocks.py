"""Many blocks of many texts in one forward of the drafter's own model: training's form of `Drafter.propose`.

Taps, slot 0, positions and masks come from the drafter's settings. The tests hold the hidden states made here to
`Drafter.propose`, block by block, so that training and decoding cannot disagree.
"""

from __future__ import annotations

import numpy as np
import torch
from batches import Batches
from torch.nn import functional as F

from ddlab.drafter import Drafter
from ddlab.pair import Pair


def target_pass(pair: Pair, ids: torch.Tensor, taps: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [b, t], padded on the right -> features [b, t, taps * hidden] and last hidden states [b, t, hidden].

    The output of layer l is hidden_states[l + 1], as in `ddlab.drafter.FeatureTap`.
    """
    out = pair.text_model(input_ids=ids, use_cache=False, output_hidden_states=True)
    features = torch.cat([out.hidden_states[layer + 1] for layer in taps], dim=-1)
    return features, out.last_hidden_state


class KeptPasses:
    """`target_pass` of every text of a corpus, made once: drafting reads a text tens of times."""

    def __init__(self, pair: Pair, batches: Batches, taps: tuple[int, ...], tokens: int = 2**17) -> None:
        hidden, length = pair.embed.shape[1], batches.corpus.lengths + len(batches.prefix)
        start = np.cumsum(length) - length
        self.start = torch.from_numpy(start).to(pair.device)
        like = {"dtype": pair.dtype, "device": pair.device}
        size = self._positions(batches)
        self.features = torch.zeros(size, len(taps) * hidden, **like)
        self.last = torch.zeros(size, hidden, **like)
        order, per = np.argsort(length, kind="stable"), max(1, tokens // batches.longest)
        for i in range(0, len(order), per):
            rows = order[i : i + per]
            ids, _ = batches.texts(rows, int(length[rows].max()))
            column = torch.arange(ids.shape[1], device=pair.device)
            inside = column < torch.from_numpy(length[rows]).to(pair.device)[:, None]
            place = (self.start[rows, None] + column)[inside]
            with torch.no_grad():
                features, last = target_pass(pair, ids, taps)
            self.features[place], self.last[place] = features[inside], last[inside]

    @staticmethod
    def size(pair: Pair, batches: Batches, taps: tuple[int, ...]) -> int:
        """Bytes."""
        return KeptPasses._positions(batches) * (len(taps) + 1) * pair.embed.shape[1] * pair.dtype.itemsize

    @staticmethod
    def _positions(batches: Batches) -> int:
        """All texts, and a width of zeros behind the last."""
        return int(batches.corpus.lengths.sum()) + len(batches.corpus) * len(batches.prefix) + batches.longest

    def __call__(self, rows: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `target_pass` of the texts `rows` cut at `width`; behind a text's end, what the next one has."""
        place = self.start[rows][:, None] + torch.arange(width, device=rows.device)
        return self.features[place], self.last[place]


def block_masks(drafter: Drafter, anchors: torch.Tensor, context: int) -> dict[str, torch.Tensor]:
    """Who sees whom, by layer type: bool [b, a * B, context + a * B] for anchors [b, a].

    A block sees the context before its anchor (in sliding layers nearer than the window) and itself, never
    another block.
    """
    s, (_, blocks) = drafter.settings, anchors.shape
    size = s.block_size
    slot = torch.arange(blocks * size, device=anchors.device)
    anchor = anchors.repeat_interleave(size, dim=1)[:, :, None]  # [b, a * B, 1]
    query = anchor + (slot % size)[None, :, None]  # positions
    key = torch.arange(context, device=anchors.device)[None, None]  # [1, 1, context]
    own = (slot[:, None] // size) == (slot[None] // size)  # [a * B, a * B]
    distance = slot[:, None] - slot[None]
    masks = {}
    for kind in dict.fromkeys(s.layer_types):
        before, within = key < anchor, own
        if kind == "sliding_attention":
            before = before & (query - key < s.sliding_window)
            within = within & (distance.abs() < s.sliding_window)
        if s.block_attention[kind] == "causal":
            within = within & (distance >= 0)
        masks[kind] = torch.cat([before, within.expand(len(anchors), -1, -1)], dim=2)
    return masks


def block_hidden(
    drafter: Drafter,
    features: torch.Tensor,
    ids: torch.Tensor,
    anchors: torch.Tensor,
    embed: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The drafted slots' hidden states [b, a, depth, hidden] of the blocks at `anchors` [b, a].

    features: [b, t, taps * hidden] of the texts `ids` [b, t]. embed: the target's embedding weight. dtype: of the
    residual stream (under autocast, its dtype).
    """
    s, (batch, blocks) = drafter.settings, anchors.shape
    context = ids.shape[1]
    looked_up = ids.new_full((batch, blocks, s.block_size), s.mask_token_id)
    looked_up[:, :, 0] = ids.gather(1, anchors)
    noise = F.embedding(looked_up.view(batch, -1), embed).to(dtype) * s.input_embedding_scale
    masks = {
        kind: torch.zeros(visible.shape, dtype=dtype, device=ids.device).masked_fill_(~visible, torch.finfo(dtype).min)[
            :, None
        ]
        for kind, visible in block_masks(drafter, anchors, context).items()
    }
    slots = torch.arange(s.block_size, device=ids.device)
    positions = torch.cat(
        [
            torch.arange(context, device=ids.device).expand(batch, -1),
            (anchors[:, :, None] + slots).view(batch, -1),
        ],
        dim=1,
    )
    out = drafter.model(
        noise_embeds=noise,
        context_hidden_states=features.to(dtype),
        attention_mask=masks,
        position_ids=positions,
        cache=None,
    )
    hidden = out.last_hidden_state.view(batch, blocks, s.block_size, -1)
    return hidden[:, :, s.block_size - s.depth :]
