"""On a CUDA device the numbers are those of the CPU."""

import numpy as np
import pytest
import torch

from headrank.diversity import similarity
from headrank.forward import DecoderRunner, pass_over
from headrank.gram import factored_gram
from headrank.store import LayerFacts
from headrank.tokens import Sequences
from tests.plain import CONFIGS, checkpoint_of, decoder

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


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


def test_the_gram_of_factors_is_that_of_the_cpu() -> None:
    left, right = torch.randn(2, 7, 131, 16, generator=torch.Generator().manual_seed(0))
    heads = range(7)
    expected = factored_gram(left, right, heads, heads)
    found = factored_gram(left.cuda(), right.cuda(), heads, heads).cpu()
    np.testing.assert_allclose(similarity(found.numpy()), similarity(expected.numpy()), rtol=0, atol=1e-5)
