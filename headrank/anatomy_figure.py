"""Anatomy -> figure: a row keys or values of a scale, a column a question; colours are models, dashes are quantities."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from headrank.anatomy_tables import NOT_UNIQUE, PROJECTIONS, ModelAnatomy
from headrank.figures import COLORS, STYLE, draw_caption, draw_line, figure_title


class Panel(NamedTuple):
    """One question about the parts, against layer."""

    title: str
    ylabel: str
    lines: dict[str, tuple[str, str]]
    """Quantity -> dashes and name."""


PANELS = (
    Panel("Norms", "Frobenius Norm of a Head", {"norm": ("-", "total"), "shared_norm": ("--", "shared"), "residual_norm": (":", "residual")}),
    Panel("Shared against Residual", "Cosine", {"cosine": ("-", "")}),
    Panel("Subspaces Read", "Mean cos² of Principal Angles", {"overlap": ("-", "residual in shared"), "overlap_between": (":", "residuals of two heads")}),
    Panel("Departure from the Heads' Mean", "Relative Error at Rank r", {"learned_error": ("-", "learned residual"), "best_error": ("--", "best of rank r")}),
)


@style.context(STYLE)
def anatomy_figure(models: Sequence[ModelAnatomy]) -> Figure:
    """Norms, cosine, subspace overlap and error of approximation against layer; heads without parts (MHA) beside, where they have the number."""
    scales = list(dict.fromkeys(model.scale for model in models))
    grid = [(scale, projection) for scale in scales for projection in PROJECTIONS]
    figure = Figure(figsize=(4.3 * len(PANELS) + 1.8, 3.2 * len(grid) + 1.1), layout="constrained")
    named = f" ({', '.join(scale for scale in scales if scale)})" if any(scales) else ""
    figure_title(figure, f"Anatomy of Low-Rank Key-Value Heads{named}")
    looks = {label: COLORS[i % len(COLORS)] for i, label in enumerate(dict.fromkeys(model.label for model in models))}
    for r, (scale, projection) in enumerate(grid):
        for c, panel in enumerate(PANELS):
            ax = figure.add_subplot(len(grid), len(PANELS), r * len(PANELS) + c + 1)
            where = f"{scale}: {projection}" if scale and len(scales) > 1 else projection
            ax.set_title(f"{panel.title} ({where})", fontsize=11)
            _draw_panel(ax, panel, projection, [model for model in models if model.scale == scale], looks)
    handles = [Line2D([], [], color=color, label=label) for label, color in looks.items()]
    figure.legend(handles=handles, loc="outside right center", fontsize=9)
    draw_caption(figure, [NOT_UNIQUE.rstrip("."), "norms: root mean square over heads", "others: mean over heads", "thin dotted: random subspaces"])
    return figure


def _draw_panel(ax: Axes, panel: Panel, projection: str, models: Sequence[ModelAnatomy], looks: dict[str, str]) -> None:
    highest = 0.0
    for model in models:
        x = np.array([facts.index for facts, _ in model.layers])
        for quantity, (dashes, name) in panel.lines.items():
            for suffix in _suffixes(model, quantity):
                y = model.curve(projection, quantity + suffix)
                if np.isnan(y).all():
                    continue
                draw_line(ax, x, y, name, (looks[model.label], dashes))
                highest = max(highest, float(np.nanmax(y)))
                if suffix and not np.isnan(y[-1]):
                    ax.annotate(f"r={suffix[1:]}", (x[-1], y[-1]), (4, 3), textcoords="offset points", ha="right", fontsize=8, color=looks[model.label])
        if "overlap" in panel.lines and model.is_split:
            for expected in (model.facts["d_head"] / model.facts["d_model"], model.ranks[0] / model.facts["d_model"]):
                ax.axhline(expected, color=looks[model.label], linestyle=(0, (1, 3)), linewidth=0.8)
    names = {name: dashes for dashes, name in panel.lines.values() if name}
    if names:
        ax.set_ylim(0, (1.1 + 0.12 * len(names)) * (highest or 1))  # room for the legend
        handles = [Line2D([], [], color="0.3", linestyle=dashes, label=name) for name, dashes in names.items()]  # type: ignore[arg-type]
        ax.legend(handles=handles, fontsize=8, loc="upper left")
    else:
        ax.axhline(0, color="grey", linewidth=0.8)
    last = max(facts.index for model in models for facts, _ in model.layers)
    ax.set_xlim(-(0.03 * last or 0.5), last + (0.03 * last or 0.5))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.set_xlabel("Layer")
    ax.set_ylabel(panel.ylabel)
    ax.grid(alpha=0.3)


def _suffixes(model: ModelAnatomy, quantity: str) -> list[str]:
    """Endings of a quantity's names: heads without parts have the best error of each rank that the others have."""
    return [f"_{rank}" for rank in model.ranks] if quantity == "best_error" and not model.is_split else [""]
