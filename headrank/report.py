"""The document of a report: every number that its page shows, of all layers, uncentred and centred, in each circuit."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from headrank import tables
from headrank.definitions import definitions
from headrank.diversity import Array
from headrank.measures import OPERATOR
from headrank.results import LayerResult, Results
from headrank.summary import row_document, summary_rows

DIGITS = 6  # of similarities: H² a layer, so most of the page's size; a millionth is finer than any interval
PACKAGES = ("matplotlib", "numpy", "torch", "transformers")
STATISTICS = ("effective_rank", "percent_of_heads", "percent_of_attainable", "n_components")
OF_LAYER = ("layer", "group", "window", "mean_off_diagonal", "most_similar", "dead_heads", "reason")
OF_ROW = ("uncentered", "centered", "mean_off_diagonal", "mean_off_diagonal_interval", "most_similar", "dead_heads", "reason")


@dataclass(frozen=True, kw_only=True)
class CircuitResults:
    """All layers of all models in one circuit."""

    plain: Results
    centered: Results


def report_document(
    circuits: Mapping[str, CircuitResults], *, measured: Sequence[Mapping[str, Any]], suggested: Mapping[int, dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Ready for JSON. An undefined value is None with a `reason` beside it. Similarities are rounded to DIGITS decimals, nothing else is.

    measured: the settings with which each model was measured, in the models' order. suggested: a model's place -> its suggestions.
    """
    first = next(iter(circuits.values())).plain
    document = tables.document(replace(first, command="report"))
    entries = [{name: value for name, value in model.items() if name != "layers"} for model in document.pop("models")]
    parts = {circuit: _circuit_documents(results) for circuit, results in circuits.items()}
    for place, (entry, row, how) in enumerate(zip(entries, summary_rows(first, first), measured, strict=True)):
        entry["kv_bytes_per_token"] = row.kv_bytes_per_token
        entry["kv_percent_of_mha"] = row.kv_percent_of_mha
        entry["measured"] = dict(how)
        if suggested and place in suggested:
            entry["suggestions"] = {name: suggested[place][name] for name in ("join", "ranks", "duplicates", "layers")}
        entry["circuits"] = {circuit: documents[place] for circuit, documents in parts.items()}
    plain_models = [model for results in circuits.values() for model in results.plain.models]
    terms = definitions(
        source=first.source,
        measure=first.settings.get("measure", OPERATOR),
        circuits=tuple(circuits),
        has_intervals=any(layer.interval for model in plain_models for layer in model.layers),
        has_null=any(model.null for model in plain_models),
    )
    return {
        **{name: value for name, value in document.items() if name not in ("circuit", "centered")},
        "versions": _versions(),
        "circuits": list(circuits),
        "similarity_digits": DIGITS,
        "definitions": [asdict(term) for term in terms],
        "models": entries,
    }


def _circuit_documents(results: CircuitResults) -> list[dict[str, Any]]:
    """Each model in one circuit: means over layers, then its layers."""
    plain, centered = (tables.document(replace(one, command="report"))["models"] for one in (results.plain, results.centered))
    documents = []
    for row, a, b in zip(summary_rows(results.plain, results.centered), plain, centered, strict=True):
        layers = zip(row.plain.layers, row.centered.layers, a["layers"], b["layers"], strict=True)
        means = {name: value for name, value in row_document(row).items() if name in OF_ROW}
        documents.append({**means, "layers": [_layer_document(*layer) for layer in layers]})
    return documents


def _layer_document(plain: LayerResult, centered: LayerResult, plain_entry: dict[str, Any], centered_entry: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = {"key": plain.facts.key} | {name: plain_entry[name] for name in OF_LAYER if name in plain_entry}
    entry["n_head"], entry["n_kv_head"] = plain.facts.n_head, plain.facts.n_kv_head
    entry["intervals"] = {name: ends for name, ends in plain_entry.get("intervals", {}).items() if name != "effective_rank"}
    for name, layer, numbers in (("uncentered", plain, plain_entry), ("centered", centered, centered_entry)):
        part: dict[str, Any] = {statistic: numbers[statistic] for statistic in STATISTICS}
        if layer.interval:
            part["interval"] = list(layer.interval)
        if layer.reason:
            part["reason"] = layer.reason
        part["eigenvalues"] = None if layer.eigenvalues is None else layer.eigenvalues.tolist()
        entry[name] = part
    entry["similarity"] = None if plain.similarity is None else _rounded(plain.similarity)
    return entry


def _rounded(S: Array) -> list[list[float]]:
    return (np.round(S, DIGITS) + 0.0).tolist()  # -0.0 + 0.0 is 0.0


def _versions() -> dict[str, str]:
    """What computed the numbers and drew the figures, where it is installed."""
    found = {"headrank": tables.program_version(), "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
