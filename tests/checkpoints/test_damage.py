"""Damaged files of the formats that scripts/fuzz.py does not write: every one ends in a result or in an error of ours."""

import contextlib
import json
import random
from pathlib import Path

import pytest
import torch

from headrank.architectures import describe
from headrank.architectures.table import EXAMPLE
from headrank.checkpoints import open_checkpoint
from headrank.errors import HeadrankError
from tests.checkpoints.test_formats import CONFIG, llama, write_parts
from tests.checkpoints.test_lora import adapter
from tests.checkpoints.writing import write_folder

COUNT = 300


def damaged(content: bytes, rng: random.Random) -> bytes:
    """One to four changes: a bit, a byte, a number, a piece cut out or doubled; mostly near the beginning."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(len(data), rng.choice((32, 512, len(data)))) or 1)
        kind = rng.randrange(5)
        if kind == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            data[at : at + 8] = rng.choice((0, 1, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)).to_bytes(8, "little")
        elif kind == 2:
            del data[at : at + rng.choice((1, 7, 100))]
        elif kind == 3:
            data[at:at] = data[at : at + rng.choice((1, 8, 64))]
        else:
            data[at:at] = rng.randbytes(rng.choice((1, 3, 16)))
    return bytes(data)


def damaged_layout(text: str, rng: random.Random) -> str:
    """A line changed, gone, or with another value."""
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    kind = rng.randrange(4)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines[at] = lines[at].partition("=")[0] + "= " + json.dumps(rng.choice((-1, 0, 1, 1 << 40, True, 0.5, "", "x", [], ["a"], [[]], [1, 2])))
    elif kind == 2:
        letters = list(lines[at])
        letters[rng.randrange(len(letters))] = rng.choice('*[]"/HGq{}:-> 0')
        lines[at] = "".join(letters)
    else:
        lines[at] = lines[at].replace("q", rng.choice(("k", "z", "q q", "9*q", "")))
    return "\n".join(lines)


@pytest.mark.filterwarnings("ignore")  # torch and the unpickler warn of damaged files before they are refused
@pytest.mark.parametrize("victim", [".metadata", "__0_0.distcp"])
def test_distributed_checkpoints(victim: str, tmp_path: Path) -> None:
    write_parts(tmp_path, torch.arange(35.0).view(5, 7), rows=(2, 3))
    whole, rng, refusals = (tmp_path / victim).read_bytes(), random.Random(0), 0
    for _ in range(COUNT):
        (tmp_path / victim).write_bytes(damaged(whole, rng))
        try:
            checkpoint = open_checkpoint(tmp_path)
            for name in checkpoint.tensors:
                checkpoint.read(name)
        except HeadrankError:
            refusals += 1
    assert refusals > COUNT / 2


@pytest.mark.parametrize("victim", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapters(victim: str, tmp_path: Path) -> None:
    base, folder = write_folder(tmp_path / "base", llama(), CONFIG), adapter(tmp_path / "adapter")
    whole, rng, refusals = (folder / victim).read_bytes(), random.Random(0), 0
    for _ in range(COUNT):
        (folder / victim).write_bytes(damaged(whole, rng))
        try:
            open_checkpoint(base, adapter=folder).read("model.layers.0.self_attn.q_proj.weight")
        except HeadrankError:
            refusals += 1
    assert refusals > COUNT / 2


def test_layout_files(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_folder(tmp_path / "m", llama(), CONFIG))
    rng, path, described = random.Random(0), tmp_path / "layout.toml", 0
    good = EXAMPLE.replace("D = 64", "D = 6").replace("attn.", "self_attn.")
    for _ in range(COUNT):
        path.write_text(damaged_layout(good, rng), encoding="utf-8")
        with contextlib.suppress(HeadrankError):
            describe(checkpoint, layout=path)
            described += 1
    assert 10 < described < COUNT - 50
