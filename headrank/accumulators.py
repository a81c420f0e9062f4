"""Sums over tokens that a forward pass feeds, layer by layer, and the Gram matrices they end in.

Nothing here grows with the number of tokens: sequences belong to S groups, and a group keeps its [H, H] sums.
"""

import functools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from headrank.gram import Workspace, block_sums, product_of_rows, unit_size

CPU_BLOCK_BYTES = 3 << 18  # a block of scores is worked on in a core's second-level cache
CPU_ROWS = 32, 64  # fewest and most queries of a block: products of fewer are slow, of more do needless work above the diagonal
CUDA_BLOCK_BYTES = 1 << 28
SAFE = 1e6  # heads whose largest number in the first batch lies between its inverse and it stay far from float32's ends: squares, sums and all
PRODUCT_ROWS = 128  # of one product of outputs: enough for full speed, few enough that little below the diagonal is computed as well
PRODUCT_COLUMNS = 2048  # columns of one product of a batched one: short sums are exact enough in float32, their totals are float64


class HeadSizes:
    """A power of two near the size of each head's numbers, by which they are divided so that their float32 products neither overflow
    nor vanish. It is 1 for sizes that are safe as they are, and until a head has a number other than 0."""

    def __init__(self, n_head: int, device: torch.device) -> None:
        self.size = torch.ones(n_head, dtype=torch.float64, device=device)
        self._known = torch.zeros(n_head, dtype=torch.bool, device=device)
        self._all_known = self._all_safe = False

    def divided(self, numbers: Tensor, head_axis: int) -> Tensor:
        """float32 numbers divided by their heads' sizes; the same tensor where these are all 1."""
        if not self._all_known:
            axes = [axis for axis in range(numbers.dim()) if axis != head_axis]
            self._learn(torch.maximum(numbers.amax(axes), -numbers.amin(axes)))
        if self._all_safe:
            return numbers
        return numbers * self.size.reciprocal().float().view(-1, *[1] * (numbers.dim() - 1 - head_axis))

    def _learn(self, largest: Tensor) -> None:
        size = torch.exp2(torch.frexp(largest.double())[1].clamp(-125, 125).double())
        safe = (largest > SAFE**-1) & (largest < SAFE) | ~largest.isfinite()
        self.size = torch.where(self._known | safe | (largest == 0), self.size, size)
        self._known |= largest != 0
        self._note()

    def _note(self) -> None:
        self._all_known, self._all_safe = bool(self._known.all()), bool((self.size == 1).all())

    def state(self) -> dict[str, Tensor]:
        """What restore() takes, in another process."""
        return {"size": self.size, "known": self._known}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Goes on from what state() gave."""
        self.size.copy_(state["size"])
        self._known.copy_(state["known"])
        self._note()

    def merge(self, state: Mapping[str, Tensor]) -> Tensor:
        """Takes up the sizes of heads that only another's state() knows. Returns what its numbers are to be multiplied by, [H] float64."""
        size, known = state["size"].to(self.size.device), state["known"].to(self.size.device)
        self.size = torch.where(self._known, self.size, size)  # where it is not known, all numbers so far are 0
        self._known |= known
        return size / self.size


class ScoreGram:
    """Inner products of heads' attention scores over all allowed pairs of tokens, each query's row centred.

    The softmax ignores a constant added to all keys of a query; with rows centred, the cosine of two heads is the one between
    their centred log-ratio attention patterns (Aitchison 1982).
    """

    def __init__(self, n_head: int, n_groups: int, device: torch.device, workspace: Workspace | None = None) -> None:
        self.sums = torch.zeros(n_groups, n_head, n_head, dtype=torch.float64, device=device)
        self.sizes = HeadSizes(n_head, device)
        self.workspace = workspace or Workspace()

    def add(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scaling: float,
        groups: Tensor,
        v: Tensor | None = None,
        keep: Tensor | None = None,
        causal: bool = True,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor | None:
        """Adds one batch.

        q: [B, H, T, D], k: [B, G, S, D], as they enter the scores; head h reads k[:, h // (H / G)]. groups: [B], each sequence's group.
        keep: [B, T], False for tokens that are to count neither as queries nor as keys (then T = S).
        mask: [B or 1, H or 1, T, S], True where a query may see a key; where None, all, or no later ones if causal.
        bias: [B or 1, H or 1, T, S], added to the scores. softcap: c in c tanh(score / c), applied before the bias.

        v: [B, G, S, D_v]. Where given, and where the scores are worked on in a cache, they are turned into attention too, so that
        nobody needs to compute them again: returns [B, T, H, D_v], else None.
        """
        B, H, T, _ = q.shape
        G, S = k.shape[1:3]
        triangular = causal and mask is None
        if v is not None and mask is None and keep is None and bias is None and softcap is None and q.device.type == "cpu":
            attended = q.new_empty(B, T, H, v.shape[-1])
        else:
            attended = None
        q = q.unflatten(1, (G, H // G))  # [B, G, H / G, T, D]
        keys = (k if softcap is not None else _about_mean(k)).transpose(2, 3)
        products, owners = [], []
        for batch, t, stop in _blocks(B, H, T, S, q.device):
            seen = stop if triangular else S  # keys after the rows need no score at all
            scores = self._scores(q[batch, :, :, t:stop], keys[batch, ..., :seen], scaling)
            if softcap is not None:
                scores.div_(softcap).tanh_().mul_(softcap)
            if bias is not None:
                scores.add_(bias[batch if len(bias) > 1 else slice(None), :, t:stop, :seen])
            allowed = _allowed(mask, keep, batch, t, stop, seen, q.device)
            _center_rows(scores, allowed, t if triangular else None)
            products.append(_row_products(self.sizes.divided(scores, 1).flatten(2)))
            owners.append(groups[batch])
            if attended is not None and v is not None:
                attended[batch, t:stop] = _attention(scores, v[batch, :, :seen], t if triangular else None).transpose(1, 2)
        self.sums.index_add_(0, torch.cat(owners), torch.cat(products))
        return attended

    def add_scores(self, scores: Tensor, *, groups: Tensor, keep: Tensor | None = None, mask: Tensor | None = None) -> None:
        """Adds one batch of scores that something else computed. scores: [B, H, T, S], as they enter the softmax; they are left as they are.

        groups, keep and mask are those of add; every pair of tokens counts where neither says otherwise.
        """
        B, H, T, S = scores.shape
        for batch, t, stop in _blocks(B, H, T, S, scores.device):
            part = scores[batch, :, t:stop].to(torch.float32, copy=True)
            _center_rows(part, _allowed(mask, keep, batch, t, stop, S, scores.device), None)
            self.sums.index_add_(0, groups[batch], _row_products(self.sizes.divided(part, 1).flatten(2)))

    def _scores(self, q: Tensor, keys: Tensor, scaling: float) -> Tensor:
        """q: [b, G, R, C, D], keys: [b, G, D, S]. Returns [b, H, C, S] float32 in the workspace."""
        b, G, R, C, D = q.shape
        S = keys.shape[-1]
        out = self.workspace.take(b * G, R * C, S, device=q.device)
        left, right = q.reshape(b * G, R * C, D), keys.flatten(0, 1)
        if q.is_cuda and q.dtype != torch.float32:
            torch.bmm(left, right, out_dtype=torch.float32, out=out)  # products of 16-bit numbers are exact in float32
            out.mul_(scaling)
        else:
            torch.bmm(left.float().mul_(scaling) if left.dtype != torch.float32 else left * scaling, right.float(), out=out)
        return out.view(b, G * R, C, S)

    def state(self) -> dict[str, Tensor]:
        """What restore() takes, in another process."""
        return {"sums": self.sums, **self.sizes.state()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Goes on from what state() gave, to the same bits."""
        self.sums.copy_(state["sums"])
        self.sizes.restore(state)

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Adds what another accumulator counted, from its state(). Powers of two lie between their scales: no digit is lost."""
        scale = self.sizes.merge(state)
        self.sums += state["sums"].to(self.sums.device) * scale.outer(scale)

    def grams(self) -> Tensor:
        """[S, H, H] float64: a Gram matrix a group."""
        return self.sums * self.sizes.size.outer(self.sizes.size)


class OutputGram:
    """Inner products of what the heads write, z_h W_O^h, over all tokens, about their mean or about zero.

    <o_i, o_j> summed over tokens is sum of (Z_i^T Z_j) * (W_O^i W_O^jT), so only second moments of z are taken. They are taken
    about the first sequences' mean, since large constant parts would cost digits otherwise.
    """

    def __init__(self, W_O: Tensor, n_groups: int) -> None:
        """W_O: [H, D_v, d_model] on the device of the pass."""
        H, D, _ = W_O.shape
        W_O, self.W_size = unit_size(torch.empty(W_O.shape, device=W_O.device).copy_(W_O))  # float32 rows one after the other
        flat = W_O.flatten(0, 1)
        self.H, self.D = H, D
        self.metric = [product_of_rows(flat[block], flat[rest]) for block, rest in self._halves()]  # W_O W_O^T, [H D_v, H D_v]
        self.sizes = HeadSizes(H, W_O.device)
        self.sums = torch.zeros(n_groups, H, H, dtype=torch.float64, device=W_O.device)
        self.firsts = torch.zeros(n_groups, H * D, dtype=torch.float64, device=W_O.device)
        self.counts = torch.zeros(n_groups, dtype=torch.float64, device=W_O.device)
        self.shift: Tensor | None = None

    def add(self, z: Tensor, *, groups: Tensor, keep: Tensor | None = None) -> None:
        """Adds one batch. z: [B, T, H, D_v]; groups: [B]; keep: [B, T], False for tokens that are not to count."""
        budget = CUDA_BLOCK_BYTES if z.is_cuda else CPU_BLOCK_BYTES
        together = max(1, budget // (4 * (self.H * self.D) ** 2))  # short sequences of small heads: many in one product
        for start in range(0, len(z), together):
            part = slice(start, start + together)
            self._add(z[part], groups[part], None if keep is None else keep[part])

    def _add(self, z: Tensor, groups: Tensor, keep: Tensor | None) -> None:
        B, T = z.shape[:2]
        columns = z.flatten(2).transpose(1, 2).contiguous().float()  # [B, H D_v, T]
        if keep is not None:
            columns = torch.where(keep[:, None], columns, 0)
        counts = keep.sum(1).double() if keep is not None else torch.full((B,), float(T), dtype=torch.float64, device=z.device)
        if self.shift is None:
            if not counts.any():
                return
            self.shift = (columns.sum((0, 2), dtype=torch.float64) / counts.sum()).float()
        columns = columns - self.shift.unsqueeze(1)
        if keep is not None:
            columns.mul_(keep[:, None])
        columns = self.sizes.divided(columns.unflatten(1, (self.H, self.D)), 1).flatten(1, 2)
        self.counts.index_add_(0, groups, counts)
        self.firsts.index_add_(0, groups, columns.sum(2).double())
        self.sums.index_add_(0, groups, self._second(columns))

    def _halves(self) -> Iterator[tuple[slice, slice]]:
        """Rows of a symmetric [H D_v, H D_v] matrix, some heads at a time, and the columns from the first of them on."""
        heads = max(1, PRODUCT_ROWS // self.D)
        for first in range(0, self.H, heads):
            yield slice(first * self.D, min(first + heads, self.H) * self.D), slice(first * self.D, self.H * self.D)

    def _second(self, columns: Tensor) -> Tensor:
        """columns: [B, H D_v, T]. Returns [B, H, H] float64, a matrix a sequence; only the part on and above the diagonal is computed."""
        gram = torch.zeros(len(columns), self.H, self.H, dtype=torch.float64, device=columns.device)
        for (block, rest), metric in zip(self._halves(), self.metric, strict=True):
            a, b = columns[:, block], columns[:, rest]
            products = product_of_rows(a[0], b[0])[None] if len(columns) == 1 else a @ b.transpose(1, 2)
            heads, others = slice(block.start // self.D, block.stop // self.D), slice(rest.start // self.D, None)
            gram[:, heads, others] = block_sums(products.mul_(metric), self.D)
        return gram.triu() + gram.triu(1).transpose(1, 2)

    def _toward(self, point: Tensor) -> Tensor:
        """W_O^i W_O^jT m_j of all heads i, j, [H, D_v, H] float64. point: m, [H D_v]."""
        mean = point.view(self.H, self.D)
        toward = point.new_empty(self.H * self.D, self.H)
        for (block, _), metric in zip(self._halves(), self.metric, strict=True):
            rows, heads = metric.double(), slice(block.start // self.D, block.stop // self.D)
            toward[block, heads.start :] = torch.einsum("xjb,jb->xj", rows.unflatten(1, (-1, self.D)), mean[heads.start :])
            below = rows[:, len(rows) :].unflatten(0, (-1, self.D))  # mirrored: what lies below the diagonal
            toward[block.stop :, heads] = torch.einsum("jbx,jb->xj", below, mean[heads])
        return toward.view(self.H, self.D, self.H)

    def state(self) -> dict[str, Tensor]:
        """What restore() takes, in another process. The output projection is not part of it."""
        sums = {"sums": self.sums, "firsts": self.firsts, "counts": self.counts, **self.sizes.state()}
        return sums if self.shift is None else sums | {"shift": self.shift}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Goes on from what state() gave, to the same bits."""
        for name in ("sums", "firsts", "counts"):
            getattr(self, name).copy_(state[name])
        self.sizes.restore(state)
        self.shift = state["shift"].to(self.sums.device) if "shift" in state else None

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Adds what another accumulator of the same heads and groups counted, from its state(): its sums are taken about the mean of this one."""
        if "shift" not in state:
            return
        if self.shift is None:
            self.restore(state)
            return
        its = {name: tensor.to(self.sums.device) for name, tensor in state.items()}
        scale = self.sizes.merge(its)
        counts, firsts = its["counts"], (its["firsts"].view(-1, self.H, self.D) * scale[:, None]).flatten(1)
        apart = self._in_units(its["shift"].double() - self.shift.double())
        self.sums += self._about(-apart, its["sums"] * scale.outer(scale), firsts, counts)
        self.firsts += firsts + counts[:, None] * apart
        self.counts += counts

    def grams(self, *, center: bool = True) -> Tensor:
        """[S, H, H] float64: a Gram matrix a group, about the mean over all tokens, or about zero."""
        if self.shift is None:
            return self.sums
        total = self.counts.sum().clamp(min=1)
        about = self.firsts.sum(0) / total if center else -self._in_units(self.shift.double())
        size = self.W_size * self.sizes.size
        return self._about(about, self.sums, self.firsts, self.counts) * size.outer(size)

    def _in_units(self, z: Tensor) -> Tensor:
        """z: [H D_v]. Divided by the sizes of the heads, as all sums are."""
        return (z.view(self.H, self.D) / self.sizes.size[:, None]).flatten()

    def _about(self, point: Tensor, sums: Tensor, firsts: Tensor, counts: Tensor) -> Tensor:
        """Sums of products as they are about another point. point: [H D_v], from the one that the sums are about. [S, H, H]."""
        toward = self._toward(point)
        cross = torch.einsum("sia,iaj->sij", firsts.view(-1, self.H, self.D), toward)
        square = torch.einsum("ia,iaj->ij", point.view(self.H, self.D), toward)
        return sums - cross - cross.transpose(1, 2) + counts[:, None, None] * square


def _about_mean(k: Tensor) -> Tensor:
    """Keys [B, G, S, D] about their mean: all scores of a query change by the same amount, and a large constant part costs no digits.

    16-bit keys on CUDA stay as they are: their own rounding is coarser, and they are multiplied as they are.
    """
    if k.is_cuda and k.dtype != torch.float32:
        return k
    k = k.float()
    return k - k.mean(2, keepdim=True).nan_to_num(0, 0, 0)  # what stands in padding may be anything, and need not be near the mean


def _blocks(B: int, H: int, T: int, S: int, device: torch.device) -> Iterator[tuple[slice, int, int]]:
    """Sequences, first row and end of rows of blocks of scores that fit the fast memory."""
    if device.type == "cuda":
        sequences = max(1, min(B, CUDA_BLOCK_BYTES // (4 * H * T * S)))
        rows = max(1, min(T, CUDA_BLOCK_BYTES // (4 * H * S * sequences)))
    else:
        fewest, most = CPU_ROWS
        rows = min(T, max(fewest, min(most, CPU_BLOCK_BYTES // (4 * H * S) // fewest * fewest)))
        sequences = max(1, min(B, CPU_BLOCK_BYTES // (4 * H * S * rows)))
    for b in range(0, B, sequences):
        for t in range(0, T, rows):
            yield slice(b, b + sequences), t, min(t + rows, T)


def _allowed(mask: Tensor | None, keep: Tensor | None, batch: slice, start: int, stop: int, seen: int, device: torch.device) -> Tensor | None:
    """Which query of the rows may count with which key, causality aside: [b or 1, H or 1, C, seen], or None where all may."""
    allowed = None if mask is None else mask[batch if len(mask) > 1 else slice(None), :, start:stop, :seen]
    if keep is not None:
        both = keep[batch, None, start:stop, None] & keep[batch, None, None, :seen]
        allowed = both if allowed is None else allowed & both
    return allowed


def _center_rows(scores: Tensor, allowed: Tensor | None, first: int | None) -> None:
    """Takes each row's mean over its allowed keys from [b, H, C, S] scores, in place; pairs that are not allowed become 0.

    allowed: [b or 1, H or 1, C, S], None where all are. first: the query that row 0 is, where keys after a query are not allowed to it.
    """
    C, S = scores.shape[2:]
    if first is not None and allowed is not None:
        allowed, first = allowed & torch.ones(C, S, dtype=torch.bool, device=scores.device).tril_(first), None
    if allowed is not None:
        blocked = ~allowed
        scores.masked_fill_(blocked, 0)
        scores.sub_(scores.sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True).clamp(min=1))
        scores.masked_fill_(blocked, 0)
    elif first is not None:
        future = scores.view(-1, C, S)[..., first:]  # of three axes, for which torch is fast
        future.tril_()
        scores.sub_(scores.sum(-1, keepdim=True) / torch.arange(first + 1, first + C + 1, device=scores.device).unsqueeze(1))
        future.tril_()
    else:
        scores.sub_(scores.mean(-1, keepdim=True))


def _attention(scores: Tensor, v: Tensor, first: int | None) -> Tensor:
    """Softmax of scores [b, H, C, S], in place, times values [b, G, S, D_v] in their own type. Returns [b, H, C, D_v].

    scores may be off by a constant a row. first: as in _center_rows; what it does not allow is 0 in scores.
    """
    b, H, C, S = scores.shape
    G = v.shape[1]
    if first is not None:
        scores[..., first:] += _minus_infinity_above(C)
    torch.softmax(scores, -1, out=scores)
    shares = scores.to(v.dtype).view(b * G, H // G * C, S)
    return (shares @ v.flatten(0, 1)).view(b, H, C, -1)


@functools.lru_cache(maxsize=8)
def _minus_infinity_above(C: int) -> Tensor:
    """[C, C]: -inf above the diagonal, else 0."""
    return torch.full((C, C), float("-inf")).triu(1)


def _row_products(rows: Tensor) -> Tensor:
    """rows: [b, H, n] float32. Returns rows @ rows^T, [b, H, H] float64, from float32 products over short runs of columns."""
    b, H, n = rows.shape
    whole = n // PRODUCT_COLUMNS * PRODUCT_COLUMNS
    total = torch.zeros(b, H, H, dtype=torch.float64, device=rows.device)
    if whole:
        runs = rows[..., :whole].unflatten(-1, (-1, PRODUCT_COLUMNS)).transpose(1, 2)  # [b, runs, H, columns]
        total += torch.matmul(runs, runs.transpose(-1, -2)).sum(1, dtype=torch.float64)
    if whole < n:
        rest = rows[..., whole:]
        total += torch.matmul(rest, rest.transpose(-1, -2))
    return total
