"""Folding worked out by hand, shared factors, sizes beyond float32, and numbers that are none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrank.architectures import Architecture, describe
from headrank.checkpoints import Checkpoint, open_checkpoint
from headrank.checkpoints.safetensors import SafetensorsCheckpoint
from headrank.diversity import similarity
from headrank.errors import HeadrankError, NotFiniteError
from headrank.factors import HeadFactors, head_factors
from headrank.gram import factored_gram
from headrank.measure import Settings, measure
from headrank.selection import ModelRef
from tests.checkpoints.latent import deepseek, make_latent
from tests.checkpoints.writing import LAYOUTS, State, make_heads, state_of, width_of, write_folder

HEADS = make_heads(4, 2)
H, G, D, WIDTH = 4, 2, 6, 29


def opened(folder: Path, state: State, config: dict[str, Any]) -> tuple[Checkpoint, Architecture]:
    checkpoint = open_checkpoint(write_folder(folder, state, config))
    return checkpoint, describe(checkpoint)


def llama(**changed: Tensor) -> tuple[State, dict[str, Any]]:
    state = state_of(LAYOUTS["llama"], HEADS)
    state |= {"model.layers.0." + name.replace("__", "."): tensor for name, tensor in changed.items()}
    return state, LAYOUTS["llama"].config(HEADS[0])


def factors(folder: Path, circuit: str, *, changed: State | None = None, **options: Any) -> HeadFactors:
    checkpoint, architecture = opened(folder, *llama(**(changed or {})))
    return head_factors(checkpoint, architecture, architecture.layers[0], circuit, **options)


def test_shared_keys_and_values_stand_once(tmp_path: Path) -> None:
    qk, ov = factors(tmp_path, "qk"), factors(tmp_path, "ov")
    assert (qk.left.shape, qk.right.shape) == ((H, WIDTH, D), (G, WIDTH, D))
    assert (ov.left.shape, ov.right.shape) == ((G, WIDTH, D), (H, WIDTH, D))
    assert (qk.left_of_head, qk.right_of_head) == ((0, 1, 2, 3), (0, 0, 1, 1))
    assert (ov.left_of_head, ov.right_of_head) == ((0, 0, 1, 1), (0, 1, 2, 3))
    assert qk.left.dtype == qk.right.dtype == torch.float32


def test_a_bias_of_queries_and_of_values_is_one_more_row_and_a_bias_of_keys_is_left_out(tmp_path: Path) -> None:
    biases = {f"self_attn__{name}_proj__bias": torch.randn(rows) for name, rows in (("q", H * D), ("k", G * D), ("v", G * D), ("o", WIDTH))}
    qk, ov = factors(tmp_path, "qk", changed=biases), factors(tmp_path, "ov", changed=biases)
    assert torch.equal(qk.left[:, WIDTH], biases["self_attn__q_proj__bias"].view(H, D))
    assert torch.equal(ov.left[:, WIDTH], biases["self_attn__v_proj__bias"].view(G, D))
    assert torch.equal(qk.right, HEADS[0].W_K)
    assert torch.equal(ov.right, HEADS[0].W_O.transpose(1, 2))
    raw = factors(tmp_path, "qk", changed=biases, raw=True)
    assert torch.equal(raw.left, HEADS[0].W_Q)


def test_the_norms_gain_scales_rows(tmp_path: Path) -> None:
    gain = torch.rand(WIDTH) + 0.5
    qk = factors(tmp_path, "qk", changed={"input_layernorm__weight": gain})
    torch.testing.assert_close(qk.left, HEADS[0].W_Q * gain.unsqueeze(1))
    torch.testing.assert_close(qk.right, HEADS[0].W_K * gain.unsqueeze(1))
    raw = factors(tmp_path, "qk", changed={"input_layernorm__weight": gain}, raw=True)
    assert torch.equal(raw.left, HEADS[0].W_Q)


def test_moving_a_gain_between_norm_and_matrices_changes_nothing(tmp_path: Path) -> None:
    gain = torch.rand(WIDTH) + 0.5
    inside = factors(tmp_path / "a", "qk", changed={"input_layernorm__weight": gain})
    moved = {f"self_attn__{name}_proj__weight": getattr(HEADS[0], name).flatten(0, 1) * gain for name in "qk"}
    outside = factors(tmp_path / "b", "qk", changed=moved)
    torch.testing.assert_close(inside.left, outside.left)
    torch.testing.assert_close(inside.right, outside.right)


def test_a_layer_norm_centres_and_its_bias_joins_the_row(tmp_path: Path) -> None:
    """W (g * (x - mean) + b) + c, applied to a vector and to the constant 1."""
    layout = LAYOUTS["gpt2"]
    heads = make_heads(4, 4, d=width_of(layout))
    state, d = state_of(layout, heads), width_of(layout)
    g, b, c, x = torch.rand(d) + 0.5, torch.randn(d), torch.randn(3 * d), torch.randn(d)
    state |= {"transformer.h.0.ln_1.weight": g, "transformer.h.0.ln_1.bias": b, "transformer.h.0.attn.c_attn.bias": c}
    checkpoint, architecture = opened(tmp_path, state, layout.config(heads[0]))
    left = head_factors(checkpoint, architecture, architecture.layers[0], "qk").left
    expected = (g * (x - x.mean()) + b) @ heads[0].W_Q + c[:d].view(4, 6)
    torch.testing.assert_close(torch.cat([x, torch.ones(1)]) @ left, expected, rtol=1e-4, atol=1e-4)
    right = head_factors(checkpoint, architecture, architecture.layers[0], "qk").right
    torch.testing.assert_close(x @ right, (g * (x - x.mean())) @ heads[0].W_K, rtol=1e-4, atol=1e-4)


def test_a_qk_norm_that_centres_takes_the_mean_over_each_head_and_adds_its_bias(tmp_path: Path) -> None:
    state, config = llama()
    g, b = torch.rand(D) + 0.5, torch.randn(D)
    state |= {f"model.layers.{i}.self_attn.dense.weight": state.pop(f"model.layers.{i}.self_attn.o_proj.weight") for i in range(2)}
    for i in range(2):
        start = f"model.layers.{i}.self_attn."
        state |= {f"{start}{x}_layernorm.{what}": value.clone() for x in "qk" for what, value in (("weight", g), ("bias", b))}
    checkpoint, architecture = opened(tmp_path, state, {**config, "model_type": "phi", "qk_layernorm": True})
    left = head_factors(checkpoint, architecture, architecture.layers[0], "qk").left
    x = torch.randn(WIDTH)
    q = (x - x.mean()) @ HEADS[0].W_Q
    torch.testing.assert_close(torch.cat([x, torch.ones(1)]) @ left, g * (q - q.mean(-1, keepdim=True)) + b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("factor", [1e-12, 1e20])
@pytest.mark.parametrize("kind", ["llama", "deepseek"])
def test_a_checkpoint_multiplied_by_a_number_has_the_same_similarities(factor: float, kind: str, tmp_path: Path) -> None:
    """Every tensor, gains included: products of four such numbers leave float32's range. (A rotary part is a product of fewer.)"""
    state, config = llama() if kind == "llama" else deepseek(make_latent(), has_q_latent=True)
    found = []
    for scale, name in ((1.0, "plain"), (factor, "scaled")):
        checkpoint, architecture = opened(tmp_path / name, {key: tensor * scale for key, tensor in state.items()}, config)
        for circuit in ("qk", "ov"):
            part = "nope" if kind == "deepseek" and circuit == "qk" else "both"
            f = head_factors(checkpoint, architecture, architecture.layers[0], circuit, mla_part=part)
            found.append(similarity(factored_gram(f.left, f.right, f.left_of_head, f.right_of_head).numpy()))
    for plain, scaled in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(torch.tensor(scaled), torch.tensor(plain), rtol=0, atol=1e-5)


def test_float64_stays_float64(tmp_path: Path) -> None:
    state, config = llama()
    checkpoint, architecture = opened(tmp_path, {name: tensor.double() for name, tensor in state.items()}, config)
    f = head_factors(checkpoint, architecture, architecture.layers[0], "qk")
    assert f.left.dtype == f.right.dtype == torch.float64


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_is_named_by_layer_tensor_and_head(bad: float, tmp_path: Path) -> None:
    state, config = llama()
    state["model.layers.1.self_attn.q_proj.weight"][2 * D + 1, 3] = bad
    state["model.layers.1.self_attn.v_proj.weight"][D + 1, 3] = bad
    checkpoint, architecture = opened(tmp_path, state, config)
    head_factors(checkpoint, architecture, architecture.layers[0], "qk")
    with pytest.raises(NotFiniteError, match=r"^layer 1: model\.layers\.1\.self_attn\.q_proj\.weight of head 2 holds NaN or infinity"):
        head_factors(checkpoint, architecture, architecture.layers[1], "qk")
    with pytest.raises(NotFiniteError, match=r"v_proj\.weight of key-value head 1 holds"):
        head_factors(checkpoint, architecture, architecture.layers[1], "ov")


def test_a_gain_that_is_not_a_number_is_named(tmp_path: Path) -> None:
    gain = torch.ones(WIDTH)
    gain[3] = float("nan")
    with pytest.raises(NotFiniteError, match=r"layer 0: model\.layers\.0\.input_layernorm\.weight holds NaN"):
        factors(tmp_path, "qk", changed={"input_layernorm__weight": gain})
    assert torch.isfinite(factors(tmp_path, "qk", changed={"input_layernorm__weight": gain}, raw=True).left).all()


def test_bad_numbers_of_other_rows_of_a_fused_tensor_do_not_spoil_a_circuit(tmp_path: Path) -> None:
    layout = LAYOUTS["phi3"]
    state = state_of(layout, HEADS)
    state["model.layers.0.self_attn.qkv_proj.weight"][-1, 0] = float("nan")  # the last value row
    checkpoint, architecture = opened(tmp_path, state, layout.config(HEADS[0]))
    assert torch.isfinite(head_factors(checkpoint, architecture, architecture.layers[0], "qk").left).all()
    with pytest.raises(NotFiniteError, match=r"qkv_proj\.weight of key-value head 1"):
        head_factors(checkpoint, architecture, architecture.layers[0], "ov")


def test_only_the_tensors_that_a_circuit_needs_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, architecture = opened(tmp_path, *llama())
    read: list[str] = []
    monkeypatch.setattr(checkpoint, "read", lambda name, original=checkpoint.read: (read.append(name), original(name))[1])
    head_factors(checkpoint, architecture, architecture.layers[1], "qk")
    assert sorted(name.removeprefix("model.layers.1.") for name in set(read)) == [
        "input_layernorm.weight",
        "self_attn.k_proj.weight",
        "self_attn.q_proj.weight",
    ]
    assert len(read) == 3


@pytest.mark.parametrize(("circuit", "options", "message"), [("kv", {}, "circuit 'kv' is not known; known: qk, ov"), ("qk", {"mla_part": "x"}, "MLA part 'x'")])
def test_unknown_choices_list_the_known_ones(circuit: str, options: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(HeadrankError, match=message):
        factors(tmp_path, circuit, **options)


@pytest.mark.parametrize(("name", "block"), [("weight_scale_inv", (4, 8)), ("weight_scale", None), ("weight_scale", "one")])
def test_eight_bit_weights_are_multiplied_by_their_scales(name: str, block: Any, tmp_path: Path) -> None:
    """One scale a block of 4 x 8 (neither divides the matrix), one a row, or one for all."""
    state, config = llama()
    weight = "model.layers.0.self_attn.q_proj.weight"
    rows, columns = state[weight].shape
    scale = {None: torch.rand(rows, 1) + 1, "one": torch.tensor(3.0)}.get(
        block if not isinstance(block, tuple) else 0, torch.rand(rows // 4, -(-columns // 8)) + 1
    )
    stored = (torch.randn(rows, columns) * 8).to(torch.float8_e4m3fn)
    expected = torch.stack([stored.float()[i] * (scale[i // 4].repeat_interleave(8)[:columns] if isinstance(block, tuple) else scale.expand(rows, 1)[i])
                            for i in range(rows)])  # fmt: skip
    state |= {weight: stored, weight.replace("weight", name): scale}
    checkpoint, architecture = opened(tmp_path, state, {**config, "quantization_config": {"weight_block_size": [4, 8]}})
    left = head_factors(checkpoint, architecture, architecture.layers[0], "qk").left
    torch.testing.assert_close(left, expected.unflatten(0, (H, D)).transpose(1, 2))
    assert architecture.remarks == ("matrices are stored as F8_E4M3 with scales, which are applied",)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_numbers_stay_as_they_are_where_that_is_asked_for_and_give_the_same_gram(dtype: torch.dtype, tmp_path: Path) -> None:
    state, config = llama()
    checkpoint, architecture = opened(tmp_path, {name: tensor.to(dtype) for name, tensor in state.items()}, config)
    grams = []
    for as_stored in (False, True):
        qk = head_factors(checkpoint, architecture, architecture.layers[0], "qk", raw=True, as_stored=as_stored)
        assert qk.left.dtype == qk.right.dtype == (dtype if as_stored else torch.float32)
        grams.append(factored_gram(qk.left, qk.right, qk.left_of_head, qk.right_of_head))
    assert torch.equal(*grams)


def test_16_bit_numbers_become_float32_where_something_is_folded_into_them(tmp_path: Path) -> None:
    state, config = llama(self_attn__v_proj__bias=torch.randn(G * D), input_layernorm__weight=torch.rand(WIDTH) + 0.5)
    checkpoint, architecture = opened(tmp_path, {name: tensor.bfloat16() for name, tensor in state.items()}, config)
    qk, ov = (head_factors(checkpoint, architecture, architecture.layers[0], circuit, as_stored=True) for circuit in ("qk", "ov"))
    assert [factor.dtype for factor in (qk.left, qk.right, ov.left, ov.right)] == [torch.float32, torch.float32, torch.float32, torch.bfloat16]
    plain = head_factors(checkpoint, architecture, architecture.layers[0], "ov")
    for found, expected in ((ov.left, plain.left), (ov.right, plain.right)):
        assert torch.equal(found.float(), expected)


def test_a_layer_is_expected_while_the_one_before_it_is_worked_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**LAYOUTS["llama"].config(HEADS[0]), "num_hidden_layers": 3}
    state = {name.replace("layers.0", f"layers.{layer}"): tensor.clone() for name, tensor in llama()[0].items() for layer in range(3)}
    folder = write_folder(tmp_path, state, config)
    done: list[str] = []
    monkeypatch.setattr(SafetensorsCheckpoint, "expect", lambda self, names: done.extend(f"expect {name}" for name in names))
    read = SafetensorsCheckpoint.read
    monkeypatch.setattr(SafetensorsCheckpoint, "read", lambda self, name: done.append(f"read {name}") or read(self, name))
    measure(ModelRef(path=str(folder), label="", scale=None), Settings(source="weights"))
    for layer in (1, 2):
        for name in ("q", "k", "v", "o"):
            tensor = f"model.layers.{layer}.self_attn.{name}_proj.weight"
            first_of_the_one_before = done.index(f"read model.layers.{layer - 1}.self_attn.q_proj.weight")
            assert done.index(f"expect {tensor}") < first_of_the_one_before < done.index(f"read {tensor}")
