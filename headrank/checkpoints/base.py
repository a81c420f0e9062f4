"""What every checkpoint is to the rest of the program: named tensors that are read one at a time, and a configuration."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SAMPLE_BYTES = 4 << 10
SAMPLE_EVERY = 1 << 20
WHOLE_BYTES = 4 << 20  # files up to this size are read whole


@dataclass(frozen=True)
class TensorInfo:
    """What a header says about one tensor, before any of it is read."""

    shape: tuple[int, ...]
    """Sizes of its axes, as torch would show them."""
    dtype: str
    """Name of the stored type: safetensors' ("F32", "BF16", …), or GGUF's ("Q4_K", …)."""
    file: Path
    """The file that holds it."""


class Checkpoint(ABC):
    """Facts and lazily read tensors of one trained model. A subclass reads one format."""

    def __init__(
        self, path: Path, *, format: str, config: dict[str, Any], config_name: str, tensors: Mapping[str, TensorInfo], remarks: tuple[str, ...] = ()
    ) -> None:
        self.path = path
        """What the user gave."""
        self.format = format
        """Name of the format, for people."""
        self.config = config
        """The parsed configuration; empty where there is none."""
        self.config_name = config_name
        """Name of the file that the configuration came from, for messages."""
        self.tensors = tensors
        """Names as on disk, in the order of the file."""
        self.remarks = remarks
        """What was left aside on opening, for people."""

    @abstractmethod
    def read(self, name: str) -> "Tensor":
        """One tensor on the CPU in its stored type (quantised ones as float32), memory-mapped where the format allows.

        Raises HeadrankError where the type has no counterpart in torch or the file has changed since it was opened.
        """

    def expect(self, names: Iterable[str]) -> None:
        """These tensors are going to be read: a format that can fetch them meanwhile begins to. Errors come when they are read."""
        return

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that holds tensors, by name."""
        return tuple(sorted({info.file for info in self.tensors.values()}))

    def starts_in(self, file: Path) -> Iterable[int]:
        """First bytes of the tensors in a file, where the format knows them."""
        return ()

    def fingerprint(self) -> str:
        """ "sha256:…" over the configuration, the tensors' headers and the content: small files whole, of large ones 4 KiB out of
        every MiB and the beginning of every tensor.

        The same for a copy in another place or of another date; a change between the samples of a large file can go unnoticed.
        Taken once, as the headers are.
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        digest.update(json.dumps(self.config, sort_keys=True, default=str).encode())
        for name, info in sorted(self.tensors.items()):
            digest.update(f"\n{name} {info.dtype} {list(info.shape)}".encode())
        for file in self.files:
            _sample(file, digest, self.starts_in(file))
        return f"sha256:{digest.hexdigest()}"

    def identity(self) -> str:
        """The fingerprint with size and modification time of every file: changes whenever the files may have."""
        return " ".join([self.fingerprint(), *(f"{stat.st_size}:{stat.st_mtime_ns}" for stat in map(Path.stat, self.files))])


def _sample(file: Path, digest: "hashlib._Hash", starts: Iterable[int]) -> None:
    size = file.stat().st_size
    digest.update(f"\n{size}:".encode())
    with file.open("rb", buffering=0) as stream:
        if size <= WHOLE_BYTES:
            digest.update(stream.read())
            return
        for start in sorted({*range(0, size, SAMPLE_EVERY), *starts, size - SAMPLE_BYTES}):
            stream.seek(start)
            digest.update(stream.read(SAMPLE_BYTES))
