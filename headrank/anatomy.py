"""The anatomy of LRKV's keys and values: a shared matrix and a low-rank residual a head, W_h = W_shared + U_h B_h^T (arXiv 2601.11471).

Only the sum enters the model. What one part gains another may lose with no change to what the model computes, so norms, angles and
errors of the parts describe the split that training arrived at, not a property of the function.

Everything comes from the thin factors, one head's d_model x d_head matrix at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrank.diversity import Array, mean_off_diagonal, similarity
from headrank.kernels import one_side_gram, orthonormal_bases

NOTHING = 1e-12  # of the sizes that a difference is taken of; what is smaller is rounding


@dataclass(frozen=True, kw_only=True)
class Split:
    """One projection of one layer in its two parts. Arrays are [H]; NaN where a number is undefined, of which `reason` says why."""

    rank: int
    """r."""
    shared_norm: float
    """||W_shared||_F."""
    residual_norm: Array
    """||U_h B_h^T||_F."""
    cosine: Array
    """<W_shared, U_h B_h^T> over the two norms."""
    overlap: Array
    """Mean squared cosine of the principal angles between the subspaces of the residual stream that the two parts read: 1 where the
    residual's lies within the shared one's; d_head / d_model in the mean for random ones."""
    smallest_angle: Array
    """The smallest of these angles, in degrees."""
    largest_angle: Array
    """The largest, in degrees."""
    overlap_between: float
    """Likewise between the residuals of two heads, in the mean over pairs of heads; r / d_model for random ones."""
    learned_error: Array
    """||E_h - U_h B_h^T||_F / ||E_h||_F with E_h = W_h - mean over heads of W_h: what the learned factors miss of a head's departure
    from the heads' mean."""
    best_error: Array
    """The least that any matrix of rank r misses: the singular values of E_h beyond the r largest (Eckart and Young 1936)."""
    distance: Array
    """||U_h B_h^T - A_h||_F / ||A_h||_F, A_h being that best approximation of E_h."""
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class ProjectionAnatomy:
    """Keys or values of one layer."""

    norm: Array
    """[H]: ||W_h||_F."""
    best_errors: dict[int, Array]
    """Rank -> [H]: the least that a matrix of that rank misses of a head's departure from the heads' mean, as in Split."""
    split: Split | None = None
    """LRKV's parts; None for heads of full rank."""


def full_rank_anatomy(heads: Tensor, ranks: Sequence[int]) -> ProjectionAnatomy:
    """Heads that have no parts, to set beside: their norms, and how well matrices of low rank would stand for their departures.

    heads: [H, d, D].
    """
    heads = heads.double()
    mean = heads.mean(0)
    sigma = [torch.linalg.svdvals(_departure(head, mean)) for head in heads]
    return ProjectionAnatomy(norm=np.array([float(head.norm()) for head in heads]), best_errors={r: np.array([_missed(s, r) for s in sigma]) for r in ranks})


def split_anatomy(shared: Tensor, down: Tensor, up: Tensor) -> ProjectionAnatomy:
    """shared: [d, D], down: [H, d, r], up: [H, D, r]; head h is shared + down[h] @ up[h].T."""
    shared, down, up = shared.double(), down.double(), up.double()
    H, _, r = down.shape
    mean = torch.einsum("hdr,her->de", down, up) / H
    basis, own_bases = orthonormal_bases(shared[None])[0], _bases_of_products(down, up)
    numbers: dict[str, list[float]] = {name: [] for name in ("norm", "residual", "cosine", "learned", "best", "distance", "overlap", "smallest", "largest")}
    for h in range(H):
        residual = down[h] @ up[h].T
        departure = _departure(residual, mean)  # W_h - mean of W is this too: the shared part cancels
        best = _best_of_rank(departure, r)
        numbers["norm"].append(float((shared + residual).norm()))
        numbers["residual"].append(float(residual.norm()))
        numbers["cosine"].append(_ratio(float((shared * residual).sum()), float(shared.norm() * residual.norm())))
        numbers["learned"].append(_ratio(float(mean.norm()), float(departure.norm())))  # E_h - U_h B_h^T is minus the mean residual
        numbers["best"].append(_missed(torch.linalg.svdvals(departure), r))
        numbers["distance"].append(_ratio(float((residual - best).norm()), float(best.norm())))
        for name, value in zip(("overlap", "smallest", "largest"), _principal_angles(basis, own_bases[h]), strict=True):
            numbers[name].append(value)
    arrays = {name: np.array(values) for name, values in numbers.items()}
    split = Split(
        rank=r,
        shared_norm=float(shared.norm()),
        residual_norm=arrays["residual"],
        cosine=arrays["cosine"],
        overlap=arrays["overlap"],
        smallest_angle=arrays["smallest"],
        largest_angle=arrays["largest"],
        overlap_between=float(mean_off_diagonal(similarity(one_side_gram(own_bases, range(H)).numpy()))) if r and H > 1 else np.nan,
        learned_error=arrays["learned"],
        best_error=arrays["best"],
        distance=arrays["distance"],
        reason=_reason(r, H, float(shared.norm()), arrays),
    )
    return ProjectionAnatomy(norm=arrays["norm"], best_errors={r: arrays["best"]}, split=split)


def _reason(r: int, H: int, shared_norm: float, arrays: dict[str, Array]) -> str | None:
    if not r:
        return "rank 0: heads have no residual"
    reasons = []
    if zero := np.flatnonzero(arrays["residual"] == 0).tolist():
        reasons.append(f"the residual of head {', '.join(map(str, zero))} is zero")
    if shared_norm == 0:
        reasons.append("the shared part is zero")
    if H == 1:
        reasons.append("one head: it is its own mean")
    elif equal := np.flatnonzero(np.isnan(arrays["best"])).tolist():
        reasons.append(f"head {', '.join(map(str, equal))} is the heads' mean: there is no departure from it")
    return "; ".join(reasons) or None


def root_mean_square(values: Array) -> float:
    """Over heads: the norm of a typical head. sqrt(H) times it is the norm of all heads side by side."""
    return float(np.sqrt(np.mean(np.square(values))))


def _departure(matrix: Tensor, mean: Tensor) -> Tensor:
    """matrix - mean; exactly zero where only rounding is left."""
    difference = matrix - mean
    return difference if difference.norm() > NOTHING * (matrix.norm() + mean.norm()) else torch.zeros_like(difference)


def _best_of_rank(matrix: Tensor, rank: int) -> Tensor:
    """The closest matrix of that rank, from the eigenvectors of the small product: several times faster than the whole decomposition."""
    vectors = torch.linalg.eigh(matrix.T @ matrix)[1].flip(1)[:, :rank]
    return matrix @ vectors @ vectors.T


def _missed(sigma: Tensor, rank: int) -> float:
    """Norm of the singular values beyond the `rank` largest, as a fraction of that of all."""
    return _ratio(float(sigma[rank:].norm()), float(sigma.norm()))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else np.nan


def _bases_of_products(down: Tensor, up: Tensor) -> Tensor:
    """Orthonormal bases of the column spaces of down[h] @ up[h].T, [H, d, r], without forming them; columns beyond a rank are 0."""
    if not down.shape[2]:
        return down
    R = torch.linalg.qr(up, mode="r")[1]  # up = Q R, so the product is (down R^T) Q^T
    return orthonormal_bases(down @ R.transpose(1, 2))


def _principal_angles(basis: Tensor, other: Tensor) -> tuple[float, float, float]:
    """Mean squared cosine over the dimensions of `other`, and the smallest and largest principal angle in degrees; NaN where either is 0.

    basis: [d, n], other: [d, m], orthonormal but for columns of zeros. Angles: Björck and Golub 1973.
    """
    sizes = [int((columns.square().sum(0) > 0.5).sum()) for columns in (basis, other)]
    if not min(sizes):
        return np.nan, np.nan, np.nan
    cosines = torch.linalg.svdvals(basis.T @ other)[: min(sizes)].clamp(max=1)
    angles = torch.rad2deg(torch.arccos(cosines))
    return float(cosines.square().sum()) / sizes[1], float(angles.min()), float(angles.max())
