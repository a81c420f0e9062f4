"""The one kernel: heads as operators in, the Gram matrix of their Frobenius inner products out.

A head is M_h = L_h R_h^T. The inner product of two heads never needs the matrices themselves:

    G[i, j] = <M_i, M_j> = tr(M_i^T M_j) = sum of (L_i^T L_j) * (R_i^T R_j), entry by entry

since tr(R_i L_i^T L_j R_j^T) = tr((L_i^T L_j)(R_j^T R_i)). It holds for weights and for anything summed over tokens alike.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

CPU_BLOCK_ROWS, CUDA_BLOCK_ROWS = 128, 1024  # columns of one product: enough for full speed, few enough that little above the diagonal is computed as well
SMALL = 1 << 21  # multiplications, below which making oneDNN's product ready costs more than it saves
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
SAFE = 1e4  # where the largest entries lie between its inverse and it, float32 holds products of four of them and sums of a billion


class Workspace:
    """Memory that is taken once and used again: fresh memory costs as much as the work on it."""

    def __init__(self) -> None:
        self._held = torch.empty(0)

    def take(self, *shape: int, device: torch.device) -> Tensor:
        """float32 numbers of any value, until the next call."""
        size = math.prod(shape)
        if self._held.numel() < size or self._held.device != device:
            self._held = torch.empty(size, device=device)
        return self._held[:size].view(shape)


def factored_gram(
    left: Tensor, right: Tensor, left_of_head: Sequence[int], right_of_head: Sequence[int], *, workspaces: tuple[Workspace, Workspace] | None = None
) -> Tensor:
    """Gram matrix of heads given by factors.

    left: [n_left, n, k], right: [n_right, m, k], of any floating type; head h is left[left_of_head[h]] @ right[right_of_head[h]].T, an n x m matrix
    that is never formed. Factors that heads share stand once, and their products are computed once.
    workspaces: memory for the two factors where they must be copied, which the next call uses again.
    Returns [H, H] float64 on the factors' device. Scale alone does neither overflow nor vanish: sizes far from 1 are taken out of
    the factors first, and put back in float64.
    """
    for_left, for_right = workspaces or (Workspace(), Workspace())
    lefts, rights = _Products(left, left_of_head, for_left), _Products(right, right_of_head, for_right)
    k, H = left.shape[2], len(left_of_head)
    gram = torch.zeros(H, H, dtype=torch.float64, device=left.device)
    columns = max(1, (CUDA_BLOCK_ROWS if left.is_cuda else CPU_BLOCK_ROWS) // k)
    for start in range(0, H, columns):  # the part on and below the diagonal; G is symmetric
        rest, block = range(start, H), range(start, min(start + columns, H))
        gram[start:, start : block.stop] = block_sums(lefts.of(rest, block) * rights.of(rest, block), k)
    gram = gram.tril() + gram.tril(-1).T
    size = lefts.sizes() * rights.sizes()
    return gram * size.outer(size)


class _Products:
    """F_i^T F_j of factors [n, m, k], for heads of which several may share a factor: each distinct pair is computed once."""

    def __init__(self, factor: Tensor, of_head: Sequence[int], workspace: Workspace) -> None:
        rows = factor.transpose(1, 2)  # [n, k, m]: as it lies in a file that stores out x in
        if rows.is_cuda or rows.dtype == torch.float64:
            rows = rows.contiguous()
        elif rows.dtype != torch.float32 or not rows.is_contiguous():  # CPUs have no product of 16-bit numbers that keeps all digits
            rows = workspace.take(*rows.shape, device=rows.device).copy_(rows)
        self.rows, self.size = unit_size(rows)
        self.of_head = list(of_head)
        self._known: tuple[list[int], list[int]] = [], []
        self._product = rows

    def sizes(self) -> Tensor:
        """What each head's factor was divided by, [H] float64."""
        return self.size[self.of_head]

    def of(self, heads: range, others: range) -> Tensor:
        """Products of heads' factors with those of others, [len(heads) k, len(others) k]; not to be changed."""
        k = self.rows.shape[1]
        owners, other_owners = [self.of_head[h] for h in heads], [self.of_head[h] for h in others]
        distinct = sorted(set(owners)), sorted(set(other_owners))
        if distinct != self._known:  # heads that share one come after one another
            self._known, self._product = distinct, product_of_rows(*map(self._chosen, distinct))
        if (owners, other_owners) == distinct:  # nothing is shared
            return self._product
        i, j = ([its.index(owner) for owner in all_owners] for its, all_owners in zip(distinct, (owners, other_owners), strict=True))
        return self._product.view(-1, k, len(distinct[1]), k)[i][:, :, j].flatten(2).flatten(0, 1)

    def _chosen(self, which: list[int]) -> Tensor:
        """Factors in ascending order, [len(which) k, m]: a view where they lie one after the other."""
        first, n = which[0], len(which)
        return (self.rows[first : first + n] if which == list(range(first, first + n)) else self.rows[which]).flatten(0, 1)


def product_of_rows(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.T, [m, k] x [n, k] -> [m, n], fastest where n is the smaller one; float32 of 16-bit numbers, which stay as they are on CUDA.

    On the CPU float32 products of some size go to oneDNN: MKL, which torch takes, runs at half its speed on AMD's processors.
    """
    if a.is_cuda and a.dtype.itemsize == 2:
        return torch.mm(a, b.T, out_dtype=torch.float32)
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
    factor = factor if factor.dtype == torch.float64 else factor.float()  # 16-bit types hold fewer powers of two
    limit = 125 if factor.dtype == torch.float32 else 1000  # a power of two that the type holds, and its inverse too
    size = torch.exp2(torch.frexp(largest)[1].clamp(-limit, limit).double())
    return factor * size.reciprocal().to(factor.dtype).view(-1, *[1] * (factor.dim() - 1)), size
