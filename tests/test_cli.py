"""The command line from end to end, on a family of tiny untrained models."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from headrank import forward
from headrank.cli import app
from headrank.config import ModelConfig
from headrank.model import new_decoder

FAMILY = """
scale = "tiny"
[geometry]
n_layer = 3
n_head = 4
d_head = 6
d_model = 22
d_mlp = 31
vocab_size = 256
context = 32
[[variants]]
name = "mha"
label = "Standard MHA"
kind = "mha"
[[variants]]
name = "gqa"
label = "GQA"
kind = "gqa"
n_kv_head = 2
"""
GEOMETRY = {"n_layer": 3, "n_head": 4, "d_head": 6, "d_model": 22, "d_mlp": 31, "vocab_size": 256, "context": 32}
Run = Callable[..., Result]


def write_model(folder: Path, **kind: object) -> Path:
    folder.mkdir(parents=True)
    config = ModelConfig.from_dict({**GEOMETRY, **kind}, where="test")
    (folder / "config.json").write_text(config.to_json())
    save_file({name: p.detach().bfloat16() for name, p in new_decoder(config, seed=3).named_parameters()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the family's TOML file and checkpoints/tiny/{mha,gqa}."""
    folder = tmp_path_factory.mktemp("family")
    (folder / "tiny.toml").write_text(FAMILY)
    write_model(folder / "checkpoints" / "tiny" / "mha", kind="mha")
    write_model(folder / "checkpoints" / "tiny" / "gqa", kind="gqa", n_kv_head=2)
    return folder


@pytest.fixture
def run(tmp_path: Path, family: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs headrank in an empty folder, with a store of its own, on the family of tiny models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRANK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HEADRANK_CHECKPOINTS", str(family / "checkpoints"))

    def run(*words: str | Path) -> Result:
        return CliRunner().invoke(app, [str(word) for word in words])

    return run


def tiny(family: Path) -> tuple[str, ...]:
    return ("--config", str(family / "tiny.toml"), "--scales", "tiny")


@pytest.mark.parametrize("circuit", ["qk", "ov"])
@pytest.mark.parametrize("source", ["weights", "activations"])
@pytest.mark.parametrize("command", ["heatmap", "spectra", "effrank", "variance"])
def test_each_command_writes_figure_table_and_document(run: Run, family: Path, command: str, source: str, circuit: str) -> None:
    result = run(command, *tiny(family), "--source", source, "--circuit", circuit, "--json", "--sequences", 3)
    assert result.exit_code == 0, result.stderr
    out = Path("headrank-out")
    document = (out / f"{command}.json").read_text()
    assert result.stdout == document
    parsed = json.loads(document)
    assert [model["label"] for model in parsed["models"]] == ["Standard MHA", "GQA"]
    shown = {"heatmap": [1], "spectra": [0, 1, 2], "variance": [0, 1, 2], "effrank": [0, 1, 2]}[command]
    assert [layer["layer"] for layer in parsed["models"][0]["layers"]] == shown
    assert (out / f"{command}.png").read_bytes().startswith(b"\x89PNG")
    assert (out / f"{command}.csv").read_text().startswith("label,scale,group,layer,")
    assert "Wrote headrank-out/" in result.stderr


def test_the_commands_share_one_forward_pass(run: Run, family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []
    load_runner = forward.load_runner
    monkeypatch.setattr(forward, "load_runner", lambda *given, **named: loads.append(1) or load_runner(*given, **named))
    for command in ("heatmap", "spectra", "effrank"):
        assert run(command, *tiny(family), "--sequences", 2).exit_code == 0
    assert len(loads) == 2  # one a model
    assert run("heatmap", *tiny(family), "--sequences", 3).exit_code == 0
    assert len(loads) == 4  # other tokens are measured anew


def test_layers_are_given_in_many_ways(run: Run, family: Path) -> None:
    for words in (("--layer", "0", "-1"), ("--layer", "0", "--layer", "2"), ("--layers=0,2",), ("--layer", "0,-1")):
        result = run("spectra", *tiny(family), *words, "--source", "weights", "--json")
        assert result.exit_code == 0, result.stderr
        assert [layer["layer"] for layer in json.loads(result.stdout)["models"][0]["layers"]] == [0, 2]


def test_a_layer_is_measured_alone_with_the_same_numbers(run: Run, family: Path) -> None:
    alone = json.loads(run("heatmap", *tiny(family), "--layer", 1, "--json", "--sequences", 3).stdout)
    run("effrank", *tiny(family), "--sequences", 3)
    later = json.loads(run("heatmap", *tiny(family), "--layer", 1, "--json", "--sequences", 3).stdout)
    assert alone == later


def test_what_the_store_holds_beside_changes_nothing(run: Run, family: Path) -> None:
    before = run("effrank", *tiny(family), "--sequences", 9, "--json").stdout
    run("table", *tiny(family), "--sequences", 9)  # stores the null as well
    assert run("effrank", *tiny(family), "--sequences", 9, "--json").stdout == before


def test_models_are_given_by_path_with_and_without_a_label(run: Run, family: Path) -> None:
    mha = family / "checkpoints" / "tiny" / "mha"
    result = run("effrank", mha, f"Mine={mha}", "--source", "weights", "--json")
    assert result.exit_code == 0, result.stderr
    assert [model["label"] for model in json.loads(result.stdout)["models"]] == ["mha", "Mine"]


def test_without_families_the_bundled_one_is_shown_and_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRANK_CHECKPOINTS", "nowhere")
    result = run("spectra", "--layer", "18", "--source", "weights", "--json")
    assert result.exit_code == 0, result.stderr
    assert "no family is in nowhere/; showing the bundled one (nano)" in result.stderr
    assert {model["scale"] for model in json.loads(result.stdout)["models"]} == {"nano"}


def test_a_measurement_file_stands_for_its_model(run: Run, family: Path) -> None:
    mha = family / "checkpoints" / "tiny" / "mha"
    assert run("measure", mha, "-o", "mha.safetensors", "--sequences", 9).exit_code == 0
    direct = json.loads(run("effrank", f"m={mha}", "--sequences", 9, "--json").stdout)
    stored = json.loads(run("effrank", "m=mha.safetensors", "--json").stdout)
    assert stored["models"] == direct["models"]
    wrong = run("effrank", "mha.safetensors", "--source", "weights")
    assert (wrong.exit_code, wrong.stderr) == (1, "Error: mha.safetensors: measured from activations; give --source activations\n")


def test_the_table_is_written_in_four_forms(run: Run, family: Path) -> None:
    result = run("table", *tiny(family), "--source", "weights", "--json")
    assert result.exit_code == 0, result.stderr
    first = json.loads(result.stdout)["models"][0]
    assert 1 < first["uncentered"]["mean_effective_rank"] <= 4
    assert first["uncentered"]["null"]["low"] <= first["uncentered"]["null"]["mean"] <= first["uncentered"]["null"]["high"]
    assert first["centered"]["percent_of_attainable"] == pytest.approx(100 * first["centered"]["mean_effective_rank"] / 3)
    assert first["kv_bytes_per_token"] == 2 * 3 * 2 * 4 * 6
    assert first["kv_percent_of_mha"] == 100
    assert json.loads(result.stdout)["models"][1]["kv_percent_of_mha"] == 50
    for suffix, start in (("md", "| Model |"), ("tex", "\\begin{tabular}"), ("csv", "Model,")):
        assert Path(f"headrank-out/table.{suffix}").read_text().startswith(start)


def test_uncentred_and_centred_stand_side_by_side(run: Run, family: Path) -> None:
    result = run("effrank", *tiny(family), "--source", "weights", "--compare", "--json")
    assert result.exit_code == 0, result.stderr
    both = json.loads(result.stdout)
    assert both["uncentered"]["models"][0]["mean_effective_rank"] > 3 > both["centered"]["models"][0]["mean_effective_rank"]
    assert Path("headrank-out/effrank-compare.png").exists()


def bad(name: str, expected: str) -> object:
    return pytest.param(name, expected, id=name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        bad("no such path", r"nowhere: .*"),
        bad("empty folder", r".*empty: .*"),
        bad("foreign file", r".*foreign\.txt: .*"),
        bad("truncated", r".*model\.safetensors.*"),
        bad("heads contradict", r".*n_head.*|.*config\.json.*"),
        bad("head size contradicts", r".*d_head.*|.*config\.json.*"),
        bad("key-value heads contradict", r".*n_kv_head.*|.*config\.json.*"),
        bad("no such layer", r"mha: no layer 3 with attention; there are 0 to 2 \(or -1 to -3 from the end\)"),
        bad("no such scale", r"no family has the scale 'huge'; there are nano, 128M, 2\.5B\. Give your own with --config FILE"),
        bad("scale not on disk", r"scale 2\.5B: none of Standard MHA, .* is on disk; looked in .*\nTrain them: python scripts/train\.py .*"),
        bad("output is a file", r".*blocked.*--out DIR"),
        bad("empty text", r".*empty\.txt: empty; give a file with text or token ids in it"),
        bad("short text", r".*short\.txt: 5 tokens are fewer than one sequence of 32; give more text, or a smaller --seq-len"),
        bad("no such text", r".*absent\.txt: cannot be read: No such file or directory"),
        bad("too long sequences", r".*--seq-len 33 is more than the 32 tokens that the model was trained on"),
        bad("models and scales", r"give models or --scales, not both"),
    ],
)
def test_what_a_user_can_mend_is_said_in_three_lines_at_most(run: Run, family: Path, tmp_path: Path, name: str, expected: str) -> None:
    mha = family / "checkpoints" / "tiny" / "mha"
    weights = ("--source", "weights")

    def altered(**changes: object) -> tuple[str | Path, ...]:
        folder = write_model(tmp_path / "altered", kind="mha")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return (folder, *weights)

    if name == "no such path":
        words: tuple[str | Path, ...] = ("nowhere", *weights)
    elif name == "empty folder":
        (tmp_path / "empty").mkdir()
        words = (tmp_path / "empty", *weights)
    elif name == "foreign file":
        (tmp_path / "foreign.txt").write_text("some words")
        words = (tmp_path / "foreign.txt", *weights)
    elif name == "truncated":
        words = altered()
        file = tmp_path / "altered" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-7])
    elif name == "heads contradict":
        words = altered(n_head=3, n_kv_head=3)
    elif name == "head size contradicts":
        words = altered(d_head=4)
    elif name == "key-value heads contradict":
        words = altered(kind="gqa", n_kv_head=2)
    elif name == "no such layer":
        words = (mha, "--layer", "3", *weights)
    elif name == "no such scale":
        words = ("--scales", "huge")
    elif name == "scale not on disk":
        words = ("--scales", "2.5B")
    elif name == "output is a file":
        (tmp_path / "blocked").write_text("")
        words = (mha, "--out", "blocked/deeper", *weights)
    elif name in ("empty text", "short text", "no such text"):
        (tmp_path / "empty.txt").write_text("")
        (tmp_path / "short.txt").write_text("words")
        words = (mha, "--text", {"empty text": "empty.txt", "short text": "short.txt", "no such text": "absent.txt"}[name])
    elif name == "too long sequences":
        words = (mha, "--seq-len", "33")
    else:
        words = (mha, "--scales", "tiny")
    result = run("effrank", *words)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert re.fullmatch(f"Error: {expected}\n", result.stderr, re.DOTALL), result.stderr
    assert result.stderr.count("\n") <= 3
    assert not (tmp_path / "headrank-out").exists()


@pytest.mark.parametrize("words", [("effrank", "--layer", "x"), ("effrank", "--scales"), ("effrank", "--circuit", "vk"), ("frobnicate",)])
def test_wrong_usage_exits_with_2(run: Run, words: tuple[str, ...]) -> None:
    assert run(*words).exit_code == 2


def test_nan_in_one_head_spoils_its_layer_alone(run: Run, family: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "spoilt", kind="mha")
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.h.1.attn.c_q.weight"][7, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    result = run("effrank", folder, "--source", "weights", "--json")
    assert result.exit_code == 1
    assert re.search(r"layer 1.*transformer\.h\.1\.attn\.c_q\.weight.*head 1", result.stderr), result.stderr
    layers = json.loads(result.stdout)["models"][0]["layers"]
    assert layers[1]["effective_rank"] is None
    assert "c_q" in layers[1]["reason"]
    assert all(layers[index]["effective_rank"] > 1 for index in (0, 2))
    fine = run("effrank", folder, "--source", "weights", "--circuit", "ov")
    assert fine.exit_code == 0, fine.stderr


def test_an_interrupt_exits_with_130_and_leaves_nothing(run: Run, family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(forward, "recorded", interrupted)
    result = run("effrank", *tiny(family))
    assert result.exit_code == 130
    assert not list(Path().glob("headrank-out/*"))


def test_equal_runs_write_equal_bytes(run: Run, family: Path) -> None:
    for out in ("a", "b"):
        assert run("effrank", *tiny(family), "--sequences", 9, "--out", out, "--format", "png,svg,pdf").exit_code == 0
    for suffix in ("json", "csv", "png", "svg", "pdf"):
        assert Path(f"a/effrank.{suffix}").read_bytes() == Path(f"b/effrank.{suffix}").read_bytes()


def test_no_progress_and_no_remarks_when_quiet(run: Run, family: Path) -> None:
    result = run("effrank", *tiny(family), "--source", "weights", "--quiet")
    assert (result.exit_code, result.stderr) == (0, "")


def test_every_command_has_help_with_an_example_and_stands_in_the_readme(run: Run) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    commands = [command.name or "" for command in app.registered_commands]
    assert commands
    for command in commands:
        shown = run(command, "--help")
        assert shown.exit_code == 0
        assert f"Example: headrank {command}" in shown.stdout
        assert f"headrank {command}" in readme


def headrank(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrank", *words]
    return subprocess.run(command, cwd=cwd, env={"PATH": os.environ["PATH"], **environment}, capture_output=True, text=True, timeout=120, check=False)


def test_hostile_surroundings_do_not_matter(tmp_path: Path, family: Path) -> None:
    folder = tmp_path / "a folder [with] ü"
    folder.mkdir()
    mha = family / "checkpoints" / "tiny" / "mha"
    surroundings = {"HOME": "/dev/null/home", "MPLBACKEND": "TkAgg", "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "COLUMNS": "40"}
    done = headrank("effrank", f"Größe={mha}", "--source", "weights", cwd=folder, **surroundings)
    assert done.returncode == 0, done.stderr
    assert (folder / "headrank-out" / "effrank.png").exists()
    assert max(map(len, done.stdout.splitlines())) <= 40


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path, family: Path) -> None:
    mha = family / "checkpoints" / "tiny" / "mha"
    command = f"'{sys.executable}' -m headrank effrank '{mha}' --source weights --json | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["{", "0"]
    assert "Traceback" not in done.stderr


def test_help_needs_no_torch() -> None:
    code = "import sys, headrank.cli; sys.exit(bool({'torch', 'matplotlib', 'transformers', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_spoilt_activation_is_named(run: Run, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "loud", kind="mha")
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.h.2.attn.c_v.weight"] = torch.full_like(tensors["transformer.h.2.attn.c_v.weight"], 3e38)
    save_file(tensors, folder / "model.safetensors")
    result = run("effrank", folder, "--circuit", "ov", "--json", "--sequences", 2)
    assert result.exit_code == 1
    assert "layer 2: head outputs" in result.stderr
    assert np.isfinite(json.loads(result.stdout)["models"][0]["layers"][0]["effective_rank"])
