import json
import os
import random
import struct
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from headrank.errors import HeadrankError
from headrank.store import LayerFacts, Measurement, ModelFacts, Store, is_measurement, read_measurement, write_measurement

MODEL = ModelFacts(
    checkpoint="runs/a",
    fingerprint="sha256:0",
    family="headrank",
    kind="gqa",
    n_layer=5,
    n_head=3,
    n_kv_head=1,
    d_model=13,
    d_head=10,
    n_parameters=999,
    kv_values_per_token=20,
    trained={"tokens_seen": 7, "validation_loss": 1.5},
)


def layers(*indices: int) -> tuple[LayerFacts, ...]:
    return tuple(LayerFacts(index=index, n_head=3, n_kv_head=1, window=17 if index == 2 else None) for index in indices)


def gram(seed: int, *, groups: int = 2) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(groups, 3, 7))
    return vectors @ vectors.transpose(0, 2, 1)


def measurement(*indices: int, seed: int = 0) -> Measurement:
    """Both circuits of the layers; the last one's qk has a fault."""
    grams = {f"{circuit}/{index}": gram(seed + 10 * index + len(circuit)) for circuit in ("qk", "ov") for index in indices}
    del grams[f"qk/{indices[-1]}"]
    return Measurement(
        model=MODEL,
        source="activations",
        settings={"center": True, "dtype": "float32"},
        tokens={"source": "a.txt", "sha256": "0", "n_sequences": 9, "seq_len": 11, "n_tokens": 99, "seed": 0},
        layers=layers(*indices),
        grams=grams,
        faults={f"qk/{indices[-1]}": "layer holds NaN"},
        null={"qk": {"uncentered": [2.5, 2.75], "centered": [1.5]}},
    )


def assert_same(found: Measurement, expected: Measurement) -> None:
    assert replace(found, grams={}) == replace(expected, grams={})
    assert found.grams.keys() == expected.grams.keys()
    for name, values in expected.grams.items():
        np.testing.assert_array_equal(found.grams[name], values)
        assert found.grams[name].dtype == np.float64


def test_a_measurement_reads_back_as_it_was_written(tmp_path: Path) -> None:
    whole = measurement(0, 2, 4)
    write_measurement(whole, tmp_path / "m.safetensors")
    assert_same(read_measurement(tmp_path / "m.safetensors"), whole)
    assert is_measurement(tmp_path / "m.safetensors")
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_grams_that_lie_transposed_in_memory_are_written_as_they_are(tmp_path: Path) -> None:
    whole = measurement(0, 2)
    turned = {name: np.asfortranarray(np.arange(18.0).reshape(2, 3, 3)) for name in whole.grams}
    write_measurement(replace(whole, grams=turned), tmp_path / "m.safetensors")
    for values in read_measurement(tmp_path / "m.safetensors").grams.values():
        np.testing.assert_array_equal(values, np.arange(18.0).reshape(2, 3, 3))


def test_a_measurement_whose_layers_all_have_faults_is_kept_too(tmp_path: Path) -> None:
    spoilt = replace(measurement(0), grams={}, faults={"qk/0": "NaN", "ov/0": "NaN"})
    write_measurement(spoilt, tmp_path / "m.safetensors")
    assert_same(read_measurement(tmp_path / "m.safetensors"), spoilt)


def test_the_same_measurement_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_measurement(measurement(0, 2), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_layers_gram_is_the_sum_over_groups_and_none_where_it_has_a_fault() -> None:
    whole = measurement(0, 2)
    np.testing.assert_allclose(whole.gram("ov", whole.layers[1]), whole.grams["ov/2"][0] + whole.grams["ov/2"][1])
    assert whole.gram("qk", whole.layers[1]) is None


def test_layers_have_names_of_their_own_in_every_stack() -> None:
    assert LayerFacts(index=3, n_head=2, n_kv_head=2).key == "3"
    assert LayerFacts(index=3, n_head=2, n_kv_head=2, group="encoder").key == "encoder.3"


def test_joined_measurements_have_the_layers_of_both_in_order_and_the_firsts_where_both_have_one() -> None:
    first, second = measurement(2, 4, seed=0), measurement(0, 3, 4, seed=1)
    both = first.joined(second)
    assert [layer.index for layer in both.layers] == [0, 2, 3, 4]
    np.testing.assert_array_equal(both.grams["ov/4"], first.grams["ov/4"])
    np.testing.assert_array_equal(both.grams["qk/0"], second.grams["qk/0"])
    assert both.faults == {"qk/4": "layer holds NaN"}


def test_a_fault_of_a_layer_that_was_measured_again_is_gone() -> None:
    again = replace(measurement(4), grams={"qk/4": gram(1), "ov/4": gram(2)}, faults={})
    both = again.joined(measurement(0, 4))
    assert both.faults == {}
    np.testing.assert_array_equal(both.gram("qk", layers(4)[0]), gram(1).sum(0))
    spoilt_again = measurement(4).joined(again)
    assert spoilt_again.faults == {"qk/4": "layer holds NaN"}
    assert spoilt_again.gram("qk", layers(4)[0]) is None


# ---- files that are none, or broken


def rest_of(whole: Measurement) -> dict[str, Any]:
    return {"schema": 1, **asdict(replace(whole, grams={}))}


def written(path: Path, rest: Any, grams: dict[str, np.ndarray] | None = None) -> Path:
    path.write_bytes(save(measurement(0, 2).grams if grams is None else grams, metadata={"headrank": json.dumps(rest)}))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(HeadrankError) as caught:
        read_measurement(path)
    return str(caught.value).removeprefix(f"{path}: ")


def test_files_that_are_no_measurement_are_refused_and_say_so_of_themselves(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    assert "No such file" in refusal(path)
    assert not is_measurement(path)
    for content in (b"", b"hello", b"\x00" * 100, struct.pack("<Q", 2**60) + b"{}", save({"x": np.zeros(3)})):
        path.write_bytes(content)
        assert refusal(path).startswith("not a measurement of headrank: ")
        assert not is_measurement(path)
    assert not is_measurement(tmp_path)
    with pytest.raises(HeadrankError, match="not a measurement of headrank: "):
        read_measurement(tmp_path)


def test_a_measurement_of_another_schema_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "m", rest_of(measurement(0, 2)) | {"schema": 2})
    assert refusal(path) == "a measurement of another version of headrank; measure again"


@pytest.mark.parametrize("rest", [5, "text", [], None, {}, {"schema": 1}])
def test_a_header_that_is_no_record_is_refused(rest: Any, tmp_path: Path) -> None:
    assert refusal(written(tmp_path / "m", rest)).startswith("not a measurement of headrank: ")


def changed(change: dict[str, Any], place: str | None = None) -> dict[str, Any]:
    rest = rest_of(measurement(0, 2))
    if place == "layers":
        rest["layers"] = [rest["layers"][0] | change, rest["layers"][1]]
    elif place == "model":
        rest["model"] = rest["model"] | change
    else:
        rest |= change
    return json.loads(json.dumps(rest))


@pytest.mark.parametrize(
    ("rest", "text"),
    [
        (changed({"n_head": "3"}, "layers"), "n_head is of the wrong type"),
        (changed({"index": True}, "layers"), "index is of the wrong type"),
        (changed({"index": -1}, "layers"), "its list of layers is impossible"),
        (changed({"n_kv_head": 0}, "layers"), "its list of layers is impossible"),
        (changed({"n_kv_head": 4}, "layers"), "its list of layers is impossible"),
        (changed({"index": 2}, "layers"), "its list of layers is impossible"),
        (changed({"window": "all"}, "layers"), "window is of the wrong type"),
        (changed({"d_head": None}, "model"), "d_head is of the wrong type"),
        (changed({"trained": []}, "model"), "trained is of the wrong type"),
        (changed({"faults": ["qk/2"]}), "faults is of the wrong type"),
        (changed({"settings": None}), "settings is of the wrong type"),
        (changed({"tokens": 3}), "tokens is of the wrong type"),
        (changed({"tokens": {"source": "a.txt", "n_tokens": 99}}), "what it says of the tokens is not what a measurement says"),
        (changed({"tokens": measurement(0).tokens | {"seed": "0"}}), "what it says of the tokens is not what a measurement says"),
        (changed({"null": {"qk": {"centered": ["1"]}}}), "null is of the wrong type"),
        (changed({"null": {"qk": {"centered": [-1e300, 1.0]}}}), "random heads cannot have such ranks"),
        (changed({"null": {"qk": {"centered": [4.5]}}}), "random heads cannot have such ranks"),
        (changed({"faults": {}}), "not every layer has a Gram matrix or a reason why not"),
        (changed({"faults": {"qk/2": "NaN", "qk/0": "NaN"}}), "not every layer has a Gram matrix or a reason why not"),
        (changed({"faults": {"qk/2": "NaN", "xx/0": "NaN", "xx/2": "NaN"}}), "not every layer has a Gram matrix or a reason why not"),
    ],
)
def test_records_that_contradict_themselves_are_refused(rest: dict[str, Any], text: str, tmp_path: Path) -> None:
    assert refusal(written(tmp_path / "m", rest)) == f"not a measurement of headrank: {text}"


@pytest.mark.parametrize(
    "values",
    [
        np.zeros((2, 3, 4)),
        np.zeros((3, 3)),
        np.zeros((0, 3, 3)),
        np.zeros((2, 4, 4)),
        np.full((2, 3, 3), np.nan),
        np.full((2, 3, 3), np.inf),
        np.zeros((2, 3, 3), dtype=np.float32),
        np.zeros((2, 3, 3), dtype=np.int64),
    ],
)
def test_grams_that_are_none_are_refused(values: np.ndarray, tmp_path: Path) -> None:
    path = written(tmp_path / "m", changed({}), measurement(0, 2).grams | {"qk/0": values})
    assert refusal(path) == f"not a measurement of headrank: qk/0 of shape {list(values.shape)} is no finite Gram matrix of a layer it names"


def test_a_gram_of_a_layer_that_is_not_named_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "m", changed({}), measurement(0, 2).grams | {"qk/9": gram(0)})
    assert refusal(path).startswith("not a measurement of headrank: qk/9 of shape [2, 3, 3] is no finite Gram matrix")


def test_numbers_that_json_does_not_have_are_neither_written_nor_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_measurement(replace(measurement(0, 2), settings={"x": float("nan")}), tmp_path / "m")
    assert not list(tmp_path.iterdir())
    path = written(tmp_path / "m", rest_of(measurement(0, 2)) | {"settings": {"x": float("inf")}})
    assert refusal(path) == "not a measurement of headrank: it says Infinity"


def test_one_bit_that_turned_anywhere_in_the_numbers_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write_measurement(measurement(0, 2), path)
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for place in range(header, len(whole), 5):
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        assert refusal(path) == "a measurement that was changed after it was written; measure again"


@pytest.mark.parametrize("change", [{"settings": {"center": False, "dtype": "float32"}}, {"tokens": None}, {"source": "weights"}, {"null": {}}])
def test_a_record_that_was_edited_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path / "m", changed(change))
    assert refusal(path) == "a measurement that was changed after it was written; measure again"


def test_mutated_measurements_are_refused_or_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write_measurement(measurement(0, 2), path)
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    generator = random.Random(0)
    n_refused = 0
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(generator.choice((1, 1, 2, 5))):
            place = generator.randrange(header)
            kind = generator.random()
            if kind < 0.6:
                content[place] = generator.choice(b'0123456789"{}[],:-e.xntf' + bytes(range(256)))
            elif kind < 0.8:
                del content[place]
                content[:8] = struct.pack("<Q", header - 9)
            else:
                content = content[: generator.randrange(len(content))] or content
                break
        path.write_bytes(content)
        try:
            assert_same(read_measurement(path), measurement(0, 2))
        except HeadrankError:
            n_refused += 1
        is_measurement(path)
    assert n_refused > 350


# ---- the store


def test_the_store_finds_what_it_kept_by_its_key(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "folder")
    key = Store.key(checkpoint="sha256:0", source="weights", raw=False)
    assert store.find(key) is None
    assert store.keep(key, measurement(0, 2)) is None
    found = store.find(key)
    assert found is not None
    assert_same(found, measurement(0, 2))
    assert store.find(Store.key(checkpoint="sha256:0", source="weights", raw=True)) is None


def test_the_key_sees_every_part_and_not_their_order() -> None:
    keys = [
        Store.key(checkpoint="a", source="weights"),
        Store.key(checkpoint="b", source="weights"),
        Store.key(checkpoint="a", source="activations"),
        Store.key(checkpoint="a", source="weights", raw=True),
        Store.key(checkpoint="a", source="weights", seed=1),
        Store.key(checkpoint="a", source="weights", seed="1"),
    ]
    assert len(set(keys)) == len(keys)
    assert Store.key(source="weights", checkpoint="a") == keys[0]


@pytest.mark.parametrize("content", [b"", b"hello", save({"x": np.zeros(3)})])
def test_a_broken_file_in_the_store_counts_as_none_and_is_replaced(content: bytes, tmp_path: Path) -> None:
    store, key = Store(tmp_path), Store.key(a=1)
    (tmp_path / f"{key}.safetensors").write_bytes(content)
    assert store.find(key) is None
    assert store.keep(key, measurement(0)) is None
    assert store.find(key) is not None


def test_a_file_that_was_cut_off_counts_as_none(tmp_path: Path) -> None:
    store, key = Store(tmp_path), Store.key(a=1)
    store.keep(key, measurement(0, 2))
    path = tmp_path / f"{key}.safetensors"
    whole = path.read_bytes()
    for length in (0, 7, 8, 50, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert store.find(key) is None


def test_a_store_that_cannot_be_written_says_why_and_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = Store(tmp_path / "file" / "store")
    assert store.keep(Store.key(a=1), measurement(0)) == f"{tmp_path}/file/store: measurements are not kept: Not a directory"
    assert store.find(Store.key(a=1)) is None


def test_an_interrupted_write_leaves_the_old_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, key = Store(tmp_path), Store.key(a=1)
    store.keep(key, measurement(0))

    def interrupted(self: Path, data: bytes) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.keep(key, measurement(2))
    monkeypatch.undo()
    found = store.find(key)
    assert found is not None
    assert_same(found, measurement(0))
    assert os.listdir(tmp_path) == [f"{key}.safetensors"]


def test_the_default_store_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRANK_CACHE", "/a/b")
    assert Store.default().folder == Path("/a/b")
    monkeypatch.delenv("HEADRANK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert Store.default().folder == Path("/c/headrank")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert Store.default().folder == Path("/h/.cache/headrank")
