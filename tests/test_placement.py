"""A model larger than one device. Devices are pretended (see pretended.py): tensors of two of them refuse to meet, and numbers are real."""

import os
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrank import forward, measure, placement
from headrank.config import ModelConfig
from headrank.errors import HeadrankError
from headrank.forward import DecoderRunner, Recorder, load_runner, needs_of, pass_over, sums_bytes
from headrank.measure import Settings
from headrank.placement import Needs, devices_of, evenly_placed, fits_one, free_bytes, gigabytes, place_parts, placed
from headrank.selection import ModelRef
from headrank.selfcheck import activations_checks
from headrank.store import LayerFacts
from headrank.tokens import Sequences
from tests.plain import CONFIGS, GEOMETRY, checkpoint_of, decoder
from tests.pretended import DEVICES, PretendedDevices
from tests.test_forward import CPU, LAYERS, RAGGED, assert_close, measured

CUDA = torch.device("cuda")
SIZES, ROOM = st.lists(st.integers(0, 11), max_size=6), st.lists(st.integers(-3, 17), min_size=1, max_size=4)


# The plan


def some_way(sizes: Sequence[int], room: Sequence[int]) -> bool:
    """Whether any assignment of parts to devices in order keeps within the room: all are tried."""
    for places in combinations_with_replacement(range(len(room)), len(sizes)):
        used = [sum(size for size, place in zip(sizes, places, strict=True) if place == device) for device in range(len(room))]
        if all(bytes_ <= room[device] for device, bytes_ in enumerate(used) if device in places):
            return True
    return not sizes


@given(SIZES, ROOM)
def test_parts_are_placed_in_order_within_the_room_exactly_where_any_way_would_do(sizes: list[int], room: list[int]) -> None:
    for places in (placed(sizes, room), evenly_placed(sizes, room)):
        if places is None:
            assert not some_way(sizes, room)
            continue
        assert len(places) == len(sizes)
        assert places == sorted(places)
        for device in set(places):
            assert sum(size for size, place in zip(sizes, places, strict=True) if place == device) <= room[device]


@given(SIZES, ROOM)
def test_an_even_plan_leaves_as_much_on_the_fullest_device_as_any(sizes: list[int], room: list[int]) -> None:
    places = evenly_placed(sizes, room)
    if places:
        left = [room[device] - sum(size for size, place in zip(sizes, places, strict=True) if place == device) for device in set(places)]
        assert not some_way(sizes, [bytes_ - min(left) - 1 for bytes_ in room])


# The devices


def start_as_torchrun_does(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": world, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 29501}.items():
        monkeypatch.setenv(name, str(value))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[torch.device, int]]:
    """A machine with three devices and what is free on each, which a test may change. Devices that were asked are listed in "asked"."""
    free = dict.fromkeys(DEVICES, 0)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(placement, "devices_of", lambda device: DEVICES)
    monkeypatch.setattr(placement, "free_bytes", free.__getitem__)
    with PretendedDevices():
        yield free


def test_the_first_devices_are_taken_and_no_more_than_it_needs(machine: dict[torch.device, int], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(placement, "free_bytes", lambda device: asked.append(device) or machine[device])
    machine.update(zip(DEVICES, (20, 13, 12), strict=True))
    options = {"work": 3, "device": CUDA, "where": "model", "remedies": []}
    assert place_parts([7, 5], [1, 4], **options) == [DEVICES[0]] * 2
    assert asked == DEVICES[:1]  # asking a device takes memory there
    assert place_parts([7, 5], [2, 4], **options) == [DEVICES[0], DEVICES[1]]
    assert place_parts([7, 5, 6], [2, 4, 0], **options) == [DEVICES[0], DEVICES[1], DEVICES[2]]
    machine[DEVICES[0]] = 2  # another program's
    assert place_parts([5, 5], [0, 0], **options) == [DEVICES[1]] * 2


def test_devices_that_are_no_cuda_devices_are_never_asked() -> None:
    assert place_parts([1 << 60], [0], work=0, device=CPU, where="model", remedies=[]) == [CPU]
    assert fits_one(1 << 60, CPU, Needs(work=1))


def test_what_does_not_fit_is_refused_with_what_it_takes_and_what_there_is(machine: dict[torch.device, int], monkeypatch: pytest.MonkeyPatch) -> None:
    machine.update(zip(DEVICES, (79_100_000_000, 30_000_000_000, 0), strict=True))
    options = {"work": 2_500_000_000, "device": CUDA, "where": "models/70B", "remedies": ["--dtype bfloat16"]}

    def refusal() -> str:
        with pytest.raises(HeadrankError) as caught:
            place_parts([80_000_000_000, 61_068_000_000], [0, 1_200_000_000], **options)
        return str(caught.value)

    assert refusal() == (
        "models/70B: does not fit: weights take 141.1 GB, sums 1.2 GB, the work 2.5 GB on each device; "
        "free are 79.1 GB on lazy:0, 30.0 GB on lazy:1, 0.0 GB on lazy:2\n"
        "Try --dtype bfloat16, --device cpu, or --source weights"
    )
    options["remedies"] = []
    assert refusal().endswith("\nTry --device cpu, or --source weights")
    options["remedies"] = ["--dtype bfloat16"]
    start_as_torchrun_does(monkeypatch, 2)
    assert refusal().endswith("Try --dtype bfloat16, starting without torchrun, which keeps every process to one device, --device cpu, or --source weights")
    assert gigabytes(141_068_000_000) == "141.1 GB"


def test_a_model_may_take_all_devices_but_for_one_that_was_named_or_that_torchrun_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert [device.index for device in devices_of(CUDA)] == [1, 0, 2]
    assert [device.index for device in devices_of(torch.device("cuda:2"))] == [2]
    monkeypatch.setenv("WORLD_SIZE", "2")  # as some clusters do for every program
    assert [device.index for device in devices_of(CUDA)] == [1, 0, 2]
    start_as_torchrun_does(monkeypatch, 1)
    assert [device.index for device in devices_of(CUDA)] == [1, 0, 2]
    start_as_torchrun_does(monkeypatch, 2)
    assert [device.index for device in devices_of(CUDA)] == [1]


def test_memory_that_the_allocator_keeps_without_need_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    assert free_bytes(torch.device("cuda:1")) == 1040


# What a pass takes


@pytest.mark.parametrize("circuits", [("qk", "ov"), ("cka",), ("keys",), ("values",)])
@pytest.mark.parametrize("name", ["gqa", "mla_rope"])
def test_the_estimate_of_sums_is_what_accumulators_hold(name: str, circuits: tuple[str, ...]) -> None:
    wide = {"n_head": 8, "d_head": 64, "d_model": 37}
    kind = {"n_kv_head": 2} if name == "gqa" else {"d_latent": 19, "d_rope": 8}
    config = ModelConfig(kind=name[:3], **{**GEOMETRY, **wide, **kind})
    checkpoint, architecture = checkpoint_of(decoder(config))
    recorder = Recorder([LayerFacts(index=1, n_head=8, n_kv_head=config.n_kv_head)], circuits, n_groups=forward.MAX_GROUPS)
    recorder.begin_batch(torch.arange(3), None)
    ids = torch.zeros(3, 5, dtype=torch.long)
    DecoderRunner(checkpoint, device=CPU, dtype=torch.float32).run(ids, None, recorder, last_layer=1)
    held = sum(tensor.nbytes for tensor in recorder.state().values())
    held += sum(metric.nbytes for outputs in recorder._outputs.values() for metric in outputs.metric)
    assert held * 0.98 < sums_bytes(architecture.layers[1], circuits) < held * 1.1
    needs = needs_of(checkpoint, architecture, architecture.layers[:2], circuits, torch.bfloat16)
    assert needs.sums.keys() == {0, 1}
    widest = 8 * (64 + config.d_rope)  # rows of the queries
    assert needs.work == forward.WORK_BYTES + forward.WORK_TOKENS * (8 * 37 + 4 * widest) * 2


def test_the_estimates_count_as_many_groups_as_a_measurement_keeps() -> None:
    assert forward.MAX_GROUPS == measure.MAX_GROUPS


# Our decoder


def spread(name: str, machine: dict[torch.device, int], **options: object) -> DecoderRunner:
    """A runner whose three blocks and embedding just fit three devices."""
    checkpoint, _ = checkpoint_of(decoder(CONFIGS[name]))
    runner = DecoderRunner(checkpoint, device=CPU, dtype=torch.float32)
    total = sum(parameter.nbytes for parameter in runner.model.parameters() if not parameter.is_meta)
    machine.update(dict.fromkeys(DEVICES, total // 2))
    return DecoderRunner(checkpoint, device=CUDA, dtype=torch.float32, **options)  # type: ignore[arg-type]


def run(runner: DecoderRunner, circuits: Sequence[str], sequences: Sequences = RAGGED) -> dict[str, np.ndarray]:
    return dict(pass_over(runner, sequences, LAYERS, circuits, device=CPU, batch_size=3, n_groups=2))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_decoder_over_several_devices_measures_what_it_measures_on_one(name: str, machine: dict[torch.device, int]) -> None:
    runner = spread(name, machine)
    devices = [block.device for block in runner.model.blocks]
    assert len(set(devices)) > 1
    assert devices == sorted(devices, key=DEVICES.index)
    for block in runner.model.blocks:
        assert {parameter.device for parameter in block.parameters()} == {block.device}
    circuits = ("qk", "ov", "cka", "keys", "values")
    whole = run(DecoderRunner(checkpoint_of(decoder(CONFIGS[name]))[0], device=CPU, dtype=torch.float32), circuits)
    found = run(runner, circuits)
    assert found.keys() == whole.keys()
    for key, gram in whole.items():
        assert_close(found[key], gram, rounding=2e-6)  # another of torch's attention functions


def test_what_the_devices_hold_is_within_their_room(machine: dict[torch.device, int]) -> None:
    runner = spread("mha", machine)
    for device, room in machine.items():
        assert sum(parameter.nbytes for parameter in runner.model.parameters() if parameter.device == device) <= room


def test_pretended_devices_notice_a_hidden_state_that_stays_behind(machine: dict[torch.device, int]) -> None:
    model = spread("mha", machine).model
    first, last = model.blocks[0], model.blocks[2]
    assert first.device != last.device
    with pytest.raises(RuntimeError, match="tensors on lazy:"):
        last.mlp(first.mlp(torch.ones(1, 13, device=first.device)))


def test_sums_of_a_pass_over_several_devices_go_on_in_another_process(machine: dict[torch.device, int]) -> None:
    runner, grams = spread("gqa", machine), []
    ids = torch.from_numpy(RAGGED.ids)
    for interrupted in (False, True):
        recorder = Recorder(LAYERS, ("qk", "ov", "cka"), n_groups=2)
        for part in (slice(0, 4), slice(4, 7)):
            if interrupted and part.start:
                state = {name: tensor.cpu() for name, tensor in recorder.state().items()}
                recorder = Recorder(LAYERS, ("qk", "ov", "cka"), n_groups=2)
                recorder.restore(state)
            recorder.begin_batch(torch.arange(7)[part] % 2, None)
            runner.run(ids[part], None, recorder, last_layer=2)
        grams.append(recorder.grams(center=True))
    assert all(np.array_equal(grams[0][key], grams[1][key]) for key in grams[0])


def test_tokens_that_change_places_change_them_on_every_device() -> None:
    first, second = torch.randn(2, 1, 1, 2, 3, generator=torch.Generator().manual_seed(0)).unbind(0)  # [B, G, T, D]
    recorder, expected = (Recorder([LayerFacts(index=0, n_head=1, n_kv_head=1)], ("keys",), n_groups=1) for _ in range(2))
    keep, swapped = torch.tensor([[True, False]]), torch.tensor([[False, True]])
    recorder.begin_batch(torch.zeros(1, dtype=torch.long), keep)
    recorder.keys("0", first)
    recorder.move_tokens(torch.tensor([[1, 0]]))
    recorder.keys("0", second)
    for k, its in ((first, keep), (second, swapped)):
        expected.begin_batch(torch.zeros(1, dtype=torch.long), its)
        expected.keys("0", k)
    assert np.array_equal(recorder.grams(center=True)["keys/0"], expected.grams(center=True)["keys/0"])


def test_a_self_check_looks_at_layers_on_several_devices(machine: dict[torch.device, int]) -> None:
    sequences = [torch.from_numpy(row[:length]) for row, length in zip(RAGGED.ids, (11, 7), strict=False)]
    checks = list(activations_checks(spread("gqa", machine), sequences, LAYERS))
    assert len(checks) == 3 * 8
    assert all(check.holds for check in checks)


def test_layers_behind_the_last_that_is_asked_for_take_no_memory(machine: dict[torch.device, int]) -> None:
    checkpoint, architecture = checkpoint_of(decoder(CONFIGS["mha"]))
    sizes = [sum(tensor.nbytes for name, tensor in checkpoint.weights.items() if f".h.{layer}." in name) for layer in range(3)]
    machine[DEVICES[0]] = checkpoint.weights["transformer.wte.weight"].nbytes + sum(sizes[:2])
    runner = DecoderRunner(checkpoint, device=CUDA, dtype=torch.float32, last_layer=1)
    assert [block.device for block in runner.model.blocks] == [DEVICES[0], DEVICES[0], torch.device("meta")]
    with pytest.raises(HeadrankError, match=r"memory: does not fit.*\nTry --dtype bfloat16, --layer N \(layers behind N are not loaded\), --device cpu"):
        DecoderRunner(checkpoint, device=CUDA, dtype=torch.float32)
    on_cpu = load_runner(checkpoint, architecture, device=CPU, dtype=torch.float32, layers=LAYERS[:1])
    assert isinstance(on_cpu, DecoderRunner)
    assert [block.device.type for block in on_cpu.model.blocks] == ["cpu", "meta", "meta"]
    whole = measured(decoder(CONFIGS["mha"]), layers=LAYERS[:1])
    found = pass_over(
        on_cpu, Sequences(ids=RAGGED.ids, lengths=np.full(7, 11), source="random"), LAYERS[:1], ("qk", "ov"), device=CPU, batch_size=3, n_groups=1
    )
    assert all(np.array_equal(found[key], whole[key]) for key in whole)


def test_sums_and_the_work_count_when_devices_are_chosen(machine: dict[torch.device, int]) -> None:
    checkpoint, _ = checkpoint_of(decoder(CONFIGS["mqa"]))
    total = sum(tensor.nbytes for name, tensor in checkpoint.weights.items() if name != "lm_head.weight")
    machine.update(dict.fromkeys(DEVICES, total + 100))

    def n_devices(needs: Needs) -> int:
        return len({block.device for block in DecoderRunner(checkpoint, device=CUDA, dtype=torch.float32, needs=needs).model.blocks})

    assert n_devices(Needs(work=50, sums={2: 50})) == 1
    assert n_devices(Needs(work=50, sums={2: 51})) == 2
    assert n_devices(Needs(work=51, sums={2: 50})) == 2


def test_a_measurement_of_one_layer_loads_none_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    def kept(*given: object, **named: object) -> object:
        loaded.append(load_runner(*given, **named))  # type: ignore[arg-type]
        return loaded[-1]

    monkeypatch.setattr(forward, "load_runner", kept)
    checkpoint = checkpoint_of(decoder(CONFIGS["gqa"]))
    monkeypatch.setattr(measure.Reading, "open", lambda self, path: checkpoint)
    monkeypatch.setattr(type(checkpoint[0]), "fingerprint", lambda self: "sha256:0")
    monkeypatch.setattr(type(checkpoint[0]), "identity", lambda self: "sha256:0")
    monkeypatch.setattr(measure, "sequences_to_feed", lambda *given: RAGGED)
    measure.measure(ModelRef(label="m", path=os.devnull), Settings(device="cpu"), layers=lambda layers: [1])
    assert [block.device.type for block in loaded[0].model.blocks] == ["cpu", "cpu", "meta"]
