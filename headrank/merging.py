"""One layer's heads brought to share keys and values, or to be fewer; every step but the last leaves what they compute as it is.

    read_heads -> normalised -> aligned -> shared          keys and values a group instead of a head
    read_heads -> without                                  heads that others stand in for

A head computes with W_Q W_K^T and W_V W_O, so W_K and W_V may be given another basis, and another size, where W_Q and W_O take it back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from headrank.alignment import Turns, aligning_turns, column_products
from headrank.architectures import Architecture, AttentionLayer
from headrank.checkpoints import Checkpoint
from headrank.diversity import effective_rank, similarity, spectrum
from headrank.errors import HeadrankError
from headrank.factors import head_factors
from headrank.gram import factored_gram
from headrank.grouping import Groups
from headrank.rotary import rotary_of

# Families whose positions enter elsewhere than in queries and keys, so that these may be turned at will.
WITHOUT_ROTARY = frozenset(
    ("bert", "roberta", "distilbert", "electra", "vit", "gpt2", "nanogpt", "gpt_bigcode", "gpt_neo", "opt", "bloom", "mpt", "whisper", "t5", "xglm")
)
VALUES = ("mean", "fit")


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The matrices of one layer, float64. U units have keys and values of their own, and R heads read each: head h is of unit h // R."""

    W_Q: Tensor
    """[U, R, n, D]; n is d_model, and one more where queries have a bias."""
    W_K: Tensor
    """[U, d_model, D]"""
    W_V: Tensor
    """[U, n, D_v]; n is d_model, and one more where values have a bias."""
    W_O: Tensor
    """[U, R, D_v, d_model]"""


def read_heads(checkpoint: Checkpoint, architecture: Architecture, layer: AttentionLayer) -> Heads:
    """The heads of a layer, with the gains and biases that belong to them folded in. Raises NotFiniteError."""
    qk = head_factors(checkpoint, architecture, layer, "qk")
    ov = head_factors(checkpoint, architecture, layer, "ov")
    U = len(qk.right)
    W_Q, W_O = qk.left.double(), ov.right.double().transpose(1, 2)
    return Heads(W_Q=W_Q.unflatten(0, (U, -1)), W_K=qk.right.double(), W_V=ov.left.double(), W_O=W_O.unflatten(0, (U, -1)))


def key_turns(checkpoint: Checkpoint, layer: AttentionLayer) -> tuple[Turns, str]:
    """How the keys of a layer may be turned, and why, in words."""
    norms = [norm for norm in (layer.q.head_norm, layer.k.head_norm) if norm is not None]
    if any(norm.gain or norm.bias or norm.centred for norm in norms):
        return Turns(), "as they lie: the gain of the QK norm holds them in their basis"
    model_type = (checkpoint.config.get("text_config") or checkpoint.config).get("model_type")
    if model_type in WITHOUT_ROTARY:
        return Turns.anything(layer.d_qk), "any rotation: no rotary embedding"
    try:
        rotary = rotary_of(checkpoint, layer)
    except HeadrankError:
        return Turns(), "as they lie: how this checkpoint's rotary embedding pairs its dimensions is not recorded"
    turned = {*rotary.first, *rotary.second}
    free = tuple(column for column in range(layer.d_qk) if column not in turned)
    return Turns(first=rotary.first, second=rotary.second, free=free), "rotations within each rotary pair"


def normalised(heads: Heads) -> Heads:
    """The same heads with keys of one size: the root mean square of their Frobenius norms; the queries make up for it.

    QK norm ignores the size of keys, and without it W_Q and W_K can share it as they like: it must not decide whose keys weigh more.
    """
    norms = heads.W_K.flatten(1).norm(dim=1)
    size = norms.square().mean().sqrt()
    factor = torch.where(norms > 0, size / norms.clamp(min=torch.finfo(torch.float64).tiny), 1.0)
    return replace(heads, W_Q=heads.W_Q / factor[:, None, None, None], W_K=heads.W_K * factor[:, None, None])


def balanced(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Factors L S^1/2 and S^1/2 R^T of left @ right = L S R^T, of the shapes of left [..., n, D] and right [..., D, m], S descending."""
    Q_left, R_left = torch.linalg.qr(left)
    Q_right, R_right = torch.linalg.qr(right.transpose(-1, -2))
    U, S, Vh = torch.linalg.svd(R_left @ R_right.transpose(-1, -2), full_matrices=False)
    root = S.sqrt()
    missing = left.shape[-1] - S.shape[-1]  # heads wider than the model
    first, second = (Q_left @ U) * root.unsqueeze(-2), (Vh * root.unsqueeze(-1)) @ Q_right.transpose(-1, -2)
    return F.pad(first, (0, missing)), F.pad(second, (0, 0, 0, missing))


def aligned(heads: Heads, groups: Groups, turns: Turns) -> Heads:
    """The units in the order of the groups, each group's bases brought together. What each head computes stays as it is."""
    parts = [_aligned(Heads(W_Q=heads.W_Q[g], W_K=heads.W_K[g], W_V=heads.W_V[g], W_O=heads.W_O[g]), turns) for g in map(list, groups)]
    return _joined(parts)


def _aligned(heads: Heads, turns: Turns) -> Heads:
    A_K = aligning_turns(column_products(heads.W_K), turns)
    A_V = aligning_turns(column_products(heads.W_V), Turns.anything(heads.W_V.shape[2]))
    return Heads(W_Q=heads.W_Q @ A_K[:, None], W_K=heads.W_K @ A_K, W_V=heads.W_V @ A_V, W_O=A_V.transpose(1, 2)[:, None] @ heads.W_O)


def shared(heads: Heads, n_groups: int, *, values: str = "mean") -> Heads:
    """Keys and values a group of consecutive units: the mean of theirs.

    values "fit" instead takes the D_v-dimensional space from which the units' W_V W_O can be rebuilt best, and rebuilds them from there
    by least squares: the least squared error that shared values allow. The mean depends on how W_V W_O is split, "fit" does not.
    """
    if values not in VALUES:
        raise HeadrankError(f"values {values!r} is not known; known: {', '.join(VALUES)}")
    W_K = heads.W_K.unflatten(0, (n_groups, -1)).mean(1)
    W_Q, W_O = heads.W_Q.flatten(0, 1).unflatten(0, (n_groups, -1)), heads.W_O.flatten(0, 1).unflatten(0, (n_groups, -1))
    if values == "mean":
        return Heads(W_Q=W_Q, W_K=W_K, W_V=heads.W_V.unflatten(0, (n_groups, -1)).mean(1), W_O=W_O)
    parts = [_fitted(W_V, own) for W_V, own in zip(heads.W_V.unflatten(0, (n_groups, -1)), heads.W_O.unflatten(0, (n_groups, -1)), strict=True)]
    return Heads(W_Q=W_Q, W_K=W_K, W_V=torch.stack([W_V for W_V, _ in parts]), W_O=torch.stack([W_O for _, W_O in parts]))


def _fitted(W_V: Tensor, W_O: Tensor) -> tuple[Tensor, Tensor]:
    """W_V: [s, n, D], W_O: [s, R, D, d]. Returns shared values [n, D] and the outputs of all heads [s R, D, d], balanced."""
    s, R, D, _ = W_O.shape
    joint = written_spaces(W_V, W_O).transpose(0, 1).flatten(1)  # [n, s D]
    basis = torch.linalg.svd(joint, full_matrices=False)[0][:, :D]
    outputs = (basis.T @ W_V)[:, None] @ W_O  # [s, R, D, d] by least squares, the basis being orthonormal; D less where n is
    missing = D - basis.shape[1]
    basis, outputs = F.pad(basis, (0, missing)), F.pad(outputs, (0, 0, 0, missing))
    W_V, flat = balanced(basis, outputs.flatten(0, 1).transpose(0, 1).flatten(1))
    return W_V, flat.unflatten(1, (s * R, -1)).transpose(0, 1)


def written_spaces(W_V: Tensor, W_O: Tensor) -> Tensor:
    """W_V W_O of each unit, all its heads side by side, but for orthonormal rows that change no norm: [U, n, D]."""
    stacked = W_O.transpose(1, 2).flatten(2)  # [U, D, R d]
    return W_V @ torch.linalg.qr(stacked.transpose(1, 2), mode="r")[1].transpose(1, 2)  # W_O W_O^T = R^T R


def lost_keys(heads: Heads, merged: Heads) -> float:
    """Share of the keys' Frobenius norm that a mean loses. heads: aligned, in the order of their groups."""
    theirs = merged.W_K.repeat_interleave(len(heads.W_K) // len(merged.W_K), 0)
    return _share(float((heads.W_K - theirs).square().sum()), float(heads.W_K.square().sum()))


def lost_values(heads: Heads, merged: Heads) -> float:
    """Share of the Frobenius norm of all W_V W_O that is lost; heads of both in the same order."""
    before, after = _writers(heads), _writers(merged)
    whole = _inner(before, before)
    return _share(whole - 2 * _inner(before, after) + _inner(after, after), whole)


def _writers(heads: Heads) -> tuple[Tensor, Tensor]:
    """W_V and W_O of every head, [H, n, D] and [H, D, d]."""
    return heads.W_V.repeat_interleave(heads.W_O.shape[1], 0), heads.W_O.flatten(0, 1)


def _inner(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> float:
    """Sum over heads of <W_V W_O, W_V' W_O'>, from products of D x D."""
    lefts = first[0].transpose(1, 2) @ second[0]
    rights = first[1] @ second[1].transpose(1, 2)
    return float((lefts * rights).sum())


def _share(lost: float, whole: float) -> float:
    """Square root of a share of squares; rounding below 0 is 0."""
    return (max(lost, 0.0) / whole) ** 0.5 if whole else 0.0


def without(heads: Heads, stand_ins: Sequence[Sequence[int]], *, add: bool = True) -> Heads:
    """Fewer heads: of each cluster the first is kept, and writes what all of them wrote, had they looked where it looks.

    The maps W_V W_O of a cluster are added, and the best approximation of the kept head's rank taken (add=False: the kept head's own).
    Each unit has one head. Heads come in the order of the clusters' first.
    """
    kept = [cluster[0] for cluster in stand_ins]
    heads_kept = Heads(W_Q=heads.W_Q[kept], W_K=heads.W_K[kept], W_V=heads.W_V[kept], W_O=heads.W_O[kept])
    if not add:
        return heads_kept
    W_V, W_O = heads_kept.W_V.clone(), heads_kept.W_O.clone()
    for place, cluster in enumerate(map(list, stand_ins)):
        if len(cluster) > 1:
            left = heads.W_V[cluster].transpose(0, 1).flatten(1)  # [n, c D]
            right = heads.W_O[cluster, 0].flatten(0, 1)  # [c D, d]
            left, right = balanced(left, right)
            W_V[place], W_O[place, 0] = left[:, : W_V.shape[2]], right[: W_V.shape[2]]
    return replace(heads_kept, W_V=W_V, W_O=W_O)


def effective_ranks(heads: Heads) -> dict[str, float | None]:
    """Effective rank of the heads' similarity matrix from these weights, a circuit; None where it is undefined."""
    U, R = heads.W_Q.shape[:2]
    unit, head = [h // R for h in range(U * R)], list(range(U * R))
    grams = {
        "qk": factored_gram(heads.W_Q.flatten(0, 1), heads.W_K, head, unit),
        "ov": factored_gram(heads.W_V, heads.W_O.flatten(0, 1).transpose(1, 2), unit, head),
    }
    ranks = {circuit: float(effective_rank(spectrum(similarity(gram.numpy())))) for circuit, gram in grams.items()}
    return {circuit: None if rank != rank else rank for circuit, rank in ranks.items()}


def _joined(parts: Sequence[Heads]) -> Heads:
    return Heads(**{name: torch.cat([getattr(part, name) for part in parts]) for name in ("W_Q", "W_K", "W_V", "W_O")})
