"""Every GGUF row of the table against the same heads, named and fused as llama.cpp's converters write them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrank.architectures import describe
from headrank.architectures.table import Row, families
from headrank.checkpoints import open_checkpoint
from tests.architectures.test_layouts import operators
from tests.checkpoints import latent
from tests.checkpoints.writing import Heads, State, make_heads, one_after_the_other

gguf = pytest.importorskip("gguf")

EQUAL = {"rtol": 1e-4, "atol": 1e-4}
ROWS = [row for row in families() if row.model_types and row.model_types[0].startswith("gguf:")]
PLAIN = [row for row in ROWS if "nope" not in row.projections["k"]]


def write(path: Path, architecture: str, tensors: State, facts: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in facts.items():
        add = writer.add_array if isinstance(value, list) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.contiguous().numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors_of(row: Row, layers: list[Heads], attention_at: list[int]) -> State:
    """By the name of the row's own fields: what a file of that kind holds."""
    tensors: dict[str, Tensor] = {}
    d = layers[0].W_Q.shape[1]
    for i, h in zip(attention_at, layers, strict=True):
        start = f"blk.{i}."
        names = {step.name for key in "qkv" for chains in row.projections[key].values() for chain in chains for step in chain}
        if names == {"attn_qkv"}:
            tensors[f"{start}attn_qkv.weight"] = one_after_the_other(h)
        else:
            q = torch.cat([h.q, torch.full_like(h.q, 7.0)], 1) if "qwen3next" in row.name else h.q
            tensors |= {f"{start}attn_q.weight": q.flatten(0, 1), f"{start}attn_k.weight": h.k.flatten(0, 1), f"{start}attn_v.weight": h.v.flatten(0, 1)}
        tensors[f"{start}attn_output.weight"] = h.o
        tensors |= {f"{start}{norm.name}.weight": torch.ones(d) for key, norm in row.norms.items() if key == "norm" and norm.name}
        tensors |= {f"{start}{norm.name}.weight": torch.ones(6) for key, norm in row.norms.items() if key != "norm" and norm.name}
        if "falcon_new" in row.name:
            tensors[f"{start}attn_norm.weight"] = torch.ones(d)  # the MLP's
    return tensors


@pytest.mark.parametrize(("row", "name"), [(row, name) for row in PLAIN for name in row.model_types], ids=lambda x: x if isinstance(x, str) else x.name)
def test_factors_multiply_to_each_heads_operator(row: Row, name: str, tmp_path: Path) -> None:
    layers, at = make_heads(4, 2), [1, 3] if row.flags["hybrid"] else [0, 1]
    depth = 4 if row.flags["hybrid"] else 2
    tensors = tensors_of(row, layers, at) | ({f"blk.{i}.ssm_in.weight": torch.ones(3, 3) for i in range(depth)} if row.flags["hybrid"] else {})
    facts = {
        "block_count": depth, "embedding_length": 29, "context_length": 41, "attention.head_count": 4, "attention.key_length": 6, "attention.value_length": 6,
        "attention.head_count_kv": [2 if i in at else 0 for i in range(depth)] if row.flags["hybrid"] else 2,
    }  # fmt: skip
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", name.removeprefix("gguf:"), tensors, facts))
    architecture = describe(checkpoint)
    assert architecture.family == row.name
    assert [layer.index for layer in architecture.layers] == at
    for number, heads in enumerate(layers):
        for circuit in ("qk", "ov"):
            torch.testing.assert_close(operators(checkpoint, architecture, number, circuit, raw=True), heads.operators(circuit), **EQUAL)
    assert (architecture.n_layer, architecture.n_head, architecture.n_kv_head, architecture.d_head) == (depth, 4, 2, 6)


@pytest.mark.parametrize("has_q_latent", [True, False])
@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("part", ["both", "nope", "rope"])
def test_latent_attention(has_q_latent: bool, is_split: bool, part: str, tmp_path: Path) -> None:
    layers = latent.make_latent()
    tensors = latent.gguf_tensors(layers, has_q_latent=has_q_latent, is_split=is_split)
    facts = {
        "block_count": 2, "embedding_length": latent.WIDTH, "attention.head_count": latent.H, "attention.kv_lora_rank": latent.LATENT,
        "attention.q_lora_rank": latent.Q_LATENT, "rope.dimension_count": latent.ROPE,
    }  # fmt: skip
    if is_split:  # as an attention of one key-value head of the latent's size
        facts |= {"attention.head_count_kv": 1, "attention.key_length": latent.LATENT + latent.ROPE, "attention.value_length": latent.LATENT}
        facts |= {"attention.key_length_mla": latent.NOPE + latent.ROPE, "attention.value_length_mla": latent.VALUE}
    else:
        facts |= {"attention.head_count_kv": latent.H, "attention.key_length": latent.NOPE + latent.ROPE, "attention.value_length": latent.VALUE}
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", "deepseek2", tensors, facts))
    architecture = describe(checkpoint)
    for number, layer in enumerate(layers):
        torch.testing.assert_close(operators(checkpoint, architecture, number, "qk", mla_part=part), layer.operators("qk", part), **EQUAL)
        torch.testing.assert_close(operators(checkpoint, architecture, number, "ov"), layer.operators("ov"), **EQUAL)
    assert (architecture.kind, architecture.n_kv_head) == ("mla", latent.H)
    assert architecture.kv_values_per_token == 2 * (latent.LATENT + latent.ROPE)


def test_windows_alternate_where_the_architecture_says_so(tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.name == "gguf_gemma2")
    facts = {
        "block_count": 2, "embedding_length": 29, "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 6,
        "attention.value_length": 6, "attention.sliding_window": 11,
    }  # fmt: skip
    path = write(tmp_path / "m.gguf", "gemma2", tensors_of(row, make_heads(4, 2), [0, 1]), facts)
    assert [layer.window for layer in describe(open_checkpoint(path)).layers] == [11, None]
