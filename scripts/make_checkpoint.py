"""Writes untrained checkpoints of a family's variants, holding one layer at a time.

    python scripts/make_checkpoint.py --config configs/2.5B.toml --variant mha --variant lrkv-r64

Numbers are those that scripts/train.py starts from with the same seed.
"""

import json
from itertools import groupby
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor

from headrank.config import ModelConfig, load_family
from headrank.errors import HeadrankError
from headrank.model import Decoder, initialize
from headrank.output import replace_atomically

ONE_FILE_UP_TO = 100_000_000  # parameters; above that a file a layer, so that no more than a layer is ever held


def write_untrained(config: ModelConfig, folder: Path, *, seed: int, dtype: torch.dtype) -> int:
    """Writes config.json and the weights to a folder. Returns the number of parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in Decoder(config).named_parameters()}
    n_parameters = sum(shape.numel() for shape in shapes.values())
    shards = [list(shapes)] if n_parameters <= ONE_FILE_UP_TO else [list(names) for _, names in groupby(shapes, _layer_of)]
    where = {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, Tensor] = {name: initialize(name, shapes[name], config, seed=seed).to(dtype) for name in names}
        with replace_atomically(folder / file) as path:
            save_file(tensors, path)
        where.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": n_parameters * dtype.itemsize}, "weight_map": where}
        with replace_atomically(folder / "model.safetensors.index.json") as path:
            path.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    with replace_atomically(folder / "config.json") as path:
        path.write_text(config.to_json(), encoding="utf-8")
    return n_parameters


def _layer_of(name: str) -> str:
    return ".".join(name.split(".")[:3]) if ".h." in name else name


def main(
    config: Annotated[Path, typer.Option(help="The family's TOML file.")],
    variant: Annotated[list[str] | None, typer.Option(help="Names of variants; all of the family by default.")] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="Where families live.")] = Path("checkpoints"),
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Writes untrained checkpoints of a family's variants."""
    try:
        family = load_family(config)
        if dtype not in ("bfloat16", "float32"):
            raise HeadrankError(f"--dtype {dtype}: give bfloat16 or float32")
        for chosen in [family.variant(name) for name in variant] if variant else family.variants:
            folder = out / family.scale / chosen.name
            if (folder / "training.json").exists():
                raise HeadrankError(f"{folder}: holds a trained checkpoint; move it away, or give another folder with --out")
            n_parameters = write_untrained(chosen.model, folder, seed=seed, dtype=getattr(torch, dtype))
            typer.echo(f"Wrote {folder}: {chosen.label}, {n_parameters:,} parameters, untrained")
    except HeadrankError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
