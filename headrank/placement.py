"""Where the parts of a model lie that is larger than one device: consecutive parts together, one device after the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from headrank.errors import HeadrankError
from headrank.processes import started


def placed(sizes: Sequence[int], room: Sequence[int]) -> list[int] | None:
    """Fills one device after the other, never going back to one: whatever fits in this order at all fits so.

    sizes: bytes of consecutive parts. room: bytes on each device. Returns the number of each part's device, None where they do not fit.

    >>> placed([3, 3, 2], [4, 5])
    [0, 1, 1]
    """
    places, device, left = [], 0, list(room)
    for size in sizes:
        while device < len(left) and left[device] < size:
            device += 1
        if device == len(left):
            return None
        left[device] -= size
        places.append(device)
    return places


def evenly_placed(sizes: Sequence[int], room: Sequence[int]) -> list[int] | None:
    """As placed, leaving as much room as can be on that one of the devices in use which has least of it: larger batches fit there.

    >>> evenly_placed([1, 1, 1, 1], [4, 4])
    [0, 0, 1, 1]
    """
    if placed(sizes, room) is None:
        return None
    enough, too_much = 0, max(room, default=0) + 1  # bytes left on each
    while too_much - enough > 1:
        middle = (enough + too_much) // 2
        if placed(sizes, [bytes_ - middle for bytes_ in room]) is None:
            too_much = middle
        else:
            enough = middle
    return placed(sizes, [bytes_ - enough for bytes_ in room])


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a pass takes beside the weights, in bytes."""

    work: int = 0
    """On every device: what a small batch leaves behind within a layer, and blocks of scores and outputs."""
    sums: Mapping[int, int] = field(default_factory=dict)
    """On the device of a layer, by its number: the accumulators."""


def place_parts(weights: Sequence[int], sums: Sequence[int], *, work: int, device: torch.device, where: str, remedies: Sequence[str]) -> list[torch.device]:
    """The device of each part of a model: all on `device` where that is no CUDA device, else on as few as it takes.

    weights: bytes of consecutive parts; sums: bytes of the accumulators of each; work: see Needs. where and remedies are for the message.
    Raises HeadrankError where all devices together have too little free memory.
    """
    if device.type != "cuda":
        return [device] * len(weights)
    sizes = [size + its for size, its in zip(weights, sums, strict=True)]
    devices, room = [], []
    for candidate in devices_of(device):  # one at a time: asking a device takes some of its memory
        devices.append(candidate)
        room.append(free_bytes(candidate) - work)
        places = evenly_placed(sizes, room)
        if places is not None:
            return [devices[place] for place in places]
    free = ", ".join(f"{gigabytes(bytes_ + work)} on {name}" for name, bytes_ in zip(devices, room, strict=True))
    parts = f"weights take {gigabytes(sum(weights))}, sums {gigabytes(sum(sums))}, the work {gigabytes(work)} on each device"
    alone = ["starting without torchrun, which keeps every process to one device"] if started() else []
    raise HeadrankError(f"{where}: does not fit: {parts}; free are {free}\nTry {', '.join([*remedies, *alone, '--device cpu'])}, or --source weights")


def fits_one(n_bytes: int, device: torch.device, needs: Needs) -> bool:
    """Whether weights of so many bytes, and what a pass takes beside them, fit on the first device that `device` stands for."""
    if device.type != "cuda":
        return True
    return n_bytes + sum(needs.sums.values()) + needs.work <= free_bytes(devices_of(device)[0])


def devices_of(device: torch.device) -> list[torch.device]:
    """The CUDA devices over which a model may be spread that is meant for `device`: it alone where it has a number, or where torchrun
    gave every process one; else all, the current one first."""
    if device.index is not None:
        return [device]
    current = torch.cuda.current_device()
    others = [] if started() else [index for index in range(torch.cuda.device_count()) if index != current]
    return [torch.device(device.type, index) for index in (current, *others)]


def free_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that this process can take: those that nobody has, and what its allocator keeps without need."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def gigabytes(size: int) -> str:
    """Bytes for people.

    >>> gigabytes(141_068_000_000)
    '141.1 GB'
    """
    return f"{size / 1e9:.1f} GB"
