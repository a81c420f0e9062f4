"""One known set of latent-attention heads (MLA) and its operators, in every layout that holds such."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.checkpoints.writing import CONTEXT, N_LAYER, VOCAB, State

H, NOPE, ROPE, VALUE, LATENT, Q_LATENT, WIDTH = 3, 6, 4, 7, 11, 13, 29


@dataclass(frozen=True)
class Latent:
    """Matrices of one layer, rows being inputs, and the gains of the norms between."""

    q_down: Tensor
    """[d, q_latent]"""
    q_gain: Tensor
    q_up: Tensor
    """[H, q_latent, nope + rope]"""
    down: Tensor
    """[d, latent]"""
    rope: Tensor
    """[d, rope], shared by all heads."""
    gain: Tensor
    k_up: Tensor
    """[H, latent, nope]"""
    v_up: Tensor
    """[H, latent, value]"""
    W_O: Tensor
    """[H, value, d]"""

    @property
    def direct_q(self) -> Tensor:
        """Queries without a latent of their own: the product, [H, d, nope + rope]."""
        return self.q_down * self.q_gain @ self.q_up

    def operators(self, circuit: str, part: str = "both") -> Tensor:
        """[H, d, d] in float64."""
        q, down = self.direct_q.double(), self.down.double() * self.gain.double()
        if circuit == "ov":
            return down @ self.v_up.double() @ self.W_O.double()
        nope = q[..., :NOPE] @ (down @ self.k_up.double()).transpose(1, 2)
        rope = q[..., NOPE:] @ self.rope.double().T
        return {"nope": nope, "rope": rope, "both": nope + rope}[part]


def make_latent(seed: int = 0) -> list[Latent]:
    g = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    return [
        Latent(
            random(WIDTH, Q_LATENT), random(Q_LATENT), random(H, Q_LATENT, NOPE + ROPE) / 4, random(WIDTH, LATENT), random(WIDTH, ROPE), random(LATENT),
            random(H, LATENT, NOPE) / 3, random(H, LATENT, VALUE) / 3, random(H, VALUE, WIDTH),
        )
        for _ in range(N_LAYER)
    ]  # fmt: skip


def kv_a(x: Latent) -> Tensor:
    return torch.cat([x.down, x.rope], 1).T.contiguous()


def kv_b(x: Latent) -> Tensor:
    """Per head [nope ; value], out × in."""
    return torch.cat([x.k_up, x.v_up], 2).transpose(1, 2).flatten(0, 1).contiguous()


def deepseek(layers: list[Latent], *, has_q_latent: bool) -> tuple[State, dict[str, Any]]:
    """A Hugging Face DeepSeek."""
    state = {}
    for i, x in enumerate(layers):
        start = f"model.layers.{i}."
        state |= {
            f"{start}input_layernorm.weight": torch.ones(WIDTH),
            f"{start}self_attn.kv_a_proj_with_mqa.weight": kv_a(x),
            f"{start}self_attn.kv_a_layernorm.weight": x.gain,
            f"{start}self_attn.kv_b_proj.weight": kv_b(x),
            f"{start}self_attn.o_proj.weight": x.W_O.flatten(0, 1).T.contiguous(),
        }
        if has_q_latent:
            state[f"{start}self_attn.q_a_proj.weight"] = x.q_down.T.contiguous()
            state[f"{start}self_attn.q_a_layernorm.weight"] = x.q_gain
            state[f"{start}self_attn.q_b_proj.weight"] = x.q_up.transpose(1, 2).flatten(0, 1).contiguous()
        else:
            state[f"{start}self_attn.q_proj.weight"] = x.direct_q.transpose(1, 2).flatten(0, 1).contiguous()
    config = {
        "model_type": "deepseek_v3", "hidden_size": WIDTH, "num_attention_heads": H, "num_key_value_heads": H, "num_hidden_layers": N_LAYER,
        "kv_lora_rank": LATENT, "q_lora_rank": Q_LATENT if has_q_latent else None, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE,
        "max_position_embeddings": CONTEXT, "vocab_size": VOCAB,
    }  # fmt: skip
    return state, config


def gguf_tensors(layers: list[Latent], *, has_q_latent: bool, is_split: bool) -> State:
    """As llama.cpp names them; newer files hold key and value matrices apart, one a head, the keys' transposed."""
    tensors = {}
    for i, x in enumerate(layers):
        start = f"blk.{i}."
        tensors |= {
            f"{start}attn_norm.weight": torch.ones(WIDTH), f"{start}attn_kv_a_mqa.weight": kv_a(x), f"{start}attn_kv_a_norm.weight": x.gain,
            f"{start}attn_output.weight": x.W_O.flatten(0, 1).T.contiguous(),
        }  # fmt: skip
        if is_split:
            tensors[f"{start}attn_k_b.weight"] = x.k_up.contiguous()  # [H, latent, nope]: in × out
            tensors[f"{start}attn_v_b.weight"] = x.v_up.transpose(1, 2).contiguous()  # [H, value, latent]: out × in
        else:
            tensors[f"{start}attn_kv_b.weight"] = kv_b(x)
        if has_q_latent:
            tensors[f"{start}attn_q_a.weight"] = x.q_down.T.contiguous()
            tensors[f"{start}attn_q_a_norm.weight"] = x.q_gain
            tensors[f"{start}attn_q_b.weight"] = x.q_up.transpose(1, 2).flatten(0, 1).contiguous()
        else:
            tensors[f"{start}attn_q.weight"] = x.direct_q.transpose(1, 2).flatten(0, 1).contiguous()
    return tensors
