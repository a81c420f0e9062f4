from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrank.results import LayerResult, ModelResult, Results, layer_result, model_result
from headrank.store import LayerFacts, Measurement, ModelFacts
from tests.plain import cosines, entropy_rank


def facts(n_head: int, *, index: int = 3) -> LayerFacts:
    return LayerFacts(index=index, n_head=n_head, n_kv_head=n_head)


def result(gram: Any, *, is_centered: bool = False) -> LayerResult:
    """Of one group of sequences."""
    gram = np.array(gram, dtype=float)
    return layer_result(gram[None], facts(len(gram)), is_centered=is_centered)


def random_grams(seed: int, n_head: int, *, groups: int = 5) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(groups, n_head, 13))
    return vectors @ vectors.transpose(0, 2, 1)


SIXTY = [[4.0, 3.0], [3.0, 9.0]]  # two heads of sizes 2 and 3 at 60 degrees


def test_two_heads_at_60_degrees() -> None:
    layer = result(SIXTY)
    assert layer.similarity is not None
    assert layer.similarity.tolist() == [[1, 0.5], [0.5, 1]]
    assert layer.eigenvalues == pytest.approx([1.5, 0.5])
    assert layer.effective_rank == pytest.approx(4 / 3**0.75)
    assert layer.attainable == 2
    assert layer.percent_of_heads == layer.percent_of_attainable == pytest.approx(100 * 2 / 3**0.75)
    assert layer.cumulative_variance == pytest.approx([0.75, 1])
    assert layer.n_components == 2
    assert layer.mean_off_diagonal == 0.5
    assert layer.most_similar == (0.5, (0, 1))
    assert layer.dead_heads == ()
    assert layer.reason is None


def test_centred_numbers_are_out_of_one_dimension_less() -> None:
    layer = result(SIXTY, is_centered=True)
    assert layer.similarity is not None
    assert layer.similarity[0, 1] == 0.5  # the similarities stay as they are
    assert layer.eigenvalues == pytest.approx([0.5, 0])
    assert layer.effective_rank == pytest.approx(1)
    assert layer.attainable == 1
    assert layer.percent_of_heads == pytest.approx(50)
    assert layer.percent_of_attainable == pytest.approx(100)


@pytest.mark.parametrize("n_head", [2, 6, 18, 128])
def test_orthogonal_heads_attain_all_that_is_attainable(n_head: int) -> None:
    for is_centered, attainable in ((False, n_head), (True, n_head - 1)):
        layer = result(np.diag(np.arange(1.0, n_head + 1)), is_centered=is_centered)
        assert layer.effective_rank == pytest.approx(attainable)
        assert layer.percent_of_attainable == pytest.approx(100)
        assert layer.percent_of_heads == pytest.approx(100 * attainable / n_head)


def test_the_papers_ceilings_follow() -> None:
    """83.3 % of 6 heads and 94.4 % of 18 are the most that centred heads can have."""
    assert result(np.eye(6), is_centered=True).percent_of_heads == pytest.approx(100 * 5 / 6)
    assert result(np.eye(18), is_centered=True).percent_of_heads == pytest.approx(100 * 17 / 18)


@pytest.mark.parametrize("noise", [0.0, 1e-9, 7e-8])
@pytest.mark.parametrize("n_head", [2, 3, 18, 128])
def test_heads_that_are_equal_up_to_rounding_have_rank_one_and_no_centred_rank(n_head: int, noise: float) -> None:
    """7e-8 is what float32 sums over tokens leave of identical heads; without a limit it would pass for a spectrum."""
    rounding = np.random.default_rng(0).uniform(-noise, noise, size=(n_head, n_head))
    gram = np.full((n_head, n_head), 2.0) + rounding + rounding.T
    assert result(gram).effective_rank == pytest.approx(1, abs=1e-3)
    centred = result(gram, is_centered=True)
    assert centred.effective_rank is None
    assert centred.percent_of_heads is None
    assert centred.percent_of_attainable is None
    assert centred.cumulative_variance is None
    assert centred.n_components is None
    assert centred.reason == "all heads are equal: the centred matrix is zero"
    assert centred.eigenvalues is not None
    assert not centred.eigenvalues.any()


def test_heads_that_are_nearly_equal_keep_their_centred_rank() -> None:
    gram = np.full((3, 3), 1 - 1e-5) + 1e-5 * np.eye(3)
    assert result(gram, is_centered=True).effective_rank == pytest.approx(2, abs=1e-6)


def test_one_head_has_rank_one_and_nothing_to_compare_with() -> None:
    layer, centred = result([[4.0]]), result([[4.0]], is_centered=True)
    assert layer.effective_rank == layer.attainable == 1
    assert layer.mean_off_diagonal is None
    assert layer.most_similar is None
    assert centred.effective_rank is None
    assert centred.percent_of_attainable is None
    assert centred.reason == "one head: the centred matrix is zero"


@pytest.mark.parametrize("n_head", [1, 5])
@pytest.mark.parametrize("is_centered", [False, True])
def test_heads_that_are_all_dead_have_no_rank(n_head: int, is_centered: bool) -> None:
    layer = result(np.zeros((n_head, n_head)), is_centered=is_centered)
    assert layer.effective_rank is None
    assert layer.reason == "every head is dead"
    assert layer.dead_heads == tuple(range(n_head))


def test_a_dead_head_is_named_and_lowers_the_rank() -> None:
    layer = result(np.diag([1.0, 0, 2, 3]))
    assert layer.dead_heads == (1,)
    assert layer.effective_rank == pytest.approx(3)
    assert layer.percent_of_heads == pytest.approx(75)


@pytest.mark.parametrize("c", [1e-24, 1e-12, 1e20, 1e40])
def test_the_size_of_a_checkpoint_changes_nothing(c: float) -> None:
    gram = random_grams(0, 7)
    one, other = (layer_result(g, facts(7), is_centered=True) for g in (gram, gram * c**2))
    assert other.effective_rank == pytest.approx(one.effective_rank, rel=1e-9)
    assert other.dead_heads == ()


@given(st.integers(0, 2**32), st.integers(3, 17), st.booleans())
def test_numbers_are_those_of_the_sum_over_groups_of_sequences(seed: int, n_head: int, is_centered: bool) -> None:
    grams = random_grams(seed, n_head)
    layer = layer_result(grams, facts(n_head), is_centered=is_centered)
    S = cosines(grams.sum(0))
    P = np.eye(n_head) - is_centered / n_head
    assert layer.effective_rank == pytest.approx(entropy_rank(P @ S @ P), rel=1e-8)
    np.testing.assert_allclose(layer.similarity, S, atol=1e-12)


def test_a_fault_leaves_no_numbers_but_its_reason() -> None:
    layer = layer_result(None, facts(6), is_centered=False, fault="layer 3: c_q holds NaN")
    assert layer.similarity is layer.eigenvalues is layer.effective_rank is layer.percent_of_heads is layer.n_components is None
    assert layer.reason == "layer 3: c_q holds NaN"
    assert layer.attainable == 6


# ---- models


def measurement(grams: dict[str, Any], faults: dict[str, str] | None = None) -> Measurement:
    shapes = {name.partition("/")[2]: len(gram) for name, gram in grams.items()}
    n_head = max(shapes.values())
    indices = sorted({int(name.partition("/")[2]) for name in [*grams, *(faults or {})]})
    model = ModelFacts(
        checkpoint="a", fingerprint="sha256:0", family="headrank", kind="mha", n_layer=9, n_head=n_head, n_kv_head=n_head,
        d_model=13, d_head=10, n_parameters=99, kv_values_per_token=20,
    )  # fmt: skip
    return Measurement(
        model=model,
        source="weights",
        settings={},
        tokens=None,
        layers=tuple(LayerFacts(index=index, n_head=shapes.get(str(index), n_head), n_kv_head=1) for index in indices),
        grams={name: np.array(gram, dtype=float)[None] for name, gram in grams.items()},
        faults=faults or {},
    )


def model_of(whole: Measurement, *, circuit: str = "qk", is_centered: bool = False) -> ModelResult:
    return model_result(whole, circuit, whole.layers, label="Mine", scale="128M", is_centered=is_centered)


def test_a_models_mean_leaves_undefined_layers_out_and_never_averages_what_is_no_number() -> None:
    equal, orthogonal = np.ones((3, 3)), np.eye(3)
    whole = measurement({"qk/0": equal, "qk/1": orthogonal, "qk/2": SIXTY_THREE}, {"qk/5": "layer 5: NaN"})
    model = model_of(whole, is_centered=True)
    ranks = [layer.effective_rank for layer in model.layers]
    assert ranks[0] is None
    assert ranks[3] is None
    assert model.mean("effective_rank") == pytest.approx(np.mean([ranks[1], ranks[2]]))  # type: ignore[list-item]
    assert model.mean("percent_of_attainable") == pytest.approx(np.mean([100.0, 100 * ranks[2] / 2]))  # type: ignore[operator]


SIXTY_THREE = [[1, 0.5, 0], [0.5, 1, 0], [0, 0, 1]]


def test_a_model_without_any_number_has_no_mean() -> None:
    model = model_of(measurement({"qk/0": np.ones((3, 3)), "qk/1": np.ones((3, 3))}), is_centered=True)
    assert model.mean("effective_rank") is None
    assert model.mean("mean_off_diagonal") == pytest.approx(1)


def test_a_circuit_takes_its_own_grams_and_faults() -> None:
    whole = measurement({"qk/0": np.eye(3), "ov/0": np.ones((3, 3)), "qk/1": np.eye(3)}, {"ov/1": "layer 1: NaN"})
    assert [layer.effective_rank for layer in model_of(whole, circuit="qk").layers] == pytest.approx([3, 3])
    ov = model_of(whole, circuit="ov").layers
    assert ov[0].effective_rank == pytest.approx(1)
    assert ov[1].reason == "layer 1: NaN"


def test_layers_may_have_different_numbers_of_heads() -> None:
    model = model_of(measurement({"qk/0": np.eye(2), "qk/1": np.eye(5)}))
    assert [layer.percent_of_heads for layer in model.layers] == pytest.approx([100, 100])
    assert model.mean("effective_rank") == pytest.approx(3.5)


def test_faults_are_named_by_model_and_values_that_are_undefined_by_definition_are_none() -> None:
    spoilt = model_of(measurement({"qk/0": np.ones((3, 3))}, {"qk/5": "layer 5: c_q of head 2 holds NaN"}), is_centered=True)
    healthy = replace(model_of(measurement({"qk/0": np.eye(3)})), label="Other")
    results = Results(command="effrank", source="weights", circuit="qk", is_centered=True, settings={}, models=(spoilt, healthy))
    assert results.faults == ["Mine: layer 5: c_q of head 2 holds NaN"]


# ---- intervals


def test_enough_groups_of_sequences_give_intervals_around_the_numbers() -> None:
    grams = random_grams(0, 6, groups=32)
    layer = layer_result(grams, facts(6), is_centered=False)
    assert layer.interval is not None
    low, high = layer.interval
    assert 1 <= low < layer.effective_rank < high <= 6  # type: ignore[operator]
    assert layer_result(grams, facts(6), is_centered=False).interval == (low, high)  # the same every time
    assert layer_result(grams[:5], facts(6), is_centered=False).interval is None  # too few to tell


def test_equal_heads_have_no_interval_of_what_is_undefined() -> None:
    grams = np.ones((32, 3, 3)) * np.random.default_rng(0).uniform(1, 2, size=(32, 1, 1))
    layer = layer_result(grams, facts(3), is_centered=True)
    assert layer.effective_rank is None
    assert layer.interval is None
    assert layer_result(grams, facts(3), is_centered=False).interval == pytest.approx((1, 1), abs=1e-9)
