import csv
import io
import json
import math
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from headrank import tables
from headrank.results import ModelResult, Null, Results, layer_result
from headrank.store import LayerFacts
from headrank.tables import csv_text, document, json_text, render, rows
from tests.sample_results import TOKENS, VARIANTS, facts, model, results

# Two heads at 60 degrees: similarity 0.5, eigenvalues 1.5 and 0.5.
SIXTY = np.array([[4.0, 1.0], [1.0, 1.0]])
RANK = math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))


@pytest.fixture(autouse=True)
def known_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "version", lambda name: {"headrank": "1.2.3"}[name])


def two_heads(label: str = "a", *, scale: str | None = "nano", trained: dict[str, Any] | None = None) -> ModelResult:
    """Layers 2 (heads at 60 degrees), 3 (a fault) and 5 (head 1 dead)."""
    dead = np.diag([4.0, 0.0])
    layers = [
        layer_result(SIXTY[None], LayerFacts(index=2, n_head=2, n_kv_head=2), is_centered=False),
        layer_result(None, LayerFacts(index=3, n_head=2, n_kv_head=2, window=31), is_centered=False, fault="layer 3: c_q.weight holds NaN in head 0"),
        layer_result(dead[None], LayerFacts(index=5, n_head=2, n_kv_head=1, group="decoder"), is_centered=False),
    ]
    known = facts(7, 2) if trained is None else type(facts(7, 2))(**{**vars(facts(7, 2)), "trained": trained})
    return ModelResult(label=label, scale=scale, model=known, layers=tuple(layers), tokens=TOKENS)


def shown(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


def rendered(of: Results, *, width: int = 80, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    render(of, Console(file=stream, width=width))
    stream.flush()
    return raw.getvalue().decode(encoding)


def test_the_document_of_effective_ranks_is_exactly_this() -> None:
    of = results("effrank", [two_heads(trained={"tokens_seen": 11})])
    assert json.loads(json_text(document(of))) == {
        "schema": 1,
        "command": "effrank",
        "version": "1.2.3",
        "source": "activations",
        "circuit": "qk",
        "centered": False,
        "raw": False,
        "settings": {"seed": 0},
        "tokens": TOKENS,
        "models": [
            {
                "label": "a",
                "scale": "nano",
                "checkpoint": "checkpoints/mha",
                "fingerprint": "sha256:0123",
                "family": "headrank",
                "kind": "mha",
                "n_layer": 7,
                "n_head": 2,
                "n_kv_head": 2,
                "d_model": 26,
                "d_head": 13,
                "n_parameters": 1009,
                "kv_values_per_token": 364,
                "trained": {"tokens_seen": 11},
                "mean_effective_rank": pytest.approx((RANK + 1) / 2),
                "percent_of_heads": pytest.approx(50 * (RANK + 1) / 2),
                "percent_of_attainable": pytest.approx(50 * (RANK + 1) / 2),
                "layers_in_mean": 2,
                "layers": [
                    {
                        "layer": 2,
                        "effective_rank": pytest.approx(RANK),
                        "percent_of_heads": pytest.approx(50 * RANK),
                        "percent_of_attainable": pytest.approx(50 * RANK),
                        "n_components": 2,
                        "mean_off_diagonal": 0.5,
                        "most_similar": {"similarity": 0.5, "heads": [0, 1]},
                        "dead_heads": [],
                        "relative_depth": pytest.approx(2 / 6),
                    },
                    {
                        "layer": 3,
                        "window": 31,
                        "effective_rank": None,
                        "percent_of_heads": None,
                        "percent_of_attainable": None,
                        "n_components": None,
                        "mean_off_diagonal": None,
                        "most_similar": None,
                        "dead_heads": [],
                        "reason": "layer 3: c_q.weight holds NaN in head 0",
                        "relative_depth": pytest.approx(3 / 6),
                    },
                    {
                        "layer": 5,
                        "group": "decoder",
                        "n_head": 2,
                        "n_kv_head": 1,
                        "effective_rank": 1.0,
                        "percent_of_heads": 50.0,
                        "percent_of_attainable": 50.0,
                        "n_components": 1,
                        "mean_off_diagonal": 0.0,
                        "most_similar": {"similarity": 0.0, "heads": [0, 1]},
                        "dead_heads": [1],
                        "relative_depth": pytest.approx(5 / 6),
                    },
                ],
            }
        ],
    }


def test_each_command_writes_what_it_computes_and_nothing_else() -> None:
    extra = {}
    for command in ("heatmap", "spectra", "effrank"):
        entry = document(results(command, [two_heads()]))["models"][0]
        extra[command] = (entry["layers"][0].keys() | entry.keys()) & {"similarity", "eigenvalues", "mean_effective_rank", "layers_in_mean"}
    assert extra == {"heatmap": {"similarity"}, "spectra": {"eigenvalues"}, "effrank": {"mean_effective_rank", "layers_in_mean"}}
    heatmap, spectra = (document(results(command, [two_heads()]))["models"][0]["layers"] for command in ("heatmap", "spectra"))
    assert [layer["similarity"] for layer in heatmap] == [[[1.0, 0.5], [0.5, 1.0]], None, [[1.0, 0.0], [0.0, 0.0]]]
    assert spectra[0]["eigenvalues"] == pytest.approx([1.5, 0.5])
    assert [layer["eigenvalues"] for layer in spectra[1:]] == [None, [1.0, 0.0]]


@pytest.mark.parametrize("command", ["heatmap", "spectra", "effrank"])
def test_every_null_has_a_reason_beside_it(command: str) -> None:
    models = [model("one head", layers=range(3), n_head=1, is_centered=c) for c in (False, True)] + [two_heads()]
    models.append(model("spoilt", layers=[0], faults={0: "layer 0: NaN"}))
    models.append(model("dead", layers=[0], n_head=3, dead={0: [0, 1, 2]}))
    written = json.loads(json_text(document(results(command, models))))
    undefined = 0
    for entry in [entry for of in written["models"] for entry in (of, *of["layers"])]:
        if None in [value for name, value in entry.items() if name != "scale"]:
            undefined += 1
            assert entry["reason"]
        else:
            assert "reason" not in entry
    assert undefined >= 7
    reasons = [layer["reason"] for layer in (written["models"][1]["layers"][0], written["models"][-1]["layers"][0])]
    assert reasons == ["one head: the centred matrix is zero; one head: there are no pairs", "every head is dead"]


def test_tokens_that_differ_stand_with_each_model() -> None:
    other = {**TOKENS, "seq_len": 31}
    written = document(results("effrank", [model("a", layers=[0]), model("b", layers=[0], tokens=other)]))
    assert written["tokens"] is None
    assert written["reason"] == "the models were fed different tokens: see each model"
    assert [entry["tokens"] for entry in written["models"]] == [TOKENS, other]
    weights = document(results("effrank", [model("a", layers=[0], tokens=None)], source="weights"))
    assert weights["tokens"] is None
    assert "reason" not in weights
    assert "tokens" not in weights["models"][0]


def test_json_never_holds_a_nan() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_text({"value": math.nan})


def test_json_keeps_rows_of_numbers_on_a_line_and_strings_as_they_are() -> None:
    text = json_text({"a": [[1.0, -2.5e-07], [3, 4]], "b": ["[\n1,\n2]", "ü"], "c": [], "d": {"e": [7]}})
    assert text == (
        '{\n  "a": [\n    [1.0, -2.5e-07],\n    [3, 4]\n  ],\n  "b": [\n    "[\\n1,\\n2]",\n    "\\u00fc"\n  ],\n  "c": [],\n  "d": {\n    "e": [7]\n  }\n}\n'
    )


def test_csv_has_a_row_a_layer_for_effective_ranks() -> None:
    read = list(csv.DictReader(io.StringIO(csv_text(results("effrank", [two_heads('comma, "quote"')])))))
    assert [row["layer"] for row in read] == ["2", "3", "5"]
    assert {row["label"] for row in read} == {'comma, "quote"'}
    assert float(read[0]["effective_rank"]) == two_heads().layers[0].effective_rank
    assert (read[1]["effective_rank"], read[1]["reason"]) == ("", "layer 3: c_q.weight holds NaN in head 0")
    assert (read[2]["group"], read[2]["dead_heads"]) == ("decoder", "1")


def test_csv_has_a_row_an_eigenvalue_from_index_one_and_a_row_a_pair_of_heads() -> None:
    columns, table = rows(results("spectra", [two_heads()]))
    assert columns == ("label", "scale", "group", "layer", "index", "eigenvalue", "low", "high", "reason")
    assert table[0] == ("a", "nano", "", 2, 1, pytest.approx(1.5), None, None, None)
    assert [row[3:5] for row in table] == [(2, 1), (2, 2), (3, None), (5, 1), (5, 2)]
    assert csv_text(results("heatmap", [two_heads(scale=None)])) == (
        "label,scale,group,layer,head_i,head_j,similarity,reason\n"
        "a,,,2,0,0,1.0,\na,,,2,0,1,0.5,\na,,,2,1,0,0.5,\na,,,2,1,1,1.0,\n"
        "a,,,3,,,,layer 3: c_q.weight holds NaN in head 0\n"
        "a,,decoder,5,0,0,1.0,\na,,decoder,5,0,1,0.0,\na,,decoder,5,1,0,0.0,\na,,decoder,5,1,1,0.0,\n"
    )


SCRIPT = """
import sys
from headrank.tables import csv_text, document, json_text
from tests.sample_results import model, results
of = results(sys.argv[1], [model("a", layers=range(3)), model("b", layers=[1], dead={1: [2]})])
sys.stdout.buffer.write((json_text(document(of)) + csv_text(of)).encode())
"""


@pytest.mark.parametrize("command", ["heatmap", "spectra", "effrank"])
def test_documents_are_the_same_bytes_in_every_process(command: str) -> None:
    runs = [subprocess.run([sys.executable, "-c", SCRIPT, command], capture_output=True, check=True).stdout for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0].endswith(b"\n")


def test_a_version_that_nobody_installed_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(tables, "version", version)
    assert document(results("effrank", []))["version"] == "not installed"


def test_the_table_of_effective_ranks() -> None:
    assert shown(rendered(results("effrank", [two_heads("[bold]MHA")]))) == [
        " Model      Mean rank  % of H  % of max              Lowest     Highest  Dead",
        " [bold]MHA       1.38    68.9      68.9  1.00 (L=decoder.5)  1.75 (L=2)     1",
    ]


def test_the_table_of_spectra() -> None:
    assert shown(rendered(results("spectra", [two_heads()]))) == [
        " Model      Layer  First eigenvalue  Effective rank  % of max  For 90 %",
        " a              2             1.500            1.75      87.7         2",
        " a              3                 -               -         -         -",
        " a      decoder.5             1.000            1.00      50.0         1",
    ]


def test_the_table_of_heatmaps() -> None:
    assert shown(rendered(results("heatmap", [two_heads()]))) == [
        " Model      Layer  Mean off-diagonal  Largest (heads)  Effective rank  Dead",
        " a              2              0.500     0.500 (0, 1)            1.75  none",
        " a              3                  -                -               -     -",
        " a      decoder.5              0.000     0.000 (0, 1)            1.00     1",
    ]


def test_a_narrow_terminal_gets_a_block_a_row() -> None:
    assert shown(rendered(results("effrank", [two_heads()]), width=40)) == [
        "a",
        "  Mean rank: 1.38",
        "  % of H: 68.9",
        "  % of max: 68.9",
        "  Lowest: 1.00 (L=decoder.5)",
        "  Highest: 1.75 (L=2)",
        "  Dead: 1",
    ]


@pytest.mark.parametrize("command", ["heatmap", "spectra", "effrank"])
@pytest.mark.parametrize("width", [1, 20, 40, 80, 200])
@pytest.mark.parametrize("encoding", ["ascii", "utf-8", "latin-1"])
def test_any_label_is_printed_on_any_terminal(command: str, width: int, encoding: str) -> None:
    odd = [model(label, layers=[0, 1], scale=scale) for label, scale in (("ü 模型 [/]\x1b[31m", None), ("x" * 97, "128M"), ("", "2.5B"))]
    odd.append(model("one head", layers=range(5), n_head=1, is_centered=True))
    text = rendered(results(command, odd, is_centered=True), width=width, encoding=encoding)
    assert "\x1b" not in text
    assert "nan" not in text.lower()
    if width >= 40:
        assert "one head" in text


def test_undefined_values_are_dashes_and_explained_once() -> None:
    lone = model("one", layers=range(3), n_head=1, is_centered=True)
    text = rendered(results("effrank", [lone], is_centered=True))
    assert text.count("one head: the centred matrix is zero") == 1
    assert "one, layer 0, 1, 2: one head: the centred matrix is zero" in text


def test_scales_are_named_where_there_are_several() -> None:
    both = [model(label, layers=[0], scale=scale) for scale in ("128M", "2.5B") for label in VARIANTS[:2]]
    assert "LRKV (r=16) (2.5B)" in rendered(results("effrank", both), width=100)
    assert "2.5B" not in rendered(results("effrank", both[2:]), width=100)


def sampled(command: str) -> Results:
    """A model of one layer whose Gram matrices differ by sequence, so that its numbers have intervals."""
    random = np.random.default_rng(5)
    heads = random.normal(size=(19, 3, 23)) + random.normal(size=(3, 23))
    layer = layer_result(heads @ heads.swapaxes(1, 2), LayerFacts(index=2, n_head=3, n_kv_head=3), is_centered=False)
    return results(
        command,
        [
            ModelResult(
                label="a", scale=None, model=facts(7, 3), layers=(layer,), tokens=TOKENS, n_groups=19, null=Null(mean=2.5, low=2.25, high=2.75, n_samples=7)
            )
        ],
    )


def test_intervals_and_the_null_stand_beside_the_numbers_that_they_are_of() -> None:
    of = sampled("effrank")
    layer = of.models[0].layers[0]
    (entry,) = json.loads(json_text(document(of)))["models"]
    assert entry["null"] == {"mean": 2.5, "low": 2.25, "high": 2.75, "n_samples": 7}
    low, high = entry["layers"][0]["intervals"]["effective_rank"]
    assert (low, high) == layer.interval
    assert low < layer.effective_rank < high
    row = next(csv.DictReader(io.StringIO(csv_text(of))))
    assert (float(row["low"]), float(row["high"])) == layer.interval


@pytest.mark.parametrize(("command", "quantity"), [("spectra", "eigenvalues"), ("variance", "cumulative_variance")])
def test_curves_are_written_with_their_intervals(command: str, quantity: str) -> None:
    of = sampled(command)
    layer = of.models[0].layers[0]
    entry = json.loads(json_text(document(of)))["models"][0]["layers"][0]
    assert entry[quantity] == getattr(layer, quantity).tolist()
    assert entry["intervals"][quantity] == layer.intervals[quantity].tolist()
    read = list(csv.reader(io.StringIO(csv_text(of))))[1:]
    numbers = np.array([row[4:8] for row in read], dtype=float)
    np.testing.assert_array_equal(numbers, np.column_stack([np.arange(1, 4), getattr(layer, quantity), layer.intervals[quantity]]))


def test_centred_ranks_are_given_as_percent_of_the_heads_and_of_the_attainable() -> None:
    (entry,) = document(results("effrank", [model("a", layers=range(3), n_head=5, is_centered=True)], is_centered=True))["models"]
    assert entry["percent_of_heads"] == pytest.approx(100 * entry["mean_effective_rank"] / 5)
    assert entry["percent_of_attainable"] == pytest.approx(100 * entry["mean_effective_rank"] / 4)
    assert entry["layers"][1]["percent_of_attainable"] == pytest.approx(100 * entry["layers"][1]["effective_rank"] / 4)
