"""Measurement -> the numbers that tables, figures and documents show."""

from collections.abc import Sequence
from dataclasses import dataclass
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
)
from headrank.store import LayerFacts, Measurement, ModelFacts


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

    @property
    def percent_of_heads(self) -> float | None:
        """The effective rank as a percentage of H, as arXiv 2601.11471 gives it."""
        return None if self.effective_rank is None else 100 * self.effective_rank / self.facts.n_head

    @property
    def percent_of_attainable(self) -> float | None:
        """The effective rank as a percentage of the largest one possible."""
        return None if self.effective_rank is None else 100 * self.effective_rank / self.attainable

    @property
    def n_components(self) -> int | None:
        """Eigenvalues that together explain 90 % of the variance."""
        return None if self.eigenvalues is None else int(n_components(self.eigenvalues)) or None


@dataclass(frozen=True, kw_only=True)
class ModelResult:
    """One model's numbers."""

    label: str
    scale: str | None
    """The family's scale, or None for a model given by path."""
    model: ModelFacts
    layers: tuple[LayerResult, ...]
    tokens: dict[str, Any] | None

    def mean(self, quantity: str) -> float | None:
        """Mean of a LayerResult's quantity over the layers where it is defined; None where it is nowhere."""
        values = [getattr(layer, quantity) for layer in self.layers]
        defined = [value for value in values if value is not None]
        return float(np.mean(defined)) if defined else None

    def layer(self, index: int) -> LayerResult:
        """The layer of that index, the first of its stacks that has it."""
        return next(layer for layer in self.layers if layer.facts.index == index)


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

    @property
    def faults(self) -> list[str]:
        """Why layers have no numbers: one line a layer that was spoilt. Undefined values that follow from the definition are no faults."""
        return [f"{m.label}: {layer.reason}" for m in self.models for layer in m.layers if layer.reason and layer.similarity is None]


def layer_result(gram: Array | None, facts: LayerFacts, *, is_centered: bool, fault: str | None = None) -> LayerResult:
    """The numbers of one layer. gram: [H, H], or None with the fault that left it out."""
    attainable = attainable_rank(facts.n_head, is_centered=is_centered)
    if gram is None:
        return LayerResult(facts=facts, similarity=None, eigenvalues=None, effective_rank=None, attainable=attainable, reason=fault)
    S = similarity(gram)
    eigenvalues = spectrum(centered(S) if is_centered else S)
    rank = float(effective_rank(eigenvalues))
    mean = float(mean_off_diagonal(S))
    return LayerResult(
        facts=facts,
        similarity=S,
        eigenvalues=eigenvalues,
        effective_rank=None if np.isnan(rank) else rank,
        attainable=attainable,
        dead_heads=tuple(int(head) for head in np.flatnonzero(dead_heads(gram))),
        mean_off_diagonal=None if np.isnan(mean) else mean,
        most_similar=most_similar_pair(S),
        reason=_undefined(facts, is_centered=is_centered) if np.isnan(rank) else None,
    )


def _undefined(facts: LayerFacts, *, is_centered: bool) -> str:
    if facts.n_head == 1 and is_centered:
        return "one head: the centred matrix is zero"
    return "all heads are equal: the centred matrix is zero" if is_centered else "every head is dead"


def model_result(measurement: Measurement, circuit: str, layers: Sequence[LayerFacts], *, label: str, scale: str | None, is_centered: bool) -> ModelResult:
    """The numbers of one model's chosen layers."""
    chosen = tuple(
        layer_result(measurement.gram(circuit, layer), layer, is_centered=is_centered, fault=measurement.faults.get(f"{circuit}/{layer.key}"))
        for layer in layers
    )
    return ModelResult(label=label, scale=scale, model=measurement.model, layers=chosen, tokens=measurement.tokens)
