"""Measurement -> the numbers that tables, figures and documents show."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrank.diversity import (
    Array,
    attainable_rank,
    centered,
    dead_heads,
    effective_rank,
    mean_off_diagonal,
    most_similar_pair,
    n_components,
    similarity,
    spectrum,
    variance_explained,
)
from headrank.intervals import Z, interval, resampled_grams
from headrank.store import LayerFacts, Measurement, ModelFacts

EQUAL = 1e-6  # heads whose similarities differ from 1 by less are equal: float32 sums over tokens leave up to 1e-7 of identical ones


@dataclass(frozen=True, kw_only=True)
class LayerResult:
    """One layer's numbers. Where a layer has no numbers, `reason` says why and they are None."""

    facts: LayerFacts
    similarity: Array | None
    """S, [H, H]; uncentred, whatever the spectrum is of."""
    eigenvalues: Array | None
    """[H], descending, of S or of centred S."""
    effective_rank: float | None
    attainable: int
    """The largest effective rank possible: H, or H - 1 centred."""
    dead_heads: tuple[int, ...] = ()
    mean_off_diagonal: float | None = None
    most_similar: tuple[float, tuple[int, int]] | None = None
    """The largest off-diagonal similarity and its pair of heads."""
    reason: str | None = None
    intervals: Mapping[str, Array] = field(default_factory=dict)
    """Name of a quantity -> its 95 % interval over sequences, [..., 2]; empty from weights, and where there are too few sequences."""
    resampled: Mapping[str, Array] = field(default_factory=dict)
    """Name of a quantity -> [B]: its values in bootstrap samples, the same samples for all layers of a model."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the effective rank over sequences, where there is one."""
        return _ends(self.intervals["effective_rank"]) if "effective_rank" in self.intervals else None

    @property
    def percent_of_heads(self) -> float | None:
        """The effective rank as a percentage of H, as arXiv 2601.11471 gives it."""
        return None if self.effective_rank is None else 100 * self.effective_rank / self.facts.n_head

    @property
    def percent_of_attainable(self) -> float | None:
        """The effective rank as a percentage of the largest one possible."""
        return None if self.effective_rank is None else 100 * self.effective_rank / self.attainable

    @property
    def cumulative_variance(self) -> Array | None:
        """[H]: the share of the variance that the first 1, 2, ... eigenvalues explain; None where they are all 0."""
        return None if self.eigenvalues is None or self.effective_rank is None else np.cumsum(variance_explained(self.eigenvalues))

    @property
    def n_components(self) -> int | None:
        """Eigenvalues that together explain 90 % of the variance."""
        return None if self.eigenvalues is None else int(n_components(self.eigenvalues)) or None


@dataclass(frozen=True, kw_only=True)
class Null:
    """The effective rank of heads that know nothing of each other: random factors of the same shapes and sharing."""

    mean: float
    low: float
    """Lower end of the range that holds 95 % of draws."""
    high: float
    """Its upper end."""
    n_samples: int


@dataclass(frozen=True, kw_only=True)
class ModelResult:
    """One model's numbers."""

    label: str
    scale: str | None
    """The family's scale, or None for a model given by path."""
    model: ModelFacts
    layers: tuple[LayerResult, ...]
    tokens: dict[str, Any] | None
    n_groups: int = 1
    """Groups of sequences that the intervals rest on."""
    null: Null | None = None
    """What the effective rank of random heads of the same geometry is."""

    def mean_interval(self, quantity: str) -> tuple[float, float] | None:
        """95 % interval of mean(quantity); None where a layer that is in the mean has none."""
        defined = [layer for layer in self.layers if getattr(layer, quantity) is not None]
        samples = [layer.resampled[quantity] for layer in defined if quantity in layer.resampled]
        if not samples or len(samples) < len(defined):
            return None
        estimate = np.mean([getattr(layer, quantity) for layer in defined])
        lowest, highest = (1.0, float(np.mean([layer.attainable for layer in defined]))) if quantity == "effective_rank" else (-1.0, 1.0)
        return _ends(interval(estimate, np.mean(samples, 0), self.n_groups, low=lowest, high=highest))

    def mean(self, quantity: str) -> float | None:
        """Mean of a LayerResult's quantity over the layers where it is defined; None where it is nowhere."""
        values = [getattr(layer, quantity) for layer in self.layers]
        defined = [value for value in values if value is not None]
        return float(np.mean(defined)) if defined else None

    def depth(self, layer: LayerResult) -> float:
        """A layer's place from 0, the first, to 1, the last."""
        return layer.facts.index / max(1, self.model.n_layer - 1)


@dataclass(frozen=True, kw_only=True)
class Results:
    """Everything that one command shows."""

    command: str
    source: str
    circuit: str
    is_centered: bool
    settings: dict[str, Any]
    """Settings that all models share, such as raw and center."""
    models: tuple[ModelResult, ...]
    is_relative: bool = False
    """Depth is shown from 0 to 1 and effective rank as a fraction of the heads, so that unlike models stand side by side."""

    @property
    def faults(self) -> list[str]:
        """Why layers have no numbers: one line a layer that was spoilt. Undefined values that follow from the definition are no faults."""
        return [f"{m.label}: {layer.reason}" for m in self.models for layer in m.layers if layer.reason and layer.similarity is None]


def layer_result(grams: Array | None, facts: LayerFacts, *, is_centered: bool, fault: str | None = None) -> LayerResult:
    """The numbers of one layer. grams: [S, H, H], a matrix a group of sequences, or None with the fault that left it out."""
    attainable = attainable_rank(facts.n_head, is_centered=is_centered)
    if grams is None:
        return LayerResult(facts=facts, similarity=None, eigenvalues=None, effective_rank=None, attainable=attainable, reason=fault)
    gram = grams.sum(0)
    S = similarity(gram)
    eigenvalues = _eigenvalues(S, is_centered=is_centered)
    rank = float(effective_rank(eigenvalues))
    mean = float(mean_off_diagonal(S))
    intervals, resampled = _resample(grams, S, eigenvalues, is_centered=is_centered)
    return LayerResult(
        facts=facts,
        similarity=S,
        eigenvalues=eigenvalues,
        effective_rank=None if np.isnan(rank) else rank,
        attainable=attainable,
        dead_heads=tuple(int(head) for head in np.flatnonzero(dead_heads(gram))),
        mean_off_diagonal=None if np.isnan(mean) else mean,
        most_similar=most_similar_pair(S),
        reason=_undefined(S) if np.isnan(rank) else None,
        intervals=intervals,
        resampled=resampled,
    )


def _eigenvalues(S: Array, *, is_centered: bool) -> Array:
    """Of S, or of centred S, [..., H]; all 0 where no more than rounding tells the heads apart."""
    if not is_centered:
        return spectrum(S)
    eigenvalues = spectrum(centered(S))
    return np.where(eigenvalues[..., :1] > EQUAL * S.shape[-1] ** 0.5, eigenvalues, 0.0)


def _resample(grams: Array, S: Array, eigenvalues: Array, *, is_centered: bool) -> tuple[dict[str, Array], dict[str, Array]]:
    """Intervals of a layer's numbers over its groups of sequences, and the bootstrap's values of those that are averaged over layers."""
    samples = resampled_grams(grams)
    if samples is None:
        return {}, {}
    H = S.shape[-1]
    cosines = similarity(samples)
    spectra = _eigenvalues(cosines, is_centered=is_centered)
    numbers = {
        "effective_rank": (effective_rank(eigenvalues), effective_rank(spectra), 1.0, attainable_rank(H, is_centered=is_centered)),
        "mean_off_diagonal": (mean_off_diagonal(S), mean_off_diagonal(cosines), -1.0, 1.0),
        "eigenvalues": (eigenvalues, spectra, 0.0, H),
        "cumulative_variance": (np.cumsum(variance_explained(eigenvalues)), np.cumsum(variance_explained(spectra), -1), 0.0, 1.0),
    }
    if H > 1:
        rows, columns = np.triu_indices(H, 1)
        pairs = cosines[:, rows, columns].max(-1)
        numbers["largest_off_diagonal"] = (S[rows, columns].max(), pairs, -1.0, 1.0)
    intervals = {name: interval(estimate, values, len(grams), low=low, high=high) for name, (estimate, values, low, high) in numbers.items()}
    defined = {name: ends for name, ends in intervals.items() if not np.isnan(ends).any()}
    return defined, {name: numbers[name][1] for name in defined if numbers[name][1].ndim == 1}


def _ends(ends: Array) -> tuple[float, float]:
    return float(ends[0]), float(ends[1])


def _undefined(S: Array) -> str:
    if not S.any():
        return "every head is dead"
    return "one head: the centred matrix is zero" if len(S) == 1 else "all heads are equal: the centred matrix is zero"


def model_result(measurement: Measurement, circuit: str, layers: Sequence[LayerFacts], *, label: str, scale: str | None, is_centered: bool) -> ModelResult:
    """The numbers of one model's chosen layers."""
    chosen = tuple(
        layer_result(measurement.grams.get(f"{circuit}/{layer.key}"), layer, is_centered=is_centered, fault=measurement.faults.get(f"{circuit}/{layer.key}"))
        for layer in layers
    )
    return ModelResult(
        label=label,
        scale=scale,
        model=measurement.model,
        layers=chosen,
        tokens=measurement.tokens,
        n_groups=max((len(grams) for grams in measurement.grams.values()), default=1),
        null=_null(measurement.null.get(circuit, {}).get("centered" if is_centered else "uncentered", [])),
    )


def _null(ranks: Sequence[float]) -> Null | None:
    """Mean and 95 % range of the draws. Their distribution is narrow and smooth, so two moments give the range, from few draws too."""
    if not ranks:
        return None
    mean, sd = float(np.mean(ranks)), float(np.std(ranks, ddof=1))
    return Null(mean=mean, low=mean - Z * sd, high=mean + Z * sd, n_samples=len(ranks))
