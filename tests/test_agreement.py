"""Weights against activations: rank correlation over pairs of heads, and what `agree` writes of it."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrank.agreement import Agreement, LayerAgreement, ModelAgreement, layer_agreement, model_agreement, spearman
from headrank.agreement_figure import agreement_figure
from headrank.agreement_tables import agreement_cells, agreement_document, agreement_rows
from headrank.cli import app
from headrank.config import ModelConfig
from headrank.store import LayerFacts, Measurement
from headrank.tables import csv_lines, json_text
from tests.plain import decoder
from tests.sample_results import TOKENS, facts

FACTS = LayerFacts(index=3, n_head=7, n_kv_head=7)


def plain_spearman(x: list[float], y: list[float]) -> float:
    """Pearson's correlation of ranks that are counted one by one."""

    def ranks(values: list[float]) -> list[float]:
        return [sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2 for value in values]

    return float(np.corrcoef(ranks(x), ranks(y))[0, 1])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=23))
def test_rank_correlation_is_the_one_of_ranks_counted_one_by_one(pairs: list[tuple[int, int]]) -> None:
    x, y = (np.array(values, dtype=float) for values in zip(*pairs, strict=True))
    found = float(spearman(x, y))
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert math.isnan(found)
    else:
        assert found == pytest.approx(plain_spearman(list(x), list(y)), abs=1e-12)


@given(st.integers(0, 2**32))
def test_rank_correlation_sees_order_alone(seed: int) -> None:
    random = np.random.default_rng(seed)
    x, y = random.normal(size=(2, 5, 11))
    np.testing.assert_allclose(spearman(np.exp(3 * x), y**3), spearman(x, y), atol=1e-12)
    np.testing.assert_allclose(spearman(x, -y), -spearman(x, y), atol=1e-12)
    np.testing.assert_allclose(spearman(x, x), 1, atol=1e-12)


def gram(seed: int, n_head: int = 7) -> np.ndarray:
    heads = np.random.default_rng(seed).normal(size=(n_head, 11))
    return heads @ heads.T


def groups(base: np.ndarray, *, noise: float, n: int = 16) -> np.ndarray:
    """[n, H, H]: Gram matrices of sequences that differ from one another by noise."""
    random = np.random.default_rng(1)
    heads = [np.linalg.cholesky(base + 1e-9 * np.eye(len(base))) + noise * random.normal(size=base.shape) for _ in range(n)]
    return np.stack([h @ h.T for h in heads])


def test_the_same_matrix_in_other_sizes_agrees_wholly() -> None:
    base = gram(0)
    scale = np.outer(*[np.arange(1.0, 8.0)] * 2)
    found = layer_agreement((base * scale)[None], groups(base, noise=0), FACTS)
    assert found.correlation == pytest.approx(1)
    assert found.n_pairs == 21
    assert found.interval == pytest.approx((1, 1))


def test_an_interval_is_over_sequences_and_narrows_with_them() -> None:
    base = gram(2)
    wide, narrow = (layer_agreement(gram(3)[None], groups(base, noise=0.5, n=n), FACTS) for n in (9, 90))
    for found in (wide, narrow):
        assert found.interval is not None
        assert found.correlation is not None
        low, high = found.interval
        assert -1 <= low < high <= 1
    assert wide.interval is not None
    assert narrow.interval is not None
    assert narrow.interval[1] - narrow.interval[0] < wide.interval[1] - wide.interval[0]
    assert layer_agreement(gram(3)[None], groups(base, noise=0.5, n=1), FACTS).interval is None


def test_pairs_with_a_dead_head_do_not_count() -> None:
    weights, activations = gram(4), groups(gram(5), noise=0.1)
    dead = weights.copy()
    dead[2] = dead[:, 2] = 0
    found = layer_agreement(dead[None], activations, FACTS)
    keep = [0, 1, 3, 4, 5, 6]
    without = layer_agreement(weights[np.ix_(keep, keep)][None], activations[:, keep][:, :, keep], LayerFacts(index=3, n_head=6, n_kv_head=6))
    assert (found.n_pairs, without.n_pairs) == (15, 15)
    assert found.correlation == pytest.approx(without.correlation)


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        (gram(0, 2), "fewer than 3 pairs of heads that are not dead"),
        (np.eye(7), "all pairs of heads are equally alike: they have no order"),
        (np.zeros((7, 7)), "fewer than 3 pairs of heads that are not dead"),
    ],
)
def test_where_there_is_no_order_there_is_a_reason(weights: np.ndarray, reason: str) -> None:
    n = len(weights)
    found = layer_agreement(weights[None], groups(gram(1, n), noise=0.1), LayerFacts(index=0, n_head=n, n_kv_head=n))
    assert (found.correlation, found.interval, found.reason) == (None, None, reason)
    assert not found.is_fault


def test_rounding_breaks_no_ties() -> None:
    ones = np.ones((7, 7)) + 1e-12 * gram(6)
    assert layer_agreement(ones[None], groups(gram(1), noise=0.1), FACTS).reason == "all pairs of heads are equally alike: they have no order"


def measurement(source: str, grams: dict[str, np.ndarray], faults: dict[str, str]) -> Measurement:
    layers = tuple(LayerFacts(index=i, n_head=7, n_kv_head=7) for i in range(3))
    tokens = TOKENS if source == "activations" else None
    return Measurement(model=facts(3, 7), source=source, settings={}, tokens=tokens, layers=layers, grams=grams, faults=faults)


def model(label: str, *, scale: str | None = None, noise: float = 0.3) -> ModelAgreement:
    """Three layers: one that agrees somewhat, one that is spoilt, one without an order."""
    weights = measurement("weights", {"qk/0": gram(1)[None], "qk/1": gram(2)[None], "qk/2": np.eye(7)[None]}, {})
    grams = {"qk/0": groups(gram(1) + gram(7), noise=noise), "qk/2": groups(gram(3), noise=noise)}
    activations = measurement("activations", grams, {"qk/1": "layer 1: attention scores of head 4 are not finite in float16"})
    return model_agreement(weights, activations, ("qk", "qk"), weights.layers, label=label, scale=scale)


def results(*models: ModelAgreement) -> Agreement:
    return Agreement(circuit="qk", settings={"raw": False}, models=models or (model("A"),))


def test_a_spoilt_layer_is_a_fault_and_stays_out_of_the_mean() -> None:
    found = model("A")
    assert [layer.is_fault for layer in found.layers] == [False, True, False]
    assert found.mean == found.layers[0].correlation
    assert found.mean_interval == pytest.approx(found.layers[0].interval)
    assert results(found).faults == ["A: layer 1: attention scores of head 4 are not finite in float16"]


def test_the_document_has_null_and_a_reason_where_a_number_is_undefined() -> None:
    document = json.loads(json_text(agreement_document(results())))
    layers = document["models"][0]["layers"]
    assert layers[0]["correlation"] == pytest.approx(model("A").layers[0].correlation)
    assert len(layers[0]["interval"]) == 2
    assert layers[1] == {"layer": 1, "correlation": None, "pairs": 0, "reason": "layer 1: attention scores of head 4 are not finite in float16"}
    assert layers[2] == {"layer": 2, "correlation": None, "pairs": 21, "reason": "all pairs of heads are equally alike: they have no order"}
    assert document["interval"] == "95 % interval over the sequences that were fed (bootstrap); the weights are fixed"
    undefined = ModelAgreement(label="B", scale=None, model=facts(1, 7), layers=model("B").layers[2:], tokens=None, n_groups=1)
    assert agreement_document(results(undefined))["models"][0]["reason"] == "no layer has a rank correlation"


def test_rows_and_cells_say_the_same_as_the_document() -> None:
    columns, *rows = csv.reader(csv_lines(agreement_rows(results())).splitlines())
    assert columns == ["label", "scale", "group", "layer", "pairs", "correlation", "low", "high", "reason"]
    assert [row[3:6] for row in rows] == [["0", "21", str(model("A").layers[0].correlation)], ["1", "0", ""], ["2", "21", ""]]
    names, cells = agreement_cells(results(model("A", scale="128M"), model("A", scale="2.5B")))
    assert names == ("Model", "Mean correlation", "95 %", "Lowest", "Highest")
    assert [row[0] for row in cells] == ["A (128M)", "A (2.5B)"]
    assert cells[0][1] == f"{model('A').mean:.3f}"


def test_the_figure_has_a_panel_a_scale_and_a_line_a_model_with_gaps() -> None:
    figure = agreement_figure(results(model("A", scale="128M"), model("B", scale="128M"), model("A", scale="2.5B")))
    assert [ax.get_title() for ax in figure.axes] == ["128M", "2.5B"]
    first = figure.axes[0]
    assert [line.get_label() for line in first.lines] == ["A", "B", "No agreement"]
    assert first.lines[0].get_color() == figure.axes[1].lines[0].get_color() != first.lines[1].get_color()
    np.testing.assert_allclose(np.asarray(first.lines[0].get_ydata(), dtype=float), [model("A").mean or 0, np.nan, np.nan])
    assert len(first.collections) == 2
    low, high = first.get_ylim()
    assert low < 0 < 1 < high
    assert "shaded:\u00a095\u00a0%\u00a0over\u00a0sequences" in figure.get_supxlabel().replace("\n", " ")


def test_a_negative_correlation_and_its_interval_are_in_sight() -> None:
    layer = LayerAgreement(facts=FACTS, correlation=-0.6, n_pairs=21, interval=(-0.9, -0.3))
    figure = agreement_figure(results(ModelAgreement(label="A", scale=None, model=facts(4, 7), layers=(layer,), tokens=TOKENS, n_groups=16)))
    assert figure.axes[0].get_ylim()[0] < -0.9


# The command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of three layers, and an empty store."""
    from safetensors.torch import save_file

    monkeypatch.setenv("HEADRANK_CACHE", str(tmp_path / "store"))
    config = ModelConfig(kind="gqa", n_kv_head=2, n_layer=3, n_head=6, d_head=10, d_model=13, d_mlp=17, vocab_size=256, context=19)
    path = tmp_path / "model"
    path.mkdir()
    save_file({name: p.detach().clone() for name, p in decoder(config).named_parameters()}, path / "model.safetensors")
    (path / "config.json").write_text(config.to_json())
    return path


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a headrank command."""
    with pytest.raises(SystemExit) as exit:
        app(list(words), prog_name="headrank")
    out, err = capsys.readouterr()
    return int(exit.value.code or 0), out, err


def test_agree_writes_figure_rows_and_document(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = command(capsys, "agree", str(folder), "--sequences", "11", "--out", str(tmp_path / "out"), "--json")
    assert code == 0, err
    document = json.loads(out)
    assert out == (tmp_path / "out" / "agree.json").read_text()
    assert [layer["layer"] for layer in document["models"][0]["layers"]] == [0, 1, 2]
    assert document["models"][0]["tokens"]["n_sequences"] == 11
    assert err.endswith(f"Wrote {tmp_path}/out/agree.png, {tmp_path}/out/agree.csv, {tmp_path}/out/agree.json\n")


@pytest.mark.parametrize(("name", "circuit"), [("operator", "ov"), ("keys", "qk"), ("values", "ov")])
def test_agree_compares_by_every_measure_that_both_sources_have(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, circuit: str
) -> None:
    words = ("agree", str(folder), "--sequences", "11", "--layer", "-1", "--out", str(tmp_path / "out"), "--json", "--circuit", circuit, "--measure", name)
    code, out, err = command(capsys, *words)
    assert code == 0, err
    document = json.loads(out)
    assert document["circuit"] == circuit
    assert document["settings"].get("measure", "operator") == name
    assert [(layer["layer"], "interval" in layer) for layer in document["models"][0]["layers"]] == [(2, name == "operator")]


def test_agree_refuses_a_measure_of_one_source_and_a_measurement_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = command(capsys, "agree", str(folder), "--measure", "cka", "--out", str(tmp_path / "out"))
    text = "agree compares weights with activations, and --measure cka is defined on one of them alone; take operator, keys, values"
    assert (code, err) == (1, f"Error: {text}\n")
    file = tmp_path / "model.measurement"
    assert command(capsys, "measure", str(folder), "--source", "weights", "--no-null", "-o", str(file))[0] == 0
    code, _, err = command(capsys, "agree", str(file), "--out", str(tmp_path / "out"))
    assert (code, err) == (1, f"Error: {file}: a measurement holds weights or activations, and agree needs both; give the checkpoint\n")


def test_agree_has_no_source_and_offsets_turn_the_weights_alone(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(capsys, "agree", str(folder), "--source", "weights")[0] == 2
    words = ("agree", str(folder), "--sequences", "11", "--out", str(tmp_path / "out"), "--json")
    found = [json.loads(command(capsys, *words, *offset)[1]) for offset in ((), ("--rope-offset", "3"))]
    assert found[1]["settings"]["rope_offset"] == 3
    plain, turned = ([layer["correlation"] for layer in document["models"][0]["layers"]] for document in found)
    assert plain != turned
