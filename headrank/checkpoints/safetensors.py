"""safetensors: one file, or shards with an index. The header is checked before anything is taken in memory.

Format: https://github.com/huggingface/safetensors#format. Eight bytes of header length, a JSON header, the tensors' bytes.
"""

import math
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrank.checkpoints.base import Checkpoint, TensorInfo
from headrank.checkpoints.files import parse_json, regular_size
from headrank.errors import HeadrankError

if TYPE_CHECKING:
    from torch import Tensor

HEADER_LIMIT = 100_000_000  # the format's own limit, bytes
BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "U16": "uint16",
    "U32": "uint32", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64",
    "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


@dataclass(frozen=True)
class Span:
    """Where a tensor's bytes lie in its file."""

    start: int
    stop: int


class SafetensorsCheckpoint(Checkpoint):
    """One safetensors file, or shards."""

    def __init__(self, path: Path, files: list[Path], *, format: str, config: dict[str, Any], config_name: str) -> None:
        tensors: dict[str, TensorInfo] = {}
        self._spans: dict[str, Span] = {}
        for file in files:
            infos, spans = read_header(file)
            if repeated := next(iter(infos.keys() & tensors.keys()), None):
                raise HeadrankError(f"{file}: tensor {repeated} stands in {tensors[repeated].file.name} as well")
            tensors |= infos
            self._spans |= spans
        super().__init__(path, format=format, config=config, config_name=config_name, tensors=tensors)

    def starts_in(self, file: Path) -> Iterable[int]:
        return (span.start for name, span in self._spans.items() if self.tensors[name].file == file)

    def expect(self, names: Iterable[str]) -> None:
        for name in names:
            will_be_read(self.tensors[name].file, self._spans[name])

    def read(self, name: str) -> "Tensor":
        info, span = self.tensors[name], self._spans[name]
        try:
            return as_tensor(mapped(info.file, span), name, info)
        except (OSError, ValueError) as error:
            raise HeadrankError(f"{info.file}: {name} cannot be read, the file changed: {error}") from None


def read_header(file: Path) -> tuple[dict[str, TensorInfo], dict[str, Span]]:
    """Tensors of one file and where their bytes lie. Raises HeadrankError where the header and the file contradict each other."""
    size = regular_size(file)
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        check_header_length(file, length, size)
        text = stream.read(length)
    return parse_header(file, text, size)


def check_header_length(file: Path, length: int, size: int) -> None:
    """Refuses a header length, in bytes, that a file of that size cannot have."""
    if size < 8 or length > size - 8:
        raise HeadrankError(f"{file}: not a whole safetensors file: the header should have {length} bytes, the file has {size}; fetch it again")
    if length > HEADER_LIMIT:
        raise HeadrankError(f"{file}: a header of {length} bytes; the format allows {HEADER_LIMIT}")


def parse_header(file: Path, text: bytes, size: int) -> tuple[dict[str, TensorInfo], dict[str, Span]]:
    """As read_header, from the header's text and the size of the whole file in bytes."""
    header = parse_json(text, f"{file}: header")
    header.pop("__metadata__", None)
    start = 8 + len(text)
    tensors, spans, stop = {}, {}, start
    for name, entry in header.items():
        shape, dtype, (first, last) = _entry(file, name, entry)
        tensors[name] = TensorInfo(shape, dtype, file)
        spans[name] = Span(start + first, start + last)
        stop = max(stop, start + last)
    if stop != size:
        what = "is cut off" if stop > size else "has bytes that no tensor owns"
        raise HeadrankError(f"{file}: the file {what}: its header says {stop} bytes, it has {size}; fetch it again")
    return tensors, spans


def _entry(file: Path, name: str, entry: Any) -> tuple[tuple[int, ...], str, tuple[int, int]]:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(first), int(last)]} if all(type(n) is int and n >= 0 for n in shape):
            pass
        case _:
            raise HeadrankError(f"{file}: header entry of {name!r} is not that of a tensor: {str(entry)[:100]}")
    if dtype not in BITS:
        raise HeadrankError(f"{file}: {name} is of type {dtype!r}, which this version does not know")
    expected = math.prod(shape) * BITS[dtype] // 8
    if not 0 <= first <= last or last - first != expected:
        raise HeadrankError(f"{file}: {name} of shape {shape} and type {dtype} needs {expected} bytes, its header gives it {first}…{last}")
    return tuple(shape), dtype, (first, last)


def mapped(file: Path, span: Span, *, access: int = mmap.ACCESS_COPY) -> memoryview:
    """The bytes of a span, mapped and not read. Private pages by default: torch wants memory that it may write to."""
    if span.start == span.stop:
        return memoryview(bytearray())
    page = span.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with file.open("rb") as stream:
        return memoryview(mmap.mmap(stream.fileno(), span.stop - page, offset=page, access=access))[span.start - page :]


def will_be_read(file: Path, span: Span) -> None:
    """Asks the system to read a span from the disk in the background, where it can."""
    with suppress(OSError, AttributeError), file.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), span.start, span.stop - span.start, os.POSIX_FADV_WILLNEED)


def as_tensor(data: memoryview | bytearray, name: str, info: TensorInfo) -> "Tensor":
    """The tensor that lies in the bytes, sharing them where their alignment allows."""
    import torch

    if info.dtype not in TORCH_NAMES:
        raise HeadrankError(f"{info.file}: {name} is of type {info.dtype}, which cannot be read as numbers")
    dtype = getattr(torch, TORCH_NAMES[info.dtype])
    if not math.prod(info.shape):
        return torch.empty(info.shape, dtype=dtype)
    raw = torch.frombuffer(data, dtype=torch.uint8)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(info.shape)
