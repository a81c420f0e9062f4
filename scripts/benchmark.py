"""Time and memory of headrank beside what they are to be compared with: one table, and one line of JSON at the end.

    python scripts/benchmark.py
    python scripts/benchmark.py --section activations --size 128M --peers
    python scripts/benchmark.py --section growth

Every number comes from a process of its own. What is compared runs in turns, and medians are shown, so that a machine that grows
slower meanwhile does so for all. Checkpoints hold random numbers; they are made one at a time, in a temporary folder.
"""

import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from benchmark_growth import ACTIVATIONS, LIMITS, WEIGHTS, Case, counting_operations, exponent, pass_operations, weights_operations
from make_checkpoint import write_untrained
from rich.console import Console
from rich.table import Table

from headrank.config import ModelConfig, load_family

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "configs"
TOKENS = {"nano": (64, 128), "128M": (8, 512), "2.5B": (2, 512)}  # sequences and their length, on the CPU
TOKENS_CUDA = {"nano": (64, 128), "128M": (64, 2048), "2.5B": (16, 2048)}
PEERS = {"transformer_lens": ("2.18.0", "pyarrow<21"), "nnsight": ("0.8.1",)}  # version, and what it needs beside it: newer pyarrows refuse its numpy
PEER_TOKENS = (8, 512)
DEEP = 36  # layers of the model whose pass is stopped at layer 18

Measured = dict[str, float]


class Section(StrEnum):
    weights = "weights"
    activations = "activations"
    load = "load"
    startup = "startup"
    growth = "growth"


class Size(StrEnum):
    nano = "nano"
    small = "128M"
    large = "2.5B"


@dataclass
class Report:
    """Lines of the table, and the numbers of the JSON line."""

    runs: int
    """Processes a job."""
    folder: Path
    """Where checkpoints are made."""
    device: str
    """cpu or cuda."""
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)
    """What was measured, seconds, megabytes, and what that means."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """The JSON document."""

    def compare(self, what: str, jobs: Mapping[str, Sequence[str]]) -> dict[str, Measured]:
        """Runs command lines in turns. Returns the medians of what they print."""
        found: dict[str, list[Measured]] = {name: [] for name in jobs}
        for turn in range(self.runs):
            for name, command in jobs.items():
                print(f"{what}: {name}, {turn + 1} of {self.runs}", file=sys.stderr)
                found[name].append(run(command))
        medians = {name: {key: statistics.median(one[key] for one in its) for key in its[0]} for name, its in found.items()}
        for name, median in medians.items():
            seconds = [one["seconds"] for one in found[name]]
            spread = f"{median['seconds']:.3f} ({min(seconds):.3f}–{max(seconds):.3f})"
            self.rows.append((f"{what}: {name}", spread, f"{median['peak'] / 1e6:.0f}" if "peak" in median else "", ""))
        return medians

    def say(self, what: str, text: str) -> None:
        self.rows.append((what, "", "", text))

    def put(self, value: Any, *path: str) -> None:
        """Sets a number of the JSON document."""
        place = self.numbers
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = round(value, 3) if isinstance(value, float) else value

    @contextmanager
    def checkpoint(self, size: str, *, variant: str = "mha", **geometry: Any) -> Iterator[str]:
        """A checkpoint in bfloat16 that is removed afterwards. geometry: fields of headrank.config.ModelConfig that are to differ."""
        model = load_family(CONFIGS / f"{size}.toml").variant(variant).model
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="headrank-benchmark-") as folder:
            print(f"making {size} {variant} ...", file=sys.stderr)
            write_untrained(replace(model, **geometry), Path(folder), seed=0, dtype=torch.bfloat16)
            yield folder


def run(command: Sequence[str]) -> Measured:
    """What a process prints as JSON in its last line."""
    threads = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=threads)
    measured: Measured = json.loads(result.stdout.splitlines()[-1])
    return measured


def job(name: str, *, python: str = sys.executable, script: str = "benchmark_jobs.py", **options: Any) -> list[str]:
    return [python, str(HERE / script), name, json.dumps(options)]


def weights(report: Report, size: str) -> None:
    """Plain heads beside the obvious way and beside what the machine needs at least."""
    with report.checkpoint(size) as path:
        found = report.compare(f"weights {size}", {name: job(name, path=path) for name in ("weights", "materialise", "floor")})
    ours, obvious, least = found["weights"], found["materialise"], found["floor"]
    ratios = {
        "over_floor": ours["seconds"] / least["seconds"],
        "speedup_over_materialising": obvious["seconds"] / ours["seconds"],
        "memory_over_materialising": ours["peak"] / obvious["peak"],
        "peak_layers": ours["peak"] / layer_bytes(load_family(CONFIGS / f"{size}.toml").variant("mha").model),
    }
    for name, ratio in ratios.items():
        report.put(ratio, "weights", size, name)
    report.say(f"weights {size}", ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))
    report.say(f"weights {size}: floor", f"product by torch {least['torch']:.3f} s, fastest known {least['fastest']:.3f} s, reading {least['read']:.3f} s")


def layer_bytes(model: ModelConfig) -> int:
    """Of Q, K, V and O of one layer of plain heads in float32."""
    return 4 * 4 * model.d_model * model.n_head * model.d_head


def variants(report: Report, size: str) -> None:
    """Every other attention kind of a family: its time and its memory."""
    for variant in load_family(CONFIGS / f"{size}.toml").variants:
        if variant.name != "mha":
            with report.checkpoint(size, variant=variant.name) as path:
                found = report.compare(f"weights {size} {variant.name}", {"weights": job("weights", path=path)})["weights"]
            layers = found["peak"] / layer_bytes(variant.model)
            report.put({"seconds": round(found["seconds"], 3), "peak_layers": round(layers, 3)}, "weights", size, "variants", variant.name)
            report.say(f"weights {size} {variant.name}", f"peak_layers {layers:.2f}")


def activations(report: Report, size: str) -> None:
    """The pass beside the bare one, in both types."""
    n_sequences, seq_len = (TOKENS if report.device == "cpu" else TOKENS_CUDA)[size]
    dtypes = ["bfloat16"] if size == Size.large else ["float32", "bfloat16"]  # 2.5B in float32 takes 10 GB
    with report.checkpoint(size) as path:
        for dtype in dtypes:
            options: dict[str, Any] = {"path": path, "n_sequences": n_sequences, "seq_len": seq_len, "device": report.device, "dtype": dtype, "times": 3}
            found = report.compare(f"activations {size} {dtype}", {name: job(name, **options) for name in ("bare", "activations")})
            _over_bare(report, found["activations"], found["bare"], "activations", size, dtype)


def _over_bare(report: Report, ours: Measured, bare: Measured, *path: str) -> None:
    time, memory = ours["seconds"] / bare["seconds"], ours["peak"] / bare["peak"]
    report.put(time, *path, "time_over_bare")
    report.put(memory, *path, "memory_over_bare")
    report.say(" ".join(path), f"time_over_bare {time:.2f}, memory_over_bare {memory:.2f}")


def early_stop(report: Report) -> None:
    """--layer 18 of a model of 128M's width and 2.5B's depth."""
    options: dict[str, Any] = {"n_sequences": 4, "seq_len": 512, "device": report.device, "dtype": "float32", "times": 2}
    with report.checkpoint("128M", n_layer=DEEP) as path:
        jobs = {"all layers": job("activations", path=path, **options), "--layer 18": job("activations", path=path, layers=[18], **options)}
        found = report.compare(f"activations {DEEP} layers", jobs)
    ratio = found["--layer 18"]["seconds"] / found["all layers"]["seconds"]
    report.put(ratio, "activations", "early_stop")
    report.say(f"activations {DEEP} layers", f"early_stop {ratio:.2f}")


def peers(report: Report, folder: Path) -> None:
    """GPT-2 small with random weights, beside TransformerLens and nnsight in environments of their own."""
    model = folder / "gpt2"
    subprocess.run(job("make_gpt2", script="benchmark_peers.py", path=str(model)), check=True, stdout=subprocess.DEVNULL)
    n_sequences, seq_len = PEER_TOKENS
    options: dict[str, Any] = {"path": str(model), "n_sequences": n_sequences, "seq_len": seq_len}
    here: dict[str, Any] = {"device": "cpu", "dtype": "float32", "times": 3}
    jobs = {"bare": job("bare", **options, **here), "headrank": job("activations", **options, **here)}
    for name, (version, *others) in PEERS.items():
        python = environment(folder / name, f"{name}=={version}", *others)
        jobs[f"{name} {version}"] = job(name, python=python, script="benchmark_peers.py", **options)
    found = report.compare("peers gpt2-small float32", jobs)
    ours = found["headrank"]
    for name, (version, *_) in PEERS.items():
        theirs = found[f"{name} {version}"]
        time, memory = theirs["seconds"] / ours["seconds"], (theirs["peak"] - theirs["weight_bytes"]) / (ours["peak"] - ours["weight_bytes"])
        report.put(time, "peers", name, "time_over_ours")
        report.put(memory, "peers", name, "memory_over_ours")
        report.say(f"peers: {name} {version}", f"time_over_ours {time:.2f}, memory beyond the weights over ours {memory:.2f}")


def environment(folder: Path, *packages: str) -> str:
    """A Python with packages in it and the torch that we have, made where it is not there yet."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making an environment for {packages[0]} ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        torch_version = importlib.metadata.version("torch").partition("+")[0]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", f"torch=={torch_version}", *packages], check=True)
    return str(python)


def load(report: Report, size: str) -> None:
    """To the first numbers, and to a running forward pass."""
    with report.checkpoint(size) as path:
        jobs = {"first layer": job("first_layer", path=path), "reading two layers": job("read_layers", path=path, n_layers=2)}
        jobs["load and run"] = job("load", path=path, device=report.device, dtype="bfloat16")
        found = report.compare(f"load {size}", jobs)
    first = found["first layer"]["seconds"] / found["reading two layers"]["seconds"]
    peak = found["load and run"]["peak"] / found["load and run"]["weight_bytes"]
    report.put(first, "load", size, "first_layer_over_reading_two")
    report.put(peak, "load", size, "peak_over_weights")
    report.say(f"load {size}", f"first_layer_over_reading_two {first:.2f}, peak_over_weights {peak:.2f}")


def startup(report: Report, folder: Path) -> None:
    """Commands beside the imports that they cannot do without."""
    model = HERE.parent / "headrank" / "data" / "nano" / "mha"
    stored = [sys.executable, "-m", "headrank", "effrank", str(model), "--quiet", "--force", "--out", str(folder / "out")]
    commands = {
        "import typer, rich": [sys.executable, "-c", "import typer, rich"],
        "headrank --help": [sys.executable, "-m", "headrank", "--help"],
        "import torch, matplotlib": [sys.executable, "-c", "import torch, matplotlib"],
        "headrank effrank, stored": stored,
    }
    os.environ["HEADRANK_CACHE"] = str(folder / "cache")
    subprocess.run(stored, check=True, stdout=subprocess.DEVNULL)
    timer = "import json, subprocess, sys, time; start = time.perf_counter(); subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)"
    timer += "; print(json.dumps({'seconds': time.perf_counter() - start}))"
    found = report.compare("startup", {name: [sys.executable, "-c", timer, *command] for name, command in commands.items()})
    for name, command, imports in (
        ("help_over_imports", "headrank --help", "import typer, rich"),
        ("stored_over_imports", "headrank effrank, stored", "import torch, matplotlib"),
    ):
        ratio = found[command]["seconds"] / found[imports]["seconds"]
        report.put(ratio, "startup", name)
        report.say("startup", f"{name} {ratio:.2f}")


def growth(report: Report) -> None:
    """Time against the size of a model and of what it is fed, its exponents beside those of the operations that it takes.

    Passes run in float32 on the CPU; counting is what measuring does with given queries, keys and outputs, without the pass.
    """
    options: dict[str, Any] = {"times": 3}
    _grow(report, "weights", WEIGHTS, lambda path, case: job("weights", path=path, **options), {"weights": ("seconds", weights_operations)})
    options |= {"device": "cpu", "dtype": "float32"}
    _grow(
        report,
        "activations",
        ACTIVATIONS,
        lambda path, case: job("pass_and_counting", path=path, n_sequences=case.sequences, seq_len=case.seq_len, **options),
        {"activations": ("seconds", pass_operations), "counting": ("counting", counting_operations)},
    )


def _grow(
    report: Report,
    source: str,
    series: Mapping[str, Sequence[Case]],
    command: Callable[[str, Case], list[str]],
    shown: Mapping[str, tuple[str, Callable[[Case], int]]],
) -> None:
    """Runs all cases in turns. shown: name -> which of a job's numbers are its seconds, and how many operations these are."""
    cases = dict.fromkeys(case for each in series.values() for case in each)  # one that several series have runs once
    with ExitStack() as stack:
        paths: dict[str, str] = {}
        for case in cases:
            if (model := str(case.geometry)) not in paths:
                paths[model] = stack.enter_context(report.checkpoint("128M", **case.geometry))
        found = report.compare(f"growth {source}", {str(case): command(paths[str(case.geometry)], case) for case in cases})
    for name, (number, operations) in shown.items():
        for quantity, each in series.items():
            sizes = [getattr(case, quantity) for case in each]
            seconds = [round(found[str(case)][number], 6) for case in each]
            slope, expected = exponent(sizes, seconds), exponent(sizes, [operations(case) for case in each])
            limit = LIMITS[name][quantity]
            for key, value in {"sizes": sizes, "seconds": seconds, "exponent": slope, "expected": expected, "limit": limit}.items():
                report.put(value, "growth", name, quantity, key)
            times = ", ".join(f"{size}: {one:.3f}" for size, one in zip(sizes, seconds, strict=True))
            report.say(f"growth {name}: {quantity}", f"exponent {slope:.2f}, expected {expected:.2f}, in the limit {limit}; seconds {times}")


def machine(device: str) -> str:
    """The machine and what runs on it, in one line."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        processor = platform.processor() or platform.machine()
    card = f", {torch.cuda.get_device_name()}" if device == "cuda" else ""
    return f"{processor}, {os.cpu_count()} cores{card}, {platform.system()}, Python {platform.python_version()}, torch {importlib.metadata.version('torch')}"


def show(report: Report) -> None:
    table = Table("measured", "seconds (least–most)", "peak MB", "ratios", title=machine(report.device))
    for row in report.rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False).print(table)
    print(json.dumps(report.numbers))


def main(
    section: Annotated[list[Section] | None, typer.Option(help="What to measure; all but growth by default, which takes eight minutes of its own.")] = None,
    size: Annotated[list[Size] | None, typer.Option(help="nano, 128M, 2.5B; all by default. growth has sizes of its own.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda, of forward passes.")] = "cpu",
    with_peers: Annotated[bool, typer.Option("--peers", help="Beside TransformerLens and nnsight, in environments made for them.")] = False,
    with_variants: Annotated[bool, typer.Option("--variants", help="Weights: every attention kind of the family as well.")] = False,
    runs: Annotated[int, typer.Option(min=1, help="Processes a number is the median of.")] = 5,
    folder: Annotated[Path | None, typer.Option(help="Where checkpoints and environments are made; a temporary one by default. 2.5B takes 5 GB.")] = None,
) -> None:
    """Measures headrank beside what it is to be compared with."""
    sizes: list[str] = [each.value for each in size or Size]
    sections = section or [each for each in Section if each != Section.growth]
    if Section.growth in sections and device != "cpu":
        raise typer.BadParameter("--section growth counts what is done on the CPU; leave out --device")
    home = folder or Path(tempfile.mkdtemp(prefix="headrank-benchmark-"))
    home.mkdir(parents=True, exist_ok=True)
    report = Report(runs=runs, folder=home, device=device)
    by_size: dict[Section, Callable[[Report, str], None]] = {Section.weights: weights, Section.activations: activations, Section.load: load}
    try:
        for each, measure in by_size.items():
            for one in sizes if each in sections else ():
                measure(report, one)
                if each == Section.weights and with_variants:
                    variants(report, one)
        if Section.activations in sections:
            early_stop(report)
        if Section.startup in sections:
            startup(report, home)
        if Section.growth in sections:
            growth(report)
        if with_peers:
            peers(report, home)
        show(report)
    finally:
        if folder is None:
            shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    typer.run(main)
