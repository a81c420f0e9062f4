from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrank import accumulators
from headrank.accumulators import OutputGram, ScoreGram
from headrank.diversity import similarity
from tests.plain import gram_of

CPU = torch.device("cpu")
SEEDS = st.integers(0, 2**32)
ROUNDING = 2e-6  # of float32 products over short runs, relative to the two heads' sizes
B, H, T, D, WIDTH = 5, 6, 11, 7, 13
ONE_GROUP = torch.zeros(B, dtype=torch.long)


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def queries_and_keys(seed: int = 0, *, G: int = 2) -> tuple[Tensor, Tensor]:
    return random_tensor(B, H, T, D, seed=seed), random_tensor(B, G, T, D, seed=seed + 1)


def right_padding() -> Tensor:
    return torch.arange(T) < torch.tensor([T, 7, 3, 1, T])[:, None]


def plain_score_operators(q: Tensor, k: Tensor, *, scaling: float, allowed: Tensor, bias: Tensor | None = None, softcap: float | None = None) -> Tensor:
    """[H, N] float64: scores of all allowed pairs, each query's centred, by loops. allowed: [B, H, T, S]."""
    rows = []
    for b in range(len(q)):
        for t in range(q.shape[2]):
            heads = []
            for h in range(q.shape[1]):
                scores = q[b, h, t].double() @ k[b, h * k.shape[1] // q.shape[1]].double().T * scaling
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if bias is not None:
                    scores = scores + bias.expand(len(q), q.shape[1], -1, -1)[b, h, t].double()
                seen = allowed[b, h, t]
                scores = torch.where(seen, scores, 0.0)
                heads.append(torch.where(seen, scores - scores.sum() / seen.sum().clamp(min=1), 0.0))
            rows.append(torch.stack(heads))
    return torch.cat(rows, 1)


def allowed_pairs(mask: Tensor, keep: Tensor | None = None) -> Tensor:
    allowed = mask.expand(B, H, T, mask.shape[-1])
    return allowed if keep is None else allowed & keep[:, None, None, :] & keep[:, None, :, None]


CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()


def scores(q: Tensor, k: Tensor, *, groups: Tensor = ONE_GROUP, n_groups: int = 1, scaling: float = 0.3, **settings: Any) -> np.ndarray:
    gram = ScoreGram(H, n_groups, CPU)
    gram.add(q, k, scaling=scaling, groups=groups, **settings)
    return gram.grams().numpy()


def assert_close(found: np.ndarray, expected: np.ndarray, *, rounding: float = ROUNDING) -> None:
    size = np.sqrt(expected.diagonal(axis1=-2, axis2=-1))
    unit = np.where(size > 0, size, 1)
    scale = unit[..., :, None] * unit[..., None, :]
    np.testing.assert_allclose(found / scale, expected / scale, rtol=0, atol=rounding)


@pytest.fixture(params=["large blocks", "small blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of some rows of some sequences, and products of some columns, as long sequences have them."""
    if request.param == "small blocks":
        monkeypatch.setattr(accumulators, "CPU_BLOCK_BYTES", 4 * H * T * 3)
        monkeypatch.setattr(accumulators, "CPU_ROWS", (1, 3))
        monkeypatch.setattr(accumulators, "PRODUCT_COLUMNS", 13)


LOCAL = CAUSAL & torch.ones(T, T, dtype=torch.bool).triu(-2)  # a sliding window of three tokens
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "causal": lambda: {},
    "all see all": lambda: {"causal": False},
    "window": lambda: {"mask": LOCAL[None, None]},
    "a mask a sequence": lambda: {"mask": right_padding()[:, None, None, :] & CAUSAL},
    "a mask a head": lambda: {"mask": CAUSAL & (random_tensor(1, H, T, T, seed=8) > -0.5)},
    "padding on the right": lambda: {"keep": right_padding()},
    "padding on the left": lambda: {"keep": right_padding().flip(1)},
    "padding and window": lambda: {"keep": right_padding(), "mask": LOCAL[None, None]},
    "padding, all see all": lambda: {"keep": right_padding(), "causal": False},
    "first tokens left out": lambda: {"keep": (torch.arange(T) >= 4).expand(B, T)},
    "one bias": lambda: {"bias": random_tensor(1, 1, T, T, seed=5)},
    "a bias a sequence and head": lambda: {"bias": random_tensor(B, H, T, T, seed=5)},
    "softcap": lambda: {"softcap": 0.7},
    "all see all, bias": lambda: {"causal": False, "bias": random_tensor(1, H, T, T, seed=5)},
    "all see all, softcap": lambda: {"causal": False, "softcap": 0.7},
    "softcap and bias": lambda: {"softcap": 0.7, "bias": random_tensor(1, H, T, T, seed=5)},
}


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("G", [1, 2, 3, 6])
@pytest.mark.parametrize("case", CASES)
def test_scores_equal_those_written_out(case: str, G: int) -> None:
    settings = CASES[case]()
    q, k = queries_and_keys(G=G)
    mask = settings.get("mask", CAUSAL if settings.get("causal", True) else torch.ones(T, T, dtype=torch.bool))
    plain = {name: value for name, value in settings.items() if name in ("bias", "softcap")}
    expected = gram_of(plain_score_operators(q, k, scaling=0.3, allowed=allowed_pairs(mask, settings.get("keep")), **plain))
    assert_close(scores(q, k, **settings)[0], expected)


@pytest.mark.usefixtures("blocks")
def test_queries_may_see_keys_of_another_sequence_length() -> None:
    q, k = random_tensor(B, H, T, D), random_tensor(B, 2, 17, D, seed=1)
    expected = gram_of(plain_score_operators(q, k, scaling=0.3, allowed=torch.ones(B, H, T, 17, dtype=torch.bool)))
    assert_close(scores(q, k, causal=False)[0], expected)


@pytest.mark.usefixtures("blocks")
def test_scores_that_a_model_computed_count_as_ours_do_and_are_left_as_they_are() -> None:
    q, k = queries_and_keys(G=6)
    given_scores = q @ k.transpose(2, 3) * 0.3
    before = given_scores.clone()
    gram = ScoreGram(H, 1, CPU)
    gram.add_scores(given_scores, groups=ONE_GROUP, keep=right_padding(), mask=CAUSAL[None, None])
    assert_close(gram.grams().numpy(), scores(q, k, keep=right_padding()))
    assert torch.equal(given_scores, before)


def test_tiling_instead_of_repeating_shared_keys_gives_another_gram() -> None:
    q, k = queries_and_keys(G=2)
    repeated, tiled = k.repeat_interleave(3, 1), k.repeat(1, 3, 1, 1)
    assert_close(scores(q, k), scores(q, repeated))
    assert np.abs(similarity(scores(q, k)) - similarity(scores(q, tiled))).max() > 0.1


@pytest.mark.usefixtures("blocks")
def test_groups_of_sequences_sum_to_the_total_and_are_what_each_alone_gives() -> None:
    q, k = queries_and_keys()
    groups = torch.tensor([0, 0, 1, 2, 1])
    parts = scores(q, k, groups=groups, n_groups=3, keep=right_padding())
    assert_close(parts.sum(0), scores(q, k, keep=right_padding())[0])
    for group in range(3):
        chosen = groups == group
        alone = scores(q[chosen], k[chosen], groups=torch.zeros(int(chosen.sum()), dtype=torch.long), keep=right_padding()[chosen])
        assert_close(parts[group], alone[0])


@given(SEEDS, st.permutations(range(B)), st.integers(1, B))
def test_neither_the_size_of_batches_nor_the_order_of_sequences_matters_for_scores(seed: int, order: list[int], size: int) -> None:
    q, k = queries_and_keys(seed)
    gram = ScoreGram(H, 1, CPU)
    for start in range(0, B, size):
        batch = order[start : start + size]
        gram.add(q[batch], k[batch], scaling=0.3, groups=ONE_GROUP[batch], keep=right_padding()[batch])
    assert_close(gram.grams().numpy(), scores(q, k, keep=right_padding()))


def test_what_stands_in_padding_does_not_matter_for_scores() -> None:
    q, k = queries_and_keys()
    keep = right_padding()
    expected = scores(q, k, keep=keep)
    q[:, :].transpose(1, 2)[~keep] = float("nan")
    k[:, :].transpose(1, 2)[~keep] = float("inf")
    assert_close(scores(q, k, keep=keep), expected)


def test_a_query_with_one_key_contributes_nothing() -> None:
    q, k = queries_and_keys()
    assert not scores(q[:, :, :1], k[:, :, :1]).any()
    assert not scores(q, k, keep=(torch.arange(T) == 4).expand(B, T)).any()


def test_a_constant_added_to_all_keys_changes_nothing() -> None:
    q, k = queries_and_keys()
    assert_close(scores(q, k + random_tensor(1, 2, 1, D, seed=7)), scores(q, k))


@pytest.mark.parametrize("size", [1e3, 1e4])
def test_a_large_constant_part_of_the_keys_costs_no_digits(size: float) -> None:
    q, k = queries_and_keys()
    k = k + size * random_tensor(1, 2, 1, D, seed=7)  # what a bias of the keys does; float32 keys of this size have lost digits themselves
    expected = gram_of(plain_score_operators(q, k, scaling=0.3, allowed=allowed_pairs(CAUSAL)))
    assert_close(scores(q, k)[0], expected)
    assert_close(scores(q, k, keep=right_padding())[0], gram_of(plain_score_operators(q, k, scaling=0.3, allowed=allowed_pairs(CAUSAL, right_padding()))))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("c", [1e-30, 1e-25, 1e-12, 1e20, 1e25, 1e30])
def test_the_size_of_a_heads_scores_changes_no_similarity(c: float) -> None:
    q, k = queries_and_keys()
    S = similarity(scores(q, k))
    q[:, 2] *= c
    np.testing.assert_allclose(similarity(scores(q, k)), S, atol=ROUNDING)
    q[:, 3:] *= c
    np.testing.assert_allclose(similarity(scores(q, k)), S, atol=ROUNDING)


def test_a_head_that_comes_alive_in_a_later_batch_counts_in_full() -> None:
    q, k = queries_and_keys()
    gram = ScoreGram(H, 1, CPU)
    first = q.clone()
    first[:, 1] = 0
    gram.add(first, k, scaling=0.3, groups=ONE_GROUP)
    gram.add(q * 1e-25, k, scaling=0.3, groups=ONE_GROUP)
    found = gram.grams().numpy()[0]
    expected = gram_of(plain_score_operators(q, k, scaling=0.3e-25, allowed=allowed_pairs(CAUSAL)))
    assert found[1, 1] == pytest.approx(expected[1, 1], rel=1e-5)


def test_a_head_without_scores_is_dead_and_leaves_the_others_alone() -> None:
    q, k = queries_and_keys()
    whole = scores(q, k)[0]
    q[:, 3] = 0
    found = scores(q, k)[0]
    assert not found[3].any()
    assert not found[:, 3].any()
    assert_close(np.delete(np.delete(found, 3, 0), 3, 1), np.delete(np.delete(whole, 3, 0), 3, 1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_spoils_its_own_head_only(bad: float) -> None:
    q, k = queries_and_keys()
    whole = scores(q, k)[0]
    q[1, 3, 4, 5] = bad
    found = scores(q, k)[0]
    assert not np.isfinite(found[3]).any()
    assert_close(np.delete(np.delete(found, 3, 0), 3, 1), np.delete(np.delete(whole, 3, 0), 3, 1))


@pytest.mark.parametrize("n", [1, 2, 128])
def test_any_number_of_heads_goes_through(n: int) -> None:
    q, k = random_tensor(2, n, T, D), random_tensor(2, 1, T, D, seed=1)
    gram = ScoreGram(n, 1, CPU)
    gram.add(q, k, scaling=1.0, groups=torch.zeros(2, dtype=torch.long))
    centred = q.double() @ k.double().transpose(2, 3)
    centred = torch.where(CAUSAL, centred - torch.where(CAUSAL, centred, 0).sum(-1, keepdim=True) / CAUSAL.sum(-1, keepdim=True), 0)
    assert_close(gram.grams().numpy()[0], torch.einsum("bitu,bjtu->ij", centred, centred).numpy())


def test_heads_of_equal_scores_have_similarity_one() -> None:
    q, k = queries_and_keys(G=1)
    S = similarity(scores(q[:, :1].expand(-1, H, -1, -1), k))
    np.testing.assert_allclose(S, 1, atol=ROUNDING)  # headrank.results knows that what rounding leaves is no difference


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scores_of_other_types_are_those_of_their_rounded_numbers(dtype: torch.dtype) -> None:
    q, k = (x.to(dtype) for x in queries_and_keys())
    assert_close(scores(q, k), scores(q.float(), k.float()))


# ---- outputs


def outputs(z: Tensor, W_O: Tensor, *, groups: Tensor = ONE_GROUP, n_groups: int = 1, keep: Tensor | None = None, center: bool = True) -> np.ndarray:
    gram = OutputGram(W_O, n_groups)
    gram.add(z, groups=groups, keep=keep)
    return gram.grams(center=center).numpy()


def written(seed: int = 0) -> tuple[Tensor, Tensor]:
    return random_tensor(B, T, H, D, seed=seed), random_tensor(H, D, WIDTH, seed=seed + 1)


def plain_output_operators(z: Tensor, W_O: Tensor, *, keep: Tensor | None = None, center: bool = True) -> Tensor:
    """[H, N, WIDTH] float64."""
    rows = z.double().flatten(0, 1) if keep is None else z.double()[keep]
    out = torch.stack([rows[:, h] @ W_O[h].double() for h in range(len(W_O))])
    return out - out.mean(1, keepdim=True) if center else out


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("padding", ["none", "right", "left", "first tokens left out"])
def test_outputs_equal_those_written_out(padding: str, center: bool) -> None:
    keep = {"none": None, "right": right_padding(), "left": right_padding().flip(1), "first tokens left out": (torch.arange(T) >= 4).expand(B, T)}[padding]
    z, W_O = written()
    assert_close(outputs(z, W_O, keep=keep, center=center)[0], gram_of(plain_output_operators(z, W_O, keep=keep, center=center)))


@given(SEEDS, st.permutations(range(B)), st.integers(1, B), st.booleans())
def test_neither_the_size_of_batches_nor_the_order_of_sequences_matters_for_outputs(seed: int, order: list[int], size: int, center: bool) -> None:
    z, W_O = written(seed)
    gram = OutputGram(W_O, 1)
    for start in range(0, B, size):
        batch = order[start : start + size]
        gram.add(z[batch], groups=ONE_GROUP[batch], keep=right_padding()[batch])
    assert_close(gram.grams(center=center).numpy(), outputs(z, W_O, keep=right_padding(), center=center))


@pytest.mark.parametrize("center", [True, False])
def test_groups_of_outputs_are_about_one_mean_and_sum_to_the_total(center: bool) -> None:
    z, W_O = written()
    z = z + 3
    groups = torch.tensor([0, 0, 1, 2, 1])
    parts = outputs(z, W_O, groups=groups, n_groups=3, keep=right_padding(), center=center)
    assert_close(parts.sum(0), outputs(z, W_O, keep=right_padding(), center=center)[0])
    all_rows = plain_output_operators(z, W_O, keep=right_padding(), center=center)
    group_of_row = groups[:, None].expand(B, T)[right_padding()]
    for group in range(3):
        assert_close(parts[group], gram_of(all_rows[:, group_of_row == group]))


def test_what_stands_in_padding_does_not_matter_for_outputs() -> None:
    z, W_O = written()
    expected = outputs(z, W_O, keep=right_padding())
    z[~right_padding()] = float("nan")
    assert_close(outputs(z, W_O, keep=right_padding()), expected)


def test_a_first_batch_of_padding_alone_costs_nothing() -> None:
    z, W_O = written()
    z = z + 1e4
    gram = OutputGram(W_O, 1)
    gram.add(z * 0, groups=ONE_GROUP, keep=torch.zeros(B, T, dtype=torch.bool))
    gram.add(z, groups=ONE_GROUP)
    assert_close(gram.grams().numpy(), outputs(z, W_O))


@pytest.mark.parametrize("size", [1e3, 1e5])
def test_a_large_constant_part_of_the_outputs_costs_no_digits(size: float) -> None:
    z, W_O = written()
    z = z + size * random_tensor(1, 1, H, D, seed=7)
    assert_close(outputs(z, W_O)[0], gram_of(plain_output_operators(z, W_O)))
    gram = OutputGram(W_O, 1)
    for sequence in z:
        gram.add(sequence[None], groups=ONE_GROUP[:1])
    assert_close(gram.grams().numpy()[0], gram_of(plain_output_operators(z, W_O)))


def test_outputs_that_never_change_are_dead_when_centred() -> None:
    z, W_O = written()
    z[:, :, 2] = random_tensor(D, seed=3)
    found = outputs(z, W_O)[0]
    assert not found[2].any()
    assert outputs(z, W_O, center=False)[0][2, 2] > 0


@pytest.mark.parametrize("c", [1e-30, 1e-25, 1e-12, 1e20, 1e25, 1e30])
def test_the_size_of_a_heads_outputs_changes_no_similarity(c: float) -> None:
    z, W_O = written()
    S = similarity(outputs(z, W_O))
    one = torch.ones(H)
    one[2] = c
    for size in (one, one.flip(0), torch.full((H,), c)):
        np.testing.assert_allclose(similarity(outputs(z * size[:, None], W_O)), S, atol=ROUNDING)
        np.testing.assert_allclose(similarity(outputs(z, W_O * size[:, None, None])), S, atol=ROUNDING)
        np.testing.assert_allclose(similarity(outputs(z * size[:, None], W_O / size[:, None, None])), S, atol=ROUNDING)


def test_a_change_of_basis_between_values_and_output_projection_changes_nothing() -> None:
    z, W_O = written()
    basis = torch.linalg.qr(random_tensor(H, D, D, seed=3).double())[0] * (0.5 + torch.rand(D, generator=torch.Generator().manual_seed(1)))
    turned = torch.einsum("bthd,hde->bthe", z.double(), basis)
    assert_close(outputs(turned, torch.linalg.inv(basis) @ W_O.double()), outputs(z, W_O))


def test_permuting_the_tokens_of_one_head_changes_the_gram() -> None:
    z, W_O = written()
    before = similarity(outputs(z, W_O))
    z[:, :, 2] = z[:, :, 2].roll(1, 1)
    assert np.abs(similarity(outputs(z, W_O)) - before)[0, 2].max() > 0.01


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_output_that_is_no_number_spoils_its_own_head_only(bad: float) -> None:
    z, W_O = written()
    whole = outputs(z, W_O)[0]
    z[1, 4, 3, 5] = bad
    found = outputs(z, W_O)[0]
    assert not np.isfinite(found[3]).any()
    assert_close(np.delete(np.delete(found, 3, 0), 3, 1), np.delete(np.delete(whole, 3, 0), 3, 1))


@pytest.mark.parametrize("n", [1, 2, 128])
def test_outputs_of_any_number_of_heads_go_through(n: int) -> None:
    z, W_O = random_tensor(2, T, n, D), random_tensor(n, D, WIDTH, seed=1)
    assert_close(outputs(z, W_O, groups=ONE_GROUP[:2])[0], gram_of(plain_output_operators(z, W_O)))


def test_outputs_of_sixteen_bits_are_those_of_their_rounded_numbers() -> None:
    z, W_O = (x.bfloat16() for x in written())
    assert_close(outputs(z, W_O), outputs(z.float(), W_O.float()))


def test_a_gram_that_was_never_fed_is_zero() -> None:
    assert not OutputGram(written()[1], 3).grams().any()
    assert not ScoreGram(H, 3, CPU).grams().any()


# Attention on the way


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("G", [1, 2, 6])
def test_scores_become_the_attention_that_torch_computes(G: int, causal: bool, dtype: torch.dtype) -> None:
    q, k = (x.to(dtype) for x in queries_and_keys(G=G))
    v = random_tensor(B, G, T, 5, seed=2).to(dtype)
    found = ScoreGram(H, 1, CPU).add(q, k, v=v, scaling=0.3, groups=ONE_GROUP, causal=causal)
    assert found is not None
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal, scale=0.3, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 2e-2)
    assert found.dtype == dtype


def test_heads_of_any_size_become_attention() -> None:
    """Sums are kept of scores divided by their heads' sizes; attention is of the scores themselves."""
    q, k = queries_and_keys(G=6)
    q = q * torch.tensor([1e-9, 1, 1, 3e7, 1, 1]).view(-1, 1, 1)
    found = ScoreGram(H, 1, CPU).add(q, k, v=k, scaling=0.3, groups=ONE_GROUP)
    assert found is not None
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, k, is_causal=True, scale=0.3).transpose(1, 2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("settings", ["window", "padding on the right", "one bias", "softcap"])
def test_attention_that_is_not_plain_is_left_to_the_model(settings: str) -> None:
    q, k = queries_and_keys()
    assert ScoreGram(H, 1, CPU).add(q, k, v=k, scaling=0.3, groups=ONE_GROUP, **CASES[settings]()) is None


def test_a_key_that_is_not_a_number_spoils_later_queries_of_its_head_alone() -> None:
    q, k = queries_and_keys(G=6)
    v = random_tensor(B, 6, T, D, seed=2)
    whole = ScoreGram(H, 1, CPU).add(q, k, v=v, scaling=0.3, groups=ONE_GROUP)
    k[1, 4, 7, 0] = float("nan")
    found = ScoreGram(H, 1, CPU).add(q, k, v=v, scaling=0.3, groups=ONE_GROUP)
    assert found is not None
    assert whole is not None
    assert found[1, 7:, 4].isnan().all()
    found[1, 7:, 4] = whole[1, 7:, 4]
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-6)
