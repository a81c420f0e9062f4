"""Several processes at one measurement: what they find is what one finds, and where one fails, all end."""

import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrank import cli, forward, measure, processes, resume
from headrank.accumulators import OutputGram, ScoreGram
from headrank.config import ModelConfig
from headrank.errors import HeadrankError
from headrank.forward import DecoderRunner, Recorder, pass_over, recorded
from headrank.measure import Settings, Silent
from headrank.model import new_decoder
from headrank.moments import HeadMoments
from headrank.selection import ModelRef
from headrank.store import LayerFacts, Measurement, Store
from headrank.tokens import Sequences
from tests.plain import CONFIGS, checkpoint_of, decoder, gram_of
from tests.test_accumulators import assert_close

TOP = Path(__file__).parent.parent
CPU = torch.device("cpu")
SUMS = 1e-12  # of float64, relative to the sizes of two heads

# Merging

H, T, D, WIDTH, S = 4, 8, 3, 5, 3
CONSTANT = torch.tensor([0.0, 10240.0, -10240.0, 0.0]).view(H, 1)  # what all tokens of a head have in common
SIZE = torch.tensor([1.0, 2.0**-66, 2.0**9, 2.0**60]).view(H, 1)
BASES = st.integers(0, 2**32)


def vectors(seed: int, n: int) -> Tensor:
    """[n, T, H, D]: whole numbers about a mean of each sequence that is whole too, so that float32 loses nothing; times powers of two."""
    random = np.random.default_rng(seed)
    about = random.integers(-3, 4, (n, T // 2, H, D))
    mean = random.integers(-9, 10, (n, 1, H, D))
    return (torch.from_numpy(np.concatenate([about, -about], 1) + mean).float() + CONSTANT) * SIZE


def shares(n: int, cuts: Sequence[int]) -> list[range]:
    ends = [0, *sorted(min(cut, n) for cut in cuts), n]
    return [range(first, stop) for first, stop in itertools.pairwise(ends)]


def merged(make: Callable[[], Any], add: Callable[[Any, int], None], parts: list[range]) -> Any:
    """One accumulator a part, fed a sequence at a time, brought together in the first by way of their states."""
    accumulators = []
    for part in parts:
        accumulators.append(make())
        for sequence in part:
            add(accumulators[-1], sequence)
    for other in accumulators[1:]:
        accumulators[0].merge({name: tensor.clone() for name, tensor in other.state().items()})
    return accumulators[0]


CUTS = st.lists(st.integers(0, 7), min_size=1, max_size=3)
N = 7
GROUPS = torch.arange(N) * S // N
COUNTS = st.lists(st.booleans(), min_size=N, max_size=N)  # whether a sequence is more than padding


@pytest.mark.parametrize("center", [True, False])
@given(seed=BASES, cuts=CUTS, counts=COUNTS)
def test_outputs_counted_apart_are_those_counted_together(center: bool, seed: int, cuts: list[int], counts: list[bool]) -> None:
    z, W_O = vectors(seed, N), torch.from_numpy(np.random.default_rng(seed).integers(-3, 4, (H, D, WIDTH))).float()
    W_O[:, 0, 0] = 1  # no head is without effect
    keep = torch.tensor(counts)[:, None].expand(N, T)

    def add(onto: OutputGram, n: int) -> None:
        onto.add(z[n : n + 1], groups=GROUPS[n : n + 1], keep=keep[n : n + 1])

    found = merged(lambda: OutputGram(W_O, S), add, shares(N, cuts)).grams(center=center).numpy()
    written = torch.einsum("nthd,hdw->hntw", z.double(), W_O.double())
    kept = torch.tensor(counts)
    if center and any(counts):
        written = written - written[:, kept].mean((1, 2), keepdim=True)
    expected = np.stack([gram_of(written[:, kept & (group == GROUPS)].flatten(1)) for group in range(S)])
    size = np.sqrt(expected.sum(0).diagonal())
    unit = np.where(size > 0, size, 1)
    np.testing.assert_allclose(found / np.outer(unit, unit), expected / np.outer(unit, unit), rtol=0, atol=SUMS)


@given(seed=BASES, cuts=CUTS, counts=COUNTS)
def test_moments_counted_apart_are_those_counted_together(seed: int, cuts: list[int], counts: list[bool]) -> None:
    x = vectors(seed, N) / SIZE
    keep = torch.tensor(counts)[:, None].expand(N, T)
    found = merged(lambda: HeadMoments(H, D, CPU), lambda onto, n: onto.add(x[n : n + 1], keep=keep[n : n + 1]), shares(N, cuts)).covariance()
    rows = x[torch.tensor(counts)].flatten(0, 1).flatten(1).double()
    rows = rows - rows.mean(0, keepdim=True) if len(rows) else rows
    torch.testing.assert_close(found.flatten(2).flatten(0, 1), rows.T @ rows, rtol=SUMS, atol=SUMS * max(1.0, float(rows.square().sum())))


@given(seed=BASES, cuts=CUTS, silent=st.lists(st.integers(0, H - 1), min_size=N, max_size=N))
def test_scores_counted_apart_are_those_counted_together(seed: int, cuts: list[int], silent: list[int]) -> None:
    """One head of each sequence has no scores, so that its size may be known in some parts alone; sizes change from one to the next."""
    q, k = torch.randn(2, N, H, T, D, generator=torch.Generator().manual_seed(seed))
    q = q * SIZE.view(H, 1, 1) * torch.logspace(-9, 9, N).view(N, 1, 1, 1)
    for sequence, head in enumerate(silent):
        q[sequence, head] = 0

    def add(onto: ScoreGram, n: int) -> None:
        onto.add(q[n : n + 1], k[n : n + 1], scaling=0.5, groups=GROUPS[n : n + 1])

    def make() -> ScoreGram:
        return ScoreGram(H, S, CPU)

    found, together = merged(make, add, shares(N, cuts)), merged(make, add, [range(N)])
    assert_close(found.grams().sum(0).numpy(), together.grams().sum(0).numpy(), rounding=SUMS)


def test_what_was_merged_goes_on_counting_at_the_size_that_it_has_learnt() -> None:
    tiny = torch.full((1, T, H, D), 2.0**-90) * torch.arange(1.0, T + 1).view(T, 1, 1)
    W_O = torch.eye(D).expand(H, D, D)
    nothing, something = OutputGram(W_O, 1), OutputGram(W_O, 1)
    one = torch.zeros(1, dtype=torch.long)
    nothing.add(torch.zeros(1, T, H, D), groups=one)
    something.add(tiny, groups=one)
    nothing.merge(something.state())
    nothing.add(tiny, groups=one)
    written = torch.cat([torch.zeros_like(tiny), tiny, tiny]).double().flatten(0, 1).transpose(0, 1)
    assert_close(nothing.grams()[0].numpy(), gram_of(written - written.mean(1, keepdim=True)))


# Shares of a pass


def team(rank: int, world: int) -> processes.Team:
    return processes.Company(rank, world, rank)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 19])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 18, 19, 20])
def test_shares_are_all_there_is_and_the_first_process_has_one(n: int, world: int) -> None:
    parts = [team(rank, world).share(n) for rank in range(world)]
    assert [place for part in parts for place in part] == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert len(parts[0])


@pytest.mark.parametrize("kind", ["gqa", "mla", "lrkv"])
@pytest.mark.parametrize("world", [2, 3, 4, 6])
def test_passes_over_shares_of_sequences_of_any_length_add_up_to_one_over_all(kind: str, world: int) -> None:
    """Five sequences: for six processes one has none."""
    config = CONFIGS[kind]
    runner = DecoderRunner(checkpoint_of(decoder(config))[0], device=CPU, dtype=torch.float32)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (5, 11))
    sequences = Sequences(ids=ids, lengths=np.array([7, 11, 1, 3, 11], dtype=np.int64), source="random")
    layers = [LayerFacts(index=layer, n_head=config.n_head, n_kv_head=config.n_kv_head) for layer in range(config.n_layer)]
    circuits = ("qk", "ov", "cka", "keys", "values")
    settings: dict[str, Any] = {"device": CPU, "batch_size": 2, "skip_first": 2, "n_groups": 4}
    recorders = [recorded(runner, sequences, layers, circuits, share=share, **settings) for rank in range(world) if (share := team(rank, world).share(5))]
    for other in recorders[1:]:
        recorders[0].merge(other.state().items())
    recorders[0].merge(Recorder(layers, circuits, n_groups=4).state().items())
    expected = pass_over(runner, sequences, layers, circuits, **settings)
    found = recorders[0].grams(center=True)
    assert found.keys() == expected.keys()
    for name, gram in found.items():
        size = np.sqrt(expected[name].sum(0).diagonal())
        np.testing.assert_allclose(gram / np.outer(size, size), expected[name] / np.outer(size, size), rtol=0, atol=2e-6, err_msg=name)


# Processes

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["headrank.forward", "headrank.commands", "tests.test_processes"])  # torch is imported once for all of them
GEOMETRY: dict[str, Any] = {"n_layer": 5, "n_head": 6, "d_head": 10, "d_model": 13, "d_mlp": 17, "vocab_size": 31, "context": 19}
N_TOKENS = 11 * 23
BASE = ["--tokens", "ids.npy", "--seq-len", "11", "--sequences", "7"]


@dataclass
class Ran:
    codes: list[int | None]
    out: list[str]
    err: list[str]


def _child(rank: int, world: int, port: int, folder: Path, log: Path, action: Callable[..., None], given: tuple[Any, ...]) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{log}.{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{world}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    os.environ["HEADRANK_CACHE"] = str(log.parent / "store")
    os.chdir(folder)
    action(*given)


def ran(tmp_path: Path, folders: Sequence[Path], action: Callable[..., None], *given: Any) -> Ran:
    """Processes of one command, each in a folder of its own, as on machines of their own. None may wait for ever."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "log"
    these = [FORKS.Process(target=_child, args=(rank, len(folders), port, folder, log, action, given)) for rank, folder in enumerate(folders)]
    for process in these:
        process.start()
    end = time.monotonic() + 180  # machines may be busy
    for process in these:
        process.join(max(0.0, end - time.monotonic()))
    running = [rank for rank, process in enumerate(these) if process.is_alive()]
    for rank in running:
        these[rank].kill()
    out, err = ([Path(f"{log}.{rank}.{name}").read_text() for rank in range(len(folders))] for name in ("out", "err"))
    assert not running, err
    return Ran([process.exitcode for process in these], out, err)


def headrank(*words: str) -> None:
    sys.argv = ["headrank", *words]
    cli.main()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint and token ids."""
    return write_model(tmp_path_factory.mktemp("models") / "first", seed=5)


def write_model(folder: Path, *, seed: int) -> Path:
    (folder / "model").mkdir(parents=True)
    config = ModelConfig(kind="gqa", n_kv_head=2, **GEOMETRY)
    (folder / "model" / "config.json").write_text(config.to_json())
    save_file({name: p.detach() for name, p in new_decoder(config, seed=seed).named_parameters()}, folder / "model" / "model.safetensors")
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(31, size=N_TOKENS))
    return folder


def copied(model: Path, folder: Path) -> Path:
    (folder / "model").mkdir(parents=True)
    for name in ("ids.npy", "model/config.json", "model/model.safetensors"):
        (folder / name).write_bytes((model / name).read_bytes())
    return folder


SETTINGS = Settings(n_sequences=7, seq_len=11, batch_size=1, tokens=(Path("ids.npy"),))
KINDS = {
    "operator": SETTINGS,
    "outputs about zero": replace(SETTINGS, center=False, skip_first=3),
    "cka": replace(SETTINGS, measure="cka"),
    "keys": replace(SETTINGS, measure="keys", batch_size=None),
    "values": replace(SETTINGS, measure="values", skip_first=2),
    "two sequences": replace(SETTINGS, n_sequences=2),
    "one sequence": replace(SETTINGS, n_sequences=1),
    "weights": Settings(source="weights"),
    "weights, null": Settings(source="weights", measure="projection-kernel", null=True),
    "weights, some layers": Settings(source="weights"),
}


def measured_all(store: Path) -> None:
    """One measurement after the other, as `report` makes them."""
    with processes.company(measure.do_share):
        for name, settings in KINDS.items():
            measured(name, settings, store)


def measured(name: str, settings: Settings, store: Path) -> Measurement:
    layers = (lambda facts: [-1, 2]) if "some" in name else measure.all_layers
    return measure.measure(ModelRef(label="m", path="model"), settings, layers=layers, store=Store(store / name.replace(" ", "-")))


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measurement]:
    store = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(model)
        return {name: measured(name, settings, store) for name, settings in KINDS.items()}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_several_processes_find_what_one_finds(world: int, model: Path, alone: dict[str, Measurement], tmp_path: Path) -> None:
    done = ran(tmp_path, [model] * world, measured_all, tmp_path / "kept")
    assert done.codes == [0] * world, done.err
    for name, expected in alone.items():
        (file,) = (tmp_path / "kept" / name.replace(" ", "-")).iterdir()
        found = Store(file.parent).find(file.stem)
        assert found is not None
        assert (found.tokens, found.settings, found.faults, found.null) == (expected.tokens, expected.settings, {}, expected.null)
        assert set(found.layers) == set(expected.layers)
        assert found.grams.keys() == expected.grams.keys()
        for gram, numbers in expected.grams.items():
            unit = np.sqrt(numbers.sum(0).diagonal())
            rounding = SUMS if gram.startswith("qk") or expected.source == "weights" else 2e-6  # others are taken about other means, in float32
            assert np.abs((found.grams[gram] - numbers) / np.outer(unit, unit)).max() < rounding, f"{name} {gram}"


def test_the_first_process_alone_prints_and_writes_and_the_next_command_finds_the_measurement(model: Path, tmp_path: Path) -> None:
    words = ["table", "model", *BASE, "--no-null", "--json", "--out", str(tmp_path / "out")]
    first = ran(tmp_path, [model] * 3, headrank, *words)
    assert first.codes == [0, 0, 0], first.err
    assert first.out[1:] == ["", ""]
    assert first.err == [f"Wrote {', '.join(str(tmp_path / 'out' / f'table.{suffix}') for suffix in ('csv', 'md', 'tex', 'json'))}\n", "", ""]
    assert json.loads(first.out[0]) == json.loads((tmp_path / "out" / "table.json").read_text())
    (file,) = (tmp_path / "store").iterdir()
    stamp = file.stat().st_mtime_ns
    again = ran(tmp_path, [model] * 2, headrank, *words)
    assert (again.codes, again.out[0]) == ([0, 0], first.out[0])
    assert file.stat().st_mtime_ns == stamp


def test_a_layer_that_is_not_a_number_is_reported_as_by_one_process(model: Path, tmp_path: Path) -> None:
    folder = copied(model, tmp_path / "nan")
    weights = load_file(model / "model" / "model.safetensors")
    weights["transformer.h.3.attn.c_q.weight"][7] = float("nan")
    save_file(weights, folder / "model" / "model.safetensors")
    words = ["measure", "model", "--source", "weights", "--no-null", "--quiet", "-o"]
    one = ran(tmp_path, [folder], headrank, *words, str(tmp_path / "one"))
    (tmp_path / "store").rename(tmp_path / "store of one")
    several = ran(tmp_path, [folder] * 2, headrank, *words, str(tmp_path / "several"))
    assert "layer 3" in one.err[0]
    assert (several.codes, several.err) == ([1, 0], [one.err[0], ""])


def failing(where: str, what: str, *words: str) -> None:
    """The command line, with a fault in the second process's second batch or Gram matrix; the first is at its own second one meanwhile."""
    rank = int(os.environ["RANK"])
    calls: list[int] = []

    def fault(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            calls.append(1)
            if rank == 0:
                Path("calls").write_text(str(len(calls)))
                while len(calls) > 1 and not Path("failing").exists():
                    time.sleep(0.01)
                time.sleep(0.3)
            if rank == 1 and len(calls) == 2:
                while not Path("calls").exists():  # the first has begun too
                    time.sleep(0.01)
                Path("failing").touch()
                if what == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise {"refuse": HeadrankError("these tokens are sour"), "break": ZeroDivisionError("no such number")}[what]
            return original(*given, **named)

        return call

    if where == "batch":
        forward._run_batch = fault(forward._run_batch)
    else:
        measure._WeightsWork.gram = fault(measure._WeightsWork.gram)  # type: ignore[method-assign]
    headrank(*words)


def nothing_is_left(tmp_path: Path) -> bool:
    return not (tmp_path / "out").exists() and not any(path.suffix == ".safetensors" for path in tmp_path.glob("store/*"))


@pytest.mark.parametrize("where", ["batch", "layer"])
def test_a_process_that_is_refused_ends_all_with_its_words(where: str, model: Path, tmp_path: Path) -> None:
    folder = copied(model, tmp_path / "m")
    source = ["--source", "weights"] if where == "layer" else [*BASE, "--batch-size", "1", "--sequences", "60"]
    done = ran(tmp_path, [folder] * 3, failing, where, "refuse", "table", "model", *source, "--no-null", "--out", str(tmp_path / "out"))
    assert done.codes == [1, 0, 0]
    assert done.err == [f"Error: these tokens are sour\n(process 1 of 3, on {socket.gethostname()})\n", "", ""]
    assert done.out == ["", "", ""]
    assert nothing_is_left(tmp_path)
    assert int((folder / "calls").read_text()) < 8  # batches of its share: it did not go on to the end


def test_a_fault_of_ours_in_another_process_leaves_its_traceback_and_ends_all(model: Path, tmp_path: Path) -> None:
    folder = copied(model, tmp_path / "m")
    done = ran(tmp_path, [folder] * 2, failing, "batch", "break", "table", "model", *BASE, "--batch-size", "1", "--out", str(tmp_path / "out"))
    assert done.codes == [1, 0]
    assert done.err[0] == f"Error: ZeroDivisionError: no such number\n(process 1 of 2, on {socket.gethostname()})\n"
    assert done.err[1].startswith("Traceback")
    assert done.err[1].endswith("ZeroDivisionError: no such number\n")
    assert nothing_is_left(tmp_path)


def test_a_process_that_is_killed_ends_all(model: Path, tmp_path: Path) -> None:
    folder = copied(model, tmp_path / "m")
    done = ran(tmp_path, [folder] * 3, failing, "batch", "kill", "table", "model", *BASE, "--batch-size", "1", "--out", str(tmp_path / "out"))
    assert done.codes == [1, -signal.SIGKILL, 1]
    assert done.err[0] == "Error: another of the 3 processes was lost; start again\n"
    assert nothing_is_left(tmp_path)


def broken(model: Path, folder: Path, what: str) -> str:
    """Another machine's folder, where something is not as it is on the first. Returns what is said of it."""
    if what == "another checkpoint":
        write_model(folder, seed=6)
        return "model: here it is another checkpoint than the first process reads; give all of them the same"
    copied(model, folder)
    if what == "other tokens":
        np.save(folder / "ids.npy", np.random.default_rng(1).integers(31, size=N_TOKENS))
        return "model: tokens would be others here than in the first process; give all of them the same files and devices"
    if what == "no tokens":
        (folder / "ids.npy").unlink()
        return "ids.npy: cannot be read: No such file or directory"
    (folder / "model" / "model.safetensors").write_bytes(b"broken")
    return "model"


@pytest.mark.parametrize("what", ["another checkpoint", "other tokens", "no tokens", "a broken checkpoint"])
def test_what_another_machine_has_must_be_what_the_first_has(what: str, model: Path, tmp_path: Path) -> None:
    said = broken(model, tmp_path / "other", what)
    done = ran(tmp_path, [model, tmp_path / "other"], headrank, "table", "model", *BASE, "--out", str(tmp_path / "out"))
    assert done.codes == [1, 0]
    assert done.err[0].startswith(f"Error: {said}")
    assert done.err[0].endswith(f"\n(process 1 of 2, on {socket.gethostname()})\n")
    assert done.err[0].count("Error:") == 1
    assert done.err[1] == ""
    assert nothing_is_left(tmp_path)


@pytest.mark.parametrize("words", [["table", "nowhere"], ["inspect", "nowhere"]])
def test_what_the_first_process_refuses_is_said_once(words: list[str], model: Path, tmp_path: Path) -> None:
    done = ran(tmp_path, [model] * 3, headrank, *words)
    assert (done.codes, done.err) == ([1, 0, 0], ["Error: nowhere: no such file or folder\n", "", ""])


def small_memory(*words: str) -> None:
    run_batch = forward._run_batch

    def crowded(runner: Any, sequences: Any, batch: slice, *rest: Any) -> None:
        if os.environ["RANK"] == "1" and batch.stop - batch.start > 2:
            raise torch.OutOfMemoryError
        run_batch(runner, sequences, batch, *rest)

    forward._run_batch = crowded
    headrank(*words)


def test_memory_that_one_process_lacks_makes_its_own_batches_smaller(model: Path, alone: dict[str, Measurement], tmp_path: Path) -> None:
    done = ran(tmp_path, [model] * 2, small_memory, "measure", "model", *BASE, "--no-null", "-o", str(tmp_path / "found"))
    assert done.codes == [0, 0]
    assert done.err == [f"process 1: out of memory; going on with 1 sequences a batch\nWrote {tmp_path / 'found'}\n", ""]
    (file,) = (tmp_path / "store").iterdir()
    found = Store(file.parent).find(file.stem)
    assert found is not None
    for name, gram in alone["operator"].grams.items():
        assert_close(found.grams[name].sum(0), gram.sum(0))


class Dies(Silent):
    """Ends the process before its own batch of that number."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def advance(self, done: int) -> None:
        if self.left == 0:
            os._exit(9)
        self.left -= 1


def interrupted(store: Path, at: tuple[int, int] | None) -> None:
    resume.SAVE_EVERY, resume.LARGEST_SHARE = 0.0, float("inf")
    rank = int(os.environ["RANK"])
    settings = replace(SETTINGS, n_sequences=17)
    if at is not None:
        measure.Silent = lambda: Dies(at[rank])  # type: ignore[assignment, misc]
    batches: list[int] = []
    run_batch = forward._run_batch

    def counting(*given: Any) -> None:
        batches.append(given[2].start)
        run_batch(*given)

    forward._run_batch = counting
    try:
        with processes.company(measure.do_share):
            measure.measure(ModelRef(label="m", path="model"), settings, store=Store(store))
    finally:
        print(*batches)


def test_a_pass_that_was_interrupted_goes_on_in_every_process_to_the_same_bits(model: Path, tmp_path: Path) -> None:
    assert ran(tmp_path, [model] * 2, interrupted, tmp_path / "whole", None).codes == [0, 0]
    assert ran(tmp_path, [model] * 2, interrupted, tmp_path / "broken", (5, 3)).codes == [9, 9]
    assert len(list((tmp_path / "broken").glob("*.pass"))) == 2
    done = ran(tmp_path, [model] * 2, interrupted, tmp_path / "broken", None)
    assert done.out == ["5 6 7 8\n", "12 13 14 15 16\n"]
    (file,) = (tmp_path / "broken").iterdir()
    assert file.read_bytes() == (tmp_path / "whole" / file.name).read_bytes()
    ran(tmp_path, [model] * 2, interrupted, tmp_path / "other", (5, 3))
    done = ran(tmp_path, [model] * 3, interrupted, tmp_path / "other", None)  # sums of other shares are left alone
    assert done.out == ["0 1 2 3 4 5\n", "6 7 8 9 10 11\n", "12 13 14 15 16\n"]


def told_to_stop(*words: str) -> None:
    """The first process gets torchrun's signal in its third batch; the other one is at work."""
    run_batch = forward._run_batch
    calls: list[int] = []

    def stopping(*given: Any) -> None:
        calls.append(1)
        if len(calls) == 3 and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGTERM)
        run_batch(*given)

    forward._run_batch = stopping
    headrank(*words)


def test_a_process_that_torchrun_stops_says_so_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    done = ran(tmp_path, [model] * 2, told_to_stop, "table", "model", *BASE, "--batch-size", "1", "--out", str(tmp_path / "out"))
    assert done.codes == [143, 1]
    assert done.err == ["Error: told to stop, as torchrun does when another process was lost\n", ""]
    assert nothing_is_left(tmp_path)


# The program


def environment(rank: int = 0, **changes: str) -> dict[str, str]:
    return {"RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": f"{rank}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531", **changes}


@pytest.mark.parametrize("changes", [{"LOCAL_RANK": ""}, {"RANK": ""}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "two"}, {"MASTER_PORT": ""}])
def test_a_process_is_alone_where_torchrun_did_not_start_it(changes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(**changes).items():
        monkeypatch.setenv(name, value)
    assert processes.started() is None


def test_a_process_that_torchrun_started_knows_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(1).items():
        monkeypatch.setenv(name, value)
    found = processes.started()
    assert found is not None
    assert (found.rank, found.world, found.local_rank) == (1, 2, 1)


@pytest.mark.parametrize(("words", "codes"), [(["--help"], (0, 0)), (["table", "--bogus"], (2, 0)), (["table", "--help"], (0, 0))])
def test_help_and_wrong_usage_need_no_other_process(words: list[str], codes: tuple[int, int]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "headrank", *words]
    done = [subprocess.run(command, env=os.environ | environment(rank), capture_output=True, text=True, timeout=60, check=False) for rank in (0, 1)]
    assert (done[0].returncode, done[1].returncode) == codes
    imports, said = ([[line for line in one.stderr.splitlines() if line.startswith("import time:") == timed] for one in done] for timed in (True, False))
    assert not any(line.endswith(" torch") for line in imports[0] + imports[1])
    assert done[0].stdout or said[0]
    assert (done[1].stdout, said[1]) == ("", [])


def torchrun(n: int, *words: str, folder: Path, store: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), "-m", "headrank", *words]
    paths = os.pathsep.join(filter(None, [str(TOP), os.environ.get("PYTHONPATH")]))
    surroundings = os.environ | {"HEADRANK_CACHE": str(store), "PYTHONPATH": paths}
    return subprocess.Popen(command, cwd=folder, env=surroundings, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_torchrun_starts_it_and_its_own_processes_are_gone_afterwards(model: Path, alone: dict[str, Measurement], tmp_path: Path) -> None:
    words = ["measure", "model", *BASE, "--batch-size", "1", "--no-null", "--quiet", "-o", str(tmp_path / "found")]
    process = torchrun(2, *words, folder=model, store=tmp_path / "store")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out == ""
    (file,) = (tmp_path / "store").iterdir()
    found = Store(file.parent).find(file.stem)
    assert found is not None
    for name, gram in alone["operator"].grams.items():
        assert_close(found.grams[name].sum(0), gram.sum(0))


def workers_of(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields, command = status.read_text().rpartition(")")[2].split(), (status.parent / "cmdline").read_text()
        except OSError:
            continue
        if int(fields[1]) == pid and "headrank" in command:
            found.append(int(status.parent.name))
    return sorted(found)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_torchrun_ends_all_when_one_is_killed(model: Path, tmp_path: Path) -> None:
    words = ["table", "model", "--tokens", "ids.npy", "--seq-len", "2", "--sequences", "100", "--batch-size", "1", "--out", str(tmp_path / "out")]
    process = torchrun(2, *words, folder=model, store=tmp_path / "store")
    end = time.monotonic() + 180
    while len(workers := workers_of(process.pid)) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(workers[-1], signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "SIGKILL" in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert nothing_is_left(tmp_path)
