"""What the commands do, from options to files: choose models, measure them, show and save the results."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from headrank import summary, tables
from headrank.dynamics import as_run, run_document, run_rows, step_refs, steps_cells
from headrank.errors import HeadrankError
from headrank.measure import LayerChoice, Reading, Settings, all_layers, form_of, measure
from headrank.measures import circuit_of, gram_name
from headrank.output import OutputFolder, figure_bytes
from headrank.results import Results, model_result
from headrank.selection import ModelRef, checkpoints_folder, early_middle_late, family_models, middle_layer, named_models, resolve_layers
from headrank.store import Store, is_measurement, write_measurement

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headrank.cli import Deciding, Shared

SHOWN_LAYERS: dict[str, LayerChoice] = {
    "heatmap": lambda layers: [middle_layer(layers)],
    "spectra": early_middle_late,
    "variance": early_middle_late,
    "effrank": all_layers,
}


class PlainConsole(Console):
    """Prints text as it is, and lets the command line decide what follows when the reader has gone."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **settings)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Terminal:
    """Progress and remarks on stderr; nothing where quiet. The bar is drawn on terminals alone."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self.console = PlainConsole(stderr=True, soft_wrap=True)
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[unit]}"), TimeRemainingColumn())
        self.bar = Progress(*columns, console=self.console, transient=True, disable=quiet or not self.console.is_terminal)
        self.task: TaskID | None = None

    def __enter__(self) -> "Terminal":
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def start(self, label: str, total: int, unit: str) -> None:
        if self.task is not None:
            self.bar.remove_task(self.task)
        self.task = self.bar.add_task(label, total=total, unit=unit)

    def advance(self, done: int) -> None:
        if self.task is not None:
            self.bar.update(self.task, completed=done)

    def remark(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one command has to show."""

    document: dict[str, Any]
    """What --json prints and the .json file holds."""
    texts: Mapping[str, str]
    """Suffix -> text of the other files beside it, such as csv."""
    figure: "Callable[[], Figure] | None"
    """Draws the figure, where the command has one."""
    show: Callable[[Console], None]
    """Prints the short table."""
    faults: Sequence[str] = ()
    """Why layers have no numbers; they make the exit code 1."""


def publish(stem: str, options: "Shared | Deciding", work: Callable[[Terminal], Report], *, texts: Sequence[str] = ("csv",), has_figure: bool = True) -> None:
    """Sees to it that the output can be written, lets `work` compute, writes figure, texts and document together, and shows them."""
    asked = options.format if has_figure else ()  # type: ignore[union-attr]  # what draws no figure has no such option
    formats = (list(dict.fromkeys(format.value for format in asked or ())) or ["png"]) if has_figure else []
    folder = OutputFolder(options.out, force=options.force)
    folder.prepare(stem, [*formats, *texts, "json"])
    with Terminal(quiet=options.quiet) as terminal:
        report = work(terminal)
        document = tables.json_text(report.document)
        files = {suffix: text.encode() for suffix, text in report.texts.items()} | {"json": document.encode()}
        if report.figure is not None:
            figure = report.figure()
            files = {suffix: figure_bytes(figure, suffix) for suffix in formats} | files
        written = folder.save(stem, files)
        terminal.bar.stop()  # results stand in its place, not beside it
        if options.json:
            sys.stdout.write(document)
        else:
            report.show(PlainConsole())
        terminal.remark("Wrote " + ", ".join(map(str, written)))
    if report.faults:
        raise HeadrankError("\n".join(report.faults))


def run(command: str, options: "Shared", *, null: bool = False, is_relative: bool = False) -> None:
    """Carries out heatmap, spectra, variance or effrank."""
    settings = settings_of(options, null=null)

    def work(terminal: Terminal) -> Report:
        refs = choose_models(options, figure=command, largest_only=command != "effrank", remark=terminal.remark)
        results = replace(collect(command, refs, options, settings, terminal, is_centered=options.centered), is_relative=is_relative)
        return Report(
            document=tables.document(results),
            texts={"csv": tables.csv_text(results)},
            figure=lambda: draw(results),
            show=lambda console: tables.render(results, console),
            faults=results.faults,
        )

    publish(command, options, work)


def run_compare(options: "Shared", *, null: bool) -> None:
    """Carries out effrank --compare: uncentred and centred side by side."""
    settings = settings_of(options, null=null)

    def work(terminal: Terminal) -> Report:
        refs = choose_models(options, figure="effrank", largest_only=False, remark=terminal.remark)
        plain, centered = _both(refs, options, settings, terminal)
        from headrank.figures import compare_figure

        def show(console: Console) -> None:
            for name, results in (("Uncentred", plain), ("Centred", centered)):
                console.print(name)
                tables.render(results, console)

        return Report(
            document={"schema": tables.SCHEMA, "command": "effrank-compare", "uncentered": tables.document(plain), "centered": tables.document(centered)},
            texts={"csv": tables.csv_text(plain, centered)},
            figure=lambda: compare_figure(plain, centered),
            show=show,
            faults=plain.faults,
        )

    publish("effrank-compare", options, work)


def run_steps(options: "Shared") -> None:
    """Carries out effrank --steps: the mean effective rank against the tokens seen in training."""
    settings = settings_of(options)

    def work(terminal: Terminal) -> Report:
        refs = choose_models(options, figure="effrank", largest_only=False, remark=terminal.remark)
        runs, firsts, faults = [], [], []
        for ref in refs:
            results = collect("effrank", step_refs(ref), options, settings, terminal, is_centered=options.centered)
            runs.append(as_run(ref, results.models))
            firsts.append(replace(results.models[0], label=ref.label))
            faults += results.faults
        shared = replace(results, models=tuple(firsts))
        document = {**tables.document(shared), "command": "effrank-steps", "runs": [run_document(run) for run in runs]}
        del document["models"]
        lines = run_rows(runs)
        from headrank.figures import steps_figure

        return Report(
            document=document,
            texts={"csv": tables.csv_lines(lines)},
            figure=lambda: steps_figure(runs, shared),
            show=lambda console: tables.print_cells(*steps_cells(runs), console),
            faults=faults,
        )

    publish("effrank-steps", options, work)


def run_table(options: "Shared", *, null: bool) -> None:
    """Carries out table: a row a model, uncentred and centred."""
    settings = settings_of(options, null=null)

    def work(terminal: Terminal) -> Report:
        refs = choose_models(options, figure="effrank", largest_only=False, remark=terminal.remark)
        plain, centered = _both(refs, options, settings, terminal)
        rows = summary.summary_rows(plain, centered)
        document = tables.document(plain)
        document = {**document, "command": "table", "models": [summary.row_document(row) for row in rows]}
        del document["centered"]
        columns, cells = summary.cells(rows)
        return Report(
            document=document,
            texts={"csv": tables.csv_lines([columns, *cells]), "md": summary.markdown(rows), "tex": summary.latex(rows)},
            figure=None,
            show=lambda console: tables.print_cells(columns, cells, console),
            faults=plain.faults,
        )

    publish("table", options, work, texts=("csv", "md", "tex"), has_figure=False)


def run_measure(options: "Shared", *, output: Path, null: bool) -> None:
    """Carries out measure: one model's measurement as a file that travels."""
    settings = settings_of(options, null=null)
    if output.is_dir() or not output.parent.is_dir():
        raise HeadrankError(f"{output}: not a file in a folder that exists; give -o FILE")
    if output.exists() and not is_measurement(output) and not options.force:
        raise HeadrankError(f"{output}: not written by headrank\nMove it, give another name with -o, or pass --force to replace it")
    with Terminal(quiet=options.quiet) as terminal:
        refs = choose_models(options, figure="effrank", largest_only=False, remark=terminal.remark)
        if len(refs) != 1:
            raise HeadrankError(f"measure takes one model, not {len(refs)}; give its path")
        measurement = measure(refs[0], settings, layers=_asked(options) or all_layers, store=Store.default(), progress=terminal)
        try:
            write_measurement(measurement, output)
        except OSError as error:
            raise HeadrankError(f"{output}: cannot be written: {error.strerror}") from None
        terminal.remark(f"Wrote {output}")
    if measurement.faults:
        raise HeadrankError("\n".join(measurement.faults.values()))


def run_inspect(path: str, reading: Reading, *, explain: bool, as_json: bool) -> None:
    """Carries out inspect: what a checkpoint is, from its headers alone."""
    from headrank import inspection

    checkpoint, architecture = reading.open(path)
    known = inspection.facts(checkpoint, architecture)
    entries = list(inspection.explanation(architecture)) if explain else []
    if as_json:
        sys.stdout.write(tables.json_text({"schema": tables.SCHEMA, "command": "inspect", **known} | ({"explanation": entries} if explain else {})))
        return
    console = PlainConsole()
    tables.print_facts(inspection.fact_lines(known), console)
    if explain:
        tables.print_cells(*inspection.explanation_cells(entries), console)


def settings_of(options: "Shared", *, null: bool = False) -> Settings:
    """The part of the options that decides numbers."""
    config = [path for path in options.config or () if path.suffix == ".json"]
    return Settings(
        reading=Reading(config=config[0] if config else None, layout=options.layout, adapter=options.adapter, step=options.step, part=options.part.value),
        source=options.source.value,
        raw=options.raw,
        mla_part=options.mla_part.value,
        measure=options.measure.value,
        rope_offset=options.rope_offset,
        rope_mean=options.rope_mean,
        center=options.center,
        text=tuple(options.text or ()),
        tokens=tuple(options.tokens or ()),
        seq_len=options.seq_len,
        n_sequences=options.sequences,
        seed=options.seed,
        skip_first=options.skip_first,
        batch_size=options.batch_size,
        device=options.device.value,
        dtype=options.dtype.value,
        null=null,
    )


def choose_models(options: "Shared | Deciding", *, figure: str, largest_only: bool, remark: Callable[[str], None]) -> list[ModelRef]:
    """The models that the options name, or the families on disk."""
    if options.models and options.scales:
        raise HeadrankError("give models or --scales, not both")
    if options.models:
        return named_models(options.models)
    folder = checkpoints_folder(options.checkpoints)
    return family_models(
        options.scales or (),
        figure=figure,
        largest_only=largest_only,
        folder=folder,
        configs=[path for path in options.config or () if path.suffix != ".json"],
        remark=remark,
    )


def _asked(options: "Shared") -> LayerChoice | None:
    """The layers given with --layer, or None."""
    asked = tuple(options.layer or ())
    return (lambda layers: asked) if asked else None


def _circuit(options: "Shared", settings: Settings) -> str:
    circuit = circuit_of(settings.measure, options.circuit and options.circuit.value)
    if circuit != "qk" and (settings.rope_offset or settings.rope_mean is not None):
        raise HeadrankError(f"--rope-offset and --rope-mean turn keys towards queries, and circuit {circuit} has none; leave them out, or take --circuit qk")
    return circuit


def collect(command: str, refs: Sequence[ModelRef], options: "Shared", settings: Settings, terminal: Terminal, *, is_centered: bool) -> Results:
    """Measures the models, one after the other. Without --layer all layers are measured, so that the next command finds them."""
    asked = _asked(options)
    circuit = _circuit(options, settings)
    store = Store.default()
    models = []
    for ref in refs:
        measurement = measure(ref, settings, layers=asked or all_layers, store=store, progress=terminal)
        shown = resolve_layers((asked or SHOWN_LAYERS[command])(measurement.layers), measurement.layers, label=ref.label)
        models.append(model_result(measurement, gram_name(settings.measure, circuit), shown, label=ref.label, scale=ref.scale, is_centered=is_centered))
    shared = {"raw": settings.raw} if settings.source == "weights" else {"center": settings.center, "skip_first": settings.skip_first}
    shared |= form_of(settings)
    return Results(command=command, source=settings.source, circuit=circuit, is_centered=is_centered, settings=shared, models=tuple(models))


def _both(refs: Sequence[ModelRef], options: "Shared", settings: Settings, terminal: Terminal) -> tuple[Results, Results]:
    """The effective ranks of all layers, uncentred and centred."""
    plain = collect("effrank", refs, options, settings, terminal, is_centered=False)
    return plain, collect("effrank", refs, options, settings, terminal, is_centered=True)


def draw(results: Results) -> "Figure":
    """The figure of a command's results."""
    from headrank import figures

    functions = {
        "heatmap": figures.heatmap_figure,
        "spectra": figures.spectra_figure,
        "variance": figures.variance_figure,
        "effrank": figures.effrank_figure,
    }
    return functions[results.command](results)
