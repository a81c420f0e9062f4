"""The summary table: a row a model, as Table 3 of arXiv 2601.11471 and what one asks next."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrank.results import ModelResult, Results

BYTES_PER_VALUE = 2  # bfloat16, as caches are kept
SPECIAL_IN_LATEX = str.maketrans({char: f"\\{char}" for char in "%&_#$"})


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model, uncentred and centred."""

    plain: ModelResult
    centered: ModelResult

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that the KV cache holds for a token in bfloat16."""
        return self.plain.model.kv_values_per_token * BYTES_PER_VALUE

    @property
    def kv_percent_of_mha(self) -> float | None:
        """The same as a percentage of what full heads' cache would hold; None where nothing is cached, as in an encoder."""
        full = self.plain.model.kv_values_per_token_of_mha
        return 100 * self.plain.model.kv_values_per_token / full if full else None

    @property
    def most_similar(self) -> tuple[float, str, tuple[int, int]] | None:
        """The largest off-diagonal similarity of all layers, the layer and the pair of heads."""
        found = [(layer.most_similar[0], layer.facts.key, layer.most_similar[1]) for layer in self.plain.layers if layer.most_similar]
        return max(found) if found else None

    @property
    def n_dead(self) -> int:
        """Dead heads, all layers together."""
        return sum(len(layer.dead_heads) for layer in self.plain.layers)


def summary_rows(plain: Results, centered: Results) -> list[Row]:
    """Joins the uncentred and the centred results of the same models."""
    return [Row(plain=a, centered=b) for a, b in zip(plain.models, centered.models, strict=True)]


def row_document(row: Row) -> dict[str, Any]:
    """A row ready for JSON; an undefined value is None with a reason beside it."""
    model = row.plain.model
    entry: dict[str, Any] = {
        "label": row.plain.label,
        "scale": row.plain.scale,
        "checkpoint": model.checkpoint,
        "fingerprint": model.fingerprint,
        "family": model.family,
        "kind": model.kind,
        "n_layer": model.n_layer,
        "n_head": model.n_head,
        "n_kv_head": model.n_kv_head,
    }
    for name, result in (("uncentered", row.plain), ("centered", row.centered)):
        part: dict[str, Any] = {
            "mean_effective_rank": result.mean("effective_rank"),
            "percent_of_heads": result.mean("percent_of_heads"),
            "percent_of_attainable": result.mean("percent_of_attainable"),
        }
        if part["mean_effective_rank"] is None:
            part["reason"] = next((layer.reason for layer in result.layers if layer.reason), "no layer has an effective rank")
        if ends := result.mean_interval("effective_rank"):
            part["interval"] = list(ends)
        if result.null is not None:
            part["null"] = {"mean": result.null.mean, "low": result.null.low, "high": result.null.high, "n_samples": result.null.n_samples}
        entry[name] = part
    entry["mean_off_diagonal"] = row.plain.mean("mean_off_diagonal")
    if ends := row.plain.mean_interval("mean_off_diagonal"):
        entry["mean_off_diagonal_interval"] = list(ends)
    entry["most_similar"] = None
    if row.most_similar is not None:
        value, layer, heads = row.most_similar
        entry["most_similar"] = {"similarity": value, "layer": layer, "heads": list(heads)}
        largest = next(one for one in row.plain.layers if one.facts.key == layer).intervals.get("largest_off_diagonal")
        if largest is not None:
            entry["most_similar"]["interval"] = largest.tolist()
    else:
        entry["reason"] = "one head: there are no pairs"
    entry["dead_heads"] = row.n_dead
    entry["kv_bytes_per_token"] = row.kv_bytes_per_token
    entry["kv_percent_of_mha"] = row.kv_percent_of_mha
    if row.kv_percent_of_mha is None:
        entry["kv_reason"] = "nothing is cached: the model reads all tokens at once"
    entry["n_parameters"] = model.n_parameters
    return entry


COLUMNS: dict[str, Callable[[Row], str]] = {
    "Model": lambda row: f"{row.plain.label} ({row.plain.scale})" if row.plain.scale else row.plain.label,
    "Rank": lambda row: _ranked(row.plain),
    "% of H": lambda row: _number(row.plain.mean("percent_of_heads"), 1),
    "Null": lambda row: _number(row.plain.null.mean if row.plain.null else None, 2),
    "Centred": lambda row: _ranked(row.centered),
    "% of H ": lambda row: _number(row.centered.mean("percent_of_heads"), 1),
    "% of H-1": lambda row: _number(row.centered.mean("percent_of_attainable"), 1),
    "Null ": lambda row: _number(row.centered.null.mean if row.centered.null else None, 2),
    "Mean S": lambda row: _number(row.plain.mean("mean_off_diagonal"), 3),
    "Max S": lambda row: (
        f"{row.most_similar[0]:.3f} (L={row.most_similar[1]}: {row.most_similar[2][0]}, {row.most_similar[2][1]})" if row.most_similar else "-"
    ),
    "Dead": lambda row: str(row.n_dead),
    "KV B/token": lambda row: f"{row.kv_bytes_per_token:,}" if row.kv_bytes_per_token else "-",
    "% of MHA": lambda row: _number(row.kv_percent_of_mha, 1),
    "Parameters": lambda row: f"{row.plain.model.n_parameters:,}",
}


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Names of columns and the table's cells as text. Rank is the mean over layers, with its 95 % interval where there is one."""
    return [name.strip() for name in COLUMNS], [[cell(row) for cell in COLUMNS.values()] for row in rows]


def markdown(rows: Sequence[Row]) -> str:
    """The table in Markdown."""
    columns, table = cells(rows)
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *table]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def latex(rows: Sequence[Row]) -> str:
    """The table as a LaTeX tabular, for booktabs."""
    columns, table = cells(rows)
    head, *body = [" & ".join(cell.translate(SPECIAL_IN_LATEX) for cell in line) + r" \\" for line in (columns, *table)]
    return "\n".join([rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", ""])


def _ranked(model: ModelResult) -> str:
    mean, ends = model.mean("effective_rank"), model.mean_interval("effective_rank")
    return _number(mean, 2) if mean is None or ends is None else f"{mean:.2f} [{ends[0]:.2f}, {ends[1]:.2f}]"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
