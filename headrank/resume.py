"""A long pass over tokens keeps its sums on disk at intervals, and goes on from there after an interruption, to the same bits."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headrank.output import replace_atomically

SAVE_EVERY = 60.0  # seconds between two saves
LARGEST_SHARE = 0.05  # of the time that saving may take: large sums are saved less often
FORGET_AFTER = 30 * 24 * 3600.0  # seconds after which what an interrupted pass left behind is removed
SCHEMA = 1  # of the sums: to be raised when accumulators change what they hold

State = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class SavedSums:
    """How far a pass had come."""

    done: int
    """Sequences that are in the sums."""
    batch_size: int
    """Sequences a batch, as it was when the sums were made: other batches round otherwise."""
    state: State
    """What headrank.forward.Recorder.state gave."""


class SavedPass:
    """The file of one pass, named by everything that decides its sums, so that a pass of other settings never finds it.

    Every save replaces the file as a whole. Two processes at the same pass write states of the same course: either may go on from
    the other's.
    """

    def __init__(self, folder: Path, *, on_fault: Callable[[str], None] = lambda text: None, **parts: Any) -> None:
        """parts: what decides the sums. on_fault is told, once, why nothing can be saved."""
        parts |= {"schema": SCHEMA, "torch": torch.__version__}
        self.folder, self.on_fault = folder, on_fault
        self.path = folder / f"{hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]}.pass"
        self._next = time.monotonic() + SAVE_EVERY

    def load(self) -> SavedSums | None:
        """What was saved last; None where there is nothing, or a broken file."""
        try:
            with safe_open(self.path, framework="pt") as file:
                facts = file.metadata() or {}
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            done, batch_size = int(facts["done"]), int(facts["batch_size"])
            return SavedSums(done=done, batch_size=batch_size, state=state) if done > 0 and batch_size > 0 else None
        except (OSError, SafetensorError, KeyError, ValueError):
            return None

    def offer(self, state: Callable[[], State], *, done: int, batch_size: int) -> None:
        """Saves where it is time to. state() gives the sums; it is not called otherwise."""
        start = time.monotonic()
        if start < self._next:
            return
        try:
            self._save(state(), done, batch_size)
        except (OSError, SafetensorError) as error:  # the latter where the disk is full
            self.on_fault(f"{self.folder}: this pass could not be continued if it were interrupted: {getattr(error, 'strerror', None) or error}")
            self._next = float("inf")
            return
        end = time.monotonic()
        self._next = end + max(SAVE_EVERY, (end - start) / LARGEST_SHARE)

    def _save(self, state: State, done: int, batch_size: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._forget()
        tensors = {name: tensor.cpu().contiguous() for name, tensor in state.items()}
        with replace_atomically(self.path) as temporary:
            save_file(tensors, temporary, metadata={"done": str(done), "batch_size": str(batch_size)})

    def _forget(self) -> None:
        """Removes what passes left behind that nobody came back to."""
        for path in (*self.folder.glob("*.pass"), *self.folder.glob(".*.tmp")):
            try:
                if time.time() - path.stat().st_mtime > FORGET_AFTER:
                    path.unlink()
            except FileNotFoundError:
                continue  # another process was faster

    def remove(self) -> None:
        """The pass is done."""
        try:
            os.unlink(self.path)
        except OSError:
            return
