"""Plain float64 computations with every matrix written out: what the fast code is compared with.

Nothing here uses headrank's own formulas: heads are cut by loops, rotary embedding is a product of complex numbers, attention is
an eager softmax.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrank.architectures import Architecture, describe
from headrank.checkpoints import Checkpoint, TensorInfo
from headrank.config import ModelConfig
from headrank.model import Decoder, new_decoder

GEOMETRY: dict[str, Any] = {"n_layer": 3, "n_head": 6, "d_head": 10, "d_model": 13, "d_mlp": 17, "vocab_size": 31, "context": 19}
CONFIGS = {
    "mha": ModelConfig(kind="mha", **GEOMETRY),
    "gqa": ModelConfig(kind="gqa", n_kv_head=2, **GEOMETRY),
    "mqa": ModelConfig(kind="mqa", **GEOMETRY),
    "mla": ModelConfig(kind="mla", d_latent=7, **GEOMETRY),
    "mla_rope": ModelConfig(kind="mla", d_latent=7, d_rope=4, **GEOMETRY),
    "lrkv": ModelConfig(kind="lrkv", rank=3, **GEOMETRY),
    "lrkv_0": ModelConfig(kind="lrkv", rank=0, **GEOMETRY),
}


class MemoryCheckpoint(Checkpoint):
    """A checkpoint of our own that lies in memory."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        document = {"model_type": "headrank", **{name: getattr(config, name) for name in config.__dataclass_fields__}}
        tensors = {name: TensorInfo(tuple(tensor.shape), "F32", Path("memory.safetensors")) for name, tensor in weights.items()}
        super().__init__(Path("memory"), format="memory", config=document, config_name="config.json", tensors=tensors)
        self.weights = weights

    def read(self, name: str) -> Tensor:
        return self.weights[name]


def decoder(config: ModelConfig, *, seed: int = 0) -> Decoder:
    """A decoder with random weights that are large enough for every part to matter."""
    model = new_decoder(config, seed=seed).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if ".attn." in name or ".mlp." in name:
            parameter.mul_(2)
    return model.eval()


def checkpoint_of(model: Decoder) -> tuple[MemoryCheckpoint, Architecture]:
    checkpoint = MemoryCheckpoint(model.config, dict(model.named_parameters()))
    return checkpoint, describe(checkpoint)


def gram_of(operators: Tensor) -> np.ndarray:
    """operators: [H, …]. Sums of products of all entries, pair by pair."""
    H = len(operators)
    return np.array([[float((operators[i].double() * operators[j].double()).sum()) for j in range(H)] for i in range(H)])


def cosines(gram: np.ndarray) -> np.ndarray:
    size = np.sqrt(gram.diagonal())
    return gram / np.outer(size, size)


def entropy_rank(matrix: np.ndarray) -> float:
    """exp of the entropy of the normalised eigenvalues, those at rounding's level left out."""
    values = np.linalg.eigvalsh(matrix)
    share = values[values > 1e-12 * values.max()]
    share = share / share.sum()
    return float(np.exp(-np.sum(share * np.log(share))))


@dataclass
class HeadMatrices:
    """One layer's matrices in float64, a list entry a head: W_Q [d, D_qk], W_K [d, D_qk], W_V [d, D], W_O [D, d]."""

    W_Q: list[Tensor]
    W_K: list[Tensor]
    W_V: list[Tensor]
    W_O: list[Tensor]

    def operators(self, circuit: str) -> Tensor:
        """[H, d, d]"""
        if circuit == "qk":
            return torch.stack([q @ k.T for q, k in zip(self.W_Q, self.W_K, strict=True)])
        return torch.stack([v @ o for v, o in zip(self.W_V, self.W_O, strict=True)])


def head_matrices(model: Decoder, layer: int) -> HeadMatrices:
    """The matrices of every head, cut from the parameters by their names. A rotary part stands behind the rest of a head."""
    config = model.config
    H, D, R = config.n_head, config.d_head, config.d_rope
    prefix = f"transformer.h.{layer}.attn."
    w = {name.removeprefix(prefix): p.detach().double() for name, p in model.named_parameters() if name.startswith(prefix)}
    W_Q = [w["c_q.weight"][h * (D + R) : (h + 1) * (D + R)].T for h in range(H)]
    W_O = [w["c_proj.weight"][:, h * D : (h + 1) * D].T for h in range(H)]
    made: dict[str, list[Tensor]] = {}
    for part in ("c_k", "c_v"):
        if config.kind == "mla":
            down, shared_key = w["c_kv.weight"][: config.d_latent].T, w["c_kv.weight"][config.d_latent :].T
            made[part] = [down @ w[f"{part}.weight"][h * D : (h + 1) * D].T for h in range(H)]
            if part == "c_k":
                made[part] = [torch.cat((key, shared_key), 1) for key in made[part]]
        elif config.kind == "lrkv":
            r, shared, down, up = config.rank, w[f"{part}.shared"].T, w[f"{part}.down"], w[f"{part}.up"]
            made[part] = [shared + down[h * r : (h + 1) * r].T @ up[h * D : (h + 1) * D].T for h in range(H)]
        else:
            share = H // config.n_kv_head
            made[part] = [w[f"{part}.weight"][h // share * D : (h // share + 1) * D].T for h in range(H)]
    return HeadMatrices(W_Q, made["c_k"], made["c_v"], W_O)


@dataclass
class EagerLayer:
    """What one attention block computes, in float64."""

    log_probabilities: Tensor
    """[B, H, T, T]; -inf where the mask forbids."""
    outputs: Tensor
    """[B, H, T, d]: z_h W_O^h."""


def eager_pass(model: Decoder, ids: Tensor, *, valid: Tensor | None = None) -> list[EagerLayer]:
    """The whole decoder, written out. ids: [B, T]; valid: [B, T], False where padding."""
    B, T = ids.shape
    allowed = torch.ones(T, T, dtype=torch.bool).tril().expand(B, T, T).clone()
    if valid is not None:
        allowed &= valid[:, None, :]
        allowed |= torch.eye(T, dtype=torch.bool)  # padding sees itself, so that its rows are defined
    w = {name: p.detach().double() for name, p in model.named_parameters()}
    x = unit_rms(w["transformer.wte.weight"][ids])
    layers = []
    for layer in range(model.config.n_layer):
        heads = head_matrices(model, layer)
        normed = unit_rms(x)
        layers.append(eager_attention(model.config, heads, normed, allowed))
        x = x + layers[-1].outputs.sum(1)
        hidden = torch.clamp(unit_rms(x) @ w[f"transformer.h.{layer}.mlp.c_fc.weight"].T, min=0) ** 2
        x = x + hidden @ w[f"transformer.h.{layer}.mlp.c_proj.weight"].T
    return layers


def eager_attention(config: ModelConfig, heads: HeadMatrices, x: Tensor, allowed: Tensor) -> EagerLayer:
    """x: [B, T, d]; allowed: [B, T, T]."""
    log_probabilities, outputs = [], []
    for W_Q, W_K, W_V, W_O in zip(heads.W_Q, heads.W_K, heads.W_V, heads.W_O, strict=True):
        q, k = (unit_rms(turned(x @ W, config)) for W in (W_Q, W_K))
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        log_p = torch.log_softmax(scores.masked_fill(~allowed, float("-inf")), -1)
        log_probabilities.append(log_p)
        outputs.append(log_p.exp() @ (x @ W_V) @ W_O)
    return EagerLayer(torch.stack(log_probabilities, 1), torch.stack(outputs, 1))


def turned(x: Tensor, config: ModelConfig) -> Tensor:
    """Rotary embedding of the last d_rope dimensions, or of all: pairs (i, i + D/2) as complex numbers times exp(-i angle). x: [B, T, D]."""
    D = config.d_rope or config.d_head
    still, moved = x[..., : x.shape[-1] - D], x[..., x.shape[-1] - D :]
    numbers = torch.complex(moved[..., : D // 2].contiguous(), moved[..., D // 2 :].contiguous())
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * config.rope_theta ** (-torch.arange(D // 2, dtype=torch.float64) * 2 / D)
    numbers = numbers * torch.polar(torch.ones_like(angle), -angle)
    return torch.cat((still, numbers.real, numbers.imag), -1)


def unit_rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()


def score_operators(layer: EagerLayer, keep: Tensor | None = None) -> Tensor:
    """[H, N]: log-probabilities of all pairs that count, each query's centred over its keys: the centred log-ratio of its attention."""
    B, H, T, _ = layer.log_probabilities.shape
    columns = []
    for b in range(B):
        for t in range(T):
            counts = layer.log_probabilities[b, 0, t] > float("-inf")
            if keep is not None:
                counts = counts & keep[b] & keep[b, t]
            if counts.any():
                row = layer.log_probabilities[b, :, t, counts]
                columns.append(row - row.mean(1, keepdim=True))
    return torch.cat(columns, 1) if columns else torch.zeros(H, 1, dtype=torch.float64)


def output_operators(layer: EagerLayer, keep: Tensor | None = None, *, center: bool = True) -> Tensor:
    """[H, N, d]: what each head writes at all tokens that count, about its mean."""
    written = layer.outputs.transpose(0, 1).flatten(1, 2)
    if keep is not None:
        written = written[:, keep.flatten()]
    return written - written.mean(1, keepdim=True) if center else written
