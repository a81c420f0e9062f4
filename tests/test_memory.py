import ctypes
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrank.memory import kept

LINUX = Path("/proc/self/statm").exists()
GLIBC = LINUX and hasattr(ctypes.CDLL(None), "malloc_trim")  # nothing else takes None
IN_A_PROCESS_OF_ITS_OWN = """
import json, resource, torch
from headrank.memory import kept

SIZE = 96 << 20  # bytes; from 32 MB on glibc gives memory back as soon as it is free

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / SIZE

def take_and_free():
    torch.ones(SIZE // 4)

held = [resident()]
with kept():
    take_and_free()
    held.append(resident())
held.append(resident())
take_and_free()
held.append(resident())
print(json.dumps(held))
"""


@pytest.mark.skipif(not GLIBC, reason="needs Linux with glibc")
def test_memory_that_is_freed_stays_until_the_end() -> None:
    """A process that has freed much before may hold it from the start, so this one is new."""
    result = subprocess.run([sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN], stdout=subprocess.PIPE, text=True, check=True)
    before, within, after, later = json.loads(result.stdout)
    assert within - before > 0.9
    assert after - before < 0.1
    assert later - before < 0.1


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    done = []
    with kept():
        done.append(1)
    assert done == [1]


def test_an_error_passes_through() -> None:
    with pytest.raises(ZeroDivisionError), kept():
        _ = 1 / 0
