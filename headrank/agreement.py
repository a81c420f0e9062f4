"""Weights against activations: do the two order the pairs of a layer's heads alike, from the most alike to the least?

arXiv 2601.11471 takes similarity from the weights alone and names the comparison with what heads compute as missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrank.diversity import Array, dead_heads, similarity
from headrank.intervals import interval, resampled_grams
from headrank.store import LayerFacts, Measurement, ModelFacts

DIGITS = 7  # of a similarity; what lies below is rounding of float32, and must not break ties
FEWEST_PAIRS = 3  # two pairs are always in the same order or in opposite ones


@dataclass(frozen=True, kw_only=True)
class LayerAgreement:
    """One layer's rank correlation. Where it has none, `reason` says why."""

    facts: LayerFacts
    correlation: float | None
    """Spearman's, over the pairs of heads."""
    n_pairs: int
    """Pairs of heads that count: those without a dead head."""
    interval: tuple[float, float] | None = None
    """95 %, over sequences: the weights are fixed, what is fed varies."""
    resampled: Array | None = None
    """[B]: the correlation in bootstrap samples of the sequences, the same samples for all layers of a model."""
    reason: str | None = None
    is_fault: bool = False
    """The layer was spoilt, by NaN for one; a correlation that is undefined by its definition is no fault."""


@dataclass(frozen=True, kw_only=True)
class ModelAgreement:
    """One model's layers."""

    label: str
    scale: str | None
    model: ModelFacts
    layers: tuple[LayerAgreement, ...]
    tokens: dict[str, Any] | None
    n_groups: int
    """Groups of sequences that the intervals rest on."""

    @property
    def mean(self) -> float | None:
        """Mean correlation over the layers that have one."""
        values = [layer.correlation for layer in self.layers if layer.correlation is not None]
        return float(np.mean(values)) if values else None

    @property
    def mean_interval(self) -> tuple[float, float] | None:
        """95 % interval of that mean over sequences; None where a layer that is in the mean has none."""
        defined = [layer for layer in self.layers if layer.correlation is not None]
        samples = [layer.resampled for layer in defined if layer.resampled is not None]
        if not samples or len(samples) < len(defined):
            return None
        return _interval(float(np.mean([layer.correlation for layer in defined])), np.mean(samples, 0), self.n_groups)


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Everything that `agree` shows."""

    circuit: str
    settings: dict[str, Any]
    models: tuple[ModelAgreement, ...]

    @property
    def faults(self) -> list[str]:
        """Why layers were spoilt, a line each."""
        return [f"{model.label}: {layer.reason}" for model in self.models for layer in model.layers if layer.is_fault]


def spearman(x: Array, y: Array) -> Array:
    """Spearman's rank correlation along the last axis, [...]: Pearson's of ranks, ties sharing their mean rank. NaN where all are tied.

    >>> float(spearman(np.array([1.0, 2.0, 3.0]), np.array([10.0, 30.0, 20.0])))
    0.5
    """
    x, y = (ranks - ranks.mean(-1, keepdims=True) for ranks in (_ranks(x), _ranks(y)))
    size = np.sqrt((x * x).sum(-1) * (y * y).sum(-1))
    return np.divide((x * y).sum(-1), size, out=np.full_like(size, np.nan), where=size > 0)


def _ranks(values: Array) -> Array:
    """Ranks from 0 along the last axis; equal values share the mean of theirs."""
    order = np.argsort(values, axis=-1, kind="stable")
    ordered = np.take_along_axis(values, order, -1)
    position = np.broadcast_to(np.arange(values.shape[-1]), values.shape)
    rises = np.ones(values.shape, dtype=bool)
    rises[..., 1:] = ordered[..., 1:] > ordered[..., :-1]
    ends = np.ones(values.shape, dtype=bool)
    ends[..., :-1] = rises[..., 1:]
    first = np.maximum.accumulate(np.where(rises, position, 0), -1)
    last = np.minimum.accumulate(np.where(ends, position, values.shape[-1])[..., ::-1], -1)[..., ::-1]
    ranks = np.empty(values.shape)
    np.put_along_axis(ranks, order, (first + last) / 2, -1)
    return ranks


def layer_agreement(weights: Array, activations: Array, facts: LayerFacts) -> LayerAgreement:
    """The rank correlation of one layer. weights: [1, H, H]; activations: [S, H, H], a Gram matrix a group of sequences."""
    alive = ~(dead_heads(weights.sum(0)) | dead_heads(activations.sum(0)))
    rows, columns = np.triu_indices(facts.n_head, 1)
    counts = alive[rows] & alive[columns]
    rows, columns = rows[counts], columns[counts]
    n_pairs = len(rows)
    if n_pairs < FEWEST_PAIRS:
        return LayerAgreement(facts=facts, correlation=None, n_pairs=n_pairs, reason=f"fewer than {FEWEST_PAIRS} pairs of heads that are not dead")
    of_weights = similarity(weights.sum(0))[rows, columns].round(DIGITS)
    correlation = float(spearman(of_weights, similarity(activations.sum(0))[rows, columns].round(DIGITS)))
    if np.isnan(correlation):
        return LayerAgreement(facts=facts, correlation=None, n_pairs=n_pairs, reason="all pairs of heads are equally alike: they have no order")
    samples = resampled_grams(activations)
    if samples is None:
        return LayerAgreement(facts=facts, correlation=correlation, n_pairs=n_pairs)
    resampled = spearman(np.broadcast_to(of_weights, (len(samples), n_pairs)), similarity(samples)[:, rows, columns].round(DIGITS))
    ends = _interval(correlation, resampled, len(activations))
    return LayerAgreement(facts=facts, correlation=correlation, n_pairs=n_pairs, interval=ends, resampled=resampled)


def _interval(estimate: float, resampled: Array, n_groups: int) -> tuple[float, float] | None:
    low, high = interval(estimate, resampled, n_groups, low=-1.0, high=1.0)
    return None if np.isnan(low) or np.isnan(high) else (float(low), float(high))


def model_agreement(
    weights: Measurement, activations: Measurement, names: tuple[str, str], layers: Sequence[LayerFacts], *, label: str, scale: str | None
) -> ModelAgreement:
    """The agreement of one model's chosen layers. names: of the Gram matrices in the two measurements, see headrank.measures."""
    found = []
    for facts in layers:
        keys = [(measurement, f"{name}/{facts.key}") for measurement, name in zip((weights, activations), names, strict=True)]
        faults = [measurement.faults.get(key, "") for measurement, key in keys if key not in measurement.grams]
        if faults:
            found.append(LayerAgreement(facts=facts, correlation=None, n_pairs=0, reason="; ".join(faults), is_fault=True))
        else:
            (one, key), (other, other_key) = keys
            found.append(layer_agreement(one.grams[key], other.grams[other_key], facts))
    return ModelAgreement(
        label=label,
        scale=scale,
        model=weights.model,
        layers=tuple(found),
        tokens=activations.tokens,
        n_groups=max((len(grams) for grams in activations.grams.values()), default=1),
    )
