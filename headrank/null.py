"""The yardstick: heads that know nothing of each other, with a model's own shapes and sharing."""

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrank.architectures import Architecture, AttentionLayer
from headrank.checkpoints import Checkpoint
from headrank.config import MODEL_TYPE, ModelConfig
from headrank.diversity import centered, effective_rank, similarity, spectrum
from headrank.factors import head_factors
from headrank.gram import factored_gram
from headrank.model import initialize

OPERATIONS = 1e12  # spent on one null; the larger the geometry, the narrower its distribution, and the fewer draws it needs
FEWEST, MOST = 16, 64


class RandomTwin:
    """A checkpoint's shapes with random numbers in them: those of an untrained model of ours, else Gaussian of variance 1/fan_in."""

    def __init__(self, checkpoint: Checkpoint, seed: int) -> None:
        self.path, self.config, self.tensors = checkpoint.path, checkpoint.config, checkpoint.tensors
        self.seed = seed
        self._own = ModelConfig.from_dict(checkpoint.config, where=str(checkpoint.path)) if checkpoint.config.get("model_type") == MODEL_TYPE else None

    def read(self, name: str) -> Tensor:
        """Random numbers in the shape of a named tensor, the same for the same seed."""
        shape = torch.Size(self.tensors[name].shape)
        if self._own is not None:
            return initialize(name, shape, self._own, seed=self.seed)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + zlib.crc32(name.encode()))
        return torch.randn(shape, generator=generator) / (shape[-1] if len(shape) > 1 else 1) ** 0.5


def null_grams(
    checkpoint: Checkpoint, architecture: Architecture, layer: AttentionLayer, circuit: str, *, n_samples: int, gram: Callable[..., Tensor] | None = None
) -> np.ndarray:
    """[n_samples, H, H]: Gram matrices of random heads with the layer's shapes and sharing; no gains, no biases.

    gram(twin, layer, circuit, raw=True) makes one, [H, H]; by default that of the heads as operators.
    """

    def operators(twin: Any, layer: AttentionLayer, circuit: str, *, raw: bool) -> Tensor:
        factors = head_factors(twin, architecture, layer, circuit, raw=raw)
        return factored_gram(factors.left, factors.right, factors.left_of_head, factors.right_of_head)

    make = gram or operators
    return np.stack([make(RandomTwin(checkpoint, seed), layer, circuit, raw=True).cpu().numpy() for seed in range(n_samples)])


def null_ranks(checkpoint: Checkpoint, architecture: Architecture, circuit: str, *, gram: Callable[..., Tensor] | None = None) -> dict[str, list[float]]:
    """Effective ranks of random heads: 'uncentered' and 'centered', a number a draw. gram: see null_grams."""
    layer = next(layer for layer in architecture.layers if layer.n_head == architecture.n_head)
    operations = 2.0 * architecture.d_model * (layer.n_head * max(layer.d_qk, layer.d_v)) ** 2
    n_samples = int(np.clip(OPERATIONS / operations, FEWEST, MOST))
    S = similarity(null_grams(checkpoint, architecture, layer, circuit, n_samples=n_samples, gram=gram))
    return {
        "uncentered": effective_rank(spectrum(S)).tolist(),
        "centered": effective_rank(spectrum(centered(S))).tolist() if layer.n_head > 1 else [],
    }
