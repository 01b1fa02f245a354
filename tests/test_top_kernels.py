"""The kernels that read a vocabulary against the plain forms: the largest logits of a draft, the target's choices.

Without a GPU they are interpreted.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlab import sampling, tree
from ddlab import top as plainly
from ddlab.sampling import Sampling

pytest.importorskip("triton", reason="the fast path is written in Triton")

from ddlab.fast import choice, top

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INF, NAN = math.inf, math.nan
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def draw(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


# ---- the largest logits of a draft -----------------------------------------------------------------------------------


def written(x: torch.Tensor) -> torch.Tensor:
    """NaN and infinities as numbers, which torch.equal compares."""
    return x.nan_to_num(7e30, 8e30, -8e30)


def kernels_top(logits: torch.Tensor, n: int) -> torch.Tensor:
    packed = torch.full((len(logits), 2 + 2 * n), 77.0, device=DEVICE)
    top.packed_top(logits.to(DEVICE), n, packed)
    return packed


def assert_top(logits: torch.Tensor, n: int, stable: bool = True) -> torch.Tensor:
    """Equals at the cut may be any of them; where the kernels take them (stable), it is those of the lowest ids."""
    packed, plain = kernels_top(logits, n).cpu(), plainly.packed_top(logits, n)
    values, ids = packed[:, 2 : 2 + n], packed[:, 2 + n :].long()
    assert torch.equal(written(packed[:, 0]), written(plain[:, 0]))
    torch.testing.assert_close(packed[:, 1], plain[:, 1], rtol=1e-5, atol=0, equal_nan=True)
    assert torch.equal(written(values), written(plain[:, 2 : 2 + n]))
    assert torch.equal(written(logits.float().gather(1, ids)), written(values))
    assert all(len(set(row)) == n for row in ids.tolist())
    if stable:
        assert torch.equal(ids, logits.float().sort(dim=1, descending=True, stable=True).indices[:, :n])
    return packed


@DTYPES
@pytest.mark.parametrize(("vocab", "n"), [(5, 2), (384, 1), (384, 192), (1009, 40), (8192, 300), (8193, 80)])
def test_the_largest_are_those_of_topk(vocab, n, dtype):
    assert_top(draw(3, vocab, vocab + n).to(dtype), n)


@pytest.mark.parametrize(("vocab", "n"), [(1, 1), (5, 5), (384, 193)])
def test_most_of_a_row_is_left_to_topk(vocab, n):
    assert_top(draw(3, vocab), n, stable=False)


@pytest.mark.parametrize(("vocab", "n"), [(49152, 584), (50257, 80), (248_320, 26)])
def test_the_largest_of_whole_vocabularies(vocab, n):
    assert_top(draw(1, vocab), n)


@given(st.integers(1, 9000), st.floats(0, 1), st.integers(0, 2**16), st.sampled_from([0.2, 2.0, 1e4]), st.floats(0, 1))
@settings(max_examples=15)
def test_ties_and_banned_tokens(vocab, share, seed, grid, banned):
    """A coarse grid makes ties, also at the cut; there may be fewer finite logits than are asked for."""
    n = max(1, int(vocab * share**3))
    logits = (draw(2, vocab, seed) * grid).round() / grid
    logits[1, torch.rand(vocab, generator=torch.Generator().manual_seed(seed)) < banned] = -INF
    assert_top(logits, n, stable=2 * n <= vocab // 2)


@pytest.mark.parametrize(("vocab", "n"), [(700, 9), (20_000, 60)])
def test_masses_of_equals_take_the_lowest_ids(vocab, n):
    logits = torch.zeros(4, vocab)
    logits[0, 5::7] = 1.0  # more than there is room for
    logits[1, [3, 600, vocab - 1]] = torch.tensor([2.0, 3.0, 2.0])  # a few above the mass
    logits[2] = -INF
    logits[2, 100:110] = 1.0
    logits[3, ::2] = -0.0
    assert_top(logits, n)


@pytest.mark.parametrize("order", ["falling", "rising", "within a block"])
def test_logits_that_crowd_are_all_found(order):
    """Sorted, or the largest all among the columns of few blocks, where far more than n reach the floor."""
    vocab, n = 33_000, 200
    logits = draw(1, vocab).sort(descending=order == "falling").values
    if order == "within a block":
        width = 8
        blocks = -(-vocab // width)
        column = torch.arange(vocab).view(width, blocks).T.reshape(-1)  # block by block
        logits = logits.flip(1).gather(1, column.argsort()[None])
    assert_top(logits, n)


@DTYPES
@pytest.mark.parametrize("vocab", [300, 9001])
def test_rows_that_are_broken_say_so(vocab, dtype):
    logits = draw(6, vocab)
    logits[0] = -INF
    logits[1, vocab // 2] = NAN
    logits[2, 7] = INF
    logits[3, [3, 4, vocab - 1]] = torch.tensor([NAN, INF, NAN])
    logits[4] = NAN
    logits[5, 2:] = -INF
    logits[1, 3] = -torch.tensor(NAN)  # its sign bit makes no difference
    packed = assert_top(logits.to(dtype), 30)
    assert packed[:, 0].isnan().tolist() == [False, True, False, True, True, False]


def test_a_tree_grown_from_the_kernels_is_the_tree():
    logits = draw(4, 3000, 5).round()
    asked = []

    def read(n: int) -> np.ndarray:
        asked.append(n)
        return kernels_top(logits, n).cpu().numpy()

    grown = tree.grow(*plainly.top_tokens(logits, 60, read), 60)
    plain = tree.DraftTree.best_first(logits, 60)
    assert grown.tokens.tolist() == plain.tokens.tolist() and grown.parents.tolist() == plain.parents.tolist()
    np.testing.assert_allclose(grown.log_prob, plain.log_prob, atol=1e-5)
    assert len(asked) > 1  # the ties at the cut wanted a second look
    logits[2, 9] = NAN
    with pytest.raises(ValueError, match=r"NaN .*row 2"):
        plainly.top_tokens(logits, 60, read)


# ---- the target's choices --------------------------------------------------------------------------------------------


def assert_choice(scores: torch.Tensor, likely: torch.Tensor | None = None, m: int = 5, seed: int = 0) -> None:
    n, vocab = scores.shape
    scores = scores.to(DEVICE)
    likely = scores if likely is None else likely.to(DEVICE)
    rng = np.random.default_rng(seed)
    nodes, ids = np.concatenate([np.arange(n), rng.integers(0, n, m)]), rng.integers(0, vocab, m)
    wide = scores.float()
    right = sampling._read_from_device(wide, wide if likely is scores else likely.float(), nodes, ids)
    found = choice.read(scores, likely, nodes, ids)
    for name, mine, plain in zip(("token", "best", "second", "peak", "total", "picked"), found, right, strict=True):
        assert mine.dtype == plain.dtype and mine.shape == plain.shape
        if name == "total":  # the plain form loses some of its bits
            assert np.isnan(mine).tolist() == np.isnan(plain).tolist()
        else:
            np.testing.assert_array_equal(mine, plain, name)
    exact = (torch.logsumexp(likely.double(), -1) - likely.double().amax(-1)).cpu().numpy()  # NaN in broken rows
    np.testing.assert_allclose(found[4], exact, rtol=1e-6, atol=1e-6)


@DTYPES
@pytest.mark.parametrize(
    ("n", "vocab", "m"), [(1, 1, 0), (1, 2, 3), (3, 384, 0), (5, 8192, 4), (2, 8193, 300), (3, 49152, 2)]
)
def test_choices_are_those_of_the_plain_form(n, vocab, m, dtype):
    assert_choice(draw(n, vocab, n).to(dtype), m=m)


def test_choices_of_a_whole_vocabulary():
    assert_choice(draw(1, 248_320))


@given(st.integers(1, 4), st.integers(1, 20_000), st.integers(0, 2**16), st.sampled_from([0.3, 4.0, 1000.0]))
@settings(max_examples=15)
def test_of_equal_scores_the_first_is_chosen(n, vocab, seed, grid):
    noise = torch.Generator().manual_seed(seed)
    scores = (torch.randn(n, vocab, generator=noise) * grid).round() / grid  # with -0.0
    scores[torch.rand(n, vocab, generator=noise) < 0.2] = -INF
    scores[:, 0] = 0.0
    assert_choice(scores, seed=seed)


def test_what_decides_may_differ_from_what_is_likely():
    scores, likely = draw(3, 9000, 1), draw(3, 9000, 2)
    assert_choice(scores, likely)


@pytest.mark.parametrize("vocab", [40, 9000])
def test_rows_without_a_choice(vocab):
    scores = draw(6, vocab)
    scores[0] = -INF
    scores[1, [2, vocab - 1]] = INF
    scores[2, [30, vocab - 2]] = NAN
    scores[3] = NAN
    scores[4, 1:] = -INF
    scores[5, 9] = -torch.tensor(NAN)
    assert_choice(scores)
    tokens = choice.read(scores.to(DEVICE), scores.to(DEVICE), np.arange(6), np.zeros(0, np.int64))[0]
    assert tokens.tolist() == scores.argmax(-1).tolist()


def test_rows_may_be_strided_or_one_and_the_same():
    assert_choice(draw(50, 40).T)
    assert_choice(draw(1, 300).expand(4, -1))
    assert_choice(draw(4, 600)[:, ::2])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_sampling_on_the_kernels_says_what_it_says_plainly(temperature, monkeypatch):
    logits, positions = draw(4, 1000), np.array([7, 8, 8, 9])
    asked = np.array([0, 1, 1]), np.array([5, 999, 0])
    found = []
    for read in (sampling._read_from_device, choice.read):
        monkeypatch.setattr(sampling, "_read_on_host", read)  # what the CPU has instead
        found.append(Sampling(temperature, 3).choose(logits.to(DEVICE), positions, lambda node: [], asked, read))
    for plain, mine in zip(*found, strict=True):
        assert mine.dtype == plain.dtype
        torch.testing.assert_close(mine, plain, rtol=1e-6, atol=2e-6)
