"""A decoder from nothing, from random numbers, or from a checkpoint, held in memory once."""

import zlib
from collections.abc import Callable, Collection

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


def load_decoder(
    config: ModelConfig,
    read: Callable[[str], Tensor],
    *,
    names: Collection[str],
    device: torch.device | Callable[[str], torch.device | None],
    dtype: torch.dtype,
    where: str,
) -> Decoder:
    """A decoder filled tensor by tensor, so that the weights are held once.

    read returns a tensor by its name, best memory-mapped; names are those it knows. device: of all, or of a parameter by its name, all
    of a block on one; a parameter for which it is None is looked at and left without memory. Raises HeadrankError where a parameter is
    missing, has another shape or is quantised, and where a tensor is left over: a decoder without it would compute something else.
    """
    with torch.device("meta"):
        model = Decoder(config)
    wanted = [name for name, _ in model.named_parameters()]
    if missing := [name for name in wanted if name not in names]:
        raise HeadrankError(f"{where}: no tensor {missing[0]}{_and_more(missing)}; a forward pass needs the whole decoder")
    if stray := sorted(set(names) - set(wanted)):
        raise HeadrankError(f"{where}: tensor {stray[0]}{_and_more(stray)} is no part of this decoder, so its forward pass is another; use --source weights")

    def take(name: str, like: Tensor) -> Tensor:
        tensor = read(name)
        if tensor.shape != like.shape:
            raise HeadrankError(f"{where}: {name} has shape {list(tensor.shape)}, but config.json means {list(like.shape)}")
        if not tensor.is_floating_point():
            raise HeadrankError(f"{where}: {name} holds {str(tensor.dtype).removeprefix('torch.')}, quantised numbers whose scales are not known")
        place = device if isinstance(device, torch.device) else device(name)
        return like.to(dtype) if place is None else tensor.to(device=place, dtype=dtype)

    return _fill(model, take).eval().requires_grad_(False)


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _fill(model: Decoder, value: Callable[[str, Tensor], Tensor]) -> Decoder:
    for name, parameter in list(model.named_parameters()):
        owner = model.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], nn.Parameter(value(name, parameter)))
    return model
