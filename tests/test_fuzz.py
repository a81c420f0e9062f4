"""A few mutated inputs of every format, and that the script sees what must not happen."""

import doctest
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrank.errors import HeadrankError
from scripts import fuzz
from scripts.fuzz import Format, Worker, bytes_changed, formats, mutated


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


@pytest.mark.parametrize("name", formats())
def test_mutated_inputs_end_in_a_result_or_a_refusal(name: str, worker: Worker, tmp_path: Path) -> None:
    """scripts/fuzz.py tries ten thousand a format; these are the first of another seed."""
    said: list[str] = []
    counts = fuzz.fuzz([name], inputs=range(30), seed=1, keep=tmp_path, worker=worker, say=said.append)[name]
    assert not counts.failures, said
    assert counts.inputs == 30 == counts.results + sum(counts.refusals.values())
    assert counts.refusals


@pytest.mark.parametrize(("name", "index"), [("tokenizer", 5428), ("measurement", 667), ("pickle", 6923), ("pickle", 7039), ("pickle-legacy", 36)])
def test_inputs_that_once_failed_do_so_no_more(name: str, index: int, worker: Worker) -> None:
    """A panic of a library, an interval beyond numbers, archives over several disks, parameters with gradients, a text of gigabytes."""
    assert worker.attempt(name, 0, index).kind in ("result", "refusal")


def test_good_files_give_results(worker: Worker, tmp_path: Path) -> None:
    for name, chosen in formats().items():
        folder = tmp_path / name
        folder.mkdir()
        chosen.read(chosen.write(folder))


def _letter(folder: Path) -> Path:
    (folder / "a.txt").write_text("a")
    return folder / "a.txt"


def _raises(file: Path) -> None:
    if file.read_bytes() != b"a":
        raise KeyError("what a reader must not raise")


def _panics(file: Path) -> None:
    if file.read_bytes() != b"a":
        raise BaseException("as Rust does")


def _hangs(file: Path) -> None:
    if file.read_bytes() != b"a":
        time.sleep(600)


def _dies(file: Path) -> None:
    if file.read_bytes() != b"a":
        os._exit(7)


def _hoards(file: Path) -> None:
    if file.read_bytes() != b"a":
        bytearray(300 << 20)[::4096] = b"x" * (300 << 8)


def _claims(file: Path) -> None:
    if file.read_bytes() != b"a":
        try:
            bytearray(2 << 30)
        except MemoryError:
            raise HeadrankError("…: cannot be read: MemoryError") from None


def _works_long(file: Path) -> None:
    if file.read_bytes() != b"a":
        fuzz.SECONDS = 0.1
        start = time.process_time()
        while time.process_time() - start < 0.2:
            sum(range(10_000))


def _never_good(file: Path) -> None:
    raise HeadrankError("the good file is refused")


def faulty_formats() -> dict[str, Format]:
    readers: dict[str, Callable[[Path], None]] = {
        "exception": _raises,
        "crash": _dies,
        "hang": _hangs,
        "memory": _hoards,
        "out of memory": _claims,
        "slow": _works_long,
        "the good file": _never_good,
    }
    return {name: Format(write=_letter, mutations=(bytes_changed,), read=read) for name, read in readers.items()} | {
        "panic": Format(write=_letter, mutations=(bytes_changed,), read=_panics)
    }


def _index_of_change(name: str) -> int:
    """An input that differs from the good file."""
    return next(index for index in range(99) if mutated(faulty_formats()[name], b"a", name=name, seed=0, index=index) != b"a")


def test_whatever_is_neither_a_result_nor_a_refusal_is_a_failure_and_its_input_is_kept(tmp_path: Path) -> None:
    worker = Worker(faulty_formats, hang=2.0)
    try:
        for name in faulty_formats():
            said: list[str] = []
            index = _index_of_change(name)
            counts = fuzz.fuzz([name], inputs=[index], seed=0, keep=tmp_path, worker=worker, say=said.append)[name]
            assert [outcome.kind for outcome in counts.failures.values()] == ["exception" if name == "panic" else name], said
            assert said[0].startswith(f"  FAILURE: {name} {index}: ")
            kept = tmp_path / f"{name}-0-{index}"
            assert (kept / "a.txt").read_bytes() == mutated(faulty_formats()[name], b"a", name=name, seed=0, index=index)
            assert (kept / "failure.txt").exists()
    finally:
        worker.close()


def test_the_same_number_is_the_same_input_and_others_differ() -> None:
    chosen, numbers = formats()["bin"], [(seed, index) for seed in (0, 1) for index in range(5)]
    once, again = ([mutated(chosen, bytes(range(256)), name="bin", seed=seed, index=index) for seed, index in numbers] for _ in range(2))
    assert once == again
    assert len(set(once)) > 8


def test_the_examples_in_the_docstrings_are_true() -> None:
    assert doctest.testmod(fuzz).attempted
    assert not doctest.testmod(fuzz).failed


def test_the_script_says_its_counts_and_exits_with_zero(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert fuzz.main(["--inputs", "3", "--formats", "family", "bin", "--keep", str(tmp_path / "kept")]) == 0
    printed = capsys.readouterr().out
    assert "family: 3 inputs, " in printed
    assert "bin: 3 inputs, " in printed
    assert ", 0 failures" in printed
    assert not (tmp_path / "kept").exists()
