"""The command `lrkv`: anatomy of LRKV's keys and values, from options to files."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrank import anatomy_tables, tables
from headrank.anatomy_tables import PROJECTIONS, Anatomy, ModelAnatomy
from headrank.commands import Report, Terminal, choose_models, publish, settings_of
from headrank.errors import HeadrankError, NotFiniteError
from headrank.selection import ModelRef, resolve_layers
from headrank.store import LayerFacts, is_measurement

if TYPE_CHECKING:
    from headrank.anatomy import ProjectionAnatomy
    from headrank.cli import Shared


def run_lrkv(options: "Shared") -> None:
    """Carries out lrkv."""

    def work(terminal: Terminal) -> Report:
        refs = choose_models(options, figure="effrank", largest_only=False, remark=terminal.remark)
        models = _take_apart(refs, options, terminal)
        columns, cells = anatomy_tables.anatomy_cells(models)

        def figure():  # type: ignore[no-untyped-def]  # matplotlib is imported where a figure is drawn
            from headrank.anatomy_figure import anatomy_figure

            return anatomy_figure(models)

        def show(console: Any) -> None:
            tables.print_cells(columns, cells, console)
            console.print(anatomy_tables.NOT_UNIQUE)

        return Report(
            document=anatomy_tables.anatomy_document(models),
            texts={"csv": tables.csv_lines(anatomy_tables.anatomy_rows(models))},
            figure=figure,
            show=show,
            faults=anatomy_tables.faults(models),
        )

    publish("lrkv", options, work)


def _take_apart(refs: Sequence[ModelRef], options: "Shared", terminal: Terminal) -> list[ModelAnatomy]:
    """LRKV's models and, beside them, those of plain heads (MHA) of the same scale; others have nothing to show here."""
    reading = settings_of(options).reading
    opened = []
    for ref in refs:
        if Path(ref.path).is_file() and is_measurement(Path(ref.path)):
            raise HeadrankError(f"{ref.path}: a measurement holds no weights to take apart; give the checkpoint")
        opened.append((ref, *reading.open(ref.path)))
    ranks: dict[str | None, dict[int, None]] = {}
    for ref, _, architecture in opened:
        if architecture.kind == "lrkv":
            ranks.setdefault(ref.scale, {})[_rank(architecture)] = None
        elif architecture.kind != "mha" and options.models:
            terminal.remark(f"{ref.label}: kind {architecture.kind} has no shared and residual parts; left out")
    if not ranks:
        looked = ", ".join(f"{ref.label} ({architecture.kind})" for ref, _, architecture in opened)
        raise HeadrankError(f"no model of kind lrkv among {looked}; its shared and residual parts are what this command shows")
    models = []
    for ref, checkpoint, architecture in opened:
        if architecture.kind in ("mha", "lrkv") and ref.scale in ranks:
            tried = (_rank(architecture),) if architecture.kind == "lrkv" else tuple(sorted(ranks[ref.scale]))
            models.append(_model(ref, checkpoint, architecture, tried, tuple(options.layer or ()), terminal))
    return models


def _rank(architecture: Any) -> int:
    """LRKV's r: the largest of any layer."""
    chains = [next(iter(layer.k.parts.values())) for layer in architecture.layers]
    return max((its[1][0].weight.size for its in chains if len(its) > 1), default=0)


def _model(ref: ModelRef, checkpoint: Any, architecture: Any, ranks: tuple[int, ...], asked: tuple[int, ...], terminal: Terminal) -> ModelAnatomy:
    places = {layer.index: layer for layer in architecture.layers}
    facts = [LayerFacts(index=layer.index, n_head=layer.n_head, n_kv_head=layer.n_kv_head) for layer in architecture.layers]
    chosen = resolve_layers(asked or [layer.index for layer in facts], facts, label=ref.label)
    terminal.start(ref.label, len(chosen), "layers")
    layers = []
    for done, layer in enumerate(chosen, 1):
        layers.append((layer, {name: _projection(checkpoint, places[layer.index], name, architecture.kind, ranks) for name in PROJECTIONS}))
        terminal.advance(done)
    known = ("kind", "n_layer", "n_head", "n_kv_head", "d_model", "d_head", "n_parameters")
    about = {"checkpoint": ref.path, "fingerprint": checkpoint.fingerprint(), **{name: getattr(architecture, name) for name in known}}
    return ModelAnatomy(label=ref.label, scale=ref.scale, facts=about, ranks=ranks, layers=tuple(layers))


def _projection(checkpoint: Any, layer: Any, name: str, kind: str, ranks: tuple[int, ...]) -> Anatomy:
    from headrank.anatomy import full_rank_anatomy, split_anatomy
    from headrank.factors import head_matrices, shared_and_low_rank

    projection = layer.k if name == "keys" else layer.v
    try:
        if kind == "lrkv":
            return _numbers(split_anatomy(*shared_and_low_rank(checkpoint, layer, projection)))
        return _numbers(full_rank_anatomy(head_matrices(checkpoint, layer, projection), ranks))
    except NotFiniteError as error:
        return Anatomy(numbers={}, reason=str(error), is_fault=True)


def _numbers(found: "ProjectionAnatomy") -> Anatomy:
    numbers: dict[str, Any] = {"norm": _plain(found.norm)}
    if found.split is None:
        return Anatomy(numbers=numbers | {f"best_error_{rank}": _plain(errors) for rank, errors in found.best_errors.items()})
    split = vars(found.split)
    numbers |= {name: _plain(value) for name, value in split.items() if name not in ("rank", "reason")}
    return Anatomy(numbers=numbers, reason=found.split.reason)


def _plain(value: Any) -> Any:
    """A number or an array as Python's own; None for NaN."""
    if isinstance(value, np.ndarray):
        return [_plain(float(number)) for number in value]
    return None if np.isnan(value) else float(value)
