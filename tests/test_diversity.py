import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrank.diversity
from headrank.diversity import (
    attainable_rank,
    centered,
    dead_heads,
    effective_rank,
    mean_off_diagonal,
    most_similar_pair,
    n_components,
    similarity,
    spectrum,
    variance_explained,
)
from tests.plain import cosines, entropy_rank

SEEDS = st.integers(0, 2**32)


def random_gram(seed: int, H: int = 7, *, d: int = 11) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(H, d))
    return vectors @ vectors.T


def test_the_examples_in_the_docstrings_are_true() -> None:
    result = doctest.testmod(headrank.diversity)
    assert result.attempted >= 3
    assert result.failed == 0


def test_two_heads_at_60_degrees() -> None:
    S = similarity([[9.0, 3.0], [3.0, 4.0]])
    assert S.tolist() == [[1, 0.5], [0.5, 1]]
    eigenvalues = spectrum(S)
    assert eigenvalues == pytest.approx([1.5, 0.5], abs=1e-15)
    assert variance_explained(eigenvalues) == pytest.approx([0.75, 0.25])
    # exp(-(3/4 ln 3/4 + 1/4 ln 1/4)) = 4 / 3^(3/4)
    assert effective_rank(eigenvalues) == pytest.approx(4 / 3**0.75, abs=1e-14)
    assert n_components(eigenvalues) == 2
    assert n_components(eigenvalues, 0.75) == 1
    # centred: +-1/4, of which one eigenvalue of 1/2 is left
    assert centered(S) == pytest.approx(np.array([[0.25, -0.25], [-0.25, 0.25]]), abs=1e-15)
    assert spectrum(centered(S)) == pytest.approx([0.5, 0], abs=1e-15)
    assert effective_rank(spectrum(centered(S))) == pytest.approx(1, abs=1e-14)
    assert mean_off_diagonal(S) == 0.5
    assert most_similar_pair(S) == (0.5, (0, 1))


@pytest.mark.parametrize("H", [1, 2, 6, 18, 128])
def test_identical_heads_have_effective_rank_exactly_one(H: int) -> None:
    S = similarity(np.full((H, H), 3.7))
    assert (S == 1).all()
    assert effective_rank(spectrum(S)) == pytest.approx(1, abs=1e-12)
    assert np.isnan(effective_rank(spectrum(centered(S))))


@pytest.mark.parametrize("H", [1, 2, 6, 18, 128])
def test_orthogonal_heads_have_effective_rank_exactly_h(H: int) -> None:
    S = similarity(np.diag(np.random.default_rng(H).uniform(0.1, 9, H)))
    assert (np.eye(H) == S).all()
    assert effective_rank(spectrum(S)) == pytest.approx(H, abs=1e-10)
    if H > 1:
        assert effective_rank(spectrum(centered(S))) == pytest.approx(H - 1, abs=1e-10)
        assert attainable_rank(H, is_centered=True) == H - 1


@pytest.mark.parametrize("n_groups", [1, 2, 3])
def test_heads_in_identical_groups_have_the_rank_of_the_groups(n_groups: int) -> None:
    group = np.repeat(np.arange(n_groups), 6 // n_groups)
    S = similarity((group[:, None] == group).astype(float))
    assert effective_rank(spectrum(S)) == pytest.approx(n_groups, abs=1e-12)


@given(SEEDS, st.integers(2, 23))
def test_numbers_equal_those_written_out(seed: int, H: int) -> None:
    G = random_gram(seed, H)
    S = similarity(G)
    np.testing.assert_allclose(S, cosines(G), atol=1e-14)
    assert float(effective_rank(spectrum(S))) == pytest.approx(entropy_rank(S), rel=1e-9)
    P = np.eye(H) - 1 / H
    np.testing.assert_allclose(centered(S), P @ S @ P, atol=1e-13)
    if H > 2:
        assert float(effective_rank(spectrum(centered(S)))) == pytest.approx(entropy_rank(P @ S @ P), rel=1e-9)
    assert float(mean_off_diagonal(S)) == pytest.approx(S[~np.eye(H, dtype=bool)].mean(), abs=1e-14)
    largest, (i, j) = most_similar_pair(S) or (0, (0, 0))
    assert i < j
    assert S[i, j] == largest == S[np.triu_indices(H, 1)].max()


@given(SEEDS, st.integers(2, 23))
def test_bounds_hold(seed: int, H: int) -> None:
    S = similarity(random_gram(seed, H))
    assert np.abs(S).max() <= 1
    assert (S.diagonal() == 1).all()
    assert (S.T == S).all()
    eigenvalues = spectrum(S)
    assert (np.diff(eigenvalues) <= 0).all()
    assert eigenvalues.min() >= 0
    assert eigenvalues.sum() == pytest.approx(H, rel=1e-12)
    assert 1 <= effective_rank(eigenvalues) <= H + 1e-9
    assert np.count_nonzero(spectrum(centered(S))) <= H - 1
    assert effective_rank(spectrum(centered(S))) <= attainable_rank(H, is_centered=True) + 1e-9


@given(SEEDS)
def test_permuting_heads_permutes_the_similarities_and_leaves_the_spectrum(seed: int) -> None:
    G = random_gram(seed)
    order = np.random.default_rng(seed).permutation(7)
    permuted = similarity(G[np.ix_(order, order)])
    np.testing.assert_array_equal(permuted, similarity(G)[np.ix_(order, order)])
    np.testing.assert_allclose(spectrum(permuted), spectrum(similarity(G)), atol=1e-12)


@given(SEEDS, st.lists(st.floats(1e-60, 1e60), min_size=7, max_size=7))
def test_sizes_of_heads_cancel(seed: int, sizes: list[float]) -> None:
    G = random_gram(seed)
    np.testing.assert_allclose(similarity(G * np.outer(sizes, sizes)), similarity(G), atol=1e-13)


def test_a_dead_head_has_no_similarity_not_even_to_itself_and_lowers_the_effective_rank() -> None:
    G = random_gram(0)
    G[3] = G[:, 3] = 0
    S = similarity(G)
    assert dead_heads(G).tolist() == [False, False, False, True, False, False, False]
    assert not S[3].any()
    assert not S[:, 3].any()
    alive = np.delete(np.delete(S, 3, 0), 3, 1)
    np.testing.assert_array_equal(alive, similarity(np.delete(np.delete(G, 3, 0), 3, 1)))
    assert spectrum(S)[:6] == pytest.approx(spectrum(alive), abs=1e-12)
    orthogonal = similarity(np.diag([1.0, 0, 2, 3]))
    assert effective_rank(spectrum(orthogonal)) == pytest.approx(3, abs=1e-12)


def test_a_head_of_tiny_size_is_not_dead() -> None:
    G = random_gram(0) * 1e-300
    assert not dead_heads(G).any()
    np.testing.assert_allclose(similarity(G), similarity(random_gram(0)), atol=1e-12)


def test_heads_that_are_all_dead_have_no_effective_rank() -> None:
    S = similarity(np.zeros((3, 3)))
    assert not S.any()
    assert np.isnan(effective_rank(spectrum(S)))
    assert np.isnan(variance_explained(spectrum(S))).all()
    assert n_components(spectrum(S)) == 0


def test_one_head_has_rank_one_and_no_pair() -> None:
    S = similarity([[4.0]])
    assert effective_rank(spectrum(S)) == 1
    assert np.isnan(effective_rank(spectrum(centered(S))))
    assert attainable_rank(1, is_centered=True) == 0
    assert np.isnan(mean_off_diagonal(S))
    assert most_similar_pair(S) is None


def test_opposite_heads_are_as_redundant_as_equal_ones() -> None:
    S = similarity([[1.0, -2.0], [-2.0, 4.0]])
    assert S.tolist() == [[1, -1], [-1, 1]]
    assert effective_rank(spectrum(S)) == pytest.approx(1, abs=1e-12)


def test_small_eigenvalues_count_and_rounding_does_not() -> None:
    assert spectrum(np.diag([1.0, 1e-9, 0, -1e-17])).tolist() == [1, 1e-9, 0, 0]
    assert effective_rank([1.0, 1e-9]) > 1


def test_leading_dimensions_go_through_at_once() -> None:
    grams = np.array([[random_gram(5 * i + j) for j in range(5)] for i in range(3)])
    grams[2, 1, 4] = grams[2, 1, :, 4] = 0
    S = similarity(grams)
    ranks, parts, means = effective_rank(spectrum(centered(S))), n_components(spectrum(S)), mean_off_diagonal(S)
    for i in range(3):
        for j in range(5):
            one = similarity(grams[i, j])
            np.testing.assert_allclose(S[i, j], one, atol=1e-15)
            assert ranks[i, j] == pytest.approx(float(effective_rank(spectrum(centered(one)))), abs=1e-12)
            assert parts[i, j] == n_components(spectrum(one))
            assert means[i, j] == pytest.approx(float(mean_off_diagonal(one)), abs=1e-14)


@pytest.mark.parametrize(("fraction", "n"), [(0.0, 1), (0.5, 1), (0.50001, 2), (0.9, 3), (1.0, 4)])
def test_components_are_counted_until_the_fraction_is_reached(fraction: float, n: int) -> None:
    assert n_components([0.5, 0.25, 0.15, 0.1], fraction) == n
