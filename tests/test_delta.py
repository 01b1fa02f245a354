"""The tree form of the gated delta rule and of the causal convolution against their plain forms."""

from __future__ import annotations

import models
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import parent_lists
from torch import nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from ddlab.delta import TreeRows, delta_rule_by_node, states_after, teach_tree_rows, tree_causal_conv, tree_delta_rule


def rows_of(parents: list[int]) -> TreeRows:
    ancestors = np.zeros((len(parents), len(parents)), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            ancestors[node] = ancestors[parent]
        ancestors[node, node] = True
    return TreeRows(np.array(parents), ancestors)


def path_to(parents: list[int], node: int) -> list[int]:
    return [*path_to(parents, parents[node]), node] if node >= 0 else []


def inputs(n: int, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Decays from almost none to almost all, key heads shared by value heads."""
    torch.manual_seed(seed)
    return dict(
        query=torch.randn(1, n, 2, 8, dtype=dtype),
        key=torch.randn(1, n, 2, 8, dtype=dtype),
        value=torch.randn(1, n, 4, 6, dtype=dtype),
        g=-torch.rand(1, n, 4, dtype=dtype) * 10.0 ** torch.randint(-3, 2, (1, n, 4)),
        beta=torch.rand(1, n, 4, dtype=dtype),
        initial_state=torch.randn(1, 4, 8, 6, dtype=dtype),
    )


@given(parent_lists(), st.integers(0, 2**16))
def test_tree_form_equals_one_recurrence_step_per_node(parents: list[int], seed: int) -> None:
    rows, x = rows_of(parents), inputs(len(parents), seed)
    out, writes = tree_delta_rule(**x, rows=rows)
    plain, states = delta_rule_by_node(**x, rows=rows)
    assert torch.allclose(out, plain, rtol=0, atol=1e-10)
    for node in range(len(parents)):
        after = writes.state_after(torch.tensor(path_to(parents, node)))
        assert torch.allclose(after[0], states[node], rtol=0, atol=1e-10)


@given(parent_lists(), st.integers(1, 4), st.integers(0, 2**16))
def test_states_of_several_layers_at_once_are_those_of_each(parents: list[int], layers: int, seed: int) -> None:
    rows, path = rows_of(parents), torch.tensor(path_to(parents, len(parents) - 1))
    given_inputs = [inputs(len(parents), seed + layer) for layer in range(layers)]
    before = [x["initial_state"].clone() for x in given_inputs]
    together = states_after([tree_delta_rule(**x, rows=rows)[1] for x in given_inputs], path)
    for x, kept, state in zip(given_inputs, before, together, strict=True):
        _, states = delta_rule_by_node(**x, rows=rows)
        assert state.shape == kept.shape and torch.allclose(state[0], states[len(parents) - 1], rtol=0, atol=1e-10)
        assert torch.equal(x["initial_state"], kept)  # a snapshot


@pytest.mark.parametrize("n", [1, 2, 65, 130])
def test_a_chain_is_transformers_own_chunk_rule(n: int) -> None:
    x = inputs(n, seed=n, dtype=torch.float32)
    out, writes = tree_delta_rule(**x, rows=rows_of([-1, *range(n - 1)]))
    theirs, state = qwen.torch_chunk_gated_delta_rule(**x, output_final_state=True, use_qk_l2norm_in_kernel=True)
    assert torch.allclose(out, theirs, rtol=0, atol=2e-5)
    assert torch.allclose(writes.state_after(torch.arange(n)), state, rtol=0, atol=2e-5)


def test_long_decays_do_not_overflow() -> None:
    """Between two branches the difference of log decays is positive and large; it must never be exponentiated."""
    parents = [-1] + [0] * 4 + list(range(4, 23))
    x = inputs(len(parents), 0, torch.float32)
    x["g"] = torch.full_like(x["g"], -60.0)
    out, writes = tree_delta_rule(**x, rows=rows_of(parents))
    assert torch.isfinite(out).all() and torch.isfinite(writes.state_after(torch.tensor([0, 1]))).all()


@given(parent_lists(), st.integers(1, 5), st.integers(0, 2**16))
def test_conv_on_a_tree_is_a_plain_conv_on_each_path(parents: list[int], kernel: int, seed: int) -> None:
    torch.manual_seed(seed)
    n, channels = len(parents), 3
    window, new = torch.randn(1, channels, kernel), torch.randn(1, channels, n)
    weight, bias = torch.randn(channels, kernel), torch.randn(channels)
    out = tree_causal_conv(torch.cat([window, new], -1), weight, bias, "silu", rows_of(parents))
    for node in range(n):
        path = torch.cat([window, new[:, :, path_to(parents, node)]], -1)
        plain = nn.functional.silu(nn.functional.conv1d(path, weight[:, None], bias, groups=channels))
        assert torch.allclose(out[..., node], plain[..., -1], atol=1e-5)


def test_what_a_verify_keeps_grows_with_rows_times_key_plus_value_not_with_a_state_per_node() -> None:
    sizes = {}
    for n in (16, 32, 64):
        _, writes = tree_delta_rule(**inputs(n, 0, torch.float32), rows=rows_of([-1] + [0] * (n - 1)))
        sizes[n] = writes.nbytes
    assert sizes[16] == 16 * 4 * (2 * 8 + 4 * 6 + 4)  # rows x float32 x (keys + writes + log decays)
    assert sizes[32] == 2 * sizes[16] and sizes[64] == 4 * sizes[16]


def test_a_taught_module_is_unchanged_for_everybody_else() -> None:
    target = models.target("hybrid")
    forward = type(target.model.layers[0].linear_attn).forward
    before = target(torch.arange(9)[None]).logits
    for _ in range(2):  # twice: wrapped once
        teach_tree_rows(target.model.layers[0].linear_attn)
    assert type(target.model.layers[0].linear_attn).forward is forward
    assert torch.equal(target(torch.arange(9)[None]).logits, before)
    assert not hasattr(qwen.torch_chunk_gated_delta_rule.__wrapped__, "_ddlab")


def test_a_linear_attention_that_is_no_gated_delta_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="gated delta rule of Qwen3-Next and Qwen3"):
        teach_tree_rows(nn.Linear(2, 2))
