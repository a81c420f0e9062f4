"""Intervals over sequences, against a known truth."""

import numpy as np
import pytest

from headrank.diversity import effective_rank, similarity, spectrum
from headrank.intervals import MIN_GROUPS, N_RESAMPLES, interval, resampled_grams
from headrank.results import layer_result, model_result
from headrank.store import LayerFacts, Measurement, ModelFacts


def rank(grams: np.ndarray) -> np.ndarray:
    return effective_rank(spectrum(similarity(grams)))


def sequences(rng: np.random.Generator, covariance: np.ndarray, n_sequences: int) -> np.ndarray:
    """Gram matrices of sequences of heads whose true similarity is the covariance, loud and quiet ones."""
    loudness = np.exp(0.25 * rng.standard_normal(n_sequences))
    heads = rng.standard_normal((n_sequences, 50, len(covariance))) @ np.linalg.cholesky(covariance).T * loudness[:, None, None]
    return np.einsum("sni,snj->sij", heads, heads)


@pytest.mark.parametrize("likeness", [0.0, 0.05, 0.5, 0.9])
def test_intervals_hold_the_true_value_in_about_95_percent_of_trials(likeness: float) -> None:
    H, trials = 5, 150
    truth = np.full((H, H), likeness) + (1 - likeness) * np.eye(H)
    rng = np.random.default_rng(11)
    held = 0
    for _ in range(trials):
        grams = sequences(rng, truth, 64)
        resampled = resampled_grams(grams)
        assert resampled is not None
        low, high = interval(rank(grams.sum(0)), rank(resampled), 64, low=1.0, high=H)
        held += low - 1e-9 <= rank(truth) <= high + 1e-9
    # 150 trials at 95 % hold 142.5 with a standard deviation of 2.7; exactly orthogonal heads sit at the bound and are held more often.
    assert 0.90 <= held / trials <= (1.0 if likeness == 0.0 else 0.99)


def test_more_sequences_make_the_interval_narrower_by_the_square_root() -> None:
    truth = np.full((5, 5), 0.4) + 0.6 * np.eye(5)
    widths = []
    for n_sequences in (50, 800):
        rng = np.random.default_rng(3)
        grams = sequences(rng, truth, n_sequences)
        resampled = resampled_grams(grams)
        assert resampled is not None
        widths.append(float(np.diff(interval(rank(grams.sum(0)), rank(resampled), n_sequences, low=1.0, high=5.0))[0]))
    assert widths[0] / widths[1] == pytest.approx(4.0, rel=0.35)


def test_equal_sequences_have_an_interval_of_no_width() -> None:
    gram = np.array([[2.0, 1.0], [1.0, 2.0]])
    layer = layer_result(np.repeat(gram[None], 16, 0), LayerFacts(index=0, n_head=2, n_kv_head=2), is_centered=False)
    assert layer.effective_rank is not None
    assert layer.interval == pytest.approx((layer.effective_rank, layer.effective_rank), abs=1e-12)
    assert layer.intervals["eigenvalues"] == pytest.approx(np.array([[1.5, 1.5], [0.5, 0.5]]))


def test_too_few_sequences_have_no_interval() -> None:
    grams = np.repeat(np.eye(3)[None], MIN_GROUPS - 1, 0)
    assert resampled_grams(grams) is None
    assert layer_result(grams, LayerFacts(index=0, n_head=3, n_kv_head=3), is_centered=False).interval is None


def test_an_interval_does_not_leave_what_is_possible() -> None:
    low, high = interval(5.99, np.random.default_rng(0).normal(5.99, 0.5, N_RESAMPLES), 20, low=1.0, high=6.0)
    assert 1.0 <= low < high == 6.0


def test_resamples_keep_the_number_of_sequences_and_are_the_same_for_every_layer() -> None:
    ones = resampled_grams(np.ones((10, 2, 2)))
    assert ones is not None
    assert (ones == 10).all()
    numbered = np.arange(10.0)[:, None, None] * np.ones((10, 2, 2))
    np.testing.assert_array_equal(resampled_grams(numbered), resampled_grams(numbered))


def test_the_interval_of_a_mean_over_layers_comes_from_the_same_sequences_in_all_layers() -> None:
    rng = np.random.default_rng(5)
    truth = np.full((3, 3), 0.3) + 0.7 * np.eye(3)
    grams = sequences(rng, truth, 40)
    layers = tuple(LayerFacts(index=index, n_head=3, n_kv_head=3) for index in (0, 1))
    facts = ModelFacts(checkpoint="c", fingerprint="f", family="headrank", kind="mha", n_layer=2, n_head=3, n_kv_head=3,
                       d_model=7, d_head=5, n_parameters=1, kv_values_per_token=1)  # fmt: skip
    measurement = Measurement(model=facts, source="activations", settings={}, tokens=None, layers=layers,
                              grams={"qk/0": grams, "qk/1": grams}, faults={})  # fmt: skip
    model = model_result(measurement, "qk", layers, label="m", scale=None, is_centered=False)
    # Two equal layers rise and fall together, so their mean is no surer than either.
    assert model.mean_interval("effective_rank") == pytest.approx(model.layers[0].interval)
