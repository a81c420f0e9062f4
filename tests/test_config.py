import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrank.config import KINDS, Family, ModelConfig, bundled_configs, bundled_families, load_family, parse_family
from headrank.errors import HeadrankError

GEOMETRY = {"n_layer": 2, "n_head": 6, "d_head": 10, "d_model": 13, "d_mlp": 17, "vocab_size": 31, "context": 19}
DOCUMENT = """
scale = "tiny"

[geometry]
n_layer = 2
n_head = 6
d_head = 10
d_model = 13
d_mlp = 17
vocab_size = 31
context = 19

[[variants]]
name = "mha"
label = "Standard MHA"
kind = "mha"

[[variants]]
name = "gqa"
label = "GQA"
kind = "gqa"
n_kv_head = 3

[figures]
heatmap = ["gqa", "mha"]
"""


def family_of(document: str, folder: Path) -> Family:
    path = folder / "family.toml"
    path.write_text(document, encoding="utf-8")
    return load_family(path)


def refusal_of(document: str, folder: Path) -> str:
    with pytest.raises(HeadrankError) as caught:
        family_of(document, folder)
    return str(caught.value).replace(f"{folder}/", "")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kind": "mhaa"}, "kind 'mhaa' is not an attention kind; known: mha, gqa, mqa, mla, lrkv"),
        ({"n_head": 0}, "n_head = 0 must be at least 1"),
        ({"n_layer": -3}, "n_layer = -3 must be at least 1"),
        ({"d_model": 13.0}, "d_model = 13.0 is not a whole number"),
        ({"d_mlp": "17"}, "d_mlp = '17' is not a whole number"),
        ({"context": True}, "context = True is not a whole number"),
        ({"vocab_size": 10**30}, "vocab_size is larger than any model's"),
        ({"d_head": 7}, "d_head = 7 must be even: rotary embedding turns pairs"),
        ({"kind": "mla", "d_latent": 5, "d_rope": 3}, "d_rope = 3 must be even: rotary embedding turns pairs"),
        ({"kind": "mla"}, "kind 'mla' needs d_latent, the width of its latent, of at least 1"),
        ({"kind": "gqa"}, "kind 'gqa' needs n_kv_head, its number of key-value heads"),
        ({"kind": "gqa", "n_kv_head": 4}, "n_head = 6 is not a multiple of n_kv_head = 4"),
        ({"kind": "gqa", "n_kv_head": -2}, "n_kv_head = -2 must not be negative"),
        ({"kind": "mqa", "n_kv_head": 2}, "kind 'mqa' has one key-value head, but n_kv_head = 2"),
        ({"n_kv_head": 3}, "kind 'mha' has a key-value head a head: n_head = 6, but n_kv_head = 3"),
        ({"rank": 2}, "rank = 2 belongs to kind 'lrkv', not to 'mha'"),
        ({"d_latent": 2}, "d_latent = 2 belongs to kind 'mla', not to 'mha'"),
        ({"kind": "lrkv", "d_rope": 2}, "d_rope = 2 belongs to kind 'mla', not to 'lrkv'"),
        ({"kind": "lrkv", "rank": 11}, "rank = 11 exceeds the full rank 10 of a 13x10 matrix"),
        ({"rope_theta": 0}, "rope_theta = 0 must be a number between 0 and 1e30"),
        ({"rope_theta": float("nan")}, "rope_theta = nan must be a number between 0 and 1e30"),
        ({"rope_theta": float("inf")}, "rope_theta = inf must be a number between 0 and 1e30"),
        ({"rope_theta": "1e4"}, "rope_theta = '1e4' must be a number between 0 and 1e30"),
    ],
)
def test_impossible_geometry_is_refused_by_name(changes: dict[str, object], text: str) -> None:
    with pytest.raises(HeadrankError) as caught:
        ModelConfig.from_dict({"kind": "mha", **GEOMETRY, **changes}, where="config.json")
    assert str(caught.value) == f"config.json: {text}"


def test_unknown_keys_are_refused_by_name_with_those_that_are_known() -> None:
    with pytest.raises(
        HeadrankError, match=r"^config\.json: unknown 'n_heads', 'width'; known: context, d_head, d_latent, d_mlp, d_model, d_rope, kind, n_head,"
    ):
        ModelConfig.from_dict({"kind": "mha", **GEOMETRY, "n_heads": 6, "width": 3}, where="config.json")


def test_missing_keys_are_named() -> None:
    with pytest.raises(HeadrankError) as caught:
        ModelConfig.from_dict({"kind": "mha", "n_layer": 2, "d_head": 10, "d_model": 13, "d_mlp": 17, "vocab_size": 31}, where="config.json")
    assert str(caught.value) == "config.json: missing context, n_head"


@pytest.mark.parametrize(("kind", "n_kv_head"), [("mha", 6), ("mqa", 1), ("lrkv", 6)])
def test_the_number_of_key_value_heads_follows_from_the_kind(kind: str, n_kv_head: int) -> None:
    assert ModelConfig(kind=kind, **GEOMETRY).n_kv_head == n_kv_head


def test_config_json_reads_back_as_what_was_written() -> None:
    config = ModelConfig(kind="mla", **GEOMETRY, d_latent=5, d_rope=4, rope_theta=500.0)
    document = json.loads(config.to_json())
    assert document["model_type"] == "headrank"
    assert ModelConfig.from_dict(document, where="config.json") == config


@pytest.mark.parametrize(
    ("more", "numbers"),
    [
        ({"kind": "mha"}, 2 * 6 * 10),
        ({"kind": "gqa", "n_kv_head": 3}, 2 * 3 * 10),
        ({"kind": "mqa"}, 2 * 10),
        ({"kind": "mla", "d_latent": 5}, 5),
        ({"kind": "mla", "d_latent": 5, "d_rope": 4}, 5 + 4),
        ({"kind": "lrkv", "rank": 3}, 2 * (10 + 6 * 3)),
        ({"kind": "lrkv", "rank": 0}, 2 * 10),
    ],
)
def test_kv_cache_sizes_are_the_formulas_of_the_paper(more: dict[str, object], numbers: int) -> None:
    assert ModelConfig(**GEOMETRY, **more).kv_values_per_token_and_layer == numbers


@pytest.mark.parametrize(
    ("scale", "per_token_and_layer"),
    [
        ("128M", {"mha": 1536, "lrkv-r16": 448, "lrkv-r64": 1024, "mqa": 256, "mla": 128, "gqa": 768}),
        ("2.5B", {"mha": 4608, "lrkv-r16": 832, "lrkv-r64": 2560, "mqa": 256, "mla": 384, "gqa": 1536}),
    ],
)
def test_kv_cache_sizes_of_both_scales(scale: str, per_token_and_layer: dict[str, int]) -> None:
    family = bundled_families()[scale]
    assert {variant.name: variant.model.kv_values_per_token_and_layer for variant in family.variants} == per_token_and_layer
    full = family.variant("mha").model
    for variant in family.variants:
        if variant.model.kind == "lrkv":  # the ratio of the paper: 1/H + r/d_head
            ratio = variant.model.kv_values_per_token_and_layer / full.kv_values_per_token_and_layer
            assert ratio == pytest.approx(1 / full.n_head + variant.model.rank / full.d_head)


def test_families_come_smallest_first_with_the_figures_of_the_paper() -> None:
    families = bundled_families()
    assert list(families) == ["nano", "128M", "2.5B"]
    assert [v.label for v in families["2.5B"].shown_in("heatmap")] == ["Standard MHA", "LRKV (r=64)", "GQA", "MQA", "MLA"]
    assert [v.label for v in families["2.5B"].shown_in("effrank")] == ["Standard MHA", "LRKV (r=16)", "LRKV (r=64)", "MQA", "MLA", "GQA"]
    assert [v.label for v in families["128M"].shown_in("spectra")] == ["Standard MHA", "LRKV (r=16)", "LRKV (r=64)", "MQA", "MLA", "GQA"]
    geometry = families["2.5B"].variants[0].model
    assert (geometry.n_layer, geometry.n_head, geometry.d_model, geometry.d_mlp, geometry.vocab_size) == (36, 18, 2304, 9216, 50304)
    assert families["nano"].variants[0].model.n_layer == 24


def test_every_bundled_family_file_is_read() -> None:
    assert sorted(path.stem for path in bundled_configs().glob("*.toml")) == sorted(bundled_families())


def test_a_family_of_ones_own_is_read_in_its_order(tmp_path: Path) -> None:
    family = family_of(DOCUMENT, tmp_path)
    assert family.scale == "tiny"
    assert [variant.name for variant in family.variants] == ["mha", "gqa"]
    assert [variant.name for variant in family.shown_in("heatmap")] == ["gqa", "mha"]
    assert [variant.name for variant in family.shown_in("effrank")] == ["mha", "gqa"]  # all, where the file does not say
    assert family.variant("gqa").model == ModelConfig(kind="gqa", **GEOMETRY, n_kv_head=3)


def test_an_unknown_variant_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(HeadrankError, match=r"family\.toml: no variant 'mqa'; there are mha, gqa$"):
        family_of(DOCUMENT, tmp_path).variant("mqa")


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('scale = "tiny"', "", 'family.toml: scale must be a name such as "128M", not None'),
        ('scale = "tiny"', 'scale = "../x"', "family.toml: scale must be a name such as \"128M\", not '../x'"),
        ('scale = "tiny"', 'scale = "a,b"', "family.toml: scale must be a name such as \"128M\", not 'a,b'"),
        ('scale = "tiny"', 'scales = "tiny"', "family.toml: unknown 'scales'; known: figures, geometry, scale, variants"),
        ("n_layer = 2", "n_layers = 2", "family.toml: variant 1 (mha): unknown 'n_layers'; known: context, d_head, d_latent, d_mlp,"),
        ("n_kv_head = 3", "n_kv_head = 4", "family.toml: variant 2 (gqa): n_head = 6 is not a multiple of n_kv_head = 4"),
        ("d_head = 10", "", "family.toml: variant 1 (mha): missing d_head"),
        ('name = "gqa"', 'name = "mha"', "family.toml: name 'mha' stands at more than one variant"),
        ('label = "GQA"', 'label = "Standard MHA"', "family.toml: label 'Standard MHA' stands at more than one variant"),
        ('name = "gqa"', 'name = ".."', "family.toml: variant 2: name must be the name of a folder, not '..'"),
        ('label = "GQA"', "label = 3", "family.toml: variant 2 (gqa): label must be a text, not 3"),
        ('["gqa", "mha"]', '["gqa", "mqa"]', "family.toml: figures.heatmap: unknown 'mqa'; known: gqa, mha"),
        ('["gqa", "mha"]', '["gqa", "gqa"]', "family.toml: figures.heatmap names 'gqa' more than once"),
        ('["gqa", "mha"]', "[]", "family.toml: figures.heatmap must be a list of variants' names"),
        ("heatmap = ", "heatmaps = ", "family.toml: figures: unknown 'heatmaps'; known: effrank, heatmap, spectra"),
        ("[figures]", "[[figures]]", "family.toml: figures must be a table"),
    ],
)
def test_a_wrong_family_file_is_refused_by_key(old: str, new: str, text: str, tmp_path: Path) -> None:
    assert DOCUMENT.count(old)
    assert refusal_of(DOCUMENT.replace(old, new), tmp_path).startswith(text)


def test_a_family_needs_geometry_and_variants() -> None:
    with pytest.raises(HeadrankError, match=r"^f\.toml: needs a table \[geometry\]$"):
        parse_family({"scale": "tiny"}, source=Path("f.toml"))
    with pytest.raises(HeadrankError, match=r"^f\.toml: needs at least one table \[\[variants\]\]$"):
        parse_family({"scale": "tiny", "geometry": {}, "variants": []}, source=Path("f.toml"))


@pytest.mark.parametrize("text", ["scale = ", "scale = \x00", "a = " + "[" * 5000, "a = " + "1" * 5000], ids=["half", "zero byte", "brackets", "digits"])
def test_a_file_that_is_not_toml_is_refused(text: str, tmp_path: Path) -> None:
    assert refusal_of(text, tmp_path).startswith("family.toml: not a TOML file: ")


def test_bytes_that_are_not_text_a_folder_and_no_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HeadrankError, match=r"binary\.toml: not a TOML file: "):
        load_family(tmp_path / "binary.toml")
    with pytest.raises(HeadrankError, match=r": cannot be read: Is a directory$"):
        load_family(tmp_path)
    with pytest.raises(HeadrankError, match=r"absent\.toml: no such file; a family is a TOML file like configs/nano\.toml$"):
        load_family(tmp_path / "absent.toml")


JSON_LIKE = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3), max_leaves=4)


@given(
    st.dictionaries(st.sampled_from([*GEOMETRY, "kind", "n_kv_head", "rank", "d_latent", "d_rope", "rope_theta", "other"]), JSON_LIKE), st.sampled_from(KINDS)
)
def test_any_geometry_is_a_config_or_a_refusal(changes: dict[str, object], kind: str) -> None:
    try:
        config = ModelConfig.from_dict({"kind": kind, **GEOMETRY, **changes}, where="config.json")
    except HeadrankError:
        return
    assert config.n_head % config.n_kv_head == 0
    assert config.kv_values_per_token_and_layer > 0
