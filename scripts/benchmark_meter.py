"""Seconds and memory of what one process does. Needs torch alone, so that it runs in any environment."""

import gc
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Meter:
    """Peak memory beyond what the process held when the meter was made, and seconds of what it is given to run."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        torch.mm(torch.ones(512, 512), torch.ones(512, 512))  # threads and libraries are there before the count begins
        gc.collect()
        gc.freeze()  # what imports left behind is not looked through again within the count
        if self.device.type == "cuda":
            torch.zeros(1, device=self.device)
            torch.cuda.reset_peak_memory_stats()
        self.before = _status("VmRSS")
        if self.before is not None:
            Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten

    def seconds(self, work: Callable[[], Any], *, times: int = 1) -> float:
        """Seconds of one call of work, the median of several."""
        return statistics.median(self._once(work) for _ in range(times))

    def _once(self, work: Callable[[], Any]) -> float:
        self._wait()
        start = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def peak(self) -> int:
        """Bytes: of the device's memory on CUDA, else of the process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        highest = _status("VmHWM")
        if highest is None or self.before is None:  # no Linux: the peak of the whole process
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return highest - self.before


def _status(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main(jobs: dict[str, Callable[..., dict[str, Any]]]) -> None:
    """Runs the job that the command line names, with the keyword arguments that it gives as JSON, and prints what it returns as JSON."""
    name, options = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps(jobs[name](**options)))
