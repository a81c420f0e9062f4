"""Agreement -> document, rows of a CSV file, and cells of the table on the terminal."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from headrank.agreement import Agreement, LayerAgreement, ModelAgreement
from headrank.tables import SCHEMA, Row, program_version

OVER = "95 % interval over the sequences that were fed (bootstrap); the weights are fixed"


def agreement_document(results: Agreement) -> dict[str, Any]:
    """Everything that was computed, ready for JSON: an undefined value is None with a reason beside it."""
    return {
        "schema": SCHEMA,
        "command": "agree",
        "version": program_version(),
        "circuit": results.circuit,
        "settings": results.settings,
        "correlation": "Spearman, over pairs of heads, of similarity from weights and from activations",
        "interval": OVER,
        "models": [_model(model) for model in results.models],
    }


def _model(model: ModelAgreement) -> dict[str, Any]:
    entry: dict[str, Any] = {"label": model.label, "scale": model.scale, **asdict(model.model), "tokens": model.tokens, "mean_correlation": model.mean}
    if model.mean is None:
        entry["reason"] = "no layer has a rank correlation"
    if model.mean_interval is not None:
        entry["mean_correlation_interval"] = list(model.mean_interval)
    return {**entry, "layers": [_layer(layer) for layer in model.layers]}


def _layer(layer: LayerAgreement) -> dict[str, Any]:
    entry: dict[str, Any] = {"layer": layer.facts.index}
    if layer.facts.group:
        entry["group"] = layer.facts.group
    entry |= {"correlation": layer.correlation, "pairs": layer.n_pairs}
    if layer.interval is not None:
        entry["interval"] = list(layer.interval)
    if layer.reason is not None:
        entry["reason"] = layer.reason
    return entry


def agreement_rows(results: Agreement) -> list[Row]:
    """Names of columns, then a row a layer; an undefined value is None."""
    rows: list[Row] = [("label", "scale", "group", "layer", "pairs", "correlation", "low", "high", "reason")]
    for model in results.models:
        for layer in model.layers:
            low, high = layer.interval or (None, None)
            rows.append((model.label, model.scale, layer.facts.group, layer.facts.index, layer.n_pairs, layer.correlation, low, high, layer.reason))
    return rows


def agreement_cells(results: Agreement) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of the short table: a row a model."""
    several = len({model.scale for model in results.models}) > 1
    table: list[tuple[str, ...]] = []
    for model in results.models:
        name = f"{model.label} ({model.scale})" if several and model.scale else model.label
        ends = "{:.2f} … {:.2f}".format(*model.mean_interval) if model.mean_interval else "-"
        mean = "-" if model.mean is None else f"{model.mean:.3f}"
        table.append((name, mean, ends, *_extremes(model.layers)))
    return ("Model", "Mean correlation", "95 %", "Lowest", "Highest"), table


def _extremes(layers: Sequence[LayerAgreement]) -> tuple[str, str]:
    found = [(layer.correlation, layer.facts.key) for layer in layers if layer.correlation is not None]
    if not found:
        return "-", "-"
    return tuple(f"{value:.2f} (L={key})" for value, key in (min(found), max(found)))  # type: ignore[return-value]
