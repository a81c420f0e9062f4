"""Suggestions on models that hide the answer, on other families, and in the units of the cache."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from headrank.alignment import Turns
from headrank.architectures import describe
from headrank.checkpoints import open_checkpoint
from headrank.cli import app
from headrank.config import ModelConfig
from headrank.errors import HeadrankError
from headrank.measure import Settings
from headrank.merging import Heads, aligned, key_turns, normalised, read_heads
from headrank.model import new_decoder
from headrank.selection import ModelRef
from headrank.suggest import Request, join_losses, lrkv_losses, mla_losses, suggest
from tests.planted import CONFIG, HIDDEN, planted_decoder, write_decoder

WEIGHTS = Settings(source="weights")


def write_model(folder: Path, **kind: Any) -> Path:
    sizes = {"n_layer": 2, "n_head": 6, "d_head": 10, "d_model": 43, "d_mlp": 17, "vocab_size": 19, "context": 31}
    return write_decoder(new_decoder(ModelConfig.from_dict({**sizes, **kind}, where="test"), seed=1), folder)


def suggestion(folder: Path, settings: Settings = WEIGHTS, **request: Any) -> dict[str, Any]:
    return suggest(ModelRef(label="model", path=str(folder)), Request(**request), settings)


def random_heads(*, n_units: int = 4, n_readers: int = 1, seed: int = 0) -> Heads:
    """D = 6, D_v = 4, d_model = 17; values have a bias row."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    U, R = n_units, n_readers
    return Heads(W_Q=draw(U, R, 17, 6), W_K=draw(U, 17, 6), W_V=draw(U, 18, 4), W_O=draw(U, R, 4, 17))


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(planted_decoder(noise=0.15), tmp_path_factory.mktemp("planted"))


@pytest.mark.parametrize("values", ["mean", "fit"])
def test_hidden_groups_are_found_and_consecutive_ones_lose_far_more(planted: Path, values: str) -> None:
    found = suggestion(planted, n_groups=3, values=values)
    assert [tuple(map(tuple, entry["groups"])) for entry in found["layers"]] == list(HIDDEN)
    for entry in found["layers"]:
        assert entry["is_best"]
        assert entry["lost_keys"] < 0.15 < 0.5 < entry["consecutive"]["lost_keys"]
        assert entry["lost_values"] < 0.2 < 0.35 < entry["consecutive"]["lost_values"]


def test_copies_of_whole_heads_are_found_by_what_they_do_on_tokens(tmp_path: Path) -> None:
    folder = write_decoder(planted_decoder(noise=0.02, copies_of_queries=True), tmp_path / "model")
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 19, size=31 * 5))
    found = suggestion(folder, Settings(source="activations", tokens=(tmp_path / "tokens.npy",)), n_groups=3)
    assert [tuple(map(tuple, entry["groups"])) for entry in found["layers"]] == list(HIDDEN)
    assert found["tokens"]["n_tokens"] == 31 * 5
    pairs = [{tuple(pair["heads"]) for pair in entry["duplicates"]} for entry in found["layers"]]
    assert pairs == [set(groups) for groups in HIDDEN]
    assert found["duplicates"] == {"threshold": 0.9, "n_pairs": 6, "removable_in_every_layer": 3, "saves_cache": True}


def test_lost_shares_are_those_of_the_matrices_written_out() -> None:
    heads = normalised(random_heads(n_readers=2))
    groups = ((0, 2), (1, 3))
    merged, losses = join_losses(heads, groups, Turns(), "mean")
    before = after = keys = 0.0
    for g, group in enumerate(groups):
        for place, unit in enumerate(group):
            keys += float((heads.W_K[unit] - merged.W_K[g]).square().sum())
            for reader in range(2):
                M = heads.W_V[unit] @ heads.W_O[unit, reader]
                before += float(M.square().sum())
                after += float((M - merged.W_V[g] @ merged.W_O[g, 2 * place + reader]).square().sum())
    assert losses["lost_keys"] == pytest.approx((keys / float(heads.W_K.square().sum())) ** 0.5)
    assert losses["lost_values"] == pytest.approx((after / before) ** 0.5)


def test_fitted_values_lose_what_the_best_common_space_must_lose_and_never_more_than_the_mean() -> None:
    heads = normalised(random_heads(n_units=3))
    _, fit = join_losses(heads, ((0, 1, 2),), Turns(), "fit")
    _, mean = join_losses(heads, ((0, 1, 2),), Turns(), "mean")
    written = torch.cat([heads.W_V[unit] @ heads.W_O[unit, 0] for unit in range(3)], 1)
    singular = torch.linalg.svdvals(written)
    assert fit["lost_values"] == pytest.approx(float(singular[4:].norm() / singular.norm()))
    assert fit["lost_values"] < mean["lost_values"]
    assert fit["lost_keys"] == mean["lost_keys"]


def test_fitted_values_do_not_depend_on_how_values_and_output_are_split() -> None:
    heads = random_heads()
    mix = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    other = Heads(W_Q=heads.W_Q, W_K=heads.W_K, W_V=heads.W_V @ mix, W_O=torch.linalg.inv(mix)[:, None] @ heads.W_O)
    losses = [join_losses(normalised(one), ((0, 3), (1, 2)), Turns(), "fit")[1]["lost_values"] for one in (heads, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_the_size_of_keys_does_not_matter() -> None:
    heads = random_heads()
    size = torch.tensor([1.0, 7.0, 0.01, 100.0], dtype=torch.float64)[:, None, None]
    other = Heads(W_Q=heads.W_Q / size[:, None], W_K=heads.W_K * size, W_V=heads.W_V, W_O=heads.W_O)
    losses = [join_losses(normalised(one), ((0, 1), (2, 3)), Turns.anything(6), "mean")[1] for one in (heads, other)]
    assert losses[0] == pytest.approx(losses[1])


def test_lrkv_loses_nothing_from_the_rank_of_what_heads_do_not_share() -> None:
    generator = torch.Generator().manual_seed(5)
    own = torch.randn(17, 2, generator=generator, dtype=torch.float64) @ torch.randn(2, 6, generator=generator, dtype=torch.float64)
    one = random_heads(n_units=1)
    heads = Heads(W_Q=one.W_Q.repeat(2, 1, 1, 1), W_K=torch.cat((one.W_K + own, one.W_K - own)), W_V=one.W_V.repeat(2, 1, 1), W_O=one.W_O.repeat(2, 1, 1, 1))
    losses = lrkv_losses(heads, Turns())
    assert len(losses) == 3  # from rank 3 on, (6 + 4) + 2 * 2 * r numbers are more than the 2 * (6 + 4) of plain heads
    squares = torch.linalg.svdvals(own).square()
    for rank in range(3):
        assert losses[rank] == pytest.approx(2 * float(squares[rank:].sum()) / (2 * float(heads.W_K.square().sum())), abs=1e-12)
    assert lrkv_losses(heads, Turns.anything(6))[0] < losses[0]


def test_mla_loses_nothing_from_the_rank_of_keys_and_values_together() -> None:
    generator = torch.Generator().manual_seed(6)
    down = torch.randn(18, 5, generator=generator, dtype=torch.float64)
    up = torch.randn(4, 5, 10, generator=generator, dtype=torch.float64)
    both = down @ up
    both[:, 17] = 0
    heads = Heads(W_Q=random_heads().W_Q, W_K=both[:, :17, :6], W_V=both[..., 6:], W_O=random_heads().W_O)
    losses = mla_losses(heads)
    assert losses[0] == pytest.approx(1.0)
    assert losses[4] > 1e-4
    assert losses[5] == pytest.approx(0.0, abs=1e-12)
    assert (np.diff(losses) <= 0).all()


def test_budgets_are_counted_as_the_paper_counts_the_cache(planted: Path) -> None:
    found = suggestion(planted, budget="60%")
    H, D, L = CONFIG.n_head, CONFIG.d_head, CONFIG.n_layer
    ranks = found["ranks"]
    assert ranks["plain_bytes_per_token"] == 2 * L * 2 * H * D
    assert ranks["budget_bytes_per_token"] == 0.6 * 2 * L * 2 * H * D
    lrkv = [entry["lrkv_rank"] for entry in found["layers"]]
    assert ranks["lrkv"]["bytes_per_token"] == 2 * sum(2 * (D + H * r) for r in lrkv) <= ranks["budget_bytes_per_token"]
    assert 2 * (sum(2 * (D + H * r) for r in lrkv) + 2 * H) > ranks["budget_bytes_per_token"]  # no room for one rank more
    assert ranks["mla"]["bytes_per_token"] == 2 * sum(entry["mla_latent"] for entry in found["layers"])
    for kind in ("lrkv", "mla"):
        assert ranks[kind]["lost"] <= ranks[kind]["uniform_lost"]
    same = suggestion(planted, budget="288")
    assert same["ranks"] == ranks


def test_a_budget_below_the_shared_part_is_told(planted: Path) -> None:
    found = suggestion(planted, budget="79")
    assert found["ranks"]["lrkv"]["reason"] == "the budget of 79 bytes is less than the 80 that the shared keys and values take"
    assert found["ranks"]["mla"]["bytes_per_token"] == 78
    assert [entry["lrkv_rank"] for entry in found["layers"]] == [None, None]


@pytest.mark.parametrize("budget", ["", "half", "-5", "50 percent", "1e3"])
def test_a_budget_that_is_neither_bytes_nor_a_percentage_is_refused(planted: Path, budget: str) -> None:
    with pytest.raises(HeadrankError, match="neither a number of bytes a token nor a percentage of plain heads; give 8192 or 50%"):
        suggestion(planted, budget=budget)


def test_groups_that_do_not_divide_the_heads_are_refused(planted: Path) -> None:
    with pytest.raises(HeadrankError, match="model: 6 key-value heads cannot be joined into 4 groups; choose from 1, 2, 3"):
        suggestion(planted, n_groups=4)


def test_kinds_that_share_keys_get_what_can_be_decided_for_them(tmp_path: Path) -> None:
    gqa = suggestion(write_model(tmp_path / "gqa", kind="gqa", n_kv_head=2), threshold=-1.0)
    assert gqa["join"]["n_groups"] == 1
    assert gqa["join"]["kv_values_per_token"] == 2 * 2 * 10
    assert {tuple(pair["heads"]) for pair in gqa["layers"][0]["duplicates"]} == {(0, 1), (0, 2), (1, 2), (3, 4), (3, 5), (4, 5)}
    assert gqa["duplicates"]["saves_cache"] is False
    assert gqa["duplicates"]["reason"] == "heads share what is cached: removing a query head saves computation, but no cache"
    mqa = suggestion(write_model(tmp_path / "mqa", kind="mqa"))
    assert mqa["join"] == {"n_groups": None, "reason": "all heads share one key-value head already"}
    mla = suggestion(write_model(tmp_path / "mla", kind="mla", d_latent=7, d_rope=4))
    assert mla["join"]["reason"].startswith("mla shares keys and values in a way of its own")
    assert mla["ranks"]["reason"].startswith("mla caches a latent already")
    assert mla["layers"][0]["most_alike"] is not None
    lrkv = suggestion(write_model(tmp_path / "lrkv", kind="lrkv", rank=2))
    assert lrkv["join"]["n_groups"] is None
    assert lrkv["ranks"]["lrkv"]["lost"] is not None


def test_a_layer_that_holds_infinity_is_named_and_the_others_are_decided(tmp_path: Path, planted: Path) -> None:
    tensors = load_file(planted / "model.safetensors")
    tensors["transformer.h.1.attn.c_v.weight"][11, 2] = torch.inf
    (tmp_path / "config.json").write_text((planted / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    found = suggestion(tmp_path, n_groups=3)
    assert "groups" in found["layers"][0]
    assert "transformer.h.1.attn.c_v.weight of head 1 holds NaN or infinity" in found["layers"][1]["reason"]
    assert found["ranks"]["reason"] == "layer 1 has no numbers, so the budget cannot be shared out"
    result = CliRunner().invoke(app, ["suggest", str(tmp_path), "--groups", "3", "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "c_v.weight of head 1 holds NaN or infinity" in result.stderr
    assert (tmp_path / "out" / "suggest.json").exists()


def test_keys_are_turned_only_as_far_as_the_model_allows(tmp_path: Path) -> None:
    def turns_of(config: dict[str, Any], names: dict[str, tuple[int, ...]]) -> tuple[Turns, str]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file({name: torch.ones(shape) for name, shape in names.items()}, folder / "model.safetensors")
        checkpoint = open_checkpoint(folder)
        return key_turns(checkpoint, describe(checkpoint).layers[0])

    sizes = {"num_hidden_layers": 1, "hidden_size": 12, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 6}
    llama = {f"model.layers.0.self_attn.{name}_proj.weight": (12, 12) for name in "qkvo"} | {"model.layers.0.input_layernorm.weight": (12,)}
    assert turns_of({"model_type": "llama", **sizes}, llama)[0] == Turns(first=(0, 1, 2), second=(3, 4, 5))
    gains = {f"model.layers.0.self_attn.{name}_norm.weight": (6,) for name in "qk"}
    turns, why = turns_of({"model_type": "qwen3", **sizes}, llama | gains)
    assert turns == Turns()
    assert why == "as they lie: the gain of the QK norm holds them in their basis"
    bert = {
        f"encoder.layer.0.attention.self.{name}.{kind}": shape for name in ("query", "key", "value") for kind, shape in (("weight", (12, 12)), ("bias", (12,)))
    }
    bert |= {"encoder.layer.0.attention.output.dense.weight": (12, 12)}
    turns, why = turns_of({"model_type": "bert", **sizes}, bert)
    assert turns == Turns(free=tuple(range(6)))
    assert why == "any rotation: no rotary embedding"


def test_aligning_leaves_what_every_head_computes_as_it_is(planted: Path) -> None:
    checkpoint = open_checkpoint(planted)
    architecture = describe(checkpoint)
    layer = architecture.layers[0]
    before = read_heads(checkpoint, architecture, layer)
    after = aligned(normalised(before), HIDDEN[0], key_turns(checkpoint, layer)[0])
    order = [head for group in HIDDEN[0] for head in group]
    for left, right in (("W_V", "W_O"),):
        torch.testing.assert_close(getattr(after, left) @ getattr(after, right)[:, 0], getattr(before, left)[order] @ getattr(before, right)[order, 0])
    torch.testing.assert_close(after.W_Q[:, 0] @ after.W_K.transpose(1, 2), before.W_Q[order, 0] @ before.W_K[order].transpose(1, 2))


def test_the_command_prints_the_document_that_it_writes(planted: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["suggest", f"hidden={planted}", "--groups", "3", "--json", "--quiet", "--out", str(out)])
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert result.stdout == (out / "suggest.json").read_text()
    assert document["command"] == "suggest"
    assert document["models"][0]["layers"][1]["groups"] == [[0, 5], [1, 3], [2, 4]]
    lines = (out / "suggest.csv").read_text().splitlines()
    assert lines[0].startswith("label,scale,group,layer,groups,lost_keys,lost_values,consecutive_lost_keys")
    assert lines[1].startswith("hidden,,,0,0 3|1 4|2 5,0.")
    assert len(lines) == 3


def test_the_terminal_shows_groups_and_what_they_lose(planted: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["suggest", f"hidden={planted}", "--groups", "3", "--quiet", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.stderr
    assert "hidden: 6 key-value heads, 240 numbers cached a token" in result.stdout
    assert "0 5|1 3|2 4" in result.stdout
    assert "Groups: 3 (GQA), the best of all; 120 numbers cached a token;" in result.stdout
    assert "Near-duplicates (at least 0.9 alike in both circuits): 0 pairs" in result.stdout


def test_a_measurement_is_refused_since_decisions_need_weights(planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRANK_CACHE", str(tmp_path / "cache"))
    run = CliRunner().invoke(app, ["measure", str(planted), "--source", "weights", "--no-null", "-o", "kept.safetensors"])
    assert run.exit_code == 0, run.stderr
    result = CliRunner().invoke(app, ["suggest", "kept.safetensors"])
    assert result.exit_code == 1
    assert result.stderr == "Error: kept.safetensors: a measurement holds no weights, which decisions need; give the checkpoint\n"
