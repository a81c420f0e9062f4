"""Models and tokenizers of transformers from local files: whole, quiet, offline, and without running anything that a checkpoint brings."""

import json
import os
import pickle
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrank.errors import HeadrankError
from headrank.hf_loading import load_tokenizer_ids, quiet
from headrank.huggingface import TransformersRunner
from tests.test_huggingface import GROUPED, Case, apart, build, case_of, measured


def saved(folder: Path, kind: str = "llama", **config: Any) -> Any:
    model = build(case_of(kind))
    with quiet():
        model.save_pretrained(folder)
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return model


def load(path: Path, dtype: torch.dtype = torch.float32) -> TransformersRunner:
    return TransformersRunner.load(path, device=torch.device("cpu"), dtype=dtype)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **settings: Any) -> None:
        raise AssertionError("the network was asked for")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "t5", "mixtral"])
def test_a_saved_folder_gives_what_the_model_gave(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = saved(tmp_path, kind)
    assert apart(measured(load(tmp_path), "right"), measured(TransformersRunner(model), "right")) == 0
    assert capfd.readouterr() == ("", "")


def test_a_folder_with_pytorch_files_is_read_as_well(tmp_path: Path) -> None:
    model = saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert apart(measured(load(tmp_path), "right"), measured(TransformersRunner(model), "right")) == 0
    assert apart(measured(load(tmp_path / "pytorch_model.bin"), "right"), measured(TransformersRunner(model), "right")) == 0


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with (tmp_path / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"embed_tokens.weight": Trap()}, file)
    with pytest.raises(HeadrankError, match="transformers cannot load it"):
        load(tmp_path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.usefixtures("no_network")
def test_code_of_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    saved(tmp_path, model_type="trap", auto_map={"AutoConfig": "code.Config", "AutoModel": "code.Model"})
    (tmp_path / "code.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'sprung')!r})\n")
    with pytest.raises(HeadrankError, match="transformers cannot load it"):
        load(tmp_path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.usefixtures("no_network")
def test_a_kernel_that_a_config_names_is_not_fetched(tmp_path: Path) -> None:
    model = saved(tmp_path, attn_implementation="someone/kernel", experts_implementation="someone/kernel")
    assert apart(measured(load(tmp_path), "none"), measured(TransformersRunner(model), "none")) == 0


def test_a_folder_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["layers.1.self_attn.k_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HeadrankError, match=r"lacks 1 tensors that LlamaModel needs, layers\.1\.self_attn\.k_proj\.weight among them"):
        load(tmp_path)


def test_a_tensor_of_another_shape_than_the_config_says_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, head_dim=8)
    with pytest.raises(HeadrankError, match="transformers cannot load it"):
        load(tmp_path)


def test_a_model_saved_with_its_head_needs_no_pooler(tmp_path: Path) -> None:
    with quiet():
        model = transformers.BertForMaskedLM(build(case_of("bert")).config).eval()
        model.save_pretrained(tmp_path)
    runner = load(tmp_path)
    assert type(runner.model).__name__ == "BertModel"
    assert apart(measured(runner, "none"), measured(TransformersRunner(model), "none")) == 0


def test_quantised_checkpoints_and_adapters_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(HeadrankError, match=r"quantised \(gptq\); give the unquantised model, or use --source weights"):
        load(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(HeadrankError, match="an adapter"):
        load(tmp_path)


def test_other_files_are_refused_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(HeadrankError, match="no such file or folder"):
        load(tmp_path / "nothing")
    (tmp_path / "state.pt").write_bytes(b"PK")
    with pytest.raises(HeadrankError, match=r"transformers loads folders with a config\.json, and GGUF files"):
        load(tmp_path / "state.pt")
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(b"GGUF")
    with pytest.raises(HeadrankError, match="transformers reads no split GGUF files"):
        load(tmp_path / "m-00001-of-00002.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\3")
    with pytest.raises(HeadrankError, match="transformers cannot load it"):
        load(tmp_path / "broken.gguf")


def test_without_transformers_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(HeadrankError, match=r"pip install 'headrank\[hf\]'"):
        load(tmp_path)


# Tokenizers


def tokenizer_folder(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {word: i for i, word in enumerate(["[UNK]", "[CLS]", "[SEP]", "[PAD]", "a", "b", "c"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(pad_id=3, length=5)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_texts_become_ids_whole_and_without_special_tokens_which_are_told_apart(tmp_path: Path) -> None:
    found = load_tokenizer_ids(tokenizer_folder(tmp_path), ["a b c a b c a b", "c"])
    assert [ids.tolist() for ids in found.ids] == [[4, 5, 6, 4, 5, 6, 4, 5], [6]]
    assert (found.before, found.after) == ((1,), (2,))


def test_a_tokenizer_in_the_library_s_own_form_gives_the_same(tmp_path: Path) -> None:
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_folder(tmp_path) / "tokenizer.json"), unk_token="[UNK]")
    own = tmp_path / "own"
    fast.save_pretrained(own)
    assert load_tokenizer_ids(own, ["a b c a b c"]).ids[0].tolist() == [4, 5, 6, 4, 5, 6]


@pytest.mark.usefixtures("no_network")
def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    for kind in ("llama", "gpt2", "bert", "t5"):
        saved(tmp_path / kind, kind)
        with pytest.raises(HeadrankError, match="has no tokenizer"):
            load_tokenizer_ids(tmp_path / kind, ["some text"])


def written_as_gguf(path: Path, model: Any) -> Path:
    """A qwen2 model as one GGUF file of float32 tensors, with the names that llama.cpp gives them."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    names = {"self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"} | {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
    for name, tensor in model.state_dict().items():
        if name.startswith("layers."):
            _, layer, rest = name.split(".", 2)
            module, _, kind = rest.rpartition(".")
            name = f"blk.{layer}.{names[module]}.{kind}"
        else:
            name = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}[name]
        writer.add_tensor(name, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.usefixtures("no_network")
def test_a_gguf_file_gives_what_the_model_gave(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = build(Case("qwen2", settings=GROUPED))
    path = written_as_gguf(tmp_path / "model.gguf", model)
    wanted = measured(TransformersRunner(model), "right")
    for given in (path, tmp_path):
        assert apart(measured(load(given), "right"), wanted) < 1e-6
    assert capfd.readouterr() == ("", "")
