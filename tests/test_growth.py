"""How cost grows: operations that are counted are those that are done, and exponents of times that are known are found."""

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import typer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from headrank import gram
from headrank.config import ModelConfig
from headrank.forward import DecoderRunner, Recorder, pass_over
from headrank.store import LayerFacts
from headrank.tokens import Sequences
from scripts.benchmark_growth import ACTIVATIONS, LIMITS, WEIGHTS, Case, D, bare_operations, counting_operations, exponent, pass_operations, weights_operations
from tests.plain import checkpoint_of, decoder

SCRIPTS = Path(__file__).parent.parent / "scripts"
CASE = Case(layers=2, heads=3, d_model=70, sequences=2, seq_len=29)
ALL_PAIRS = CASE.seq_len**2  # a single block of rows is worked on: pairs that causality forbids as well
GROUPS = torch.arange(CASE.sequences)
LAYERS = [LayerFacts(index=index, n_head=CASE.heads, n_kv_head=CASE.heads) for index in range(CASE.layers)]
COUNTED = {"weights": (WEIGHTS, weights_operations), "activations": (ACTIVATIONS, pass_operations), "counting": (ACTIVATIONS, counting_operations)}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("benchmark")


@pytest.fixture(scope="module")
def runner() -> DecoderRunner:
    config = ModelConfig(kind="mha", context=CASE.seq_len, **CASE.geometry)
    return DecoderRunner(checkpoint_of(decoder(config))[0], device=torch.device("cpu"), dtype=torch.float32)


def done(work: Callable[[], Any]) -> int:
    """Operations of matrix products that torch sees."""
    of_rows = {torch.ops.mkldnn._linear_pointwise: lambda a, b, *_, **__: 2 * a[0] * a[1] * b[0]} if gram.HAS_ONEDNN else {}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=of_rows) as counter:
        work()
    return counter.get_total_flops()


@pytest.mark.parametrize("power", [0.5, 1, 2])
def test_the_exponent_of_a_power_is_found(power: float) -> None:
    assert exponent([3, 7, 19], [5 * size**power for size in (3, 7, 19)]) == pytest.approx(power)


def test_a_bare_pass_does_what_is_counted(runner: DecoderRunner) -> None:
    ids = torch.zeros(CASE.sequences, CASE.seq_len, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH):  # written out in products that are counted
        assert done(lambda: runner.model.hidden(ids, last_layer=CASE.layers - 1)) == bare_operations(CASE, ALL_PAIRS)


def test_a_pass_does_what_is_counted(runner: DecoderRunner) -> None:
    N, T = CASE.sequences, CASE.seq_len
    sequences = Sequences(ids=np.zeros((N, T), dtype=np.int32), lengths=np.full(N, T), source="zeros")
    assert done(lambda: pass_over(runner, sequences, LAYERS, ("qk", "ov"), device=torch.device("cpu"), batch_size=None, n_groups=N)) == (
        pass_operations(CASE, ALL_PAIRS)
    )


def test_counting_does_what_is_counted() -> None:
    q = torch.randn(CASE.sequences, CASE.heads, CASE.seq_len, D)
    W_O = torch.randn(CASE.heads, D, CASE.d_model)

    def work() -> None:
        recorder = Recorder(LAYERS, ("qk", "ov"), n_groups=CASE.sequences)
        recorder.begin_batch(GROUPS, None)
        for layer in LAYERS:
            recorder.scores(layer.key, q, q, scaling=1.0)
            recorder.outputs(layer.key, q.transpose(1, 2), lambda: W_O)
        recorder.grams(center=True)

    assert done(work) == counting_operations(CASE, ALL_PAIRS)


def test_weights_take_what_is_counted() -> None:
    heads = range(5)
    left, right = torch.randn(5, 70, D), torch.randn(5, 70, D)
    one_circuit = weights_operations(Case(layers=1, heads=5, d_model=70)) // 2
    assert done(lambda: gram.factored_gram(left, right, heads, heads)) == one_circuit


def test_causality_allows_a_query_the_keys_up_to_itself() -> None:
    pairs = sum(1 for query in range(29) for key in range(29) if key <= query)
    for operations in (bare_operations, pass_operations, counting_operations):
        assert operations(CASE) == operations(CASE, pairs)


@pytest.mark.parametrize("name", COUNTED)
def test_only_the_quantity_itself_grows_and_by_one_factor(name: str) -> None:
    series, _ = COUNTED[name]
    for quantity, cases in series.items():
        sizes = np.array([getattr(case, quantity) for case in cases])
        assert len(set(sizes[1:] / sizes[:-1])) == 1
        assert len(sizes) >= 3
        field = "sequences" if quantity == "tokens" else quantity
        assert len({replace(case, **{field: 1}) for case in cases}) == 1


@pytest.mark.parametrize("name", COUNTED)
def test_counts_grow_in_the_limit_as_is_said(name: str) -> None:
    series, operations = COUNTED[name]
    for quantity, cases in series.items():
        field = "sequences" if quantity == "tokens" else quantity
        sizes = [10**8, 10**9]
        assert exponent(sizes, [operations(replace(cases[0], **{field: size})) for size in sizes]) == pytest.approx(LIMITS[name][quantity], abs=0.001)


@pytest.fixture
def small(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Sizes that take no time, and jobs that run in this process."""
    cases = [benchmark.Case(layers, 2, 32, sequences=2, seq_len=5) for layers in (1, 2, 4)]
    monkeypatch.setattr(benchmark, "WEIGHTS", {"layers": cases})
    monkeypatch.setattr(benchmark, "ACTIVATIONS", {"layers": cases})
    jobs = importlib.import_module("benchmark_jobs")
    monkeypatch.setattr(benchmark, "run", lambda command: getattr(jobs, command[-2])(**json.loads(command[-1])))
    return benchmark


def test_the_section_shows_times_beside_both_exponents(small: ModuleType, tmp_path: Path) -> None:
    report = small.Report(runs=1, folder=tmp_path, device="cpu")
    small.growth(report)
    found = json.loads(json.dumps(report.numbers))["growth"]
    assert list(found) == list(COUNTED)
    for name, its in found.items():
        assert list(its["layers"]) == ["sizes", "seconds", "exponent", "expected", "limit"]
        assert its["layers"]["sizes"] == [1, 2, 4]
        assert min(its["layers"]["seconds"]) > 0
        [said] = [said for what, _, _, said in report.rows if what == f"growth {name}: layers"]
        assert float(said.split()[1].rstrip(",")) == pytest.approx(its["layers"]["exponent"], abs=0.01)  # both rounded
    assert not list(tmp_path.iterdir())


def test_times_that_grow_as_operations_do_have_the_exponents_that_are_expected(small: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str]) -> dict[str, float]:
        options = json.loads(command[-1])
        layers = json.loads(Path(options["path"], "config.json").read_text())["n_layer"]
        case = next(case for case in small.WEIGHTS["layers"] if case.layers == layers)
        if command[-2] == "weights":
            return {"seconds": small.weights_operations(case)}
        return {"seconds": small.pass_operations(case), "counting": small.counting_operations(case)}

    monkeypatch.setattr(small, "run", run)
    report = small.Report(runs=2, folder=tmp_path, device="cpu")
    small.growth(report)
    for its in report.numbers["growth"].values():
        assert its["layers"]["exponent"] == its["layers"]["expected"] == pytest.approx(1, abs=0.3)
    assert report.numbers["growth"]["activations"]["layers"]["expected"] != 1  # the last layer's MLP is not run


def test_growth_refuses_a_device_that_it_does_not_count_for(benchmark: ModuleType) -> None:
    with pytest.raises(typer.BadParameter, match="leave out --device"):
        benchmark.main(section=[benchmark.Section.growth], device="cuda")
