"""What headrank's own tests run on small models, run on one checkpoint of the user's: do the numbers come out of its files as they should?

Weights: the factored Gram matrix against heads that are multiplied out, and what must change nothing, or something, on the real factors.
Activations, on a few tokens: the attention that is recorded against the model's own eager one, streamed sums against sums written out,
and the heads of the weights against those that the model runs. Layers and heads are a sample: nothing here is larger than a few heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from headrank.architectures import Architecture, AttentionLayer, Projection
from headrank.checkpoints import Checkpoint
from headrank.diversity import attainable_rank, centered, dead_heads, effective_rank, similarity, spectrum
from headrank.eager import HeadsSeen, eager_pass, listen
from headrank.factors import HeadFactors, head_factors
from headrank.forward import Recorder, Runner
from headrank.gram import factored_gram
from headrank.store import LayerFacts

EDGE_HEADS = 4  # at either end of a layer: they share keys where any do
BLOCK_BYTES = 64 << 20  # of multiplied-out heads that are held at a time
MOST_PRODUCTS = 1 << 35  # multiplications that it may take to multiply out heads of one layer
# Float32 keeps seven digits; sums over thousands of products, and heads that nearly cancel, cost some of them.
WEIGHTS_TOLERANCE = 1e-4
ACTIVATIONS_TOLERANCE = 1e-3  # after all layers before, in float32
CHANGE = 1e-5  # what no rounding makes


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at in one layer."""

    what: str
    """What must hold, in words."""
    layer: str
    """Where."""
    deviation: float
    """How far from it the layer is, relative to the sizes of its heads."""
    tolerance: float
    """What rounding may do."""
    is_change: bool = False
    """The deviation must be larger than the tolerance, not smaller."""

    @property
    def holds(self) -> bool:
        """Whether it does; not where the deviation is not a number."""
        return self.deviation > self.tolerance if self.is_change else self.deviation <= self.tolerance


def apart(found: Tensor, expected: Tensor) -> float:
    """Largest difference of two Gram matrices [H, H], each entry relative to the sizes of its two heads."""
    size = expected.diagonal().clamp(min=0).sqrt()
    largest = size.max() if bool(size.max() > 0) else torch.ones_like(size.max())
    size = torch.where(size > 0, size, largest)
    return float(((found - expected).abs() / torch.outer(size, size)).max())


# Weights


def weights_checks(checkpoint: Checkpoint, architecture: Architecture, layer: AttentionLayer, circuit: str, *, seed: int) -> Iterator[Check]:
    """Checks of one layer's factors. Raises NotFiniteError where they hold NaN or infinity."""
    factors = head_factors(checkpoint, architecture, layer, circuit)
    gram = factored_gram(factors.left, factors.right, factors.left_of_head, factors.right_of_head)
    place = facts_of_layer(layer).key

    def check(what: str, deviation: float, tolerance: float = WEIGHTS_TOLERANCE, *, is_change: bool = False) -> Check:
        return Check(what=f"weights, {circuit}: {what}", layer=place, deviation=deviation, tolerance=tolerance, is_change=is_change)

    yield check("similarities are cosines", departure_from_cosines(gram))
    heads = some_heads(factors)
    left, right = (factor[[of_head[h] for h in heads]] for factor, of_head in ((factors.left, factors.left_of_head), (factors.right, factors.right_of_head)))
    own = gram[heads][:, heads]
    yield check("the factored Gram is that of heads multiplied out", apart(own, multiplied_out(left, right)))
    generator = torch.Generator().manual_seed(seed)

    def gram_of(left: Tensor, right: Tensor) -> Tensor:
        return factored_gram(left, right, range(len(heads)), range(len(heads)))

    yield check("a change of basis within heads changes nothing", apart(gram_of(*change_of_basis(left, right, generator)), own))
    sizes = torch.exp2(20 * torch.rand(len(heads), generator=generator, dtype=torch.float64) - 10).to(left.dtype)
    scaled = gram_of(left * sizes.view(-1, 1, 1), right) / torch.outer(sizes.double(), sizes.double())
    yield check("scaling heads changes no similarity", apart(scaled, own))
    order = torch.randperm(len(heads), generator=generator)
    yield check("permuting heads permutes the Gram", apart(gram_of(left[order], right[order]), own[order][:, order]))
    yield check("swapping the factors' roles changes nothing", apart(gram_of(right, left), own))
    yield check("rotating the residual stream changes nothing", apart(gram_of(reflected(left, generator), reflected(right, generator)), own))
    head = most_alike(own)
    if head is not None and left.shape[1] > 1:
        moved = left.clone()
        moved[head] = moved[head].roll(1, 0)
        yield check("permuting rows of one left factor changes the Gram", apart(gram_of(moved, right), own), CHANGE, is_change=True)


def some_heads(factors: HeadFactors) -> list[int]:
    """Heads at both ends of a layer, fewer where they are large."""
    H, (n, k), m = len(factors.left_of_head), factors.left.shape[1:], factors.right.shape[1]
    edge = max(1, min(EDGE_HEADS, MOST_PRODUCTS // (2 * n * m * k)))
    return sorted({*range(min(edge, H)), *range(max(0, H - edge), H)})


def multiplied_out(left: Tensor, right: Tensor) -> Tensor:
    """Gram matrix of the heads' own matrices in float64, a block of rows at a time. left: [H, n, k], right: [H, m, k]. Returns [H, H]."""
    H, n, _ = left.shape
    rows = max(1, BLOCK_BYTES // (8 * H * right.shape[1]))
    gram = torch.zeros(H, H, dtype=torch.float64)
    columns = right.double().transpose(1, 2)
    for start in range(0, n, rows):
        block = (left[:, start : start + rows].double() @ columns).flatten(1)
        gram += block @ block.T
    return gram


def change_of_basis(left: Tensor, right: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """L B and R B^-T for an invertible B of each head, which stretches no direction by more than e."""
    H, _, k = left.shape
    q, _ = torch.linalg.qr(torch.randn(H, k, k, generator=generator, dtype=torch.float64))
    p, _ = torch.linalg.qr(torch.randn(H, k, k, generator=generator, dtype=torch.float64))
    stretch = torch.exp(2 * torch.rand(H, 1, k, generator=generator, dtype=torch.float64) - 1)
    return (left.double() @ (q * stretch @ p)).to(left.dtype), (right.double() @ (q / stretch @ p)).to(right.dtype)


def reflected(factor: Tensor, generator: torch.Generator) -> Tensor:
    """(I - 2 v v^T) F for a random unit vector v: orthogonal, and no d x d matrix is needed for it."""
    v = torch.randn(factor.shape[1], generator=generator, dtype=torch.float64)
    v = (v / v.norm()).to(factor.dtype)
    return factor - 2 * v.view(1, -1, 1) * torch.einsum("n,hnk->hk", v, factor).unsqueeze(1)


def most_alike(gram: Tensor) -> int | None:
    """One head of the most similar pair of different heads; None where fewer than two are alive."""
    S = torch.from_numpy(similarity(gram.numpy())).fill_diagonal_(0).abs()
    return int(S.max(1).values.argmax()) if bool(S.max() > 0) else None


def departure_from_cosines(gram: Tensor) -> float:
    """How far a Gram matrix [H, H], and what is made of it, are from what inner products allow: symmetric, no cosine beyond 1, no
    negative eigenvalue, effective ranks between 1 and the attainable."""
    G = gram.numpy()
    if not np.isfinite(G).all():
        return float("nan")
    dead, H = dead_heads(G), len(G)
    size = np.sqrt(np.where(dead, 1.0, G.diagonal()))
    cosines, S = G / np.outer(size, size), similarity(G)
    faults = [np.abs(cosines - cosines.T).max(), np.abs(cosines).max() - 1, -np.linalg.eigvalsh(cosines).min(), np.abs(S.diagonal() - ~dead).max()]
    faults.append(abs(spectrum(S).sum() - (~dead).sum()) / H)
    for is_centered, matrix in ((False, S), (True, centered(S))):
        rank = effective_rank(spectrum(matrix))
        if not np.isnan(rank):  # undefined where all heads are dead, or equal and centred
            faults += [1 - rank, rank - attainable_rank(H, is_centered=is_centered)]
    return float(max(0.0, *faults))


# Activations


def activations_checks(runner: Runner, sequences: Sequence[Tensor], layers: Sequence[LayerFacts]) -> Iterator[Check]:
    """Checks of what a model computes on sequences of token ids, [T] each, of different lengths."""
    ids = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
    lengths = torch.tensor([len(sequence) for sequence in sequences], device=ids.device)
    keep = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    seen = eager_pass(runner, ids, keep, layers)
    together = streamed(runner, [(ids, keep)], layers)
    alone = streamed(runner, [(sequence[None], None) for sequence in sequences], layers)
    for layer in layers:
        heads = seen[layer.key]
        for circuit, expected in (("qk", heads.score_gram(keep)), ("ov", heads.output_gram(keep))):

            def check(what: str, deviation: float, circuit: str = circuit, key: str = layer.key) -> Check:
                return Check(what=f"activations, {circuit}: {what}", layer=key, deviation=deviation, tolerance=ACTIVATIONS_TOLERANCE)

            name = f"{circuit}/{layer.key}"
            if circuit == "qk" and (deviation := attention_apart(heads, keep)) is not None:
                yield check("attention is the softmax of the recorded scores", deviation)
            if circuit == "ov" and heads.block is not None:
                total = heads.written().sum(2)
                yield check("heads' outputs add up to the block's output", _relative(total[keep], heads.block[keep]))
            yield check("streamed sums are those written out", apart(together[name], expected.cpu()))
            yield check("neither batches nor padding matter", apart(alone[name], together[name]))
            yield check("similarities are cosines", departure_from_cosines(together[name]))


def streamed(runner: Runner, batches: Sequence[tuple[Tensor, Tensor | None]], layers: Sequence[LayerFacts]) -> dict[str, Tensor]:
    """'qk/3' -> Gram matrix [H, H] on the CPU, by the accumulators that measurements are made with."""
    recorder = Recorder(layers, ("qk", "ov"), n_groups=1)
    for ids, valid in batches:
        recorder.begin_batch(torch.zeros(len(ids), dtype=torch.long, device=ids.device), valid)
        runner.run(ids, valid, recorder, last_layer=max(layer.index for layer in layers))
    return {name: torch.from_numpy(gram.sum(0)) for name, gram in recorder.grams(center=True).items()}


def attention_apart(heads: HeadsSeen, keep: Tensor) -> float | None:
    """How far the softmax of the recorded scores is from the model's own attention: its probabilities, or else what it makes of the
    values. None where the model shows neither."""
    if heads.scores is None:
        return None
    softmax = heads.softmax()
    if heads.shares is not None:
        shares = heads.shares.double()
        shares = shares / shares.sum(-1, keepdim=True)  # sinks take part of them
        return float((softmax - shares).abs().amax((1, 3))[keep].max())
    if heads.v is None or heads.z is None or heads.v.shape[-1] != heads.z.shape[-1]:
        return None
    values = heads.v.double().repeat_interleave(softmax.shape[1] // heads.v.shape[1], 1)
    return _relative((softmax @ values).transpose(1, 2)[keep], heads.z[keep])


def heads_checks(runner: Runner, checkpoint: Checkpoint, architecture: Architecture, layer: AttentionLayer, ids: Tensor) -> Iterator[Check]:
    """Whether the heads that were cut from the weights are those that the model runs. ids: [N], different tokens, each fed alone.

    At the first position rotary embedding is the identity, so a head's queries, keys and values are its input times its matrix, but for
    the order of dimensions and either a bias, the same for all tokens, or a norm without gain: inner products of tokens' differences tell,
    or those of their directions. Projections with another norm in them are left out.
    """
    facts = facts_of_layer(layer)
    heads = listen(runner, ids[:, None], None, [facts])[facts.key]
    if heads.hidden is None:
        return
    hidden = heads.hidden[:, 0].double().cpu()
    for circuit, names in (("qk", ("q", "k")), ("ov", ("v",))):
        factors = head_factors(checkpoint, architecture, layer, circuit, raw=True)
        sides = ((factors.left, factors.left_of_head), (factors.right, factors.right_of_head))
        for name, (factor, of_head) in zip(names, sides, strict=False):
            ran: Tensor | None = getattr(heads, name)
            if ran is None or not is_linear(getattr(layer, name)) or (layer.group == "cross" and name != "q"):
                continue
            cut = torch.einsum("nd,hdk->hnk", hidden, factor.double())[list(of_head)]  # [H, N, D]
            ran = ran[..., 0, :].double().cpu().transpose(0, 1)
            ran = ran.repeat_interleave(layer.n_head // len(ran), 0)
            differences = products_apart(ran - ran.mean(1, keepdim=True), cut - cut.mean(1, keepdim=True))
            directions = products_apart(normalize(ran, dim=-1), normalize(cut, dim=-1))
            words = {"q": "queries", "k": "keys", "v": "values"}[name]
            what = f"weights and activations: {words} of heads are those that the model runs"
            yield Check(what=what, layer=facts.key, deviation=min(differences, directions), tolerance=ACTIVATIONS_TOLERANCE)


def products_apart(found: Tensor, expected: Tensor) -> float:
    """How far inner products of N vectors are from others' but for one scale. [H, N, D] both, each head for itself."""
    products = [x @ x.transpose(1, 2) for x in (found, expected)]
    sizes = [x.diagonal(dim1=1, dim2=2).sum() for x in products]
    return _relative(products[0] / sizes[0], products[1] / sizes[1]) if all(sizes) else 0.0  # where all vectors are alike there is nothing to see


def facts_of_layer(layer: AttentionLayer) -> LayerFacts:
    """The layer as measurements know it."""
    return LayerFacts(index=layer.index, n_head=layer.n_head, n_kv_head=layer.n_kv_head, group=layer.group, window=layer.window)


def is_linear(projection: Projection) -> bool:
    """Whether a projection is a product of matrices, with no norm between or behind them."""
    steps = [step for chains in projection.parts.values() for chain in chains for step in chain[1:]]
    return projection.head_norm is None and all(step.norm is None for step in steps)


def _relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest number expected."""
    largest = float(expected.abs().max())
    return float((found.double() - expected.double()).abs().max()) / (largest or 1.0)
