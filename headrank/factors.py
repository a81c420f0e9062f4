"""Checkpoint and architecture to per-head factors L and R of M_h = L_h R_h^T, one layer and circuit at a time.

What a head computes includes the gains and biases around its matrices, and a gain can move between a norm and a matrix
without changing the model, so they are folded in:

- the norm before the block: rows of the factor times its gain; a LayerNorm's centring too, I - 11^T/d; its bias goes through the
  matrix and joins the matrix's own;
- QK norm: columns of the factor times its gain;
- a bias of queries or values: one more row of L, for an input that is always 1. A bias of keys adds the same amount to all keys
  of a query, cancels in the softmax, and is left out.

An RMS norm is folded up to one positive factor a token: the factors are the head's map on inputs of unit RMS.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrank.architectures import Architecture, AttentionLayer, Chain, Norm, Projection, Scale, Slice, Step
from headrank.checkpoints import Checkpoint
from headrank.errors import HeadrankError, NotFiniteError

CIRCUITS = ("qk", "ov")
MLA_PARTS = ("both", "nope", "rope")
SAFE = 1e15  # products of sizes within 1/SAFE…SAFE neither overflow nor vanish in float32


@dataclass(frozen=True)
class HeadFactors:
    """Head h is left[left_of_head[h]] @ right[right_of_head[h]].T times 2^exponent. Factors that heads share stand once."""

    left: Tensor
    """[n_left, n, k]: float32, float64 where the file stores that, or 16-bit numbers as they are stored where that was asked for."""
    right: Tensor
    """[n_right, m, k]"""
    left_of_head: tuple[int, ...]
    right_of_head: tuple[int, ...]
    exponent: int = 0
    """Not 0 only where products of the file's numbers leave float32's range; the same for all heads, so that no similarity depends on it."""


def head_factors(
    checkpoint: Checkpoint,
    architecture: Architecture,
    layer: AttentionLayer,
    circuit: str,
    *,
    raw: bool = False,
    mla_part: str = "both",
    device: torch.device | None = None,
    as_stored: bool = False,
) -> HeadFactors:
    """Factors of all heads of one layer; only the tensors that they need are read.

    circuit "qk": left = W_Q [H, d (+ 1), D], right = W_K [G, d, D]. "ov": left = W_V [G, d (+ 1), D_v], right = W_O^T [H, d, D_v].
    The one more row of left is the bias. raw takes the matrices as they lie in the file, without gains and biases.
    mla_part takes the part of MLA's queries and keys without position, the rotary part, or both side by side. device: where they are
    made, the CPU by default. as_stored leaves 16-bit numbers as they are where nothing is folded into them: products that sum them in
    float32 lose nothing by it.
    Raises NotFiniteError naming the layer, the tensor and the head that hold NaN or infinity.
    """
    if circuit not in CIRCUITS:
        raise HeadrankError(f"circuit {circuit!r} is not known; known: {', '.join(CIRCUITS)}")
    if mla_part not in MLA_PARTS:
        raise HeadrankError(f"MLA part {mla_part!r} is not known; known: {', '.join(MLA_PARTS)}")
    reader = _Reader(checkpoint, layer, device)
    only = _chosen(layer, mla_part) if circuit == "qk" else None
    before, after = (layer.q, layer.k) if circuit == "qk" else (layer.v, layer.o)
    left, left_exponent = _factor(reader, before, raw=raw, with_bias=True, only=only, as_stored=as_stored)
    right, right_exponent = _factor(reader, after, raw=raw, with_bias=False, only=only, as_stored=as_stored)
    if (left.dtype == torch.float64) != (right.dtype == torch.float64):
        left, right = left.double(), right.double()
    return HeadFactors(left, right, _shared(layer.n_head, len(left)), _shared(layer.n_head, len(right)), left_exponent + right_exponent)


def tensors_read(layer: AttentionLayer, circuit: str) -> tuple[str, ...]:
    """Names of the matrices that head_factors reads, each once."""
    projections = (layer.q, layer.k) if circuit == "qk" else (layer.v, layer.o)
    return tuple(dict.fromkeys(step.weight.tensor for its in projections for chains in its.parts.values() for chain in chains for step in chain))


def head_matrices(checkpoint: Checkpoint, layer: AttentionLayer, projection: Projection) -> Tensor:
    """One projection of a layer (layer.q, .k or .v) by head, [n, d, size] in float64: gains folded in, biases left out.

    Raises NotFiniteError naming the layer, the tensor and the head that hold NaN or infinity.
    """
    return _evaluate(_Reader(checkpoint, layer), projection, torch.float64, raw=False, only=None)[0]


def shared_and_low_rank(checkpoint: Checkpoint, layer: AttentionLayer, projection: Projection) -> tuple[Tensor, Tensor, Tensor]:
    """LRKV's keys or values as they are stored: head h is shared + down[h] @ up[h].T. Errors as of head_matrices.

    Returns shared [d, D], down [H, d, r] and up [H, D, r] in float64; r is 0 where the heads have no part of their own.
    """
    reader = _Reader(checkpoint, layer)
    chains = [[reader.heads(step.weight).double() for step in chain] for chain in next(iter(projection.parts.values()))]
    shared = chains[0][0][0].T
    if len(chains) == 1:
        return shared, shared.new_zeros(layer.n_head, len(shared), 0), shared.new_zeros(layer.n_head, shared.shape[1], 0)
    down, up = chains[1]
    return shared, down.transpose(1, 2), up


def _chosen(layer: AttentionLayer, mla_part: str) -> tuple[str, ...] | None:
    if mla_part == "both":
        return None
    if not layer.q.sizes.get("rope"):
        raise HeadrankError(f"layer {layer.index} has no separate rotary part, so there is no {mla_part!r} to choose; leave the MLA part at 'both'")
    return (mla_part,)


def _shared(n_head: int, n: int) -> tuple[int, ...]:
    """Which of n factors each head reads: consecutive heads share."""
    return tuple(h // (n_head // n) for h in range(n_head))


class _Reader:
    """Tensors of one layer, each read once and checked."""

    def __init__(self, checkpoint: Checkpoint, layer: AttentionLayer, device: torch.device | None = None) -> None:
        self.checkpoint, self.layer, self.device = checkpoint, layer, device or torch.device("cpu")
        self.tensors: dict[str, Tensor] = {}
        self._largest: dict[str, float] = {}

    def whole(self, name: str, scale: Scale | None = None) -> Tensor:
        if name not in self.tensors:
            tensor = self.checkpoint.read(name).to(self.device)
            if scale is not None:
                tensor = tensor.float() * _spread(self.checkpoint.read(scale.tensor).to(self.device).float(), scale.block, tensor.shape)
            elif not tensor.is_floating_point():
                info = self.checkpoint.tensors[name]
                raise HeadrankError(f"{info.file}: {name} holds {info.dtype}, quantised numbers whose scales are not applied; take a checkpoint without them")
            self.tensors[name] = tensor
        return self.tensors[name]

    def heads(self, weight: Slice) -> Tensor:
        """[n, size, in] in the stored type."""
        tensor = self.whole(weight.tensor, weight.scale)
        if weight.transposed:
            tensor = tensor.transpose(-1, -2)
        return self.finite(_take(tensor.flatten(0, -2), weight), weight.tensor)

    def vector(self, name: str, weight: Slice) -> Tensor:
        """A bias cut as its matrix is, [n, size]."""
        return self.finite(_take(self.whole(name), weight), name)

    def flat(self, names: tuple[str, ...]) -> Tensor:
        """Gains or biases that stand in one tensor, or in a tensor a head, one after the other."""
        return torch.cat([self.finite(self.whole(name).flatten(), name) for name in names])

    def largest(self, name: str) -> float:
        """The largest absolute value in a tensor that was read; infinity where it holds NaN; 0 where it is empty."""
        if name not in self._largest:
            tensor = self.tensors[name]
            low, high = torch.aminmax(tensor.float() if tensor.dtype.itemsize == 1 else tensor) if tensor.numel() else (0.0, 0.0)
            largest = max(-float(low), float(high))
            self._largest[name] = largest if largest == largest else float("inf")
        return self._largest[name]

    def finite(self, tensor: Tensor, name: str) -> Tensor:
        if not tensor.numel() or self.largest(name) < float("inf") or bool(torch.isfinite(tensor.float()).all()):
            return tensor
        bad = ~torch.isfinite(tensor.float()).flatten(1).all(1) if tensor.dim() > 1 else None
        head = "" if bad is None or len(bad) == 1 else f" of {'head' if len(bad) == self.layer.n_head else 'key-value head'} {int(bad.int().argmax())}"
        group = f"{self.layer.group} " if self.layer.group else ""
        raise NotFiniteError(f"{group}layer {self.layer.index}: {name}{head} holds NaN or infinity ({self.checkpoint.tensors[name].file.name})")


def _spread(scale: Tensor, block: tuple[int, int], shape: Sequence[int]) -> Tensor:
    """One factor a number, from one a block."""
    rows, columns = (-(-size // step) for size, step in zip(shape, block, strict=True))
    scale = scale.reshape(rows, columns)
    return scale.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]


def _take(tensor: Tensor, weight: Slice) -> Tensor:
    """Rows of each head: [rows, …] -> [n, size, …]; a view where they lie one after the other."""
    first, n, size = weight.starts[0], len(weight.starts), weight.size
    if weight.starts == tuple(range(first, first + n * size, size)) or not size:
        return tensor[first : first + n * size].unflatten(0, (n, size))
    rows = torch.tensor(weight.starts).unsqueeze(1) + torch.arange(size)
    return tensor[rows]


def _factor(
    reader: _Reader, projection: Projection, *, raw: bool, with_bias: bool, only: tuple[str, ...] | None = None, as_stored: bool = False
) -> tuple[Tensor, int]:
    """[n, in (+ 1), size], and the power of two that was taken out of it because float32 cannot hold it."""
    wide = _size_of(reader, projection, raw)
    dtype = torch.float64 if wide else torch.float32
    if as_stored and (step := _only_step(projection, raw=raw, with_bias=with_bias)) and (stored := reader.whole(step.weight.tensor).dtype).itemsize == 2:
        dtype = stored
    matrix, row = _evaluate(reader, projection, dtype, raw=raw, only=only)
    if row is not None and with_bias:
        matrix = torch.cat((matrix, row.unsqueeze(1)), 1)
    exponent = 0
    if wide == "range":
        size = float(matrix.abs().max()) if matrix.numel() else 1.0
        exponent = 0 if not size or 1 / SAFE < size < SAFE else math.frexp(size)[1]
        matrix = torch.ldexp(matrix, torch.tensor(-exponent)).float()
    return matrix, exponent


def _size_of(reader: _Reader, projection: Projection, raw: bool) -> str | None:
    """Why float64 is needed: the file stores it ("stored"), or the product of the sizes may leave float32's range ("range")."""
    steps = [step for chains in projection.parts.values() for chain in chains for step in chain]
    tensors = {step.weight.tensor: reader.whole(step.weight.tensor, step.weight.scale) for step in steps}
    if not raw:
        norms = [norm for norm in (projection.head_norm, *(step.norm for step in steps)) if norm is not None]
        tensors |= {name: reader.whole(name) for norm in norms for name in norm.gain}
    if any(tensor.dtype == torch.float64 for tensor in tensors.values()):
        return "stored"
    size = math.prod(reader.largest(name) or 1.0 for name in tensors)
    return None if 1 / SAFE < size < SAFE else "range"


def _only_step(projection: Projection, *, raw: bool, with_bias: bool) -> Step | None:
    """The one step that makes a projection what it is, without a gain, a scale or a bias; None where there is more to it."""
    steps = [step for chains in projection.parts.values() for chain in chains for step in chain]
    if len(steps) != 1 or steps[0].weight.scale is not None:
        return None
    is_plain = raw or (steps[0].norm is None and projection.head_norm is None and not (with_bias and steps[0].bias))
    return steps[0] if is_plain else None


def _evaluate(reader: _Reader, projection: Projection, dtype: torch.dtype, *, raw: bool, only: tuple[str, ...] | None) -> tuple[Tensor, Tensor | None]:
    """Matrix [n, in, size] and bias row [n, size] or None."""
    matrices, rows = [], []
    has_bias = False
    for part in only or projection.parts:
        matrix, row = _sum([_chain(reader, chain, dtype, raw=raw) for chain in projection.parts[part]])
        has_bias = has_bias or row is not None
        matrices.append(matrix.transpose(-1, -2).expand(projection.n, -1, -1))
        rows.append((matrix.new_zeros(matrix.shape[:2]) if row is None else row).expand(projection.n, -1))
    matrix = matrices[0] if len(matrices) == 1 else torch.cat(matrices, 2)
    row = torch.cat(rows, 1) if has_bias else None
    if projection.head_norm is None or raw:
        return matrix, row
    return _fold_head_norm(reader, matrix, row, projection, only)


def _sum(terms: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    matrix, row = terms[0]
    for other, other_row in terms[1:]:
        matrix = matrix + other
        row = other_row if row is None else row if other_row is None else row + other_row
    return matrix, row


def _chain(reader: _Reader, chain: Chain, dtype: torch.dtype, *, raw: bool) -> tuple[Tensor, Tensor | None]:
    """Product of a chain's matrices, [n or 1, size, in], and what it makes of its biases, [n or 1, size]."""
    matrix = row = None
    for step in chain:
        weight = reader.heads(step.weight).to(dtype)  # [n, size, in]
        bias = None
        if not raw:
            weight, bias = _fold_norm(reader, weight, step.norm)
            if step.bias is not None:
                own = reader.vector(step.bias, step.weight).to(dtype)
                bias = own if bias is None else bias + own
        if matrix is None:
            matrix, row = weight, bias
            continue
        matrix = weight @ matrix
        through = None if row is None else (weight @ row.unsqueeze(-1)).squeeze(-1)
        row = through if bias is None else bias if through is None else through + bias
    assert matrix is not None
    return matrix, row


def _fold_norm(reader: _Reader, weight: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor | None]:
    """W diag(g) C and W b of y = W (g * C x / size + b): C takes the mean away where the norm is a LayerNorm."""
    if norm is None:
        return weight, None
    bias = None if not norm.bias else weight @ reader.flat(norm.bias).to(weight.dtype)
    if norm.gain:
        gain = reader.flat(norm.gain).to(weight.dtype)
        weight = weight * (gain + 1 if norm.plus_one else gain)
    if norm.centred:
        weight = weight - weight.mean(-1, keepdim=True)
    return weight, bias


def _fold_head_norm(reader: _Reader, matrix: Tensor, row: Tensor | None, projection: Projection, only: tuple[str, ...] | None) -> tuple[Tensor, Tensor | None]:
    """Columns of [n, in, size] through QK norm; its bias joins the row."""
    norm = projection.head_norm
    assert norm is not None
    if norm.centred:
        matrix = matrix - matrix.mean(-1, keepdim=True)
        row = None if row is None else row - row.mean(-1, keepdim=True)
    if norm.gain:
        gain = _per_head(reader, norm.gain, projection, only).to(matrix.dtype) + (1 if norm.plus_one else 0)
        matrix = matrix * gain.unsqueeze(1)
        row = None if row is None else row * gain
    if norm.bias:
        bias = _per_head(reader, norm.bias, projection, only).to(matrix.dtype).expand(projection.n, -1)
        row = bias if row is None else row + bias
    return matrix, row


def _per_head(reader: _Reader, names: tuple[str, ...], projection: Projection, only: tuple[str, ...] | None) -> Tensor:
    """A gain or bias as [n or 1, size]; of the chosen parts alone."""
    values = reader.flat(names).view(-1, projection.size)
    if only is None:
        return values
    pieces = dict(zip(projection.sizes, values.split(list(projection.sizes.values()), 1), strict=True))
    return torch.cat([pieces[part] for part in only], 1)
