"""Which device each module of a transformers model goes to, where the model is larger than one: a device_map for accelerate."""

import importlib.util
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headrank.errors import HeadrankError
from headrank.placement import Needs, gigabytes, place_parts

UNUSED = "cpu"  # where modules stay that no pass comes to


def device_map(model: Any, *, dtype: torch.dtype, device: torch.device, needs: Needs, where: str) -> dict[str, torch.device | str]:
    """Blocks in their order over the devices, all else of the base model on the first of these; output layers stay on the CPU.

    model: a transformers model on the meta device, of the class that will be loaded. The keys are names of modules, and of tensors
    that lie beside blocks. Raises HeadrankError where accelerate is missing, the model has no blocks to part it at, or does not fit.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise HeadrankError(f"{where}: a model that is larger than the device needs accelerate: pip install 'headrank[hf]'")
    base_name = next(name for name, module in model.named_modules() if module is model.base_model)
    blocks = list(_blocks(model.base_model, base_name, model._no_split_modules or ()))
    beside = list(_around(model.base_model, base_name, blocks))
    outside = list(_around(model, "", [base_name])) if base_name else []
    sizes = {id(tensor): tensor.numel() * (dtype if tensor.is_floating_point() else tensor.dtype).itemsize for tensor in _tensors(model)}

    def held(name: str) -> set[int]:
        owner, last = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        part = getattr(owner, last)
        return {id(part)} if isinstance(part, Tensor) else set(map(id, _tensors(part)))

    parts = [set[int]().union(*map(held, beside)), *map(held, blocks)]
    used = set[int]().union(*parts)
    if not blocks or sum(map(len, parts)) > len(used):  # tensors in two blocks would have to be on two devices
        total = gigabytes(sum(sizes[tensor] for tensor in used))
        why = f"{type(model).__name__} is not made of blocks that can lie on different devices"
        raise HeadrankError(f"{where}: takes {total}, more than the device has free, and {why}\nTry --device cpu, or --source weights")
    tied = [name for name in outside if held(name) & used]  # an output layer that is the embedding
    parts[0] = parts[0].union(*map(held, tied))
    places = place_parts(
        [sum(map(sizes.__getitem__, part)) for part in parts],
        [None, *map(_number, blocks)],
        device=device,
        needs=needs,
        where=where,
        remedies=["--dtype bfloat16"] * (dtype == torch.float32),
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


def _number(block: str) -> int | None:
    """The number of the layer that a block is."""
    return next((int(part) for part in reversed(block.split(".")) if part.isdigit()), None)
