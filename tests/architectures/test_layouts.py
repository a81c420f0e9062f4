"""One known set of heads in every layout: the factors must give each head's own operator, whoever shares with whom."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrank.architectures import Architecture, describe
from headrank.checkpoints import Checkpoint, open_checkpoint
from headrank.factors import head_factors
from tests.checkpoints.writing import LAYOUTS, Heads, make_heads, state_of, width_of, write_folder

EQUAL = {"rtol": 1e-5, "atol": 1e-5}  # float32 factors of size 1 with inner size 6


def operators(checkpoint: Checkpoint, architecture: Architecture, number: int, circuit: str, **options: object) -> Tensor:
    """Every head's operator [H, n, m] in float64, from the factors."""
    f = head_factors(checkpoint, architecture, architecture.layers[number], circuit, **options)  # type: ignore[arg-type]
    return f.left.double()[list(f.left_of_head)] @ f.right.double()[list(f.right_of_head)].transpose(1, 2)


def check(checkpoint: Checkpoint, layers: list[Heads], **options: object) -> Architecture:
    architecture = describe(checkpoint)
    assert len(architecture.layers) == len(layers)
    for number, heads in enumerate(layers):
        for circuit in ("qk", "ov"):
            torch.testing.assert_close(operators(checkpoint, architecture, number, circuit, **options), heads.operators(circuit), **EQUAL)
    return architecture


@pytest.mark.parametrize(("name", "G"), [(name, G) for name, layout in LAYOUTS.items() for G in layout.groups])
def test_factors_multiply_to_each_heads_operator(name: str, G: int, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    layers = make_heads(4, G, d=width_of(layout))
    checkpoint = open_checkpoint(write_folder(tmp_path, state_of(layout, layers), layout.config(layers[0])))
    architecture = check(checkpoint, layers, raw=True)
    assert (architecture.n_head, architecture.n_kv_head, architecture.d_head, architecture.n_layer) == (4, G, 6, 2)
    assert architecture.kind == {1: "mqa", 2: "gqa", 4: "mha"}[G]
    assert architecture.kv_values_per_token == (0 if name in ("bert", "modernbert") else 2 * 2 * G * 6)
