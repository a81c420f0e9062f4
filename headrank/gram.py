"""The one kernel: heads as operators in, the Gram matrix of their Frobenius inner products out.

A head is M_h = L_h R_h^T. The inner product of two heads never needs the matrices themselves:

    G[i, j] = <M_i, M_j> = tr(M_i^T M_j) = sum of (L_i^T L_j) * (R_i^T R_j), entry by entry

since tr(R_i L_i^T L_j R_j^T) = tr((L_i^T L_j)(R_j^T R_i)). It holds for weights and for anything summed over tokens alike.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK_ROWS = 1024  # of one matrix product: enough for full speed, few enough that products of 128 heads of 128 take 0.1 GB


def factored_gram(left: Tensor, right: Tensor, left_of_head: Sequence[int], right_of_head: Sequence[int]) -> Tensor:
    """Gram matrix of heads given by factors.

    left: [n_left, n, k], right: [n_right, m, k]; head h is left[left_of_head[h]] @ right[right_of_head[h]].T, an n x m matrix
    that is never formed. Factors that heads share stand once, and their products are computed once.
    Returns [H, H] float64 on the factors' device. Scale alone does neither overflow nor vanish: each factor is brought to
    unit size first, and its size put back in float64.
    """
    left, left_size = unit_size(left)
    right, right_size = unit_size(right)
    i = torch.tensor(left_of_head, device=left.device)
    j = torch.tensor(right_of_head, device=left.device)
    H = len(left_of_head)
    gram = torch.empty(H, H, dtype=torch.float64, device=left.device)
    rows = max(1, min(H // 4, BLOCK_ROWS // left.shape[2]))  # four blocks or more: little is computed twice
    for start in range(0, H, rows):  # the part on and above the diagonal; G is symmetric
        block, rest = slice(start, min(start + rows, H)), slice(start, H)
        lefts = _products(left, i[block], i[rest])
        rights = _products(right, j[block], j[rest])
        gram[block, rest] = lefts.mul_(rights).sum((1, 3), dtype=torch.float64)  # [a, k, b, k] -> [a, b]
    gram = gram.triu() + gram.triu(1).T
    size = left_size[i] * right_size[j]
    return gram * size.outer(size)


def _products(factor: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """F_i^T F_j for the given indices, each distinct pair once, as [len(rows), k, len(columns), k]; a fresh tensor."""
    distinct_rows, row_of = rows.unique(return_inverse=True)
    distinct_columns, column_of = columns.unique(return_inverse=True)
    n, k = factor.shape[1:]
    a = factor[distinct_rows].transpose(1, 2).reshape(-1, n)
    b = factor[distinct_columns].transpose(1, 2).reshape(-1, n)
    product = (a @ b.T).view(len(distinct_rows), k, len(distinct_columns), k)
    return product[row_of][:, :, column_of]


def unit_size(factor: Tensor) -> tuple[Tensor, Tensor]:
    """factor: [n, …], each of the n divided by a power of two near its largest entry; returns it with those numbers in float64, [n]."""
    largest = factor.abs().flatten(1).amax(1).double()
    limit = 125 if factor.dtype == torch.float32 else 1000  # a power of two that the type holds, and its inverse too
    size = torch.exp2(torch.frexp(largest)[1].clamp(-limit, limit).double())
    return factor * size.reciprocal().to(factor.dtype).view(-1, *[1] * (factor.dim() - 1)), size
