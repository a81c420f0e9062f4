"""What the commands do, from options to files: choose models, measure them, show and save the results."""

import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from headrank import tables
from headrank.errors import HeadrankError
from headrank.measure import LayerChoice, Settings, all_layers, measure
from headrank.output import OutputFolder, figure_bytes
from headrank.results import Results, model_result
from headrank.selection import ModelRef, checkpoints_folder, early_middle_late, family_models, middle_layer, named_models, resolve_layers
from headrank.store import Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headrank.cli import Shared

SHOWN_LAYERS: dict[str, LayerChoice] = {
    "heatmap": lambda layers: [middle_layer(layers)],
    "spectra": early_middle_late,
    "effrank": all_layers,
}


class Terminal:
    """Progress and remarks on stderr; nothing where quiet. The bar is drawn on terminals alone."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self.console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False, emoji=False)
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


def run(command: str, options: "Shared") -> None:
    """Carries out heatmap, spectra or effrank."""
    settings = settings_of(options)
    formats = list(dict.fromkeys(format.value for format in options.format or ())) or ["png"]
    folder = OutputFolder(options.out, force=options.force)
    folder.prepare(command, [*formats, "csv", "json"])
    with Terminal(quiet=options.quiet) as terminal:
        refs = choose_models(options, figure=command, largest_only=command != "effrank", remark=terminal.remark)
        results = collect(command, refs, options, settings, terminal)
        document = tables.json_text(tables.document(results))
        figure = draw(results)
        files = {suffix: figure_bytes(figure, suffix) for suffix in formats} | {"csv": tables.csv_text(results).encode(), "json": document.encode()}
        written = folder.save(command, files)
        if options.json:
            sys.stdout.write(document)
        else:
            tables.render(results, Console(markup=False, highlight=False, emoji=False))
        terminal.remark("Wrote " + ", ".join(map(str, written)))
    if results.faults:
        raise HeadrankError("\n".join(results.faults))


def settings_of(options: "Shared") -> Settings:
    """The part of the options that decides numbers."""
    return Settings(
        source=options.source.value,
        raw=options.raw,
        mla_part=options.mla_part.value,
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
    )


def choose_models(options: "Shared", *, figure: str, largest_only: bool, remark: Callable[[str], None]) -> list[ModelRef]:
    """The models that the options name, or the families on disk."""
    if options.models and options.scales:
        raise HeadrankError("give models or --scales, not both")
    if options.models:
        return named_models(options.models)
    folder = checkpoints_folder(options.checkpoints)
    return family_models(options.scales or (), figure=figure, largest_only=largest_only, folder=folder, configs=options.config or (), remark=remark)


def collect(command: str, refs: Sequence[ModelRef], options: "Shared", settings: Settings, terminal: Terminal) -> Results:
    """Measures the models, one after the other. Without --layer all layers are measured, so that the next command finds them."""
    asked = tuple(options.layer or ())
    store = Store.default()
    models = []
    for ref in refs:
        measurement = measure(ref, settings, layers=(lambda layers: asked) if asked else all_layers, store=store, progress=terminal)
        shown = resolve_layers(asked or SHOWN_LAYERS[command](measurement.layers), measurement.layers, label=ref.label)
        models.append(model_result(measurement, options.circuit.value, shown, label=ref.label, scale=ref.scale, is_centered=options.centered))
    shared = {"raw": settings.raw} if settings.source == "weights" else {"center": settings.center, "skip_first": settings.skip_first}
    return Results(command=command, source=settings.source, circuit=options.circuit.value, is_centered=options.centered, settings=shared, models=tuple(models))


def draw(results: Results) -> "Figure":
    """The figure of a command's results."""
    from headrank import figures

    return {"heatmap": figures.heatmap_figure, "spectra": figures.spectra_figure, "effrank": figures.effrank_figure}[results.command](results)
