"""The one kernel: heads as operators in, the Gram matrix of their Frobenius inner products out.

A head is M_h = L_h R_h^T. The inner product of two heads never needs the matrices themselves:

    G[i, j] = <M_i, M_j> = tr(M_i^T M_j) = sum of (L_i^T L_j) * (R_i^T R_j), entry by entry

since tr(R_i L_i^T L_j R_j^T) = tr((L_i^T L_j)(R_j^T R_i)). It holds for weights and for anything summed over tokens alike.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK_ROWS = 256  # of one matrix product: enough for full speed, few enough that little below the diagonal is computed as well
SMALL = 1 << 21  # multiplications, below which making oneDNN's product ready costs more than it saves
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
SAFE = 1e4  # where the largest entries lie between its inverse and it, float32 holds products of four of them and sums of a billion


def factored_gram(left: Tensor, right: Tensor, left_of_head: Sequence[int], right_of_head: Sequence[int]) -> Tensor:
    """Gram matrix of heads given by factors.

    left: [n_left, n, k], right: [n_right, m, k]; head h is left[left_of_head[h]] @ right[right_of_head[h]].T, an n x m matrix
    that is never formed. Factors that heads share stand once, and their products are computed once.
    Returns [H, H] float64 on the factors' device. Scale alone does neither overflow nor vanish: sizes far from 1 are taken out of
    the factors first, and put back in float64.
    """
    left, left_size = unit_size(left)
    right, right_size = unit_size(right)
    left, right = (factor.transpose(1, 2).contiguous() for factor in (left, right))  # [n, k, m]: no copy of what lies in a file as out x in
    i = torch.tensor(left_of_head, device=left.device)
    j = torch.tensor(right_of_head, device=left.device)
    H, k = len(left_of_head), left.shape[1]
    gram = torch.empty(H, H, dtype=torch.float64, device=left.device)
    rows, share = max(1, BLOCK_ROWS // k), H // min(len(left), len(right))
    rows = max(rows, share) if share <= 2 * rows else rows  # a block of heads that share takes their products once
    for start in range(0, H, rows):  # the part on and above the diagonal; G is symmetric
        block, rest = slice(start, min(start + rows, H)), slice(start, H)
        products = _products(left, i[block], i[rest]).mul_(_products(right, j[block], j[rest]))
        gram[block, rest] = block_sums(products, k)
    gram = gram.triu() + gram.triu(1).T
    size = left_size[i] * right_size[j]
    return gram * size.outer(size)


def _products(factor: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """F_i F_j^T for the given indices into [n, k, m], each distinct pair once, as [len(rows) k, len(columns) k]; a fresh tensor."""
    k = factor.shape[1]
    distinct_rows, row_of = rows.unique(return_inverse=True)
    distinct_columns, column_of = columns.unique(return_inverse=True)
    product = product_of_rows(_chosen(factor, distinct_rows), _chosen(factor, distinct_columns))
    if _counts_up(row_of) and _counts_up(column_of):  # nothing is shared
        return product
    return product.view(-1, k, len(distinct_columns), k)[row_of][:, :, column_of].flatten(2).flatten(0, 1)


def _counts_up(numbers: Tensor) -> bool:
    return bool((numbers == torch.arange(len(numbers), device=numbers.device)).all())


def _chosen(factor: Tensor, which: Tensor) -> Tensor:
    """Rows of the factors that are chosen, in ascending order: [n, k, m] -> [len(which) k, m], a view where they lie one after the other."""
    first = int(which[0])
    return (factor[first : first + len(which)] if _counts_up(which - first) else factor[which]).flatten(0, 1)


def product_of_rows(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.T, [m, k] x [n, k] -> [m, n].

    On the CPU float32 products of some size go to oneDNN: MKL, which torch takes, runs at half its speed on AMD's processors.
    """
    if a.device.type == "cpu" and a.dtype == b.dtype == torch.float32 and len(a) * b.numel() > SMALL and HAS_ONEDNN:
        # rows one after the other: what lies otherwise may take oneDNN's reference code, a thousand times as slow
        return torch.ops.mkldnn._linear_pointwise(a.contiguous(), b.contiguous(), None, "none", [], "")
    return a @ b.T


def block_sums(products: Tensor, k: int) -> Tensor:
    """Sums of blocks of k x k numbers: [..., a k, b k] -> [..., a, b] float64; along rows in float32, as exact as float32 products are."""
    rows = products.unflatten(-1, (-1, k)).sum(-1)
    return rows.unflatten(-2, (-1, k)).sum(-2, dtype=torch.float64)


def unit_size(factor: Tensor) -> tuple[Tensor, Tensor]:
    """factor: [n, …], each of the n divided by a power of two near its largest entry, unless all are of a safe size as they are.

    Returns it with those numbers in float64, [n].
    """
    axes = tuple(range(1, factor.dim()))
    largest = torch.maximum(factor.amax(axes), -factor.amin(axes)).double()
    if bool(((largest > 1 / SAFE) & (largest < SAFE)).all()):
        return factor, torch.ones_like(largest)
    limit = 125 if factor.dtype == torch.float32 else 1000  # a power of two that the type holds, and its inverse too
    size = torch.exp2(torch.frexp(largest)[1].clamp(-limit, limit).double())
    return factor * size.reciprocal().to(factor.dtype).view(-1, *[1] * (factor.dim() - 1)), size
