"""Suggestions carried out: what must leave a model's function alone does, and the loss tells good groups from bad ones."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from headrank.alignment import Turns
from headrank.architectures import AttentionLayer, describe
from headrank.checkpoints import open_checkpoint
from headrank.cli import app
from headrank.config import ModelConfig
from headrank.errors import HeadrankError
from headrank.measure import Settings
from headrank.merging import Heads, aligned, key_turns, normalised, read_heads, shared
from headrank.model import Decoder, load_decoder, new_decoder
from headrank.regroup import Rewritten, grouped_config, plain_config, rewritten
from headrank.selection import ModelRef
from headrank.suggest import Request, suggest
from headrank.trial import TrialRequest, strongest_first, try_out, verdict
from tests.planted import CONFIG, HIDDEN, changed, own_text, planted_decoder, random_rotation, write_decoder

GROUPS = ((0, 4, 5), (1, 2, 3))
IDS = torch.randint(CONFIG.vocab_size, (5, 29), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of noisy copies in hidden groups, and text of its own beside it."""
    folder = tmp_path_factory.mktemp("planted")
    model = planted_decoder(noise=0.1)
    np.save(folder / "tokens.npy", own_text(model, n_sequences=48, length=31).numpy())
    return write_decoder(model, folder / "model")


def settings(planted: Path, **other: Any) -> Settings:
    return replace(
        Settings(source="weights", tokens=((planted if planted.is_dir() else planted.parent).parent / "tokens.npy",), n_sequences=48, device="cpu"), **other
    )


def trial(planted: Path, folder: Path, **request: Any) -> dict[str, Any]:
    return try_out(ModelRef(label="hidden", path=str(planted)), TrialRequest(**request), settings(planted), folder)


def loss(found: dict[str, Any], name: str) -> float:
    return next(arm["loss"] for arm in found["losses"] if arm["name"] == name)


def loaded(model: Rewritten | Path) -> Decoder:
    """In float64."""
    if isinstance(model, Path):
        checkpoint = open_checkpoint(model)
        model = Rewritten(ModelConfig.from_dict(checkpoint.config, where="test"), checkpoint, {})
    names = model.checkpoint.tensors.keys()
    return load_decoder(model.config, model.read, names=names, device=torch.device("cpu"), dtype=torch.float64, where="test")


def logits(model: Rewritten | Path) -> Tensor:
    with torch.no_grad():
        return loaded(model)(IDS)


def with_heads(planted: Path, config: ModelConfig, turns: Turns | None, n_groups: int | None) -> Rewritten:
    checkpoint = open_checkpoint(planted)
    architecture = describe(checkpoint)

    def heads(layer: AttentionLayer) -> Heads:
        allowed = key_turns(checkpoint, layer)[0] if turns is None else turns
        found = aligned(normalised(read_heads(checkpoint, architecture, layer)), GROUPS, allowed)
        return found if n_groups is None else shared(found, n_groups)

    return rewritten(checkpoint, config, architecture.layers, heads)


def test_order_size_and_aligned_bases_of_heads_leave_the_logits_as_they_are(planted: Path) -> None:
    after = with_heads(planted, CONFIG, None, None)
    before = open_checkpoint(planted).read("transformer.h.0.attn.c_k.weight")
    assert not torch.allclose(after.read("transformer.h.0.attn.c_k.weight"), before, atol=0.1)
    torch.testing.assert_close(logits(after), logits(planted), atol=1e-5, rtol=0)


def test_turns_that_mix_rotary_pairs_would_change_the_logits(planted: Path) -> None:
    mixed = with_heads(planted, CONFIG, Turns.anything(CONFIG.d_head), None)
    assert (logits(mixed) - logits(planted)).abs().max() > 0.1


def test_equal_keys_and_values_can_be_shared_without_any_loss(tmp_path: Path) -> None:
    model = planted_decoder(noise=0.0)
    folder = write_decoder(model, tmp_path / "model")
    np.save(tmp_path / "tokens.npy", own_text(model, n_sequences=3, length=31).numpy())
    found = trial(folder, tmp_path / "merged", n_groups=3, n_random=0)
    torch.testing.assert_close(logits(tmp_path / "merged"), logits(folder), atol=1e-5, rtol=0)
    assert loss(found, "suggested") == pytest.approx(loss(found, "before"), abs=1e-5)
    assert loss(found, "other values") == pytest.approx(loss(found, "before"), abs=1e-5)


@pytest.mark.parametrize("values", ["mean", "fit"])
def test_hidden_groups_lose_measurably_less_than_consecutive_and_random_ones(planted: Path, tmp_path: Path, values: str) -> None:
    found = trial(planted, tmp_path / "merged", n_groups=3, n_random=3, values=values)
    assert [tuple(map(tuple, layer["groups"])) for layer in found["layers"]] == list(HIDDEN)
    before, suggested, consecutive = (loss(found, name) for name in ("before", "suggested", "consecutive"))
    assert suggested - before < 0.05
    assert consecutive - suggested > 0.1
    assert found["losses"][3]["name"] == "consecutive"
    assert found["losses"][3]["suggested_less_this"]["high"] < 0
    assert all(loss(found, f"random {number}") > suggested for number in range(3))
    assert "The suggestion is better than consecutive groups" in found["verdict"]
    assert "better than every random choice" in found["verdict"]


@pytest.mark.parametrize(("n_groups", "kind"), [(3, "gqa"), (2, "gqa"), (1, "mqa")])
def test_the_merged_checkpoint_loads_as_its_new_kind_with_the_effective_rank_that_suggest_predicted(
    planted: Path, tmp_path: Path, n_groups: int, kind: str
) -> None:
    found = trial(planted, tmp_path / "merged", n_groups=n_groups, n_random=0)
    architecture = describe(open_checkpoint(tmp_path / "merged"))
    assert (architecture.kind, architecture.n_head, architecture.n_kv_head) == (kind, 6, n_groups)
    assert (
        found["kv_values_per_token"] == {"before": 2 * 2 * 6 * 10, "after": 2 * 2 * n_groups * 10} == {"before": 240, "after": architecture.kv_values_per_token}
    )
    suggested = suggest(ModelRef(label="hidden", path=str(planted)), Request(n_groups=n_groups), Settings(source="weights"))
    for circuit in ("qk", "ov"):
        predicted = suggested["join"]["effective_rank"][circuit]
        assert found["effective_rank"]["predicted"][circuit] == pytest.approx(predicted, rel=1e-12)
        assert found["effective_rank"]["measured"][circuit] == pytest.approx(predicted, rel=1e-5)  # weights are written in float32
    assert suggested["join"]["effective_rank"]["ov"] < 5.9  # merging has changed it
    assert torch.isfinite(logits(tmp_path / "merged")).all()


def test_shared_keys_are_the_mean_of_the_aligned_ones_in_the_order_of_the_groups(planted: Path) -> None:
    merged = with_heads(planted, grouped_config(CONFIG, 2), None, 2)
    apart = with_heads(planted, CONFIG, None, None)
    D = CONFIG.d_head
    for name in ("c_k", "c_v"):
        own = apart.read(f"transformer.h.1.attn.{name}.weight").view(2, 3, D, -1)
        torch.testing.assert_close(merged.read(f"transformer.h.1.attn.{name}.weight").view(2, D, -1), own.mean(1))
    for name in ("c_q", "c_proj"):
        assert torch.equal(merged.read(f"transformer.h.1.attn.{name}.weight"), apart.read(f"transformer.h.1.attn.{name}.weight"))


def test_tensors_that_are_not_rewritten_are_the_checkpoints_own(planted: Path, tmp_path: Path) -> None:
    trial(planted, tmp_path / "merged", n_groups=2, n_random=0)
    before, after = open_checkpoint(planted), open_checkpoint(tmp_path / "merged")
    assert before.tensors.keys() == after.tensors.keys()
    for name in before.tensors:
        assert torch.equal(before.read(name), after.read(name)) == (".attn." not in name)


def test_one_group_says_that_there_is_nothing_to_choose(planted: Path, tmp_path: Path) -> None:
    found = trial(planted, tmp_path / "merged", n_groups=1)
    assert [arm["name"] for arm in found["losses"]] == ["before", "suggested", "other values", "as they lie"]
    assert found["verdict"].startswith("One group: there is only one grouping, so nothing to choose. It costs +")


def duplicated(model: Decoder) -> None:
    """In layer 0 head 4 becomes head 1 and in layer 1 head 2 becomes head 5, in bases of their own and with other sizes."""
    generator = torch.Generator().manual_seed(9)
    D = model.config.d_head
    for layer, source, copy in ((0, 1, 4), (1, 5, 2)):
        attn = model.blocks[layer].attn
        of, to = slice(source * D, (source + 1) * D), slice(copy * D, (copy + 1) * D)
        mix = 3 * random_rotation(D, generator).float()
        attn.c_q.weight[to], attn.c_k.weight[to] = 2 * attn.c_q.weight[of], 0.5 * attn.c_k.weight[of]
        attn.c_v.weight[to] = mix.T @ attn.c_v.weight[of]
        attn.c_proj.weight[:, to] = 0.4 * attn.c_proj.weight[:, of] @ torch.linalg.inv(mix).T


@pytest.fixture(scope="module")
def doubled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doubled")
    model = changed(planted_decoder(noise=1.0), duplicated)
    np.save(folder / "tokens.npy", own_text(model, n_sequences=6, length=31).numpy())
    return write_decoder(model, folder / "model")


def test_a_duplicate_head_goes_without_any_loss_and_the_one_that_stays_writes_for_both(doubled: Path, tmp_path: Path) -> None:
    found = trial(doubled, tmp_path / "thinned", n_removed=1, n_random=2, threshold=0.99)
    assert [layer["stand_ins"] for layer in found["layers"]] == [[[1, 4]], [[5, 2]]]
    torch.testing.assert_close(logits(tmp_path / "thinned"), logits(doubled), atol=1e-5, rtol=0)
    assert loss(found, "suggested") == pytest.approx(loss(found, "before"), abs=1e-5)
    assert all(loss(found, name) > loss(found, "before") + 1e-3 for name in ("dropped", "random 0", "random 1"))
    architecture = describe(open_checkpoint(tmp_path / "thinned"))
    assert (architecture.kind, architecture.n_head, architecture.d_head) == ("mha", 5, 10)
    for circuit in ("qk", "ov"):
        assert found["effective_rank"]["measured"][circuit] == pytest.approx(found["effective_rank"]["predicted"][circuit], rel=1e-5)


def test_layers_must_lose_as_many_heads_or_nothing_is_removed(doubled: Path, tmp_path: Path) -> None:
    with pytest.raises(HeadrankError, match=r"every layer must lose as many heads, but of layer 0 none can go above 0\.9: heads \d and \d are 0\.\d+ alike"):
        trial(doubled, tmp_path / "thinned", n_removed=2, threshold=0.9)
    assert not (tmp_path / "thinned").exists()
    with pytest.raises(HeadrankError, match="hidden: of 6 heads a layer, 6 cannot be removed; choose from 1 to 5"):
        trial(doubled, tmp_path / "thinned", n_removed=6)


def test_all_heads_but_one_can_be_removed(doubled: Path, tmp_path: Path) -> None:
    found = trial(doubled, tmp_path / "thinned", n_removed=5, n_random=0)
    assert [len(layer["stand_ins"][0]) for layer in found["layers"]] == [6, 6]
    assert found["effective_rank"]["measured"] == {"qk": 1.0, "ov": 1.0}


def test_the_strongest_head_of_a_cluster_is_kept() -> None:
    generator = torch.Generator().manual_seed(4)
    W_V, W_O = torch.randn(3, 11, 2, generator=generator).double(), torch.randn(3, 1, 2, 11, generator=generator).double()
    sizes = torch.linalg.matrix_norm(W_V @ W_O[:, 0])
    W_O *= (torch.tensor([1.0, 3.0, 2.0]) / sizes)[:, None, None, None]
    heads = Heads(W_Q=torch.zeros(3, 1, 11, 2), W_K=torch.zeros(3, 11, 2), W_V=W_V, W_O=W_O)
    assert strongest_first(heads, ((0, 1, 2),)) == [(1, 2, 0)]
    assert strongest_first(heads, ((0, 1), (2,))) == [(1, 0), (2,)]


@pytest.mark.parametrize(
    ("gain", "noise", "random", "said"),
    [
        (-0.2, 0.1, (2.3, 2.4), ("better than consecutive groups: -0.2", "better than every random choice")),
        (0.2, 0.1, (2.3, 2.1), ("worse than consecutive groups: +0.2", "better than 1 of 2 random choices")),
        (0.0, 0.1, (2.0, 2.1), ("no better than consecutive groups", "worse than every random choice")),
    ],
)
def test_the_verdict_says_which_way_it_went(gain: float, noise: float, random: tuple[float, ...], said: tuple[str, str]) -> None:
    suggested = np.full(64, 2.2)
    apart = gain + noise * np.tile([1.0, -1.0], 32)
    found = {"before": np.full(64, 2.0), "suggested": suggested, "consecutive": suggested - apart}
    found |= {f"random {number}": np.full(64, value) for number, value in enumerate(random)}
    text = verdict(found, "consecutive")
    assert text.startswith("It costs +0.2000 nats a token.")
    assert all(part in text for part in said)


def test_other_values_that_lose_less_are_told() -> None:
    found = {"before": np.full(7, 2.0), "suggested": np.full(7, 2.5), "other values": np.full(7, 2.3), "consecutive": np.full(7, 2.6)}
    assert verdict(found, "consecutive").endswith("With values merged the other way it would cost 0.200 nats a token less (95 % interval 0.200 to 0.200).")
    found["other values"] = np.full(7, 2.7)
    assert "other way" not in verdict(found, "consecutive")


def test_checkpoints_that_are_not_ours_with_plain_heads_are_refused(tmp_path: Path, planted: Path) -> None:
    config = replace(CONFIG, kind="gqa", n_kv_head=2)
    folder = write_decoder(new_decoder(config, seed=0), tmp_path / "gqa")
    with pytest.raises(
        HeadrankError, match="headrank try rewrites headrank's own checkpoints of kind mha, and this one is kind gqa\nTake the groups from headrank suggest"
    ):
        try_out(ModelRef(label="gqa", path=str(folder)), TrialRequest(n_groups=1), settings(planted), tmp_path / "merged")
    checkpoint = open_checkpoint(planted)
    checkpoint.config = {**checkpoint.config, "model_type": "llama"}
    with pytest.raises(HeadrankError, match="this one is model_type 'llama'"):
        plain_config(checkpoint)


@pytest.mark.parametrize("request_", [{}, {"n_groups": 2, "n_removed": 1}])
def test_either_groups_or_heads_to_remove_must_be_given(planted: Path, tmp_path: Path, request_: dict[str, int]) -> None:
    with pytest.raises(HeadrankError, match="give either --groups G, to join heads, or --remove N, to drop them"):
        trial(planted, tmp_path / "merged", **request_)


def test_nothing_of_the_users_is_overwritten(planted: Path, tmp_path: Path) -> None:
    for itself in (planted, planted / "model.safetensors"):
        with pytest.raises(HeadrankError, match="the checkpoint itself; choose another folder with -o DIR"):
            trial(itself, planted, n_groups=2)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes.txt").write_text("mine")
    with pytest.raises(HeadrankError, match="kept: not written by headrank try\nMove it, choose another folder with -o DIR, or pass --force"):
        trial(planted, tmp_path / "kept", n_groups=2)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["notes.txt"]
    for n_groups in (2, 3):  # its own folder may be replaced
        trial(planted, tmp_path / "merged", n_groups=n_groups, n_random=0)
    assert describe(open_checkpoint(tmp_path / "merged")).n_kv_head == 3


def test_the_command_writes_checkpoint_document_and_table(planted: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [
        "try",
        f"hidden={planted}",
        "--groups",
        "3",
        "--random",
        "1",
        "--tokens",
        str(planted.parent / "tokens.npy"),
        "--sequences",
        "4",
        "--out",
        str(out),
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.stderr
    assert f"Wrote {out / 'model-groups3'}\n" in result.stderr
    assert "hidden: 3 groups; 240 -> 120 numbers cached a token" in result.stdout
    document = json.loads((out / "try.json").read_text())
    for arm in document["losses"]:
        assert f"{arm['label']} " in result.stdout
        assert f"{arm['loss']:.4f}" in result.stdout
    assert " ".join(document["verdict"].split()) in " ".join(result.stdout.split())
    assert json.loads((out / "model-groups3" / "merged.json").read_text())["from"] == document["fingerprint"]
    lines = (out / "try.csv").read_text().splitlines()
    assert lines[0] == "name,label,loss,suggested_less_this,low,high"
    assert lines[1] == f"before,Before,{document['losses'][0]['loss']},,,"
    again = CliRunner().invoke(app, [*words, "--json", "--quiet"])
    assert json.loads(again.stdout) == document


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--groups", "3", "--threshold", "0.9"), "--threshold belongs to --remove; with --groups every head finds a group"),
        (
            ("--remove", "1", "--values", "fit"),
            "--values belongs to --groups; with --remove the values of a head that goes are joined with those of one that stays",
        ),
    ],
)
def test_options_that_belong_to_the_other_choice_are_refused(planted: Path, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, ["try", str(planted), *words, "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert result.stderr == f"Error: {said}\n"
