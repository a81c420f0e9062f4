"""Random heads of a model's own geometry, against what theory says of them."""

import numpy as np
import pytest

from headrank.diversity import similarity
from headrank.null import RandomTwin, null_grams, null_ranks
from tests.plain import CONFIGS, checkpoint_of, decoder


def squared_similarities(kind: str, circuit: str, n_samples: int) -> np.ndarray:
    checkpoint, architecture = checkpoint_of(decoder(CONFIGS[kind]))
    S = similarity(null_grams(checkpoint, architecture, architecture.layers[0], circuit, n_samples=n_samples))
    rows, columns = np.triu_indices(S.shape[-1], 1)
    return S[:, rows, columns] ** 2


@pytest.mark.parametrize("circuit", ["qk", "ov"])
def test_independent_gaussian_heads_have_the_expected_squared_similarity(circuit: str) -> None:
    """With L: n x k and R: m x k standard Gaussian, E <M_i, M_j>^2 = k^2 n m and E <M_i, M_i> = k n m, so E S^2 is about 1 / (n m)."""
    squares = squared_similarities("mha", circuit, 400)
    config = CONFIGS["mha"]
    n = m = config.d_model
    k = config.d_head
    # Sizes vary from head to head, which raises the mean of the ratio above the ratio of the means by the order of 1/k + 1/n + 1/m.
    assert squares.mean() == pytest.approx(1 / (n * m), rel=2 * (1 / k + 1 / n + 1 / m))


def test_shared_keys_make_random_heads_more_alike() -> None:
    """With one R for all heads, E <M_i, M_j>^2 = n tr (R^T R)^2, and E tr (R^T R)^2 = m k (m + k + 1) (Wishart): E S^2 is about (m + k + 1) / (n m k)."""
    config = CONFIGS["mqa"]
    n = m = config.d_model
    k = config.d_head
    squares = squared_similarities("mqa", "qk", 400)
    assert squares.mean() == pytest.approx((m + k + 1) / (n * m * k), rel=0.2)
    assert squares.mean() > 2 * squared_similarities("mha", "qk", 400).mean()


def test_a_twin_has_the_shapes_and_none_of_the_numbers() -> None:
    checkpoint, _ = checkpoint_of(decoder(CONFIGS["gqa"]))
    twin = RandomTwin(checkpoint, seed=5)
    for name, info in checkpoint.tensors.items():
        assert tuple(twin.read(name).shape) == info.shape
        assert not np.array_equal(twin.read(name).numpy(), checkpoint.read(name).float().numpy())
        assert np.array_equal(twin.read(name).numpy(), RandomTwin(checkpoint, seed=5).read(name).numpy())


def test_ranks_are_seeded_and_nearly_full() -> None:
    checkpoint, architecture = checkpoint_of(decoder(CONFIGS["mha"]))
    ranks = null_ranks(checkpoint, architecture, "qk")
    assert ranks == null_ranks(checkpoint, architecture, "qk")
    H = CONFIGS["mha"].n_head
    assert 0.9 * H < np.mean(ranks["uncentered"]) < H
    assert 0.9 * (H - 1) < np.mean(ranks["centered"]) < H - 1
