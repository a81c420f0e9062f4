import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrank.diversity import centered, effective_rank, similarity, spectrum
from headrank.factors import head_factors
from headrank.gram import factored_gram, unit_size
from tests.plain import CONFIGS, checkpoint_of, cosines, decoder, gram_of, head_matrices

SEEDS = st.integers(0, 2**32)
ROUNDING = 3e-6  # of sums of some hundred float32 products, relative to the two heads' sizes


def random_factors(seed: int, *, H: int = 7, n: int = 13, m: int = 17, k: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(H, n, k, generator=generator), torch.randn(H, m, k, generator=generator)


def gram(left: Tensor, right: Tensor) -> np.ndarray:
    return factored_gram(left.float(), right.float(), range(len(left)), range(len(right))).numpy()


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    size = np.sqrt(expected.diagonal())
    np.testing.assert_allclose(found / np.outer(size, size), expected / np.outer(size, size), rtol=0, atol=ROUNDING)


def invertible(seed: int, k: int) -> Tensor:
    """[7, k, k], condition numbers of at most 10."""
    generator = torch.Generator().manual_seed(seed)
    U, V = (torch.linalg.qr(torch.randn(7, k, k, generator=generator, dtype=torch.float64))[0] for _ in range(2))
    return U * (0.3 + 2.7 * torch.rand(7, 1, k, generator=generator, dtype=torch.float64)) @ V


@given(SEEDS, st.integers(1, 13), st.integers(1, 11), st.integers(1, 11), st.integers(1, 5))
def test_factored_gram_equals_the_one_of_written_out_matrices(seed: int, H: int, n: int, m: int, k: int) -> None:
    left, right = random_factors(seed, H=H, n=n, m=m, k=k)
    assert_close(gram(left, right), gram_of(left.double() @ right.double().transpose(1, 2)))


@given(SEEDS, st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_shared_factors_count_for_each_head_that_reads_them(seed: int, n_left: int, n_right: int) -> None:
    left, right = random_factors(seed, H=12)
    left_of_head, right_of_head = [h // (12 // n_left) for h in range(12)], [h // (12 // n_right) for h in range(12)]
    found = factored_gram(left[:n_left], right[:n_right], left_of_head, right_of_head).numpy()
    assert_close(found, gram_of(left[left_of_head].double() @ right[right_of_head].double().transpose(1, 2)))


@pytest.mark.parametrize("n_right", [1, 3, 9])
def test_heads_of_real_size_give_the_same(n_right: int) -> None:
    """Large enough for blocks of several heads and for the products that are taken elsewhere than small ones."""
    left, right = random_factors(0, H=9, n=97, m=89, k=67)
    right_of_head = [h // (9 // n_right) for h in range(9)]
    expected = gram_of(left.double() @ right[right_of_head].double().transpose(1, 2))
    assert_close(factored_gram(left, right[:n_right], range(9), right_of_head).numpy(), expected)
    assert_close(factored_gram(right[:n_right], left, right_of_head, range(9)).numpy(), expected)


@pytest.mark.parametrize(("a", "b"), [(1e-20, 1e12), (1e20, 3.0), (1e-9, 1e-9)])
def test_the_size_of_factors_is_in_the_gram(a: float, b: float) -> None:
    left, right = random_factors(4)
    found = gram(left * a, right * b)
    np.testing.assert_allclose(found / (a * b) ** 2, gram(left, right), rtol=1e-5, atol=1e-3)


@given(SEEDS)
def test_a_change_of_basis_within_a_head_changes_nothing(seed: int) -> None:
    left, right = random_factors(seed)
    B = invertible(seed, 5)
    assert_close(gram(left.double() @ B, right.double() @ torch.linalg.inv(B).transpose(1, 2)), gram(left, right))


@given(SEEDS, st.floats(1e-12, 1e20), st.integers(0, 6))
def test_the_size_of_a_head_changes_no_similarity(seed: int, c: float, head: int) -> None:
    left, right = random_factors(seed)
    S = similarity(gram(left, right))
    left[head] *= c
    np.testing.assert_allclose(similarity(gram(left, right)), S, atol=ROUNDING)


@pytest.mark.parametrize("c", [1e-30, 1e-12, 1e20, 1e30])
def test_a_checkpoint_times_any_number_has_the_same_similarities(c: float) -> None:
    left, right = random_factors(3)
    S = similarity(gram(left, right))
    np.testing.assert_allclose(similarity(gram(left * c, right * c)), S, atol=ROUNDING)
    assert np.count_nonzero(S) == 49


@given(SEEDS)
def test_permuting_heads_permutes_the_gram(seed: int) -> None:
    left, right = random_factors(seed)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
    assert_close(gram(left[order], right[order]), gram(left, right)[np.ix_(order, order)])


@given(SEEDS)
def test_rotating_the_residual_stream_changes_nothing(seed: int) -> None:
    left, right = random_factors(seed, n=13, m=13)
    Q, _ = torch.linalg.qr(torch.randn(13, 13, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    assert_close(gram(Q @ left.double(), Q @ right.double()), gram(left, right))


@given(SEEDS)
def test_swapping_the_roles_of_left_and_right_changes_nothing(seed: int) -> None:
    left, right = random_factors(seed)
    assert_close(gram(right, left), gram(left, right))


@given(SEEDS)
def test_permuting_the_rows_of_one_heads_left_factor_changes_the_gram(seed: int) -> None:
    left, right = random_factors(seed)
    before = similarity(gram(left, right))
    left[2] = left[2].roll(1, 0)
    after = similarity(gram(left, right))
    assert np.abs(after - before)[2].max() > 100 * ROUNDING
    assert_close(np.delete(np.delete(after, 2, 0), 2, 1), np.delete(np.delete(before, 2, 0), 2, 1))


def test_identical_heads_have_effective_rank_one_exactly() -> None:
    left, right = (factor[:1].expand(18, -1, -1) for factor in random_factors(0, n=131, m=137, k=31))
    S = similarity(gram(left, right))
    assert effective_rank(spectrum(S)) == pytest.approx(1, abs=1e-9)
    assert S.min() == pytest.approx(1, abs=1e-12)


def test_orthogonal_heads_have_effective_rank_h_exactly() -> None:
    eye = torch.eye(35).unflatten(1, (7, 5)).transpose(0, 1)  # head h reads dimensions of its own: [7, 35, 5]
    _, right = random_factors(0)
    assert effective_rank(spectrum(similarity(gram(eye, right)))) == pytest.approx(7, abs=1e-12)


def test_two_heads_at_60_degrees_have_eigenvalues_of_one_and_a_half_and_a_half() -> None:
    left = torch.tensor([[[3.0], [0.0]], [[0.5], [0.5 * 3**0.5]]])  # 3 (1, 0) and (cos 60°, sin 60°)
    right = torch.tensor([[[2.0]], [[0.7]]])
    assert gram(left, right) == pytest.approx(np.array([[36, 2.1], [2.1, 0.49]]), rel=1e-6)
    assert spectrum(similarity(gram(left, right))) == pytest.approx([1.5, 0.5], rel=1e-6)


def test_one_head_two_heads_and_128_heads_go_through() -> None:
    for H in (1, 2, 128):
        left, right = random_factors(5, H=H)
        assert_close(gram(left, right), gram_of(left.double() @ right.double().transpose(1, 2)))


def test_a_dead_head_is_dead_and_leaves_the_others_alone() -> None:
    left, right = random_factors(1)
    whole = gram(left, right)
    left[3] = 0
    found = gram(left, right)
    assert not found[3].any()
    assert not found[:, 3].any()
    others = [0, 1, 2, 4, 5, 6]
    assert_close(found[np.ix_(others, others)], whole[np.ix_(others, others)])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_none_spoils_its_own_head_only(bad: float) -> None:
    left, right = random_factors(1)
    whole = gram(left, right)
    left[3, 2, 1] = bad
    found = gram(left, right)
    assert not np.isfinite(found[3]).any()
    others = [0, 1, 2, 4, 5, 6]
    assert_close(found[np.ix_(others, others)], whole[np.ix_(others, others)])


def test_unit_size_is_exact_and_reports_a_power_of_two() -> None:
    factor = random_factors(0)[0] * torch.tensor([1e-38, 1e-20, 1e-3, 1, 1e3, 1e20, 1e37])[:, None, None]
    unit, size = unit_size(factor)
    torch.testing.assert_close(unit.double() * size[:, None, None], factor.double(), rtol=0, atol=0)
    assert bool((torch.frexp(size)[0] == 0.5).all())
    assert 0.1 < float(unit.abs().amax((1, 2)).min()) <= float(unit.abs().max()) < 2


def test_factors_beyond_float32_are_taken_in_float64() -> None:
    left, right = (factor.double() for factor in random_factors(2))
    found = factored_gram(left * 1e60, right.float(), range(7), range(7)).numpy()
    np.testing.assert_allclose(cosines(found), cosines(gram(left, right)), atol=ROUNDING)


@pytest.mark.parametrize("circuit", ["qk", "ov"])
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_of_every_kind_give_the_gram_of_their_written_out_matrices(name: str, circuit: str) -> None:
    model = decoder(CONFIGS[name])
    checkpoint, architecture = checkpoint_of(model)
    for layer in (0, 2):
        factors = head_factors(checkpoint, architecture, architecture.layers[layer], circuit)
        found = factored_gram(factors.left, factors.right, factors.left_of_head, factors.right_of_head).numpy()
        assert_close(found, gram_of(head_matrices(model, layer).operators(circuit)))


@pytest.mark.parametrize("name", ["gqa", "mqa", "lrkv_0"])
def test_shared_keys_and_values_stand_once(name: str) -> None:
    checkpoint, architecture = checkpoint_of(decoder(CONFIGS[name]))
    n = {"gqa": 2, "mqa": 1, "lrkv_0": 1}[name]
    assert len(head_factors(checkpoint, architecture, architecture.layers[0], "qk").right) == n
    assert len(head_factors(checkpoint, architecture, architecture.layers[0], "ov").left) == n


def test_the_blocks_of_grouped_heads_lie_on_the_diagonal() -> None:
    """With one W_Q for all heads, S is 1 within a group and smaller between groups: consecutive heads share, h // (H / G)."""
    model = decoder(CONFIGS["gqa"])
    W_Q = model.get_parameter("transformer.h.1.attn.c_q.weight")
    W_Q.copy_(W_Q[:10].repeat(6, 1))
    checkpoint, architecture = checkpoint_of(model)
    factors = head_factors(checkpoint, architecture, architecture.layers[1], "qk")
    S = similarity(factored_gram(factors.left, factors.right, factors.left_of_head, factors.right_of_head).numpy())
    group = np.arange(6) // 3
    same = group[:, None] == group
    assert S[same] == pytest.approx(1, abs=ROUNDING)
    assert S[~same].max() < 0.9
    tiled = similarity(factored_gram(factors.left, factors.right, factors.left_of_head, [h % 2 for h in range(6)]).numpy())
    assert np.abs(tiled - S).max() > 0.1
    assert effective_rank(spectrum(tiled)) == pytest.approx(effective_rank(spectrum(S)), abs=1e-5)  # which is why the blocks are looked at


def test_lrkv_of_full_rank_represents_any_mha() -> None:
    """W_shared = 0, U_h B_h^T = W_h with B_h the identity: the Gram matrices agree."""
    mha = decoder(CONFIGS["mha"])
    for circuit in ("qk", "ov"):
        matrices = head_matrices(mha, 0)
        W = torch.stack(matrices.W_K if circuit == "qk" else matrices.W_V)  # [H, d, D]
        U, s, Vh = torch.linalg.svd(W, full_matrices=False)  # U_h = U s, B_h = V
        rebuilt = (U * s[:, None, :]) @ Vh
        other = torch.stack(matrices.W_Q) if circuit == "qk" else torch.stack(matrices.W_O).transpose(1, 2)
        assert_close(gram(rebuilt, other), gram(W, other))


def test_centring_takes_one_dimension_from_orthogonal_heads() -> None:
    eye = torch.eye(35).unflatten(1, (7, 5)).transpose(0, 1)
    _, right = random_factors(0)
    assert effective_rank(spectrum(centered(similarity(gram(eye, right))))) == pytest.approx(6, abs=1e-12)
