"""Pickled PyTorch files: pytorch_model.bin and its shards, nanoGPT's ckpt.pt, plain state dicts.

A pickle can run code, so only torch's restricted unpickler is ever used. Files that torch wrote as archives are memory-mapped.
"""

import io
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrank.checkpoints.base import Checkpoint, TensorInfo
from headrank.checkpoints.files import regular_size
from headrank.checkpoints.safetensors import TORCH_NAMES
from headrank.errors import HeadrankError

DTYPE_NAMES = {getattr(torch, torch_name): name for name, torch_name in TORCH_NAMES.items()}
PICKLE_LIMIT = 256 << 20  # bytes of the pickle itself, without the tensors' numbers
HOLDERS = ("model", "state_dict", "model_state_dict", "module", "model_state", "net")  # where training code keeps the state dict
CONFIGS = ("model_args", "model_config", "config", "hyper_parameters")
WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


class TorchCheckpoint(Checkpoint):
    """Tensors of one pickled file or of several, by name."""

    def __init__(
        self,
        path: Path,
        states: Mapping[Path, Mapping[str, Tensor]],
        *,
        format: str,
        config: dict[str, Any],
        config_name: str,
        remarks: tuple[str, ...] = (),
    ) -> None:
        self._tensors: dict[str, Tensor] = {}
        infos: dict[str, TensorInfo] = {}
        for file, state in states.items():
            for name, tensor in state.items():
                if name in infos:
                    raise HeadrankError(f"{file}: tensor {name} stands in {infos[name].file.name} as well")
                infos[name] = info_of(tensor, name, file)
                self._tensors[name] = tensor
        super().__init__(path, format=format, config=config, config_name=config_name, tensors=infos, remarks=remarks)

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def info_of(tensor: Tensor, name: str, file: Path) -> TensorInfo:
    """Header of a loaded tensor. Raises HeadrankError on one that holds no plain numbers."""
    if tensor.is_meta:
        raise HeadrankError(f"{file}: {name} is on the meta device: the file was saved without its numbers")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in DTYPE_NAMES:
        kind = "quantised" if tensor.is_quantized else f"{tensor.layout}, {tensor.dtype}"
        raise HeadrankError(f"{file}: {name} does not hold plain numbers ({kind})")
    return TensorInfo(tuple(tensor.shape), DTYPE_NAMES[tensor.dtype], file)


def load(path: Path) -> Any:
    """What a pickled file holds, tensors mapped where the format allows. Raises HeadrankError, naming the class, where it asks for code."""
    size = regular_size(path)
    is_archive = _is_archive(path)
    if is_archive:
        _check_archive(path, size)
    try:
        if is_archive and path.suffix != ".safetensors":
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        with _Bounded(path) as stream:  # torch would take a file of that suffix for safetensors by its name
            return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # an unpickler fed with arbitrary bytes raises arbitrary exceptions
        raise HeadrankError(_refusal(path, error)) from None


class _Bounded(io.BufferedReader):
    """A file to read from. Memory is taken for what is in it: a pickle may ask for a text of gigabytes."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path))
        self._size = path.stat().st_size

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left))


def _is_archive(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile as error:  # one of several disks, it says
        raise HeadrankError(f"{path}: not a whole PyTorch file: {error}") from None


def _check_archive(path: Path, size: int) -> None:
    """torch stores members uncompressed: anything else could unpack to more than the disk holds."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise HeadrankError(f"{path}: not a whole PyTorch file: {error}") from None
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size > size:
            raise HeadrankError(f"{path}: its member {member.filename!r} claims {member.file_size} bytes of a file of {size}; not read")
        if member.filename.endswith("data.pkl") and member.file_size > PICKLE_LIMIT:
            raise HeadrankError(f"{path}: a pickle of {member.file_size} bytes is more than any checkpoint needs")


def _refusal(path: Path, error: Exception) -> str:
    text = str(error)
    if match := re.search(r"(?:GLOBAL|global:?|class) `?((?:\w+\.)+\w+)", text):
        return f"{path}: asks for {match.group(1)} on loading, which could run code; refused. Save the state dict alone, best as safetensors"
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"{path}: cannot be read as a PyTorch file: {first[:200]}"


def state_dict_of(document: Any, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Name -> tensor under clean names, and what else the file holds. Raises HeadrankError where there is no state dict."""
    if not isinstance(document, Mapping):
        raise HeadrankError(f"{path}: holds a {type(document).__name__}, not a state dict")
    rest: dict[str, Any] = {}
    state: Mapping[Any, Any] = document
    if not _tensors(document):
        holder = next((key for key in HOLDERS if isinstance(document.get(key), Mapping) and _tensors(document[key])), None)
        if holder is None:
            raise HeadrankError(f"{path}: no state dict in it; found {', '.join(map(str, list(document)[:8])) or 'nothing'}, looked for {', '.join(HOLDERS)}")
        state, rest = document[holder], {key: value for key, value in document.items() if key != holder}
    return clean_names(_tensors(state), path), rest


def _tensors(mapping: Mapping[Any, Any]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in mapping.items() if isinstance(name, str) and isinstance(value, Tensor)}


def clean_names(state: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Takes away what wrappers put before names: _orig_mod. (compiled) anywhere, module. (data parallel) where all names begin with it."""
    cleaned: dict[str, Any] = {}
    names = {name: WRAPPERS.sub("", name) for name in state}
    while names and all(name.startswith("module.") for name in names.values()):
        names = {key: WRAPPERS.sub("", name.removeprefix("module.")) for key, name in names.items()}
    for key, name in names.items():
        if name in cleaned:
            raise HeadrankError(f"{where}: two tensors are called {name} once the wrappers' prefixes are taken away")
        cleaned[name] = state[key]
    return cleaned


def config_within(rest: Mapping[str, Any], names: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The geometry that training code keeps beside the state dict, and under which key; nanoGPT's gets the name of its architecture."""
    for key in CONFIGS:
        config = rest.get(key)
        if isinstance(config, Mapping) and ("n_head" in config or "model_type" in config or "num_attention_heads" in config):
            return with_architecture({str(name): value for name, value in config.items()}, names), key
    return {}, ""


def with_architecture(config: dict[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """nanoGPT's and nanochat's configurations do not say what they are of: their tensors' names do."""
    if "model_type" in config or not {"n_layer", "n_head", "n_embd"} <= config.keys():
        return config
    for ending, model_type in ((".attn.c_attn.weight", "nanogpt"), (".attn.c_q.weight", "nanochat")):
        if any(name.endswith(ending) for name in names):
            return {**config, "model_type": model_type}
    return config
