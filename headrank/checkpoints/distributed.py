"""torch.distributed.checkpoint folders: a pickled .metadata that says which bytes of which file are which part of a tensor.

torch's own reader unpickles the metadata without restriction. Here its classes are replaced by inert records, and anything
else is refused by name.
"""

import io
import math
import pickle
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrank.checkpoints.base import Checkpoint, TensorInfo
from headrank.checkpoints.files import inside, regular_size
from headrank.checkpoints.pytorch import DTYPE_NAMES, PICKLE_LIMIT, clean_names
from headrank.errors import HeadrankError

OPTIMIZER = re.compile(r"(^|\.)(optim|optimizer|optimizers|optimizer_state)(\.|$)")
HOLDERS = re.compile(r"^(?:app|state|model_state|model_state_dict|state_dict|model)\.(?=.*\.)")
RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex", "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}  # fmt: skip


class _Record:
    """Stands in for a class of the metadata: keeps what it is given and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.__dict__.update(kwargs)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({str(key): value for key, value in state.items()})
        else:
            self.state = state

    def __hash__(self) -> int:  # MetadataIndex is a key
        return hash(_key(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Record) and _key(self) == _key(other)


def _key(record: _Record) -> tuple[str, tuple[int, ...]]:
    return str(record.__dict__.get("fqn")), _as_sizes(record.__dict__.get("offset"))


def _as_sizes(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, tuple | list) and all(type(size) is int for size in value) else ()


def _as_path(*parts: Any) -> str:
    return "/".join(map(str, parts))


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in RECORDS.get(module, ()):
            return _Record
        if module == "torch" and name == "Size":
            return tuple
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        plain: dict[tuple[str, str], Callable[..., Any]] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("collections", "defaultdict"): defaultdict,
            ("builtins", "dict"): dict,
            ("builtins", "list"): list,
            ("builtins", "tuple"): tuple,
            ("builtins", "set"): set,
            ("torch.serialization", "_get_layout"): str,
        }
        if (module, name) in plain:
            return plain[module, name]
        if module.startswith("pathlib") and name.endswith("Path"):
            return _as_path
        raise HeadrankError(f"asks for {module}.{name} on loading, which could run code; refused")


class DistributedCheckpoint(Checkpoint):
    """Puts a tensor together from its parts when it is read."""

    def __init__(self, folder: Path, *, config: dict[str, Any], config_name: str) -> None:
        metadata = _read_metadata(folder)
        tensors, self._parts = _tensors_of(folder, metadata)
        super().__init__(folder, format="distributed", config=config, config_name=config_name, tensors=tensors)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted({part[2] for parts in self._parts.values() for part in parts}))

    def read(self, name: str) -> Tensor:
        info = self.tensors[name]
        parts = [(offsets, sizes, _read_part(file, start, length)) for offsets, sizes, file, start, length in self._parts[name]]
        for _, sizes, part in parts:
            if tuple(part.shape) != sizes or DTYPE_NAMES.get(part.dtype) != info.dtype:
                raise HeadrankError(f"{info.file}: a part of {name} has shape {list(part.shape)}, but .metadata says {list(sizes)}")
        if len(parts) == 1 and parts[0][1] == info.shape:
            return parts[0][2]
        whole = torch.empty(info.shape, dtype=parts[0][2].dtype)
        for offsets, sizes, part in parts:
            whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))] = part
        return whole


Part = tuple[tuple[int, ...], tuple[int, ...], Path, int, int]  # offsets, sizes, file, first byte, bytes


def _read_metadata(folder: Path) -> _Record:
    path = inside(folder, ".metadata")
    if regular_size(path) > PICKLE_LIMIT:
        raise HeadrankError(f"{path}: more than any checkpoint needs")
    try:
        with path.open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
    except HeadrankError as error:
        raise HeadrankError(f"{path}: {error}") from None
    except Exception as error:  # an unpickler fed with arbitrary bytes raises arbitrary exceptions
        raise HeadrankError(f"{path}: not the metadata of a distributed checkpoint: {str(error)[:200] or type(error).__name__}") from None
    state, storage = getattr(metadata, "state_dict_metadata", None), getattr(metadata, "storage_data", None)
    if not isinstance(state, dict) or not isinstance(storage, dict):
        raise HeadrankError(f"{path}: not the metadata of a distributed checkpoint")
    return metadata


def _tensors_of(folder: Path, metadata: Any) -> tuple[dict[str, TensorInfo], dict[str, list[Part]]]:
    tensors, parts = {}, {}
    storage = {_key(index): info for index, info in metadata.storage_data.items() if isinstance(index, _Record)}
    sizes_of_files: dict[Path, int] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not hasattr(entry, "chunks") or OPTIMIZER.search(name):
            continue
        if not isinstance(entry.chunks, list):
            raise HeadrankError(f"{folder / '.metadata'}: does not say which parts {name} has")
        shape, dtype = _sizes(folder, name, getattr(entry, "size", None)), _dtype(folder, name, getattr(entry, "properties", None))
        parts[name] = [_part(folder, name, chunk, storage, shape, sizes_of_files) for chunk in entry.chunks]
        if sum(math.prod(sizes) for _, sizes, *_ in parts[name]) != math.prod(shape):
            raise HeadrankError(f"{folder / '.metadata'}: the parts of {name} do not make up its shape {list(shape)}")
        tensors[name] = TensorInfo(shape, dtype, parts[name][0][2] if parts[name] else folder / ".metadata")
    if not tensors:
        raise HeadrankError(f"{folder}: its .metadata names no tensor of a model")
    names = dict.fromkeys(tensors)
    while all(HOLDERS.match(name) for name in names) and len({name.split(".")[0] for name in names}) == 1 and _is_wrapped(names):
        prefix = next(iter(names)).split(".")[0] + "."
        names = {name.removeprefix(prefix): None for name in names}
        tensors = {name.removeprefix(prefix): info for name, info in tensors.items()}
        parts = {name.removeprefix(prefix): part for name, part in parts.items()}
    return clean_names(tensors, folder), clean_names(parts, folder)


def _is_wrapped(names: dict[str, None]) -> bool:
    """Whether what all names begin with is the holder's: a Hugging Face model's own "model." leaves lm_head outside."""
    first = next(iter(names)).split(".")[0]
    return first != "model" or any(name.startswith(("model.model.", "model.lm_head", "model.transformer.", "model.module.")) for name in names)


def _sizes(folder: Path, name: str, value: Any) -> tuple[int, ...]:
    sizes = _as_sizes(value)
    if not isinstance(value, tuple | list) or not all(type(size) is int and 0 <= size < 1 << 48 for size in sizes):
        raise HeadrankError(f"{folder / '.metadata'}: {name} has the impossible shape {str(value)[:80]}")
    return sizes


def _dtype(folder: Path, name: str, properties: Any) -> str:
    state = getattr(properties, "state", None) or getattr(properties, "dtype", None)
    dtype = state[0] if isinstance(state, tuple) and state else state
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPE_NAMES:
        raise HeadrankError(f"{folder / '.metadata'}: {name} is of a type that is not known: {str(dtype)[:80]}")
    return DTYPE_NAMES[dtype]


def _part(folder: Path, name: str, chunk: Any, storage: dict[Any, Any], shape: tuple[int, ...], sizes_of_files: dict[Path, int]) -> Part:
    offsets, sizes = _sizes(folder, name, getattr(chunk, "offsets", None)), _sizes(folder, name, getattr(chunk, "sizes", None))
    where = storage.get((name, offsets))
    if len(offsets) != len(shape) or any(o + s > whole for o, s, whole in zip(offsets, sizes, shape, strict=False)) or len(sizes) != len(shape):
        raise HeadrankError(f"{folder / '.metadata'}: a part of {name} reaches beyond its shape {list(shape)}")
    relative, start, length = (getattr(where, key, None) for key in ("relative_path", "offset", "length"))
    if not isinstance(relative, str) or type(start) is not int or type(length) is not int or getattr(where, "transform_descriptors", None):
        raise HeadrankError(f"{folder / '.metadata'}: does not say where a part of {name} lies, or lays it down in a form that is not known")
    file = inside(folder, relative)
    if file not in sizes_of_files:
        sizes_of_files[file] = regular_size(file)
    if start < 0 or length < 0 or start + length > sizes_of_files[file]:
        raise HeadrankError(f"{file}: is cut off: {name} should reach to byte {start + length}, the file has {sizes_of_files[file]}")
    return offsets, sizes, file, start, length


def _read_part(file: Path, start: int, length: int) -> Tensor:
    with file.open("rb") as stream:
        stream.seek(start)
        data = stream.read(length)
    try:
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # an unpickler fed with arbitrary bytes raises arbitrary exceptions
        raise HeadrankError(
            f"{file}: bytes {start}…{start + length} are not a tensor: {str(error).splitlines()[0][:200] if str(error) else type(error).__name__}"
        ) from None
    if not isinstance(tensor, Tensor):
        raise HeadrankError(f"{file}: bytes {start}…{start + length} are not a tensor")
    return tensor
