"""The command `report`: both circuits of each model from one measurement, as a page and the document that it was made from."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from headrank import summary, tables
from headrank.commands import Report, Terminal, choose_models, publish, settings_of
from headrank.decisions import suggestion_cells
from headrank.measure import Reading, Settings, all_layers, form_of, measure
from headrank.measures import OPERATOR, circuit_of, find_measure, gram_name
from headrank.page import Advice, Plot, report_page
from headrank.report import CircuitResults, report_document
from headrank.results import Results, model_result
from headrank.selection import ModelRef, early_middle_late
from headrank.store import Measurement, Store, is_measurement
from headrank.suggest import Request, suggest

if TYPE_CHECKING:
    from headrank.cli import Shared


def run_report(options: "Shared", *, null: bool, decide: bool) -> None:
    """Carries out report."""
    settings = settings_of(options, null=null)
    shown = _circuits(options, settings)

    def work(terminal: Terminal) -> Report:
        refs = choose_models(options, figure="effrank", largest_only=False, remark=terminal.remark)
        store = Store.default()
        measurements = [measure(ref, settings, layers=all_layers, store=store, progress=terminal) for ref in refs]
        circuits = {circuit: _results(circuit, refs, measurements, settings) for circuit in shown}
        measured = [{name: value for name, value in measurement.settings.items() if name != "tokens"} for measurement in measurements]
        suggested = _suggestions(refs, settings, store, terminal) if decide else {}
        document = report_document(circuits, measured=measured, suggested=suggested)
        advice = [_advice(refs[place].label, model) for place, model in suggested.items()]

        def show(console: Console) -> None:
            for circuit, results in circuits.items():
                console.print(f"Circuit {circuit.upper()}")
                tables.print_cells(*summary.cells(summary.summary_rows(results.plain, results.centered)), console)

        return Report(
            document=document,
            texts={"html": report_page(document, list(_plots(circuits)), advice)},
            figure=None,
            show=show,
            faults=list(dict.fromkeys(fault for results in circuits.values() for fault in results.plain.faults)),
        )

    publish("report", options, work, texts=("html",), has_figure=False)


def _suggestions(refs: Sequence[ModelRef], settings: Settings, store: Store, terminal: Terminal) -> dict[int, dict[str, Any]]:
    """A model's place -> what its weights suggest; none for measurement files, nor where weights are read in a way of their own."""
    if settings.reading != Reading():
        return {}
    plain = replace(settings, source="weights", measure=OPERATOR, rope_offset=0, rope_mean=None, raw=False, null=False)
    readable = [place for place, ref in enumerate(refs) if not (Path(ref.path).is_file() and is_measurement(Path(ref.path)))]
    return {place: suggest(refs[place], Request(), plain, store=store, progress=terminal) for place in readable}


def _advice(label: str, model: dict[str, Any]) -> Advice:
    columns, rows, lines = suggestion_cells(model)
    return Advice(name=label, columns=columns, rows=rows, lines=lines)


def _circuits(options: "Shared", settings: Settings) -> list[str]:
    """The circuit asked for, or all that the measure has; keys are turned towards queries in qk alone."""
    if options.circuit is not None:
        return [circuit_of(settings.measure, options.circuit.value)]
    return [circuit for circuit in find_measure(settings.measure).grams if circuit == "qk" or not (settings.rope_offset or settings.rope_mean)]


def _results(circuit: str, refs: Sequence[ModelRef], measurements: Sequence[Measurement], settings: Settings) -> CircuitResults:
    shared = {"raw": settings.raw} if settings.source == "weights" else {"center": settings.center, "skip_first": settings.skip_first}
    shared |= form_of(settings) | _reading(settings.reading)
    both = [
        Results(
            command="effrank",
            source=settings.source,
            circuit=circuit,
            is_centered=is_centered,
            settings=shared,
            models=tuple(
                model_result(m, gram_name(settings.measure, circuit), m.layers, label=ref.label, scale=ref.scale, is_centered=is_centered)
                for ref, m in zip(refs, measurements, strict=True)
            ),
        )
        for is_centered in (False, True)
    ]
    return CircuitResults(plain=both[0], centered=both[1])


def _reading(reading: Reading) -> dict[str, Any]:
    """How checkpoints were read, where that was asked for."""
    asked = {field.name: getattr(reading, field.name) for field in fields(reading) if getattr(reading, field.name) != field.default}
    return {name: value if isinstance(value, int) else str(value) for name, value in asked.items()}


def _plots(circuits: dict[str, CircuitResults]) -> Iterator[Plot]:
    """The figures of the page, in its order, without their titles and captions: the page has its own."""
    from headrank import figures
    from headrank.svg import inline_svg

    for circuit, results in circuits.items():
        both = ((results.plain, "uncentred"), (results.centered, "centred"))
        drawn = [
            *((f"Effective rank, {kind}", _rank_notes(one), figures.effrank_figure(one)) for one, kind in both),
            *((f"Eigenvalues of S, {kind}", _notes(one), figures.spectra_figure(_early_middle_late(one))) for one, kind in both),
            ("Cumulative variance explained, uncentred", _notes(results.plain), figures.variance_figure(_early_middle_late(results.plain))),
        ]
        for place, (title, notes, figure) in enumerate(drawn):
            figure.suptitle("")
            figure.supxlabel("")
            svg = inline_svg(figure, f"{circuit}{place}-", alt=f"{title}, circuit {circuit.upper()}. {_means(results.plain) if place == 0 else ''}".strip())
            yield Plot(circuit=circuit, title=title, notes=notes, svg=svg)


def _rank_notes(results: Results) -> str:
    dotted = "Dotted: 95 % of random heads." if any(model.null for model in results.models) else ""
    return " ".join(filter(None, ["Against layer; dashed at 1, where all heads are the same.", dotted, _notes(results)]))


def _notes(results: Results) -> str:
    return "Shaded: 95 % over sequences." if any(layer.intervals for model in results.models for layer in model.layers) else ""


def _means(results: Results) -> str:
    means = [(model.label, model.mean("effective_rank")) for model in results.models]
    return "Means over layers: " + ", ".join(f"{label} {'undefined' if mean is None else f'{mean:.2f}'}" for label, mean in means) + "."


def _early_middle_late(results: Results) -> Results:
    models = []
    for model in results.models:
        shown = early_middle_late([layer.facts for layer in model.layers])
        models.append(replace(model, layers=tuple(layer for layer in model.layers if layer.facts.index in shown)))
    return replace(results, command="spectra", models=tuple(models))
