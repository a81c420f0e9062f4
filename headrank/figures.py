"""Results -> matplotlib figures, laid out as in arXiv 2601.11471 (Figs. 6, 7, 10 and 16). Nothing here saves a file.

Figures are made with matplotlib.figure.Figure: no pyplot, so no display, no backend and no state that outlives them.
"""

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from headrank.results import LayerResult, ModelResult, Results

MAX_COLUMNS = 6
MAX_LEGEND = 8  # entries that a panel has room for; more stand below the panels
MAX_MARKED = 40  # points of a line that are told apart; of more, only lone ones are marked
COLORS = tuple(f"C{i}" for i in range(10))
DASHES = ("-", "-.", ":")  # for the second and third ten of lines; -- is the line at 1
# Matplotlib's own look, whatever a user's matplotlibrc says; and a dollar sign in a label starts no formula.
STYLE: Any = ["default", {"text.parse_math": False}]


@style.context(STYLE)
def heatmap_figure(results: Results) -> Figure:
    """Similarity of the heads, a panel a model and layer, side by side; dead heads are hatched."""
    panels = [(model, layer) for model in results.models for layer in model.layers]
    n_rows = -(-len(panels) // MAX_COLUMNS)
    n_columns = -(-len(panels) // n_rows)
    figure = Figure(figsize=(max(3.5 * n_columns, 5.0), 3.5 * n_rows + 0.9), layout="constrained")
    layers = {layer.facts.key for _, layer in panels}
    scales = {model.scale for model, _ in panels}
    where = f", Layer {next(iter(layers))}" if len(layers) == 1 else ""
    _title(figure, f"Head Similarity Matrices{where}{_in_brackets(scales)}")
    for number, (model, layer) in enumerate(panels):
        ax = figure.add_subplot(n_rows, n_columns, number + 1)
        name = f"{model.label} ({model.scale})" if len(scales) > 1 and model.scale else model.label
        ax.set_title(_wrapped(name if len(layers) == 1 else f"{name}, L={layer.facts.key}", 32), fontsize=11)
        _draw_similarity(ax, layer)
    _caption(figure, results, is_centered=False)
    return figure


def _draw_similarity(ax: Axes, layer: LayerResult) -> None:
    if layer.similarity is None:
        ax.set_xticks([])
        ax.set_yticks([])
        ax.set_box_aspect(1)
        ax.text(0.5, 0.5, _wrapped(layer.reason or "no numbers", 30), ha="center", va="center", fontsize=9, color="0.3", transform=ax.transAxes)
        return
    H = layer.facts.n_head
    image = ax.imshow(layer.similarity, cmap="RdYlBu_r", vmin=-1, vmax=1, interpolation="nearest")
    for head in layer.dead_heads:
        for corner, width, height in (((-0.5, head - 0.5), H, 1), ((head - 0.5, -0.5), 1, H)):
            ax.add_patch(Rectangle(corner, width, height, facecolor="0.92", edgecolor="0.5", hatch="////", linewidth=0))
    ticks = range(0, H, _tick_step(H))
    ax.set_xticks(ticks)
    ax.set_yticks(ticks)
    ax.set_xlabel("Head Index")
    ax.set_ylabel("Head Index")
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.046, pad=0.04)
    bar.ax.tick_params(labelsize=8)


def _tick_step(n_head: int) -> int:
    """2, as in the paper, doubled until no more than 12 ticks are left."""
    step = 2
    while n_head > 12 * step:
        step *= 2
    return step


@style.context(STYLE)
def spectra_figure(results: Results) -> Figure:
    """Eigenvalues in descending order, a panel a layer and a line a model; a row of panels a scale."""
    rows = _by_scale(results)
    n_columns = max(len(model.layers) for model in results.models)
    figure = Figure(figsize=(4.6 * n_columns + 0.4, 3.9 * len(rows) + 0.8), layout="constrained")
    kind = "PCA Eigenvalue Spectra" if results.is_centered else "Eigenvalue Spectra"
    _title(figure, f"{kind} of Head Similarity Matrices{_in_brackets(rows)}")
    colors = _line_styles(results)
    for row, (scale, models) in enumerate(rows.items()):
        for column in range(n_columns):
            panel = [(model, model.layers[column]) for model in models if column < len(model.layers)]
            if not panel:
                continue
            ax = figure.add_subplot(len(rows), n_columns, row * n_columns + column + 1)
            name = _layer_name(models, column)
            ax.set_title(f"{scale}: {name}" if scale and len(rows) > 1 else name, fontsize=11)
            for model, layer in panel:
                label = model.label if layer.eigenvalues is not None else f"{model.label} (no numbers)"
                values = np.array([]) if layer.eigenvalues is None else layer.eigenvalues
                _draw_line(ax, np.arange(1, len(values) + 1), values, label, colors[model.label])
            ax.set_xlabel("PC Index" if results.is_centered else "Eigenvalue Index")
            ax.set_ylabel("Variance (PCA Eigenvalue)" if results.is_centered else "Eigenvalue")
            ax.set_ylim(bottom=0)
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            ax.grid(alpha=0.3)
    _legends(figure, "upper right")
    _caption(figure, results, is_centered=results.is_centered)
    return figure


def _layer_name(models: Sequence[ModelResult], column: int) -> str:
    """Early, middle or late where the models' layers are just these, else the layer's index."""
    thirds = [(0, model.model.n_layer // 2, model.model.n_layer - 1) for model in models]
    is_usual = all(tuple(layer.facts.index for layer in model.layers) == third for model, third in zip(models, thirds, strict=True))
    keys = dict.fromkeys(model.layers[column].facts.key for model in models if column < len(model.layers))
    place = f"L={', '.join(keys)}"
    return f"{('Early', 'Middle', 'Late')[column]} Layer ({place})" if is_usual else f"Layer {place}"


@style.context(STYLE)
def effrank_figure(results: Results) -> Figure:
    """Effective rank against layer, a panel a scale and a line a model, with a gap where it is undefined."""
    panels = _by_scale(results)
    figure = Figure(figsize=(max(6.2 * len(panels), 6.8), 5.0), layout="constrained")
    _title(figure, f"Effective Rank of {'Centred ' if results.is_centered else ''}Head Similarity Matrices")
    colors = _line_styles(results)
    for number, (scale, models) in enumerate(panels.items()):
        ax = figure.add_subplot(1, len(panels), number + 1)
        ax.set_title(scale or ("Given by path" if len(panels) > 1 else ""), fontsize=11)
        for name, layers in _stacks(models):
            ranks = np.array([np.nan if layer.effective_rank is None else layer.effective_rank for layer in layers])
            label = f"{name} (undefined)" if np.isnan(ranks).all() else name
            _draw_line(ax, np.array([layer.facts.index for layer in layers]), ranks, label, colors[name])
        ax.axhline(1, color="grey", linestyle="--", linewidth=1.2, label="Fully redundant")
        ax.set_xlabel("Layer")
        ax.set_ylabel("Effective Rank")
        ax.set_ylim(bottom=0)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(alpha=0.3)
    _legends(figure, "lower left")
    _caption(figure, results, is_centered=results.is_centered)
    return figure


def _stacks(models: Sequence[ModelResult]) -> list[tuple[str, list[LayerResult]]]:
    """Each model's line, or one a stack where a model has several (encoder, decoder, cross)."""
    lines: dict[str, list[LayerResult]] = {}
    for model in models:
        several = len({layer.facts.group for layer in model.layers}) > 1
        for layer in model.layers:
            lines.setdefault(f"{model.label} ({layer.facts.group})" if several else model.label, []).append(layer)
    return list(lines.items())


def _by_scale(results: Results) -> dict[str | None, list[ModelResult]]:
    """Models a scale, in their order; those without a scale together."""
    scales: dict[str | None, list[ModelResult]] = {}
    for model in results.models:
        scales.setdefault(model.scale, []).append(model)
    return scales


def _line_styles(results: Results) -> dict[str, tuple[str, str]]:
    """(colour, dashes) of each line: matplotlib's cycle in the order of first appearance, so that a label keeps its colour across panels."""
    names = dict.fromkeys([model.label for model in results.models] + [name for name, _ in _stacks(results.models)])
    return {name: (COLORS[i % len(COLORS)], DASHES[i // len(COLORS) % len(DASHES)]) for i, name in enumerate(names)}


def _draw_line(ax: Axes, x: np.ndarray, y: np.ndarray, label: str, look: tuple[str, str]) -> None:
    gap = np.isnan(np.concatenate([[np.nan], y, [np.nan]]))
    marked = np.flatnonzero(gap[:-2] & gap[2:] | (len(x) <= MAX_MARKED))
    ax.plot(x, y, label=label, color=look[0], linestyle=look[1], linewidth=1.5, marker="o", markersize=3, markevery=marked.tolist())


def _legends(figure: Figure, place: Literal["upper right", "lower left"]) -> None:
    """A legend a panel where there is room, else one below all panels."""
    if max(len(ax.lines) for ax in figure.axes) <= MAX_LEGEND:
        for ax in figure.axes:
            ax.legend(ax.lines, [_wrapped(str(line.get_label()), 32) for line in ax.lines], loc=place, fontsize=8)
    else:
        lines = {_wrapped(str(line.get_label()), 32): line for ax in figure.axes for line in ax.lines}
        n_columns = max(1, int(figure.get_figwidth() // 2.4))
        figure.legend(lines.values(), lines, loc="outside lower center", ncols=n_columns, fontsize=8)


def _title(figure: Figure, text: str) -> None:
    figure.suptitle(_wrapped(text, int(figure.get_figwidth() * 9)), fontsize=13)


def _in_brackets(scales: Iterable[str | None]) -> str:
    named = [scale for scale in scales if scale]
    return f" ({', '.join(named)})" if named else ""


def _caption(figure: Figure, results: Results, *, is_centered: bool) -> None:
    """A light line at the bottom that says what was measured."""
    matrix = "similarity matrix centred" if is_centered else "similarity matrix not centred"
    parts = [f"source: {results.source}", f"circuit: {results.circuit.upper()}", matrix]
    fed = [model.tokens for model in results.models if model.tokens]
    if fed:
        first = fed[0]
        text = f"{first['n_sequences']} × {first['seq_len']} tokens of {first['source']}"
        parts.append(text if all(tokens == first for tokens in fed) else "tokens differ by model")
    text = _wrapped(" · ".join(parts), int(figure.get_figwidth() * 15))
    figure.supxlabel(text, x=0.01, ha="left", fontsize=8, color="0.45")


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width)) or text
