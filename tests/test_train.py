"""Training: interrupted and not, alone and in company."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

TOP = Path(__file__).parent.parent
FAMILY = """
scale = "tiny"
[geometry]
n_layer = 2
n_head = 2
d_head = 4
d_model = 10
d_mlp = 14
vocab_size = 256
context = 12
[[variants]]
name = "mha"
label = "MHA"
kind = "mha"
[[variants]]
name = "lrkv"
label = "LRKV"
kind = "lrkv"
rank = 2
"""
TEXT = TOP / "headrank" / "data" / "calibration.txt"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_script", TOP / "scripts" / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_script"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(FAMILY)
    return path


def train(script: ModuleType, config: Path, out: Path, **options: object) -> None:
    given = {"text": [TEXT], "steps": 7, "batch_size": 4, "variant": ["lrkv"], "save_every": 0, **options}
    script.main(config=config, out=out, **given)


def test_a_run_that_was_interrupted_ends_where_the_other_does(script: ModuleType, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(script, config, tmp_path / "whole")
    save, saves = script.Run.save, []

    def broken_off(run: object, *given: object) -> None:
        save(run, *given)
        saves.append(given)
        if len(saves) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(script.Run, "save", broken_off)
        with pytest.raises(KeyboardInterrupt):
            train(script, config, tmp_path / "broken")
    assert json.loads((tmp_path / "broken/tiny/lrkv/training.json").read_text())["step"] == 3
    train(script, config, tmp_path / "broken")
    whole, broken = (tmp_path / name / "tiny" / "lrkv" for name in ("whole", "broken"))
    first, second = load_file(whole / "model.safetensors"), load_file(broken / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert json.loads((whole / "training.json").read_text())["loss_curve"] == json.loads((broken / "training.json").read_text())["loss_curve"]


def test_a_finished_run_is_left_alone_and_other_settings_are_refused(
    script: ModuleType, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(script, config, tmp_path)
    stamp = (tmp_path / "tiny/lrkv/model.safetensors").stat().st_mtime_ns
    train(script, config, tmp_path)
    assert (tmp_path / "tiny/lrkv/model.safetensors").stat().st_mtime_ns == stamp
    with pytest.raises(script.typer.Exit):
        train(script, config, tmp_path, steps=9)
    assert "holds a run with other settings or data" in capsys.readouterr().err


def test_training_lowers_the_loss_and_records_what_it_did(script: ModuleType, config: Path, tmp_path: Path) -> None:
    train(script, config, tmp_path, steps=60, batch_size=8, save_every=60, keep=4, variant=None)
    for variant in ("mha", "lrkv"):
        folder = tmp_path / "tiny" / variant
        record = json.loads((folder / "training.json").read_text())
        assert record["loss_curve"][-1]["validation_loss"] < record["loss_curve"][0]["validation_loss"] - 0.5
        assert record["tokens_seen"] == 60 * 8 * 12
        assert len(record["data"]["sha256"]) == 64
        assert 2 < record["trigram_loss"] < 4
        assert [path.name for path in sorted((folder / "steps").iterdir())] == [f"step_{step:08d}" for step in (1, 4, 15, 60)]


def test_a_trigram_model_knows_a_text_that_repeats(script: ModuleType) -> None:
    text = torch.tensor([1, 2, 3, 4] * 50)
    assert script.trigram_loss(text, text, 5) < 0.05
    noise = torch.randint(5, (5000,), generator=torch.Generator().manual_seed(0))
    assert script.trigram_loss(noise[:4000], noise[4000:], 5) == pytest.approx(torch.tensor(5.0).log().item(), abs=0.02)


@pytest.mark.slow
def test_two_processes_train_the_same_model_as_one(script: ModuleType, config: Path, tmp_path: Path) -> None:
    train(script, config, tmp_path / "alone", steps=3)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(TOP / "scripts" / "train.py")]
    options = ["--config", config, "--text", TEXT, "--steps", 3, "--batch-size", 4, "--variant", "lrkv", "--out", tmp_path / "both"]
    done = subprocess.run([*command, *map(str, options)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    alone, both = (load_file(tmp_path / name / "tiny" / "lrkv" / "model.safetensors") for name in ("alone", "both"))
    for name, tensor in alone.items():
        torch.testing.assert_close(both[name].float(), tensor.float(), rtol=0.02, atol=2e-3)  # stored in bfloat16
