"""Latent attention, low-rank keys, and headrank's own checkpoints against operators worked out by hand."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headrank.architectures import describe
from headrank.checkpoints import open_checkpoint
from headrank.config import ModelConfig
from headrank.errors import HeadrankError
from headrank.factors import head_factors
from headrank.model import Decoder, new_decoder
from tests.architectures.test_layouts import operators
from tests.checkpoints.latent import LATENT, NOPE, ROPE, VALUE, H, deepseek, make_latent
from tests.checkpoints.writing import write_folder

EQUAL = {"rtol": 1e-4, "atol": 1e-4}  # products of four float32 matrices with entries of about 10
LAYERS = make_latent()


@pytest.mark.parametrize("has_q_latent", [True, False])
@pytest.mark.parametrize("part", ["both", "nope", "rope"])
def test_deepseek_with_and_without_a_latent_of_queries(has_q_latent: bool, part: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_folder(tmp_path, *deepseek(LAYERS, has_q_latent=has_q_latent)))
    architecture = describe(checkpoint)
    for number, layer in enumerate(LAYERS):
        torch.testing.assert_close(operators(checkpoint, architecture, number, "qk", mla_part=part), layer.operators("qk", part), **EQUAL)
        torch.testing.assert_close(operators(checkpoint, architecture, number, "ov", mla_part=part), layer.operators("ov"), **EQUAL)
    first = architecture.layers[0]
    assert (architecture.kind, architecture.n_head, architecture.d_head, first.d_qk, first.d_v) == ("mla", H, NOPE, NOPE + ROPE, VALUE)
    assert architecture.kv_values_per_token == 2 * (LATENT + ROPE)
    assert "latent gain" in architecture.folded


def test_raw_latent_matrices_are_without_the_gain_between(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_folder(tmp_path, *deepseek(LAYERS, has_q_latent=True)))
    x = LAYERS[0]
    plain = (x.down.double() @ x.v_up.double()) @ x.W_O.double()
    torch.testing.assert_close(operators(checkpoint, describe(checkpoint), 0, "ov", raw=True), plain, **EQUAL)


def test_the_prediction_layer_is_left_apart(tmp_path: Path) -> None:
    state, config = deepseek(LAYERS, has_q_latent=True)
    state |= {name.replace("layers.1.", "layers.2."): tensor.clone() for name, tensor in state.items() if "layers.1." in name}
    with pytest.raises(HeadrankError, match=r"num_hidden_layers = 2, but .* has a layer 2"):
        describe(open_checkpoint(write_folder(tmp_path / "silent", state, config)))
    architecture = describe(open_checkpoint(write_folder(tmp_path / "said", state, {**config, "num_nextn_predict_layers": 1})))
    assert [layer.index for layer in architecture.layers] == [0, 1]
    assert architecture.remarks == ("layer 2 predicts further tokens and is left apart",)


KINDS = {
    "mha": {}, "gqa": {"n_kv_head": 2}, "mqa": {}, "mla": {"d_latent": 11, "d_rope": 2}, "mla without rotary part": {"d_latent": 11}, "lrkv": {"rank": 3},
    "lrkv without rank": {"rank": 0},
}  # fmt: skip


def own(kind: str, folder: Path) -> Decoder:
    geometry = {"n_layer": 3, "n_head": 4, "d_head": 6, "d_model": 26, "d_mlp": 31, "vocab_size": 37, "context": 17}
    config = ModelConfig(kind=kind.split()[0], **geometry, **KINDS[kind])
    model = new_decoder(config, seed=1)
    save_file(dict(model.state_dict()), folder / "model.safetensors")
    (folder / "config.json").write_text(config.to_json(), encoding="utf-8")
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_own_checkpoints_give_what_their_attention_computes(kind: str, tmp_path: Path) -> None:
    """At position 0 the rotary embedding is the identity; QK norm leaves each head's direction."""
    model = own(kind, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    architecture = describe(checkpoint)
    config = model.config
    x = torch.randn(5, 1, config.d_model, generator=torch.Generator().manual_seed(2))
    width = (config.d_rope or config.d_head) // 2
    rotary = (torch.ones(1, 1, width), torch.zeros(1, 1, width))
    for layer, block in zip(architecture.layers, model.transformer["h"], strict=True):
        qk, ov = (head_factors(checkpoint, architecture, layer, circuit) for circuit in ("qk", "ov"))
        q, k, v = (part[:, 0].detach() for part in block.attn.qkv(x, rotary))
        made = [torch.einsum("nd,hdk->nhk", x[:, 0], factor) for factor in (qk.left, qk.right, ov.left)]
        for found, expected in zip(made[:2], (q, k), strict=True):
            torch.testing.assert_close(torch.nn.functional.normalize(found, dim=-1), torch.nn.functional.normalize(expected[:, : found.shape[1]], dim=-1))
        torch.testing.assert_close(made[2], v[:, : made[2].shape[1]])
        z = torch.randn(5, config.n_head, config.d_head, generator=torch.Generator().manual_seed(3))
        torch.testing.assert_close(torch.einsum("nhk,hdk->nd", z, ov.right), block.attn.c_proj(z.flatten(1)).detach())
    assert architecture.kind == config.kind
    assert architecture.kv_values_per_token == 3 * config.kv_values_per_token_and_layer
    assert architecture.n_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert architecture.folded == ()


def test_a_rotary_part_that_is_not_there_cannot_be_chosen(tmp_path: Path) -> None:
    own("mla without rotary part", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    architecture = describe(checkpoint)
    with pytest.raises(HeadrankError, match="layer 0 has no separate rotary part"):
        head_factors(checkpoint, architecture, architecture.layers[0], "qk", mla_part="rope")
