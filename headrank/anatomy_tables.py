"""Anatomy -> document, rows of a CSV file, and cells of the table on the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrank.diversity import Array
from headrank.store import LayerFacts
from headrank.tables import SCHEMA, Row, program_version

PROJECTIONS = ("keys", "values")
NOT_UNIQUE = "The split into shared and residual is not unique: only their sum enters the model."
DEFINITIONS = {
    "norm": "Frobenius norm of a head's whole projection",
    "shared_norm": "Frobenius norm of the matrix that all heads share",
    "residual_norm": "Frobenius norm of a head's own low-rank part",
    "cosine": "Frobenius inner product of shared and residual over their norms",
    "overlap": "mean squared cosine of the principal angles between what residual and shared read; d_head / d_model for random subspaces",
    "overlap_between": "likewise between the residuals of two heads, mean over pairs; r / d_model for random subspaces",
    "learned_error": "what the learned residual misses of the head's departure from the heads' mean, relative to that departure",
    "best_error": "the least that any matrix of rank r misses of it (truncated SVD)",
    "best_error_N": "the same at rank N of heads that have no parts",
    "distance": "between the learned residual and that best approximation, relative to the latter",
}


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """What `lrkv` shows of one projection of one layer, as plain numbers: a list is a number a head, None where undefined."""

    numbers: dict[str, Any]
    reason: str | None = None
    """Why numbers are undefined, or there are none."""
    is_fault: bool = False
    """The layer was spoilt, by NaN for one."""


@dataclass(frozen=True, kw_only=True)
class ModelAnatomy:
    """One model: keys and values of its layers."""

    label: str
    scale: str | None
    facts: dict[str, Any]
    """Checkpoint, fingerprint and geometry."""
    ranks: tuple[int, ...]
    """LRKV's r; of heads without parts the ranks that were tried."""
    layers: tuple[tuple[LayerFacts, dict[str, Anatomy]], ...]

    @property
    def is_split(self) -> bool:
        """Whether the heads have a shared and a low-rank part."""
        return self.facts["kind"] == "lrkv"

    def curve(self, projection: str, quantity: str) -> Array:
        """[n_layer]: a quantity's mean over heads, of norms the root mean square; NaN where it is undefined."""
        return np.array([over_heads(layers[projection].numbers.get(quantity), quantity) for _, layers in self.layers])


def over_heads(value: Any, quantity: str) -> float:
    """One number for all heads: the mean over those where it is defined, of norms the root mean square."""
    if value is None:
        return np.nan
    defined = np.array([number for number in np.atleast_1d(np.array(value, dtype=float)) if not np.isnan(number)])
    if not len(defined):
        return np.nan
    return float(np.sqrt(np.mean(defined**2)) if quantity.endswith("norm") else defined.mean())


def faults(models: Sequence[ModelAnatomy]) -> list[str]:
    """Why layers were spoilt, a line each."""
    return [f"{model.label}: {anatomy.reason}" for model in models for _, layers in model.layers for anatomy in layers.values() if anatomy.is_fault]


def anatomy_document(models: Sequence[ModelAnatomy]) -> dict[str, Any]:
    """Everything that was computed, ready for JSON: an undefined value is None with a reason beside it."""
    return {
        "schema": SCHEMA,
        "command": "lrkv",
        "version": program_version(),
        "note": NOT_UNIQUE,
        "definitions": DEFINITIONS,
        "models": [_model(model) for model in models],
    }


def _model(model: ModelAnatomy) -> dict[str, Any]:
    layers = [_layer(facts, anatomies) for facts, anatomies in model.layers]
    return {"label": model.label, "scale": model.scale, **model.facts, "ranks": list(model.ranks), "layers": layers}


def _layer(facts: LayerFacts, anatomies: dict[str, Anatomy]) -> dict[str, Any]:
    entry: dict[str, Any] = {"layer": facts.index}
    for projection, anatomy in anatomies.items():
        entry[projection] = anatomy.numbers | ({"reason": anatomy.reason} if anatomy.reason else {})
    return entry


def anatomy_rows(models: Sequence[ModelAnatomy]) -> list[Row]:
    """Names of columns, then a row a layer, projection and head; an undefined value, or one that a model does not have, is None."""
    per_head = ("norm", "residual_norm", "cosine", "overlap", "smallest_angle", "largest_angle", "learned_error", "best_error", "distance")
    rows: list[Row] = [("label", "scale", "layer", "projection", "head", "shared_norm", *per_head, "reason")]
    for model in models:
        for facts, anatomies in model.layers:
            for projection, anatomy in anatomies.items():
                for head in range(facts.n_head):
                    cells = [_of_head(anatomy.numbers.get(name), head) for name in ("shared_norm", *per_head)]
                    rows.append((model.label, model.scale, facts.index, projection, head, *cells, anatomy.reason))
    return rows


def _of_head(value: Any, head: int) -> float | None:
    return value[min(head, len(value) - 1)] if isinstance(value, list) else value


def anatomy_cells(models: Sequence[ModelAnatomy]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of the short table: a row a model and projection, means over layers."""
    several = len({model.scale for model in models}) > 1
    quantities = ("norm", "shared_norm", "residual_norm", "cosine", "overlap", "learned_error", "best_error")
    table: list[tuple[str, ...]] = []
    for model in models:
        name = f"{model.label} ({model.scale})" if several and model.scale else model.label
        for projection in PROJECTIONS:
            means = [_mean(model.curve(projection, quantity)) for quantity in quantities]
            table.append((name, projection, *("-" if mean is None else f"{mean:.3f}" for mean in means)))
    return ("Model", "Of", "Norm", "Shared", "Residual", "Cosine", "Overlap", "Error", "Least"), table


def _mean(curve: Array) -> float | None:
    defined = curve[~np.isnan(curve)]
    return float(defined.mean()) if len(defined) else None
