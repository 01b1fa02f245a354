"""Products from packed copies: the plain product, of the weight as it is now, and nowhere else."""

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from strategies import tree_of
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddlab import packed
from ddlab.decode import Decoder, generate
from ddlab.oracle import path_logits
from ddlab.packed import packed_layers
from ddlab.pair import Pair
from ddlab.verify import TargetState

PROMPT = [5, 17, 40, 8]
BLOCK = 6
needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this PyTorch has no MKL")
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@pytest.fixture(autouse=True)
def _small_heads_too(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(packed, "_LEAST", 1)
    with torch.no_grad():
        yield


def around(head: nn.Module) -> Any:
    """Of a pair without a drafter what `packed_layers` asks for."""
    return like_pair(lambda: head)


def like_pair(head: Callable[[], nn.Module]) -> Any:
    target = SimpleNamespace(get_output_embeddings=head)
    return SimpleNamespace(target=target, drafter=None, device=torch.device("cpu"), dtype=torch.float32)


def made(pair: Any) -> int:
    """How many copies are there?"""
    return sum(layer._copy is not None for layer in vars(pair).get("_packed", (None, []))[1])


def worst(got: torch.Tensor, right: torch.Tensor) -> float:
    return float((got - right).abs().max() / right.abs().max())


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [2, 3, 15, 16, 17, 70])
def test_several_rows_are_the_product(rows: int, bias: bool) -> None:
    head = nn.Linear(72, 301, bias=bias)
    pair, hidden = around(head), torch.randn(1, rows, 72)
    wide = None if head.bias is None else head.bias.double()
    for given in (hidden, hidden[0], torch.randn(72, rows).T):
        with packed_layers(pair):
            got = head(given)
        assert made(pair) == 1
        assert got.shape == (*given.shape[:-1], 301)
        assert worst(got, F.linear(given.double(), head.weight.double(), wide)) < 1e-6


def test_one_row_is_the_plain_product_bit_for_bit_and_needs_no_copy() -> None:
    head = nn.Linear(72, 301)
    pair, hidden = around(head), torch.randn(1, 1, 72)
    with packed_layers(pair):
        got = head(hidden)
    assert torch.equal(got, head(hidden))
    assert not made(pair)


@needs_onednn
@pytest.mark.parametrize("change", ["write", "load", "replace", "data", "head"])
def test_a_changed_weight_is_noticed(change: str) -> None:
    heads = [nn.Linear(72, 301, bias=False)]
    pair = like_pair(lambda: heads[-1])
    hidden, new = torch.randn(4, 72), torch.randn(301, 72)
    with packed_layers(pair):
        heads[-1](hidden)
        match change:
            case "write":
                heads[-1].weight.mul_(2)
            case "load":
                heads[-1].load_state_dict({"weight": new})
            case "replace":
                heads[-1].weight = nn.Parameter(new)
            case "data":
                heads[-1].weight.data = new
        got = heads[-1](hidden)
    if change == "head":
        heads.append(nn.Linear(72, 301, bias=False))
        with packed_layers(pair):
            got = heads[-1](hidden)
    assert worst(got, hidden.double() @ heads[-1].weight.double().T) < 1e-6


def test_the_head_is_its_own_again_after_the_block() -> None:
    head = nn.Linear(72, 301)
    pair = around(head)
    with pytest.raises(KeyboardInterrupt), packed_layers(pair), packed_layers(pair):
        raise KeyboardInterrupt
    assert "forward" not in vars(head)


def test_gradients_flow_through_the_plain_product() -> None:
    head, hidden = nn.Linear(72, 301), torch.randn(3, 72, requires_grad=True)
    with torch.enable_grad(), packed_layers(around(head)):
        head(hidden).sum().backward()
    torch.testing.assert_close(hidden.grad, head.weight.sum(0).expand(3, -1))


class Doubling(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden)


def replaced() -> nn.Linear:
    head: Any = nn.Linear(72, 301)
    plain = head.forward
    head.forward = lambda hidden: 2 * plain(hidden)
    return head


@pytest.mark.parametrize(
    "head",
    [Doubling(72, 301), replaced(), nn.Linear(72, 301).bfloat16(), nn.Linear(72, 301).double()],
    ids=["subclass", "replaced", "bfloat16", "float64"],
)
def test_a_head_that_is_no_plain_float32_layer_is_left_alone(head: nn.Linear) -> None:
    pair, hidden = around(head), torch.randn(5, 72).to(head.weight.dtype)
    with packed_layers(pair):
        got = head(hidden)
    assert torch.equal(got, head(hidden))
    assert not made(pair)


@pytest.mark.parametrize(("onednn", "least"), [(False, 1), (True, 72 * 301 + 1)])
def test_a_small_head_and_one_without_onednn_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, onednn: bool, least: int
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: onednn)
    monkeypatch.setattr(packed, "_LEAST", least)
    head, hidden = nn.Linear(72, 301), torch.randn(5, 72)
    with packed_layers(pair := around(head)):
        got = head(hidden)
    assert torch.equal(got, head(hidden))
    assert not made(pair)


@needs_mkl
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_over_a_blocks_rows_is_the_product_and_over_others_the_plain_one(bias: bool) -> None:
    layer = nn.Linear(72, 130, bias=bias)
    computed = packed._Packed(layer, 16)
    wide = None if layer.bias is None else layer.bias.double()
    for hidden in (torch.randn(15, 72), torch.randn(1, 17, 72)):
        assert torch.equal(computed(hidden), layer(hidden))
    assert computed._copy is None
    for hidden in (torch.randn(1, 16, 72), torch.randn(72, 16).T, torch.randn(2, 8, 72)):
        got = computed(hidden)
        assert got.shape == (*hidden.shape[:-1], 130)
        assert worst(got, F.linear(hidden.double(), layer.weight.double(), wide)) < 1e-6
    layer.weight.mul_(3)
    assert worst(computed(hidden), F.linear(hidden.double(), layer.weight.double(), wide)) < 1e-6


def pair_of(kind: str) -> Pair:
    target = models.target(kind)
    return Pair(target, models.random_drafter(target, block=BLOCK))


@needs_mkl
@pytest.mark.parametrize("kind", ["tied", "llama", "gemma3", "hybrid", "vlm"])
def test_trees_are_exact_and_texts_are_plain_decodings(kind: str) -> None:
    pair = pair_of(kind)
    state, tree = TargetState(pair), tree_of([-1, 0, 0, 1, 1, 2], 3, models.VOCAB)
    state.prefill(PROMPT)
    assert worst(state.verify(tree), path_logits(pair, PROMPT, tree)) < 1e-5
    text_layers = [m for m in pair.text_model.modules() if type(m) is nn.Linear]
    assert made(pair) == 1 + len(text_layers)
    texts = []
    for method in ("ar", "ddtree"):
        decoder = Decoder(pair, method, budget=None, max_new_tokens=12, stop_token_ids=())
        list(decoder.run(PROMPT))
        texts.append(decoder.output_ids)
    assert texts[0] == texts[1]
    drafter_layers = [m for m in pair.drafter.model.layers.modules() if type(m) is nn.Linear]
    assert made(pair) == 1 + len(text_layers) + len(drafter_layers)


@needs_onednn
def test_of_a_model_too_large_and_where_there_is_no_mkl_only_the_head_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for owner, name, value in ((packed, "_MOST", 1000), (torch.backends.mkl, "is_available", lambda: False)):
        pair = pair_of("llama")
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            list(Decoder(pair, budget=None, max_new_tokens=4, stop_token_ids=()).run(PROMPT))
        assert made(pair) == 1


@needs_onednn
def test_a_pair_that_has_decoded_can_be_copied() -> None:
    pair = pair_of("llama")
    settings: Any = {"budget": None, "max_new_tokens": 4, "stop_token_ids": ()}
    first = generate(pair, PROMPT, **settings)
    other = copy.deepcopy(pair)
    assert made(pair) and not made(other)
    assert generate(other, PROMPT, **settings).output_ids == first.output_ids
    assert made(other) == made(pair)


class Storages(TorchDispatchMode):
    """Asks every tensor for its storage, as torch's memory tracker does."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        assert all(x.untyped_storage() is not None for x in tree_leaves(out) if isinstance(x, torch.Tensor))
        return out


def test_a_mode_that_sees_every_tensor_sees_plain_products() -> None:
    pair = pair_of("llama")
    with Storages():
        list(Decoder(pair, budget=None, max_new_tokens=4, stop_token_ids=()).run(PROMPT))
    assert not made(pair)


def test_plain_decoding_makes_no_copy() -> None:
    pair = pair_of("llama")
    list(Decoder(pair, "ar", max_new_tokens=4, stop_token_ids=()).run(PROMPT))
    assert not made(pair)
