"""One attention module for all kinds: a kind is the way keys and values are made; the rest is the same."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrank.config import ModelConfig


class Probe(Protocol):
    """Sees what every attention layer really computes, while it computes it."""

    def scores(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, scaling: float) -> Tensor | None:
        """q: [B, H, T, D], k: [B, G, T, D], after rotary embedding and QK norm; head h reads k[:, h // (H / G)].

        v: [B, G, T, D_v], None where there is padding. A probe that turned the scores into causal attention returns what that
        makes of v, [B, T, H, D_v], and it is not computed again.
        """

    def outputs(self, layer: int, z: Tensor) -> None:
        """z: [B, T, H, D_v], what each head hands to the output projection."""


class KeyValue(nn.Module):
    """Makes keys or values, [B, T, G, d_head], from the residual stream: one projection a key-value head (MHA, GQA, MQA)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_kv_head, self.d_head = config.n_kv_head, config.d_head
        self.weight = nn.Parameter(torch.empty(config.n_kv_head * config.d_head, config.d_model))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).unflatten(-1, (self.n_kv_head, self.d_head))


class LowRankKeyValue(nn.Module):
    """LRKV: x W_shared + (x U_h) B_h^T, arXiv 2601.11471. [B, T, H, d_head]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head, self.d_head, self.rank = config.n_head, config.d_head, config.rank
        self.shared = nn.Parameter(torch.empty(config.d_head, config.d_model))
        self.down = nn.Parameter(torch.empty(config.n_head * config.rank, config.d_model))  # rows of head h: U_h^T
        self.up = nn.Parameter(torch.empty(config.n_head * config.d_head, config.rank))  # rows of head h: B_h

    def forward(self, x: Tensor) -> Tensor:
        shared = F.linear(x, self.shared).unsqueeze(-2)  # [B, T, 1, d_head]
        if not self.rank:
            return shared.expand(*x.shape[:2], self.n_head, self.d_head)
        latent = F.linear(x, self.down).unflatten(-1, (self.n_head, self.rank))
        return shared + torch.einsum("bthr,hdr->bthd", latent, self.up.unflatten(0, (self.n_head, self.d_head)))


class Attention(nn.Module):
    """Causal self-attention: rotary embedding, QK norm, scaled_dot_product_attention."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        H, D, d = config.n_head, config.d_head, config.d_model
        self.c_q = nn.Linear(d, H * (D + config.d_rope), bias=False)
        if config.kind == "mla":
            self.c_kv = nn.Linear(d, config.d_latent + config.d_rope, bias=False)  # rows: the latent, then the shared rotary key
        self.c_k, self.c_v = _key_value(config), _key_value(config)
        self.c_proj = nn.Linear(H * D, d, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, probe: Probe | None) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x, rotary))
        scaling = q.shape[-1] ** -0.5
        z = None if probe is None else probe.scores(self.layer, q, k, v if mask is None else None, scaling)  # [B, T, H, D_v]
        if z is None:
            shared = k.shape[1] != q.shape[1]
            z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=shared).transpose(1, 2)
            z = z if probe is None else keep_nan(z, q)
        if probe is not None:
            probe.outputs(self.layer, z)
        return self.c_proj(z.flatten(2))

    def qkv(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x: [B, T, d_model]. Returns q: [B, T, H, D_qk], k: [B, T, G, D_qk], v: [B, T, G, d_head]; q and k rotated and normalised."""
        config = self.config
        q = self.c_q(x).unflatten(-1, (config.n_head, -1))
        if config.kind != "mla":
            return _norm(_rotate(q, rotary)), _norm(_rotate(self.c_k(x), rotary)), self.c_v(x)
        latent, k_rope = self.c_kv(x).split((config.d_latent, config.d_rope), -1)
        k = self.c_k(latent).unflatten(-1, (config.n_head, config.d_head))
        v = self.c_v(latent).unflatten(-1, (config.n_head, config.d_head))
        if not config.d_rope:
            return _norm(_rotate(q, rotary)), _norm(_rotate(k, rotary)), v
        q_nope, q_rope = q.split((config.d_head, config.d_rope), -1)
        k_rope = _rotate(k_rope.unsqueeze(-2), rotary).expand(-1, -1, config.n_head, -1)
        return _norm(torch.cat((q_nope, _rotate(q_rope, rotary)), -1)), _norm(torch.cat((k, k_rope), -1)), v


def _key_value(config: ModelConfig) -> nn.Module:
    if config.kind == "mla":
        return nn.Linear(config.d_latent, config.n_head * config.d_head, bias=False)
    return LowRankKeyValue(config) if config.kind == "lrkv" else KeyValue(config)


def rotary_table(config: ModelConfig, length: int, *, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each [T, 1, D / 2], computed in float32 (arXiv 2104.09864)."""
    D = config.d_rope or config.d_head
    frequencies = config.rope_theta ** (-torch.arange(0, D, 2, device=device, dtype=torch.float32) / D)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turns pairs (i, i + D/2) by minus the angle, as nanochat does, so that its weights mean the same here."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), -1)


def keep_nan(z: Tensor, q: Tensor) -> Tensor:
    """z [B, T, H, D_v] with NaN where the query, q [B, H, T, D], holds one: torch's fused causal attention on the CPU makes it 0."""
    return z.masked_fill(q.isnan().any(-1).transpose(1, 2).unsqueeze(-1), float("nan"))


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))
