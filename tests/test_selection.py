import json
from pathlib import Path

import pytest

from headrank import selection
from headrank.config import bundled_families, load_family
from headrank.errors import HeadrankError
from headrank.selection import (
    ModelRef,
    checkpoints_folder,
    default_label,
    early_middle_late,
    family_models,
    middle_layer,
    named_models,
    resolve_layers,
)
from headrank.store import LayerFacts

OWN = """
scale = "own"
[geometry]
n_layer = 2
n_head = 2
d_head = 2
d_model = 2
d_mlp = 2
vocab_size = 2
context = 2
[[variants]]
name = "a"
label = "Variant A"
kind = "mha"
[[variants]]
name = "b"
label = "Variant B"
kind = "mqa"
[figures]
spectra = ["b", "a"]
"""


def make(folder: Path, scale: str, *variants: str) -> None:
    for variant in variants:
        (folder / scale / variant).mkdir(parents=True)
        (folder / scale / variant / "config.json").write_text(json.dumps({}))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.toml").write_text(OWN)
    return tmp_path / "own.toml"


class Asked:
    """Families as a command asks for them, with the remarks that come back."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.remarks = folder, list[str]()

    def models(self, *scales: str, figure: str = "effrank", largest_only: bool = False, configs: tuple[Path, ...] = ()) -> list[ModelRef]:
        return family_models(scales, figure=figure, largest_only=largest_only, folder=self.folder, configs=configs, remark=self.remarks.append)

    def names(self, *scales: str, figure: str = "effrank", largest_only: bool = False, configs: tuple[Path, ...] = ()) -> list[str]:
        refs = self.models(*scales, figure=figure, largest_only=largest_only, configs=configs)
        return [f"{ref.scale}/{Path(ref.path).name}" for ref in refs]

    def refusal(self, *scales: str, configs: tuple[Path, ...] = ()) -> str:
        with pytest.raises(HeadrankError) as caught:
            self.models(*scales, configs=configs)
        return str(caught.value)


ALL_128M = ("mha", "lrkv-r16", "lrkv-r64", "mqa", "mla", "gqa")


def test_without_any_name_all_families_on_disk_are_shown_smallest_first(tmp_path: Path) -> None:
    make(tmp_path, "2.5B", "mha", "lrkv-r16", "lrkv-r64", "mqa", "mla", "gqa")
    make(tmp_path, "128M", *ALL_128M)
    asked = Asked(tmp_path)
    assert asked.names() == [f"128M/{name}" for name in ALL_128M] + [f"2.5B/{name}" for name in ALL_128M]
    assert asked.remarks == []
    assert asked.names(largest_only=True, figure="heatmap") == ["2.5B/mha", "2.5B/lrkv-r64", "2.5B/gqa", "2.5B/mqa", "2.5B/mla"]


def test_labels_and_paths_are_those_of_the_family(tmp_path: Path) -> None:
    make(tmp_path, "128M", *ALL_128M)
    assert Asked(tmp_path).models()[1] == ModelRef(label="LRKV (r=16)", path=str(tmp_path / "128M/lrkv-r16"), scale="128M")


def test_scales_are_shown_in_the_order_asked_for_and_once(tmp_path: Path) -> None:
    make(tmp_path, "128M", *ALL_128M)
    make(tmp_path, "2.5B", *ALL_128M)
    names = Asked(tmp_path).names("2.5B", "128M", "2.5B", figure="heatmap", largest_only=True)
    assert names == ["2.5B/mha", "2.5B/lrkv-r64", "2.5B/gqa", "2.5B/mqa", "2.5B/mla"] + [f"128M/{name}" for name in ALL_128M]


def test_missing_variants_beside_others_are_a_remark(tmp_path: Path) -> None:
    make(tmp_path, "128M", "mha", "mla")
    asked = Asked(tmp_path)
    assert asked.names("128M") == ["128M/mha", "128M/mla"]
    assert asked.remarks == [f"scale 128M: LRKV (r=16), LRKV (r=64), MQA, GQA not on disk ({tmp_path}/128M/<variant>/); left out"]


def test_a_scale_that_is_not_on_disk_is_an_error_that_says_what_makes_it(tmp_path: Path) -> None:
    make(tmp_path, "128M", *ALL_128M)
    assert Asked(tmp_path).refusal("128M", "2.5B") == (
        "scale 2.5B: none of Standard MHA, LRKV (r=16), LRKV (r=64), MQA, MLA, GQA is on disk; "
        f"looked in {tmp_path}/2.5B/<variant>/\n"
        "Train them: python scripts/train.py --config configs/2.5B.toml --text FILE, "
        "or make untrained ones: python scripts/make_checkpoint.py --config configs/2.5B.toml"
    )


def test_a_scale_that_no_family_has_is_an_error_that_lists_those_there_are(tmp_path: Path) -> None:
    assert Asked(tmp_path).refusal("3B") == "no family has the scale '3B'; there are nano, 128M, 2.5B. Give your own with --config FILE"


def test_with_nothing_on_disk_the_bundled_family_is_shown_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = tmp_path / "bundle"
    nano = [variant.name for variant in bundled_families()["nano"].variants]
    make(bundle, "nano", *nano)
    monkeypatch.setattr(selection, "bundled_checkpoints", lambda: bundle)
    asked = Asked(tmp_path / "checkpoints")
    refs = asked.models(largest_only=True)
    assert [ref.path for ref in refs] == [str(bundle / "nano" / name) for name in nano]
    assert asked.remarks == [f"no family is in {tmp_path}/checkpoints/; showing the bundled one (nano)"]
    assert [ref.path for ref in asked.models("nano")] == [ref.path for ref in refs]


def test_a_nano_family_of_ones_own_comes_before_the_bundled_one(tmp_path: Path) -> None:
    make(tmp_path, "nano", "mha")
    asked = Asked(tmp_path)
    assert [ref.path for ref in asked.models("nano")] == [str(tmp_path / "nano/mha")]
    assert "left out" in asked.remarks[0]


def test_a_config_of_ones_own_that_is_called_nano_is_never_shown_by_the_bundled_weights(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OWN.replace('"own"', '"nano"').replace('name = "a"', 'name = "mha"').replace('["b", "a"]', '["b", "mha"]'))
    assert Asked(tmp_path).refusal("nano", configs=(path,)).startswith("scale nano: none of Variant A, Variant B is on disk; ")


def test_a_family_of_ones_own_is_shown_alone_unless_others_are_asked_for(tmp_path: Path, own: Path) -> None:
    make(tmp_path, "128M", *ALL_128M)
    make(tmp_path, "own", "a", "b")
    asked = Asked(tmp_path)
    assert asked.names(configs=(own,)) == ["own/a", "own/b"]
    assert asked.names(configs=(own,), figure="spectra", largest_only=True) == ["own/b", "own/a"]
    assert asked.names("own", "128M", configs=(own,))[:3] == ["own/a", "own/b", "128M/mha"]


def test_a_family_of_ones_own_that_is_not_on_disk_names_its_file(tmp_path: Path, own: Path) -> None:
    assert load_family(own).scale == "own"
    assert f"python scripts/train.py --config {own} --text FILE" in Asked(tmp_path).refusal(configs=(own,))


def test_the_folder_of_checkpoints_is_as_given_or_from_the_environment_or_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRANK_CHECKPOINTS", "elsewhere")
    assert checkpoints_folder(Path("here")) == Path("here")
    assert checkpoints_folder(None) == Path("elsewhere")
    monkeypatch.setenv("HEADRANK_CHECKPOINTS", "")
    assert checkpoints_folder(None) == Path("checkpoints")


# ---- models by name


def test_models_are_given_as_path_or_label_and_path() -> None:
    assert named_models(["runs/a", "Mine=runs/b/", "org/name", "c.safetensors"]) == [
        ModelRef(label="a", path="runs/a"),
        ModelRef(label="Mine", path="runs/b/"),
        ModelRef(label="name", path="org/name"),
        ModelRef(label="c", path="c.safetensors"),
    ]


def test_a_path_may_contain_an_equals_sign(tmp_path: Path) -> None:
    (tmp_path / "lr=0.1").mkdir()
    assert named_models([f"{tmp_path}/lr=0.1"]) == [ModelRef(label="lr=0.1", path=f"{tmp_path}/lr=0.1")]
    assert named_models(["A=b=c"]) == [ModelRef(label="A", path="b=c")]


@pytest.mark.parametrize("model", ["", "=runs/a", "Mine="])
def test_a_model_without_a_path_or_a_label_is_refused(model: str) -> None:
    with pytest.raises(HeadrankError) as caught:
        named_models([model])
    assert str(caught.value) == f"{model!r}: a model is given as PATH or LABEL=PATH"


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(HeadrankError) as caught:
        named_models(["x/a", "y/a"])
    assert str(caught.value) == "two models are called 'a'; give each a name of its own: LABEL=PATH"


def test_a_label_is_the_last_part_of_a_path_that_says_anything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "run" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run" / "inner")
    labels = {"..": "run", ".": "inner", "a/b/": "b", "x.gguf": "x", "a/x.safetensors": "x"}
    assert {path: default_label(path) for path in labels} == labels


# ---- layers


def stack(n: int, group: str = "") -> list[LayerFacts]:
    return [LayerFacts(index=index, n_head=2, n_kv_head=2, group=group) for index in range(n)]


def keys(layers: list[LayerFacts]) -> list[str]:
    return [layer.key for layer in layers]


def test_layers_come_in_the_order_asked_for_each_once_and_negative_ones_from_the_end() -> None:
    assert keys(resolve_layers([18, 0, -1, 35, -36], stack(36), label="m")) == ["18", "0", "35"]


def test_an_index_means_that_layer_of_every_stack() -> None:
    layers = stack(3, "encoder") + stack(5, "decoder")
    assert keys(resolve_layers([1], layers, label="m")) == ["encoder.1", "decoder.1"]
    assert keys(resolve_layers([4], layers, label="m")) == ["decoder.4"]
    assert keys(resolve_layers([-1], layers, label="m")) == ["encoder.2", "decoder.4"]


@pytest.mark.parametrize("index", [12, 99, -13])
def test_a_layer_that_does_not_exist_is_refused_with_the_range_that_does(index: int) -> None:
    with pytest.raises(HeadrankError) as caught:
        resolve_layers([0, index], stack(12), label="MQA")
    assert str(caught.value) == f"MQA: no layer {index} with attention; there are 0 to 11 (or -1 to -12 from the end)"


def test_layers_without_attention_are_not_there() -> None:
    layers = [layer for layer in stack(8) if layer.index in (3, 7)]
    assert keys(resolve_layers([3, -1], layers, label="m")) == ["3", "7"]
    with pytest.raises(HeadrankError) as caught:
        resolve_layers([2], layers, label="m")
    assert str(caught.value) == "m: no layer 2 with attention; there are 3, 7"


@pytest.mark.parametrize(("n", "shown"), [(36, [0, 18, 35]), (12, [0, 6, 11]), (24, [0, 12, 23]), (3, [0, 1, 2]), (2, [0, 1]), (1, [0])])
def test_early_middle_and_late_layers_are_those_of_the_paper(n: int, shown: list[int]) -> None:
    assert early_middle_late(stack(n)) == shown
    assert middle_layer(stack(n)) == n // 2
