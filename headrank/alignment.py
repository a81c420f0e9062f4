"""Bases of heads brought together: generalised orthogonal Procrustes under the turns that leave a model's function alone.

The keys of a head may be turned if its queries are turned alike, its values if its output projection is turned back. Where keys carry
a rotary embedding, only turns within each rotary pair commute with it: multiplication of the pair, as a complex number, by a phase.

Heads X_h, [n, D] each, enter by the products X_h^T X_j of their columns alone, so that nothing depends on the model's width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SWEEPS = 25  # over the heads; a handful is enough where heads have something in common, and random ones gain no more than 1e-4 by more
SETTLED = 1e-7  # relative gain of a sweep below which it has converged


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Which orthogonal matrices a head's columns may be multiplied with. Columns that are not named stay as they are."""

    first: tuple[int, ...] = ()
    """First column of each rotary pair: (first, second), as a complex number, may be multiplied by a phase."""
    second: tuple[int, ...] = ()
    """Its second column."""
    free: tuple[int, ...] = ()
    """Columns that any orthogonal matrix may mix."""

    @classmethod
    def anything(cls, size: int) -> "Turns":
        """Every orthogonal matrix of that size."""
        return cls(free=tuple(range(size)))


def column_products(heads: Tensor) -> Tensor:
    """X_h^T X_j of heads [H, n, D], as [H, D, H, D] float64: residuals of nearly equal heads are lost in the digits of float32."""
    H, _, D = heads.shape
    flat = heads.double().transpose(0, 1).flatten(1)
    return (flat.T @ flat).view(H, D, H, D)


def best_overlaps(products: Tensor, turns: Turns) -> Tensor:
    """The largest tr(A^T X_i^T X_j) that allowed turns A reach, for every pair of heads: [H, H], symmetric.

    A phase reaches the modulus of a rotary pair's product, any orthogonal matrix the nuclear norm; other columns stay.
    products: [H, D, H, D], see column_products.
    """
    overlap = _kept_columns(products, turns)
    if turns.first:
        overlap = overlap + _pair_products(products, turns).abs().sum(0)
    if turns.free:
        overlap = overlap + torch.linalg.svdvals(_free_products(products, turns)).sum(-1)
    return (overlap + overlap.T) / 2


def aligning_turns(products: Tensor, turns: Turns) -> Tensor:
    """Orthogonal A_h, [H, D, D] float64, that bring X_h A_h as close to their mean as the turns can; A_0 is the identity.

    products: [H, D, H, D], see column_products. Maximises |sum of X_h A_h|^2 one head at a time, from the leading eigenvectors of the
    products: no step makes it worse (ten Berge 1977). For two heads that is the exact optimum, for more a local one.
    """
    H, D = products.shape[:2]
    A = torch.eye(D, dtype=products.dtype, device=products.device).repeat(H, 1, 1)
    if H == 1:
        return A
    if turns.free:
        free = list(turns.free)
        A[:, torch.tensor(free)[:, None], free] = _orthogonal(_free_products(products, turns))
    if turns.first:
        first, second = list(turns.first), list(turns.second)
        u = _phases(_pair_products(products, turns))
        A[:, first, first] = A[:, second, second] = u.real
        A[:, first, second], A[:, second, first] = u.imag, -u.imag  # (a + ib) u
    return A


def _orthogonal(products: Tensor) -> Tensor:
    """products: [H, H, D, D], X_h^T X_j. Returns [H, D, D]."""
    H, D = products.shape[1:3]
    _, vectors = torch.linalg.eigh(products.transpose(1, 2).reshape(H * D, H * D))
    A = _nearest_orthogonal(vectors[:, -D:].reshape(H, D, D))
    reached = -1.0
    for _ in range(SWEEPS):
        for h in range(H):
            rest = torch.einsum("jab,jbc->ac", products[h], A) - products[h, h] @ A[h]
            A[h] = _nearest_orthogonal(rest)
        now = float(torch.einsum("hac,hjab,jbc->", A, products, A))
        if now - reached <= SETTLED * abs(now):
            break
        reached = now
    return A @ A[0].T


def _phases(products: Tensor) -> Tensor:
    """products: [P, H, H] Hermitian, x_h^* x_j. Returns unit complex numbers u, [H, P], of which |sum over h of x_h u_h| is largest."""
    H = products.shape[1]
    _, vectors = torch.linalg.eigh(products)
    u = _unit(vectors[..., -1])  # [P, H]
    reached = -1.0
    for _ in range(SWEEPS):
        for h in range(H):
            rest = (products[:, h] * u).sum(1) - products[:, h, h] * u[:, h]
            u[:, h] = torch.where(rest.abs() > 0, _unit(rest), u[:, h])
        now = float(torch.einsum("ph,phj,pj->", u.conj(), products, u).real)
        if now - reached <= SETTLED * abs(now):
            break
        reached = now
    return (u * u[:, :1].conj()).T


def _unit(z: Tensor) -> Tensor:
    size = z.abs()
    return torch.where(size > 0, z / size.clamp(min=torch.finfo(size.dtype).tiny), torch.ones_like(z))


def _nearest_orthogonal(matrix: Tensor) -> Tensor:
    """The orthogonal matrix nearest to each of [..., D, D]; some orthogonal matrix where that is not unique."""
    U, _, Vh = torch.linalg.svd(matrix)
    return U @ Vh


def _free_products(products: Tensor, turns: Turns) -> Tensor:
    """[H, H, F, F] of the free columns."""
    free = list(turns.free)
    return products[:, free][..., free].transpose(1, 2)


def _pair_products(products: Tensor, turns: Turns) -> Tensor:
    """x_h^* x_j of every rotary pair, a vector of complex numbers first + i second: [P, H, H], Hermitian."""
    first, second = list(turns.first), list(turns.second)

    def product(rows: list[int], columns: list[int]) -> Tensor:
        return products[:, rows][..., columns].diagonal(dim1=1, dim2=3).permute(2, 0, 1)  # [H, P, H, P] -> [P, H, H]

    real = product(first, first) + product(second, second)
    return torch.complex(real, product(first, second) - product(second, first))


def _kept_columns(products: Tensor, turns: Turns) -> Tensor:
    """tr(X_i^T X_j) over the columns that must stay as they are."""
    turned = {*turns.first, *turns.second, *turns.free}
    kept = [column for column in range(products.shape[1]) if column not in turned]
    return products[:, kept][..., kept].diagonal(dim1=1, dim2=3).sum(-1)
