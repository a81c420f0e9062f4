import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headrank.memory import kept

STATUS = Path("/proc/self/statm")
SIZE = 96 << 20  # bytes; from 32 MB on glibc gives memory back as soon as it is free


def resident() -> int:
    """Bytes that the process holds."""
    return int(STATUS.read_text().split()[1]) * 4096


def take_and_free() -> None:
    torch.ones(SIZE // 4)


@pytest.mark.skipif(not STATUS.exists() or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs Linux with glibc")
def test_memory_that_is_freed_stays_until_the_end() -> None:
    before = resident()
    with kept():
        take_and_free()
        assert resident() - before > SIZE / 2
    assert resident() - before < SIZE / 2
    take_and_free()
    assert resident() - before < SIZE / 2


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    done = []
    with kept():
        done.append(1)
    assert done == [1]


def test_an_error_passes_through() -> None:
    with pytest.raises(ZeroDivisionError), kept():
        _ = 1 / 0
