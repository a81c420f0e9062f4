"""Transformers' models larger than one device: on pretended devices, and with weights that accelerate keeps on disk between two uses."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrank import placement
from headrank.errors import HeadrankError
from headrank.hf_loading import quiet
from headrank.hf_placement import device_map
from headrank.huggingface import TransformersRunner, output_weights
from headrank.placement import Needs
from headrank.selfcheck import activations_checks
from tests.pretended import DEVICES, PretendedDevices
from tests.test_hf_loading import written_as_gguf
from tests.test_huggingface import GROUPED, SIZES, Case, apart, build, case_of, measured, sequences

CUDA = torch.device("cuda")
ROUNDING = 2e-6  # another of torch's attention functions
TOO_MUCH = 1 << 60


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[torch.device, int]]:
    """What is free on each device of a machine that has three."""
    free = dict.fromkeys(DEVICES, 0)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # devices are pretended in this thread alone
    monkeypatch.setattr(placement, "devices_of", lambda device: DEVICES)
    monkeypatch.setattr(placement, "free_bytes", free.__getitem__)
    with PretendedDevices():
        yield free


def saved(model: Any, folder: Path) -> Path:
    with quiet():
        model.save_pretrained(folder)
    return folder


def spread(path: Path, model: Any, free: dict[torch.device, int], *, share: float = 0.5) -> TransformersRunner:
    """The model with that share of its bytes free on each device."""
    free.update(dict.fromkeys(DEVICES, int(share * sum(tensor.nbytes for tensor in model.parameters()))))
    return TransformersRunner.load(path, device=CUDA, dtype=torch.float32, needs=Needs(), n_bytes=TOO_MUCH)


def devices_of(model: Any) -> dict[str, torch.device]:
    return {name: parameter.device for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", ["llama", "gemma2", "bert", "bart", "t5", "gpt_neox", "deepseek_v3", "bloom"])
def test_a_model_over_several_devices_measures_what_it_measures_on_one(
    kind: str, free: dict[torch.device, int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    case = (
        case_of(kind) if kind != "deepseek_v3" else Case(kind, settings={**case_of(kind).settings, "first_k_dense_replace": 2})
    )  # no experts: their counting needs a GPU
    model = build(case)
    saved(model, tmp_path)
    capfd.readouterr()
    runner = spread(tmp_path, model, free)
    assert len(set(devices_of(runner.model).values())) > 1
    assert set(devices_of(runner.model).values()) <= set(DEVICES)
    for side in ("none", "right"):
        assert apart(measured(runner, side), measured(TransformersRunner(model), side)) < ROUNDING
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("tied", [False, True])
def test_an_output_layer_stays_on_the_cpu_unless_it_is_the_embedding(tied: bool, free: dict[torch.device, int], tmp_path: Path) -> None:
    torch.manual_seed(5)
    with quiet():
        config = transformers.AutoConfig.for_model("llama", **{**SIZES, **GROUPED, "tie_word_embeddings": tied})
        model = transformers.LlamaForCausalLM(config).eval()
    runner = spread(saved(model, tmp_path), model.model, free)
    assert apart(measured(runner, "right"), measured(TransformersRunner(model), "right")) < ROUNDING
    with torch.device("meta"):
        places = device_map(transformers.LlamaForCausalLM(config), dtype=torch.float32, device=CUDA, needs=Needs(), where="model")
    assert places["lm_head"] == (places["model.embed_tokens"] if tied else "cpu")
    assert places["model.layers.0"] != places["model.layers.1"]


def test_gguf_files_and_pickles_are_spread_as_well(free: dict[torch.device, int], tmp_path: Path) -> None:
    model = build(Case("qwen2", settings=GROUPED))
    saved(model, tmp_path / "pickle")
    (tmp_path / "pickle" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pickle" / "pytorch_model.bin")
    for path in (written_as_gguf(tmp_path / "model.gguf", model), tmp_path / "pickle"):
        runner = spread(path, model, free)
        assert len(set(devices_of(runner.model).values())) > 1
        assert apart(measured(runner, "right"), measured(TransformersRunner(model), "right")) < ROUNDING


def test_a_model_that_fits_one_device_is_loaded_as_ever(free: dict[torch.device, int], tmp_path: Path) -> None:
    model = build(case_of("llama"))
    n_bytes = sum(parameter.nbytes for parameter in model.parameters())
    saved(model, tmp_path)
    for room, fits in ((n_bytes + 12, True), (n_bytes + 11, False)):
        free[DEVICES[0]] = room
        given = {"dtype": torch.float32, "needs": Needs(work=5, sums={0: 7}), "n_bytes": n_bytes}
        assert placement.fits_one(n_bytes, CUDA, Needs(work=5, sums={0: 7})) == fits
        if not fits:
            with pytest.raises(HeadrankError, match=r"does not fit: weights take 0\.0 GB"):
                TransformersRunner.load(tmp_path, device=CUDA, **given)
    assert set(devices_of(TransformersRunner.load(tmp_path, device=torch.device("cpu"), **given).model).values()) == {torch.device("cpu")}


def test_sums_lie_where_their_layer_does(free: dict[torch.device, int]) -> None:
    with torch.device("meta"):
        model = type(build(case_of("llama")))(build(case_of("llama")).config)
    block = sum(parameter.numel() for parameter in model.layers[0].parameters()) * 2
    rest = sum(parameter.numel() for parameter in model.parameters()) * 2 - 2 * block + model.rotary_emb.inv_freq.nbytes

    def places(sums: dict[int, int]) -> list[Any]:
        found = device_map(model, dtype=torch.bfloat16, device=CUDA, needs=Needs(sums=sums, work=3), where="model")
        return [found[name] for name in ("embed_tokens", "layers.0", "layers.1")]

    free[DEVICES[0]], free[DEVICES[1]] = rest + block + 20, block + 13
    assert places({0: 17, 1: 10}) == [DEVICES[0], DEVICES[0], DEVICES[1]]
    for too_much in ({0: 18, 1: 10}, {0: 17, 1: 11}):
        with pytest.raises(HeadrankError, match=r"does not fit.*\nTry --layer N \(sums of fewer layers\), --device cpu, or --source weights"):
            places(too_much)


def test_a_model_without_blocks_stays_whole(free: dict[torch.device, int], tmp_path: Path) -> None:
    model = build(case_of("albert"))
    saved(model, tmp_path)
    with pytest.raises(
        HeadrankError, match=r"\(AlbertModel has no blocks that could lie on different devices\): does not fit: .*\nTry --dtype bfloat16, --dev"
    ):
        spread(tmp_path, model, free)
    runner = spread(tmp_path, model, free, share=1.1)
    assert set(devices_of(runner.model).values()) == {DEVICES[0]}
    assert apart(measured(runner, "right"), measured(TransformersRunner(model), "right")) < ROUNDING


def test_without_accelerate_the_message_says_what_to_install(free: dict[torch.device, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(case_of("llama"))
    saved(model, tmp_path)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *given: None if name == "accelerate" else find_spec(name, *given))
    with pytest.raises(HeadrankError, match=r"larger than the device needs accelerate: pip install 'headrank\[hf\]'"):
        spread(tmp_path, model, free)


def test_a_self_check_looks_at_layers_on_several_devices(free: dict[torch.device, int], tmp_path: Path) -> None:
    model = build(case_of("llama"))
    runner = spread(saved(model, tmp_path), model, free)
    checks = list(activations_checks(runner, [ids[0] for ids in sequences()], runner.layers))
    assert any("attention is the softmax" in check.what for check in checks)
    assert all(check.holds for check in checks)


# Weights that are not there between two uses of their module


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_oss", "bert", "bloom"])
def test_a_model_whose_weights_are_partly_on_disk_measures_the_same(kind: str, tmp_path: Path) -> None:
    model = build(case_of(kind))
    saved(model, tmp_path)
    with torch.device("meta"), quiet():
        empty = type(model)(model.config)
    places = dict.fromkeys(device_map(empty, dtype=torch.float32, device=torch.device("cpu"), needs=Needs(), where="model"), "cpu")
    places |= dict.fromkeys([*places][-1:] + (["embed_tokens"] if kind == "llama" else []), "disk")
    with quiet():
        parted = type(model).from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "offloaded", dtype=torch.float32)
    whole, runner = TransformersRunner(model), TransformersRunner(parted)
    assert {parameter.device.type for parameter in parted.parameters()} == {"cpu", "meta"}
    for side in ("none", "left"):
        assert apart(measured(runner, side), measured(whole, side)) == 0
    path = max(path for path, _ in runner.places)  # in the last layer, which is on disk
    n_head = runner.layers[-1].n_head
    assert runner.projection(path).weight.is_meta
    assert torch.equal(output_weights(runner.projection(path), n_head), output_weights(whole.projection(path), n_head))
