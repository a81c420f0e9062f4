"""Results -> matplotlib figures, laid out as in arXiv 2601.11471 (Figs. 6, 7, 10 and 16). Nothing here saves a file.

Figures are made with matplotlib.figure.Figure: no pyplot, so no display, no backend and no state that outlives them.
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.patches import Rectangle
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter

from headrank.dynamics import Run
from headrank.output import without_glyph_warnings
from headrank.results import LayerResult, ModelResult, Results

T = TypeVar("T")

# Matplotlib's own look, whatever a user's matplotlibrc says; and a dollar sign in a label starts no formula.
STYLE: Any = ["default", {"text.parse_math": False}]
COLORS = tuple(f"C{i}" for i in range(10))
REDUNDANT = "Fully redundant"
DASHES = ("-", "-.", ":")  # for the second and third ten of lines; -- is the line at 1
MAX_LEGEND = 8  # entries that a panel has room for; more stand beside the panels
MAX_MARKED = 40  # points of a line that are told apart; of more, only lone ones are marked


@style.context(STYLE)
def heatmap_figure(results: Results) -> Figure:
    """Similarity of the heads, a panel a model and layer, side by side, a scale below the other; dead heads are hatched."""
    grid = _rows([[(model, layer) for model in models for layer in model.layers] for models in _by_scale(results).values()], 6)
    n_columns = max(map(len, grid))
    figure = Figure(figsize=(max(3.4 * n_columns, 4.6), (2.8 if n_columns > 1 else 3.3) * len(grid) + 0.85), layout="compressed")
    layers = {layer.facts.key for row in grid for _, layer in row}
    scales = _by_scale(results)
    where = f", Layer {next(iter(layers))}" if len(layers) == 1 else ""
    figure_title(figure, f"Head Similarity Matrices{where}{_in_brackets(scales)}")
    for r, row in enumerate(grid):
        for c, (model, layer) in enumerate(row):
            ax = figure.add_subplot(len(grid), n_columns, r * n_columns + c + 1)
            name = f"{model.label} ({model.scale})" if len(scales) > 1 and model.scale else model.label
            ax.set_title(wrapped(name if len(layers) == 1 else f"{name}, L={layer.facts.key}", 32), fontsize=11)
            _draw_similarity(ax, layer)
    _caption(figure, results, is_centered=False)
    return figure


def _draw_similarity(ax: Axes, layer: LayerResult) -> None:
    H = layer.facts.n_head
    S = np.full((H, H), np.nan) if layer.similarity is None else layer.similarity
    image = ax.imshow(S, cmap="RdYlBu_r", vmin=-1, vmax=1, interpolation="nearest")
    if layer.similarity is None:
        ax.text(0.5, 0.5, wrapped(layer.reason or "no numbers", 30), ha="center", va="center", fontsize=9, transform=ax.transAxes)
    for head in layer.dead_heads:
        for corner, width, height in (((-0.5, head - 0.5), H, 1), ((head - 0.5, -0.5), 1, H)):
            ax.add_patch(Rectangle(corner, width, height, facecolor="0.92", edgecolor="0.5", hatch="////", linewidth=0))
    ticks = range(0, H, _tick_step(H))
    ax.set_xticks(ticks)
    ax.set_yticks(ticks)
    ax.set_xlabel("Head Index")
    ax.set_ylabel("Head Index")
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.05, pad=0.04)
    bar.ax.tick_params(labelsize=8)


def _tick_step(n_head: int) -> int:
    """2, as in the paper, doubled until no more than 12 ticks are left; 1 where every head has room."""
    step = 1 if n_head <= 4 else 2
    while n_head > 12 * step:
        step *= 2
    return step


@style.context(STYLE)
def spectra_figure(results: Results) -> Figure:
    """Eigenvalues in descending order, a panel a layer and a line a model; a row of panels a scale."""
    kind = "PCA Eigenvalue Spectra" if results.is_centered else "Eigenvalue Spectra"
    return _layers_figure(
        results,
        "eigenvalues",
        title=f"{kind} of Head Similarity Matrices",
        xlabel="PC Index" if results.is_centered else "Eigenvalue Index",
        ylabel="Variance (PCA Eigenvalue)" if results.is_centered else "Eigenvalue",
    )


def _layers_figure(results: Results, quantity: str, *, title: str, xlabel: str, ylabel: str, line_at: float | None = None) -> Figure:
    """A curve over the index of eigenvalues, a panel a layer and a line a model; a row of panels a scale."""
    scales = _by_scale(results)
    grid = _rows([[(models, place) for place in range(max(len(model.layers) for model in models))] for models in scales.values()], 4)
    n_columns = max(map(len, grid))
    figure = Figure(figsize=(max(4.6 * n_columns, 5.2), 3.9 * len(grid) + 0.8), layout="constrained")
    figure_title(figure, f"{title}{_in_brackets(scales)}")
    looks = _looks(results)
    for r, row in enumerate(grid):
        for c, (models, place) in enumerate(row):
            ax = figure.add_subplot(len(grid), n_columns, r * n_columns + c + 1)
            name = _layer_name(models, place)
            ax.set_title(f"{models[0].scale}: {name}" if models[0].scale and len(scales) > 1 else name, fontsize=11)
            for model in models:
                if place < len(model.layers):
                    values = getattr(model.layers[place], quantity)
                    label = model.label if values is not None else f"{model.label} (no numbers)"
                    y = np.array([]) if values is None else values
                    x = np.arange(1, len(y) + 1)
                    draw_line(ax, x, y, label, looks[model.label])
                    shade(ax, x, model.layers[place].intervals.get(quantity), looks[model.label])
            if line_at is not None:
                ax.axhline(line_at, color="grey", linestyle="--", linewidth=1.2, label=f"{100 * line_at:.0f} %")
            ax.set_xlabel(xlabel)
            ax.set_ylabel(ylabel)
            _set_limits(ax, 1, max(model.model.n_head for model in models))
    _legends(figure, "upper right" if line_at is None else "lower right")
    _caption(figure, results, is_centered=results.is_centered)
    return figure


def _layer_name(models: Sequence[ModelResult], place: int) -> str:
    """Early, middle or late where the models' layers are just these, else the layer's index."""
    is_usual = all([layer.facts.index for layer in model.layers] == [0, model.model.n_layer // 2, model.model.n_layer - 1] for model in models)
    keys = dict.fromkeys(model.layers[place].facts.key for model in models if place < len(model.layers))
    where = f"L={', '.join(keys)}"
    return f"{('Early', 'Middle', 'Late')[place]} Layer ({where})" if is_usual else f"Layer {where}"


@style.context(STYLE)
def effrank_figure(results: Results) -> Figure:
    """Effective rank against layer, a panel a scale and a line a model, with a gap where it is undefined."""
    if results.is_relative:  # all in one panel, so a label that two scales have is told apart
        several = len(_by_scale(results)) > 1
        named = (replace(model, label=f"{model.label} ({model.scale})" if several and model.scale else model.label, scale=None) for model in results.models)
        results = replace(results, models=tuple(named))
    scales = _by_scale(results)
    grid = _rows([list(scales.items())], 3)
    n_columns = max(map(len, grid))
    figure = Figure(figsize=(max(6.2 * n_columns, 6.8), 4.4 * len(grid) + 0.6), layout="constrained")
    figure_title(figure, f"Effective Rank of {'Centred ' if results.is_centered else ''}Head Similarity Matrices")
    looks = _looks(results)
    for r, row in enumerate(grid):
        for c, (scale, models) in enumerate(row):
            ax = figure.add_subplot(len(grid), n_columns, r * n_columns + c + 1)
            ax.set_title(scale or ("Given by path" if len(scales) > 1 else ""), fontsize=11)
            _draw_ranks(ax, models, looks, is_relative=results.is_relative)
    _legends(figure, "lower left")
    _caption(figure, results, is_centered=results.is_centered)
    return figure


@style.context(STYLE)
def compare_figure(plain: Results, centered: Results) -> Figure:
    """Effective rank of S | of centred S against layer, each with its own axis; a row a scale (Figs. 14 and 15)."""
    scales = _by_scale(plain)
    figure = Figure(figsize=(12.4, 4.4 * len(scales) + 0.6), layout="constrained")
    figure_title(figure, f"Effective Rank, Uncentred and Centred{_in_brackets(scales)}")
    looks = _looks(plain)
    for r, scale in enumerate(scales):
        for c, (results, name) in enumerate(((plain, "Uncentred"), (centered, "Centred"))):
            ax = figure.add_subplot(len(scales), 2, 2 * r + c + 1)
            ax.set_title(f"{scale}: {name}" if scale and len(scales) > 1 else name, fontsize=11)
            _draw_ranks(ax, _by_scale(results)[scale], looks)
    _legends(figure, "lower left")
    _caption(figure, plain, is_centered=None)
    return figure


@style.context(STYLE)
def steps_figure(runs: Sequence[Run], results: Results) -> Figure:
    """Mean effective rank over layers against the tokens seen in training, a line a run; a panel a scale. results: the first steps'."""
    scales = list(dict.fromkeys(run.scale for run in runs))
    figure = Figure(figsize=(max(6.2 * len(scales), 6.8), 5.0), layout="constrained")
    figure_title(figure, f"Effective Rank of {'Centred ' if results.is_centered else ''}Head Similarity Matrices in Training")
    looks = _looks(results)
    for place, scale in enumerate(scales):
        ax = figure.add_subplot(1, len(scales), place + 1)
        ax.set_title(scale or "", fontsize=11)
        shown = [run for run in runs if run.scale == scale]
        for run in shown:
            tokens = np.array(run.tokens)
            means = [step.mean("effective_rank") for step in run.steps]
            draw_line(ax, tokens, np.array([np.nan if mean is None else mean for mean in means]), run.label, looks[run.label])
            shade(ax, tokens, np.array([step.mean_interval("effective_rank") or (np.nan, np.nan) for step in run.steps]), looks[run.label])
        ax.axhline(1, color="grey", linestyle="--", linewidth=1.2, label=REDUNDANT)
        seen = [tokens for run in shown for tokens in run.tokens]
        ax.set_xscale("log" if min(seen) > 0 and max(seen) > 20 * min(seen) else "linear")
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))  # a log axis labels by formula, which STYLE does not parse
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.3)
        ax.set_xlabel("Training Tokens")
        ax.set_ylabel("Mean Effective Rank")
    _legends(figure, "lower left")
    _caption(figure, results, is_centered=results.is_centered)
    return figure


def _draw_ranks(ax: Axes, models: Sequence[ModelResult], looks: dict[str, tuple[str, str]], *, is_relative: bool = False) -> None:
    """A line a model, its interval shaded, the null's range dotted. Relative: depth from 0 to 1, rank as a fraction of the heads."""
    for name, model, layers in _stacks(models):
        x = np.array([model.depth(layer) if is_relative else layer.facts.index for layer in layers])
        share = np.array([layer.facts.n_head if is_relative else 1 for layer in layers])
        ranks = np.array([np.nan if layer.effective_rank is None else layer.effective_rank for layer in layers]) / share
        label = f"{name} (undefined)" if np.isnan(ranks).all() else name
        draw_line(ax, x, ranks, label, looks[name])
        shade(ax, x, np.array([layer.interval or (np.nan, np.nan) for layer in layers]) / share[:, None], looks[name])
        if model.null is not None:
            ends_of_null = np.array([model.null.low, model.null.high]) / share.max()
            ax.hlines(ends_of_null, 0, 1, transform=ax.get_yaxis_transform(), color=looks[name][0], linestyle=":", linewidth=1)
    if is_relative:  # full redundancy is 1/H, another height for each number of heads
        ax.set_xlabel("Relative Depth")
        ax.set_ylabel("Effective Rank / Heads")
        ax.set_xlim(-0.03, 1.03)
        ax.set_ylim(0, 1.05)
        ax.grid(alpha=0.3)
        return
    ax.axhline(1, color="grey", linestyle="--", linewidth=1.2, label=REDUNDANT)
    ax.set_xlabel("Layer")
    ax.set_ylabel("Effective Rank")
    _set_limits(ax, 0, max(layer.facts.index for model in models for layer in model.layers))


@style.context(STYLE)
def variance_figure(results: Results) -> Figure:
    """Cumulative variance explained against the number of components, a panel a layer, with the 90 % line (Figs. 12 and 13)."""
    return _layers_figure(
        results,
        "cumulative_variance",
        title="Cumulative Variance Explained",
        line_at=0.9,
        xlabel="Number of PCs",
        ylabel="Cumulative Variance Explained",
    )


def _stacks(models: Sequence[ModelResult]) -> list[tuple[str, ModelResult, list[LayerResult]]]:
    """Each model's line, or one a stack where a model has several (encoder, decoder, cross)."""
    lines = []
    for model in models:
        groups = dict.fromkeys(layer.facts.group for layer in model.layers)
        for group in groups:
            name = f"{model.label} ({group})" if len(groups) > 1 else model.label
            layers = [layer for layer in model.layers if layer.facts.group == group]
            lines.append((name, model, sorted(layers, key=lambda layer: layer.facts.index)))
    return lines


def _by_scale(results: Results) -> dict[str | None, list[ModelResult]]:
    """Models a scale, in their order; those without a scale together."""
    scales: dict[str | None, list[ModelResult]] = {}
    for model in results.models:
        scales.setdefault(model.scale, []).append(model)
    return scales


def _rows(groups: Iterable[Sequence[T]], limit: int) -> list[list[T]]:
    """Each group of panels in rows of its own, as even as can be and no longer than `limit`."""
    rows = []
    for group in groups:
        n_rows = -(-len(group) // limit)
        length = -(-len(group) // n_rows)
        rows += [list(group[start : start + length]) for start in range(0, len(group), length)]
    return rows


def _looks(results: Results) -> dict[str, tuple[str, str]]:
    """(colour, dashes) of each line: matplotlib's cycle in the order of first appearance, so that a label looks the same in all panels."""
    names = dict.fromkeys([name for name, _, _ in _stacks(results.models)] + [model.label for model in results.models])
    return {name: (COLORS[i % len(COLORS)], DASHES[i // len(COLORS) % len(DASHES)]) for i, name in enumerate(names)}


def draw_line(ax: Axes, x: np.ndarray, y: np.ndarray, label: str, look: tuple[str, str]) -> None:
    """A line with a gap where y is NaN, its points marked where there are few or where one stands alone. look: colour and dashes."""
    gap = np.isnan(np.concatenate([[np.nan], y, [np.nan]]))
    marked = np.flatnonzero(gap[:-2] & gap[2:] | (len(x) <= MAX_MARKED))
    color, dashes = look
    ax.plot(x, y, label=label, color=color, linestyle=dashes, linewidth=1.5, marker="o", markersize=3, markevery=marked.tolist())


def shade(ax: Axes, x: np.ndarray, ends: np.ndarray | None, look: tuple[str, str]) -> None:
    """Shades the intervals [n, 2] of a line's points."""
    if ends is not None and not np.isnan(ends).all():
        ax.fill_between(x, ends[:, 0], ends[:, 1], color=look[0], alpha=0.2, linewidth=0)


def _set_limits(ax: Axes, first: int, last: int) -> None:
    """Whole numbers from first to last across, with no room for a tick beyond them; upwards from 0."""
    margin = min(0.5, 0.03 * (last - first)) or 0.5
    ax.set_xlim(first - margin, last + margin)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)


def _legends(figure: Figure, place: Literal["upper right", "lower left", "lower right"]) -> None:
    """A legend a panel, clear of its lines, where there is room; else one to the right of all panels."""
    if max(len(ax.lines) for ax in figure.axes) <= MAX_LEGEND:
        n_columns = 2 if place == "lower left" else 1  # flat, since it lies where the early layers' low ranks are
        legends = [(ax, ax.legend(ax.lines, [_entry(line) for line in ax.lines], loc=place, fontsize=8, ncols=n_columns)) for ax in figure.axes]
        with without_glyph_warnings():
            figure.draw_without_rendering()  # gives the legends their sizes
            for ax, legend in legends:
                _clear(ax, legend)
        return
    lines = {_entry(line): line for ax in figure.axes for line in ax.lines}
    width, height = figure.get_size_inches()
    n_columns = -(-len(lines) // int((height - 1) / 0.19))
    figure.set_size_inches(width + 2.4 * n_columns, height)
    figure.legend(lines.values(), lines, loc="outside right center", ncols=n_columns, fontsize=8, handlelength=3)


def _entry(line: Any) -> str:
    return wrapped(str(line.get_label()), 32)


def _clear(ax: Axes, legend: Legend) -> None:
    """Moves the upper or lower limit away until no data lies behind the legend. The dashed line may: the legend is translucent."""
    box = legend.get_window_extent().transformed(ax.transAxes.inverted())
    is_above = box.y0 > 0.5
    share = 0.02 + (1 - box.y0 if is_above else box.y1)  # of the panel's height, as all that follows
    to_axes = ax.transData + ax.transAxes.inverted()
    behind = [np.nan]
    for line in ax.lines:
        points = np.asarray(line.get_xydata(), dtype=float)
        if len(points) and line.get_linestyle() != "--":
            x, y = to_axes.transform(points).T
            behind.extend([*y[(x >= box.x0) & (x <= box.x1)], *np.interp([box.x0, box.x1], x, y, left=np.nan, right=np.nan)])
    if np.isnan(behind).all():
        return
    low, high = ax.get_ylim()
    if is_above:
        ax.set_ylim(low, max(high, low + np.nanmax(behind) * (high - low) / (1 - share)))
    else:
        ax.set_ylim(min(low, high - (1 - np.nanmin(behind)) * (high - low) / (1 - share)), high)
        ax.set_yticks([tick for tick in ax.get_yticks() if 0 <= tick <= high])  # no rank is below 0


def figure_title(figure: Figure, text: str) -> None:
    """The heading of the whole figure."""
    figure.suptitle(wrapped(text, int(figure.get_figwidth() * 10)), fontsize=13)


def _in_brackets(scales: Iterable[str | None]) -> str:
    named = [scale for scale in scales if scale]
    return f" ({', '.join(named)})" if named else ""


def _caption(figure: Figure, results: Results, *, is_centered: bool | None) -> None:
    """A light line at the bottom that says what was measured; is_centered is None where both are shown."""
    parts = [f"source: {results.source}", f"circuit: {results.circuit.upper()}", *form_parts(results.settings)]
    if is_centered is not None:
        parts.append("similarity matrix centred" if is_centered else "similarity matrix not centred")
    fed = [model.tokens for model in results.models if model.tokens]
    if fed:
        first = fed[0]
        text = f"{first['n_sequences']} × {first['seq_len']} tokens of {first['source']}"
        parts.append(text if all(tokens == first for tokens in fed) else "tokens differ by model")
    if results.command == "heatmap" and any(layer.dead_heads for model in results.models for layer in model.layers):
        parts.append("hatched: dead heads")
    if results.command != "heatmap" and any(layer.intervals for model in results.models for layer in model.layers):
        parts.append("shaded: 95 % over sequences")
    if results.command == "effrank" and any(model.null for model in results.models):
        parts.append("dotted: 95 % of random heads")
    draw_caption(figure, parts)


def draw_caption(figure: Figure, parts: Sequence[str]) -> None:
    """Writes the parts of a caption in a light line at the bottom, each unbroken."""
    unbroken = " · ".join(part.replace(" ", "\u00a0") for part in parts)
    figure.supxlabel(wrapped(unbroken, int(figure.get_figwidth() * 18)), x=0.01, ha="left", fontsize=8, color="0.45")


def form_parts(settings: dict[str, Any]) -> list[str]:
    """What is measured of the heads, where it is not their plain operators."""
    parts = []
    if "measure" in settings:
        parts.append(f"measure: {settings['measure']}")
    if "rope_offset" in settings:
        parts.append(f"key {settings['rope_offset']} tokens before its query")
    if "rope_mean" in settings:
        parts.append(f"mean over offsets 0 to {settings['rope_mean'] - 1}")
    return parts


def wrapped(text: str, width: int) -> str:
    """The text in lines of at most so many letters."""
    return "\n".join(textwrap.wrap(text, width)) or text
