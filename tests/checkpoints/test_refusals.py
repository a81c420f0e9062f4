"""What is not a checkpoint, or lies about itself, is refused by name: nothing is run, nothing outside is read, no memory is taken first."""

import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrank.architectures import describe
from headrank.checkpoints import open_checkpoint
from headrank.errors import HeadrankError
from tests.checkpoints.test_formats import CONFIG, HEADS, LLAMA, llama, write_gguf, write_parts, write_shards
from tests.checkpoints.writing import LAYOUTS, make_heads, state_of, write_folder

Q = "model.layers.0.self_attn.q_proj.weight"


def refused(path: Path, pattern: str, **options: Any) -> None:
    """One to three lines that say what, where and what to do."""
    with pytest.raises(HeadrankError, match=pattern) as caught:
        describe(open_checkpoint(path, **options))
    assert 1 <= len(str(caught.value).splitlines()) <= 3 or "--layout" in str(caught.value)


def header(entries: Any, *, length: int | None = None, data: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(*, dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


EIGHT = b"\0" * 8


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (b"", "the file is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n", "a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"),
        (b"<!DOCTYPE html><html>", "an HTML page, not a checkpoint"),
        (b"\n\n<html><body>Access denied", "an HTML page"),
        (b"hello there, this is text", "not a checkpoint of a known kind"),
        (header(entry(), data=EIGHT)[:-3], "is cut off: its header says 77 bytes, it has 74"),
        (header(entry(), data=EIGHT * 2), "has bytes that no tensor owns"),
        (header({}, length=1 << 60), "the header should have 1152921504606846976 bytes, the file has 10"),
        (header(entry(shape=(1 << 40,), offsets=(0, 1 << 42)), data=EIGHT), "is cut off"),
        (header(entry(shape=(1 << 40,)), data=EIGHT), "needs 4398046511104 bytes, its header gives it 0…8"),
        (header(entry(shape=(-2,)), data=EIGHT), "header entry of 'a' is not that of a tensor"),
        (header(entry(shape=(2.0,)), data=EIGHT), "header entry of 'a' is not that of a tensor"),
        (header(entry(offsets=(8, 0)), data=EIGHT), "needs 8 bytes, its header gives it 8…0"),
        (header(entry(offsets=(-8, 0)), data=EIGHT), "its header gives it -8…0"),
        (header(entry(dtype="F31"), data=EIGHT), "is of type 'F31', which this version does not know"),
        (header({"a": 3}), "header entry of 'a' is not that of a tensor"),
        (header(b'{"a": [' + b"[" * 5000), "not JSON"),
        (header(b"[1, 2]"), "not a checkpoint of a known kind"),
        (header(b'{"a": 1' + b"1" * 6000 + b"}"), "not JSON"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "claims 1152921504606846976 entries, more than its 24 bytes can hold"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "claims 1152921504606846976 entries"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1 cannot be read"),
        (b"GGUF" + struct.pack("<I", 3), "is cut off"),
        (b"PK\x03\x04 this is no archive", "cannot be read as a PyTorch file"),
        (b"\x80\x02}q\x00.", "cannot be read as a PyTorch file"),
    ],
)  # fmt: skip
def test_a_single_file_that_is_no_checkpoint(content: bytes, pattern: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    refused(path, pattern)
    refused(tmp_path, pattern)


@pytest.mark.parametrize("length", [0x80, 0x4B50, 0x50])
def test_a_safetensors_header_whose_length_looks_like_another_format(length: int, tmp_path: Path) -> None:
    text = json.dumps(entry()).encode().ljust(length)
    (tmp_path / "m.safetensors").write_bytes(header(text, data=EIGHT))
    assert open_checkpoint(tmp_path / "m.safetensors").format == "safetensors"


def test_a_folder_without_a_checkpoint_lists_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("x", encoding="utf-8")
    refused(tmp_path, r"no checkpoint in this folder; found README\.md")


@pytest.mark.parametrize("path", ["no/such", "nothing here", "a" * 5000, "x\0y"])
def test_a_path_that_is_not_there(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrank.checkpoints.hub.looks_like_id", lambda text: False)
    with pytest.raises(HeadrankError, match=r"no such file or folder|not a path"):
        open_checkpoint(path)


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    refused(tmp_path, "not a regular file")


# ---- shards ----


def shards(folder: Path) -> Path:
    return write_shards(folder, stem="model", ending="safetensors", index="model.safetensors.index.json")


def change_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    path = folder / "model.safetensors.index.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document["weight_map"])
    path.write_text(json.dumps(document), encoding="utf-8")


def test_an_index_that_names_an_absent_shard(tmp_path: Path) -> None:
    folder = shards(tmp_path / "m")
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, r"1 of 2 files that it names are not in the folder, such as model-00002-of-00002\.safetensors")


def test_a_shard_that_the_index_does_not_name(tmp_path: Path) -> None:
    folder = shards(tmp_path / "m")
    save_file({"b": torch.zeros(2)}, folder / "model-00003-of-00003.safetensors")
    refused(folder, r"does not name the shard model-00003-of-00003\.safetensors that lies beside it")


def test_an_index_that_does_not_list_a_tensor(tmp_path: Path) -> None:
    folder = shards(tmp_path / "m")
    change_index(folder, lambda names: names.pop(Q))
    refused(folder, r"does not list all tensors of model-00001")


def test_an_index_that_puts_a_tensor_into_the_wrong_shard(tmp_path: Path) -> None:
    folder = shards(tmp_path / "m")
    change_index(folder, lambda names: names.update({Q: "model-00002-of-00002.safetensors"}))
    refused(folder, rf"says that model-00002-of-00002\.safetensors holds {Q}; model-00001-of-00002\.safetensors does")


def test_an_index_that_names_a_tensor_that_is_nowhere(tmp_path: Path) -> None:
    folder = shards(tmp_path / "m")
    change_index(folder, lambda names: names.update({"extra": "model-00002-of-00002.safetensors"}))
    refused(folder, "holds extra; it does not")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/../../outside.safetensors"])
def test_an_index_cannot_lead_out_of_the_folder(name: str, tmp_path: Path) -> None:
    folder = shards(tmp_path / "m")
    save_file(llama(), tmp_path / "outside.safetensors")
    change_index(folder, lambda names: names.update({Q: name}))
    refused(folder, "which is no file of that folder; not read")


def test_a_link_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    save_file(llama(), tmp_path / "outside.safetensors")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    refused(tmp_path / "m", "a link that leads out of the folder")


def test_a_cached_snapshot_is_links_into_its_own_blobs(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "abc", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    write_folder(blobs, llama(), CONFIG)
    for name in ("model.safetensors", "config.json"):
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    assert describe(open_checkpoint(snapshot)).family == "llama"


def test_parts_without_their_index(tmp_path: Path) -> None:
    folder = shards(tmp_path / "m")
    (folder / "model.safetensors.index.json").unlink()
    refused(folder, "parts without the index that says how many there should be")


def test_several_models_in_one_folder(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        save_file(llama(), tmp_path / name)
    refused(tmp_path, "several models, none called as the one to take")


# ---- pickles ----


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.path}",))


@pytest.mark.parametrize("is_archive", [True, False])
def test_code_in_a_pickle_is_not_run_and_its_class_is_named(is_archive: bool, tmp_path: Path) -> None:
    torch.save({"model": {"a": Evil(tmp_path / "ran")}}, tmp_path / "w.pt", _use_new_zipfile_serialization=is_archive)
    refused(tmp_path / "w.pt", r"asks for (posix|os|nt)\.system on loading, which could run code; refused")
    assert not (tmp_path / "ran").exists()


def test_code_in_the_metadata_of_a_distributed_checkpoint_is_not_run(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    refused(tmp_path, r"asks for (posix|os|nt)\.system on loading, which could run code; refused")
    assert not (tmp_path / "ran").exists()


def test_python_files_beside_a_checkpoint_are_not_imported(tmp_path: Path) -> None:
    (tmp_path / "modeling_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", encoding="utf-8")
    config = {**CONFIG, "auto_map": {"AutoModel": "modeling_evil.Evil"}}
    assert describe(open_checkpoint(write_folder(tmp_path, llama(), config))).family == "llama"
    assert not (tmp_path / "ran").exists()


def test_an_archive_that_unpacks_to_more_than_it_is(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1 << 20)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
        for member in plain.infolist():
            bomb.writestr(member.filename, plain.read(member), zipfile.ZIP_DEFLATED)
    refused(tmp_path / "bomb.pt", r"claims \d+ bytes of a file of \d+; not read")


def test_tensors_without_numbers(tmp_path: Path) -> None:
    torch.save({"a": torch.empty(3, device="meta")}, tmp_path / "w.pt")
    refused(tmp_path / "w.pt", "a is on the meta device: the file was saved without its numbers")


@pytest.mark.filterwarnings("ignore")
def test_quantised_and_sparse_tensors(tmp_path: Path) -> None:
    torch.save({"a": torch.eye(3).to_sparse()}, tmp_path / "w.pt")
    refused(tmp_path / "w.pt", "a does not hold plain numbers")


def test_a_cut_off_archive(tmp_path: Path) -> None:
    torch.save(llama(), tmp_path / "w.pt")
    content = (tmp_path / "w.pt").read_bytes()
    (tmp_path / "w.pt").write_bytes(content[: len(content) // 2])
    refused(tmp_path / "w.pt", "cannot be read as a PyTorch file")


def test_two_tensors_of_one_name_once_wrappers_are_gone(tmp_path: Path) -> None:
    torch.save({"_orig_mod.a": torch.zeros(2), "a": torch.ones(2)}, tmp_path / "w.pt")
    refused(tmp_path / "w.pt", "two tensors are called a once the wrappers' prefixes are taken away")


# ---- distributed ----


def test_a_part_that_lies_outside_the_folder(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    write_parts(tmp_path / "m", torch.zeros(5, 7), rows=(2, 3), file="../x.distcp")
    refused(tmp_path / "m", "which is no file of that folder; not read")


def test_a_distributed_file_that_is_cut_off(tmp_path: Path) -> None:
    write_parts(tmp_path, torch.zeros(5, 7), rows=(2, 3))
    content = (tmp_path / "__0_0.distcp").read_bytes()
    (tmp_path / "__0_0.distcp").write_bytes(content[:-9])
    refused(tmp_path, r"is cut off: a\.weight should reach to byte \d+, the file has \d+")


def test_parts_that_do_not_make_up_the_tensor(tmp_path: Path) -> None:
    write_parts(tmp_path, torch.zeros(5, 7), rows=(2, 3), whole=(1 << 40, 7))
    refused(tmp_path, r"the parts of a\.weight do not make up its shape")


# ---- GGUF ----


def test_a_gguf_file_that_is_cut_off(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-50])
    refused(path, r"is cut off: blk\.1\.\S+ reaches to byte \d+, the file has \d+")


def test_an_unknown_gguf_architecture(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lamas"))
    refused(path, r"model_type 'gguf:lamas' is not in the table of architectures; attention-like tensors: blk\.0\.attn_q\.weight")


# ---- what the tensors mean ----


def changed(tmp_path: Path, *, state: dict[str, Any] | None = None, drop: str = "", **config: Any) -> Path:
    tensors = {**llama(), **(state or {})}
    return write_folder(tmp_path / "m", {name: tensor for name, tensor in tensors.items() if name != drop}, {**CONFIG, **config})


@pytest.mark.parametrize(
    ("config", "pattern"),
    [
        ({"num_attention_heads": 8}, r"q_proj\.weight in .*model\.safetensors has shape \[24, 29\], but .*config\.json means \[48, 29\]"),
        ({"num_key_value_heads": 4}, r"k_proj\.weight in .* has shape \[12, 29\], but .* means \[24, 29\]"),
        ({"head_dim": 5}, r"has shape \[24, 29\], but .* means \[20, 29\]\n\(rows H\*q; num_attention_heads = 4, size of q = 5"),
        ({"hidden_size": 31}, r"input_layernorm\.weight in .* has 29 numbers, but .* means 31"),
        ({"num_hidden_layers": 3}, "layer 2 has no self_attn.q_proj.weight; found nothing"),
        ({"num_hidden_layers": 1}, r"config\.json says num_hidden_layers = 1, but .*model\.safetensors has a layer 1"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 query heads cannot share num_key_value_heads = 3 key-value heads"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0 query heads"),
        ({"num_attention_heads": 1 << 30}, "query heads cannot"),
        ({"num_hidden_layers": 1 << 30}, "layers cannot be"),
        ({"num_attention_heads": "4"}, "num_attention_heads = 4 is not a whole number"),
        ({"num_attention_heads": None}, "has no num_attention_heads, which llama needs"),
        ({"head_dim": None}, "hidden_size = 29 is not a multiple of num_attention_heads = 4, and no head size is stated"),
        ({"model_type": "unheard_of"}, r"model_type 'unheard_of' is not in the table of architectures; attention-like tensors: model\.layers\.0\.self_attn"),
        ({"model_type": None}, "nothing says what architecture this is"),
        ({"model_type": ["llama"]}, "is not in the table of architectures"),
        ({"model_type": "gpt_neox"}, r"no tensor of a gpt_neox layer such as layers\.0\.attention\.query_key_value; found model"),
        ({"model_type": "gpt_bigcode", "multi_query": 3}, "no layout of gpt_bigcode has multi_query as given there"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, but there is a layer 1"),
    ],
)  # fmt: skip
def test_a_configuration_that_contradicts_the_tensors_names_both_numbers(config: dict[str, Any], pattern: str, tmp_path: Path) -> None:
    refused(changed(tmp_path, **config), pattern)


def test_a_missing_projection_lists_what_is_there(tmp_path: Path) -> None:
    refused(changed(tmp_path, drop=Q.replace(".q_", ".k_")), r"layer 0 has no self_attn\.k_proj\.weight; found input_layernorm\.weight, self_attn\.o_proj")


def test_a_missing_norm_is_not_passed_over(tmp_path: Path) -> None:
    refused(changed(tmp_path, drop="model.layers.1.input_layernorm.weight"), r"layer 1 has no input_layernorm\.weight")


def test_a_norm_that_the_layout_does_not_know_is_refused(tmp_path: Path) -> None:
    state = {f"model.layers.{i}.self_attn.q_norm.weight": torch.ones(6) for i in range(2)}
    refused(changed(tmp_path, state=state), r"layer 0 has self_attn\.q_norm\.weight, which layout llama does not use")


def test_an_empty_tensor_of_a_partitioned_checkpoint(tmp_path: Path) -> None:
    refused(changed(tmp_path, state={Q: torch.zeros(0)}), r"is empty \(shape \[0\]\): a part of a partitioned training checkpoint")


@pytest.mark.parametrize("ending", ["qweight", "scales", "SCB", "weight.absmax", "weight_packed"])
def test_quantised_weights_whose_scales_are_not_applied(ending: str, tmp_path: Path) -> None:
    state = {Q.replace("weight", ending): torch.zeros(3, dtype=torch.int32)}
    refused(changed(tmp_path, state=state), rf"q_proj is quantised \(\.{ending}\) and its scales are not applied")


def test_a_checkpoint_of_packed_integers_alone(tmp_path: Path) -> None:
    state: dict[str, Any] = {name: tensor for name, tensor in llama().items() if "proj" not in name}
    for name in llama():
        if "proj" in name:
            state[name.replace("weight", "qweight")] = torch.zeros(3, 24, dtype=torch.int32)
            state[name.replace("weight", "scales")] = torch.zeros(1, 24)
    refused(
        write_folder(tmp_path / "m", state, CONFIG), "_proj.* belongs to a matrix of packed integers, which are not unpacked here; take the original weights"
    )


def test_scales_of_a_shape_that_fits_nothing(tmp_path: Path) -> None:
    state = {Q: torch.zeros(24, 29, dtype=torch.int8), Q.replace("weight", "weight_scale"): torch.zeros(5, 3)}
    refused(changed(tmp_path, state=state), "it is not clear which belongs to which number")


def test_eight_bit_numbers_whose_scales_are_missing(tmp_path: Path) -> None:
    state = {Q: torch.zeros(24, 29).to(torch.float8_e4m3fn)}
    refused(changed(tmp_path, state=state, quantization_config={"quant_method": "fp8"}), "holds F8_E4M3 numbers, and their scales are not in the file")


def test_integers_without_scales(tmp_path: Path) -> None:
    from headrank.factors import head_factors

    checkpoint = open_checkpoint(changed(tmp_path, state={Q: torch.zeros(24, 29, dtype=torch.int8)}))
    architecture = describe(checkpoint)
    with pytest.raises(HeadrankError, match="holds I8, quantised numbers whose scales are not applied"):
        head_factors(checkpoint, architecture, architecture.layers[0], "qk")


def test_a_fused_matrix_stored_the_other_way_round(tmp_path: Path) -> None:
    """nanoGPT's c_attn is a Linear, GPT-2's a Conv1D: the same names, one the other's transpose."""
    layout = LAYOUTS["nanogpt"]
    heads = make_heads(4, 4, d=24)
    config = {**layout.config(heads[0]), "model_type": "gpt2"}
    refused(write_folder(tmp_path, state_of(layout, heads), config), r"has shape \[72, 24\], but .* means \[24, 72\]")


def test_a_configuration_that_is_no_json_object(tmp_path: Path) -> None:
    folder = changed(tmp_path)
    for text, pattern in (("[1]", "a JSON object is needed, found a list"), ("{", "not JSON"), ("", "the file is empty")):
        (folder / "config.json").write_text(text, encoding="utf-8")
        refused(folder, rf"config\.json: {pattern}")


def test_no_configuration_at_all(tmp_path: Path) -> None:
    save_file(llama(), tmp_path / "model.safetensors")
    refused(tmp_path, "nothing says what architecture this is")


# ---- adapters ----


def test_an_adapter_without_its_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    save_file({"x.lora_A.weight": torch.zeros(2, 3)}, tmp_path / "adapter_model.safetensors")
    refused(tmp_path, "an adapter without the model that it belongs to; give the model, and this folder with --adapter")


def test_files_that_change_after_opening(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(changed(tmp_path))
    shutil.copy(tmp_path / "m" / "config.json", tmp_path / "m" / "model.safetensors")
    with pytest.raises(HeadrankError, match="cannot be read, the file changed"):
        checkpoint.read("model.layers.1.self_attn.v_proj.weight")


def test_the_known_heads_are_read_where_nothing_is_wrong(tmp_path: Path) -> None:
    from tests.architectures.test_layouts import check

    check(open_checkpoint(changed(tmp_path)), HEADS)
    assert LLAMA.groups == (1, 2, 4)
