"""Results -> the document that is written, rows for a CSV file, a short table for the terminal."""

import csv
import io
import json
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrank.results import LayerResult, ModelResult, Results

SCHEMA = 1
CURVES = {"spectra": "eigenvalues", "variance": "cumulative_variance"}  # command -> the quantity that it shows over the eigenvalues' index
Row = tuple[str | int | float | None, ...]


def document(results: Results) -> dict[str, Any]:
    """Everything that a command computed, ready for JSON: no NaN, no infinity; an undefined value is None with a `reason` beside it."""
    settings = {name: value for name, value in results.settings.items() if name != "raw"}
    tokens, tokens_differ = _shared_tokens(results)
    return {
        "schema": SCHEMA,
        "command": results.command,
        "version": program_version(),
        "source": results.source,
        "circuit": results.circuit,
        "centered": results.is_centered,
        "raw": bool(results.settings.get("raw", False)),
        "settings": settings,
        "tokens": tokens,
        **({"reason": "the models were fed different tokens: see each model"} if tokens_differ else {}),
        "models": [_model_document(model, results.command, with_tokens=tokens_differ) for model in results.models],
    }


def _shared_tokens(results: Results) -> tuple[dict[str, Any] | None, bool]:
    """The tokens of all models, and whether they differ."""
    tokens = [model.tokens for model in results.models]
    differ = any(other != tokens[0] for other in tokens)
    return (None if differ or not tokens else tokens[0]), differ


def _model_document(model: ModelResult, command: str, *, with_tokens: bool) -> dict[str, Any]:
    facts = model.model
    entry: dict[str, Any] = {
        "label": model.label,
        "scale": model.scale,
        "checkpoint": facts.checkpoint,
        "fingerprint": facts.fingerprint,
        "family": facts.family,
        "kind": facts.kind,
        "n_layer": facts.n_layer,
        "n_head": facts.n_head,
        "n_kv_head": facts.n_kv_head,
        "d_model": facts.d_model,
        "d_head": facts.d_head,
        "n_parameters": facts.n_parameters,
        "kv_values_per_token": facts.kv_values_per_token,
    }
    if facts.trained:
        entry["trained"] = facts.trained
    if with_tokens:
        entry["tokens"] = model.tokens
    if command == "effrank":
        entry["mean_effective_rank"] = model.mean("effective_rank")
        entry["percent_of_heads"] = model.mean("percent_of_heads")
        entry["percent_of_attainable"] = model.mean("percent_of_attainable")
        if ends := model.mean_interval("effective_rank"):
            entry["interval"] = list(ends)
        if model.null is not None:
            entry["null"] = {"mean": model.null.mean, "low": model.null.low, "high": model.null.high, "n_samples": model.null.n_samples}
        entry["layers_in_mean"] = sum(layer.effective_rank is not None for layer in model.layers)
        if not entry["layers_in_mean"]:
            entry["reason"] = "no layer has an effective rank"
    entry["layers"] = [_layer_document(layer, model, command) for layer in model.layers]
    return entry


def _layer_document(layer: LayerResult, model: ModelResult, command: str) -> dict[str, Any]:
    facts = layer.facts
    entry: dict[str, Any] = {"layer": facts.index}
    if facts.group:
        entry["group"] = facts.group
    if facts.window is not None:
        entry["window"] = facts.window
    if (facts.n_head, facts.n_kv_head) != (model.model.n_head, model.model.n_kv_head):
        entry["n_head"], entry["n_kv_head"] = facts.n_head, facts.n_kv_head
    entry["effective_rank"] = layer.effective_rank
    entry["percent_of_heads"] = layer.percent_of_heads
    entry["percent_of_attainable"] = layer.percent_of_attainable
    entry["n_components"] = layer.n_components
    entry["mean_off_diagonal"] = layer.mean_off_diagonal
    entry["most_similar"] = None
    if layer.most_similar is not None:
        value, pair = layer.most_similar
        entry["most_similar"] = {"similarity": value, "heads": list(pair)}
    entry["dead_heads"] = list(layer.dead_heads)
    shown = {"effective_rank", "mean_off_diagonal", "largest_off_diagonal", CURVES.get(command)}
    if layer.intervals:
        entry["intervals"] = {name: ends.tolist() for name, ends in layer.intervals.items() if name in shown}
    if reason := _reason(layer):
        entry["reason"] = reason
    if command == "effrank":
        entry["relative_depth"] = model.depth(layer)
    if command in CURVES:
        values = getattr(layer, CURVES[command])
        entry[CURVES[command]] = None if values is None else values.tolist()
    if command == "heatmap":
        entry["similarity"] = None if layer.similarity is None else layer.similarity.tolist()
    return entry


def _reason(layer: LayerResult) -> str | None:
    """Why a layer has undefined values, where it has."""
    no_pairs = "one head: there are no pairs" if layer.similarity is not None and layer.most_similar is None else None
    return "; ".join(reason for reason in (layer.reason, no_pairs) if reason) or None


def program_version() -> str:
    """The version of headrank that runs."""
    try:
        return version("headrank")
    except PackageNotFoundError:
        return "not installed"


def json_text(document: dict[str, Any]) -> str:
    """The document as JSON: indented, a list of numbers on one line, ASCII alone. Raises ValueError for a NaN or an infinity."""
    text = json.dumps(document, indent=2, allow_nan=False)
    # A line break inside brackets is layout, since strings hold theirs escaped.
    return re.sub(r"\[\n[-+.\deE,\s]*\]", lambda numbers: f"[{' '.join(numbers[0][1:-1].split())}]", text) + "\n"


def rows(results: Results) -> tuple[tuple[str, ...], list[Row]]:
    """Names of columns, and rows: one a pair of heads (heatmap), an eigenvalue (spectra) or a layer (effrank)."""
    columns = {
        "heatmap": ("head_i", "head_j", "similarity"),
        "spectra": ("index", "eigenvalue", "low", "high"),
        "variance": ("n_components", "cumulative_variance", "low", "high"),
        "effrank": ("n_head", "centered", "effective_rank", "low", "high", "percent_of_heads", "percent_of_attainable", "dead_heads"),
    }[results.command]
    table: list[Row] = []
    for model in results.models:
        for layer in model.layers:
            place = (model.label, model.scale, layer.facts.group, layer.facts.index)
            values = list(_layer_rows(layer, results)) or [(None,) * len(columns)]
            table.extend((*place, *row, _reason(layer)) for row in values)
    return ("label", "scale", "group", "layer", *columns, "reason"), table


def _layer_rows(layer: LayerResult, results: Results) -> Iterable[Row]:
    if results.command == "effrank":
        dead = " ".join(map(str, layer.dead_heads))
        low, high = layer.interval or (None, None)
        centered = int(results.is_centered)
        return [(layer.facts.n_head, centered, layer.effective_rank, low, high, layer.percent_of_heads, layer.percent_of_attainable, dead)]
    if results.command in CURVES:
        values = getattr(layer, CURVES[results.command])
        ends = layer.intervals.get(CURVES[results.command])
        return [] if values is None else [(i, values[i - 1], *((None, None) if ends is None else ends[i - 1])) for i in range(1, len(values) + 1)]
    S = [] if layer.similarity is None else layer.similarity.tolist()
    return [(i, j, value) for i, row in enumerate(S) for j, value in enumerate(row)]


def csv_text(*results: Results) -> str:
    """rows() as CSV, of several results one after the other."""
    (columns, table), *others = [rows(one) for one in results]
    return csv_lines([columns, *table, *(row for _, more in others for row in more)])


def csv_lines(lines: Iterable[Sequence[Any]]) -> str:
    """Lines as CSV (RFC 4180, but lines end in \\n): an undefined value is an empty field."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(lines)
    return buffer.getvalue()


def render(results: Results, console: Console) -> None:
    """Prints a short table and why values are undefined."""
    functions = {"heatmap": _heatmap_table, "spectra": _spectra_table, "variance": _spectra_table, "effrank": _effrank_table}
    print_cells(*functions[results.command](results), console)
    for note in _notes(results):
        console.print(Text(_printable(note, console)))


def print_cells(columns: Sequence[str], table: Iterable[Sequence[str]], console: Console) -> None:
    """Prints a table of texts; where the console is too narrow for one, a block of lines a row."""
    table = [tuple(_printable(cell, console) for cell in row) for row in table]
    widths = [max(cell_len(row[i]) for row in (columns, *table)) for i in range(len(columns))]
    if sum(widths) + 2 * len(widths) <= console.width:
        _print_table(columns, table, console)
    else:
        _print_blocks(columns, table, console)


def print_facts(facts: Iterable[tuple[str, str]], console: Console) -> None:
    """Prints names and texts in two columns; a long text goes on below itself."""
    shown = Table(box=None, padding=(0, 1), show_header=False)
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    for name, text in facts:
        shown.add_row(_printable(name, console), _printable(text, console))
    console.print(shown)


def _print_table(columns: Sequence[str], table: Iterable[Sequence[str]], console: Console) -> None:
    shown = Table(box=None, padding=(0, 1), header_style="bold")
    for i, column in enumerate(columns):
        shown.add_column(Text(column), justify="right" if i else "left", no_wrap=True)
    for row in table:
        shown.add_row(*(Text(cell) for cell in row))
    console.print(shown)


def _print_blocks(columns: Sequence[str], table: Iterable[Sequence[str]], console: Console) -> None:
    for row in table:
        console.print(Text(row[0], style="bold"))
        for column, cell in zip(columns[1:], row[1:], strict=True):
            console.print(Text(f"  {column}: {cell}"))


def _effrank_table(results: Results) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    table = []
    for model in results.models:
        ranks = [(layer.effective_rank, layer.facts.key) for layer in model.layers if layer.effective_rank is not None]
        dead = sum(len(layer.dead_heads) for layer in model.layers)
        means = [_number(model.mean("effective_rank"), 2), _number(model.mean("percent_of_heads"), 1), _number(model.mean("percent_of_attainable"), 1)]
        ends = [f"{rank:.2f} (L={key})" for rank, key in (min(ranks), max(ranks))] if ranks else ["-", "-"]
        table.append((_name(model, results), *means, *ends, str(dead)))
    return ("Model", "Mean rank", "% of H", "% of max", "Lowest", "Highest", "Dead"), table


def _spectra_table(results: Results) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    table = []
    for model in results.models:
        for layer in model.layers:
            first = None if layer.eigenvalues is None else float(layer.eigenvalues[0])
            numbers = [_number(first, 3), _number(layer.effective_rank, 2), _number(layer.percent_of_attainable, 1), _number(layer.n_components, 0)]
            table.append((_name(model, results), layer.facts.key, *numbers))
    return ("Model", "Layer", "First eigenvalue", "Effective rank", "% of max", "For 90 %"), table


def _heatmap_table(results: Results) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    table: list[tuple[str, ...]] = []
    for model in results.models:
        for layer in model.layers:
            largest = "{:.3f} ({}, {})".format(layer.most_similar[0], *layer.most_similar[1]) if layer.most_similar else "-"
            dead = "-" if layer.similarity is None else ", ".join(map(str, layer.dead_heads)) or "none"
            table.append((_name(model, results), layer.facts.key, _number(layer.mean_off_diagonal, 3), largest, _number(layer.effective_rank, 2), dead))
    return ("Model", "Layer", "Mean off-diagonal", "Largest (heads)", "Effective rank", "Dead"), table


def _name(model: ModelResult, results: Results) -> str:
    """The label, with the scale where there are several."""
    several = len({other.scale for other in results.models}) > 1
    return f"{model.label} ({model.scale})" if several and model.scale else model.label


def _notes(results: Results) -> list[str]:
    """Why values are undefined, a line a model and reason. Layers with a fault are errors, which are told elsewhere."""
    layers: dict[tuple[str, str], list[str]] = {}
    for model in results.models:
        for layer in model.layers:
            if layer.reason and layer.similarity is not None:
                layers.setdefault((_name(model, results), layer.reason), []).append(layer.facts.key)
    return [f"{name}, layer {', '.join(keys)}: {reason}" for (name, reason), keys in layers.items()]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _printable(text: str, console: Console) -> str:
    """Without control characters, and with those that the terminal's encoding lacks replaced."""
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown.encode(console.encoding, errors="replace").decode(console.encoding)
