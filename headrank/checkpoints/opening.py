"""Which format a path holds, told by its content."""

from pathlib import Path
from typing import Any

from headrank.checkpoints.base import Checkpoint
from headrank.checkpoints.files import inside, read_json, regular_size
from headrank.checkpoints.safetensors import SafetensorsCheckpoint, check_index, index_files
from headrank.errors import HeadrankError


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at a path: a folder or a file. Headers are read, tensors are not.

    Raises HeadrankError on anything that is not one, and where its files contradict each other.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise HeadrankError(f"{path}: no such file or folder")
    regular_size(path)
    return _open_safetensors(path, path.parent, [path])


def _open_folder(folder: Path) -> Checkpoint:
    names = {entry.name for entry in folder.iterdir()}
    if "model.safetensors.index.json" in names:
        shards, weight_map = index_files(folder, "model.safetensors.index.json")
        checkpoint = _open_safetensors(folder, folder, shards)
        check_index(folder, "model.safetensors.index.json", weight_map, checkpoint.tensors, "model-*.safetensors")
        return checkpoint
    if "model.safetensors" in names:
        return _open_safetensors(folder, folder, [inside(folder, "model.safetensors")])
    raise HeadrankError(f"{folder}: no checkpoint in this folder; looked for model.safetensors and model.safetensors.index.json")


def _open_safetensors(path: Path, folder: Path, files: list[Path]) -> Checkpoint:
    config, config_name = _config_of(folder)
    name = "safetensors" if len(files) == 1 else "safetensors shards"
    return SafetensorsCheckpoint(path, files, format=name, config=config, config_name=config_name)


def _config_of(folder: Path) -> tuple[dict[str, Any], str]:
    if not (folder / "config.json").exists():
        return {}, ""
    return read_json(inside(folder, "config.json")), "config.json"
