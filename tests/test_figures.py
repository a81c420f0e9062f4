import os
import subprocess
import sys
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from headrank.dynamics import Run
from headrank.figures import compare_figure, effrank_figure, heatmap_figure, spectra_figure, steps_figure, variance_figure
from headrank.output import figure_bytes
from headrank.results import ModelResult, Null, Results
from tests.sample_results import TOKENS, VARIANTS, model, results

DRAW = {"heatmap": heatmap_figure, "spectra": spectra_figure, "variance": variance_figure, "effrank": effrank_figure}
CYCLE = ["#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"]
AT_2_5B = ("Standard MHA", "LRKV (r=64)", "GQA", "MQA", "MLA")


def panels(figure: Figure) -> list[Axes]:
    return [ax for ax in figure.axes if ax.get_label() != "<colorbar>"]


def bars(figure: Figure) -> list[Axes]:
    return [ax for ax in figure.axes if ax.get_label() == "<colorbar>"]


def title(figure: Figure) -> str:
    return figure.get_suptitle().replace("\n", " ")


def caption(figure: Figure) -> str:
    return figure.get_supxlabel().replace("\n", " ").replace("\u00a0", " ")


def heatmaps(**options: object) -> Results:
    return results("heatmap", [model(label, layers=[18], n_layer=36, n_head=17, scale="2.5B", seed=i, **options) for i, label in enumerate(AT_2_5B)])


def spectra(*, layers: tuple[int, ...] = (0, 18, 35), is_centered: bool = False, scale: str | None = "2.5B") -> Results:
    models = [model(label, layers=layers, n_layer=36, n_head=17, scale=scale, seed=i, is_centered=is_centered) for i, label in enumerate(AT_2_5B)]
    return results("spectra", models, is_centered=is_centered)


def effranks(scales: dict[str | None, int], labels: tuple[str, ...] = VARIANTS) -> Results:
    return results("effrank", [model(label, layers=range(n), n_layer=n, scale=scale, seed=i) for scale, n in scales.items() for i, label in enumerate(labels)])


def test_a_heatmap_shows_each_similarity_matrix_in_order_with_a_colour_bar_each() -> None:
    shown = heatmaps()
    figure = heatmap_figure(shown)
    assert [ax.get_title() for ax in panels(figure)] == list(AT_2_5B)
    assert len(bars(figure)) == len(AT_2_5B)
    for ax, bar, of in zip(panels(figure), bars(figure), shown.models, strict=True):
        (image,) = ax.images
        np.testing.assert_array_equal(image.get_array(), of.layers[0].similarity)
        assert image.get_clim() == (-1, 1)
        assert bar.get_ylim() == (-1, 1)
        assert image.get_cmap().name == "RdYlBu_r"
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("Head Index", "Head Index")
        assert list(ax.get_xticks()) == list(ax.get_yticks()) == list(range(0, 17, 2))
    assert title(figure) == "Head Similarity Matrices, Layer 18 (2.5B)"


def test_red_is_positive_yellow_is_neutral_and_blue_is_negative() -> None:
    image = panels(heatmap_figure(heatmaps()))[0].images[0]
    (red, _, low), (also_red, green, _), (_, _, blue) = [image.cmap(image.norm(value))[:3] for value in (1.0, 0.0, -1.0)]
    assert red > 0.6 > 0.2 > low
    assert min(also_red, green) > 0.9
    assert blue > 0.5


@pytest.mark.parametrize(("n_head", "ticks"), [(1, [0]), (2, [0, 1]), (6, [0, 2, 4]), (64, list(range(0, 64, 8))), (128, list(range(0, 128, 16)))])
def test_heads_are_ticked_as_densely_as_is_legible(n_head: int, ticks: list[int]) -> None:
    (ax,) = panels(heatmap_figure(results("heatmap", [model("a", layers=[5], n_head=n_head)])))
    assert list(ax.get_xticks()) == ticks


def test_dead_heads_are_hatched_across_row_and_column_and_the_caption_says_so() -> None:
    figure = heatmap_figure(heatmaps(dead={18: [3]}))
    for ax in panels(figure):
        strips = [patch.get_bbox().bounds for patch in ax.patches if isinstance(patch, Rectangle) and patch.get_hatch()]
        assert strips == [(-0.5, 2.5, 17, 1), (2.5, -0.5, 1, 17)]
    assert "hatched: dead heads" in caption(figure)
    assert "hatched" not in caption(heatmap_figure(heatmaps()))


def test_a_layer_without_numbers_shows_its_reason_instead_of_colours() -> None:
    (ax,) = panels(heatmap_figure(results("heatmap", [model("a", layers=[5], faults={5: "layer 5: c_q.weight holds NaN in head 3"})])))
    assert np.isnan(ax.images[0].get_array().filled(np.nan)).all()
    assert [text.get_text().replace("\n", " ") for text in ax.texts] == ["layer 5: c_q.weight holds NaN in head 3"]


def test_more_than_six_heatmaps_of_a_scale_wrap_evenly_and_each_scale_has_its_row() -> None:
    seven = panels(heatmap_figure(results("heatmap", [model(f"m{i}", layers=[5]) for i in range(7)])))
    assert [ax.get_subplotspec().rowspan.start for ax in seven] == [0] * 4 + [1] * 3
    both = [model(label, layers=[n // 2], n_layer=n, scale=scale) for scale, n in (("128M", 12), ("2.5B", 36)) for label in VARIANTS[:3]]
    figure = heatmap_figure(results("heatmap", both))
    assert [ax.get_subplotspec().rowspan.start for ax in panels(figure)] == [0] * 3 + [1] * 3
    assert panels(figure)[4].get_title() == "LRKV (r=16) (2.5B), L=18"
    assert title(figure) == "Head Similarity Matrices (128M, 2.5B)"


def test_spectra_have_a_panel_a_layer_and_a_line_a_model_from_index_one() -> None:
    shown = spectra()
    figure = spectra_figure(shown)
    assert title(figure) == "Eigenvalue Spectra of Head Similarity Matrices (2.5B)"
    assert [ax.get_title() for ax in figure.axes] == ["Early Layer (L=0)", "Middle Layer (L=18)", "Late Layer (L=35)"]
    for place, ax in enumerate(figure.axes):
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("Eigenvalue Index", "Eigenvalue")
        assert [text.get_text() for text in ax.get_legend().get_texts()] == list(AT_2_5B)
        assert [colors.to_hex(line.get_color()) for line in ax.lines] == CYCLE[:5]
        for line, of in zip(ax.lines, shown.models, strict=True):
            np.testing.assert_array_equal(line.get_xdata(), np.arange(1, 18))
            np.testing.assert_array_equal(line.get_ydata(), of.layers[place].eigenvalues)


def test_spectra_of_the_centred_matrix_are_named_as_in_figure_10() -> None:
    figure = spectra_figure(spectra(is_centered=True))
    assert title(figure) == "PCA Eigenvalue Spectra of Head Similarity Matrices (2.5B)"
    assert {(ax.get_xlabel(), ax.get_ylabel()) for ax in figure.axes} == {("PC Index", "Variance (PCA Eigenvalue)")}
    assert "similarity matrix centred" in caption(figure)


def test_spectra_of_other_layers_and_without_a_scale_are_named_by_index_alone() -> None:
    figure = spectra_figure(spectra(layers=(7, 18), scale=None))
    assert [ax.get_title() for ax in figure.axes] == ["Layer L=7", "Layer L=18"]
    assert title(figure) == "Eigenvalue Spectra of Head Similarity Matrices"


def test_spectra_of_models_of_unlike_depth_name_the_layers_of_each() -> None:
    figure = spectra_figure(results("spectra", [model("a", layers=[0, 6, 11]), model("b", layers=[0, 3, 6], n_layer=7)]))
    assert [ax.get_title() for ax in figure.axes] == ["Early Layer (L=0)", "Middle Layer (L=6, 3)", "Late Layer (L=11, 6)"]


def test_a_spectrum_without_numbers_is_named_in_the_legend() -> None:
    (ax,) = spectra_figure(results("spectra", [model("a", layers=[5], faults={5: "NaN"}), model("b", layers=[5])])).axes
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a (no numbers)", "b"]
    assert [len(line.get_xdata()) for line in ax.lines] == [0, 6]


def test_effective_rank_has_a_panel_a_scale_and_a_line_a_model_over_layers() -> None:
    shown = effranks({"128M": 12, "2.5B": 36})
    figure = effrank_figure(shown)
    assert [ax.get_title() for ax in figure.axes] == ["128M", "2.5B"]
    for ax, models in zip(figure.axes, (shown.models[:6], shown.models[6:]), strict=True):
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("Layer", "Effective Rank")
        *lines, redundant = ax.lines
        assert [text.get_text() for text in ax.get_legend().get_texts()] == [*VARIANTS, "Fully redundant"]
        assert [colors.to_hex(line.get_color()) for line in lines] == CYCLE[:6]
        for line, of in zip(lines, models, strict=True):
            np.testing.assert_array_equal(line.get_xdata(), np.arange(len(of.layers)))
            np.testing.assert_array_equal(line.get_ydata(), [layer.effective_rank for layer in of.layers])
        assert (redundant.get_color(), redundant.get_linestyle(), list(redundant.get_ydata())) == ("grey", "--", [1, 1])
        box = ax.get_legend().get_window_extent().transformed(ax.transAxes.inverted())
        assert box.x0 < 0.1
        assert box.y0 < 0.1


def test_a_label_keeps_its_colour_where_a_scale_lacks_some_variants() -> None:
    models = [model(label, layers=range(12), scale="128M") for label in VARIANTS] + [model(label, layers=range(12), scale="2.5B") for label in ("GQA", "MLA")]
    lines = effrank_figure(results("effrank", models)).axes[1].lines
    assert [colors.to_hex(line.get_color()) for line in lines[:2]] == [CYCLE[5], CYCLE[4]]


def test_an_undefined_effective_rank_is_a_gap_and_a_lone_point_is_marked() -> None:
    spoilt = model("a", layers=range(50), n_layer=50, faults={3: "NaN", 5: "NaN"})
    line = effrank_figure(results("effrank", [spoilt])).axes[0].lines[0]
    assert np.flatnonzero(np.isnan(line.get_ydata())).tolist() == [3, 5]
    assert line.get_markevery() == [4]


def test_layers_stand_at_their_true_index() -> None:
    line = effrank_figure(results("effrank", [model("hybrid", layers=[11, 3, 7])])).axes[0].lines[0]
    assert list(line.get_xdata()) == [3, 7, 11]


def test_a_model_that_is_undefined_throughout_says_so_in_the_legend() -> None:
    lone = model("a", layers=range(3), n_head=1, is_centered=True)
    figure = effrank_figure(results("effrank", [lone, model("b", layers=range(3), is_centered=True)], is_centered=True))
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["a (undefined)", "b", "Fully redundant"]
    assert title(figure) == "Effective Rank of Centred Head Similarity Matrices"


def test_models_without_a_scale_have_a_panel_of_their_own() -> None:
    assert [ax.get_title() for ax in effrank_figure(effranks({None: 5, "nano": 7})).axes] == ["Given by path", "nano"]
    assert [ax.get_title() for ax in effrank_figure(effranks({None: 5})).axes] == [""]


@pytest.mark.parametrize("seed", range(5))
def test_no_line_runs_behind_a_legend(seed: int) -> None:
    models = [model(label, layers=range(24), n_layer=24, n_head=17, seed=7 * seed + i) for i, label in enumerate(VARIANTS)]
    flat = [model(label, layers=[0, 7], n_head=5, is_centered=True, seed=7 * seed + i) for i, label in enumerate(VARIANTS)]
    for figure in (effrank_figure(results("effrank", models)), spectra_figure(results("spectra", flat, is_centered=True))):
        figure.draw_without_rendering()
        for ax in figure.axes:
            box = ax.get_legend().get_window_extent()
            for line in ax.lines:
                if line.get_label() != "Fully redundant":
                    points = ax.transData.transform(np.column_stack([np.linspace(*line.get_xdata()[[0, -1]], 997)] * 2))
                    points[:, 1] = np.interp(points[:, 0], *ax.transData.transform(line.get_xydata()).T)
                    assert not any(box.contains(*point) for point in points)


def test_twelve_lines_are_told_apart_and_named_beside_the_panels() -> None:
    names = [f"model {i}" for i in range(12)]
    for figure in (effrank_figure(effranks({None: 5}, tuple(names))), spectra_figure(results("spectra", [model(n, layers=[0, 1, 2]) for n in names]))):
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()][:12] == names
        assert len({(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines[:12]}) == 12
        assert all(ax.get_legend() is None for ax in figure.axes)


@pytest.mark.parametrize("command", DRAW)
@pytest.mark.parametrize(("count", "n_head"), [(1, 2), (3, 6), (6, 64), (12, 18)])
def test_nothing_is_cut_off_or_printed_over(command: str, count: int, n_head: int) -> None:
    models = [model(f"a model's name {i}", layers=[6], n_head=n_head, seed=i, scale="128M", faults={6: "x"} if i == 1 else None) for i in range(count)]
    figure = DRAW[command](results(command, models))
    figure.draw_without_rendering()
    page = figure.bbox
    boxes = [ax.get_tightbbox() for ax in figure.axes]
    texts = [text.get_window_extent() for text in figure.texts if text.get_text()] + [legend.get_window_extent() for legend in figure.legends]
    for box in [*boxes, *texts]:
        assert page.x0 - 1 <= box.x0
        assert box.x1 <= page.x1 + 1
        assert page.y0 - 1 <= box.y0
        assert box.y1 <= page.y1 + 1
    everything = [box.padded(-1) for box in [*boxes, *texts]]
    assert not any(a.overlaps(b) for i, a in enumerate(everything) for b in everything[:i])


def test_the_caption_says_what_was_measured() -> None:
    assert caption(effrank_figure(effranks({None: 5}))) == (
        "source: activations · circuit: QK · similarity matrix not centred · 61 × 127 tokens of calibration.txt"
    )
    weights = results("heatmap", [model("a", layers=[5], tokens=None)], source="weights", circuit="ov")
    assert caption(heatmap_figure(weights)) == "source: weights · circuit: OV · similarity matrix not centred"
    unlike = results("heatmap", [model("a", layers=[5]), model("b", layers=[5], tokens={**TOKENS, "seq_len": 31})])
    assert caption(heatmap_figure(unlike)).endswith("tokens differ by model")


@pytest.mark.parametrize("label", ["_under", "$x^{$", "模型", "bell\x07", "\\alpha"])
@pytest.mark.parametrize("command", DRAW)
def test_any_label_is_drawn_as_it_stands(command: str, label: str) -> None:
    figure = DRAW[command](results(command, [model(label, layers=[0])]))
    assert figure_bytes(figure, "png")
    ax = figure.axes[0]
    assert (ax.get_title() if command == "heatmap" else ax.get_legend().get_texts()[0].get_text()) == label


@pytest.mark.parametrize("command", DRAW)
def test_a_users_matplotlibrc_changes_nothing_and_is_left_alone(command: str) -> None:
    shown = results(command, [model("a", layers=[6])])
    plain = figure_bytes(DRAW[command](shown), "png")
    with matplotlib.rc_context({"font.size": 23, "axes.facecolor": "black", "savefig.bbox": "tight", "image.cmap": "gray"}):
        before = dict(matplotlib.rcParams)
        assert figure_bytes(DRAW[command](shown), "png") == plain
        assert dict(matplotlib.rcParams) == before


def test_figures_need_no_display_and_no_pyplot() -> None:
    script = """
import sys
from headrank.dynamics import Run
from headrank.figures import heatmap_figure
from headrank.output import figure_bytes
from tests.sample_results import model, results
figure_bytes(heatmap_figure(results("heatmap", [model("a", layers=[5])])), "png")
sys.exit("matplotlib.pyplot" in sys.modules or "tkinter" in sys.modules)
"""
    environment = {name: value for name, value in os.environ.items() if name != "DISPLAY"} | {"MPLBACKEND": "TkAgg"}
    assert subprocess.run([sys.executable, "-c", script], env=environment, check=False).returncode == 0


def test_variance_explained_rises_to_one_past_the_ninety_percent_line() -> None:
    shown = replace(spectra(is_centered=True), command="variance")
    figure = variance_figure(shown)
    assert title(figure) == "Cumulative Variance Explained (2.5B)"
    assert [ax.get_title() for ax in figure.axes] == ["Early Layer (L=0)", "Middle Layer (L=18)", "Late Layer (L=35)"]
    for place, ax in enumerate(figure.axes):
        *lines, ninety = ax.lines
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("Number of PCs", "Cumulative Variance Explained")
        assert (ninety.get_linestyle(), list(ninety.get_ydata()), ninety.get_label()) == ("--", [0.9, 0.9], "90 %")
        for line, of in zip(lines, shown.models, strict=True):
            np.testing.assert_array_equal(line.get_xdata(), np.arange(1, 18))
            np.testing.assert_array_equal(line.get_ydata(), of.layers[place].cumulative_variance)
            assert line.get_ydata()[-1] == pytest.approx(1)


def test_uncentred_and_centred_ranks_stand_side_by_side() -> None:
    plain = effranks({"nano": 5}, VARIANTS[:2])
    centered = replace(plain, is_centered=True, models=tuple(model(v, layers=range(5), scale="nano", is_centered=True) for v in VARIANTS[:2]))
    figure = compare_figure(plain, centered)
    assert [ax.get_title() for ax in figure.axes] == ["Uncentred", "Centred"]
    for ax, of in zip(figure.axes, (plain, centered), strict=True):
        for line, shown in zip(ax.lines[:-1], of.models, strict=True):
            np.testing.assert_array_equal(line.get_ydata(), [layer.effective_rank for layer in shown.layers])
    assert "centred" not in caption(figure)


def with_interval_and_null(of: ModelResult) -> ModelResult:
    ends = {"effective_rank": np.array([1.25, 3.5])}
    layers = tuple(replace(layer, intervals=ends) for layer in of.layers)
    return replace(of, layers=layers, null=Null(mean=4.5, low=4.25, high=4.75, n_samples=7))


def test_intervals_are_shaded_and_the_null_is_dotted_without_an_entry_in_the_legend() -> None:
    figure = effrank_figure(results("effrank", [with_interval_and_null(model("a", layers=range(5)))]))
    (ax,) = figure.axes
    band, null = ax.collections
    assert (band.get_datalim(ax.transData).y0, band.get_datalim(ax.transData).y1) == (1.25, 3.5)
    assert [segment[0, 1] for segment in null.get_segments()] == [4.25, 4.75]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "Fully redundant"]
    assert caption(figure).endswith("shaded: 95 % over sequences · dotted: 95 % of random heads")


def test_unlike_models_in_relative_depth_share_a_panel_with_everything_a_fraction_of_their_heads() -> None:
    small = with_interval_and_null(model("MHA", layers=range(5), n_layer=5, n_head=5, scale="128M"))
    large = model("MHA", layers=range(11), n_layer=11, n_head=17, scale="2.5B")
    figure = effrank_figure(replace(results("effrank", [small, large]), is_relative=True))
    (ax,) = figure.axes
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["MHA (128M)", "MHA (2.5B)"]
    assert len({line.get_color() for line in ax.lines}) == 2
    for line, of in zip(ax.lines, (small, large), strict=True):
        np.testing.assert_allclose(line.get_xdata(), np.linspace(0, 1, len(of.layers)))
        np.testing.assert_allclose(line.get_ydata(), [layer.effective_rank / layer.facts.n_head for layer in of.layers])
    band, null = ax.collections
    np.testing.assert_allclose((band.get_datalim(ax.transData).y0, band.get_datalim(ax.transData).y1), (1.25 / 5, 3.5 / 5))
    np.testing.assert_allclose([segment[0, 1] for segment in null.get_segments()], [4.25 / 5, 4.75 / 5])


def step(tokens: int, seed: int) -> ModelResult:
    taken = model("a", layers=range(3), seed=seed)
    return replace(taken, model=replace(taken.model, trained={"tokens_seen": tokens}))


def test_training_is_drawn_against_the_tokens_seen_clear_of_the_legend() -> None:
    steps = [step(tokens, seed) for seed, tokens in enumerate((1_000, 10_007, 100_003))]
    figure = steps_figure([Run(label="a", scale="nano", steps=tuple(steps))], results("effrank", steps[:1]))
    (ax,) = figure.axes
    assert ax.get_xscale() == "log"
    assert list(ax.lines[0].get_xdata()) == [1_000, 10_007, 100_003]
    figure.draw_without_rendering()
    assert {label.get_text() for label in ax.get_xticklabels()} >= {"1k", "10k", "100k"}
    assert {label.get_text() for label in ax.get_xticklabels(minor=True)} == {""}
    assert list(ax.lines[0].get_ydata()) == [step.mean("effective_rank") for step in steps]
    box = ax.get_legend().get_window_extent()
    assert not any(box.contains(*point) for point in ax.transData.transform(ax.lines[0].get_xydata()))
