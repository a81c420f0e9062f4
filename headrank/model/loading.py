"""A decoder from nothing, from random numbers, or from a checkpoint, held in memory once."""

import zlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from headrank.config import ModelConfig
from headrank.errors import HeadrankError
from headrank.model.decoder import Decoder


def new_decoder(config: ModelConfig, *, seed: int, dtype: torch.dtype = torch.float32) -> Decoder:
    """An untrained decoder on the CPU. The same seed gives the same numbers, parameter by parameter, whatever the other kinds do."""
    with torch.device("meta"):
        model = Decoder(config)
    return _fill(model, lambda name, like: initialize(name, like.shape, config, seed=seed).to(dtype))


def initialize(name: str, shape: torch.Size, config: ModelConfig, *, seed: int) -> Tensor:
    """Fresh float32 values of one named parameter, seeded by its name.

    Matrices are Gaussian with variance 1/fan_in, projections into the residual stream smaller by sqrt(2 n_layer) (GPT-2's rule).
    LRKV's U_h B_h^T starts at a tenth of W_shared's norm: entries of the factors have standard deviation sqrt(0.1 sigma / sqrt(r)),
    so that those of the product have 0.1 sigma.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator)
    sigma = shape[-1] ** -0.5 if len(shape) and shape[-1] else 1.0
    if name.endswith("wte.weight"):
        return values
    if name.endswith("c_proj.weight"):
        return values.mul_(sigma / (2 * config.n_layer) ** 0.5)
    if name.endswith((".down", ".up")) and config.rank:
        return values.mul_((0.1 * config.d_model**-0.5 / config.rank**0.5) ** 0.5)
    return values.mul_(sigma)


def load_decoder(config: ModelConfig, read: Callable[[str], Tensor], *, device: torch.device, dtype: torch.dtype, where: str) -> Decoder:
    """A decoder filled tensor by tensor, so that the weights are held once.

    read returns a named tensor, best memory-mapped. Raises HeadrankError where a shape contradicts the geometry; where names the file.
    """
    with torch.device("meta"):
        model = Decoder(config)

    def take(name: str, like: Tensor) -> Tensor:
        tensor = read(name)
        if tensor.shape != like.shape:
            raise HeadrankError(f"{where}: {name} has shape {list(tensor.shape)}, but config.json means {list(like.shape)}")
        return tensor.to(device=device, dtype=dtype)

    return _fill(model, take).eval().requires_grad_(False)


def _fill(model: Decoder, value: Callable[[str, Tensor], Tensor]) -> Decoder:
    for name, parameter in list(model.named_parameters()):
        owner = model.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], nn.Parameter(value(name, parameter)))
    return model
