"""From a Gram matrix of heads to numbers. Definitions as in arXiv 2601.11471.

Everything is float64: eigenvalues of nearly identical heads differ in the last digits of float32, and effective rank is
sensitive to just those. All functions take any leading dimensions, so that layers and bootstrap samples go through at once.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def similarity(gram: ArrayLike) -> Array:
    """S[i, j] = G[i, j] / sqrt(G[i, i] G[j, j]): the cosine between two heads as operators.

    gram: [..., H, H], finite. Returns [..., H, H] in [-1, 1] with diagonal 1. A dead head's row, column and diagonal are 0.
    Two heads at 60 degrees have similarity 0.5:

    >>> similarity([[4.0, 1.0], [1.0, 1.0]]).tolist()
    [[1.0, 0.5], [0.5, 1.0]]
    """
    gram = np.asarray(gram, dtype=np.float64)
    dead = dead_heads(gram)
    size = np.sqrt(np.where(dead, 1.0, np.diagonal(gram, axis1=-2, axis2=-1)))
    cosine = np.clip(gram / (size[..., :, None] * size[..., None, :]), -1.0, 1.0)  # as symmetric as G, to the bit
    np.einsum("...ii->...i", cosine)[...] = 1.0
    return np.where(dead[..., :, None] | dead[..., None, :], 0.0, cosine)


def dead_heads(gram: ArrayLike) -> NDArray[np.bool_]:
    """Heads that are the zero operator: G[h, h] = 0. gram: [..., H, H]. Returns [..., H]."""
    return np.diagonal(np.asarray(gram, dtype=np.float64), axis1=-2, axis2=-1) <= 0.0


def centered(matrix: ArrayLike) -> Array:
    """S - row mean - column mean + grand mean: kernel PCA's centring (Schölkopf, Smola and Müller 1998).

    matrix: [..., H, H]. Returns the same shape, of rank at most H - 1.
    """
    matrix = np.asarray(matrix, dtype=np.float64)
    rows = matrix.mean(-1, keepdims=True)
    columns = matrix.mean(-2, keepdims=True)
    return matrix - rows - columns + rows.mean(-2, keepdims=True)


def spectrum(matrix: ArrayLike) -> Array:
    """Eigenvalues of a symmetric matrix, [..., H], descending; what rounding put below 0 is 0.

    >>> spectrum([[1.0, 0.5], [0.5, 1.0]]).round(12).tolist()
    [1.5, 0.5]
    """
    eigenvalues = np.linalg.eigvalsh(np.asarray(matrix, dtype=np.float64))[..., ::-1]
    H = eigenvalues.shape[-1]
    # What is left of exact zeros is of the order of H eps times the size of the matrix; above that it is signal.
    noise = H * np.finfo(np.float64).eps * np.maximum(np.abs(eigenvalues).max(-1, keepdims=True), 1.0)
    return np.where(eigenvalues <= noise, 0.0, eigenvalues)


def variance_explained(eigenvalues: ArrayLike) -> Array:
    """v_i = lambda_i / sum of lambda, [..., H]; NaN where all eigenvalues are 0."""
    eigenvalues = np.asarray(eigenvalues, dtype=np.float64)
    total = eigenvalues.sum(-1, keepdims=True)
    return np.divide(eigenvalues, total, out=np.full_like(eigenvalues, np.nan), where=total > 0)


def effective_rank(eigenvalues: ArrayLike) -> Array:
    """exp(-sum of v_i ln v_i) with 0 ln 0 = 0 (Roy and Vetterli 2007), [...]: 1 for identical heads, H for orthogonal ones.

    NaN where it is undefined: all eigenvalues are 0, as for the centred matrix of identical heads.

    >>> float(effective_rank([2.0, 2.0, 0.0]))
    2.0
    """
    v = variance_explained(eigenvalues)
    return np.exp(-(v * np.log(np.where(v > 0, v, 1.0))).sum(-1))


def n_components(eigenvalues: ArrayLike, fraction: float = 0.9) -> NDArray[np.int64]:
    """Smallest number of leading eigenvalues that explain at least `fraction` of the variance, [...]; 0 where that is undefined."""
    cumulative = np.cumsum(variance_explained(eigenvalues), axis=-1)
    rounding = cumulative.shape[-1] * np.finfo(np.float64).eps
    return np.where(np.isnan(cumulative[..., -1]), 0, (cumulative < fraction - rounding).sum(-1) + 1)


def attainable_rank(n_head: int, *, is_centered: bool) -> int:
    """The largest effective rank that n_head heads can have: centring takes one dimension away."""
    return n_head - 1 if is_centered else n_head


def mean_off_diagonal(matrix: ArrayLike) -> Array:
    """Mean similarity over pairs of different heads, [...]; NaN for one head."""
    matrix = np.asarray(matrix, dtype=np.float64)
    H = matrix.shape[-1]
    if H == 1:
        return np.full(matrix.shape[:-2], np.nan)
    return (matrix.sum((-2, -1)) - np.trace(matrix, axis1=-2, axis2=-1)) / (H * (H - 1))


def most_similar_pair(matrix: ArrayLike) -> tuple[float, tuple[int, int]] | None:
    """The largest similarity of two different heads of one matrix [H, H], and which heads; None for one head."""
    matrix = np.asarray(matrix, dtype=np.float64)
    H = matrix.shape[-1]
    if H == 1:
        return None
    rows, columns = np.triu_indices(H, 1)
    best = int(np.argmax(matrix[rows, columns]))
    return float(matrix[rows[best], columns[best]]), (int(rows[best]), int(columns[best]))
