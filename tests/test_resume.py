"""Interrupted measurements go on to the same bits, and nothing of other settings is ever taken up."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrank import forward, measure, resume
from headrank.accumulators import OutputGram, ScoreGram
from headrank.config import ModelConfig
from headrank.measure import Settings, Silent
from headrank.model import new_decoder
from headrank.moments import HeadMoments
from headrank.resume import SavedPass
from headrank.selection import ModelRef
from headrank.store import Measurement, Store

GEOMETRY: dict[str, Any] = {"n_layer": 3, "n_head": 6, "d_head": 10, "d_model": 13, "d_mlp": 17, "vocab_size": 31, "context": 19}
N, T, BATCH = 23, 11, 3  # eight batches, the last one smaller
SETTINGS = Settings(n_sequences=N, seq_len=T, batch_size=BATCH)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and token ids beside it."""
    folder = tmp_path_factory.mktemp("model")
    config = ModelConfig(kind="gqa", n_kv_head=2, **GEOMETRY)
    (folder / "config.json").write_text(config.to_json())
    save_file({name: p.detach() for name, p in new_decoder(config, seed=5).named_parameters()}, folder / "model.safetensors")
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(31, size=N * T))
    return folder


class Killed(Exception):  # noqa: N818 (no error)
    """Stands for the end of the process."""


class Dies(Silent):
    """Ends the pass before the batch that begins with sequence `at`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def advance(self, done: int) -> None:
        if done >= self.at * T:  # in tokens
            raise Killed


def measured(model: Path, store: Path, progress: Silent | None = None, **changes: Any) -> Measurement:
    settings = replace(SETTINGS, tokens=(model / "ids.npy",), **changes)
    return measure.measure(ModelRef(label="m", path=str(model)), settings, store=Store(store), progress=progress)


def same_bits(one: Measurement, other: Measurement) -> bool:
    return one.grams.keys() == other.grams.keys() and all(np.array_equal(one.grams[name], other.grams[name]) for name in one.grams)


@pytest.fixture
def save_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(resume, "LARGEST_SHARE", float("inf"))


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """First sequences of the batches that are run."""
    starts: list[int] = []
    run_batch = forward._run_batch

    def counting(runner: Any, sequences: Any, batch: slice, *rest: Any) -> None:
        starts.append(batch.start)
        run_batch(runner, sequences, batch, *rest)

    monkeypatch.setattr(forward, "_run_batch", counting)
    return starts


@pytest.mark.usefixtures("save_always")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["operator", "cka", "keys"])
def test_a_pass_that_is_interrupted_anywhere_goes_on_to_the_same_bits(kind: str, dtype: str, model: Path, tmp_path: Path, batches: list[int]) -> None:
    whole = measured(model, tmp_path / "whole", measure=kind, dtype=dtype)
    for at in range(BATCH, N, BATCH):
        with pytest.raises(Killed):
            measured(model, tmp_path / f"{at}", Dies(at), measure=kind, dtype=dtype)
        batches.clear()
        progress = Silent()
        resumed = measured(model, tmp_path / f"{at}", progress, measure=kind, dtype=dtype)
        assert same_bits(resumed, whole)
        assert batches == list(range(at, N, BATCH))
        assert progress.remarks == [f"going on after {at} of {N} sequences, where an earlier pass was interrupted"]


@pytest.mark.usefixtures("save_always")
def test_a_pass_may_be_interrupted_again_and_again(model: Path, tmp_path: Path) -> None:
    whole = measured(model, tmp_path / "whole")
    for at in (3, 6, 9, 15, 21):
        with pytest.raises(Killed):
            measured(model, tmp_path / "resumed", Dies(at))
    assert same_bits(measured(model, tmp_path / "resumed"), whole)


SCRIPT = """
import os, signal, sys
from pathlib import Path
from headrank import resume
from tests.test_resume import Silent, measured
resume.SAVE_EVERY, resume.LARGEST_SHARE = 0.0, float("inf")
class Kills(Silent):
    def advance(self, done):
        if done >= int(sys.argv[3]) * 11:
            os.kill(os.getpid(), signal.SIGKILL)
measured(Path(sys.argv[1]), Path(sys.argv[2]), Kills())
"""


def test_a_process_that_is_killed_leaves_what_another_goes_on_from(model: Path, tmp_path: Path, batches: list[int]) -> None:
    for at in (6, 15):
        done = subprocess.run([sys.executable, "-c", SCRIPT, model, tmp_path / "killed", str(at)], cwd=Path(__file__).parent.parent, check=False)
        assert done.returncode == -signal.SIGKILL
    resumed = measured(model, tmp_path / "killed")
    assert batches == list(range(15, N, BATCH))
    assert same_bits(resumed, measured(model, tmp_path / "whole"))


@pytest.mark.usefixtures("save_always")
@pytest.mark.parametrize(
    "changes",
    [{"batch_size": 4}, {"batch_size": None}, {"skip_first": 2}, {"seed": 1}, {"n_sequences": 22}, {"seq_len": 10}, {"dtype": "bfloat16"}, {"measure": "cka"}],
    ids=str,
)
def test_what_was_saved_for_other_settings_is_never_used(changes: dict[str, Any], model: Path, tmp_path: Path, batches: list[int]) -> None:
    with pytest.raises(Killed):
        measured(model, tmp_path / "store", Dies(12))
    batches.clear()
    found = measured(model, tmp_path / "store", **changes)
    assert batches[0] == 0
    assert same_bits(found, measured(model, tmp_path / "fresh", **changes))


@pytest.mark.usefixtures("save_always")
def test_what_was_saved_of_another_checkpoint_is_never_used(model: Path, tmp_path: Path, batches: list[int]) -> None:
    with pytest.raises(Killed):
        measured(model, tmp_path, Dies(12))
    os.utime(model / "model.safetensors", (1, 1))  # it may have changed
    batches.clear()
    measured(model, tmp_path)
    assert batches[0] == 0


@pytest.mark.usefixtures("save_always")
def test_layers_are_part_of_what_was_saved(model: Path, tmp_path: Path, batches: list[int]) -> None:
    with pytest.raises(Killed):
        measured(model, tmp_path, Dies(12))
    batches.clear()
    settings = replace(SETTINGS, tokens=(model / "ids.npy",))
    measure.measure(ModelRef(label="m", path=str(model)), settings, layers=lambda layers: [1], store=Store(tmp_path))
    assert batches[0] == 0


def test_nothing_is_left_when_the_pass_is_done(model: Path, tmp_path: Path, save_always: None) -> None:
    with pytest.raises(Killed):
        measured(model, tmp_path, Dies(12))
    assert [path.suffix for path in tmp_path.iterdir()] == [".pass"]
    measured(model, tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]


def test_a_short_pass_saves_nothing_on_its_way(model: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        measured(model, tmp_path / "store", Dies(21))
    assert not (tmp_path / "store").exists()


@pytest.mark.usefixtures("save_always")
@pytest.mark.parametrize("content", [b"", b"broken", None])
def test_a_broken_file_counts_as_none(content: bytes | None, model: Path, tmp_path: Path, batches: list[int]) -> None:
    with pytest.raises(Killed):
        measured(model, tmp_path / "store", Dies(12))
    (path,) = (tmp_path / "store").iterdir()
    path.write_bytes(path.read_bytes()[:-5] if content is None else content)
    batches.clear()
    found = measured(model, tmp_path / "store")
    assert batches[0] == 0
    assert same_bits(found, measured(model, tmp_path / "fresh"))


@pytest.mark.usefixtures("save_always")
def test_two_processes_at_the_same_pass_do_not_disturb_each_other(model: Path, tmp_path: Path) -> None:
    """One is begun within each batch of the other, on the same store, and each takes up whatever lies there."""
    whole = measured(model, tmp_path / "whole")

    class Both(Silent):
        inner: list[Measurement]

        def advance(self, done: int) -> None:
            if done in (6 * T, 18 * T):
                self.inner.append(measured(model, tmp_path / "shared", **({"n_sequences": 22} if done == 6 * T else {})))
            if done == 12 * T:
                with pytest.raises(Killed):
                    measured(model, tmp_path / "shared", Dies(21))  # it leaves sums of further on than the outer pass is

    both = Both()
    both.inner = []
    assert same_bits(measured(model, tmp_path / "shared", both), whole)
    assert same_bits(both.inner[1], whole)
    assert [path.suffix for path in (tmp_path / "shared").iterdir()] == [".safetensors", ".safetensors"]


@pytest.mark.usefixtures("save_always")
def test_a_batch_size_that_memory_forced_is_kept(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: list[int]) -> None:
    run_batch = forward._run_batch

    def small_memory(runner: Any, sequences: Any, batch: slice, *rest: Any) -> None:
        if batch.stop - batch.start > 5:
            raise torch.OutOfMemoryError
        run_batch(runner, sequences, batch, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(forward, "_run_batch", small_memory)
        whole = measured(model, tmp_path / "whole", batch_size=None)
        with pytest.raises(Killed):
            measured(model, tmp_path / "store", Dies(15), batch_size=None)
    batches.clear()
    resumed = measured(model, tmp_path / "store", batch_size=None)  # memory would do for all 23 now
    assert batches == [15, 20]
    assert same_bits(resumed, whole)


def test_a_store_that_cannot_be_written_is_said_once_and_the_pass_goes_on(model: Path, tmp_path: Path, save_always: None) -> None:
    (tmp_path / "file").write_text("")
    progress = Silent()
    found = measured(model, tmp_path / "file", progress)
    assert same_bits(found, measured(model, tmp_path / "fresh"))
    assert [remark.partition(": ")[2].partition(":")[0] for remark in progress.remarks] == [
        "this pass could not be continued if it were interrupted",
        "measurements are not kept",
    ]


def test_saving_takes_a_small_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    saved = SavedPass(tmp_path, key="k")
    taken: list[float] = []

    def slow_state() -> Mapping[str, Tensor]:
        taken.append(clock[0])
        clock[0] += 10  # seconds that it takes
        return {"qk/0/sums": torch.zeros(2)}

    while clock[0] < 1000:
        saved.offer(slow_state, done=1, batch_size=1)
        clock[0] += 1
    assert taken == [60, 270, 480, 690, 900]  # 10 of every 210 seconds


def test_what_nobody_came_back_to_for_a_month_is_removed(tmp_path: Path, save_always: None) -> None:
    old, lately, kept = tmp_path / "a.pass", tmp_path / "b.pass", tmp_path / "c.safetensors"
    for path, age in ((old, 31), (lately, 29), (kept, 99)):
        path.write_text("")
        os.utime(path, (time.time() - age * 86400,) * 2)
    SavedPass(tmp_path, key="k").offer(lambda: {"x": torch.zeros(1)}, done=1, batch_size=1)
    assert not old.exists()
    assert lately.exists()
    assert kept.exists()


SIZES = torch.tensor([1.0, 1e9, 1e-9]).view(3, 1, 1)  # of heads in the first batch: two of them are brought to another scale, and stay there


def scores(batches: range, onto: ScoreGram) -> Tensor:
    for batch in batches:
        q, k = torch.randn(2, 2, 3, 5, 4, generator=torch.Generator().manual_seed(batch))
        onto.add(q * SIZES * 100**batch, k, scaling=0.5, groups=torch.tensor([0, 1]))
    return onto.grams()


def outputs(batches: range, onto: OutputGram) -> Tensor:
    for batch in batches:
        z = torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(batch)) + 3
        onto.add(z * SIZES.view(3, 1) * 100**batch, groups=torch.tensor([0, 1]))
    return onto.grams()


def moments(batches: range, onto: HeadMoments) -> Tensor:
    for batch in batches:
        onto.add(torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(batch)) + 3, keep=torch.ones(2, 5, dtype=torch.bool) if batch else NOTHING)
    return onto.covariance()


NOTHING = torch.zeros(2, 5, dtype=torch.bool)
CPU = torch.device("cpu")
ACCUMULATORS: dict[str, tuple[Callable[[], Any], Callable[[range, Any], Tensor]]] = {
    "scores": (lambda: ScoreGram(3, 2, CPU), scores),
    "outputs": (lambda: OutputGram(torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(9)), 2), outputs),
    "moments": (lambda: HeadMoments(3, 4, CPU), moments),
}


@pytest.mark.parametrize("n_batches", [0, 1, 2])
@pytest.mark.parametrize("name", ACCUMULATORS)
def test_an_accumulator_goes_on_from_its_state_with_heads_of_any_size(name: str, n_batches: int, tmp_path: Path) -> None:
    """n_batches: before the interruption; the first batch of moments is padding alone."""
    make, feed = ACCUMULATORS[name]
    whole, first, second = make(), make(), make()
    feed(range(n_batches), first)
    save_file(first.state(), tmp_path / "state")
    second.restore(load_file(tmp_path / "state"))
    assert torch.equal(feed(range(n_batches, 4), second), feed(range(4), whole))


# Many checkpoints and layers


def test_checkpoints_that_are_finished_are_not_measured_again(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []
    load_runner: Callable[..., Any] = forward.load_runner

    def counting(checkpoint: Any, *given: Any, **named: Any) -> Any:
        loads.append(checkpoint.path.name)
        return load_runner(checkpoint, *given, **named)

    monkeypatch.setattr(forward, "load_runner", counting)
    copies = [tmp_path / name for name in "abc"]
    for number, copy in enumerate(copies):
        copy.mkdir()
        for file in ("config.json", "ids.npy"):
            (copy / file).write_bytes((model / file).read_bytes())
        config = ModelConfig(kind="gqa", n_kv_head=2, **GEOMETRY)
        save_file({name: p.detach() for name, p in new_decoder(config, seed=number).named_parameters()}, copy / "model.safetensors")
    store = tmp_path / "store"
    measured(copies[0], store)
    with pytest.raises(Killed):
        measured(copies[1], store, Dies(6))
    for copy in copies:
        measured(copy, store)
    assert loads == ["a", "b", "b", "c"]


def test_layers_of_a_large_checkpoint_are_kept_while_others_are_measured(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "KEEP_EVERY", 0.0)
    whole = measured(model, tmp_path / "whole", source="weights")
    done: list[str] = []
    gram = measure._WeightsWork.gram

    def stopping(self: Any, checkpoint: Any, layer: Any, circuit: str, **options: Any) -> Any:
        if (layer.index, circuit) == (2, "ov") and not done.count("stopped"):
            done.append("stopped")
            raise KeyboardInterrupt
        done.append(f"{circuit}/{layer.index}")
        return gram(self, checkpoint, layer, circuit, **options)

    monkeypatch.setattr(measure._WeightsWork, "gram", stopping)
    with pytest.raises(KeyboardInterrupt):
        measured(model, tmp_path / "store", source="weights")
    resumed = measured(model, tmp_path / "store", source="weights")
    assert done == ["qk/0", "ov/0", "qk/1", "ov/1", "qk/2", "stopped", "qk/2", "ov/2"]
    assert same_bits(resumed, whole)
