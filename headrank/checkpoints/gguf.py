"""GGUF: metadata, tensor headers and (quantised) tensors of llama.cpp's files, one or split.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is read here, with every count checked against
the bytes that are left; the gguf package unpacks quantised blocks.
"""

import math
import mmap
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrank.checkpoints.base import Checkpoint, TensorInfo
from headrank.checkpoints.files import inside, regular_size
from headrank.checkpoints.safetensors import BITS, TORCH_NAMES, Span, mapped, will_be_read
from headrank.errors import HeadrankError

if TYPE_CHECKING:
    from torch import Tensor

MAGIC = b"GGUF"
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
KEPT_ENTRIES = 4096  # longer arrays are vocabularies: their length is kept, not their entries
PLAIN = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}  # types that are plain numbers; all others are quantised


@dataclass(frozen=True)
class _Entry:
    """One tensor's header."""

    type_id: int
    span: Span


class GgufCheckpoint(Checkpoint):
    """One GGUF file, or the parts of a split one."""

    def __init__(self, path: Path, files: list[Path]) -> None:
        tensors: dict[str, TensorInfo] = {}
        self._entries: dict[str, _Entry] = {}
        config: dict[str, Any] = {}
        for file in files:
            metadata, infos, entries = read_header(file)
            if repeated := next(iter(infos.keys() & tensors.keys()), None):
                raise HeadrankError(f"{file}: tensor {repeated} stands in {tensors[repeated].file.name} as well")
            tensors |= infos
            self._entries |= entries
            config = {**metadata, **config}  # the first part says it all, the others only how they are split
        expected = config.get("split.tensors.count")
        if isinstance(expected, int) and len(files) > 1 and expected != len(tensors):
            raise HeadrankError(f"{files[0]}: says that all parts hold {expected} tensors; they hold {len(tensors)}")
        name = "gguf" if len(files) == 1 else "gguf parts"
        super().__init__(path, format=name, config=config, config_name="the metadata", tensors=tensors)

    def starts_in(self, file: Path) -> Iterable[int]:
        return (entry.span.start for name, entry in self._entries.items() if self.tensors[name].file == file)

    def expect(self, names: Iterable[str]) -> None:
        for name in names:
            will_be_read(self.tensors[name].file, self._entries[name].span)

    def read(self, name: str) -> "Tensor":
        import torch

        info, entry = self.tensors[name], self._entries[name]
        try:
            data = mapped(info.file, entry.span)
        except (OSError, ValueError) as error:
            raise HeadrankError(f"{info.file}: {name} cannot be read, the file changed: {error}") from None
        if entry.type_id in PLAIN:
            raw = torch.frombuffer(data, dtype=torch.uint8) if math.prod(info.shape) else torch.empty(0, dtype=torch.uint8)
            return raw.view(getattr(torch, TORCH_NAMES[info.dtype])).view(info.shape)
        package = _gguf_package(info.file)
        blocks = np.frombuffer(data, dtype=np.uint8).reshape(*info.shape[:-1], -1)
        try:
            values = package.quants.dequantize(blocks, package.GGMLQuantizationType(entry.type_id))
        except NotImplementedError:
            raise HeadrankError(f"{info.file}: {name} is quantised as {info.dtype}, which the gguf package does not unpack") from None
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(info.shape)


def split_files(path: Path) -> list[Path]:
    """All parts of a split file, given any of them; the file itself where it is whole. Raises HeadrankError where a part is missing."""
    match = SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    stem, _, count = match.groups()
    parts = [inside(path.parent, f"{stem}-{number:05d}-of-{count}.gguf") for number in range(1, int(count) + 1)]
    if missing := [part.name for part in parts if not part.exists()]:
        raise HeadrankError(f"{path}: one of {len(parts)} parts; {len(missing)} are not beside it, such as {missing[0]}")
    return parts


def read_header(file: Path) -> tuple[dict[str, Any], dict[str, TensorInfo], dict[str, _Entry]]:
    """Metadata, tensors, and where their bytes lie. Raises HeadrankError where header and file contradict each other."""
    size = regular_size(file)
    reader = _Header(file, size, mapped(file, Span(0, size), access=mmap.ACCESS_READ))
    try:
        return _parse(reader)
    except (struct.error, UnicodeDecodeError, OverflowError) as error:
        raise HeadrankError(f"{file}: not a whole GGUF file: {error}") from None


@dataclass
class _Header:
    """A position in the mapped file that cannot leave it."""

    file: Path
    size: int
    data: memoryview
    position: int = 0
    depth: int = field(default=0)

    def number(self, code: str) -> Any:
        (value,) = struct.unpack(f"<{code}", self.bytes(struct.calcsize(f"<{code}")))
        return value

    def bytes(self, count: int) -> memoryview:
        if count > self.size - self.position:
            raise self.error(f"is cut off: byte {self.position + count} should be there, the file has {self.size}")
        start = self.position
        self.position += count
        return self.data[start : self.position]

    def string(self) -> str:
        return bytes(self.bytes(self.number("Q"))).decode("utf-8", errors="replace")

    def skip_strings(self, count: int) -> None:
        unpack, data, position = struct.Struct("<Q").unpack_from, self.data, self.position
        for _ in range(count):  # a quarter of a million for some vocabularies: no call but one
            position += 8 + unpack(data, position)[0]
            if position > self.size:
                raise self.error(f"is cut off: byte {position} should be there, the file has {self.size}")
        self.position = position

    def count(self, smallest: int) -> int:
        """A number of things of at least so many bytes each."""
        value: int = self.number("Q")
        if value * smallest > self.size - self.position:
            raise self.error(f"claims {value} entries, more than its {self.size} bytes can hold")
        return value

    def error(self, text: str) -> HeadrankError:
        return HeadrankError(f"{self.file}: the GGUF header {text}; fetch the file again")


def _parse(reader: _Header) -> tuple[dict[str, Any], dict[str, TensorInfo], dict[str, _Entry]]:
    if reader.bytes(4) != MAGIC:
        raise HeadrankError(f"{reader.file}: not a GGUF file")
    version = reader.number("I")
    if version not in (2, 3):
        order = " (big-endian)" if version & 0xFFFF == 0 else ""
        raise HeadrankError(f"{reader.file}: GGUF version {version}{order} cannot be read; versions 2 and 3 can")
    n_tensors, n_values = reader.count(24), reader.count(12)
    metadata: dict[str, Any] = {}
    for _ in range(n_values):
        key = reader.string()
        metadata[key] = _value(reader, reader.number("I"))
    headers = [_tensor(reader) for _ in range(n_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise reader.error(f"has the impossible alignment {alignment!r}")
    start = -(-reader.position // alignment) * alignment
    return metadata, *_place(reader, headers, start)


def _value(reader: _Header, type_id: int) -> Any:
    if type_id in SCALARS:
        return reader.number(SCALARS[type_id])
    if type_id == STRING:
        return reader.string()
    if type_id != ARRAY:
        raise reader.error(f"has a value of the unknown type {type_id}")
    inner = reader.number("I")
    if inner in SCALARS:
        code = SCALARS[inner]
        count = reader.count(struct.calcsize(f"<{code}"))
        raw = reader.bytes(count * struct.calcsize(f"<{code}"))
        return list(struct.unpack(f"<{count}{code}", raw)) if count <= KEPT_ENTRIES else {"entries": count}
    if reader.depth:
        raise reader.error("has an array in an array in an array")
    count = reader.count(8)
    if inner == STRING and count > KEPT_ENTRIES:
        reader.skip_strings(count)
        return {"entries": count}
    reader.depth += inner == ARRAY
    values = [_value(reader, inner) for _ in range(count)]
    reader.depth -= inner == ARRAY
    return values if count <= KEPT_ENTRIES else {"entries": count}


def _tensor(reader: _Header) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.string()
    n_dims = reader.number("I")
    if n_dims > 8:
        raise reader.error(f"gives {name!r} {n_dims} dimensions")
    shape = tuple(reader.number("Q") for _ in range(n_dims))[::-1]
    return name, shape, reader.number("I"), reader.number("Q")


def _place(reader: _Header, headers: list[tuple[str, tuple[int, ...], int, int]], start: int) -> tuple[dict[str, TensorInfo], dict[str, _Entry]]:
    tensors: dict[str, TensorInfo] = {}
    entries: dict[str, _Entry] = {}
    for name, shape, type_id, offset in headers:
        type_name, block, block_bytes = _type(reader.file, name, type_id)
        if shape and shape[-1] % block:
            raise HeadrankError(f"{reader.file}: {name} has rows of {shape[-1]} numbers, but {type_name} packs {block} together")
        stop = start + offset + math.prod(shape) // block * block_bytes
        if stop > reader.size:
            raise HeadrankError(f"{reader.file}: is cut off: {name} reaches to byte {stop}, the file has {reader.size}; fetch it again")
        if name in tensors:
            raise HeadrankError(f"{reader.file}: tensor {name} stands there twice")
        tensors[name] = TensorInfo(shape, type_name, reader.file)
        entries[name] = _Entry(type_id, Span(start + offset, stop))
    return tensors, entries


def _type(file: Path, name: str, type_id: int) -> tuple[str, int, int]:
    """Name, numbers a block, bytes a block."""
    if type_id in PLAIN:
        return PLAIN[type_id], 1, BITS[PLAIN[type_id]] // 8
    package = _gguf_package(file)
    try:
        quantization = package.GGMLQuantizationType(type_id)
        block, size = package.GGML_QUANT_SIZES[quantization]
    except (ValueError, KeyError):
        raise HeadrankError(f"{file}: {name} is of type {type_id}, which the installed gguf package does not know; update it") from None
    return quantization.name, block, size


def _gguf_package(file: Path) -> Any:
    try:
        import gguf
    except ImportError:
        raise HeadrankError(f"{file}: quantised GGUF needs the gguf package: pip install 'headrank[gguf]'") from None
    return gguf
