"""The command `agree`: both measurements of each model, from options to files."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrank import agreement_tables, tables
from headrank.agreement import Agreement, model_agreement
from headrank.commands import Report, Terminal, choose_models, publish, settings_of
from headrank.errors import HeadrankError
from headrank.measure import all_layers, form_of, measure
from headrank.measures import MEASURES, circuit_of, gram_name
from headrank.selection import ModelRef, resolve_layers
from headrank.store import Store, is_measurement

if TYPE_CHECKING:
    from headrank.cli import Shared


def run_agree(options: "Shared") -> None:
    """Carries out agree."""

    def work(terminal: Terminal) -> Report:
        refs = choose_models(options, figure="effrank", largest_only=False, remark=terminal.remark)
        results = _compare(refs, options, terminal)
        columns, cells = agreement_tables.agreement_cells(results)

        def figure():  # type: ignore[no-untyped-def]  # matplotlib is imported where a figure is drawn
            from headrank.agreement_figure import agreement_figure

            return agreement_figure(results)

        return Report(
            document=agreement_tables.agreement_document(results),
            texts={"csv": tables.csv_lines(agreement_tables.agreement_rows(results))},
            figure=figure,
            show=lambda console: tables.print_cells(columns, cells, console),
            faults=results.faults,
        )

    publish("agree", options, work)


def _compare(refs: list[ModelRef], options: "Shared", terminal: Terminal) -> Agreement:
    activations = replace(settings_of(options), source="activations", rope_offset=0, rope_mean=None)
    weights = replace(settings_of(options), source="weights")
    of_both = [name for name, known in MEASURES.items() if len(known.sources) == 2]
    if weights.measure not in of_both:
        raise HeadrankError(
            f"agree compares weights with activations, and --measure {weights.measure} is defined on one of them alone; take {', '.join(of_both)}"
        )
    circuit = circuit_of(weights.measure, options.circuit and options.circuit.value)
    name = gram_name(weights.measure, circuit)
    asked = tuple(options.layer or ())
    store = Store.default()
    models = []
    for ref in refs:
        if Path(ref.path).is_file() and is_measurement(Path(ref.path)):
            raise HeadrankError(f"{ref.path}: a measurement holds weights or activations, and agree needs both; give the checkpoint")
        chosen = (lambda layers: asked) if asked else all_layers
        both = [measure(ref, settings, layers=chosen, store=store, progress=terminal) for settings in (weights, activations)]
        shown = resolve_layers(asked or all_layers(both[0].layers), both[0].layers, label=ref.label)
        models.append(model_agreement(both[0], both[1], (name, name), shown, label=ref.label, scale=ref.scale))
    settings = {"raw": weights.raw, "center": activations.center, "skip_first": activations.skip_first} | form_of(weights)
    return Agreement(circuit=circuit, settings=settings, models=tuple(models))
