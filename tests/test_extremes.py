"""From files to documents where numbers are extreme, missing, equal, or spelt otherwise: defined results, and nothing averaged away."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from headrank.cli import app
from headrank.config import ModelConfig
from headrank.forward import DecoderRunner, pass_over
from headrank.store import LayerFacts
from headrank.tokens import Sequences
from tests.plain import CONFIGS, checkpoint_of, decoder

GEOMETRY: dict[str, Any] = {"n_layer": 3, "n_head": 4, "d_head": 6, "d_model": 22, "d_mlp": 31, "vocab_size": 256, "context": 32}
SOURCES = pytest.mark.parametrize("source", ["weights", "activations"])
CIRCUITS = pytest.mark.parametrize("circuit", ["qk", "ov"])
Change = Callable[[dict[str, Tensor]], None]


def attention(layer: int, name: str) -> str:
    return f"transformer.h.{layer}.attn.{name}.weight"


def write(folder: Path, *, change: Change = lambda tensors: None, **geometry: Any) -> Path:
    """A checkpoint with random heads, changed."""
    config = ModelConfig(**{"kind": "mha", **GEOMETRY, **geometry})
    tensors = {name: p.detach().clone() for name, p in decoder(config, seed=1).named_parameters()}
    change(tensors)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.to_json())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRANK_CACHE", str(tmp_path / "cache"))
    return tmp_path


def effrank(*words: str | Path, code: int = 0) -> tuple[dict[str, Any], str]:
    """The document that the command prints, and what it says on stderr. Python's JSON is told to take no NaN."""
    result = CliRunner().invoke(app, ["effrank", "--json", "--quiet", "--sequences", "3", *map(str, words)])
    assert result.exit_code == code, result.output
    document = json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} in the document"))
    assert Path("headrank-out/effrank.png").exists()
    return document, result.stderr


def layers(*words: str | Path, code: int = 0) -> list[dict[str, Any]]:
    return effrank(*words, code=code)[0]["models"][0]["layers"]


def all_numbers(document: Any) -> list[float]:
    if isinstance(document, dict | list):
        return [number for value in (document.values() if isinstance(document, dict) else document) for number in all_numbers(value)]
    return [document] if isinstance(document, float) else []


# Scale


@CIRCUITS
@pytest.mark.parametrize("c", [1e-12, 1e20])
def test_a_checkpoint_times_any_number_has_the_same_ranks(c: float, circuit: str, place: Path) -> None:
    def scale(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if ".attn." in name:
                tensors[name] *= c

    plain, scaled = (
        layers(write(place / name, change=change), "--source", "weights", "--circuit", circuit) for name, change in (("a", lambda t: None), ("b", scale))
    )
    for one, other in zip(plain, scaled, strict=True):
        assert other["effective_rank"] == pytest.approx(one["effective_rank"], rel=1e-6)
        assert other["dead_heads"] == []


@pytest.mark.parametrize(("circuit", "names", "c"), [("ov", ["c_v"], 1e-12), ("ov", ["c_v"], 1e15), ("qk", ["c_q", "c_k"], 1e15)])
def test_what_heads_see_and_write_may_be_of_any_size(circuit: str, names: list[str], c: float, place: Path) -> None:
    """In the last layer: what it writes reaches no other."""

    def scale(tensors: dict[str, Tensor]) -> None:
        for name in names:
            tensors[attention(2, name)] *= c

    plain, scaled = (layers(write(place / name, change=change), "--circuit", circuit) for name, change in (("a", lambda t: None), ("b", scale)))
    assert scaled[2]["effective_rank"] == pytest.approx(plain[2]["effective_rank"], rel=1e-4)
    assert scaled[2]["dead_heads"] == []


def test_an_overflow_in_float16_is_named_by_layer_and_head(place: Path) -> None:
    def loud(tensors: dict[str, Tensor]) -> None:
        tensors[attention(2, "c_v")][2 * 6 : 3 * 6] *= 3e4  # fits float16; what it makes does not

    model = write(place / "loud", change=loud)
    document, stderr = effrank(model, "--circuit", "ov", "--dtype", "float16", code=1)
    found = document["models"][0]["layers"]
    assert stderr == "Error: loud: layer 2: head outputs of head 2 are not finite in float16\n"
    assert found[2]["effective_rank"] is None
    assert found[2]["reason"] == "layer 2: head outputs of head 2 are not finite in float16"
    assert all(1 < layer["effective_rank"] <= 4 for layer in found[:2])
    assert document["models"][0]["mean_effective_rank"] == pytest.approx(np.mean([layer["effective_rank"] for layer in found[:2]]))
    assert all(math.isfinite(number) for number in all_numbers(document))
    fine, _ = effrank(model, "--circuit", "ov", "--dtype", "float32")
    assert fine["models"][0]["layers"][2]["effective_rank"] > 1


@SOURCES
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_spoils_its_layer_and_what_comes_behind_it(number: float, source: str, place: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[attention(1, "c_q")][7, 3] = number  # head 1

    document, stderr = effrank(write(place / "m", change=spoil), "--source", source, code=1)
    found = document["models"][0]["layers"]
    assert found[0]["effective_rank"] > 1
    assert found[1]["effective_rank"] is None
    assert (found[2]["effective_rank"] is None) == (source == "activations")
    assert re_line(stderr, "layer 1", "c_q" if source == "weights" else "attention scores of head 1")
    if source == "weights":
        assert document["models"][0]["mean_effective_rank"] == pytest.approx((found[0]["effective_rank"] + found[2]["effective_rank"]) / 2)
    assert all(math.isfinite(number) for number in all_numbers(document))


def re_line(text: str, *parts: str) -> bool:
    return any(all(part in line for part in parts) for line in text.splitlines())


# Heads


@SOURCES
@CIRCUITS
@pytest.mark.parametrize("centered", [[], ["--centered"]], ids=["uncentred", "centred"])
@pytest.mark.parametrize("H", [1, 2, 128])
def test_one_head_two_heads_and_128_heads_have_results(H: int, centered: list[str], source: str, circuit: str, place: Path) -> None:
    model = write(place / "m", n_head=H, d_head=2, n_layer=1, context=8)
    (layer,) = layers(model, "--source", source, "--circuit", circuit, *centered)
    most = H - 1 if centered else H
    if most == 0:
        assert layer["effective_rank"] is None
        assert layer["reason"]
        return
    assert 1 - 1e-9 <= layer["effective_rank"] <= most + 1e-9
    assert layer["percent_of_attainable"] == pytest.approx(100 * layer["effective_rank"] / most)
    assert layer["dead_heads"] == []


@SOURCES
@CIRCUITS
def test_heads_that_are_all_equal_have_rank_one_and_none_when_centred(source: str, circuit: str, place: Path) -> None:
    def equal(tensors: dict[str, Tensor]) -> None:
        for layer in range(3):
            for name in ("c_q", "c_k", "c_v"):
                tensors[attention(layer, name)] = tensors[attention(layer, name)][:6].repeat(4, 1)
            tensors[attention(layer, "c_proj")] = tensors[attention(layer, "c_proj")][:, :6].repeat(1, 4)

    model = write(place / "m", change=equal)
    for layer in layers(model, "--source", source, "--circuit", circuit):
        assert layer["effective_rank"] == pytest.approx(1, abs=1e-5)
        assert layer["dead_heads"] == []
    for layer in layers(model, "--source", source, "--circuit", circuit, "--centered"):
        assert layer["effective_rank"] is None
        assert layer["reason"]


@SOURCES
@CIRCUITS
def test_dead_heads_are_named_by_layer_and_lower_the_rank(source: str, circuit: str, place: Path) -> None:
    def kill(tensors: dict[str, Tensor]) -> None:
        tensors[attention(1, "c_q" if circuit == "qk" else "c_v")][12:18] = 0

    found = layers(write(place / "m", change=kill), "--source", source, "--circuit", circuit)
    assert [layer["dead_heads"] for layer in found] == [[], [2], []]
    assert found[1]["effective_rank"] <= 3 < found[0]["effective_rank"]


@SOURCES
def test_a_layer_of_dead_heads_alone_has_no_rank_and_a_reason(source: str, place: Path) -> None:
    def kill(tensors: dict[str, Tensor]) -> None:
        tensors[attention(1, "c_proj")][:] = 0  # as fresh models have it

    document, _ = effrank(write(place / "m", change=kill), "--source", source, "--circuit", "ov")
    layer = document["models"][0]["layers"][1]
    assert layer["dead_heads"] == [0, 1, 2, 3]
    assert layer["effective_rank"] is None
    assert layer["reason"]
    assert all(math.isfinite(number) for number in all_numbers(document))


# Tokens


def grams(lengths: list[int], ids: np.ndarray, **options: Any) -> dict[str, np.ndarray]:
    runner = DecoderRunner(checkpoint_of(decoder(CONFIGS["gqa"]))[0], device=torch.device("cpu"), dtype=torch.float32)
    facts = [LayerFacts(index=index, n_head=6, n_kv_head=2) for index in range(3)]
    sequences = Sequences(ids=ids, lengths=np.array(lengths), source="random")
    return dict(pass_over(runner, sequences, facts, ("qk", "ov"), device=torch.device("cpu"), batch_size=3, n_groups=1, **options))


def test_empty_sequences_and_what_stands_in_padding_change_nothing() -> None:
    ids = np.random.default_rng(0).integers(31, size=(5, 11))
    plain = grams([11, 7, 4], ids[[0, 2, 4]])
    with_empty_lines = grams([11, 0, 7, 0, 4], ids)
    ids[2, 7:], ids[4, 4:] = 30, 0
    other_padding = grams([11, 7, 4], ids[[0, 2, 4]])
    for name, gram in plain.items():
        scale = np.sqrt(np.outer(gram[0].diagonal(), gram[0].diagonal()))
        np.testing.assert_allclose(with_empty_lines[name][0] / scale, gram[0] / scale, atol=1e-6)
        np.testing.assert_allclose(other_padding[name][0] / scale, gram[0] / scale, atol=1e-6)


def test_tokens_that_are_skipped_are_recorded_and_change_the_numbers(place: Path) -> None:
    model = write(place / "m")
    plain, _ = effrank(model)
    skipped, _ = effrank(model, "--skip-first", "3")
    assert (plain["settings"]["skip_first"], skipped["settings"]["skip_first"]) == (0, 3)
    assert plain["models"][0]["layers"][0]["effective_rank"] != skipped["models"][0]["layers"][0]["effective_rank"]
    result = CliRunner().invoke(app, ["effrank", str(model), "--skip-first", "31"])
    assert (result.exit_code, result.stderr) == (1, "Error: --skip-first 31 leaves no pair of tokens in sequences of 32\n")


def test_what_was_fed_and_the_seed_are_recorded(place: Path) -> None:
    (place / "text.txt").write_text("\n\n\n".join(f"line {number}" for number in range(99)))  # empty lines are text
    document, _ = effrank(write(place / "m"), "--text", "text.txt", "--seed", "7", "--seq-len", "16")
    tokens = document["tokens"]
    assert {name: tokens[name] for name in ("source", "n_sequences", "seq_len", "n_tokens", "seed")} == {
        "source": "text.txt",
        "n_sequences": 3,
        "seq_len": 16,
        "n_tokens": 48,
        "seed": 7,
    }
    assert len(tokens["sha256"]) == 64


# Determinism


@SOURCES
def test_measured_anew_or_from_the_store_the_bytes_are_the_same(source: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write(place / "m", kind="gqa", n_kv_head=2)
    for out, cache in (("a", "one"), ("b", "two"), ("c", "two")):
        monkeypatch.setenv("HEADRANK_CACHE", str(place / cache))
        words = ["effrank", str(model), "--source", source, "--sequences", "9", "--null", "--out", out, "--format", "png,svg", "--quiet"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
    for suffix in ("json", "csv", "png", "svg"):
        contents = {(place / out / f"effrank.{suffix}").read_bytes() for out in "abc"}
        assert len(contents) == 1, suffix


def test_processes_with_other_hash_seeds_and_caches_write_the_same_bytes(place: Path) -> None:
    model = write(place / "m", kind="mla", d_latent=5)
    for out in "ab":
        surroundings = {"PATH": "/usr/bin:/bin", "HOME": str(place / out), "PYTHONHASHSEED": str(ord(out)), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "headrank", "effrank", str(model), "--sequences", "9", "--out", out, "--quiet"]
        subprocess.run(command, env=surroundings, check=True, stdout=subprocess.DEVNULL)
    for suffix in ("json", "csv", "png"):
        assert (place / "a" / f"effrank.{suffix}").read_bytes() == (place / "b" / f"effrank.{suffix}").read_bytes()
    (kept_a,), (kept_b,) = (list((place / out / ".cache" / "headrank").iterdir()) for out in "ab")
    assert kept_a.name == kept_b.name
    assert kept_a.read_bytes() == kept_b.read_bytes()


def test_a_copy_has_the_fingerprint_of_the_original_and_a_changed_one_has_not(place: Path) -> None:
    model = write(place / "m")
    shutil.copytree(model, place / "copy")
    tensors = load_file(model / "model.safetensors")
    tensors[attention(0, "c_q")][0, 0] += 1
    shutil.copytree(model, place / "changed")
    save_file(tensors, place / "changed" / "model.safetensors")
    found = [effrank(place / name, "--source", "weights")[0]["models"][0] for name in ("m", "copy", "changed")]
    assert found[0]["fingerprint"] == found[1]["fingerprint"] != found[2]["fingerprint"]
    assert found[0]["layers"] == found[1]["layers"] != found[2]["layers"]
