"""Every architecture against the library that defines it: the q, k, v that attention is handed, and what becomes of its output."""

from pathlib import Path

import pytest

from headrank.architectures.table import Row, families
from tests.architectures.cases import CASES
from tests.architectures.oracle import Case, compare

transformers = pytest.importorskip("transformers")

# float32 rounding of norms and products is about 1e-6 here; the norms' epsilon beside inputs of size 4 about 1e-6 more.
AGREE = 3e-5
# Names that no class of the library defines (or only in an older form): other tests write their layouts by hand.
WITHOUT_ORACLE = {
    "headrank",
    "nanogpt",
    "internlm2",
    "openelm",
    "deci",
    "RefinedWeb",
    "RefinedWebModel",
    "qwen2_vl",
    "qwen2_5_vl",
    "baichuan",
    "qwen",
    "chatglm",
}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def by_name(name: str) -> Case:
    return next(case for case in CASES if str(case) == name)


@pytest.mark.filterwarnings("ignore")  # the library's own
@pytest.mark.parametrize("case", CASES, ids=str)
def test_factors_times_hidden_states_are_what_attention_is_handed(case: Case, tmp_path: Path) -> None:
    _, worst = compare(case, tmp_path)
    assert max(worst.values()) < AGREE, worst


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "layout", "wrong"),
    [
        ("gpt_neox", 'qkv = "attention.query_key_value: H*q H*k H*v"', "qkv"),
        ("gpt2", 'qkv = "attn.c_attn^T: H*[q k v]"', "qkv"),
        ("gpt2", 'o = "attn.c_proj: H*v"', "o"),
        ("phi3", 'qkv = "self_attn.qkv_proj: G*[R*q k v]"', "qkv"),
        ("falcon-new", 'qkv = "self_attention.query_key_value: H*q G*k G*v"', "qkv"),
        ("codegen", 'qkv = "attn.qkv_proj: 4*[H/4*q H/4*k H/4*v]"', "kv"),
        ("gpt_bigcode-mha", 'qkv = "attn.c_attn: H*q H*k H*v"', "qkv"),
        ("qwen3_next", 'q = "self_attn.q_proj: H*q H*gate"', "q"),
        ("deepseek_v3", 'k.nope = ["self_attn.kv_a_proj_with_mqa: latent rope -> latent", "self_attn.kv_b_proj: H*nope H*v -> nope"]\n'
         'k.rope = "self_attn.kv_a_proj_with_mqa: latent rope -> rope"', "k"),
        ("deepseek_v3", 'v = ["self_attn.kv_a_proj_with_mqa: latent rope -> latent", "self_attn.kv_b_proj: H*[nope v]"]', "v"),  # the latent's gain forgotten
        ("llama", 'norm = "rms+1 input_layernorm"', "qkv"),
        ("llama", 'norm = "layernorm input_layernorm"', "qkv"),
        ("llama", 'norm = "rms post_attention_layernorm"', "qkv"),
        ("gemma", 'norm = "rms input_layernorm"', "qkv"),
        ("cohere", 'norm = "rms input_layernorm"', "qkv"),
        ("qwen3", 'q_norm = "rms+1 self_attn.q_norm"', "q"),
        ("gemma3_text", 'k_norm = "rms self_attn.k_norm"', "k"),
        ("bert", 'norm = "layernorm attention.output.LayerNorm"', "qkv"),
        ("llama", 'k = "self_attn.v_proj: G*k"', "k"),
    ],
)  # fmt: skip
def test_a_wrong_pattern_is_caught(name: str, layout: str, wrong: str, tmp_path: Path) -> None:
    case = by_name(name)
    right = next(row.name for row in families() if case.model_type in row.model_types and _fits(row, case))
    path = tmp_path / "layout.toml"
    path.write_text(f'like = "{right}"\n{layout}\n', encoding="utf-8")
    _, worst = compare(case, tmp_path / "model", layout=path)
    assert all((worst[key] > 0.03) == (key in wrong) for key in worst), worst


def _fits(row: Row, case: Case) -> bool:
    return all(case.config.get(key, row.defaults.get(key)) == value for key, value in row.when.items())


@pytest.mark.filterwarnings("ignore")
def test_tiled_key_heads_are_caught(tmp_path: Path) -> None:
    """k heads 0 1 0 1 instead of 0 0 1 1 have the right shape: only which head reads which tells."""
    from headrank.architectures import describe
    from headrank.checkpoints import open_checkpoint
    from headrank.factors import head_factors
    from tests.architectures.oracle import build

    build(by_name("llama")).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    architecture = describe(checkpoint)
    assert head_factors(checkpoint, architecture, architecture.layers[0], "qk").right_of_head == (0, 0, 1, 1)


def test_every_name_and_every_row_of_the_table_has_an_oracle_or_is_written_by_hand() -> None:
    rows = [row for row in families() if not any(name.startswith("gguf:") for name in row.model_types)]
    names = {name for row in rows for name in row.model_types}
    assert names - {case.model_type for case in CASES} == WITHOUT_ORACLE
    covered = {row.name for row in rows for case in CASES if case.model_type in row.model_types and _fits(row, case)}
    assert {row.name for row in rows if not set(row.model_types) <= WITHOUT_ORACLE} == covered
