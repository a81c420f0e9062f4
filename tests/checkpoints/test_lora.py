"""Adapters against W + (alpha / r) B A worked out here, and adapters that belong elsewhere."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrank.architectures import describe
from headrank.checkpoints import Checkpoint, open_checkpoint
from headrank.errors import HeadrankError
from tests.checkpoints.test_formats import CONFIG, llama
from tests.checkpoints.writing import LAYOUTS, State, make_heads, state_of, width_of, write_folder

Q = "model.layers.0.self_attn.q_proj"
A, B = torch.randn(5, 29), torch.randn(24, 5)


def adapter(folder: Path, tensors: State | None = None, **settings: Any) -> Path:
    folder.mkdir()
    pair = {f"base_model.model.{Q}.lora_A.weight": A, f"base_model.model.{Q}.lora_B.weight": B}
    save_file(pair if tensors is None else tensors, folder / "adapter_model.safetensors")
    text = json.dumps({"peft_type": "LORA", "r": 5, "lora_alpha": 16, **settings})
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    return folder


def base(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "base", llama(), CONFIG)


def opened(tmp_path: Path, tensors: State | None = None, **settings: Any) -> Checkpoint:
    return open_checkpoint(base(tmp_path), adapter=adapter(tmp_path / "adapter", tensors, **settings))


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, 16 / 5),
        ({"use_rslora": True}, 16 / 5**0.5),
        ({"lora_alpha": 3}, 3 / 5),
        ({"alpha_pattern": {"q_proj": 7}}, 7 / 5),
        ({"alpha_pattern": {"k_proj": 7}}, 16 / 5),
    ],
)
def test_the_product_is_added_with_its_scale(settings: dict[str, Any], scale: float, tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, **settings)
    torch.testing.assert_close(checkpoint.read(f"{Q}.weight"), llama()[f"{Q}.weight"] + scale * B @ A)
    other = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(checkpoint.read(other), llama()[other])
    assert describe(checkpoint).remarks == (f"1 matrices have the adapter {tmp_path / 'adapter' / 'adapter_model.safetensors'} added",)


def test_a_matrix_stored_the_other_way_round(tmp_path: Path) -> None:
    layout = LAYOUTS["gpt2"]
    state = state_of(layout, make_heads(4, 4, d=width_of(layout)))
    name = "transformer.h.0.attn.c_attn"
    folder = write_folder(tmp_path / "base", state, layout.config(make_heads(4, 4)[0]))
    a, b = torch.randn(5, 24), torch.randn(72, 5)
    pair = {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    checkpoint = open_checkpoint(folder, adapter=adapter(tmp_path / "adapter", pair, fan_in_fan_out=True))
    torch.testing.assert_close(checkpoint.read(f"{name}.weight"), state[f"{name}.weight"] + 16 / 5 * (b @ a).T)


def test_modules_that_were_trained_whole_stand_for_the_models(tmp_path: Path) -> None:
    gain = torch.rand(29)
    checkpoint = opened(tmp_path, {"base_model.model.model.layers.0.input_layernorm.modules_to_save.default.weight": gain})
    assert torch.equal(checkpoint.read("model.layers.0.input_layernorm.weight"), gain)


def test_a_bfloat16_model_gets_its_adapter_in_float32(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "base", {name: tensor.bfloat16() for name, tensor in llama().items()}, CONFIG)
    changed = open_checkpoint(folder, adapter=adapter(tmp_path / "adapter")).read(f"{Q}.weight")
    torch.testing.assert_close(changed, llama()[f"{Q}.weight"].bfloat16().float() + 16 / 5 * B @ A)


def test_the_fingerprint_is_of_both(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path)
    plain = open_checkpoint(tmp_path / "base")
    assert checkpoint.fingerprint() != plain.fingerprint()
    other = open_checkpoint(tmp_path / "base", adapter=adapter(tmp_path / "other", lora_alpha=3))
    assert len({checkpoint.fingerprint(), other.fingerprint(), plain.fingerprint()}) == 3


@pytest.mark.parametrize(
    ("tensors", "settings", "pattern"),
    [
        ({f"base_model.model.{Q}.lora_A.weight": A}, {}, "has lora_A alone"),
        ({f"{Q}.lora_A.weight": A, f"{Q}.lora_B.weight": torch.zeros(23, 5)}, {}, r"have shapes \[23, 5\] and \[5, 29\], the matrix \[24, 29\]"),
        ({f"{Q}.lora_A.weight": A, f"{Q}.lora_B.weight": torch.zeros(24, 4)}, {}, "the adapter belongs to another model"),
        ({"model.layers.7.self_attn.q_proj.lora_A.weight": A}, {}, r"is for model\.layers\.7\.self_attn\.q_proj\.weight, which .* does not have"),
        (None, {"fan_in_fan_out": True}, "the adapter belongs to another model"),
        (None, {"use_dora": True}, "use_dora is set, and DoRA's magnitudes cannot be added"),
        (None, {"peft_type": "IA3"}, "an adapter of type 'IA3'"),
        ({"x.y": A}, {}, r"x\.y is no part of a LoRA adapter"),
        ({"model.embed_tokens.lora_embedding_A": A}, {}, "cannot be added; merge the adapter"),
        ({f"{Q}.weight": torch.zeros(3)}, {}, r"has shape \[3\], the model's \[24, 29\]"),
    ],
)  # fmt: skip
def test_an_adapter_that_does_not_fit(tensors: State | None, settings: dict[str, Any], pattern: str, tmp_path: Path) -> None:
    with pytest.raises(HeadrankError, match=pattern):
        opened(tmp_path, tensors, **settings)


def test_a_folder_that_is_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(HeadrankError, match="no adapter; a folder with adapter_config"):
        open_checkpoint(base(tmp_path), adapter=tmp_path)


def test_an_adapter_without_weights(tmp_path: Path) -> None:
    (adapter(tmp_path / "adapter") / "adapter_model.safetensors").unlink()
    with pytest.raises(HeadrankError, match="the adapter's weights are missing"):
        open_checkpoint(base(tmp_path), adapter=tmp_path / "adapter")
