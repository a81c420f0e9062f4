"""Other measures than headrank's own: each against a plain float64 computation, each with its invariances."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrank.config import ModelConfig
from headrank.diversity import dead_heads, similarity
from headrank.errors import HeadrankError
from headrank.factors import HeadFactors, head_factors
from headrank.forward import DecoderRunner, Recorder, pass_over
from headrank.kernels import one_side_gram, orthonormal_bases, projection_kernel, weights_gram
from headrank.measure import Settings, measure
from headrank.measures import GRAMS, MEASURES, check_source, circuit_of, find_measure, gram_name
from headrank.moments import HeadMoments, linear_cka_gram
from headrank.selection import ModelRef
from headrank.store import LayerFacts, Store, read_measurement, write_measurement
from headrank.tokens import Sequences
from tests.plain import CONFIGS, checkpoint_of, cosines, decoder, eager_pass, head_matrices, output_operators, turned, unit_rms

CPU = torch.device("cpu")
ROUNDING = 2e-5  # of float32 activations and their products, relative to the two heads' sizes
SEEDS = st.integers(0, 2**32)
LENGTHS = (19, 7, 13, 19, 2)


def cka_of(vectors: list[Tensor]) -> np.ndarray:
    """Linear CKA written out: vectors of each head [N, width], with the N x N matrices of inner products between tokens."""
    kernels = [(x - x.mean(0)) @ (x - x.mean(0)).T for x in vectors]
    return cosines(np.array([[float((a * b).sum()) for b in kernels] for a in kernels]))


def sequences(config: ModelConfig) -> Sequences:
    ids = np.random.default_rng(11).integers(0, config.vocab_size, (len(LENGTHS), max(LENGTHS)))
    return Sequences(ids=ids, lengths=np.array(LENGTHS), source="numbers")


def run(model: Any, names: tuple[str, ...], *, batch_size: int = 2, skip_first: int = 0) -> dict[str, np.ndarray]:
    """Gram matrices of a pass over all sequences."""
    runner = DecoderRunner(checkpoint_of(model)[0], device=CPU, dtype=torch.float32)
    layers = [LayerFacts(index=i, n_head=model.config.n_head, n_kv_head=model.config.n_kv_head) for i in range(model.config.n_layer)]
    return dict(pass_over(runner, sequences(model.config), layers, names, device=CPU, batch_size=batch_size, skip_first=skip_first, n_groups=2))


def kept(model: Any, *, skip_first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """ids, which of them are tokens, and which of these count, [B, T] each."""
    fed = sequences(model.config)
    ids = torch.from_numpy(fed.ids)
    position = torch.arange(ids.shape[1])
    valid = position < torch.from_numpy(fed.lengths)[:, None]
    return ids, valid, valid & (position >= skip_first)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("skip_first", [0, 3])
def test_cka_is_the_one_of_written_out_outputs(kind: str, skip_first: int) -> None:
    model = decoder(CONFIGS[kind])
    ids, valid, keep = kept(model, skip_first=skip_first)
    found = run(model, ("cka",), skip_first=skip_first)
    assert set(found) == {"cka/0", "cka/1", "cka/2"}
    for index, layer in enumerate(eager_pass(model, ids, valid=valid)):
        expected = cka_of(list(output_operators(layer, keep)))
        np.testing.assert_allclose(similarity(found[f"cka/{index}"].sum(0)), expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("kind", CONFIGS)
def test_cka_of_keys_and_values_is_the_one_of_written_out_keys_and_values(kind: str) -> None:
    model = decoder(CONFIGS[kind])
    ids, _, keep = kept(model)
    x = unit_rms(unit_rms(model.transformer["wte"].weight.double()[ids]))
    matrices = head_matrices(model, 0)
    keys = [unit_rms(turned(x @ W_K, model.config))[keep] for W_K in matrices.W_K]
    values = [(x @ W_V)[keep] for W_V in matrices.W_V]
    for name, vectors in (("keys", keys), ("values", values)):
        found = run(model, (name,))[f"{name}/0"]
        assert found.shape == (1, 6, 6)
        np.testing.assert_allclose(similarity(found.sum(0)), cka_of(vectors), rtol=0, atol=ROUNDING)


def test_the_batch_size_changes_no_cka() -> None:
    model = decoder(CONFIGS["gqa"])
    one, all_at_once = (run(model, ("cka", "keys", "values"), batch_size=size) for size in (1, len(LENGTHS)))
    for name in one:
        np.testing.assert_allclose(similarity(one[name].sum(0)), similarity(all_at_once[name].sum(0)), rtol=0, atol=ROUNDING)


def test_only_what_was_asked_for_is_counted() -> None:
    model = decoder(CONFIGS["mha"])
    layers = [LayerFacts(index=0, n_head=6, n_kv_head=6)]
    plain, other = Recorder(layers, ("qk", "ov"), n_groups=1), Recorder(layers, ("cka",), n_groups=1)
    assert [plain.wants("0", what) for what in ("qk", "ov", "keys", "values")] == [True, True, False, False]
    assert [other.wants("0", what) for what in ("qk", "ov", "keys", "values")] == [False, True, False, False]
    for recorder in (plain, other):
        recorder.begin_batch(torch.zeros(1, dtype=torch.long), None)
        recorder.outputs("0", torch.randn(1, 5, 6, 10), lambda: model.output_projection(0))
    assert not plain._moments
    assert not other._outputs


def plain_kernel(left: list[Tensor], right: list[Tensor]) -> np.ndarray:
    """Sum of squared cosines of the principal angles between the spaces of operators L A R^T, from orthonormal bases of d x d matrices."""
    bases = []
    for L, R in zip(left, right, strict=True):
        sides = []
        for M in (L.numpy(), R.numpy()):
            U, sigma, _ = np.linalg.svd(M, full_matrices=False)
            sides.append(U[:, sigma > 1e-5 * sigma[0]])
        bases.append(np.kron(*sides))
    return np.array([[np.square(np.linalg.svd(a.T @ b, compute_uv=False)).sum() for b in bases] for a in bases])


@pytest.mark.parametrize("circuit", ["qk", "ov"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_projection_kernel_is_the_one_of_principal_angles_between_spaces_of_operators(kind: str, circuit: str) -> None:
    model = decoder(CONFIGS[kind])
    checkpoint, architecture = checkpoint_of(model)
    matrices = head_matrices(model, 1)
    left, right = (matrices.W_Q, matrices.W_K) if circuit == "qk" else (matrices.W_V, [W_O.T for W_O in matrices.W_O])
    found = projection_kernel(head_factors(checkpoint, architecture, architecture.layers[1], circuit)).numpy()
    expected = plain_kernel(left, right)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", CONFIGS)
def test_keys_and_values_from_weights_are_compared_by_their_inner_products(kind: str) -> None:
    model = decoder(CONFIGS[kind])
    checkpoint, architecture = checkpoint_of(model)
    matrices = head_matrices(model, 2)
    for name, circuit, W in (("keys", "qk", matrices.W_K), ("values", "ov", matrices.W_V)):
        found = weights_gram(name, head_factors(checkpoint, architecture, architecture.layers[2], circuit)).numpy()
        forms = torch.stack([w @ w.T for w in W])
        expected = torch.einsum("iab,jab->ij", forms, forms).numpy()
        size = np.sqrt(expected.diagonal())
        np.testing.assert_allclose(found / np.outer(size, size), expected / np.outer(size, size), rtol=0, atol=3e-6)


def test_lines_at_sixty_degrees_have_a_quarter_in_common_on_each_side() -> None:
    lines = torch.tensor([[[1.0], [0.0]], [[0.5], [3**0.5 / 2]]])
    kernel = projection_kernel(HeadFactors(lines, lines, (0, 1), (0, 1)))
    np.testing.assert_allclose(kernel.numpy(), [[1, 1 / 16], [1 / 16, 1]], rtol=1e-6)
    keys_alone = projection_kernel(HeadFactors(lines[:1], lines, (0, 0), (0, 1)))
    np.testing.assert_allclose(keys_alone.numpy(), [[1, 1 / 4], [1 / 4, 1]], rtol=1e-6)


def test_a_subspace_has_the_dimension_of_its_rank_and_a_zero_head_none() -> None:
    factor = torch.randn(3, 13, 5, generator=torch.Generator().manual_seed(1))
    factor[1, :, 3] = factor[1, :, 0] - factor[1, :, 2]
    factor[2] = 0
    bases = orthonormal_bases(factor)
    assert bases.square().sum((1, 2)).round(decimals=9).tolist() == [5.0, 4.0, 0.0]
    kernel = projection_kernel(HeadFactors(factor, factor, (0, 1, 2), (0, 1, 2)))
    assert dead_heads(kernel.numpy()).tolist() == [False, False, True]


def orthogonal(generator: torch.Generator, n: int, k: int) -> Tensor:
    return torch.linalg.qr(torch.randn(n, k, k, generator=generator, dtype=torch.float64))[0]


def stretching(generator: torch.Generator, n: int, k: int) -> Tensor:
    """[n, k, k], invertible, condition numbers of 10."""
    sizes = torch.linspace(0.3, 3, k, dtype=torch.float64).diag_embed()
    return orthogonal(generator, n, k) @ sizes @ orthogonal(generator, n, k)


def assert_same(found: Tensor, expected: Tensor) -> None:
    np.testing.assert_allclose(similarity(found.numpy()), similarity(expected.numpy()), rtol=0, atol=1e-6)


def heads(generator: torch.Generator) -> HeadFactors:
    left, right = torch.randn(7, 13, 5, generator=generator), torch.randn(7, 17, 5, generator=generator)
    return HeadFactors(left.double(), right.double(), tuple(range(7)), tuple(range(7)))


@given(SEEDS)
def test_no_change_of_basis_on_either_side_changes_the_projection_kernel(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    plain = heads(generator)
    changed = HeadFactors(plain.left @ stretching(generator, 7, 5), plain.right @ stretching(generator, 7, 5), plain.left_of_head, plain.right_of_head)
    assert_same(projection_kernel(changed), projection_kernel(plain))


@given(SEEDS)
def test_rotating_the_residual_stream_changes_neither_the_projection_kernel_nor_keys(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    plain = heads(generator)
    left, right = orthogonal(generator, 1, 13) @ plain.left, orthogonal(generator, 1, 17) @ plain.right
    changed = HeadFactors(left, right, plain.left_of_head, plain.right_of_head)
    assert_same(projection_kernel(changed), projection_kernel(plain))
    assert_same(weights_gram("keys", changed), weights_gram("keys", plain))
    assert_same(weights_gram("values", changed), weights_gram("values", plain))


@given(SEEDS, st.floats(1e-12, 1e20))
def test_turning_and_scaling_a_head_changes_no_keys_but_stretching_does(seed: int, c: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(7, 17, 5, generator=generator, dtype=torch.float64)
    plain = one_side_gram(keys, range(7))
    scale = torch.ones(7, 1, 1, dtype=torch.float64)
    scale[3] = c
    assert_same(one_side_gram(scale * keys @ orthogonal(generator, 7, 5), range(7)), plain)
    stretched = similarity(one_side_gram(keys @ stretching(generator, 7, 5), range(7)).numpy())
    assert np.abs(stretched - similarity(plain.numpy())).max() > 1e-3


@given(SEEDS, st.permutations(range(7)))
def test_permuting_heads_permutes_every_kernel(seed: int, order: list[int]) -> None:
    plain = heads(torch.Generator().manual_seed(seed))
    changed = HeadFactors(plain.left[order], plain.right[order], plain.left_of_head, plain.right_of_head)
    for name in ("projection-kernel-qk", "keys", "values", "qk"):
        torch.testing.assert_close(weights_gram(name, changed), weights_gram(name, plain)[order][:, order])


def cka(vectors: Tensor, W_O: Tensor | None = None) -> Tensor:
    """vectors: [T, n, D]."""
    moments = HeadMoments(vectors.shape[1], vectors.shape[2], vectors.device)
    moments.add(vectors[None])
    return linear_cka_gram(moments.covariance(), n_head=vectors.shape[1], W_O=W_O)


@given(SEEDS, st.floats(1e-3, 1e3))
def test_cka_does_not_change_with_turns_scales_shifts_or_the_order_of_tokens(seed: int, c: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(53, 3, 5, generator=generator, dtype=torch.float64)
    x[:, 1] += x[:, 0]
    plain = cka(x)
    changed = torch.einsum("thd,hde->the", x[torch.randperm(53, generator=generator)], c * orthogonal(generator, 3, 5))
    np.testing.assert_allclose(similarity(cka(changed + 2 * c).numpy()), similarity(plain.numpy()), rtol=0, atol=1e-5)


@given(SEEDS)
def test_cka_changes_when_a_head_is_stretched_or_its_tokens_are_shuffled(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(53, 3, 5, generator=generator, dtype=torch.float64)
    x[:, 1] = x[:, 0]
    assert similarity(cka(x).numpy())[0, 1] == pytest.approx(1)
    shuffled = x.clone()
    shuffled[:, 1] = x[torch.randperm(53, generator=generator), 1]
    assert similarity(cka(shuffled).numpy())[0, 1] < 0.9
    stretched = x.clone()
    stretched[:, 1] *= torch.tensor([3.0, 1, 1, 1, 0.1])
    assert similarity(cka(stretched).numpy())[0, 1] < 0.99


def test_cka_of_outputs_forms_nothing_of_the_models_width() -> None:
    z = torch.randn(53, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for width in (3, 4099):  # narrower than a head, and wider
        W_O = torch.randn(3, 5, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
        written = [(z[:, h] @ W_O[h]) for h in range(3)]
        np.testing.assert_allclose(similarity(cka(z, W_O).numpy()), cka_of(written), rtol=0, atol=1e-6)


def test_a_large_constant_part_costs_no_digits() -> None:
    x = torch.randn(53, 3, 5, generator=torch.Generator().manual_seed(5))
    np.testing.assert_allclose(similarity(cka(x + 1000).numpy()), similarity(cka((x + 1000).double() - 1000).numpy()), rtol=0, atol=1e-5)


# Which measure is defined where


def test_every_measure_names_its_grams_and_the_store_knows_them() -> None:
    assert GRAMS == ("qk", "ov", "cka", "projection-kernel-qk", "projection-kernel-ov", "keys", "values")
    assert [(m.name, m.sources) for m in MEASURES.values()] == [
        ("operator", ("weights", "activations")),
        ("cka", ("activations",)),
        ("projection-kernel", ("weights",)),
        ("keys", ("weights", "activations")),
        ("values", ("weights", "activations")),
    ]
    assert gram_name("projection-kernel", "ov") == "projection-kernel-ov"


@pytest.mark.parametrize(
    ("measure_name", "source", "text"),
    [
        ("cka", "weights", "--measure cka compares what heads write on tokens (linear CKA), so it is not defined from weights; give --source activations"),
        (
            "projection-kernel",
            "activations",
            "--measure projection-kernel compares subspaces that weights span, so it is not defined from activations; give --source weights",
        ),
    ],
)
def test_a_measure_is_refused_where_it_is_not_defined(measure_name: str, source: str, text: str) -> None:
    with pytest.raises(HeadrankError) as error:
        check_source(measure_name, source)
    assert str(error.value) == text


def test_a_measure_of_one_circuit_needs_no_circuit_and_refuses_the_other() -> None:
    assert [circuit_of(name, None) for name in MEASURES] == ["qk", "ov", "qk", "qk", "ov"]
    assert circuit_of("projection-kernel", "ov") == "ov"
    with pytest.raises(HeadrankError, match=r"^--measure keys compares keys alone: it belongs to circuit qk, not to ov$"):
        circuit_of("keys", "ov")
    with pytest.raises(HeadrankError, match=r"^no measure is called 'cosine'; there are operator, cka, projection-kernel, keys, values$"):
        find_measure("cosine")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of three layers on disk."""
    from safetensors.torch import save_file

    config = ModelConfig(kind="gqa", n_kv_head=2, n_layer=3, n_head=6, d_head=10, d_model=13, d_mlp=17, vocab_size=256, context=19)
    path = tmp_path / "model"
    path.mkdir()
    save_file({name: p.detach().clone() for name, p in decoder(config).named_parameters()}, path / "model.safetensors")
    (path / "config.json").write_text(config.to_json())
    return path


def test_a_measure_is_kept_beside_the_plain_measurement_and_found_again(folder: Path, tmp_path: Path) -> None:
    ref, store = ModelRef(label="model", path=str(folder)), Store(tmp_path / "store")
    plain = measure(ref, Settings(source="weights"), store=store)
    keys = measure(ref, Settings(source="weights", measure="keys"), store=store)
    assert set(plain.grams) == {f"{name}/{i}" for name in ("qk", "ov") for i in range(3)}
    assert set(keys.grams) == {f"keys/{i}" for i in range(3)}
    assert keys.settings["measure"] == "keys"
    assert "measure" not in plain.settings
    assert len(list((tmp_path / "store").iterdir())) == 2
    again = measure(ref, Settings(source="weights", measure="keys"), store=store)
    for name, gram in keys.grams.items():
        np.testing.assert_array_equal(again.grams[name], gram)


def test_a_measurement_file_is_not_taken_for_another_measure(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.safetensors"
    write_measurement(measure(ModelRef(label="model", path=str(folder)), Settings(source="weights", measure="keys")), file)
    assert read_measurement(file).grams.keys() == {"keys/0", "keys/1", "keys/2"}
    with pytest.raises(HeadrankError, match=r"keys.safetensors: was measured with --measure keys; ask for that, or give the checkpoint$"):
        measure(ModelRef(label="file", path=str(file)), Settings(source="weights"))
    kept_keys = measure(ModelRef(label="file", path=str(file)), Settings(source="weights", measure="keys"))
    assert kept_keys.grams.keys() == {"keys/0", "keys/1", "keys/2"}


def test_cka_from_activations_has_one_gram_a_layer_and_is_centred_always(folder: Path) -> None:
    ref = ModelRef(label="model", path=str(folder))
    found = measure(ref, Settings(measure="cka", n_sequences=11))
    assert {name: gram.shape for name, gram in found.grams.items()} == {f"cka/{i}": (1, 6, 6) for i in range(3)}
    with pytest.raises(HeadrankError, match=r"^--measure cka is linear CKA, which is centred by definition; leave out --no-center$"):
        measure(ref, Settings(measure="cka", center=False))


@pytest.mark.parametrize("name", ["projection-kernel", "keys", "values"])
def test_the_null_of_a_measure_is_of_that_measure(folder: Path, name: str) -> None:
    ref = ModelRef(label="model", path=str(folder))
    found = measure(ref, Settings(source="weights", measure=name, null=True))
    assert set(found.null) == set(MEASURES[name].grams.values())
    operators = measure(ref, Settings(source="weights", null=True))
    kernel, circuit = next((gram, circuit) for circuit, gram in MEASURES[name].grams.items())
    assert np.mean(found.null[kernel]["uncentered"]) < np.mean(operators.null[circuit]["uncentered"])  # cosines of kernels are never below 0


def test_keys_and_values_of_a_transformers_model_are_those_of_its_cache() -> None:
    transformers = pytest.importorskip("transformers")
    from headrank.huggingface import TransformersRunner

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=53, hidden_size=24, intermediate_size=37, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=10
    )
    model = transformers.LlamaModel(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(5)
    ids = torch.randint(0, 53, (3, 11))
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    layers = [LayerFacts(index=i, n_head=6, n_kv_head=2) for i in range(2)]
    for name, part in (("keys", "keys"), ("values", "values")):
        recorder = Recorder(layers, (name,), n_groups=1)
        recorder.begin_batch(torch.zeros(3, dtype=torch.long), None)
        TransformersRunner(model).run(ids, None, recorder, last_layer=1)
        for index, gram in enumerate(recorder.grams(center=True).values()):
            vectors = getattr(cache.layers[index], part).double()  # [B, G, T, D]
            expected = cka_of([vectors[:, h // 3].flatten(0, 1) for h in range(6)])
            np.testing.assert_allclose(similarity(gram.sum(0)), expected, rtol=0, atol=ROUNDING)
