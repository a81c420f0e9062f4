"""A few hundred damaged files a format; every one ends in a result or in an error of ours."""

import contextlib
import random
from pathlib import Path

import pytest

from headrank.architectures import describe
from headrank.architectures.table import EXAMPLE
from headrank.checkpoints import open_checkpoint
from headrank.errors import HeadrankError
from tests.checkpoints.mutating import FORMATS, damaged_layout, try_all
from tests.checkpoints.test_formats import CONFIG, llama
from tests.checkpoints.writing import write_folder


@pytest.mark.filterwarnings("ignore")  # torch warns of damaged files before it refuses them
@pytest.mark.parametrize("name", FORMATS)
def test_damage_ends_in_a_result_or_a_refusal(name: str, tmp_path: Path) -> None:
    ends = try_all(name, tmp_path / "m", count=200)
    assert ends.total() == 200
    assert ends["refusal"] > 40


def test_a_damaged_layout_file_ends_in_a_result_or_a_refusal(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_folder(tmp_path / "m", llama(), CONFIG))
    rng, path, described = random.Random(0), tmp_path / "layout.toml", 0
    good = EXAMPLE.replace("D = 64", "D = 6").replace("attn.", "self_attn.")
    for _ in range(300):
        path.write_text(damaged_layout(good, rng), encoding="utf-8")
        with contextlib.suppress(HeadrankError):
            describe(checkpoint, layout=path)
            described += 1
    assert 10 < described < 250
