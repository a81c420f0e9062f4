"""The same heads in every file format; what the formats say of themselves; names under wrappers."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from headrank.checkpoints import open_checkpoint
from headrank.errors import HeadrankError
from tests.architectures.test_layouts import check, operators
from tests.checkpoints.writing import LAYOUTS, State, make_heads, state_of, width_of, write_folder

LLAMA = LAYOUTS["llama"]
HEADS = make_heads(4, 2)
CONFIG = LLAMA.config(HEADS[0])


def llama() -> State:
    return state_of(LLAMA, HEADS)


def halves(state: State) -> tuple[State, State]:
    names = list(state)
    return {name: state[name] for name in names[::2]}, {name: state[name] for name in names[1::2]}


def write_shards(folder: Path, *, stem: str, ending: str, index: str) -> Path:
    folder.mkdir()
    weight_map = {}
    for number, part in enumerate(halves(llama()), 1):
        name = f"{stem}-{number:05d}-of-00002.{ending}"
        if ending == "safetensors":
            save_file(part, folder / name)
        else:
            torch.save(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


def test_one_safetensors_file(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_folder(tmp_path, llama(), CONFIG))
    check(checkpoint, HEADS)
    assert checkpoint.format == "safetensors"
    assert checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"].dtype == "F32"


def test_a_safetensors_file_given_by_its_own_name(tmp_path: Path) -> None:
    write_folder(tmp_path, llama(), CONFIG)
    check(open_checkpoint(tmp_path / "model.safetensors"), HEADS)


@pytest.mark.parametrize(("dtype", "name", "tolerance"), [(torch.float64, "F64", 1e-6), (torch.bfloat16, "BF16", 0.3), (torch.float16, "F16", 0.05)])
def test_stored_types(dtype: torch.dtype, name: str, tolerance: float, tmp_path: Path) -> None:
    from headrank.architectures import describe

    checkpoint = open_checkpoint(write_folder(tmp_path, {key: value.to(dtype) for key, value in llama().items()}, CONFIG))
    assert {info.dtype for info in checkpoint.tensors.values()} == {name}
    found = operators(checkpoint, describe(checkpoint), 0, "qk")
    torch.testing.assert_close(found, HEADS[0].operators("qk"), rtol=tolerance, atol=tolerance)


def test_safetensors_shards(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_shards(tmp_path / "m", stem="model", ending="safetensors", index="model.safetensors.index.json"))
    check(checkpoint, HEADS)
    assert checkpoint.format == "safetensors shards"
    assert len(checkpoint.files) == 2


@pytest.mark.parametrize("is_archive", [True, False])
def test_pytorch_model_bin(is_archive: bool, tmp_path: Path) -> None:
    torch.save(llama(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=is_archive)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    checkpoint = open_checkpoint(tmp_path)
    check(checkpoint, HEADS)
    assert checkpoint.format == "pytorch"


def test_parameters_that_were_saved_with_their_gradients_on_are_plain_numbers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", llama(), CONFIG)
    (folder / "model.safetensors").unlink()
    torch.save({name: torch.nn.Parameter(tensor) for name, tensor in llama().items()}, folder / "pytorch_model.bin")
    checkpoint = open_checkpoint(folder)
    check(checkpoint, HEADS)
    assert not any(checkpoint.read(name).requires_grad for name in checkpoint.tensors)


def test_pytorch_shards(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_shards(tmp_path / "m", stem="pytorch_model", ending="bin", index="pytorch_model.bin.index.json"))
    check(checkpoint, HEADS)
    assert checkpoint.format == "pytorch shards"


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module."])
def test_nanogpt_under_any_wrapper(prefix: str, tmp_path: Path) -> None:
    layout = LAYOUTS["nanogpt"]
    heads = make_heads(4, 4, d=width_of(layout))
    state = {prefix + name: tensor for name, tensor in state_of(layout, heads).items()}
    geometry = {"n_layer": 2, "n_head": 4, "n_embd": 24, "block_size": 41, "bias": False, "vocab_size": 37}
    path = tmp_path / "ckpt.pt"
    torch.save(
        {"model": state, "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}}, "model_args": geometry, "iter_num": 3, "config": {"n_layer": 99}}, path
    )
    checkpoint = open_checkpoint(path)
    architecture = check(checkpoint, heads, raw=True)
    assert checkpoint.format == "state dict"
    assert architecture.context == 41


def test_wrappers_inside_a_name_are_taken_away() -> None:
    from headrank.checkpoints.pytorch import clean_names

    names = clean_names({"transformer._orig_mod.h.0._checkpoint_wrapped_module.attn.weight": 1, "module.weight": 2}, Path("x"))
    assert names == {"transformer.h.0.attn.weight": 1, "module.weight": 2}


def test_a_plain_state_dict_gets_its_geometry_from_beside_or_from_an_option(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save({"state_dict": llama(), "epoch": 3}, path)
    elsewhere = tmp_path / "geometry.json"
    elsewhere.write_text(json.dumps(CONFIG), encoding="utf-8")
    check(open_checkpoint(path, config=elsewhere), HEADS)
    shutil.copy(elsewhere, tmp_path / "config.json")
    check(open_checkpoint(path), HEADS)
    check(open_checkpoint(tmp_path), HEADS)


def write_nanochat(folder: Path, *, steps: dict[int, int], older: bool = False) -> dict[int, Any]:
    layout = LAYOUTS["nanochat"]
    made = {}
    for step, seed in steps.items():
        heads = make_heads(4, 4 if older else 2, d=width_of(layout), seed=seed)
        torch.save({f"_orig_mod.{name}": tensor for name, tensor in state_of(layout, heads).items()}, folder / f"model_{step:06d}.pt")
        geometry = {"sequence_len": 41, "vocab_size": 37, "n_layer": 2, "n_head": 4, "n_embd": 24} | ({} if older else {"n_kv_head": 2, "window_pattern": "L"})
        (folder / f"meta_{step:06d}.json").write_text(json.dumps({"step": step, "model_config": geometry}), encoding="utf-8")
        torch.save({"m": torch.zeros(2)}, folder / f"optim_{step:06d}.pt")
        torch.save({"m": torch.zeros(2)}, folder / f"optim_{step:06d}_rank0.pt")
        made[step] = heads
    return made


def test_a_nanochat_folder_is_read_at_its_last_step_or_the_one_asked_for(tmp_path: Path) -> None:
    made = write_nanochat(tmp_path, steps={20: 1, 100: 2, 3: 3})
    checkpoint = open_checkpoint(tmp_path)
    check(checkpoint, made[100])
    assert (checkpoint.format, checkpoint.config_name) == ("nanochat", "meta_000100.json")
    check(open_checkpoint(tmp_path, step=3), made[3])
    check(open_checkpoint(tmp_path / "model_000020.pt"), made[20])
    with pytest.raises(HeadrankError, match="no step 4; there are 3, 20, 100"):
        open_checkpoint(tmp_path, step=4)


def test_an_older_nanochat_meta_without_key_value_heads(tmp_path: Path) -> None:
    check(open_checkpoint_after(tmp_path), write_nanochat(tmp_path, steps={7: 1}, older=True)[7])


def open_checkpoint_after(folder: Path) -> Any:
    write_nanochat(folder, steps={7: 1}, older=True)
    return open_checkpoint(folder)


@pytest.mark.filterwarnings("ignore")
def test_a_distributed_checkpoint(tmp_path: Path) -> None:
    state = {"model": llama(), "optimizer": {"state": {"model.layers.0.self_attn.q_proj.weight": {"exp_avg": torch.zeros(2, 3)}}}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    checkpoint = open_checkpoint(tmp_path)
    check(checkpoint, HEADS)
    assert checkpoint.format == "distributed"
    assert not any("exp_avg" in name for name in checkpoint.tensors)


def test_a_tensor_that_was_saved_in_parts_is_put_together(tmp_path: Path) -> None:
    write_parts(tmp_path, torch.arange(35.0).view(5, 7), rows=(2, 3))
    assert torch.equal(open_checkpoint(tmp_path).read("a.weight"), torch.arange(35.0).view(5, 7))


def write_parts(folder: Path, tensor: torch.Tensor, *, rows: tuple[int, ...], file: str = "__0_0.distcp", whole: tuple[int, ...] | None = None) -> None:
    """What two processes that hold some rows each write."""
    import io
    import pickle

    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

    data, storage, chunks, start = b"", {}, [], 0
    for count in rows:
        buffer = io.BytesIO()
        torch.save(tensor[start : start + count].clone(), buffer)
        offsets, sizes = torch.Size([start, 0]), torch.Size([count, tensor.shape[1]])
        storage[MetadataIndex("a.weight", offsets)] = _StorageInfo(file, len(data), len(buffer.getvalue()))
        chunks.append(ChunkStorageMetadata(offsets, sizes))
        data += buffer.getvalue()
        start += count
    entry = TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(whole or tensor.shape), chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({"a.weight": entry}, storage_data=storage)))
    (folder / "__0_0.distcp").write_bytes(data)


def write_gguf(path: Path, *, dtype: Any = np.float32, split: int = 0) -> Path:
    """A llama as llama.cpp's converter writes it: query and key rows permuted within each head, alike for both."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split)
    writer.add_block_count(2)
    writer.add_embedding_length(29)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(6)
    writer.add_value_length(6)
    writer.add_context_length(41)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([f"token {number}" for number in range(5000)])
    for i, heads in enumerate(HEADS):
        permuted = [x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).flatten(0, 1) for x in (heads.q, heads.k)]
        tensors = {"attn_q": permuted[0], "attn_k": permuted[1], "attn_v": heads.v.flatten(0, 1), "attn_output": heads.o}
        for name, tensor in tensors.items():
            writer.add_tensor(f"blk.{i}.{name}.weight", tensor.contiguous().numpy().astype(dtype))
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(29, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_says_the_same_as_the_folder_that_it_was_made_from(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf"))
    architecture = check(checkpoint, HEADS)
    assert (checkpoint.format, architecture.n_kv_head, architecture.context) == ("gguf", 2, 41)
    assert checkpoint.config["tokenizer.ggml.tokens"] == {"entries": 5000}


@pytest.mark.filterwarnings("ignore")
def test_gguf_in_parts_given_as_any_part_or_as_the_folder(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", split=4)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == 3
    for path in (tmp_path, *parts):
        checkpoint = open_checkpoint(path)
        check(checkpoint, HEADS)
        assert checkpoint.format == "gguf parts"
    parts[1].unlink()
    with pytest.raises(HeadrankError, match=r"one of 3 parts; 1 are not beside it, such as m-00002-of-00003\.gguf"):
        open_checkpoint(parts[0])


def test_every_quantisation_that_the_package_unpacks_is_read(tmp_path: Path) -> None:
    import gguf

    rng = np.random.default_rng(0)
    types = [kind for kind in gguf.quants._type_traits if kind != gguf.GGMLQuantizationType.BF16]
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    blocks = {}
    for kind in types:
        _, size = gguf.GGML_QUANT_SIZES[kind]
        blocks[kind.name] = rng.integers(0, 60, (3, 2 * size), dtype=np.uint8)
        writer.add_tensor(kind.name, blocks[kind.name], raw_shape=(3, 2 * size), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(tmp_path / "q.gguf")
    assert len(types) > 20
    for kind in types:
        expected = gguf.quants.dequantize(blocks[kind.name], kind)
        found = checkpoint.read(kind.name)
        assert checkpoint.tensors[kind.name].shape == expected.shape
        np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("is_archive", [True, False])
def test_tensors_that_share_memory_are_all_there(is_archive: bool, tmp_path: Path) -> None:
    shared = torch.randn(5, 7)
    torch.save({"a": shared, "b": shared.T}, tmp_path / "w.pt", _use_new_zipfile_serialization=is_archive)
    checkpoint = open_checkpoint(tmp_path / "w.pt")
    assert torch.equal(checkpoint.read("b"), shared.T)


def test_the_fingerprint_is_the_content_and_not_the_place_or_the_date(tmp_path: Path) -> None:
    first = open_checkpoint(write_folder(tmp_path / "a", llama(), CONFIG))
    shutil.copytree(tmp_path / "a", tmp_path / "b ü")
    os.utime(tmp_path / "b ü" / "model.safetensors", (1, 1))
    second = open_checkpoint(tmp_path / "b ü")
    assert first.fingerprint() == second.fingerprint()
    assert first.fingerprint().startswith("sha256:")
    assert first.identity() != second.identity()
    other = {**llama(), "model.layers.1.self_attn.o_proj.weight": HEADS[1].o.contiguous() + 1e-3}
    assert open_checkpoint(write_folder(tmp_path / "c", other, CONFIG)).fingerprint() != first.fingerprint()
    assert open_checkpoint(write_folder(tmp_path / "d", llama(), CONFIG | {"rope_theta": 3})).fingerprint() != first.fingerprint()


def test_reading_a_tensor_does_not_change_the_file(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_folder(tmp_path, llama(), CONFIG))
    before = (tmp_path / "model.safetensors").read_bytes()
    checkpoint.read("model.layers.0.self_attn.q_proj.weight").zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_nanochat_model_says_what_no_head_shows(tmp_path: Path) -> None:
    made = write_nanochat(tmp_path, steps={7: 1})
    state = torch.load(tmp_path / "model_000007.pt", weights_only=True)
    torch.save({**state, "value_embeds.1.weight": torch.zeros(37, 12)}, tmp_path / "model_000007.pt")
    meta = json.loads((tmp_path / "meta_000007.json").read_text(encoding="utf-8"))
    meta["model_config"]["window_pattern"] = "SSSL"
    (tmp_path / "meta_000007.json").write_text(json.dumps(meta), encoding="utf-8")
    assert check(open_checkpoint(tmp_path), made[7]).remarks == (
        "values also take embeddings of their token, which no head's map from the residual stream includes",
        "layers marked S in the window pattern SSSL are local; how far they reach is not in the file",
    )


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no such advice")
@pytest.mark.parametrize("format", ["safetensors", "gguf"])
def test_the_bytes_of_expected_tensors_are_asked_for(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "model.gguf") if format == "gguf" else write_folder(tmp_path, llama(), CONFIG) / "model.safetensors"
    checkpoint = open_checkpoint(file)
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda descriptor, start, length, advice: asked.append((start, length, advice)))
    name = next(name for name in checkpoint.tensors if name.endswith(("q_proj.weight", "attn_q.weight")))
    checkpoint.expect([name])
    [(start, length, advice)] = asked
    assert file.read_bytes()[start : start + length] == checkpoint.read(name).numpy().tobytes()
    assert advice == os.POSIX_FADV_WILLNEED
