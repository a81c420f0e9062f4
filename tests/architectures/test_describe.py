"""Geometry, windows, prefixes, stacks and layers that differ; and a layout of one's own."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from headrank.architectures import Architecture, describe
from headrank.architectures.table import EXAMPLE, families, readable
from headrank.checkpoints import open_checkpoint
from headrank.errors import HeadrankError
from headrank.factors import head_factors
from tests.architectures.test_layouts import check, operators
from tests.checkpoints.writing import LAYOUTS, State, make_heads, state_of, write_folder

LLAMA = LAYOUTS["llama"]
HEADS = make_heads(4, 2)
CONFIG = LLAMA.config(HEADS[0])


def llama(layers: int = 2) -> State:
    heads = [HEADS[i % 2] for i in range(layers)]
    return state_of(LLAMA, heads)


def described(folder: Path, *, layers: int = 2, state: State | None = None, **config: Any) -> Architecture:
    tensors = llama(layers) if state is None else state
    return describe(open_checkpoint(write_folder(folder, tensors, {**CONFIG, "num_hidden_layers": layers, **config})))


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 5}, "5555555"),
        ({"model_type": "mistral", "sliding_window": None}, "......."),
        ({"model_type": "qwen2", "sliding_window": 5, "use_sliding_window": False}, "......."),
        ({"model_type": "qwen2", "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 3}, "...5555"),
        ({"model_type": "gemma2", "sliding_window": 5}, "5.5.5.5"),
        ({"model_type": "gemma2", "sliding_window": 5, "layer_types": ["full_attention"] * 3 + ["sliding_attention"] * 4}, "...5555"),
        ({"model_type": "gpt_oss", "sliding_window": 5}, "5.5.5.5"),
        ({"model_type": "cohere2", "sliding_window": 5}, "555.555"),
        ({"model_type": "cohere2", "sliding_window": 5, "sliding_window_pattern": 3}, "55.55.5"),
        ({"model_type": "llama4_text", "attention_chunk_size": 5}, "555.555"),
        ({"model_type": "llama"}, "......."),
    ],
)
def test_which_layers_are_local(config: dict[str, Any], windows: str, tmp_path: Path) -> None:
    found = described(tmp_path, layers=7, **config)
    assert "".join("." if layer.window is None else str(layer.window) for layer in found.layers) == windows


def test_modernbert_is_global_at_the_first_of_every_three_layers(tmp_path: Path) -> None:
    layout = LAYOUTS["modernbert"]
    heads = make_heads(4, 4, d=24) * 4
    config = {**layout.config(heads[0]), "num_hidden_layers": 8, "local_attention": 128}
    state = state_of(layout, heads)
    del state["model.layers.0.attn_norm.weight"]
    found = describe(open_checkpoint(write_folder(tmp_path, state, config)))
    assert [layer.window for layer in found.layers] == [None, 128, 128, None, 128, 128, None, 128]
    assert found.layers[0].q.parts["q"][0][0].norm is None
    assert found.layers[1].q.parts["q"][0][0].norm is not None


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model."])
def test_the_text_part_of_a_multimodal_checkpoint(prefix: str, tmp_path: Path) -> None:
    state = {name.replace("model.", prefix, 1): tensor for name, tensor in llama().items()}
    state |= {"vision_tower.encoder.layers.0.self_attn.q_proj.weight": torch.zeros(3, 3)}
    inner = {key: value for key, value in CONFIG.items() if key not in ("vocab_size",)}
    config = {"model_type": "some_vision_language_model", "text_config": inner, "vision_config": {"model_type": "unheard_of"}}
    checkpoint = open_checkpoint(write_folder(tmp_path, state, config))
    check(checkpoint, HEADS)
    with pytest.raises(HeadrankError, match="model_type 'unheard_of' is not in the table"):
        describe(checkpoint, part="vision")


def test_what_a_nested_configuration_leaves_out_is_the_librarys_default(tmp_path: Path) -> None:
    heads = make_heads(8, 4, d=12, D=256)
    state = state_of(LAYOUTS["gemma"], heads)
    state |= {f"model.layers.{i}.self_attn.{x}_norm.weight": torch.zeros(256) for i in range(2) for x in "qk"}
    inner = {"model_type": "gemma3_text", "hidden_size": 12, "num_hidden_layers": 2, "sliding_window": 7}
    found = describe(open_checkpoint(write_folder(tmp_path / "nested", state, {"model_type": "gemma3", "text_config": inner})))
    assert (found.n_head, found.n_kv_head, found.d_head) == (8, 4, 256)
    with pytest.raises(HeadrankError, match="has no num_attention_heads"):
        describe(open_checkpoint(write_folder(tmp_path / "flat", state, inner)))


def test_the_defaults_of_nested_configurations_are_the_librarys() -> None:
    transformers = pytest.importorskip("transformers")
    rows = [row for row in families() if row.nested]
    assert len(rows) > 5
    for row in rows:
        for model_type in row.model_types:
            if model_type in ("code_llama", "qwen2_vl", "qwen2_5_vl") or model_type not in transformers.CONFIG_MAPPING:
                continue
            config = transformers.CONFIG_MAPPING[model_type]()
            theirs = {key: getattr(config, key) for key in row.nested}
            assert theirs == row.nested, (row.name, model_type)


def test_the_vision_part_on_request(tmp_path: Path) -> None:
    heads = make_heads(4, 4, d=24)
    vision: State = {}
    for i, h in enumerate(heads):
        start = f"vision_tower.vision_model.encoder.layers.{i}."
        vision |= {f"{start}self_attn.{x}_proj.weight": getattr(h, x).flatten(0, 1).contiguous() for x in "qkv"}
        vision |= {f"{start}self_attn.out_proj.weight": h.o.contiguous(), f"{start}layer_norm1.weight": torch.ones(24)}
    config = {
        "model_type": "llava", "text_config": CONFIG,
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2},
    }  # fmt: skip
    checkpoint = open_checkpoint(write_folder(tmp_path, {**llama(), **vision}, config))
    check(checkpoint, HEADS)
    found = describe(checkpoint, part="vision")
    assert (found.family, found.n_head, found.kv_values_per_token) == ("clip", 4, 0)
    torch.testing.assert_close(operators(checkpoint, found, 1, "qk", raw=True), heads[1].operators("qk"), rtol=1e-5, atol=1e-5)
    with pytest.raises(HeadrankError, match="part 'sound' is not known; known: text, vision"):
        describe(checkpoint, part="sound")
    with pytest.raises(HeadrankError, match="has no vision_config, so there is no vision part"):
        describe(open_checkpoint(write_folder(tmp_path / "plain", llama(), CONFIG)), part="vision")


def test_layers_without_attention_keep_the_numbers_of_the_others(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in llama(5).items() if not re.search(r"layers\.(0|2|3)\.self_attn", name)}
    state |= {f"model.layers.{i}.mamba.in_proj.weight": torch.zeros(3, 3) for i in (0, 2, 3)}
    found = described(tmp_path / "jamba", layers=5, state=state, model_type="jamba")
    assert [layer.index for layer in found.layers] == [1, 4]
    assert found.n_layer == 5
    with pytest.raises(HeadrankError, match=r"layer 0 has no self_attn\.q_proj\.weight"):
        described(tmp_path / "llama", layers=5, state=state)
    types = ["mamba", "attention", "mamba", "attention", "attention"]
    with pytest.raises(HeadrankError, match=r"layer 3 has no self_attn\.q_proj\.weight"):
        described(tmp_path / "promised", layers=5, state=state, model_type="jamba", layer_types=types)


def test_layers_that_read_an_earlier_layers_keys(tmp_path: Path) -> None:
    """The last two of six layers: each takes those of the last earlier layer of its kind."""
    state = {name: tensor for name, tensor in llama(6).items() if not re.search(r"layers\.(4|5)\.self_attn\.(k|v)_proj", name)}
    state |= {f"model.layers.{i}.self_attn.{x}_norm.weight": torch.ones(6) for i in range(6) for x in "qk" if i < 4 or x == "q"}
    types = ["sliding_attention"] * 3 + ["full_attention", "sliding_attention", "full_attention"]
    config = {**CONFIG, "num_hidden_layers": 6, "model_type": "gemma3n_text", "layer_types": types, "num_kv_shared_layers": 2}
    checkpoint = open_checkpoint(write_folder(tmp_path, state, config))
    found = describe(checkpoint)
    assert [layer.k.parts["k"][0][0].weight.tensor.split(".")[2] for layer in found.layers] == ["0", "1", "2", "3", "2", "3"]
    assert [layer.kv_values_per_token for layer in found.layers] == [24] * 4 + [0] * 2
    expected = HEADS[0].W_Q.double() @ HEADS[0].W_K.repeat_interleave(2, 0).double().transpose(1, 2)  # layers 4 and 2 hold the same heads
    torch.testing.assert_close(operators(checkpoint, found, 4, "qk"), expected, rtol=1e-5, atol=1e-5)


def test_key_value_heads_that_differ_by_layer(tmp_path: Path) -> None:
    layers = [make_heads(4, G)[0] for G in (4, 1, 2)]
    checkpoint = open_checkpoint(write_folder(tmp_path, state_of(LAYOUTS["deci"], layers), {**CONFIG, "model_type": "deci", "num_hidden_layers": 3,
                                                                                           "num_key_value_heads_per_layer": [4, 1, 2]}))  # fmt: skip
    found = check(checkpoint, layers)
    assert [layer.n_kv_head for layer in found.layers] == [4, 1, 2]
    assert (found.kind, found.n_kv_head, found.kv_values_per_token) == ("gqa", 4, 2 * 6 * (4 + 1 + 2))


def test_whisper_has_three_stacks(tmp_path: Path) -> None:
    state: State = {"model.encoder.layer_norm.weight": torch.ones(24)}
    stacks = {"encoder.layers.{i}.self_attn": 3, "decoder.layers.{i}.self_attn": 2, "decoder.layers.{i}.encoder_attn": 2}
    known = {}
    for seed, (where, depth) in enumerate(stacks.items()):
        for i in range(depth):
            h = make_heads(4, 4, d=24, seed=10 * seed + i)[0]
            known[where, i] = h
            start = f"model.{where.format(i=i)}"
            state |= {f"{start}.{x}_proj.weight": getattr(h, x).flatten(0, 1).contiguous() for x in "qkv"}
            state |= {f"{start}.out_proj.weight": h.o.contiguous(), f"{start}_layer_norm.weight": torch.ones(24)}
    config = {
        "model_type": "whisper", "d_model": 24, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "vocab_size": 37,
    }  # fmt: skip
    checkpoint = open_checkpoint(write_folder(tmp_path, state, config))
    found = describe(checkpoint)
    assert [(layer.group, layer.index) for layer in found.layers] == [
        *(("encoder", i) for i in range(3)), *(("decoder", i) for i in range(2)), *(("cross", i) for i in range(2)),
    ]  # fmt: skip
    assert found.n_layer == 5
    for number, h in enumerate(known.values()):
        torch.testing.assert_close(operators(checkpoint, found, number, "qk", raw=True), h.operators("qk"), rtol=1e-5, atol=1e-5)


def test_parameters_are_counted_without_masks_and_without_tied_copies(tmp_path: Path) -> None:
    extra = {
        "model.embed_tokens.weight": torch.zeros(37, 29), "lm_head.weight": torch.zeros(37, 29), "model.rotary_emb.inv_freq": torch.zeros(3),
        "model.layers.0.self_attn.masked_bias": torch.zeros(5), "model.position_ids": torch.zeros(11, dtype=torch.int64),
    }  # fmt: skip
    plain = sum(tensor.numel() for tensor in llama().values())
    assert described(tmp_path / "a", state={**llama(), **extra}).n_parameters == plain + 2 * 37 * 29
    assert described(tmp_path / "b", state={**llama(), **extra}, tie_word_embeddings=True).n_parameters == plain + 37 * 29


# ---- a layout of one's own ----


def strange(folder: Path, *, model_type: str = "unheard_of") -> Path:
    state: State = {}
    for i, h in enumerate(HEADS):
        fused = torch.cat([h.k.flatten(0, 1), h.q.flatten(0, 1), h.v.flatten(0, 1)])
        state |= {f"net.blocks.{i}.att.kqv": fused, f"net.blocks.{i}.att.out": h.o.contiguous(), f"net.blocks.{i}.pre": torch.full((29,), 2.0)}
    return write_folder(folder, state, {"model_type": model_type, "layers": 2, "width": 29, "heads": 4})


LAYOUT = """
prefixes = ["net."]
layer = "blocks.{i}."
n_layer = "layers"
d_model = "width"
H = "heads"
G = 2
D = 6
norm = "rms pre"
qkv = "att.kqv: G*k H*q G*v"
o = "att.out: H*v"
"""


def test_an_unknown_architecture_is_read_by_a_layout_file(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(strange(tmp_path / "m"))
    layout = tmp_path / "layout.toml"
    layout.write_text(LAYOUT, encoding="utf-8")
    found = describe(checkpoint, layout=layout)
    assert (found.n_head, found.n_kv_head, found.d_head, found.folded) == (4, 2, 6, ("pre-norm gain",))
    for number, heads in enumerate(HEADS):
        f = head_factors(checkpoint, found, found.layers[number], "qk")
        folded = f.left.double()[list(f.left_of_head)] @ f.right.double()[list(f.right_of_head)].transpose(1, 2)
        torch.testing.assert_close(folded, 4 * heads.operators("qk"), rtol=1e-5, atol=1e-5)


def test_an_unknown_architecture_is_not_guessed_and_the_message_shows_how_to_describe_it(tmp_path: Path) -> None:
    with pytest.raises(HeadrankError) as caught:
        describe(open_checkpoint(strange(tmp_path)))
    text = str(caught.value)
    assert "attention-like tensors: net.blocks.0.att.kqv, net.blocks.0.att.out" in text
    assert text.endswith(EXAMPLE)


def test_the_example_in_that_message_is_a_layout_that_works(tmp_path: Path) -> None:
    (tmp_path / "layout.toml").write_text(EXAMPLE.replace("D = 64", "D = 6").replace("attn.", "self_attn."), encoding="utf-8")
    checkpoint = open_checkpoint(write_folder(tmp_path / "m", llama(), CONFIG))
    assert len(describe(checkpoint, layout=tmp_path / "layout.toml").layers) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("layer = ", "layers = "), "unknown layers, n_layers; known: D, G, H"),
        (("{i}", "0"), "layer must hold {i} for the number"),
        (('o = "att.out: H*v"', ""), "says nothing about o; an example"),
        (("G*k H*q G*v", "G*k H*q"), "does not say which part is meant"),
        (("G*k H*q G*v", "G*k H*q G*w -> w"), "no size is known for 'w'"),
        (("H*v", "H v"), "is not understood at 'v'"),
        (('norm = "rms pre"', 'norm = "softmax pre"'), "a norm is one of rms, rms\\+1, layernorm, layernorm\\+1"),
        (('norm = "rms pre"', 'norm = "rms post"'), r"layer 0 has no post\.weight; found att\.kqv, att\.out, pre"),
        (("G = 2", "G = -2"), "must be a list of texts"),
        (("G = 2", "G = 3"), "cannot share"),
        (("G = 2", "G = 4"), r"has shape \[48, 29\], but .* means \[72, 29\]"),
        (("D = 6", 'D = "head_size"'), "not a multiple of heads = 4, and no head size is stated"),
        (('n_layer = "layers"', 'n_layer = "depth"'), "has no depth, which layout needs"),
        (("prefixes", "like = 'lama'\nprefixes"), "like = 'lama' is no row of the table; known: headrank"),
        (("prefixes = ", "hybrid = 3\nprefixes = "), "hybrid: must be true or false"),
        (("layer = ", "layer = = "), "not a TOML file"),
    ],
)
def test_a_layout_that_is_wrong_says_where(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    layout = tmp_path / "layout.toml"
    layout.write_text(LAYOUT.replace(*change), encoding="utf-8")
    checkpoint = open_checkpoint(strange(tmp_path / "m"))
    with pytest.raises(HeadrankError, match=message):
        describe(checkpoint, layout=layout)


def test_a_layout_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(HeadrankError, match="cannot be read: No such file"):
        describe(open_checkpoint(strange(tmp_path)), layout=tmp_path / "none.toml")


def test_a_layout_can_build_on_a_row_of_the_table(tmp_path: Path) -> None:
    (tmp_path / "layout.toml").write_text('like = "llama"', encoding="utf-8")
    checkpoint = open_checkpoint(write_folder(tmp_path / "m", llama(), {**CONFIG, "model_type": "my_own_llama"}))
    assert len(describe(checkpoint, layout=tmp_path / "layout.toml").layers) == 2


def test_the_list_of_what_is_read_names_every_model_type_once() -> None:
    rows = readable()
    names = [name for _, types in rows for name in types]
    assert len(names) == len(set(names))
    assert {"llama", "gpt_neox", "deepseek_v3", "whisper", "gguf:llama"} <= set(names)
    json.dumps(rows)
