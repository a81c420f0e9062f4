"""LoRA adapters: W + (alpha / r) B A added to the weights of the model that they were trained on (arXiv 2106.09685)."""

import fnmatch
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrank.checkpoints.base import Checkpoint, TensorInfo
from headrank.checkpoints.files import read_json
from headrank.errors import HeadrankError

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "adapter_config.json"
PREFIX = re.compile(r"^(?:base_model\.model\.)?")
FACTOR = re.compile(r"(.+)\.lora_(A|B)(?:\.[\w-]+)?\.weight")
SAVED = re.compile(r"(.+?)(?:\.modules_to_save(?:\.[\w-]+)?)?\.(weight|bias)")
NOT_ADDED = {"use_dora": "DoRA's magnitudes", "megatron_config": "Megatron's layers", "layer_replication": "replicated layers", "use_qalora": "QALoRA"}


class LoraCheckpoint(Checkpoint):
    """A model with an adapter added: names, shapes and configuration are the model's."""

    def __init__(self, base: Checkpoint, adapter: Checkpoint, settings: Mapping[str, Any]) -> None:
        self._base, self._adapter, self._settings = base, adapter, settings
        self._factors, self._replaced = _match(base, adapter, is_transposed=bool(settings.get("fan_in_fan_out")))
        super().__init__(
            base.path,
            format=f"{base.format} with a LoRA adapter",
            config=base.config,
            config_name=base.config_name,
            tensors=base.tensors,
            remarks=(*base.remarks, f"{len(self._factors)} matrices have the adapter {adapter.path} added"),
        )

    @property
    def files(self) -> tuple[Path, ...]:
        return (*self._base.files, *self._adapter.files)

    def expect(self, names: Iterable[str]) -> None:
        self._base.expect(name for name in names if name not in self._replaced)

    def read(self, name: str) -> "Tensor":
        if name in self._replaced:
            return self._adapter.read(self._replaced[name])
        weight = self._base.read(name)
        if name not in self._factors:
            return weight
        a, b = (self._adapter.read(self._factors[name][key]).float() for key in "AB")
        change = (b @ a) * self._scale(name, len(a))
        wide = weight if weight.dtype.itemsize >= 4 else weight.float()
        return wide + (change.T if self._settings.get("fan_in_fan_out") else change).to(wide.dtype)

    def fingerprint(self) -> str:
        return f"{self._base.fingerprint()}+{self._adapter.fingerprint()}+{sorted(self._settings.items(), key=str)}"

    def identity(self) -> str:
        return f"{self._base.identity()}+{self._adapter.identity()}"

    def _scale(self, name: str, rank: int) -> float:
        module = name.removesuffix(".weight")
        alpha = _by_pattern(self._settings.get("alpha_pattern"), module, self._settings.get("lora_alpha", 8))
        if type(alpha) not in (int, float):
            raise HeadrankError(f"{self._adapter.path / CONFIG}: lora_alpha = {str(alpha)[:40]} is not a number")
        return float(alpha) / (rank**0.5 if self._settings.get("use_rslora") else rank)


def open_adapter(base: Checkpoint, folder: Path, adapter: Checkpoint) -> LoraCheckpoint:
    """The base with the adapter of a folder added. Raises HeadrankError where they do not belong together, or it is no plain LoRA."""
    settings = read_json(folder / CONFIG)
    if settings.get("peft_type", "LORA") != "LORA":
        raise HeadrankError(f"{folder / CONFIG}: an adapter of type {settings['peft_type']!r}; LoRA can be added")
    for key, what in NOT_ADDED.items():
        if settings.get(key):
            raise HeadrankError(f"{folder / CONFIG}: {key} is set, and {what} cannot be added; merge the adapter into the model first")
    return LoraCheckpoint(base, adapter, settings)


def _match(base: Checkpoint, adapter: Checkpoint, *, is_transposed: bool) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Base tensor -> its A and B; base tensor -> the adapter's tensor that stands for it. Nothing of the adapter may be left over."""
    factors: dict[str, dict[str, str]] = {}
    replaced: dict[str, str] = {}
    for name, info in adapter.tensors.items():
        if "lora_embedding" in name or "lora_magnitude" in name:
            raise HeadrankError(f"{info.file}: {name} cannot be added; merge the adapter into the model first")
        if match := FACTOR.fullmatch(name):
            target = _base_name(base, f"{match.group(1)}.weight", info)
            factors.setdefault(target, {})[match.group(2)] = name
        elif match := SAVED.fullmatch(name):
            replaced[_base_name(base, f"{match.group(1)}.{match.group(2)}", info)] = name
        else:
            raise HeadrankError(f"{info.file}: {name} is no part of a LoRA adapter")
    for target, pair in factors.items():
        _check(base.tensors[target], target, pair, adapter, is_transposed)
    for target, name in replaced.items():
        if adapter.tensors[name].shape != base.tensors[target].shape:
            shapes = f"{list(adapter.tensors[name].shape)}, the model's {list(base.tensors[target].shape)}"
            raise HeadrankError(f"{adapter.tensors[name].file}: {name} has shape {shapes}: the adapter belongs to another model")
    return factors, replaced


def _base_name(base: Checkpoint, name: str, info: TensorInfo) -> str:
    name = PREFIX.sub("", name)
    for candidate in (name, name.removeprefix("model."), f"model.{name}", name.removeprefix("transformer.")):
        if candidate in base.tensors:
            return candidate
    raise HeadrankError(f"{info.file}: is for {name}, which {base.path} does not have: the adapter belongs to another model")


def _check(weight: TensorInfo, target: str, pair: Mapping[str, str], adapter: Checkpoint, is_transposed: bool) -> None:
    if pair.keys() != {"A", "B"}:
        raise HeadrankError(f"{adapter.path}: {target} has lora_{next(iter(pair))} alone")
    a, b = (adapter.tensors[pair[key]] for key in "AB")
    changed = (b.shape[0], a.shape[1]) if len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1] else ()
    if (changed[::-1] if is_transposed else changed) != weight.shape:
        text = f"{list(b.shape)} and {list(a.shape)}, the matrix {list(weight.shape)}"
        raise HeadrankError(f"{a.file}: the factors of {target} have shapes {text}: the adapter belongs to another model")


def _by_pattern(patterns: Any, module: str, default: Any) -> Any:
    if not isinstance(patterns, dict):
        return default
    for pattern, value in patterns.items():
        if module == pattern or module.endswith(f".{pattern}") or fnmatch.fnmatch(module, pattern):
            return value
    return default
