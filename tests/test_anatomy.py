"""LRKV's shared and residual parts: against plain computations on whole matrices, and what `lrkv` writes of them."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrank.anatomy import Split, full_rank_anatomy, root_mean_square, split_anatomy
from headrank.anatomy_command import _numbers
from headrank.anatomy_figure import anatomy_figure
from headrank.anatomy_tables import NOT_UNIQUE, Anatomy, ModelAnatomy, anatomy_cells, anatomy_document, anatomy_rows, faults
from headrank.cli import app
from headrank.config import ModelConfig
from headrank.factors import head_matrices as read_heads
from headrank.factors import shared_and_low_rank
from headrank.model import new_decoder
from headrank.store import LayerFacts
from headrank.tables import csv_lines, json_text
from tests.plain import CONFIGS, checkpoint_of, decoder, head_matrices

SEEDS = st.integers(0, 2**32)
H, d, D, r = 5, 23, 11, 3


def parts(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((d, D), (H, d, r), (H, D, r)))  # type: ignore[return-value]


def split_of(shared: Tensor, down: Tensor, up: Tensor) -> Split:
    split = split_anatomy(shared, down, up).split
    assert split is not None
    return split


def truncated(matrix: np.ndarray, rank: int) -> np.ndarray:
    U, sigma, V = np.linalg.svd(matrix, full_matrices=False)
    return (U[:, :rank] * sigma[:rank]) @ V[:rank]


@given(SEEDS)
def test_every_number_is_the_one_of_whole_matrices(seed: int) -> None:
    shared, down, up = (part.numpy() for part in parts(seed))
    found = split_anatomy(*parts(seed))
    split = found.split
    assert split is not None
    residuals = [down[h] @ up[h].T for h in range(H)]
    heads = [shared + residual for residual in residuals]
    mean = np.mean(heads, axis=0)
    for h in range(H):
        residual, departure = residuals[h], heads[h] - mean
        best = truncated(departure, r)
        assert found.norm[h] == pytest.approx(np.linalg.norm(heads[h]))
        assert split.residual_norm[h] == pytest.approx(np.linalg.norm(residual))
        assert split.cosine[h] == pytest.approx(np.sum(shared * residual) / np.linalg.norm(shared) / np.linalg.norm(residual))
        assert split.learned_error[h] == pytest.approx(np.linalg.norm(departure - residual) / np.linalg.norm(departure))
        assert split.best_error[h] == pytest.approx(np.linalg.norm(departure - best) / np.linalg.norm(departure))
        assert split.distance[h] == pytest.approx(np.linalg.norm(residual - best) / np.linalg.norm(best))
    assert split.shared_norm == pytest.approx(np.linalg.norm(shared))
    assert split.reason is None


@given(SEEDS)
def test_overlap_is_of_principal_angles_between_what_the_parts_read(seed: int) -> None:
    shared, down, up = (part.numpy() for part in parts(seed))
    split = split_of(*parts(seed))
    projector = shared @ np.linalg.pinv(shared)
    projectors = []
    for h in range(H):
        residual = down[h] @ up[h].T
        projectors.append(residual @ np.linalg.pinv(residual, rcond=1e-10))
        squares = np.sort(np.linalg.eigvals(projector @ projectors[h]).real)[-r:]
        assert split.overlap[h] == pytest.approx(np.trace(projector @ projectors[h]) / r)
        assert np.cos(np.radians(split.smallest_angle[h])) ** 2 == pytest.approx(squares[-1])
        assert np.cos(np.radians(split.largest_angle[h])) ** 2 == pytest.approx(squares[0])
    pairs = [np.trace(projectors[i] @ projectors[j]) / r for i in range(H) for j in range(i)]
    assert split.overlap_between == pytest.approx(np.mean(pairs))


@given(SEEDS)
def test_a_change_of_basis_within_the_factors_changes_nothing(seed: int) -> None:
    shared, down, up = parts(seed)
    B = torch.linalg.qr(torch.randn(H, r, r, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))[0] * torch.tensor([0.5, 1, 2.0])
    plain, changed = split_of(shared, down, up), split_of(shared, down @ B, up @ torch.linalg.inv(B).transpose(1, 2))
    for name in ("shared_norm", "residual_norm", "cosine", "overlap", "largest_angle", "overlap_between", "learned_error", "best_error", "distance"):
        np.testing.assert_allclose(getattr(changed, name), getattr(plain, name), rtol=1e-6, err_msg=name)


@given(SEEDS, st.floats(1e-12, 1e20))
def test_scaling_all_weights_changes_norms_alone(seed: int, c: float) -> None:
    shared, down, up = parts(seed)
    plain, scaled = split_of(shared, down, up), split_of(c * shared, c * down, up)
    np.testing.assert_allclose(scaled.residual_norm, c * plain.residual_norm)
    for name in ("cosine", "overlap", "overlap_between", "learned_error", "best_error", "distance"):
        np.testing.assert_allclose(getattr(scaled, name), getattr(plain, name), rtol=1e-6, err_msg=name)


@given(SEEDS)
def test_another_split_of_the_same_heads_has_other_numbers_and_the_same_heads(seed: int) -> None:
    shared, down, up = parts(seed)
    common = torch.randn(1, d, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1)), torch.ones(1, D, 1, dtype=torch.float64)
    wide = torch.cat((down, common[0].expand(H, -1, -1)), 2), torch.cat((up, common[1].expand(H, -1, -1)), 2)
    plain, moved = split_anatomy(shared, down, up), split_anatomy(shared - common[0][0] @ common[1][0].T, *wide)
    assert plain.split is not None
    assert moved.split is not None
    np.testing.assert_allclose(moved.norm, plain.norm)
    assert moved.split.shared_norm != pytest.approx(plain.split.shared_norm, rel=1e-3)
    assert not np.allclose(moved.split.residual_norm, plain.split.residual_norm, rtol=1e-3)


def test_no_residual_does_better_than_the_best_of_its_rank() -> None:
    for seed in range(20):
        split = split_of(*parts(seed))
        assert (split.learned_error >= split.best_error - 1e-12).all()
        assert (split.distance > 0).all()


def test_residuals_that_cancel_are_their_own_best_approximation() -> None:
    shared, down, up = parts(0)
    split = split_of(shared, torch.cat((down[:2], -down[:2])), torch.cat((up[:2], up[:2])))
    np.testing.assert_allclose([split.learned_error, split.best_error, split.distance], 0, atol=1e-7)


def test_a_residual_within_the_shared_subspace_overlaps_wholly_and_one_outside_not_at_all() -> None:
    eye = torch.eye(d, dtype=torch.float64)
    shared = eye[:, :D]
    down = torch.stack((eye[:, :r], eye[:, D : D + r], eye[:, D - 1 : D + r - 1]))
    split = split_of(shared, down, eye[:D, :r].expand(3, -1, -1))
    np.testing.assert_allclose(split.overlap, [1, 0, 1 / 3], atol=1e-12)
    np.testing.assert_allclose(split.smallest_angle, [0, 90, 0], atol=1e-6)
    np.testing.assert_allclose(split.largest_angle, [0, 90, 90], atol=1e-6)


def test_a_subspace_counts_with_the_rank_that_its_residual_has() -> None:
    shared, down, up = parts(4)
    up[:, :, 2] = up[:, :, 0] + up[:, :, 1]  # rank 2, though the factors have 3 columns
    projector = (shared @ torch.linalg.pinv(shared)).numpy()
    residual = (down[1] @ up[1].T).numpy()
    own = residual @ np.linalg.pinv(residual, rcond=1e-10)
    assert split_of(shared, down, up).overlap[1] == pytest.approx(np.trace(projector @ own) / 2)


@pytest.mark.parametrize(
    ("change", "reason", "undefined"),
    [
        (lambda s, u, b: (s, u[..., :0], b[..., :0]), "rank 0: heads have no residual", {"cosine", "overlap", "learned_error"}),
        (lambda s, u, b: (s, u[:1], b[:1]), "one head: it is its own mean", {"learned_error", "best_error", "distance"}),
        (lambda s, u, b: (0 * s, u, b), "the shared part is zero", {"cosine", "overlap"}),
        (
            lambda s, u, b: (s, u[:1].expand(H, -1, -1), b[:1].expand(H, -1, -1)),
            "head 0, 1, 2, 3, 4 is the heads' mean: there is no departure from it",
            {"learned_error", "best_error", "distance"},
        ),
        (lambda s, u, b: (s, u * torch.tensor([1, 1, 0, 1, 1.0]).view(H, 1, 1), b), "the residual of head 2 is zero", {"cosine", "overlap"}),
    ],
)
def test_what_is_undefined_has_a_reason(change, reason: str, undefined: set[str]) -> None:  # type: ignore[no-untyped-def]
    found = _numbers(split_anatomy(*change(*parts(1))))
    assert found.reason == reason
    for name in ("cosine", "overlap", "learned_error", "best_error", "distance"):
        assert (None in found.numbers[name]) == (name in undefined or reason.startswith("rank 0")), name


def test_heads_of_full_rank_are_measured_by_their_departure_from_their_mean() -> None:
    heads = torch.randn(H, d, D, generator=torch.Generator().manual_seed(2))
    found = full_rank_anatomy(heads, (0, 2, D))
    mean = heads.double().mean(0).numpy()
    for h in range(H):
        departure = heads[h].double().numpy() - mean
        assert found.best_errors[2][h] == pytest.approx(np.linalg.norm(departure - truncated(departure, 2)) / np.linalg.norm(departure))
        assert found.norm[h] == pytest.approx(float(heads[h].norm()))
    np.testing.assert_allclose(found.best_errors[0], 1)
    np.testing.assert_allclose(found.best_errors[D], 0)
    assert found.split is None


@pytest.mark.parametrize("kind", ["lrkv", "lrkv_0"])
def test_parts_that_are_read_add_up_to_the_heads(kind: str) -> None:
    model = decoder(CONFIGS[kind])
    checkpoint, architecture = checkpoint_of(model)
    for index, layer in enumerate(architecture.layers):
        matrices = head_matrices(model, index)
        for projection, expected in ((layer.k, matrices.W_K), (layer.v, matrices.W_V)):
            shared, down, up = shared_and_low_rank(checkpoint, layer, projection)
            assert down.shape == (6, 13, CONFIGS[kind].rank)
            for h in range(6):
                torch.testing.assert_close(shared + down[h] @ up[h].T, expected[h])


def test_plain_heads_are_read_as_they_are() -> None:
    model = decoder(CONFIGS["mha"])
    checkpoint, architecture = checkpoint_of(model)
    torch.testing.assert_close(read_heads(checkpoint, architecture.layers[1], architecture.layers[1].v), torch.stack(head_matrices(model, 1).W_V))


def test_a_fresh_model_has_residuals_of_a_tenth_of_the_shared_norm() -> None:
    config = ModelConfig(kind="lrkv", rank=16, n_layer=1, n_head=3, d_head=34, d_model=197, d_mlp=17, vocab_size=31, context=19)
    checkpoint, architecture = checkpoint_of(new_decoder(config, seed=0).requires_grad_(False))
    split = split_of(*shared_and_low_rank(checkpoint, architecture.layers[0], architecture.layers[0].k))
    np.testing.assert_allclose(split.residual_norm / split.shared_norm, 0.1, rtol=0.1)


def test_the_norm_of_a_typical_head_squares_to_the_mean_square() -> None:
    assert root_mean_square(np.array([1.0, 7.0])) == pytest.approx(5)


# What is shown


def model(label: str, *, kind: str = "lrkv", scale: str | None = None, n_layer: int = 4) -> ModelAnatomy:
    layers = []
    for index in range(n_layer):
        of_each = {}
        for projection in ("keys", "values"):
            shared, down, up = parts(7 * index + len(projection))
            found = split_anatomy(shared, down, up) if kind == "lrkv" else full_rank_anatomy(shared + down @ up.transpose(1, 2), (2, 3))
            of_each[projection] = _numbers(found)
        layers.append((LayerFacts(index=index, n_head=H, n_kv_head=H), of_each))
    facts = {"checkpoint": "x", "fingerprint": "sha256:0", "kind": kind, "n_layer": n_layer, "n_head": H, "n_kv_head": H, "d_model": d, "d_head": D}
    return ModelAnatomy(label=label, scale=scale, facts=facts, ranks=(r,) if kind == "lrkv" else (2, 3), layers=tuple(layers))


def spoilt() -> ModelAnatomy:
    plain = model("spoilt", n_layer=2)
    bad = Anatomy(numbers={}, reason="layer 1: attn.c_k.up of head 2 holds NaN or infinity (model.safetensors)", is_fault=True)
    return ModelAnatomy(**{**vars(plain), "layers": (plain.layers[0], (plain.layers[1][0], {**plain.layers[1][1], "keys": bad}))})


def test_the_document_says_that_the_split_is_not_unique_and_what_each_number_is() -> None:
    document = json.loads(json_text(anatomy_document([model("MHA", kind="mha"), model("LRKV")])))
    assert document["note"] == NOT_UNIQUE == "The split into shared and residual is not unique: only their sum enters the model."
    plain, split = (entry["layers"][2]["keys"] for entry in document["models"])
    assert set(plain) == {"norm", "best_error_2", "best_error_3"}
    assert set(split) - set(document["definitions"]) == {"smallest_angle", "largest_angle"}
    assert len(split["cosine"]) == H
    assert isinstance(split["shared_norm"], float)


def test_a_spoilt_layer_is_named_and_the_others_are_there() -> None:
    document = anatomy_document([spoilt()])
    assert document["models"][0]["layers"][1]["keys"] == {"reason": "layer 1: attn.c_k.up of head 2 holds NaN or infinity (model.safetensors)"}
    assert faults([spoilt()]) == ["spoilt: layer 1: attn.c_k.up of head 2 holds NaN or infinity (model.safetensors)"]
    assert np.isnan(spoilt().curve("keys", "norm")).tolist() == [False, True]
    assert not np.isnan(spoilt().curve("values", "norm")).any()


def test_rows_have_a_line_a_head() -> None:
    columns, *rows = csv.reader(csv_lines(anatomy_rows([model("LRKV"), model("MHA", kind="mha")])).splitlines())
    assert columns[:6] == ["label", "scale", "layer", "projection", "head", "shared_norm"]
    assert len(rows) == 2 * 4 * 2 * H
    first = dict(zip(columns, rows[H + 2], strict=True))
    split = model("LRKV").layers[0][1]["values"].numbers
    assert (first["layer"], first["projection"], first["head"]) == ("0", "values", "2")
    assert float(first["cosine"]) == split["cosine"][2]
    assert dict(zip(columns, rows[-1], strict=True))["cosine"] == ""


def test_cells_have_means_over_layers() -> None:
    columns, cells = anatomy_cells([model("MHA", kind="mha"), model("LRKV")])
    assert columns == ("Model", "Of", "Norm", "Shared", "Residual", "Cosine", "Overlap", "Error", "Least")
    assert [row[:2] for row in cells] == [("MHA", "keys"), ("MHA", "values"), ("LRKV", "keys"), ("LRKV", "values")]
    assert cells[0][3:] == ("-",) * 6
    assert cells[2][3] == f"{model('LRKV').curve('keys', 'shared_norm').mean():.3f}"


def test_the_figure_has_norms_beside_those_of_plain_heads() -> None:
    figure = anatomy_figure([model("MHA", kind="mha", scale="128M"), model("LRKV", scale="128M")])
    assert [ax.get_title() for ax in figure.axes][:5] == [
        "Norms (keys)",
        "Shared against Residual (keys)",
        "Subspaces Read (keys)",
        "Departure from the Heads' Mean (keys)",
        "Norms (values)",
    ]
    norms = figure.axes[0]
    assert [(line.get_color(), line.get_linestyle()) for line in norms.lines] == [("C0", "-"), ("C1", "-"), ("C1", "--"), ("C1", ":")]
    for line, quantity in zip(norms.lines[1:], ("norm", "shared_norm", "residual_norm"), strict=True):
        np.testing.assert_array_equal(np.asarray(line.get_ydata()), model("LRKV").curve("keys", quantity))
    errors = figure.axes[3]
    assert [text.get_text() for text in errors.texts] == ["r=2", "r=3"]
    assert len(errors.lines) == 4
    caption = figure.get_supxlabel().replace("\u00a0", " ")
    assert caption.startswith(NOT_UNIQUE.rstrip("."))


def test_no_data_lies_behind_a_legend() -> None:
    figure = anatomy_figure([model("MHA", kind="mha"), model("LRKV")])
    figure.draw_without_rendering()
    for ax in figure.axes:
        legend = ax.get_legend()
        if legend is not None:
            box = legend.get_window_extent().transformed(ax.transData.inverted())
            for line in ax.lines:
                x, y = np.asarray(line.get_xdata(), dtype=float), np.asarray(line.get_ydata(), dtype=float)
                assert not (y[x <= box.x1] > box.y0).any()


# The command


def save(config: ModelConfig, path: Path) -> Path:
    from safetensors.torch import save_file

    path.mkdir(parents=True)
    save_file({name: p.detach().clone() for name, p in decoder(config).named_parameters()}, path / "model.safetensors")
    (path / "config.json").write_text(config.to_json())
    return path


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a headrank command."""
    with pytest.raises(SystemExit) as exit:
        app(list(words), prog_name="headrank")
    out, err = capsys.readouterr()
    return int(exit.value.code or 0), out, err


def test_lrkv_writes_its_models_and_plain_heads_beside_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(save(CONFIGS[kind], tmp_path / kind)) for kind in ("mha", "lrkv", "gqa")]
    code, out, err = command(capsys, "lrkv", *paths, "--layer", "0", "-1", "--out", str(tmp_path / "out"), "--json")
    assert code == 0, err
    document = json.loads(out)
    assert out == (tmp_path / "out" / "lrkv.json").read_text()
    assert [(entry["label"], entry["ranks"], [layer["layer"] for layer in entry["layers"]]) for entry in document["models"]] == [
        ("mha", [3], [0, 2]),
        ("lrkv", [3], [0, 2]),
    ]
    assert err.splitlines()[0] == "gqa: kind gqa has no shared and residual parts; left out"
    assert err.splitlines()[-1].startswith("Wrote ")


def test_lrkv_without_such_a_model_says_what_there_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(CONFIGS["mha"], tmp_path / "mha")
    code, _, err = command(capsys, "lrkv", str(path), "--out", str(tmp_path / "out"))
    assert (code, err) == (1, "Error: no model of kind lrkv among mha (mha); its shared and residual parts are what this command shows\n")


def test_lrkv_refuses_a_measurement_and_options_of_what_is_fed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(CONFIGS["lrkv"], tmp_path / "lrkv")
    file = tmp_path / "lrkv.measurement"
    assert command(capsys, "measure", str(path), "--source", "weights", "--no-null", "-o", str(file))[0] == 0
    code, _, err = command(capsys, "lrkv", str(file), "--out", str(tmp_path / "out"))
    assert (code, err) == (1, f"Error: {file}: a measurement holds no weights to take apart; give the checkpoint\n")
    assert command(capsys, "lrkv", str(path), "--sequences", "3")[0] == 2


def test_a_spoilt_head_spoils_its_layer_alone_and_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    path = save(CONFIGS["lrkv"], tmp_path / "lrkv")
    weights = load_file(path / "model.safetensors")
    weights["transformer.h.1.attn.c_k.up"][2 * 10 + 1, 0] = float("nan")
    save_file(weights, path / "model.safetensors")
    code, out, err = command(capsys, "lrkv", str(path), "--out", str(tmp_path / "out"), "--json")
    assert code == 1
    assert "Error: lrkv: layer 1: transformer.h.1.attn.c_k.up of head 2 holds NaN or infinity (model.safetensors)" in err
    layers = json.loads(out)["models"][0]["layers"]
    assert [("reason" in layer["keys"], "reason" in layer["values"]) for layer in layers] == [(False, False), (True, False), (False, False)]
