"""Damaged checkpoints: each ends in a result or a HeadrankError, never in another exception."""

import json
import random
import shutil
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headrank.architectures import describe
from headrank.checkpoints import open_checkpoint
from headrank.errors import HeadrankError
from headrank.factors import head_factors
from tests.checkpoints.test_formats import CONFIG, llama, write_gguf, write_parts, write_shards
from tests.checkpoints.writing import write_folder

NUMBERS = (-1, 0, 1, 2, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
VALUES: tuple[Any, ...] = (*NUMBERS, None, True, "", "x", "4", 0.5, 1e300, [], {}, [1, 2], {"a": 1}, "../x", "/etc/passwd", "\0", "ü" * 300)


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """One to four changes: a bit, a byte, a number, a piece cut out, doubled or put elsewhere; mostly near the beginning."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        if not data:
            break
        at = rng.randrange(min(len(data), rng.choice((32, 512, 4096, len(data)))))
        kind = rng.randrange(6)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.randrange(256)
        elif kind == 2:
            data[at : at + 8] = (rng.choice(NUMBERS) % (1 << 64)).to_bytes(8, "little")
        elif kind == 3:
            del data[at : at + rng.choice((1, 7, 100, len(data)))]
        elif kind == 4:
            data[at:at] = data[at : at + rng.choice((1, 8, 64))]
        else:
            data[at:at] = rng.randbytes(rng.choice((1, 3, 16)))
    return bytes(data)


def damaged_json(content: bytes, rng: random.Random) -> bytes:
    """One value somewhere in the document replaced, removed or renamed."""
    document = json.loads(content)
    for _ in range(rng.randint(1, 3)):
        node = document
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.7:
                node = node[key]
                continue
            if rng.random() < 0.2:
                del node[key]
            elif rng.random() < 0.1 and isinstance(node, dict):
                node[str(rng.choice(VALUES))] = node.pop(key)
            else:
                node[key] = rng.choice(VALUES)
            break
    return json.dumps(document).encode()


def damaged_header(content: bytes, rng: random.Random) -> bytes:
    """A safetensors header changed as JSON, its length right, so that the change is reached."""
    length = int.from_bytes(content[:8], "little")
    text = damaged_json(content[8 : 8 + length], rng)
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def _write_pickle(folder: Path) -> None:
    torch.save(llama(), folder / "pytorch_model.bin")


def _write_legacy(folder: Path) -> None:
    torch.save(llama(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def _write_gguf(folder: Path) -> None:
    write_gguf(folder / "m.gguf")


def _write_shards(folder: Path) -> None:
    folder.rmdir()
    write_shards(folder, stem="model", ending="safetensors", index="model.safetensors.index.json")


# Format -> how it is written, which file is damaged, how.
FORMATS: dict[str, tuple[Callable[[Path], None], str, Callable[[bytes, random.Random], bytes]]] = {
    "safetensors": (lambda folder: None, "model.safetensors", damaged_bytes),
    "safetensors header": (lambda folder: None, "model.safetensors", damaged_header),
    "config": (lambda folder: None, "config.json", damaged_json),
    "config bytes": (lambda folder: None, "config.json", damaged_bytes),
    "index": (_write_shards, "model.safetensors.index.json", damaged_json),
    "gguf": (_write_gguf, "m.gguf", damaged_bytes),
    "pickle": (_write_pickle, "pytorch_model.bin", damaged_bytes),
    "legacy pickle": (_write_legacy, "pytorch_model.bin", damaged_bytes),
    "distributed": (lambda folder: write_parts(folder, torch.arange(35.0).view(5, 7), rows=(2, 3)), ".metadata", damaged_bytes),
    "distributed parts": (lambda folder: write_parts(folder, torch.arange(35.0).view(5, 7), rows=(2, 3)), "__0_0.distcp", damaged_bytes),
}


def try_all(name: str, folder: Path, *, count: int, seed: int = 0) -> Counter[str]:
    """Damages a checkpoint of one format count times and reads it wholly each time. Returns how many ended how."""
    write, victim, damage = FORMATS[name]
    folder.mkdir(parents=True)
    write(folder)
    if not (folder / victim).exists():
        write_folder(folder, llama(), CONFIG)
    elif not victim.startswith((".metadata", "__0", "config")) and not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    whole, rng, ends = (folder / victim).read_bytes(), random.Random(seed), Counter[str]()
    for _ in range(count):
        (folder / victim).write_bytes(damage(whole, rng))
        try:
            read_wholly(folder)
            ends["result"] += 1
        except HeadrankError:
            ends["refusal"] += 1
    shutil.rmtree(folder)
    return ends


def read_wholly(folder: Path) -> None:
    """Everything that the program does with a checkpoint's own bytes."""
    checkpoint = open_checkpoint(folder)
    checkpoint.fingerprint()
    if checkpoint.format == "distributed":
        for name in checkpoint.tensors:
            checkpoint.read(name)
        return
    architecture = describe(checkpoint)
    for layer in architecture.layers:
        for circuit in ("qk", "ov"):
            head_factors(checkpoint, architecture, layer, circuit)


def damaged_layout(text: str, rng: random.Random) -> str:
    """A layout file with a line changed, doubled or gone; still TOML more often than not."""
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    kind = rng.randrange(4)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        key = lines[at].partition("=")[0]
        lines[at] = f"{key}= {json.dumps(rng.choice(VALUES))}".replace("null", '""')
    elif kind == 2:
        words = list(lines[at])
        words[rng.randrange(len(words))] = rng.choice('*[]"/HGq{}:-> 0')
        lines[at] = "".join(words)
    else:
        lines[at] = lines[at].replace("q", rng.choice(("k", "z", "q q", "9*q", "")))
    return "\n".join(lines)


def is_toml(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True
