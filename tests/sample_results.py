"""Results made of random Gram matrices, for the tests of figures and tables."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrank.results import ModelResult, Results, layer_result
from headrank.store import LayerFacts, ModelFacts

TOKENS = {"source": "calibration.txt", "sha256": "sha256:00", "n_sequences": 61, "seq_len": 127, "n_tokens": 7747, "seed": 0}
VARIANTS = ("Standard MHA", "LRKV (r=16)", "LRKV (r=64)", "MQA", "MLA", "GQA")


def facts(n_layer: int, n_head: int) -> ModelFacts:
    return ModelFacts(
        checkpoint="checkpoints/mha",
        fingerprint="sha256:0123",
        family="headrank",
        kind="mha",
        n_layer=n_layer,
        n_head=n_head,
        n_kv_head=n_head,
        d_model=13 * n_head,
        d_head=13,
        n_parameters=1009,
        kv_values_per_token=2 * 13 * n_head * n_layer,
    )


def gram(n_head: int, *, shared: float, seed: int) -> np.ndarray:
    """Gram matrix of random heads that have a part of size `shared` in common."""
    random = np.random.default_rng(seed)
    heads = random.normal(size=(n_head, 97)) + shared * random.normal(size=97)
    return heads @ heads.T


def model(
    label: str,
    *,
    layers: Sequence[int],
    n_layer: int = 12,
    n_head: int = 6,
    scale: str | None = None,
    is_centered: bool = False,
    seed: int = 0,
    faults: dict[int, str] | None = None,
    dead: dict[int, Sequence[int]] | None = None,
    tokens: dict[str, Any] | None = TOKENS,
    group: str = "",
) -> ModelResult:
    """A model whose heads grow alike and apart again with depth. faults: {layer: reason}; dead: {layer: heads}."""
    chosen = []
    for index in layers:
        shared = 0.3 + 1.2 * abs(np.cos(seed + 3 * index / n_layer)) if index else 2.0
        G = gram(n_head, shared=shared, seed=101 * seed + index)
        for head in (dead or {}).get(index, ()):
            G[head] = G[:, head] = 0
        fault = (faults or {}).get(index)
        layer = LayerFacts(index=index, n_head=n_head, n_kv_head=n_head, group=group)
        chosen.append(layer_result(None if fault else G[None], layer, is_centered=is_centered, fault=fault))
    return ModelResult(label=label, scale=scale, model=facts(n_layer, n_head), layers=tuple(chosen), tokens=tokens)


def results(command: str, models: Sequence[ModelResult], *, source: str = "activations", circuit: str = "qk", is_centered: bool = False) -> Results:
    settings = {"raw": False, "seed": 0}
    return Results(command=command, source=source, circuit=circuit, is_centered=is_centered, settings=settings, models=tuple(models))
