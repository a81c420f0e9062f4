"""Devices that are not there: tensors say that they lie on one of them, are worked on by the CPU, and refuse to meet those of another.

Their type is "lazy", which this torch knows by name and has nothing for.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICES = [torch.device("lazy", index) for index in range(3)]
CPU = torch.device("cpu")
MOVES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)  # the only operations that may see two devices


class Elsewhere(Tensor):
    """A tensor of the CPU's that says it is on another device."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, on_cpu: Tensor, device: torch.device, requires_grad: bool = False) -> "Elsewhere":
        layout = {"strides": on_cpu.stride(), "storage_offset": on_cpu.storage_offset()}
        made = Tensor._make_wrapper_subclass(cls, on_cpu.shape, dtype=on_cpu.dtype, device=device, requires_grad=requires_grad, **layout)
        made.on_cpu = on_cpu
        return made

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        return work(operation, given, named or {})

    def data_ptr(self) -> int:
        return self.on_cpu.data_ptr()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.on_cpu!r} on {self.device}"


class PretendedDevices(TorchDispatchMode):
    """While it is entered, tensors can be made on pretended devices and moved there."""

    def __torch_dispatch__(self, operation: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        return work(operation, given, named or {})


def work(operation: Any, given: Any, named: dict[str, Any]) -> Any:
    """One operation of torch's, on the CPU. Raises RuntimeError where its tensors are on different devices."""
    tensors = [leaf for leaf in tree_leaves((given, named)) if isinstance(leaf, Tensor)]
    devices = list(dict.fromkeys(tensor.device for tensor in tensors if tensor.dim() or tensor.device != CPU))  # numbers may go anywhere
    if len(devices) > 1 and operation not in MOVES:
        raise RuntimeError(f"{operation}: tensors on {' and '.join(map(str, devices))}")
    asked = named.get("device")
    device = torch.device(asked) if asked is not None else tensors[0].device if operation in MOVES else (devices or [CPU])[0]
    if asked is not None:
        named = {**named, "device": CPU}
    given, named = tree_map(lambda leaf: leaf.on_cpu if isinstance(leaf, Elsewhere) else leaf, (given, named))
    results = operation(*given, **named)
    known = {id(tensor.on_cpu): tensor for tensor in tensors if isinstance(tensor, Elsewhere)}  # what is worked on in place stays itself

    def there(result: Any) -> Any:
        if not isinstance(result, Tensor) or device == CPU:
            return result
        return known[id(result)] if id(result) in known else Elsewhere(result, device)

    return tree_map(there, results)
