from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrank.diversity import effective_rank, similarity, spectrum
from headrank.errors import HeadrankError
from headrank.forward import DecoderRunner, Recorder, load_runner, pass_over
from headrank.model import Decoder
from headrank.results import layer_result
from headrank.store import LayerFacts
from headrank.tokens import Sequences
from tests.plain import CONFIGS, checkpoint_of, cosines, decoder, eager_pass, gram_of, output_operators, score_operators

CPU = torch.device("cpu")
IDS = np.random.default_rng(0).integers(31, size=(7, 11))
FULL = Sequences(ids=IDS, lengths=np.full(7, 11), source="random")
RAGGED = Sequences(ids=IDS, lengths=np.array([11, 7, 3, 1, 11, 2, 5]), source="random")  # one has a single token
LAYERS = [LayerFacts(index=index, n_head=6, n_kv_head=6) for index in range(3)]
ROUNDING = 2e-5  # of the whole float32 pass, on cosines


def runner_of(model: Decoder, *, dtype: torch.dtype = torch.float32) -> DecoderRunner:
    return DecoderRunner(checkpoint_of(model)[0], device=CPU, dtype=dtype)


def measured(model: Decoder, sequences: Sequences = FULL, *, layers: Sequence[LayerFacts] = LAYERS, **options: Any) -> dict[str, np.ndarray]:
    settings: dict[str, Any] = {"device": CPU, "batch_size": 3, "n_groups": 1, "dtype": torch.float32} | options
    return dict(pass_over(runner_of(model, dtype=settings.pop("dtype")), sequences, layers, ("qk", "ov"), **settings))


def valid_of(sequences: Sequences) -> Tensor:
    return torch.arange(sequences.ids.shape[1]) < torch.from_numpy(sequences.lengths)[:, None]


def assert_close(found: np.ndarray, expected: np.ndarray, *, rounding: float = ROUNDING) -> None:
    size = np.sqrt(expected.diagonal(axis1=-2, axis2=-1))
    scale = size[..., :, None] * size[..., None, :]
    np.testing.assert_allclose(found / scale, expected / scale, rtol=0, atol=rounding)


@pytest.mark.parametrize("sequences", [FULL, RAGGED], ids=["full", "ragged"])
@pytest.mark.parametrize("skip_first", [0, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_activations_of_every_kind_are_those_of_an_eager_softmax(name: str, skip_first: int, sequences: Sequences) -> None:
    """qk against centred log-probabilities, ov against z W_O^h token by token, both from a float64 decoder that is written out."""
    model = decoder(CONFIGS[name])
    valid = valid_of(sequences)
    keep = valid & (torch.arange(11) >= skip_first)
    found = measured(model, sequences, skip_first=skip_first)
    uncentred = measured(model, sequences, skip_first=skip_first, center=False)
    for layer, eager in enumerate(eager_pass(model, torch.from_numpy(sequences.ids), valid=valid)):
        assert_close(found[f"qk/{layer}"][0], gram_of(score_operators(eager, keep)))
        assert_close(found[f"ov/{layer}"][0], gram_of(output_operators(eager, keep)))
        assert_close(uncentred[f"ov/{layer}"][0], gram_of(output_operators(eager, keep, center=False)))


@given(st.permutations(range(7)), st.integers(1, 7))
def test_neither_the_batch_size_nor_the_order_of_sequences_matters(order: list[int], batch_size: int) -> None:
    model = decoder(CONFIGS["gqa"])
    shuffled = Sequences(ids=RAGGED.ids[order], lengths=RAGGED.lengths[order], source="random")
    found, expected = measured(model, shuffled, batch_size=batch_size), measured(model, RAGGED)
    assert found.keys() == expected.keys()
    for name in found:
        assert_close(found[name], expected[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_side_of_the_padding_does_not_matter(name: str) -> None:
    model = decoder(CONFIGS[name])
    runner = runner_of(model)
    right_ids, right = torch.from_numpy(RAGGED.ids), valid_of(RAGGED)
    left_ids, left = torch.zeros_like(right_ids), right.flip(1)
    left_ids[left] = right_ids[right]
    left_ids[~left] = 29
    grams = []
    for ids, valid in ((right_ids, right), (left_ids, left)):
        recorder = Recorder(LAYERS, ("qk", "ov"), n_groups=1)
        recorder.begin_batch(torch.zeros(7, dtype=torch.long), valid)
        runner.run(ids, valid, recorder, last_layer=2)
        grams.append(recorder.grams(center=True))
    for key in grams[0]:
        assert_close(grams[1][key], grams[0][key])


def test_padding_counts_for_nothing() -> None:
    model = decoder(CONFIGS["mha"])
    noise = np.random.default_rng(1).integers(31, size=(7, 11))
    other = Sequences(ids=np.where(valid_of(RAGGED), RAGGED.ids, noise), lengths=RAGGED.lengths, source="random")
    assert (other.ids != RAGGED.ids).any()
    longer = Sequences(ids=np.pad(RAGGED.ids, ((0, 0), (0, 6))), lengths=RAGGED.lengths, source="random")
    expected = measured(model, RAGGED)
    for sequences in (other, longer):
        for name, gram in measured(model, sequences).items():
            assert_close(gram, expected[name])


def test_a_sequence_of_one_token_has_no_scores() -> None:
    single = Sequences(ids=IDS[:2, :1], lengths=np.array([1, 1]), source="random")
    found = measured(decoder(CONFIGS["mha"]), single)
    assert not found["qk/1"].any()
    assert found["ov/1"].any()


def test_groups_of_sequences_sum_to_the_total() -> None:
    model = decoder(CONFIGS["lrkv"])
    whole, parts = measured(model, RAGGED), measured(model, RAGGED, n_groups=4)
    for name in whole:
        assert parts[name].shape == (4, 6, 6)
        assert_close(parts[name].sum(0), whole[name][0])
    alone = Sequences(ids=RAGGED.ids[:2], lengths=RAGGED.lengths[:2], source="random")  # 7 sequences in 4 groups: the first has two
    assert_close(parts["qk/0"][0], measured(model, alone)["qk/0"][0])


def test_each_sequence_may_be_a_group_of_its_own() -> None:
    model = decoder(CONFIGS["mha"])
    parts = measured(model, FULL, n_groups=7)
    for sequence in (0, 6):
        alone = Sequences(ids=FULL.ids[[sequence]], lengths=FULL.lengths[[sequence]], source="random")
        assert_close(parts["qk/2"][sequence], measured(model, alone)["qk/2"][0])


def test_a_pass_for_some_layers_stops_after_the_last_and_gives_the_same() -> None:
    model = decoder(CONFIGS["gqa"])
    whole = measured(model)
    runner, calls = runner_of(model), []
    for name, module in runner.model.named_modules():
        module.register_forward_hook(lambda module, given, output, name=name: calls.append(name))
    part = pass_over(runner, FULL, [LAYERS[1]], ("qk", "ov"), device=CPU, batch_size=3, n_groups=1)
    assert sorted(part) == ["ov/1", "qk/1"]
    for name, gram in part.items():
        assert_close(gram, whole[name], rounding=1e-6)  # layers that are not asked for leave attention to torch, which rounds otherwise
    assert "transformer.h.1.attn" in calls
    assert not {"transformer.h.1.mlp", "transformer.h.2.attn", "lm_head"} & set(calls)


def test_one_circuit_alone_may_be_asked_for() -> None:
    model = decoder(CONFIGS["mha"])
    found = pass_over(runner_of(model), FULL, LAYERS, ("ov",), device=CPU, batch_size=3, n_groups=1)
    assert sorted(found) == ["ov/0", "ov/1", "ov/2"]
    assert_close(found["ov/1"], measured(model)["ov/1"], rounding=1e-6)  # without scores torch computes attention, and rounds otherwise


def test_a_layer_that_the_pass_never_comes_to_is_an_error() -> None:
    with pytest.raises(HeadrankError) as caught:
        measured(decoder(CONFIGS["mha"]), layers=[*LAYERS, LayerFacts(index=3, n_head=6, n_kv_head=6)])
    assert str(caught.value) == "the forward pass never came to qk/3, ov/3; use --source weights"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_passes_give_nearly_the_same_similarities(dtype: torch.dtype) -> None:
    model = decoder(CONFIGS["gqa"])
    exact, close = measured(model), measured(model, dtype=dtype)
    for name in exact:
        np.testing.assert_allclose(similarity(close[name]), similarity(exact[name]), atol=0.03)
        assert close[name].dtype == np.float64


class Crowded:
    """A runner whose machine has memory for some sequences only; it runs out when a batch has been counted."""

    def __init__(self, model: Decoder, *, fits: int, error: type[RuntimeError] = torch.OutOfMemoryError, text: str = "CUDA out of memory") -> None:
        self.runner, self.fits, self.error, self.text = runner_of(model), fits, error, text
        self.sizes: list[int] = []

    def run(self, ids: Tensor, valid: Tensor | None, recorder: Recorder, *, last_layer: int) -> None:
        self.sizes.append(len(ids))
        self.runner.run(ids, valid, recorder, last_layer=last_layer)
        if len(ids) > self.fits:
            raise self.error(self.text)


CPU_TEXT = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."


@pytest.mark.parametrize(("error", "text"), [(torch.OutOfMemoryError, "CUDA out of memory"), (RuntimeError, CPU_TEXT)])
def test_batches_are_halved_until_they_fit_with_a_remark_and_the_same_result(error: type[RuntimeError], text: str) -> None:
    model = decoder(CONFIGS["mha"])
    runner = Crowded(model, fits=2, error=error, text=text)
    remarks: list[str] = []
    progress: list[tuple[int, int]] = []
    found = pass_over(
        runner, FULL, LAYERS, ("qk", "ov"), device=CPU, batch_size=None, n_groups=3, remark=remarks.append, on_batch=lambda *done: progress.append(done)
    )
    assert runner.sizes == [7, 3, 1, 1, 1, 1, 1, 1, 1]
    assert remarks == ["out of memory; going on with 3 sequences a batch", "out of memory; going on with 1 sequences a batch"]
    assert progress[-1] == (7, 7)
    expected = measured(model, n_groups=3)
    for name in expected:
        assert_close(found[name], expected[name])


def test_what_the_cpus_allocator_says_is_known() -> None:
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        torch.empty(10**15)


def test_memory_that_does_not_suffice_for_what_was_asked_for_is_the_users_to_mend() -> None:
    model = decoder(CONFIGS["mha"])
    with pytest.raises(HeadrankError, match=r"^out of memory with --batch-size 5; give a smaller one, or leave it out$"):
        pass_over(Crowded(model, fits=2), FULL, LAYERS, ("qk",), device=CPU, batch_size=5, n_groups=1)
    with pytest.raises(HeadrankError, match=r"^out of memory with a single sequence of 11 tokens; give a smaller --seq-len$"):
        pass_over(Crowded(model, fits=0), FULL, LAYERS, ("qk",), device=CPU, batch_size=None, n_groups=1)


def test_other_errors_keep_their_traceback() -> None:
    runner = Crowded(decoder(CONFIGS["mha"]), fits=0, error=RuntimeError, text="mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        pass_over(runner, FULL, LAYERS, ("qk",), device=CPU, batch_size=None, n_groups=1)
    assert runner.sizes == [7]


def test_weights_that_are_no_numbers_spoil_what_comes_after_them_and_nothing_before() -> None:
    model = decoder(CONFIGS["mha"])
    expected = measured(model)
    model.get_parameter("transformer.h.1.attn.c_q.weight")[23, 4] = float("nan")  # head 2 of layer 1
    found = measured(model)
    np.testing.assert_array_equal(found["qk/0"], expected["qk/0"])
    np.testing.assert_array_equal(found["ov/0"], expected["ov/0"])
    others = [0, 1, 3, 4, 5]
    assert np.isnan(found["qk/1"][0, 2]).all()
    assert_close(found["qk/1"][0][np.ix_(others, others)], expected["qk/1"][0][np.ix_(others, others)])
    assert np.isnan(found["qk/2"]).all()


def test_numbers_beyond_float16_are_not_finite_instead_of_wrong() -> None:
    model = decoder(CONFIGS["mha"])
    for name in ("c_v", "c_proj"):
        model.get_parameter(f"transformer.h.1.attn.{name}.weight").mul_(200)
    model.get_parameter("transformer.h.1.mlp.c_fc.weight").mul_(1000)
    found = measured(model, dtype=torch.float16)
    assert np.isfinite(found["qk/0"]).all()
    assert not np.isfinite(found["ov/2"]).all()


def test_a_dead_head_writes_nothing_and_lowers_the_effective_rank() -> None:
    model = decoder(CONFIGS["mha"])
    before = similarity(measured(model)["ov/1"][0])
    model.get_parameter("transformer.h.1.attn.c_v.weight")[20:30] = 0
    found = measured(model)["ov/1"][0]
    assert not found[2].any()
    others = [0, 1, 3, 4, 5]
    assert_close(similarity(found)[np.ix_(others, others)], before[np.ix_(others, others)])
    assert effective_rank(spectrum(similarity(found))) < effective_rank(spectrum(before))


def test_heads_with_the_same_queries_and_keys_have_effective_rank_one_and_no_centred_one() -> None:
    model = decoder(CONFIGS["mqa"])
    for layer in range(3):
        W_Q = model.get_parameter(f"transformer.h.{layer}.attn.c_q.weight")
        W_Q.copy_(W_Q[:10].repeat(6, 1))
    found = measured(model)
    for layer in LAYERS:
        assert layer_result(found[f"qk/{layer.key}"], layer, is_centered=False).effective_rank == pytest.approx(1, abs=1e-5)
        assert layer_result(found[f"qk/{layer.key}"], layer, is_centered=True).effective_rank is None


def test_grouped_heads_with_the_same_queries_make_blocks_of_consecutive_heads() -> None:
    model = decoder(CONFIGS["gqa"])
    W_Q = model.get_parameter("transformer.h.0.attn.c_q.weight")
    W_Q.copy_(W_Q[:10].repeat(6, 1))
    S = similarity(measured(model)["qk/0"][0])
    group = np.arange(6) // 3
    same = group[:, None] == group
    np.testing.assert_allclose(S[same], 1, atol=1e-6)
    assert S[~same].max() < 0.9


def test_permuting_heads_permutes_both_grams() -> None:
    model = decoder(CONFIGS["mha"])
    expected = measured(model)
    order = [3, 0, 5, 1, 4, 2]
    for part in ("c_q", "c_k", "c_v"):
        weight = model.get_parameter(f"transformer.h.1.attn.{part}.weight")
        weight.copy_(weight.unflatten(0, (6, 10))[order].flatten(0, 1).clone())
    W_O = model.get_parameter("transformer.h.1.attn.c_proj.weight")
    W_O.copy_(W_O.unflatten(1, (6, 10))[:, order].flatten(1).clone())
    found = measured(model)
    for name in ("qk/1", "ov/1"):
        assert_close(found[name][0], expected[name][0][np.ix_(order, order)])
    assert_close(found["qk/2"], expected["qk/2"])  # the block's output is the same


def test_scaling_values_of_a_head_up_and_its_output_projection_down_changes_nothing() -> None:
    model = decoder(CONFIGS["mha"])
    expected = measured(model)
    model.get_parameter("transformer.h.1.attn.c_v.weight")[20:30] *= 2.0**40
    model.get_parameter("transformer.h.1.attn.c_proj.weight")[:, 20:30] *= 2.0**-40
    for name, gram in measured(model).items():
        assert_close(gram, expected[name])


def test_similarities_of_outputs_are_correlations() -> None:
    model = decoder(CONFIGS["mha"])
    eager = eager_pass(model, torch.from_numpy(FULL.ids))[1]
    flat = eager.outputs.transpose(0, 1).flatten(1, 2)  # [H, tokens, d]
    deviations = (flat - flat.mean(1, keepdim=True)).flatten(1).numpy()
    np.testing.assert_allclose(similarity(measured(model)["ov/1"][0]), cosines(deviations @ deviations.T), atol=ROUNDING)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_runner_of_our_own_checkpoints_is_our_own_decoder(name: str) -> None:
    checkpoint, architecture = checkpoint_of(decoder(CONFIGS[name]))
    assert isinstance(load_runner(checkpoint, architecture, device=CPU, dtype=torch.float32), DecoderRunner)


def test_a_pass_leaves_no_gradient_and_the_weights_alone() -> None:
    model = decoder(CONFIGS["mha"])
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    measured(model)
    assert all(torch.equal(before[name], parameter) and parameter.grad is None for name, parameter in model.named_parameters())
