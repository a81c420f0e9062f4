"""Agreement -> figure: rank correlation against layer, a panel a scale, a line a model."""

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from headrank.agreement import Agreement, ModelAgreement
from headrank.figures import COLORS, DASHES, STYLE, draw_caption, draw_line, figure_title, form_parts, shade


@style.context(STYLE)
def agreement_figure(results: Agreement) -> Figure:
    """Spearman's correlation of the two similarity matrices against layer, its interval shaded, a gap where it is undefined."""
    scales = list(dict.fromkeys(model.scale for model in results.models))
    figure = Figure(figsize=(max(5.6 * len(scales), 6.2) + 2.2, 4.9), layout="constrained")
    figure_title(figure, "Similarity of Heads: Weights against Activations")
    names = list(dict.fromkeys(name for model in results.models for name in _lines(model)))
    looks = {name: (COLORS[i % len(COLORS)], DASHES[i // len(COLORS) % len(DASHES)]) for i, name in enumerate(names)}
    for place, scale in enumerate(scales, 1):
        ax = figure.add_subplot(1, len(scales), place)
        ax.set_title(scale or ("Given by path" if len(scales) > 1 else ""), fontsize=11)
        _draw_panel(ax, [model for model in results.models if model.scale == scale], looks)
    handles = {str(line.get_label()): line for ax in figure.axes for line in ax.lines}
    figure.legend(list(handles.values()), list(handles), loc="outside right center", fontsize=8)
    draw_caption(figure, _caption(results))
    return figure


def _draw_panel(ax: Axes, models: list[ModelAgreement], looks: dict[str, tuple[str, str]]) -> None:
    lowest = 0.0
    for model in models:
        for name, group in _lines(model).items():
            layers = [layer for layer in model.layers if layer.facts.group == group]
            x = np.array([layer.facts.index for layer in layers])
            y = np.array([np.nan if layer.correlation is None else layer.correlation for layer in layers])
            ends = np.array([layer.interval or (np.nan, np.nan) for layer in layers])
            draw_line(ax, x, y, f"{name} (undefined)" if np.isnan(y).all() else name, looks[name])
            shade(ax, x, ends, looks[name])
            lowest = min(lowest, *(value for value in (*y, *ends[:, 0]) if not np.isnan(value)), 0.0)
    ax.axhline(0, color="grey", linestyle="--", linewidth=1.2, label="No agreement")
    ax.set_xlabel("Layer")
    ax.set_ylabel("Rank Correlation over Pairs of Heads")
    last = max(layer.facts.index for model in models for layer in model.layers)
    margin = 0.03 * last or 0.5
    ax.set_xlim(-margin, last + margin)
    ax.set_ylim(min(-0.1, 1.05 * lowest), 1.05)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.grid(alpha=0.3)


def _lines(model: ModelAgreement) -> dict[str, str]:
    """Name of each of a model's lines -> its stack of layers: one, or encoder, decoder and cross."""
    groups = dict.fromkeys(layer.facts.group for layer in model.layers)
    return {f"{model.label} ({group})" if len(groups) > 1 else model.label: group for group in groups}


def _caption(results: Agreement) -> list[str]:
    parts = [f"circuit: {results.circuit.upper()}", *form_parts(results.settings), "Spearman's correlation of similarity from weights and from activations"]
    fed = [model.tokens for model in results.models if model.tokens]
    if fed:
        text = f"{fed[0]['n_sequences']} × {fed[0]['seq_len']} tokens of {fed[0]['source']}"
        parts.append(text if all(tokens == fed[0] for tokens in fed) else "tokens differ by model")
    if any(layer.interval for model in results.models for layer in model.layers):
        parts.append("shaded: 95 % over sequences")
    return parts
