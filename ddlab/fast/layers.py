"""A target's and a drafter's forward for the fast path: matrix products, and the kernels between them.

It computes what the modules of Transformers compute, on their own weights, for the architectures in `LAYERS`. Every
tensor that a launch reads or writes from outside lies in a buffer that stays where it is, so a forward can be captured
once and launched for every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ddlab.delta import TreeRows, tree_delta_rule
from ddlab.fast.attention import commit_rows, norm_rotate_store, tree_attention
from ddlab.fast.delta import DELTA_ROWS, START, commit_state, commit_window, tree_conv_silu, tree_delta
from ddlab.fast.norms import add_rms_norm, gated_rms_norm, silu_mul
from ddlab.fast.top import packed_top

if TYPE_CHECKING:
    from ddlab.pair import Pair
    from ddlab.tree import DraftTree

NORMS = {  # class -> are its weights stored less one?
    "LlamaRMSNorm": False,
    "MuseGlimmerAssistantRMSNorm": False,
    "Qwen3RMSNorm": False,
    "Qwen3_5RMSNorm": True,
}
LAYERS = ("LlamaDecoderLayer", "Qwen3DecoderLayer", "Qwen3_5DecoderLayer")
PROGRAMS = 264  # of one attention launch, about two for each multiprocessor of a large GPU


class Mailbox:
    """Small arrays that the host fills and the device gets in one copy.

    Args:
        arrays: name -> (torch dtype, shape).
    """

    def __init__(self, device: torch.device, **arrays: tuple[torch.dtype, tuple[int, ...]]):
        sizes = {name: dtype.itemsize * int(np.prod(shape)) for name, (dtype, shape) in arrays.items()}
        starts, end = {}, 0
        for name, size in sizes.items():
            starts[name] = end
            end += -(-size // 16) * 16
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._there = torch.zeros(end, dtype=torch.uint8, device=device)
        self.host: dict[str, np.ndarray] = {}
        self.there: dict[str, Tensor] = {}
        for name, (dtype, shape) in arrays.items():
            part = slice(starts[name], starts[name] + sizes[name])
            self.host[name] = self._host[part].view(dtype).view(shape).numpy()
            self.there[name] = self._there[part].view(dtype).view(shape)

    def send(self) -> None:
        """What was sent before must have been read: every round waits for the device once."""
        self._there.copy_(self._host, non_blocking=True)


def _linear(x: Tensor, module: Any) -> Tensor:
    return F.linear(x, module.weight, module.bias)


def _norm(h: Tensor, delta: Tensor | None, module: Any) -> Tensor:
    """``h += delta`` in place; the norm of it."""
    out = torch.empty_like(h)
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    add_rms_norm(h, delta, module.weight, eps, NORMS[type(module).__name__], out)
    return out


def _mlp(x: Tensor, module: Any) -> Tensor:
    gate = _linear(x, module.gate_proj)
    silu_mul(gate, _linear(x, module.up_proj), gate)
    return _linear(gate, module.down_proj)


def _attend(
    x: Tensor,
    module: Any,
    cos_sin: tuple[Tensor, Tensor],
    meta: Tensor,
    depth: Tensor,
    seen: Tensor,
    window: int | None,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """One attention layer; keys, values [kv_heads, capacity, dim]; the others as in `tree_attention`."""
    n, (kv_heads, _, dim) = len(x), keys.shape
    q, k, v = _linear(x, module.q_proj), _linear(x, module.k_proj), _linear(x, module.v_proj)
    heads = module.o_proj.in_features // dim
    gate = q if q.shape[1] == 2 * heads * dim else None
    norm = getattr(module, "q_norm", None)
    rows = x.new_empty(n, heads, dim)
    norms = None if norm is None else (module.q_norm.weight, module.k_norm.weight)
    eps = 0.0 if norm is None else norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    centred = norm is not None and NORMS[type(norm).__name__]
    norm_rotate_store(q, k, v, norms, eps, centred, *cos_sin, meta, rows, keys, values)
    splits = max(1, min(32, PROGRAMS // (kv_heads * -(-n * heads // kv_heads // 64))))
    out = x.new_empty(n, heads * dim)
    tree_attention(rows, keys, values, seen, depth, meta, module.scaling, window, splits, gate, out)
    return _linear(out, module.o_proj)


class TargetBuffers:
    """What is committed of one text, where launches expect it.

    keys, values [attention layers, kv_heads, capacity, dim]; state float32 [linear layers, v_heads, k_dim, v_dim];
    window [linear layers, channels, kernel].
    """

    def __init__(self, pair: Pair, capacity: int):
        config, device, dtype = pair.text_config, pair.device, pair.dtype
        linear: list[Any] = [layer.linear_attn for layer in pair.layers if hasattr(layer, "linear_attn")]
        attention: list[Any] = [layer.self_attn for layer in pair.layers if hasattr(layer, "self_attn")]
        self.capacity = capacity
        dim = attention[0].head_dim if attention else 1
        shape: tuple[int, ...] = (len(attention), config.num_key_value_heads, capacity, dim)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.state = self.window = torch.zeros(0, device=device)
        self.gates: list[Tensor] = []  # weights of the two small projections in one, a copy
        if linear:
            m = linear[0]
            shape = (len(linear), m.num_v_heads, m.head_k_dim, m.head_v_dim)
            self.state = torch.zeros(shape, dtype=torch.float32, device=device)
            self.window = torch.zeros(len(linear), m.conv_dim, m.conv_kernel_size, dtype=dtype, device=device)
            self.gates = [torch.cat([m.in_proj_b.weight, m.in_proj_a.weight]) for m in linear]


class TargetForward:
    """The target over ``n`` rows of a tree, and the commit of a path of them."""

    def __init__(self, pair: Pair, buffers: TargetBuffers, n: int, taps: Sequence[int]):
        self.pair, self.buffers, self.n, self.taps = pair, buffers, n, list(taps)
        device, dtype = pair.device, pair.dtype
        self.windows = sorted({w for k, w in zip(pair.layer_types, pair.windows, strict=True) if w is not None})
        layers, channels, kernel = buffers.window.shape if len(buffers.window) else (0, 0, 1)
        self.mail = Mailbox(
            device,
            meta=(torch.int32, (4,)),
            depth=(torch.int32, (n,)),
            tokens=(torch.int64, (n,)),
            table=(torch.int64, (n, kernel)),
            seen=(torch.uint8, (1 + len(self.windows), n, n)),
        )
        self.kept = Mailbox(device, meta=(torch.int32, (4,)), path=(torch.int64, (n,)))
        self.hidden = torch.zeros(n, pair.text_config.hidden_size, dtype=dtype, device=device)
        self.logits = torch.zeros(n, pair.rows, dtype=dtype, device=device)
        self.features = torch.zeros(n, len(self.taps), self.hidden.shape[1], dtype=dtype, device=device)
        self.features_kept = torch.zeros_like(self.features)
        if layers:
            _, v_heads, k_dim, v_dim = buffers.state.shape
            k_heads = (channels - v_heads * v_dim) // (2 * k_dim)
            self.rows = torch.zeros(layers, n, channels, dtype=dtype, device=device)
            self.writes = torch.zeros(layers, v_heads, n, v_dim, device=device)
            self.delta_keys = torch.zeros(layers, k_heads, n, k_dim, device=device)
            self.decay = torch.zeros(layers, v_heads, n, device=device)

    def address(self, tree: DraftTree, start: int) -> None:
        """Send a tree of at most n rows; the rows behind it see themselves alone and nobody sees them."""
        host, rows, kernel = self.mail.host, len(tree), self.mail.host["table"].shape[1]
        ancestors = tree.ancestors()
        host["meta"][:2] = start, tree.depth.max()
        for name, value in (("depth", tree.depth), ("tokens", tree.tokens)):
            host[name][:rows] = value
            host[name][rows:] = 0
        host["seen"][:] = np.eye(self.n, dtype=np.uint8)
        host["seen"][0, :rows, :rows] = ancestors
        for i, window in enumerate(self.windows):
            host["seen"][1 + i, :rows, :rows] = ancestors & (tree.depth[:, None] - tree.depth[None] < window)
        if len(self.buffers.window):
            table = TreeRows(tree.parents, ancestors).conv_table(kernel, kernel, torch.device("cpu"))
            host["table"][:rows] = table.numpy()
            host["table"][rows:] = 0
        self.mail.send()

    def run(self) -> None:
        """From the tokens sent to logits, features, and what a commit needs."""
        pair, mail, h = self.pair, self.mail.there, self.hidden
        torch.index_select(pair.embed, 0, mail["tokens"], out=h)
        positions = (mail["meta"][START] + mail["depth"]).long()[None]
        cos, sin = (x.reshape(self.n, -1) for x in pair.text_model.rotary_emb(h[None], positions))
        seen = {window: mail["seen"][1 + i] for i, window in enumerate(self.windows)} | {None: mail["seen"][0]}
        delta: Tensor | None = None
        linear = attention = 0
        for i, (layer, window) in enumerate(zip(pair.layers, pair.windows, strict=True)):
            module: Any = layer
            x = _norm(h, delta, module.input_layernorm)
            self._tap(i - 1, h)
            if hasattr(module, "linear_attn"):
                delta = self._linear_attention(linear, module.linear_attn, x)
                linear += 1
            else:
                keys, values = self.buffers.keys[attention], self.buffers.values[attention]
                delta = _attend(
                    x, module.self_attn, (cos, sin), mail["meta"], mail["depth"], seen[window], window, keys, values
                )
                attention += 1
            delta = _mlp(_norm(h, delta, module.post_attention_layernorm), module.mlp)
        x = _norm(h, delta, pair.text_model.norm)
        self._tap(len(pair.layers) - 2, h)
        self._tap(len(pair.layers) - 1, x)
        head: Any = pair.target.get_output_embeddings()
        torch.mm(x, head.weight.t(), out=self.logits)

    def _tap(self, layer: int, hidden: Tensor) -> None:
        for slot, tapped in enumerate(self.taps):
            if tapped == layer:
                self.features[:, slot] = hidden

    def _linear_attention(self, slot: int, m: Any, x: Tensor) -> Tensor:
        buffers, mail, n = self.buffers, self.mail.there, self.n
        rows = self.rows[slot]
        torch.mm(x, m.in_proj_qkv.weight.t(), out=rows)
        z = _linear(x, m.in_proj_z)
        gates = F.linear(x, buffers.gates[slot])
        mixed, out = torch.empty_like(rows), x.new_empty(n, m.value_dim)
        tree_conv_silu(rows, buffers.window[slot], mail["table"], m.conv1d.weight[:, 0], mixed)
        writes = self.writes[slot], self.delta_keys[slot], self.decay[slot]
        state, seen = buffers.state[slot], mail["seen"][0]
        if n <= DELTA_ROWS:
            tree_delta(mixed, gates, m.A_log, m.dt_bias, seen, mail["meta"], state, out, *writes)
        else:  # more rows than one program holds
            sizes = [m.key_dim, m.key_dim, m.value_dim]
            heads = zip(mixed.split(sizes, -1), (m.head_k_dim, m.head_k_dim, m.head_v_dim), strict=True)
            q, k, v = (part.reshape(1, n, -1, dim) for part, dim in heads)
            b, a = gates.split(m.num_v_heads, -1)
            g = -m.A_log.float().exp() * F.softplus(a.float() + m.dt_bias)
            found, left = tree_delta_rule(q, k, v, g[None], b.sigmoid()[None], _Seen(seen), state[None])  # type: ignore[arg-type]
            out.copy_(found.reshape(n, -1))
            for here, there in zip(writes, (left.writes, left.keys, left.log_decay), strict=True):
                here.copy_(there)
        normed = torch.empty_like(out)
        gated_rms_norm(out, z, m.norm.weight, m.norm.variance_epsilon, normed)
        return _linear(normed, m.out_proj)

    def address_path(self, path: Sequence[int], start: int) -> None:
        host = self.kept.host
        host["meta"][:] = start, 0, len(path), 0
        host["path"][: len(path)] = path
        host["path"][len(path) :] = 0
        self.kept.send()

    def run_commit(self) -> None:
        """Keep the rows of the path sent, in every layer."""
        buffers, path, meta = self.buffers, self.kept.there["path"], self.kept.there["meta"]
        if buffers.keys.numel():
            commit_rows(buffers.keys, path, meta)
            commit_rows(buffers.values, path, meta)
        if len(buffers.window):
            commit_state(buffers.state, self.writes, self.delta_keys, self.decay, path, meta)
            commit_window(buffers.window, self.rows, path, meta)
        torch.index_select(self.features, 0, path, out=self.features_kept)


class _Seen:
    """`TreeRows` whose ancestors are on the device already."""

    def __init__(self, seen: Tensor):
        self._seen = seen

    def ancestors(self, device: torch.device) -> Tensor:
        return self._seen.bool()


class DraftForward:
    """The drafter over one block, and over the features of new context.

    keys, values [layers, kv_heads, capacity, dim].
    """

    def __init__(self, pair: Pair, capacity: int):
        assert pair.drafter is not None
        self.pair, self.drafter, self.capacity = pair, pair.drafter, capacity
        drafter, device, dtype = self.drafter, self.drafter.device, self.drafter.dtype
        config, n = drafter.model.config, drafter.block_size
        shape = (config.num_hidden_layers, config.num_key_value_heads, capacity, config.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.mail = Mailbox(device, meta=(torch.int32, (4,)), tokens=(torch.int64, (n,)))
        self.context = Mailbox(device, meta=(torch.int32, (4,)))
        self.depth = torch.arange(n, dtype=torch.int32, device=device)
        self.seen = {kind: seen.to(torch.uint8).contiguous() for kind, seen in drafter.masks(0).items()}
        self.features = torch.zeros(n, drafter.model.encoder.fc.in_features, dtype=dtype, device=device)
        self.logits = torch.zeros(drafter.depth, pair.rows, device=device)
        self.tops: dict[int, Tensor] = {}

    def address(self, anchor: int, context: int) -> None:
        self.mail.host["meta"][0] = context
        self.mail.host["tokens"][:] = self.drafter.block_ids(anchor)
        self.mail.send()

    def run(self) -> None:
        """`Pair.propose` of the block sent."""
        pair, drafter, mail = self.pair, self.drafter, self.mail.there
        s, model = drafter.settings, drafter.model
        h = (F.embedding(mail["tokens"], pair.embed) * s.input_embedding_scale).to(drafter.dtype)
        cos_sin = self._rotary(mail["meta"], h)
        delta: Tensor | None = None
        for i, (layer, kind) in enumerate(zip(model.layers, s.layer_types, strict=True)):
            module: Any = layer
            window = s.sliding_window if kind == "sliding_attention" else None
            x = _norm(h, delta, module.input_layernorm)
            delta = _attend(
                x, module.self_attn, cos_sin, mail["meta"], self.depth, self.seen[kind], window,
                self.keys[i], self.values[i],
            )  # fmt: skip
            delta = _mlp(_norm(h, delta, module.post_attention_layernorm), module.mlp)
        hidden = _norm(h, delta, model.norm)[s.block_size - s.depth :]
        head = pair.bare_head if s.scales_logits else pair.head
        self.logits.copy_(drafter._logits(hidden, pair.embed, head))
        self.logits[:, pair.vocab_size :] = -torch.inf

    def run_top(self, n: int) -> None:
        """`packed_top` of the block's logits."""
        if n not in self.tops:
            self.tops[n] = self.logits.new_zeros(len(self.logits), 2 + 2 * n)
        packed_top(self.logits, n, self.tops[n])

    def address_context(self, features: Tensor, context: int) -> None:
        """features [m, taps * hidden] of at most a block of new tokens."""
        self.context.host["meta"][0] = context
        self.context.send()
        self.features[: len(features)] = features

    def run_context(self) -> None:
        """`Drafter.ingest` of the features sent, padded to a block."""
        model, meta = self.drafter.model, self.context.there["meta"]
        x: Tensor = model.encoder.fc(self.features)
        x = _norm(x, None, model.encoder.output_norm_enc)
        cos_sin = self._rotary(meta, x)
        for i, layer in enumerate(model.layers):
            m: Any = layer.self_attn
            k, v = _linear(x, m.k_proj), _linear(x, m.v_proj)
            norms, eps = (m.k_norm.weight, m.k_norm.weight), m.k_norm.variance_epsilon
            none = x.new_empty(len(x), 0, m.head_dim)
            norm_rotate_store(k, k, v, norms, eps, False, *cos_sin, meta, none, self.keys[i], self.values[i])

    def _rotary(self, meta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        positions = (meta[START] + self.depth).long()[None]
        cos, sin = self.drafter.model.rotary_emb(x[None], positions)
        return cos[0], sin[0]
