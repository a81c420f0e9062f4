"""Other kernels on the weights of heads than the operators' own: subspaces alone, and keys or values alone.

Each returns a Gram matrix [H, H] in float64 from thin factors; headrank.diversity makes the cosines of it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrank.factors import HeadFactors
from headrank.gram import Workspace, factored_gram


def one_side_gram(factor: Tensor, of_head: Sequence[int]) -> Tensor:
    """<F_i F_i^T, F_j F_j^T> = ||F_i^T F_j||_F^2: how alike the inner products are that two projections give to the same inputs.

    factor: [n, d, k], head h is factor[of_head[h]]: its keys (right factor of qk) or its values (left factor of ov).
    F -> F B changes nothing for an orthogonal B, since queries can undo it; any other B does, which scales keys against each other.
    Returns [H, H] float64.
    """
    return factored_gram(factor, factor, of_head, of_head)


def projection_kernel(factors: HeadFactors) -> Tensor:
    """How much the subspaces of two heads have in common: the projection kernel (arXiv 2601.10266) of both sides, multiplied.

    A head M = L R^T lies in the space of all L A R^T, span(L) x span(R): what its queries and keys can compare (qk: span W_Q and
    span W_K), what it can read and write (ov: span W_V and span W_O). The principal angles of two such spaces have as cosines the
    products of the sides' cosines, so that

        K[i, j] = sum of cos^2 = ||P_i^T P_j||_F^2 ||Q_i^T Q_j||_F^2        P, Q: orthonormal bases of span L and span R

    and K[i, i] is the product of the dimensions. Unlike the cited kernel, which compares one matrix of a head with one of another,
    both sides count, since heads that share keys differ in queries alone. Invariant to L -> L A, R -> R B for any invertible A and B.
    Returns [H, H] float64; 0 for a head that is zero.
    """
    left, right = orthonormal_bases(factors.left), orthonormal_bases(factors.right)
    one, other = one_side_gram(left, factors.left_of_head), one_side_gram(right, factors.right_of_head)
    return one * other


def orthonormal_bases(factor: Tensor) -> Tensor:
    """Orthonormal bases of the column spaces of [n, d, k] matrices, as [n, d, min(d, k)] in float64; columns beyond the rank are 0.

    What lies below max(d, k) times float32's rounding of the largest singular value is rounding of stored weights, not a dimension.
    """
    d, k = factor.shape[1:]
    largest = factor.abs().amax((1, 2), keepdim=True).double()
    Q, R = torch.linalg.qr(factor.double() / torch.where(largest > 0, largest, 1.0))  # leaves a small matrix to decompose
    U, sigma, _ = torch.linalg.svd(R, full_matrices=False)
    threshold = max(d, k) * torch.finfo(torch.float32).eps * sigma[:, :1]
    return Q @ U * (sigma > threshold).unsqueeze(1)


def weights_gram(name: str, factors: HeadFactors, *, workspaces: tuple[Workspace, Workspace] | None = None) -> Tensor:
    """The Gram matrix that a measurement keeps under `name` (see headrank.measures), from the factors of its circuit. [H, H] float64.

    workspaces: as of factored_gram.
    """
    if name.startswith("projection-kernel"):
        return projection_kernel(factors)
    if name == "keys":
        return one_side_gram(factors.right, factors.right_of_head)
    if name == "values":
        return one_side_gram(factors.left, factors.left_of_head)
    return factored_gram(factors.left, factors.right, factors.left_of_head, factors.right_of_head, workspaces=workspaces)
