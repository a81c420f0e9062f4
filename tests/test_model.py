import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrank.config import ModelConfig, bundled_families
from headrank.errors import HeadrankError
from headrank.model import Decoder, initialize, load_decoder, new_decoder
from headrank.model.attention import _rotate, rotary_table
from headrank.model.decoder import attention_mask
from tests.plain import CONFIGS, GEOMETRY, decoder, eager_pass, head_matrices

CPU = torch.device("cpu")
IDS = torch.randint(31, (5, 11), generator=torch.Generator().manual_seed(0))
RIGHT = torch.arange(11) < torch.tensor([11, 7, 3, 1, 11])[:, None]  # lengths of the sequences, padding behind


class Seen:
    """A probe that keeps what it sees."""

    def __init__(self) -> None:
        self.q: dict[int, Tensor] = {}
        self.k: dict[int, Tensor] = {}
        self.z: dict[int, Tensor] = {}
        self.scaling = 0.0

    def scores(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, scaling: float) -> None:
        self.q[layer], self.k[layer], self.scaling = q, k, scaling

    def outputs(self, layer: int, z: Tensor) -> None:
        self.z[layer] = z


def copied(config: ModelConfig, source: Decoder, values: dict[str, Tensor]) -> Decoder:
    """A decoder of another kind with the parameters of `source` where names and shapes agree, and the given ones."""
    model = decoder(config)
    known = dict(source.named_parameters()) | values
    for name, parameter in model.named_parameters():
        assert known[name].shape == parameter.shape, name
        parameter.copy_(known[name])
    return model


def keys_and_values(model: Decoder, ending: str) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if ".attn.c_" in name and name.endswith(ending)}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_kind_computes_what_the_written_out_decoder_computes(name: str, padded: bool) -> None:
    model, seen = decoder(CONFIGS[name]), Seen()
    valid = RIGHT if padded else None
    model.hidden(IDS, valid=valid, probe=seen)
    for layer, eager in enumerate(eager_pass(model, IDS, valid=valid)):
        k = seen.k[layer].repeat_interleave(6 // seen.k[layer].shape[1], 1)  # head h reads group h // (H / G)
        scores = (seen.q[layer] @ k.transpose(-1, -2) * seen.scaling).masked_fill(eager.log_probabilities.isinf(), -math.inf)
        torch.testing.assert_close(torch.log_softmax(scores, -1).double(), eager.log_probabilities, rtol=0, atol=1e-4)
        written = torch.einsum("bthd,hdm->bhtm", seen.z[layer], model.output_projection(layer))
        torch.testing.assert_close(written.double(), eager.outputs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_the_heads_write_sums_to_what_the_attention_block_returns(name: str) -> None:
    model, seen, blocks = decoder(CONFIGS[name]), Seen(), []
    for block in model.blocks:
        block.attn.register_forward_hook(lambda module, given, output: blocks.append(output))
    model.hidden(IDS, probe=seen)
    assert len(blocks) == 3
    for layer, block in enumerate(blocks):
        written = torch.einsum("bthd,hdm->bhtm", seen.z[layer], model.output_projection(layer))
        torch.testing.assert_close(written.sum(1), block)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_probe_changes_nothing(name: str) -> None:
    model = decoder(CONFIGS[name])
    assert torch.equal(model.hidden(IDS, probe=Seen()), model.hidden(IDS))


def test_shared_keys_reach_the_probe_once() -> None:
    for name, G in {"mha": 6, "gqa": 2, "mqa": 1}.items():
        seen = Seen()
        decoder(CONFIGS[name]).hidden(IDS, probe=seen)
        assert seen.k[1].shape == (5, G, 11, 10)


def test_lrkv_of_rank_zero_is_mqa() -> None:
    mqa = decoder(CONFIGS["mqa"])
    values: dict[str, Tensor] = {}
    for name, weight in keys_and_values(mqa, "c_k.weight").items() | keys_and_values(mqa, "c_v.weight").items():
        stem = name.removesuffix("weight")
        values |= {stem + "shared": weight, stem + "down": torch.empty(0, 13), stem + "up": torch.empty(60, 0)}
    lrkv = copied(CONFIGS["lrkv_0"], mqa, values)
    assert torch.equal(lrkv(IDS), mqa(IDS))


def test_lrkv_of_full_rank_represents_a_given_mha() -> None:
    """W_shared = 0, B_h = 1, U_h = W_h."""
    mha = decoder(CONFIGS["mha"])
    values: dict[str, Tensor] = {}
    for name, weight in keys_and_values(mha, "c_k.weight").items() | keys_and_values(mha, "c_v.weight").items():
        stem = name.removesuffix("weight")
        values |= {stem + "shared": torch.zeros(10, 13), stem + "down": weight, stem + "up": torch.eye(10).repeat(6, 1)}
    lrkv = copied(replace(CONFIGS["lrkv"], rank=10), mha, values)
    torch.testing.assert_close(lrkv(IDS), mha(IDS))


def test_the_split_of_lrkv_into_shared_and_own_parts_is_not_unique() -> None:
    """Moving C from W_shared into every U_h B_h^T changes no key: with B_h = 1 that is U_h + C."""
    config = replace(CONFIGS["lrkv"], rank=10)
    model = decoder(config)
    for name, parameter in model.named_parameters():
        if name.endswith(".up"):
            parameter.copy_(torch.eye(10).repeat(6, 1))
    moved = copy.deepcopy(model)
    C = torch.randn(10, 13, generator=torch.Generator().manual_seed(1)) * 0.3
    for name, parameter in moved.named_parameters():
        if name.endswith("c_k.shared"):
            parameter.sub_(C)
        if name.endswith("c_k.down"):
            parameter.add_(C.repeat(6, 1))
    torch.testing.assert_close(moved(IDS), model(IDS), atol=1e-4, rtol=1e-4)


def test_gqa_with_a_group_a_head_is_mha() -> None:
    mha = decoder(CONFIGS["mha"])
    assert torch.equal(copied(ModelConfig(kind="gqa", n_kv_head=6, **GEOMETRY), mha, {})(IDS), mha(IDS))


def test_gqa_with_one_group_is_mqa() -> None:
    mqa = decoder(CONFIGS["mqa"])
    assert torch.equal(copied(ModelConfig(kind="gqa", n_kv_head=1, **GEOMETRY), mqa, {})(IDS), mqa(IDS))


def test_gqa_is_an_mha_whose_key_value_heads_are_repeated_not_tiled() -> None:
    gqa = decoder(CONFIGS["gqa"])
    weights = keys_and_values(gqa, "c_k.weight") | keys_and_values(gqa, "c_v.weight")
    repeated = {name: w.unflatten(0, (2, 10)).repeat_interleave(3, 0).flatten(0, 1) for name, w in weights.items()}
    tiled = {name: w.unflatten(0, (2, 10)).repeat(3, 1, 1).flatten(0, 1) for name, w in weights.items()}
    torch.testing.assert_close(copied(CONFIGS["mha"], gqa, repeated)(IDS), gqa(IDS))
    assert not torch.allclose(copied(CONFIGS["mha"], gqa, tiled)(IDS), gqa(IDS), atol=0.01)


def test_mla_without_a_rotary_part_is_an_mha_of_its_rebuilt_matrices() -> None:
    mla = decoder(CONFIGS["mla"])
    values = {}
    for layer in range(3):
        heads = head_matrices(mla, layer)
        values[f"transformer.h.{layer}.attn.c_k.weight"] = torch.cat(heads.W_K, 1).T.float()
        values[f"transformer.h.{layer}.attn.c_v.weight"] = torch.cat(heads.W_V, 1).T.float()
    torch.testing.assert_close(copied(CONFIGS["mha"], mla, values)(IDS), mla(IDS), atol=1e-4, rtol=1e-4)


def test_the_rotary_key_of_mla_is_one_for_all_heads_and_alone_is_turned() -> None:
    config = CONFIGS["mla_rope"]
    attn = decoder(config).blocks[0].attn
    x = torch.randn(1, 1, 13, generator=torch.Generator().manual_seed(0)).expand(1, 11, 13)  # the same token at every position
    q, k, _ = attn.qkv(x, rotary_table(config, 11, device=CPU, dtype=torch.float32))
    rope = k[..., 10:] / k[..., 10:].norm(dim=-1, keepdim=True)  # the norm over a head mixes sizes in, not directions
    torch.testing.assert_close(rope, rope[:, :, :1].expand_as(rope))
    for part in (q, k):
        torch.testing.assert_close(part[..., :10], part[:, :1, :, :10].expand_as(part[..., :10]))
        assert (part[:, 1:, :, 10:] - part[:, :1, :, 10:]).abs().amax(-1).min() > 0.01


@pytest.mark.parametrize("name", CONFIGS)
def test_later_tokens_change_nothing_before_them(name: str) -> None:
    model = decoder(CONFIGS[name])
    changed = IDS.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 31
    torch.testing.assert_close(model(changed)[:, :7], model(IDS)[:, :7])
    assert (model(changed)[:, 7:] - model(IDS)[:, 7:]).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_on_either_side_changes_no_token(name: str) -> None:
    """On the left it moves every position by the same offset, which rotary embedding does not see."""
    model = decoder(CONFIGS[name])
    sequence = IDS[:1, :7]
    alone = model.hidden(sequence)
    noise = IDS[1:2, :4]
    ones, zeros = torch.ones(1, 7, dtype=torch.bool), torch.zeros(1, 4, dtype=torch.bool)
    right = model.hidden(torch.cat((sequence, noise), 1), valid=torch.cat((ones, zeros), 1))
    left = model.hidden(torch.cat((noise, sequence), 1), valid=torch.cat((zeros, ones), 1))
    torch.testing.assert_close(right[:, :7], alone, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(left[:, 4:], alone, atol=2e-5, rtol=1e-4)


@given(st.integers(0, 2**32), st.integers(0, 300))
def test_rotary_embedding_depends_on_offsets_alone(seed: int, shift: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(10, generator=generator), torch.randn(10, generator=generator)
    tables = [part.double() for part in rotary_table(CONFIGS["mha"], 13 + shift, device=CPU, dtype=torch.float64)]
    turned_q, turned_k = (_rotate(x.double().expand(13 + shift, 1, 10), (tables[0], tables[1])).squeeze(1) for x in (q, k))
    near, far = turned_q[:13] @ turned_k[:13].T, turned_q[shift:] @ turned_k[shift:].T
    torch.testing.assert_close(near, far, rtol=0, atol=1e-4)  # the angles are float32


def test_position_zero_is_not_turned_and_position_one_by_minus_one_radian() -> None:
    x = torch.zeros(2, 1, 10)
    x[..., 0] = 1  # the first of pair (0, 5), whose frequency is 1
    turned = _rotate(x, rotary_table(CONFIGS["mha"], 2, device=CPU, dtype=torch.float32)).squeeze(1)
    assert torch.equal(turned[0], x[0, 0])
    expected = torch.zeros(10)
    expected[0], expected[5] = math.cos(1), -math.sin(1)
    torch.testing.assert_close(turned[1], expected)


def test_a_pass_up_to_a_layer_gives_the_same_attention_and_goes_no_further() -> None:
    model, whole, part = decoder(CONFIGS["gqa"]), Seen(), Seen()
    model.hidden(IDS, probe=whole)
    calls: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, given, output, name=name: calls.append(name))
    model.hidden(IDS, probe=part, last_layer=1)
    assert sorted(part.q) == sorted(part.z) == [0, 1]
    for layer in (0, 1):
        assert torch.equal(part.q[layer], whole.q[layer])
        assert torch.equal(part.k[layer], whole.k[layer])
        assert torch.equal(part.z[layer], whole.z[layer])
    assert "transformer.h.0.mlp" in calls
    assert not {"transformer.h.1.mlp", "transformer.h.2.attn"} & set(calls)


def test_a_padded_token_sees_itself_and_nobody_sees_it() -> None:
    mask = attention_mask(torch.tensor([[False, True, True], [True, True, False]]))
    assert mask.shape == (2, 1, 3, 3)
    assert mask[0, 0].int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert mask[1, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_logits_are_float32_and_softly_capped_at_15() -> None:
    model = decoder(CONFIGS["mha"]).bfloat16()
    model.lm_head.weight.mul_(100)
    logits = model(IDS)
    assert logits.dtype == torch.float32
    assert logits.shape == (5, 11, 31)
    assert 14 < logits.abs().max() <= 15


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_passes_stay_near(dtype: torch.dtype) -> None:
    model = decoder(CONFIGS["lrkv"])
    exact = model.hidden(IDS)
    close = copy.deepcopy(model).to(dtype).hidden(IDS).float()
    assert (close - exact).norm() / exact.norm() < 0.05


def matrix_parameters(config: ModelConfig) -> int:
    """Of one layer, as the paper's table of variants has the shapes."""
    d, H, D, r, c = config.d_model, config.n_head, config.d_head, config.rank, config.d_latent
    key_value = {
        "mha": 2 * d * H * D,
        "gqa": 2 * d * config.n_kv_head * D,
        "mqa": 2 * d * D,
        "mla": d * c + 2 * c * H * D,
        "lrkv": 2 * (d * D + H * r * (d + D)),
    }[config.kind]
    return 2 * d * H * D + key_value + 2 * d * config.d_mlp


@pytest.mark.parametrize("scale", ["nano", "128M", "2.5B"])
def test_parameter_counts_are_the_closed_form(scale: str) -> None:
    for variant in bundled_families()[scale].variants:
        config = variant.model
        with torch.device("meta"):
            n = sum(parameter.numel() for parameter in Decoder(config).parameters())
        assert n == config.n_layer * matrix_parameters(config) + 2 * config.vocab_size * config.d_model, variant.name


def test_the_larger_scale_has_two_and_a_half_billion_parameters() -> None:
    with torch.device("meta"):
        n = sum(parameter.numel() for parameter in Decoder(bundled_families()["2.5B"].variant("mha").model).parameters())
    assert n == 36 * 12 * 2304**2 + 2 * 50304 * 2304 == 2_525_036_544
    with torch.device("meta"):
        n = sum(parameter.numel() for parameter in Decoder(bundled_families()["128M"].variant("mha").model).parameters())
    assert n == 12 * 12 * 768**2 + 2 * 50304 * 768 == 162_201_600


def test_the_same_seed_gives_the_same_numbers_whatever_the_kind() -> None:
    mha, mqa = (dict(new_decoder(CONFIGS[name], seed=3).named_parameters()) for name in ("mha", "mqa"))
    same = [name for name in mha if name in mqa and mha[name].shape == mqa[name].shape]
    assert len(same) == 1 + 1 + 3 * 4  # embeddings, and of each layer c_q, c_proj and the MLP
    assert all(torch.equal(mha[name], mqa[name]) for name in same)
    other = dict(new_decoder(CONFIGS["mha"], seed=4).named_parameters())
    assert not any(torch.equal(mha[name], other[name]) for name in mha)


@pytest.mark.parametrize("rank", [16, 64])
def test_lrkv_starts_with_residuals_of_a_tenth_of_the_shared_norm(rank: int) -> None:
    config = ModelConfig(kind="lrkv", n_layer=1, n_head=6, d_head=128, d_model=768, d_mlp=2, vocab_size=2, context=2, rank=rank)
    name = "transformer.h.0.attn.c_k."
    shared = initialize(name + "shared", torch.Size((128, 768)), config, seed=0)
    down = initialize(name + "down", torch.Size((6 * rank, 768)), config, seed=0).unflatten(0, (6, rank))
    up = initialize(name + "up", torch.Size((6 * 128, rank)), config, seed=0).unflatten(0, (6, 128))
    assert float(shared.norm()) == pytest.approx(128**0.5, rel=0.02)  # variance 1 / d_model
    for residual in up @ down:
        assert float(residual.norm() / shared.norm()) == pytest.approx(0.1, rel=0.1)


def weights(model: Decoder) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def loaded(config: ModelConfig, tensors: dict[str, Tensor], **changes: Any) -> Decoder:
    options = {"names": tensors.keys(), "device": CPU, "dtype": torch.float32, "where": "folder"} | changes
    return load_decoder(config, tensors.__getitem__, **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_loaded_decoder_computes_the_same_and_holds_the_weights_once(name: str) -> None:
    tensors = weights(decoder(CONFIGS[name]))
    model = loaded(CONFIGS[name], tensors)
    assert torch.equal(model(IDS), decoder(CONFIGS[name])(IDS))
    assert all(parameter.data_ptr() == tensors[name].data_ptr() for name, parameter in model.named_parameters())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def refusal(tensors: dict[str, Tensor]) -> str:
    with pytest.raises(HeadrankError) as caught:
        loaded(CONFIGS["mha"], tensors)
    return str(caught.value)


def test_checkpoints_that_are_not_this_decoder_are_refused_by_tensor() -> None:
    name = "transformer.h.1.mlp.c_fc.weight"
    tensors = weights(decoder(CONFIGS["mha"]))
    assert refusal(tensors | {name: torch.zeros(17, 12)}) == f"folder: {name} has shape [17, 12], but config.json means [17, 13]"
    assert refusal(tensors | {name: torch.zeros(17, 13, dtype=torch.int8)}) == f"folder: {name} holds int8, quantised numbers whose scales are not known"
    del tensors[name]
    assert refusal(tensors) == f"folder: no tensor {name}; a forward pass needs the whole decoder"
    del tensors["lm_head.weight"]
    assert refusal(tensors) == f"folder: no tensor {name} (and 1 more); a forward pass needs the whole decoder"
    tensors = weights(decoder(CONFIGS["mha"])) | {"transformer.h.0.attn.q_gain": torch.ones(10)}
    text = "folder: tensor transformer.h.0.attn.q_gain is no part of this decoder, so its forward pass is another; use --source weights"
    assert refusal(tensors) == text


@pytest.mark.parametrize("padded", [False, True])
def test_a_query_that_is_no_number_stays_none_through_the_attention(padded: bool) -> None:
    """torch's fused causal attention on the CPU makes it 0, which would look like a dead head."""
    model, seen = decoder(CONFIGS["mha"]), Seen()
    model.get_parameter("transformer.h.1.attn.c_q.weight")[23, 4] = math.nan  # head 2
    hidden = model.hidden(IDS, valid=RIGHT if padded else None, probe=seen)
    assert seen.z[0].isfinite().all()
    assert seen.z[1][:, :, 2].isnan().all()
    assert seen.z[1][:, :, [0, 1, 3, 4, 5]].isfinite().all()
    assert hidden.isnan().all()
