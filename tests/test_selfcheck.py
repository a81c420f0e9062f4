"""The checks hold on every kind of attention, and each of them sees the fault that it is there for."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner, Result

from headrank import accumulators, eager, forward, selfcheck, selfcheck_command
from headrank.accumulators import OutputGram, ScoreGram
from headrank.architectures import Architecture
from headrank.checkpoints import open_checkpoint
from headrank.cli import app
from headrank.config import ModelConfig
from headrank.errors import NotFiniteError
from headrank.factors import HeadFactors, head_factors
from headrank.forward import DecoderRunner, Recorder
from headrank.measure import Reading
from headrank.model import Decoder
from headrank.selfcheck import Check, activations_checks, facts_of_layer, heads_checks, multiplied_out, some_heads, weights_checks
from tests.plain import CONFIGS, checkpoint_of, decoder

CPU = torch.device("cpu")


def checks(model: Decoder, *, altered: Architecture | None = None) -> Iterator[Check]:
    """All that selfcheck looks at, on every layer of a decoder."""
    checkpoint, architecture = checkpoint_of(model)
    yield from all_checks(checkpoint, altered or architecture, DecoderRunner(checkpoint, device=CPU, dtype=torch.float32), model.config.vocab_size)


def all_checks(checkpoint: Any, architecture: Architecture, runner: Any, vocab_size: int) -> Iterator[Check]:
    for layer in architecture.layers:
        for circuit in ("qk", "ov"):
            yield from weights_checks(checkpoint, architecture, layer, circuit, seed=0)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(3, vocab_size, (length,), generator=generator) for length in (11, 11, 7)]
    yield from activations_checks(runner, sequences, [facts_of_layer(layer) for layer in architecture.layers])
    for layer in architecture.layers:
        yield from heads_checks(runner, checkpoint, architecture, layer, torch.arange(5, 11))


def first_fault(model: Decoder, **options: Any) -> str | None:
    return next((f"{check.what} (layer {check.layer}: {check.deviation:.1e})" for check in checks(model, **options) if not check.holds), None)


@pytest.mark.parametrize("name", CONFIGS)
def test_all_checks_hold_for_every_kind_of_attention(name: str) -> None:
    found = list(checks(decoder(CONFIGS[name])))
    assert [check for check in found if not check.holds] == []
    assert len({check.what for check in found}) == 27
    assert {check.layer for check in found} == {"0", "1", "2"}
    assert all(check.deviation < 5e-6 for check in found if not check.is_change)


def test_all_checks_hold_for_odd_heads() -> None:
    model = decoder(CONFIGS["mha"])
    attn = model.blocks[1].attn
    attn.c_proj.weight.zero_()  # as fresh models have it: no head writes anything
    attn.c_q.weight[:10] = 0  # one dead head
    attn.c_q.weight[20:30] = attn.c_q.weight[10:20]  # two equal ones
    attn.c_k.weight[20:30] = attn.c_k.weight[10:20]
    model.blocks[2].attn.c_q.weight.mul_(1e12)
    assert first_fault(model) is None
    one = ModelConfig(kind="mha", **{name: value for name, value in CONFIGS["mha"].__dict__.items() if name not in ("kind", "n_head", "n_kv_head")}, n_head=1)
    assert first_fault(decoder(one)) is None


def wrong_factored_gram(left: Tensor, right: Tensor, i: Any, j: Any) -> Tensor:
    """Without the second bracket."""
    return selfcheck_factored_gram(left, left, i, i)


selfcheck_factored_gram = selfcheck.factored_gram


def biased_factored_gram(left: Tensor, right: Tensor, i: Any, j: Any) -> Tensor:
    """Depends on the place of a head."""
    gram = selfcheck_factored_gram(left, right, i, j)
    return gram * torch.linspace(1, 1.01, len(gram), dtype=torch.float64)


def wrong_scaling(self: Recorder, key: str, q: Tensor, k: Tensor, *, scaling: float, **settings: Any) -> None:
    listener_scores(self, key, q, k, scaling=scaling * 1.05, **settings)


listener_scores = eager.Listener.scores


def acausal(self: ScoreGram, q: Tensor, k: Tensor, **settings: Any) -> None:
    score_gram_add(self, q, k, **{**settings, "causal": False})


score_gram_add = ScoreGram.add


def without_padding_mask(self: OutputGram, z: Tensor, *, groups: Tensor, keep: Tensor | None = None) -> None:
    output_gram_add(self, z, groups=groups)


output_gram_add = OutputGram.add


def without_centring(self: OutputGram, *, center: bool = True) -> Tensor:
    return output_gram_grams(self, center=False)


output_gram_grams = OutputGram.grams


def transposed_projection(self: Decoder, layer: int) -> Tensor:
    weight = self.blocks[layer].attn.c_proj.weight
    return weight.unflatten(1, (self.config.n_head, self.config.d_head)).permute(1, 2, 0).flip(1)


def uncentred_rows(scores: Tensor, allowed: Tensor | None, first: int | None) -> None:
    if allowed is not None:
        scores.masked_fill_(~allowed, 0)
    if first is not None:
        scores.copy_(scores.tril(first))


def tiled(*given: Any, **named: Any) -> HeadFactors:
    factors = head_factors(*given, **named)
    H, G = len(factors.right_of_head), len(factors.right)
    return replace(factors, right_of_head=tuple(h % G for h in range(H)))


@pytest.mark.parametrize(
    ("place", "name", "fault", "what"),
    [
        (selfcheck, "factored_gram", wrong_factored_gram, "weights, qk: the factored Gram is that of heads multiplied out"),
        (selfcheck, "factored_gram", biased_factored_gram, "weights, qk: similarities are cosines"),
        (eager.Listener, "scores", wrong_scaling, "activations, qk: attention is the softmax of the recorded scores"),
        (ScoreGram, "add", acausal, "activations, qk: streamed sums are those written out"),
        (accumulators, "_center_rows", uncentred_rows, "activations, qk: streamed sums are those written out"),
        (OutputGram, "add", without_padding_mask, "activations, ov: streamed sums are those written out"),
        (OutputGram, "grams", without_centring, "activations, ov: streamed sums are those written out"),
        (Decoder, "output_projection", transposed_projection, "activations, ov: heads' outputs add up to the block's output"),
        (selfcheck, "head_factors", tiled, "weights and activations: keys of heads are those that the model runs"),
    ],
    ids=lambda value: value.__name__ if callable(value) and not isinstance(value, type) else "",
)
def test_a_fault_is_seen_by_the_check_that_is_there_for_it(
    place: Any, name: str, fault: Callable[..., Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, fault)
    found = first_fault(decoder(CONFIGS["gqa"]))
    assert found is not None
    assert found.startswith(what + " ("), found


@pytest.mark.parametrize(("projection", "words"), [("q", "queries"), ("k", "keys"), ("v", "values")])
def test_heads_that_are_cut_wrongly_are_seen(projection: str, words: str) -> None:
    """Rows of two heads are exchanged in what the architecture says; every check of the weights alone holds."""
    model = decoder(CONFIGS["mha"])
    architecture = checkpoint_of(model)[1]
    layers = []
    for layer in architecture.layers:
        cut = getattr(layer, projection)
        ((part, ((step,),)),) = cut.parts.items()
        starts = (step.weight.starts[0] + 5, *step.weight.starts[1:-1], step.weight.starts[0])
        chain = (replace(step, weight=replace(step.weight, starts=starts)),)
        layers.append(replace(layer, **{projection: replace(cut, parts={part: (chain,)})}))
    found = first_fault(model, altered=replace(architecture, layers=tuple(layers)))
    assert found is not None
    assert found.startswith(f"weights and activations: {words} of heads are those that the model runs"), found


def test_a_gram_that_no_permutation_changes_would_be_seen() -> None:
    settings: dict[str, Any] = {"what": "", "layer": "0", "tolerance": 1e-5}
    assert not Check(deviation=0.0, is_change=True, **settings).holds
    assert Check(deviation=0.1, is_change=True, **settings).holds
    assert not Check(deviation=float("nan"), **settings).holds
    assert not Check(deviation=float("nan"), is_change=True, **settings).holds


def test_a_number_that_is_none_is_named() -> None:
    model = decoder(CONFIGS["mha"])
    model.blocks[1].attn.c_k.weight[15, 3] = float("nan")
    with pytest.raises(NotFiniteError, match=r"layer 1: transformer\.h\.1\.attn\.c_k\.weight of head 1 holds NaN"):
        first_fault(model)


def test_heads_are_multiplied_out_in_blocks_and_fewer_of_them_where_they_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = torch.randn(2, 13, 3), torch.randn(2, 7, 3)
    whole = multiplied_out(left, right)
    monkeypatch.setattr(selfcheck, "BLOCK_BYTES", 2 * 7 * 8 * 2)  # two rows
    torch.testing.assert_close(multiplied_out(left, right), whole)
    heads = left.double() @ right.double().transpose(1, 2)
    torch.testing.assert_close(whole, torch.einsum("iab,jab->ij", heads, heads))
    factors = HeadFactors(torch.empty(16, 13, 3, device="meta"), torch.empty(4, 7, 3, device="meta"), tuple(range(16)), tuple(h // 4 for h in range(16)))
    assert some_heads(factors) == [0, 1, 2, 3, 12, 13, 14, 15]
    large = replace(factors, left=torch.empty(16, 16384, 128, device="meta"), right=torch.empty(4, 16384, 128, device="meta"))
    assert some_heads(large) == [0, 15]


# Models of the transformers library


@pytest.mark.parametrize(
    "kind",
    [
        "llama with biases",
        "qwen2",
        "gemma2",
        "gpt2",
        "gpt_bigcode multi-query",
        "deepseek_v3",
        "gpt_oss",
        "qwen3_next",
        "bert",
        "llama4_text",
        "falcon new",
        "t5",
        "bloom",
    ],
)
def test_all_checks_hold_for_models_of_the_library(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    assert transformers
    from tests.test_huggingface import CASES, build, quiet

    case = next(case for case in CASES if str(case) == kind)
    with quiet():
        build(case).save_pretrained(tmp_path)
    checkpoint, architecture = Reading().open(str(tmp_path))
    runner = forward.load_runner(checkpoint, architecture, device=CPU, dtype=torch.float32)
    found = list(all_checks(checkpoint, architecture, runner, 53))
    assert [check for check in found if not check.holds] == []
    kinds = {check.what.partition(":")[2].strip() for check in found}
    assert "streamed sums are those written out" in kinds
    if kind not in ("falcon new", "bloom"):  # they go their own way
        assert "attention is the softmax of the recorded scores" in kinds
    if kind not in ("deepseek_v3", "bloom"):
        assert "values of heads are those that the model runs" in kinds


def test_a_wrong_mask_of_a_library_model_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from headrank.huggingface import TransformersRunner
    from tests.test_huggingface import CASES, build

    runner = TransformersRunner(build(next(case for case in CASES if str(case) == "mistral")))
    facts = list(runner.layers)

    def windowless(self: Recorder, key: str, q: Tensor, k: Tensor, **settings: Any) -> None:
        listener_scores(self, key, q, k, **{**settings, "mask": None, "causal": True})

    monkeypatch.setattr(eager.Listener, "scores", windowless)
    sequences = [torch.arange(3, 14), torch.arange(4, 15)]
    found = next(check for check in activations_checks(runner, sequences, facts) if not check.holds)
    assert found.what == "activations, qk: attention is the softmax of the recorded scores"


# The command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of five layers in model/."""
    monkeypatch.chdir(tmp_path)
    config = ModelConfig(kind="gqa", n_kv_head=2, n_layer=5, n_head=4, d_head=6, d_model=22, d_mlp=31, vocab_size=256, context=32)
    model = decoder(config)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(config.to_json())
    save_file(dict(model.named_parameters()), tmp_path / "model" / "model.safetensors")
    return tmp_path


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["selfcheck", *map(str, words)])


def test_the_command_prints_a_line_a_check_and_exits_with_zero(folder: Path) -> None:
    result = run("model")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "model: headrank, gqa; layers 0, 2, 4"
    assert len(lines) == 29
    assert all((line.startswith("ok  ") and ", at most " in line) or ", more than " in line for line in lines[1:-1])
    assert lines[-1] == "27 checks hold."
    assert not list(folder.glob("headrank-out"))


def test_layers_and_source_may_be_chosen(folder: Path) -> None:
    result = run("model", "--layer", "1", "-1", "--source", "weights")
    assert result.stdout.splitlines()[0] == "model: headrank, gqa; layers 1, 4"
    assert result.stdout.splitlines()[-1] == "16 checks hold."
    np.save("ids.npy", np.arange(99) % 251)
    result = run("model", "--layer", "1", "--source", "activations", "--tokens", "ids.npy")
    assert result.stdout.splitlines()[-1] == "11 checks hold."
    assert run("model", "--layer", "5").exit_code == 1
    assert run("model", "--tokens", "nowhere.npy").stderr == "Error: nowhere.npy: cannot be read: No such file or directory\n"


def test_the_first_thing_that_does_not_hold_ends_it_with_exit_code_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OutputGram, "grams", without_centring)
    result = run("model")
    assert result.exit_code == 1
    line, remedy = result.stderr.splitlines()
    assert line.startswith("Error: model: does not hold in layer 0: activations, ov: streamed sums are those written out: off by ")
    assert line.endswith(", at most 1e-03 expected")
    assert "headrank inspect" in remedy
    assert "checks hold" not in result.stdout


def test_a_model_that_does_not_fit_in_memory_is_not_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck_command, "_free_memory", lambda: 1000)
    result = run("model")
    assert result.exit_code == 0
    assert "Not checked: activations (loading the model may take 0.0 GB, of which 0.0 GB are free)" in result.stdout
    assert result.stdout.splitlines()[-1] == "16 checks hold."
    assert run("model", "--source", "activations").exit_code == 1


def test_memory_is_read_from_the_system() -> None:
    free = selfcheck_command._free_memory()
    assert free is None or free > 1 << 20


def test_a_checkpoint_without_a_tokenizer_is_fed_any_tokens(folder: Path) -> None:
    config = json.loads((folder / "model" / "config.json").read_text())
    state = open_checkpoint(folder / "model")
    wider = {name: state.read(name).clone() for name in state.tensors}
    for name in ("transformer.wte.weight", "lm_head.weight"):
        wider[name] = torch.cat([wider[name], wider[name][:7]])
    (folder / "model" / "config.json").write_text(json.dumps({**config, "vocab_size": 263}))
    save_file(wider, folder / "model" / "model.safetensors")
    assert run("model").stdout.splitlines()[-1] == "27 checks hold."
    assert run("model", "--text", "model/config.json").exit_code == 1


def test_what_is_no_checkpoint_is_refused(folder: Path) -> None:
    assert run("nowhere").exit_code == 1
    (folder / "model" / "model.safetensors").write_bytes(b"")
    assert run("model").stderr == "Error: model/model.safetensors: the file is empty\n"
