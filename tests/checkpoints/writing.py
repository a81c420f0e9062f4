"""One known set of per-head matrices, written in every layout and format by plain reshapes: nothing here uses the code under test."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

D_MODEL, D, N_LAYER, VOCAB, CONTEXT = 29, 6, 2, 37, 41
State = dict[str, Tensor]


@dataclass(frozen=True)
class Heads:
    """Matrices of one layer, rows being inputs."""

    W_Q: Tensor
    """[H, d, D]"""
    W_K: Tensor
    """[G, d, D]"""
    W_V: Tensor
    """[G, d, D]"""
    W_O: Tensor
    """[H, D, d]"""

    @property
    def n_head(self) -> int:
        return len(self.W_Q)

    @property
    def n_kv_head(self) -> int:
        return len(self.W_K)

    @property
    def q(self) -> Tensor:
        """As the rows of a Linear, [H, D, d]."""
        return self.W_Q.transpose(1, 2)

    @property
    def k(self) -> Tensor:
        return self.W_K.transpose(1, 2)

    @property
    def v(self) -> Tensor:
        return self.W_V.transpose(1, 2)

    @property
    def o(self) -> Tensor:
        """The output projection, out × in, [d, H D]."""
        return self.W_O.flatten(0, 1).T

    def operators(self, circuit: str) -> Tensor:
        """Every head's own d × d matrix, in float64: [H, d, d]."""
        q, k, v, o = (x.double() for x in (self.W_Q, self.W_K, self.W_V, self.W_O))
        if circuit == "qk":
            return q @ k.repeat_interleave(self.n_head // self.n_kv_head, 0).transpose(1, 2)
        return v.repeat_interleave(self.n_head // self.n_kv_head, 0) @ o


def make_heads(H: int, G: int, *, d: int = D_MODEL, D: int = D, seed: int = 0) -> list[Heads]:
    """Random heads of every layer; heads that share a group share keys and values."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((H, d, D), (G, d, D), (G, d, D), (H, D, d))
    return [Heads(*(torch.randn(shape, generator=g) for shape in shapes)) for _ in range(N_LAYER)]


# ---- fused rows ----


def one_after_the_other(h: Heads) -> Tensor:
    return torch.cat([h.q.flatten(0, 1), h.k.flatten(0, 1), h.v.flatten(0, 1)])


def per_head(h: Heads) -> Tensor:
    return torch.stack([h.q, h.k, h.v], 1).flatten(0, 2)


def per_group(h: Heads) -> Tensor:
    q = h.q.unflatten(0, (h.n_kv_head, -1))
    return torch.cat([q, h.k.unsqueeze(1), h.v.unsqueeze(1)], 1).flatten(0, 2)


def four_blocks(h: Heads) -> Tensor:
    """codegen: four blocks, each of queries, values, keys."""
    q, k, v = (x.unflatten(0, (4, -1)) for x in (h.q, h.k, h.v))
    return torch.cat([q, v, k], 1).flatten(0, 2)


# ---- layouts: state dict of one layer, and the configuration ----


@dataclass(frozen=True)
class Layout:
    """How one family lays a layer down."""

    prefix: str
    layer: Callable[[Heads], State]
    config: Callable[[Heads], dict[str, Any]]
    norms: tuple[str, ...] = ()
    """Gains, 1 in value unless the family stores them less 1."""
    groups: tuple[int, ...] = (1, 2, 4)
    """Key-value heads, of 4, that it can have."""
    gain: float = 1.0


def _hf(model_type: str, **more: Any) -> Callable[[Heads], dict[str, Any]]:
    def config(h: Heads) -> dict[str, Any]:
        return {
            "model_type": model_type, "hidden_size": D_MODEL, "num_attention_heads": h.n_head, "num_key_value_heads": h.n_kv_head, "head_dim": D,
            "num_hidden_layers": N_LAYER, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, **more,
        }  # fmt: skip

    return config


def _separate(before: str = "self_attn.", names: str = "q_proj k_proj v_proj o_proj") -> Callable[[Heads], State]:
    q, k, v, o = names.split()

    def layer(h: Heads) -> State:
        return {
            f"{before}{q}.weight": h.q.flatten(0, 1), f"{before}{k}.weight": h.k.flatten(0, 1), f"{before}{v}.weight": h.v.flatten(0, 1),
            f"{before}{o}.weight": h.o,
        }  # fmt: skip

    return layer


def _fused(name: str, fuse: Callable[[Heads], Tensor], output: str) -> Callable[[Heads], State]:
    return lambda h: {f"{name}.weight": fuse(h), f"{output}.weight": h.o}


def _conv1d(h: Heads) -> State:
    return {"attn.c_attn.weight": one_after_the_other(h).T, "attn.c_proj.weight": h.o.T}


def _gated(h: Heads) -> State:
    gate = torch.full_like(h.q, 7.0)
    return {**_separate()(h), "self_attn.q_proj.weight": torch.cat([h.q, gate], 1).flatten(0, 1)}


def _nano(model_type: str, **more: Any) -> Callable[[Heads], dict[str, Any]]:
    def config(h: Heads) -> dict[str, Any]:
        return {"model_type": model_type, "n_layer": N_LAYER, "n_head": h.n_head, "vocab_size": VOCAB, **more}

    return config


def _own(h: Heads) -> dict[str, Any]:
    kind = "mha" if h.n_kv_head == h.n_head else "mqa" if h.n_kv_head == 1 else "gqa"
    return {
        "model_type": "headrank", "kind": kind, "n_layer": N_LAYER, "n_head": h.n_head, "n_kv_head": h.n_kv_head, "d_head": D, "d_model": D_MODEL, "d_mlp": 3,
        "vocab_size": VOCAB, "context": CONTEXT,
    }  # fmt: skip


# fmt: off
LAYOUTS = {
    "llama": Layout("model.layers.{i}.", _separate(), _hf("llama"), ("input_layernorm",)),
    "llama without prefix": Layout("layers.{i}.", _separate(), _hf("llama"), ("input_layernorm",)),
    "phi": Layout("model.layers.{i}.", _separate(names="q_proj k_proj v_proj dense"), _hf("phi"), ("input_layernorm",)),
    "gemma": Layout("model.layers.{i}.", _separate(), _hf("gemma"), ("input_layernorm",), gain=0.0),
    "phi3": Layout("model.layers.{i}.", _fused("self_attn.qkv_proj", one_after_the_other, "self_attn.o_proj"), _hf("phi3"), ("input_layernorm",)),
    "internlm2": Layout("model.layers.{i}.", _fused("attention.wqkv", per_group, "attention.wo"), _hf("internlm2"), ("attention_norm",)),
    "baichuan": Layout("model.layers.{i}.", _fused("self_attn.W_pack", one_after_the_other, "self_attn.o_proj"), _hf("baichuan", hidden_size=4 * D),
                       ("input_layernorm",), groups=(4,)),
    "qwen": Layout("transformer.h.{i}.", _fused("attn.c_attn", one_after_the_other, "attn.c_proj"), _hf("qwen", kv_channels=D), ("ln_1",), groups=(4,)),
    "chatglm": Layout("transformer.encoder.layers.{i}.", _fused("self_attention.query_key_value", one_after_the_other, "self_attention.dense"),
                      lambda h: _hf("chatglm", num_layers=N_LAYER, kv_channels=D, multi_query_attention=True, multi_query_group_num=h.n_kv_head)(h),
                      ("input_layernorm",)),
    "openelm": Layout(
        "transformer.layers.{i}.", lambda h: {**_fused("attn.qkv_proj", one_after_the_other, "attn.out_proj")(h), "attn.q_norm.weight": torch.ones(D),
                                             "attn.k_norm.weight": torch.ones(D)},
        lambda h: {"model_type": "openelm", "model_dim": D_MODEL, "num_transformer_layers": N_LAYER, "num_query_heads": [h.n_head] * N_LAYER,
                   "num_kv_heads": [h.n_kv_head] * N_LAYER, "head_dim": D}, ("attn_norm",)),
    "deci": Layout("model.layers.{i}.", _separate(), lambda h: _hf("deci", num_key_value_heads_per_layer=[h.n_kv_head] * N_LAYER)(h), ("input_layernorm",)),
    "falcon new": Layout("transformer.h.{i}.", _fused("self_attention.query_key_value", per_group, "self_attention.dense"),
                         lambda h: _hf("falcon", num_kv_heads=h.n_kv_head, new_decoder_architecture=True, hidden_size=4 * D)(h), ("ln_attn",)),
    "falcon multi-query": Layout("transformer.h.{i}.", _fused("self_attention.query_key_value", one_after_the_other, "self_attention.dense"),
                                 _hf("falcon", multi_query=True, new_decoder_architecture=False, hidden_size=4 * D), ("input_layernorm",), groups=(1,)),
    "falcon old": Layout("transformer.h.{i}.", _fused("self_attention.query_key_value", per_head, "self_attention.dense"),
                         _hf("falcon", multi_query=False, new_decoder_architecture=False, hidden_size=4 * D), ("input_layernorm",), groups=(4,)),
    "gpt_bigcode": Layout("transformer.h.{i}.", _fused("attn.c_attn", one_after_the_other, "attn.c_proj"), _nano("gpt_bigcode", n_embd=4 * D), ("ln_1",),
                          groups=(1,)),
    "gpt2": Layout("transformer.h.{i}.", _conv1d, _nano("gpt2", n_embd=4 * D), ("ln_1",), groups=(4,)),
    "nanogpt": Layout("transformer.h.{i}.", _fused("attn.c_attn", one_after_the_other, "attn.c_proj"), _nano("nanogpt", n_embd=4 * D), ("ln_1",), groups=(4,)),
    "gpt_neox": Layout("gpt_neox.layers.{i}.", _fused("attention.query_key_value", per_head, "attention.dense"), _hf("gpt_neox", hidden_size=4 * D),
                       ("input_layernorm",), groups=(4,)),
    "bloom": Layout("h.{i}.", _fused("self_attention.query_key_value", per_head, "self_attention.dense"), _nano("bloom", hidden_size=4 * D),
                    ("input_layernorm",), groups=(4,)),
    "codegen": Layout("transformer.h.{i}.", _fused("attn.qkv_proj", four_blocks, "attn.out_proj"), _nano("codegen", n_embd=4 * D), ("ln_1",), groups=(4,)),
    "modernbert": Layout("model.layers.{i}.", _fused("attn.Wqkv", one_after_the_other, "attn.Wo"), _hf("modernbert", hidden_size=4 * D), ("attn_norm",),
                         groups=(4,)),
    "qwen3_next": Layout("model.layers.{i}.", lambda h: {**_gated(h), "self_attn.q_norm.weight": torch.zeros(D), "self_attn.k_norm.weight": torch.zeros(D)},
                         _hf("qwen3_next"), ("input_layernorm",), gain=0.0),
    "headrank": Layout("transformer.h.{i}.", _separate("attn.", "c_q c_k c_v c_proj"), _own),
    "nanochat": Layout("transformer.h.{i}.", _separate("attn.", "c_q c_k c_v c_proj"),
                       lambda h: _nano("nanochat", n_embd=4 * D, n_kv_head=h.n_kv_head, sequence_len=CONTEXT)(h)),
    "nemotron_h": Layout("backbone.layers.{i}.", _separate("mixer."), _hf("nemotron_h"), ("norm",)),
    "bert": Layout("bert.encoder.layer.{i}.", lambda h: {**_separate("attention.self.", "query key value o")(h), "attention.output.dense.weight": h.o},
                   _hf("bert", hidden_size=4 * D), groups=(4,)),
}
# fmt: on


def width_of(layout: Layout) -> int:
    """Width that the layout needs: H D where the family states no head size."""
    config = layout.config(make_heads(4, layout.groups[0])[0])
    return int(config.get("n_embd", config.get("hidden_size", config.get("d_model", config.get("model_dim")))))


def state_of(layout: Layout, layers: list[Heads]) -> State:
    """The whole state dict."""
    d = layers[0].W_Q.shape[1]
    state = {}
    for i, heads in enumerate(layers):
        start = layout.prefix.format(i=i)
        state |= {start + name: tensor.contiguous() for name, tensor in layout.layer(heads).items()}
        state |= {f"{start}{name}.weight": torch.full((d,), layout.gain) for name in layout.norms}
    return state


def write_folder(folder: Path, state: State, config: dict[str, Any]) -> Path:
    """As a Hugging Face folder with one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
