"""Activations of transformers' models against what the stock models say of themselves: eager attention probabilities, and hooks.

The models are tiny and random, with gains and biases away from one and zero. The oracle never asks headrank anything: scores are centred
logarithms of the probabilities that the stock eager model returns, outputs are what its projection module makes of one head at a time.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from headrank import huggingface
from headrank.errors import HeadrankError
from headrank.forward import Recorder
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
    projection: str = "self_attn.o_proj"
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
    Case("llama4_text", settings={**WIDE, **EXPERTS, "attention_chunk_size": 5, "intermediate_size_mlp": 37, "layer_types": ["chunked_attention", "full_attention"]}),
    Case("gpt_oss", settings={**WIDE, **EXPERTS, "intermediate_size": 20, "sliding_window": 5}),
    Case("qwen3_next", settings={**WIDE, **EXPERTS, "layer_types": ["linear_attention", "full_attention"]}),
    Case("bert", "attention.output.dense"),
    Case("roberta", "attention.output.dense", {"pad_token_id": 1}),
    Case("distilbert", "attention.out_lin", {"dim": 24, "hidden_dim": 37, "n_layers": 2, "n_heads": 6}),
    Case("modernbert", "attn.Wo", {"local_attention": 6, "layer_types": ["full_attention", "sliding_attention"]}),
    Case("albert", "attention.dense", {"embedding_size": 11, "num_hidden_layers": 3}),
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
    with huggingface._quiet():
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

    def __init__(self, model: Any, projection: str) -> None:
        self.model = model
        self.projections = {name: module for name, module in model.named_modules() if name.endswith(projection)}
        self.rows: dict[str, list[Tensor]] = {}
        self.outs: dict[str, list[Tensor]] = {}

    @torch.no_grad()
    def see(self, inputs: dict[str, Tensor]) -> None:
        caught: list[tuple[str, Tensor]] = []
        hooks = [m.register_forward_hook(lambda m, args, out, name=name: caught.append((name, args[0]))) for name, m in self.projections.items()]
        with huggingface._quiet():
            result = self.model(**inputs, output_attentions=True)
        for hook in hooks:
            hook.remove()
        probabilities = [p for p in (result.attentions if "attentions" in result else ()) if p is not None]
        assert len(probabilities) == len(caught) > 0
        repeated = len({name for name, _ in caught}) < len(caught)
        for order, (p, (name, z)) in enumerate(zip(probabilities, caught, strict=True)):
            layer = order if repeated else next(int(part) for part in name.split(".") if part.isdigit())
            self.rows.setdefault(str(layer), []).append(centred_rows(p.log(), p > 0))
            self.outs.setdefault(str(layer), []).append(head_outputs(self.projections[name], z.reshape(1, p.shape[2], -1), p.shape[1]))

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
        oracle.see({"input_ids": ids})
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
