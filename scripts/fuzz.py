"""Feeds mutated files to every reader: each must end in a result or a HeadrankError, within a bound of memory and time.

    python scripts/fuzz.py --inputs 10000
    python scripts/fuzz.py --formats gguf --seed 3 --only 1234    # one input again, with its traceback

A worker process reads the files, so that a crash or a hang of a library is seen as well. Prints how many inputs were tried, how many
gave a result, and the refusals by kind. Whatever else happens is a failure: its input is kept, and the exit code is 1.
"""

import argparse
import contextlib
import copy
import io
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MEMORY = 1 << 30  # bytes of address space that reading may take
GROWTH = 256 << 20  # bytes by which the largest memory in use may grow from one input to the next
SECONDS = 5.0  # of processor time for one input
HANG = 120.0  # seconds on the clock after which a worker is given up
NUMBERS = (-1, 0, 1, 2, 3, 7, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 10**30)
VALUES: tuple[Any, ...] = (
    *NUMBERS, None, True, False, 0.5, -0.0, 1e300, float("nan"), float("inf"), "", "x", "4", "../x", "/etc/passwd", "\0", "\x1b[31m", "ü\ud83d" * 99,
    "a" * 9999,
    [], {}, [1, 2], [[]], {"a": 1}, [None] * 999,
)  # fmt: skip
Mutation = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True, kw_only=True)
class Format:
    """One kind of file: a folder that holds a good one, how it is damaged, and how it is read."""

    write: Callable[[Path], Path]
    """Fills a folder, and returns the file in it that is damaged."""
    mutations: Sequence[Mutation]
    read: Callable[[Path], None]
    """Reads the folder's file as the program does."""


# Mutations


def bytes_changed(content: bytes, rng: random.Random) -> bytes:
    """A few bits, bytes, numbers or pieces are changed, cut out, doubled or moved; mostly near the beginning."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        if not data:
            break
        at = rng.randrange(min(len(data), rng.choice((16, 256, 4096, len(data)))))
        match rng.randrange(7):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                size = rng.choice((1, 2, 4, 8))
                data[at : at + size] = (rng.choice(NUMBERS) % (1 << 8 * size)).to_bytes(size, "little")
            case 3:
                del data[at : at + rng.choice((1, 7, 100, len(data)))]
            case 4:
                data[at:at] = data[at : at + rng.choice((1, 8, 64, 512))]
            case 5:
                data[at:at] = rng.randbytes(rng.choice((1, 3, 16)))
            case 6:
                piece = data[at : at + rng.choice((4, 32))]
                other = rng.randrange(len(data))
                data[other : other + len(piece)] = piece
    return bytes(data)


def json_changed(content: bytes, rng: random.Random) -> bytes:
    """A JSON document is changed, or deeply nested."""
    text = json.dumps(document_changed(json.loads(content), rng))
    if rng.random() < 0.02:
        text = "[" * 50000 + text + "]" * 50000
    return text.encode()


def document_changed(document: Any, rng: random.Random) -> Any:
    """One to three values of a document are replaced, removed, renamed or doubled."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        owner, key = _place(document, rng)
        if owner is None:
            return copy.deepcopy(rng.choice(VALUES))
        match rng.randrange(8):
            case 0:
                del owner[key]
            case 1 if isinstance(owner, dict):
                owner[rng.choice(("", "x", "__metadata__", "model_type", "a" * 9999, "ü"))] = owner.pop(key)
            case 2 if isinstance(owner[key], int):
                owner[key] += rng.choice((-1, 1, 2, 1 << 31))
            case 3 if isinstance(owner, dict):
                owner[key] = copy.deepcopy(owner[rng.choice(list(owner))])
            case 4 if isinstance(owner[key], list):
                owner[key] = [copy.deepcopy(entry) for _ in range(rng.choice((0, 2, 50))) for entry in owner[key]]
            case _:
                owner[key] = copy.deepcopy(rng.choice(VALUES))
    return document


def _place(document: Any, rng: random.Random) -> tuple[Any, Any]:
    """A container within the document and a key of it; None where there is nothing in it."""
    owner, key = None, None
    node = document
    while isinstance(node, dict | list) and node:
        owner, key = node, rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        node = node[key]
        if rng.random() < 0.3:
            break
    return owner, key


def header_changed(content: bytes, rng: random.Random) -> bytes:
    """A safetensors header is changed as JSON, its length right, so that what reads the entries sees the change."""
    length = int.from_bytes(content[:8], "little")
    text = json_changed(content[8 : 8 + length], rng)
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def record_changed(content: bytes, rng: random.Random) -> bytes:
    """The JSON text in a measurement's header is changed as JSON, its digest right, so that the change is reached."""
    from safetensors.numpy import load, save

    from headrank.store import _sha256

    length = int.from_bytes(content[:8], "little")
    rest = document_changed(json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["headrank"]), rng)
    grams = load(content)
    if isinstance(rest, dict) and rng.random() < 0.9:
        rest.pop("sha256", None)
        with contextlib.suppress(ValueError):  # NaN has no JSON
            rest["sha256"] = _sha256(rest, grams)
    return save(grams, metadata={"headrank": json.dumps(rest).replace("\x00", "")})


def numbers_changed(content: bytes, rng: random.Random) -> bytes:
    """Some of the float64 numbers of a measurement become others."""
    start = 8 + int.from_bytes(content[:8], "little")
    data = bytearray(content)
    for _ in range(rng.choice((1, 3, 50))):
        at = start + rng.randrange((len(data) - start) // 8) * 8
        data[at : at + 8] = rng.choice((bytes(8), b"\xff" * 8, rng.randbytes(8), b"\0" * 6 + b"\xf0\x7f", b"\xff" * 6 + b"\xef\x7f", b"\x01" + b"\0" * 7))
    return bytes(data)


def npy_header_changed(content: bytes, rng: random.Random) -> bytes:
    """Type, order or shape in a .npy file's header become others, its length right."""
    length = int.from_bytes(content[8:10], "little")
    text = content[10 : 10 + length].decode("latin-1").rstrip()
    old = rng.choice(("'<i4'", "False", "(64,)", "'descr'", "'shape'"))
    number = rng.choice(NUMBERS)
    others = (
        "'<i8'",
        "'>u2'",
        "'<f4'",
        "'O'",
        "'|S9'",
        "'<U3'",
        "'<M8[s]'",
        "[('a', '<i4')]",
        "True",
        "()",
        "(8, 8)",
        "(0,)",
        f"({number},)",
        f"({number}, 2)",
        "''",
    )
    text = text.replace(old, rng.choice(others)) + "\n"
    return content[:8] + len(text).to_bytes(2, "little") + text.encode("latin-1") + content[10 + length :]


def lines_changed(content: bytes, rng: random.Random) -> bytes:
    """Lines of a TOML file are removed, doubled or moved, or get another value."""
    lines = content.decode("utf-8").splitlines()
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(lines))
        match rng.randrange(6):
            case 0:
                lines[at] = ""
            case 1:
                lines.insert(rng.randrange(len(lines)), lines[at])
            case 2:
                lines.insert(rng.randrange(len(lines)), lines.pop(at))
            case _:
                value = rng.choice(
                    ("-1", "0", "1", "2.5", "inf", "nan", "9" * 5000, '""', '"x"', "[]", "[1]", "{}", "true", "1979-05-27", '"../x"', "0x10", "[" * 9000)
                )
                lines[at] = f"{lines[at].partition('=')[0]}= {value}"
    return "\n".join(lines).encode()


# Good files to begin with. What is imported is imported in the worker alone.

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "hidden_size": 10,
    "vocab_size": 11, "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def _llama() -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    state = {"model.embed_tokens.weight": torch.randn(11, 10)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        state |= {f"{prefix}self_attn.{name}_proj.weight": torch.randn(rows, 10) for name, rows in (("q", 24), ("k", 12), ("v", 12))}
        state[f"{prefix}self_attn.o_proj.weight"] = torch.randn(10, 24)
        state[f"{prefix}input_layernorm.weight"] = torch.rand(10)
    return state


def _with_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))


def _safetensors(folder: Path) -> Path:
    from safetensors.torch import save_file

    _with_config(folder)
    save_file(_llama(), folder / "model.safetensors")
    return folder / "model.safetensors"


def _config(folder: Path) -> Path:
    _safetensors(folder)
    return folder / "config.json"


def _own_config(kind: dict[str, Any]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        from safetensors.torch import save_file

        from headrank.config import ModelConfig
        from headrank.model import new_decoder

        config = ModelConfig(n_layer=2, n_head=4, d_head=6, d_model=10, d_mlp=7, vocab_size=11, context=16, **kind)
        (folder / "config.json").write_text(config.to_json())
        save_file({name: p.detach() for name, p in new_decoder(config, seed=0).named_parameters()}, folder / "model.safetensors")
        return folder / "config.json"

    return write


def _index(folder: Path) -> Path:
    from safetensors.torch import save_file

    _with_config(folder)
    weight_map: dict[str, str] = {}
    items = list(_llama().items())
    for number, part in enumerate((items[:5], items[5:]), 1):
        name = f"model-{number:05d}-of-00002.safetensors"
        save_file(dict(part), folder / name)
        weight_map |= dict.fromkeys(dict(part), name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


def _gguf(quantised: bool) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        import gguf
        import numpy as np

        d = 32 if quantised else 10
        writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
        for add, value in (
            (writer.add_block_count, 2), (writer.add_embedding_length, d), (writer.add_head_count, 4), (writer.add_head_count_kv, 2),
            (writer.add_key_length, 6), (writer.add_value_length, 8), (writer.add_context_length, 16),
        ):  # fmt: skip
            add(value)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_token_list([f"token {number}" for number in range(11)])
        writer.add_array("tokenizer.ggml.scores", [0.5] * 11)
        numbers = np.random.default_rng(0)
        for layer in range(2):
            for name, rows, columns in (("attn_q", 24, d), ("attn_k", 12, d), ("attn_v", 16, d), ("attn_output", d, 32)):
                values = numbers.standard_normal((rows, columns)).astype(np.float32)
                kind = gguf.GGMLQuantizationType.Q8_0
                if quantised:
                    writer.add_tensor(f"blk.{layer}.{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
                else:
                    writer.add_tensor(f"blk.{layer}.{name}.weight", values)
            writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(d, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return folder / "m.gguf"

    return write


def _pickle(is_archive: bool) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        import torch

        _with_config(folder)
        torch.save(_llama(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=is_archive)
        return folder / "pytorch_model.bin"

    return write


def _family(folder: Path) -> Path:
    return Path(shutil.copy(Path(__file__).parent.parent / "configs" / "nano.toml", folder / "family.toml"))


def _npy(folder: Path) -> Path:
    import numpy as np

    np.save(folder / "ids.npy", np.arange(64, dtype=np.int32) % 11)
    return folder / "ids.npy"


def _bin(folder: Path) -> Path:
    (folder / "ids.bin").write_bytes(bytes(value for number in range(64) for value in (number % 11, 0)))
    return folder / "ids.bin"


def _tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "<unk>": 3}, merges=[("a", "b")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def _measurement(source: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        import numpy as np

        from headrank.measure import Settings, measure
        from headrank.selection import ModelRef
        from headrank.store import write_measurement

        model = folder / "model"
        model.mkdir()
        _own_config({"kind": "gqa", "n_kv_head": 2})(model)
        np.save(folder / "ids.npy", np.arange(160) % 11)
        settings = Settings(source=source, tokens=(folder / "ids.npy",), null=source == "weights")
        write_measurement(measure(ModelRef(label="m", path=str(model)), settings), folder / "m.safetensors")
        return folder / "m.safetensors"

    return write


# Readers


def _report(path: Path, source: str = "weights", *, draw: bool = False) -> None:
    """From a file to all that is shown of it."""
    from headrank import commands, tables
    from headrank.measure import Settings, measure
    from headrank.results import Results, model_result
    from headrank.selection import ModelRef

    measurement = measure(ModelRef(label="m", path=str(path)), Settings(source=source))
    for circuit in ("qk", "ov"):
        for is_centered in (False, True):
            model = model_result(measurement, circuit, measurement.layers, label="m", scale=None, is_centered=is_centered)
            results = Results(command="effrank", source=source, circuit=circuit, is_centered=is_centered, settings={}, models=(model,))
            for layer in model.layers:
                if layer.effective_rank is not None and not 0.999 <= layer.effective_rank <= layer.attainable + 0.001:
                    raise AssertionError(f"effective rank {layer.effective_rank} of {layer.facts.n_head} heads")
            tables.json_text(tables.document(results))
            tables.csv_text(results)
            if draw and circuit == "ov" and not is_centered:
                tables.render(results, commands.PlainConsole(file=io.StringIO()))
                commands.draw(results)


def _report_folder(file: Path) -> None:
    _report(file.parent)


def _report_stored(file: Path) -> None:
    _report(file, draw=True)


def _report_stored_activations(file: Path) -> None:
    _report(file, "activations", draw=True)


def _read_family(file: Path) -> None:
    from headrank.config import load_family

    for variant in load_family(file).variants:
        variant.model.to_json()


def _read_tokens(file: Path) -> None:
    from headrank.tokens import cut_sequences, read_token_files

    stream = read_token_files(text=(), tokens=(file,), tokenizer=None, vocab_size=11)
    sequences = cut_sequences(stream, seq_len=4, n_sequences=3, seed=0)
    if not 0 <= sequences.ids.min() <= sequences.ids.max() < 11:
        raise AssertionError("a token id outside the vocabulary")


def _read_tokenizer(file: Path) -> None:
    from headrank.tokens import read_token_files

    (file.parent / "text.txt").write_text("ab ba abba", encoding="utf-8")
    read_token_files(text=(file.parent / "text.txt",), tokens=(), tokenizer=file, vocab_size=11)


def formats() -> dict[str, Format]:
    """Name -> format."""
    of_json = (json_changed, json_changed, bytes_changed)
    of_header = (bytes_changed, header_changed)
    of_measurement = (bytes_changed, header_changed, record_changed, record_changed, numbers_changed)
    return {
        "safetensors": Format(write=_safetensors, mutations=of_header, read=_report_folder),
        "gguf": Format(write=_gguf(False), mutations=(bytes_changed,), read=_report_folder),
        "gguf-quantised": Format(write=_gguf(True), mutations=(bytes_changed,), read=_report_folder),
        "config": Format(write=_config, mutations=of_json, read=_report_folder),
        "config-gqa": Format(write=_own_config({"kind": "gqa", "n_kv_head": 2}), mutations=of_json, read=_report_folder),
        "config-mla": Format(write=_own_config({"kind": "mla", "d_latent": 5, "d_rope": 4}), mutations=of_json, read=_report_folder),
        "config-lrkv": Format(write=_own_config({"kind": "lrkv", "rank": 2}), mutations=of_json, read=_report_folder),
        "family": Format(write=_family, mutations=(lines_changed, bytes_changed), read=_read_family),
        "index": Format(write=_index, mutations=of_json, read=_report_folder),
        "npy": Format(write=_npy, mutations=(bytes_changed, npy_header_changed), read=_read_tokens),
        "bin": Format(write=_bin, mutations=(bytes_changed,), read=_read_tokens),
        "tokenizer": Format(write=_tokenizer, mutations=of_json, read=_read_tokenizer),
        "measurement": Format(write=_measurement("weights"), mutations=of_measurement, read=_report_stored),
        "measurement-activations": Format(write=_measurement("activations"), mutations=of_measurement, read=_report_stored_activations),
        "pickle": Format(write=_pickle(True), mutations=(bytes_changed,), read=_report_folder),
        "pickle-legacy": Format(write=_pickle(False), mutations=(bytes_changed,), read=_report_folder),
    }


# One input


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one input ended."""

    kind: str
    """result, refusal, or what went wrong."""
    text: str = ""
    """What was said."""


def mutated(chosen: Format, good: bytes, *, name: str, seed: int, index: int) -> bytes:
    """The content of one input: the same for the same name, seed and index."""
    rng = random.Random(f"{name} {seed} {index}")
    return rng.choice(chosen.mutations)(good, rng)


def attempt(chosen: Format, file: Path) -> Outcome:
    """Reads a file in this process."""
    from headrank.errors import HeadrankError

    start, before = time.process_time(), _peak()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chosen.read(file)
        outcome = Outcome(kind="result")
    except HeadrankError as error:
        text = str(error).replace(str(file.parent), "…")
        out_of_memory = re.search(r"allocate memory|MemoryError", text)
        outcome = Outcome(kind="out of memory" if out_of_memory else "refusal", text=text)
    except KeyboardInterrupt:
        raise
    except BaseException:  # Rust's panics are no Exception
        return Outcome(kind="exception", text=traceback.format_exc())
    if _peak() - before > GROWTH:
        return Outcome(kind="memory", text=f"took {(_peak() - before) >> 20} MiB")
    if time.process_time() - start > SECONDS:
        return Outcome(kind="slow", text=f"took {time.process_time() - start:.1f} s")
    return outcome


def _peak() -> int:
    """Largest memory in use so far, bytes; getrusage would begin with that of the process that started this one."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) << 10


def _limit_memory() -> None:
    """What is loaded already stays out of the account."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _work(connection: Connection, folder: Path, make_formats: Callable[[], dict[str, Format]]) -> None:
    """The worker: gets (name, seed, index), sends outcomes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    known, ready = make_formats(), dict[str, tuple[Path, bytes]]()
    limited = False
    connection.send("ready")
    while True:
        try:
            name, seed, index = connection.recv()
        except EOFError:
            return
        if name not in ready:
            (folder / name).mkdir(parents=True, exist_ok=True)
            file = known[name].write(folder / name)
            ready[name] = file, file.read_bytes()
            good = attempt(known[name], file)
            if good.kind != "result":
                connection.send(Outcome(kind="the good file", text=good.text))
                continue
        if not limited:
            _limit_memory()
            limited = True
        file, content = ready[name]
        file.write_bytes(mutated(known[name], content, name=name, seed=seed, index=index))
        connection.send(attempt(known[name], file))


class Worker:
    """A process that reads inputs; a new one takes its place when it dies."""

    def __init__(self, make_formats: Callable[[], dict[str, Format]] = formats, *, hang: float = HANG) -> None:
        self.make_formats, self.hang = make_formats, hang
        self.folder = Path(tempfile.mkdtemp(prefix="headrank-fuzz-"))
        self._start()

    def _start(self) -> None:
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other, self.folder, self.make_formats), daemon=True)
        self.process.start()
        other.close()
        self.connection.recv()

    def attempt(self, name: str, seed: int, index: int) -> Outcome:
        """What the worker makes of one input; a crash and a hang are outcomes too."""
        self.connection.send((name, seed, index))
        try:
            if self.connection.poll(self.hang):
                outcome: Outcome = self.connection.recv()
                return outcome
            outcome = Outcome(kind="hang", text=f"no answer for {self.hang} s")
        except (EOFError, ConnectionResetError):
            self.process.join()
            outcome = Outcome(kind="crash", text=f"the process ended with {self.process.exitcode}")
        self.process.kill()
        self.process.join()
        self._start()
        return outcome

    def close(self) -> None:
        """Ends the process and removes its files."""
        self.connection.close()
        self.process.join()
        shutil.rmtree(self.folder)


# All inputs


@dataclass
class Counts:
    """How the inputs of one format ended."""

    inputs: int = 0
    results: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    """Kind -> how many."""
    failures: dict[int, Outcome] = field(default_factory=dict)
    """Number of the input -> what happened."""

    def add(self, index: int, outcome: Outcome) -> None:
        self.inputs += 1
        if outcome.kind == "result":
            self.results += 1
        elif outcome.kind == "refusal":
            self.refusals[kind_of(outcome.text)] += 1
        else:
            self.failures[index] = outcome

    def lines(self, name: str) -> list[str]:
        n_refusals = sum(self.refusals.values())
        lines = [f"{name}: {self.inputs} inputs, {self.results} results, {n_refusals} refusals, {len(self.failures)} failures"]
        for kind, number in self.refusals.most_common(12):
            lines.append(f"  {number:6d}  {kind}")
        if len(self.refusals) > 12:
            rest = self.refusals.most_common()[12:]
            lines.append(f"  {sum(number for _, number in rest):6d}  of {len(rest)} other kinds")
        return lines


def kind_of(text: str) -> str:
    """A refusal without what differs between inputs: paths, names and numbers.

    >>> kind_of("…/model.safetensors: a header of 17 bytes; the format allows 9")
    'a header of N bytes'
    """
    text = text.splitlines()[0]
    text = re.sub(r"^(?:\S*…\S*:? )+(?:(?:header|variant \d+ \(\S+\)): )?", "", text)
    text = text.partition(";")[0].partition(": ")[0]
    text = re.sub(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\[.*\]|\(.*\)|\{.*\}", "…", text)
    text = re.sub(r"\S*(?:\.weight|\.safetensors|\.bin|attn|proj)\S*", "…", text)
    text = re.sub(r"(?<![A-Za-z])-?\d\S*", "N", text)
    text = re.sub(r"= \S+", "= …", text)
    text = re.sub(r"\bfound .*", "found …", text)
    return text[:90].rstrip()


def fuzz(names: Sequence[str], *, inputs: Sequence[int], seed: int, keep: Path, worker: Worker, say: Callable[[str], None] = print) -> dict[str, Counts]:
    """Tries the inputs of these numbers for every format; what fails is kept in a folder. say gets the counts, a line each."""
    known = worker.make_formats()
    found = {}
    for name in names:
        counts = found[name] = Counts()
        for index in inputs:
            outcome = worker.attempt(name, seed, index)
            counts.add(index, outcome)
            if index in counts.failures:
                where = _keep(known[name], name, seed, index, outcome, keep)
                say(f"  FAILURE: {name} {index}: {outcome.kind}: {(outcome.text.strip().splitlines() or [''])[-1]}; kept in {where}")
        for line in counts.lines(name):
            say(line)
    return found


def _keep(chosen: Format, name: str, seed: int, index: int, outcome: Outcome, keep: Path) -> Path:
    folder = keep / f"{name}-{seed}-{index}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    file = chosen.write(folder)
    file.write_bytes(mutated(chosen, file.read_bytes(), name=name, seed=seed, index=index))
    (folder / "failure.txt").write_text(f"{outcome.kind}\n{outcome.text}\n", encoding="utf-8")
    return folder


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000, help="inputs a format")
    parser.add_argument("--formats", nargs="+", choices=sorted(formats()), default=list(formats()), help="all of them by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one input, which is tried alone")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="folder for inputs that fail")
    options = parser.parse_args(words)
    worker = Worker()
    try:
        inputs = range(options.inputs) if options.only is None else [options.only]
        found = fuzz(options.formats, inputs=inputs, seed=options.seed, keep=options.keep, worker=worker, say=lambda line: print(line, flush=True))
    finally:
        worker.close()
    failures = [outcome for counts in found.values() for outcome in counts.failures.values()]
    if options.only is not None:
        for outcome in failures:
            print(outcome.text)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
