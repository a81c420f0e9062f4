"""Which device each module of a transformers model goes to, where the model is larger than one: a device_map for accelerate."""

import importlib.util
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headrank.errors import HeadrankError
from headrank.placement import Needs, place_parts

UNUSED = "cpu"  # where modules stay that no pass comes to


def device_map(model: Any, *, dtype: torch.dtype, device: torch.device, needs: Needs, where: str) -> dict[str, torch.device | str]:
    """Blocks in their order over the devices, all else of the base model on the first of these; output layers stay on the CPU.

    model: a transformers model on the meta device, of the class that will be loaded. The keys are names of modules, and of tensors
    that lie beside blocks. Raises HeadrankError where accelerate is missing or the model does not fit.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise HeadrankError(f"{where}: a model that is larger than the device needs accelerate: pip install 'headrank[hf]'")
    base = model.base_model
    base_name = next(name for name, module in model.named_modules() if module is base)

    def held(name: str) -> set[Tensor]:
        owner, last = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        part = getattr(owner, last) if last else owner
        return {part} if isinstance(part, Tensor) else set(_tensors(part))

    blocks = list(_blocks(base, base_name, model._no_split_modules or ()))
    if len(set().union(*map(held, blocks))) < sum(len(held(block)) for block in blocks):
        blocks = []  # what two of them share would have to be on two devices
    if not blocks:
        where = f"{where} ({type(model).__name__} has no blocks that could lie on different devices)"
    beside = list(_around(base, base_name, blocks))
    outside = list(_around(model, "", [base_name])) if base_name else []
    used = set().union(*map(held, [*beside, *blocks]))
    tied = [name for name in outside if held(name) & used]  # an output layer that is the embedding
    in_blocks = set().union(*map(held, blocks))
    first = set().union(*map(held, [*beside, *tied])) - in_blocks
    weights = [sum(tensor.numel() * _itemsize(tensor, dtype) for tensor in part) for part in (first, *map(held, blocks))]
    remedies = ["--dtype bfloat16"] * (dtype == torch.float32) + ["--layer N (sums of fewer layers)"] * (len(needs.sums) > 1)
    sums = [needs.sums.get(_number(block), 0) for block in blocks]
    places = place_parts(
        weights,
        [max(0, sum(needs.sums.values()) - sum(sums)), *sums],  # stacks have numbers in common: rather too much than too little
        work=needs.work,
        device=device,
        where=where,
        remedies=remedies,
    )
    found: dict[str, torch.device | str] = dict.fromkeys([*beside, *tied], places[0])
    found |= zip(blocks, places[1:], strict=True)
    return found | {name: UNUSED for name in outside if name not in tied}


def _blocks(module: nn.Module, name: str, classes: Collection[str]) -> Iterator[str]:
    """Names of the outermost submodules of these classes, in their order."""
    if type(module).__name__ in classes:
        yield name
        return
    for child_name, child in module.named_children():
        yield from _blocks(child, _joined(name, child_name), classes)


def _around(module: nn.Module, name: str, left_out: Collection[str]) -> Iterator[str]:
    """Names of submodules and tensors that together hold all tensors of a module but those of the submodules that are left out."""
    if name in left_out or not _tensors(module):
        return
    if not any(other.startswith(_joined(name, "")) for other in left_out):
        yield name
        return
    for tensor_name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        yield _joined(name, tensor_name)
    for child_name, child in module.named_children():
        yield from _around(child, _joined(name, child_name), left_out)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _joined(name: str, last: str) -> str:
    return f"{name}.{last}" if name else last


def _number(block: str) -> int:
    """The number of the layer that a block is; -1 where it is none."""
    return next((int(part) for part in reversed(block.split(".")) if part.isdigit()), -1)


def _itemsize(tensor: Tensor, dtype: torch.dtype) -> int:
    return (dtype if tensor.is_floating_point() else tensor.dtype).itemsize
