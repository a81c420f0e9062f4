"""The attention form of the weights at an offset, and its mean over offsets: against models that turn queries and keys themselves."""

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrank.architectures import describe
from headrank.checkpoints import open_checkpoint
from headrank.errors import HeadrankError
from headrank.factors import HeadFactors, head_factors
from headrank.measure import Settings, _WeightsWork, measure
from headrank.rotary import LAYOUTS, Rotary, at_offset, mean_gram_over_offsets, rotary_of
from headrank.selection import ModelRef
from headrank.store import LayerFacts
from tests.plain import CONFIGS, MemoryCheckpoint, checkpoint_of, cosines, decoder, gram_of, head_matrices, turned

SEEDS = st.integers(0, 2**32)
ROUNDING = 3e-6  # of factors in float32, relative to the heads' sizes


def operators(factors: HeadFactors) -> Tensor:
    """[H, n, m] in float64."""
    left, right = factors.left.double()[list(factors.left_of_head)], factors.right.double()[list(factors.right_of_head)]
    return left @ right.transpose(1, 2)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_form_at_an_offset_is_the_score_that_the_decoder_gives_a_key_so_many_tokens_back(kind: str) -> None:
    model = decoder(CONFIGS[kind])
    checkpoint, architecture = checkpoint_of(model)
    layer = architecture.layers[1]
    factors, rotary = head_factors(checkpoint, architecture, layer, "qk"), rotary_of(checkpoint, layer)
    matrices = head_matrices(model, 1)
    x = torch.randn(1, 12, 13, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for offset in (1, 11):
        forms = operators(at_offset(factors, rotary, offset))
        for h, (W_Q, W_K) in enumerate(zip(matrices.W_Q, matrices.W_K, strict=True)):
            q, k = turned(x @ W_Q, model.config)[0], turned(x @ W_K, model.config)[0]  # without QK norm, which is a factor a token
            for t in range(offset, 12):
                assert float(x[0, t] @ forms[h] @ x[0, t - offset]) == pytest.approx(float(q[t] @ k[t - offset]), rel=1e-4, abs=1e-4)


def mean_of_grams(factors: HeadFactors, rotary: Rotary, n: int) -> np.ndarray:
    """The loop over offsets, with materialised forms."""
    return np.mean([gram_of(operators(at_offset(factors, rotary, offset))) for offset in range(n)], 0)


@pytest.mark.parametrize("kind", ["mha", "gqa", "mqa", "mla", "mla_rope", "lrkv"])
def test_the_mean_over_offsets_is_the_mean_of_the_inner_products(kind: str) -> None:
    checkpoint, architecture = checkpoint_of(decoder(CONFIGS[kind]))
    layer = architecture.layers[0]
    factors, rotary = head_factors(checkpoint, architecture, layer, "qk"), rotary_of(checkpoint, layer)
    for n in (1, 2, 37):
        gram, expected = mean_gram_over_offsets(factors, rotary, n).numpy(), mean_of_grams(factors, rotary, n)
        sizes = np.sqrt(expected.diagonal())
        np.testing.assert_allclose(gram / np.outer(sizes, sizes), expected / np.outer(sizes, sizes), rtol=0, atol=1e-6)  # the loop turns float32 keys


@given(SEEDS, st.lists(st.floats(-7, 7), min_size=3, max_size=3), st.integers(1, 60))
def test_the_closed_form_is_the_mean_at_any_frequency(seed: int, angles: list[float], n: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rotary = Rotary(first=(0, 1, 5), second=(2, 6, 3), angles=tuple(angles))
    factors = HeadFactors(*torch.randn(2, 4, 11, 7, generator=generator, dtype=torch.float64), (0, 1, 2, 3), (0, 1, 2, 3))
    np.testing.assert_allclose(mean_gram_over_offsets(factors, rotary, n).numpy(), mean_of_grams(factors, rotary, n), rtol=0, atol=1e-7)


@given(SEEDS)
def test_a_key_that_is_turned_keeps_its_size_and_its_other_columns(seed: int) -> None:
    factors = HeadFactors(*torch.randn(2, 4, 11, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), (0, 1, 2, 3), (0, 1, 2, 3))
    moved = at_offset(factors, Rotary(first=(0, 1, 5), second=(2, 6, 3), angles=(0.9, -0.4, 2.0)), 3)
    torch.testing.assert_close(moved.right.norm(dim=2), factors.right.norm(dim=2))
    assert torch.equal(moved.right[..., 4], factors.right[..., 4])
    assert torch.equal(moved.left, factors.left)
    assert not torch.allclose(moved.right[..., 0], factors.right[..., 0])


def test_over_many_offsets_only_products_within_one_frequency_remain() -> None:
    """Two heads whose queries and keys are alike across frequencies alone have nothing in common in the long run."""
    rotary = Rotary(first=(0, 1), second=(2, 3), angles=(1.0, 0.1))
    eye, ones = torch.eye(4, dtype=torch.float64), torch.ones(1, 4, dtype=torch.float64)
    queries = torch.stack([eye[:, :1] @ ones] * 2)
    keys = torch.stack([eye * torch.tensor([1.0, 0, 1, 0]), eye[[1, 0, 3, 2]] * torch.tensor([0, 1.0, 0, 1])])
    factors = HeadFactors(queries, keys, (0, 1), (0, 1))
    near, far = (mean_gram_over_offsets(factors, rotary, n).numpy() for n in (1, 100_000))
    assert cosines(near)[0, 1] == pytest.approx(1.0)
    assert cosines(far)[0, 1] == pytest.approx(0.0, abs=1e-3)


def test_a_quarter_turn_takes_first_to_second() -> None:
    eye = torch.eye(2, dtype=torch.float64)[None]
    moved = at_offset(HeadFactors(eye, eye, (0,), (0,)), Rotary(first=(0,), second=(1,), angles=(np.pi / 6,)), 3)
    np.testing.assert_allclose(moved.right[0].numpy(), [[0, 1], [-1, 0]], atol=1e-12)


# Through the settings


@pytest.fixture
def ref(tmp_path: Path) -> ModelRef:
    """A checkpoint with a rotary part of its own on disk."""
    from safetensors.torch import save_file

    config = CONFIGS["mla_rope"]
    save_file({name: p.detach().clone() for name, p in decoder(config).named_parameters()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(config.to_json())
    return ModelRef(label="model", path=str(tmp_path))


def test_offset_0_is_the_plain_number_bit_for_bit(ref: ModelRef) -> None:
    plain, zero = measure(ref, Settings(source="weights")), measure(ref, Settings(source="weights", rope_offset=0))
    for name, gram in plain.grams.items():
        np.testing.assert_array_equal(zero.grams[name], gram)
    assert zero.settings == plain.settings
    mean_of_one = measure(ref, Settings(source="weights", rope_mean=1))
    np.testing.assert_array_equal(mean_of_one.grams["qk/1"], plain.grams["qk/1"])


def test_offsets_measure_attention_alone_and_are_kept_apart(ref: ModelRef) -> None:
    plain = measure(ref, Settings(source="weights"))
    at_5, mean = measure(ref, Settings(source="weights", rope_offset=5)), measure(ref, Settings(source="weights", rope_mean=5))
    assert set(at_5.grams) == set(mean.grams) == {"qk/0", "qk/1", "qk/2"}
    assert (at_5.settings["rope_offset"], mean.settings["rope_mean"]) == (5, 5)
    different = [plain.grams["qk/0"], at_5.grams["qk/0"], mean.grams["qk/0"]]
    assert all(not np.allclose(a, b, rtol=1e-3) for i, a in enumerate(different) for b in different[:i])


def test_the_rotary_part_alone_turns_as_it_does_beside_the_rest() -> None:
    checkpoint, architecture = checkpoint_of(decoder(CONFIGS["mla_rope"]))
    layer = architecture.layers[0]
    parts = {part: head_factors(checkpoint, architecture, layer, "qk", mla_part=part) for part in ("both", "nope", "rope")}
    both = operators(at_offset(parts["both"], rotary_of(checkpoint, layer), 5))
    alone = operators(at_offset(parts["rope"], rotary_of(checkpoint, layer, mla_part="rope"), 5))
    torch.testing.assert_close(both, operators(parts["nope"]) + alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"rope_offset": 3}, "--rope-offset is about the form of the weights, and activations have their positions in them; add --source weights"),
        ({"rope_mean": 3}, "--rope-mean is about the form of the weights, and activations have their positions in them; add --source weights"),
        ({"source": "weights", "rope_mean": 3, "rope_offset": 2}, "give --rope-offset or --rope-mean, not both"),
        (
            {"source": "weights", "measure": "keys", "rope_offset": 2},
            "--rope-offset turns keys towards queries, which --measure keys does not compare; leave out one of them",
        ),
        (
            {"source": "weights", "mla_part": "nope", "rope_offset": 2},
            "--rope-offset: --mla-part nope is the part that is not turned; leave out one of them",
        ),
    ],
)
def test_offsets_are_refused_where_they_mean_nothing(ref: ModelRef, settings: dict, text: str) -> None:
    with pytest.raises(HeadrankError) as error:
        measure(ref, Settings(**settings))
    assert str(error.value) == text


def test_a_family_whose_layout_is_not_recorded_is_refused() -> None:
    checkpoint, architecture = checkpoint_of(decoder(CONFIGS["mha"]))
    other = MemoryCheckpoint(CONFIGS["mha"], checkpoint.weights)
    other.config = {"model_type": "bert"}
    with pytest.raises(HeadrankError) as error:
        rotary_of(other, architecture.layers[0])
    assert str(error.value) == "memory: how model_type 'bert' turns its heads is not recorded; leave out --rope-offset and --rope-mean"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "has rotary frequencies of the kind 'yarn', which is not known"),
        ({}, "does not say the base of the rotary frequencies (rope_theta)"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.3}, "means that 3 of a head's 10 dimensions are turned, which are no pairs"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, "has rotary settings that cannot be read: KeyError('factor')"),
    ],
)
def test_settings_that_are_not_understood_are_refused(config: dict, text: str) -> None:
    checkpoint, architecture = checkpoint_of(decoder(CONFIGS["mha"]))
    checkpoint.config = {"model_type": "mistral", **config}
    with pytest.raises(HeadrankError) as error:
        rotary_of(checkpoint, architecture.layers[0])
    assert str(error.value) == f"memory: config.json {text}; leave out --rope-offset and --rope-mean"


def test_shared_keys_are_turned_once() -> None:
    checkpoint, architecture = checkpoint_of(decoder(CONFIGS["mqa"]))
    work = _WeightsWork(checkpoint, architecture, Settings(source="weights", rope_offset=3))
    factors = head_factors(checkpoint, architecture, architecture.layers[0], "qk")
    assert at_offset(factors, rotary_of(checkpoint, architecture.layers[0]), 3).right.shape == (1, 13, 10)
    ((_, grams, faults),) = work.run([LayerFacts(index=0, n_head=6, n_kv_head=1)], "mqa", _Quiet())
    assert grams["qk/0"].shape == (1, 6, 6)
    assert not faults


class _Quiet:
    def start(self, label: str, total: int, unit: str) -> None:
        return

    def advance(self, done: int) -> None:
        return

    def remark(self, text: str) -> None:
        return


# Families of the transformers library

SCALED = {
    "linear": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    },
}  # fmt: skip


HALF = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
EVEN = {"nemotron": {"head_dim": 12}, "glm": {"head_dim": 12}, "glm4": {"head_dim": 12}, "gpt_neox": {"rope_parameters": HALF}}  # half a head is pairs


def assert_turned_as_the_library_does(case, folder: Path) -> None:  # type: ignore[no-untyped-def]
    """Cosines between queries and keys at all distances, as our factors and rotations have them and as attention is handed them.

    Cosines, since QK norm divides a head's query by its size; MLA's rotary part alone, since its other part is normalised apart.
    """
    from tests.architectures.oracle import build, full, watch

    model = build(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    checkpoint = open_checkpoint(folder)
    ids = torch.randint(3, model.config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(1))
    for layer, seen in zip(describe(checkpoint).layers, watch(model, case, {"input_ids": ids}), strict=True):
        q, k = full(checkpoint, layer, layer.q, seen.x), full(checkpoint, layer, layer.k, seen.memory)
        part = slice(layer.k.sizes["nope"], None) if "rope" in layer.k.sizes else slice(None)
        rotary = rotary_of(checkpoint, layer)
        theirs = _cosines(seen.q[..., part], seen.k[:, :: seen.k.shape[1] // k.shape[1], part])
        for offset in (0, 1, 7):
            keys = HeadFactors(q, k, (), ())
            ours = _cosines(q[..., part], at_offset(keys, rotary, offset).right[..., part])
            np.testing.assert_allclose(ours.diagonal(-offset, 1, 2), theirs.diagonal(-offset, 1, 2), rtol=0, atol=1e-4)


def _cosines(q: Tensor, k: Tensor) -> Tensor:
    """[H, T, T] between queries [T, H, D] and keys [T, G, D]."""
    q, k = (x / x.norm(dim=2, keepdim=True) for x in (q, k))
    return torch.einsum("thd,shd->hts", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))


def _families() -> list:
    pytest.importorskip("transformers")
    from tests.architectures.cases import CASES

    known = [replace(case, config=case.config | EVEN.get(case.model_type, {})) for case in CASES if case.model_type in LAYOUTS and not case.variant]
    llama = next(case for case in CASES if case.model_type == "llama")
    known += [replace(llama, config=llama.config | {"rope_parameters": rope}, variant=name) for name, rope in SCALED.items()]
    deepseek = next(case for case in CASES if case.model_type == "deepseek_v3")
    known.append(replace(deepseek, config=deepseek.config | {"rope_interleave": False}, variant="halves"))
    local = {"full_attention": {"rope_type": "linear", "rope_theta": 300.0, "factor": 8.0}, "sliding_attention": {"rope_type": "default", "rope_theta": 20.0}}
    gemma = next(case for case in CASES if case.model_type == "gemma3_text")
    mixed = {"rope_parameters": local, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    known.append(replace(gemma, config=gemma.config | mixed, variant="by_layer"))
    return known


@pytest.mark.filterwarnings("ignore")  # the library's own
@pytest.mark.parametrize("case", _families(), ids=str)
def test_heads_are_turned_as_the_library_that_defines_the_family_does(case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_turned_as_the_library_does(case, tmp_path)


OLD = {  # as configurations of earlier versions of the library say it, and as this one does
    "gpt_neox": ({"rotary_pct": 0.6, "rotary_emb_base": 50}, {"rope_parameters": {"rope_type": "default", "rope_theta": 50, "partial_rotary_factor": 0.6}}),
    "phi": ({"partial_rotary_factor": 0.6, "rope_theta": 50}, {"rope_parameters": {"rope_type": "default", "rope_theta": 50, "partial_rotary_factor": 0.6}}),
    "llama": (
        {"rope_theta": 50, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 50, "factor": 2.0}},
    ),
    "gemma3_text": (
        {"rope_theta": 50, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_local_base_freq": 7},
        {
            "rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 50, "factor": 2.0}, "sliding_attention": {"rope_theta": 7}},
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
}


@pytest.mark.parametrize("name", OLD)
def test_old_and_new_spellings_of_the_settings_mean_the_same(name: str) -> None:
    checkpoint, architecture = checkpoint_of(decoder(CONFIGS["mha"]))
    found = []
    for config in OLD[name]:
        checkpoint.config = {"model_type": name, **config}
        layers = [replace(layer, window=window) for layer, window in zip(architecture.layers, (4, 4, None), strict=True)]
        found.append([rotary_of(checkpoint, layer) for layer in layers])
    assert found[0] == found[1]
    assert (found[0][0] == found[0][2]) == (name != "gemma3_text")


def test_every_family_that_is_recorded_is_tested_against_the_library() -> None:
    assert {case.model_type for case in _families()} == set(LAYOUTS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "wrong"), [("llama", {"neighbours": True}), ("gptj", {"neighbours": False}), ("phi", {"default_share": 1.0, "share": "x"})])
def test_another_layout_would_be_noticed(name: str, wrong: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in _families() if case.model_type == name)
    monkeypatch.setitem(LAYOUTS, name, replace(LAYOUTS[name], **wrong))
    if name == "phi":
        monkeypatch.setattr("headrank.rotary._turned", lambda config, rope, layout, size, where: size)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_turned_as_the_library_does(case, tmp_path)
