"""On a CUDA device the numbers are those of the CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

from headrank import placement
from headrank.diversity import similarity
from headrank.errors import HeadrankError
from headrank.factors import head_factors
from headrank.forward import DecoderRunner, pass_over
from headrank.gram import factored_gram
from headrank.store import LayerFacts
from headrank.tokens import Sequences
from tests.plain import CONFIGS, checkpoint_of, decoder

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture
def parted(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The first two CUDA devices, or twice the only one, as a machine on which the tests' models fit on both together alone."""
    devices = [torch.device("cuda", index % torch.cuda.device_count()) for index in range(2)]
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(placement, "devices_of", lambda device: devices)
    return devices


def limit(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    monkeypatch.setattr(placement, "free_bytes", lambda device: n_bytes)


def similarities(kind: str, device: str, dtype: torch.dtype) -> dict[str, np.ndarray]:
    config = CONFIGS[kind]
    runner = DecoderRunner(checkpoint_of(decoder(config))[0], device=torch.device(device), dtype=dtype)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (5, 11))
    lengths = np.array([11, 7, 11, 3, 11], dtype=np.int64)
    layers = [LayerFacts(index=layer, n_head=config.n_head, n_kv_head=config.n_kv_head) for layer in range(config.n_layer)]
    grams = pass_over(
        runner,
        Sequences(ids=ids, lengths=lengths, source="random"),
        layers,
        ("qk", "ov"),
        device=torch.device(device),
        batch_size=None,
        n_groups=5,
    )
    return {name: similarity(gram.sum(0)) for name, gram in grams.items()}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])  # eight bits of mantissa, other orders of sums
def test_activations_are_those_of_the_cpu(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    on_cpu, on_cuda = similarities(kind, "cpu", dtype), similarities(kind, "cuda", dtype)
    assert on_cpu.keys() == on_cuda.keys()
    for name, expected in on_cpu.items():
        np.testing.assert_allclose(on_cuda[name], expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_decoder_over_two_devices_measures_what_the_cpu_does(kind: str, parted: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(CONFIGS[kind])
    total = sum(parameter.nbytes for parameter in model.parameters()) - model.lm_head.weight.nbytes
    limit(monkeypatch, total * 3 // 4)
    blocks = DecoderRunner(checkpoint_of(model)[0], device=torch.device("cuda"), dtype=torch.float32).model.blocks
    assert [blocks[0].device, blocks[-1].device] == parted
    on_cpu, on_cuda = similarities(kind, "cpu", torch.float32), similarities(kind, "cuda", torch.float32)
    for name, expected in on_cpu.items():
        np.testing.assert_allclose(on_cuda[name], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "t5", "bloom"])
def test_a_model_of_transformers_over_two_devices_measures_what_the_cpu_does(
    kind: str, parted: list[torch.device], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from headrank.hf_loading import quiet
    from headrank.huggingface import TransformersRunner
    from tests.test_huggingface import apart, build, case_of, measured

    model = build(case_of(kind))
    with quiet():
        model.save_pretrained(tmp_path)
    total = sum(parameter.nbytes for parameter in model.parameters())
    limit(monkeypatch, total * 3 // 4)
    runner = TransformersRunner.load(tmp_path, device=torch.device("cuda"), dtype=torch.float32, needs=placement.Needs(), n_bytes=total)
    assert {parameter.device for parameter in runner.model.parameters()} == set(parted)
    for side in ("none", "right"):
        assert apart(measured(runner, side), measured(TransformersRunner(model), side)) < 1e-3  # other orders of sums
    limit(monkeypatch, total // 4)
    with pytest.raises(HeadrankError, match="does not fit: weights take"):
        TransformersRunner.load(tmp_path, device=torch.device("cuda"), dtype=torch.float32, needs=placement.Needs(), n_bytes=total)


def test_what_is_free_on_a_device_is_what_it_has_less_what_is_taken() -> None:
    device = placement.devices_of(torch.device("cuda"))[0]
    before = placement.free_bytes(device)
    taken = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    after = placement.free_bytes(device)
    assert 0 < after < torch.cuda.get_device_properties(device).total_memory
    assert before - after >= taken.nbytes // 2  # other programs come and go


def test_the_gram_of_factors_is_that_of_the_cpu() -> None:
    left, right = torch.randn(2, 7, 131, 16, generator=torch.Generator().manual_seed(0))
    heads = range(7)
    expected = factored_gram(left, right, heads, heads)
    found = factored_gram(left.cuda(), right.cuda(), heads, heads).cpu()
    np.testing.assert_allclose(similarity(found.numpy()), similarity(expected.numpy()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("circuit", ["qk", "ov"])
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_of_the_cpu(dtype: torch.dtype, kind: str, circuit: str) -> None:
    """16-bit numbers stay as they are stored, and their products have float32 sums."""
    checkpoint, architecture = checkpoint_of(decoder(CONFIGS[kind]).to(dtype))
    found = []
    for device in ("cpu", "cuda"):
        factors = head_factors(checkpoint, architecture, architecture.layers[1], circuit, device=torch.device(device), as_stored=True)
        assert factors.left.device.type == device
        gram = factored_gram(factors.left, factors.right, factors.left_of_head, factors.right_of_head)
        found.append(similarity(gram.cpu().numpy()))
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-5)
