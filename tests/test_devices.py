"""A target spread over several devices: nothing meets a tensor of another one, and nothing else changes.

No second device is needed. Under PyTorch's fake tensors "cpu:1" and "cpu:2" are two devices: shapes and devices are
worked out, numbers are not, and an operation on tensors of different devices raises.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError, FakeTensorMode
from torch.overrides import TorchFunctionMode

from ddlab.audit import audit
from ddlab.decode import generate
from ddlab.oracle import Reader, path_logits
from ddlab.pair import Pair
from ddlab.tree import DraftTree
from ddlab.verify import TargetState

TREE = DraftTree.from_parents([9, 1, 2, 3, 4, 5], [-1, 0, 0, 1, 1, 2])
CHAIN = DraftTree.from_parents([3, 4], [-1, 0])
EMBED, HEAD = "cpu:1", "cpu:2"  # the host is "cpu"


class OnItsDevice(TorchFunctionMode):
    """`torch.tensor(..., device=...)` of a fake tensor forgets the device, which nothing else does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") == "tensor" and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            made = func(*args, **kwargs)
            return torch.empty(made.shape, dtype=made.dtype, device=device)
        return func(*args, **kwargs)


class Align(AlignDevicesHook):
    """What accelerate puts on a module that it dispatched; the weights are there already."""

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module


def put(module: nn.Module, device: str) -> None:
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                part._parameters[name] = nn.Parameter(weight.to(device), requires_grad=False)
        for name, value in part._buffers.items():
            if value is not None:
                part._buffers[name] = value.to(device)


def spread(model: nn.Module, text_model: Any, head: nn.Module) -> None:
    """Layers in turn on two devices, embedding on one, norm and head on the other, as accelerate runs them."""
    places = {text_model.embed_tokens: EMBED, text_model.rotary_emb: EMBED, text_model.norm: HEAD, head: HEAD}
    places |= {layer: (EMBED, HEAD)[i % 2] for i, layer in enumerate(text_model.layers)}
    keep = ["past_key_values", "cache"]
    put(model, EMBED)  # also what is not run here
    for module, device in places.items():
        put(module, device)
        add_hook_to_module(module, Align(execution_device=torch.device(device), skip_keys=keep))
    whole = Align(execution_device=torch.device(EMBED), io_same_device=True, skip_keys=keep)
    add_hook_to_module(model, whole)


KINDS = ["dense", "tied", "llama", "swa", "gemma3", "hybrid", "hybrid8", "vlm", "gpt_oss", "qwen3_next", "qwen3_5_moe"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensors_of_different_devices_meet(kind: str) -> None:
    experts = kind in ("gpt_oss", "qwen3_next", "qwen3_5_moe")  # their fake kernels take bfloat16 alone
    model: Any = models.fresh_target(kind, torch.bfloat16 if experts else torch.float32)
    drafter = models.random_drafter(model, taps=(0, model.config.get_text_config().num_hidden_layers - 1))
    pair = Pair(model, drafter)
    with OnItsDevice(), FakeTensorMode(allow_non_fake_inputs=True):
        spread(model, pair.text_model, model.get_output_embeddings())
        put(drafter.model, EMBED)
        assert str(pair.device) == EMBED and {str(p.device) for p in pair.text_model.parameters()} == {EMBED, HEAD}
        state, drafts = TargetState(pair, tapped=True), drafter.new_cache()
        state.prefill([5, 6, 7, 8])
        drafter.ingest(drafts, state.tapped_features)
        for tree, path in ((TREE, [0, 1, 4]), (CHAIN, [0]), (TREE, [0, 2, 5])):
            assert pair.propose(drafts, 9).shape == (drafter.depth, models.VOCAB)
            assert state.verify(tree).shape == (len(tree), models.VOCAB)
            state.commit(path)
            drafter.ingest(drafts, state.features_of(path))
        assert state.length == drafts.length == 4 + 3 + 1 + 3
        on = [
            None if kept is None else {str(tensor.device) for tensor in kept} for kept in state.cache.committed.linear
        ]
        assert all(devices in (None, {(EMBED, HEAD)[i % 2]}) for i, devices in enumerate(on))
        assert path_logits(pair, [5, 6, 7], TREE).shape == (len(TREE), models.VOCAB)


def test_the_test_itself_finds_tensors_that_meet() -> None:
    pair = Pair(models.fresh_target("dense"))
    with OnItsDevice(), FakeTensorMode(allow_non_fake_inputs=True):
        spread(pair.target, pair.text_model, pair.target.get_output_embeddings())
        put(pair.layers[1].self_attn.q_proj, EMBED)  # one projection on the wrong device
        with pytest.raises(FakeTensorDeviceMismatchError):
            TargetState(pair).prefill([5, 6, 7])


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_layers_that_accelerate_loads_when_they_run_decode_the_same(kind: str, tmp_path: Path) -> None:
    model: Any = models.fresh_target(kind)
    plain = Pair(model, models.random_drafter(model))
    expected = [generate(plain, [5, 6, 7], budget=8, max_new_tokens=10, temperature=t, seed=2) for t in (0.0, 0.8)]
    places: dict[str, Any] = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(4)} | {"lm_head": "disk"}
    moved = dispatch_model(models.fresh_target(kind), places, main_device="cpu", offload_dir=str(tmp_path))
    assert {p.device.type for p in moved.parameters()} == {"cpu", "meta"}
    pair = Pair(moved, models.random_drafter(model))
    for temperature, before in zip((0.0, 0.8), expected, strict=True):
        trace = generate(pair, [5, 6, 7], budget=8, max_new_tokens=10, temperature=temperature, seed=2)
        assert trace.output_ids == before.output_ids
        assert [step.tree for step in trace.steps] == [step.tree for step in before.steps]
        assert audit(pair, trace).ok
    reader = Reader(pair)
    reader.read([5, 6, 7])
    torch.testing.assert_close(reader.branch(TREE), path_logits(plain, [5, 6, 7], TREE), rtol=1e-4, atol=1e-4)
