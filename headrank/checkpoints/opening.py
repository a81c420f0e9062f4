"""Which format a path holds, told by its content."""

from pathlib import Path
from typing import Any

from headrank.checkpoints import gguf, hub, lora, nanochat
from headrank.checkpoints.base import Checkpoint
from headrank.checkpoints.files import inside, read_json, regular_size
from headrank.checkpoints.index import check_index, index_files
from headrank.checkpoints.safetensors import HEADER_LIMIT, SafetensorsCheckpoint
from headrank.errors import HeadrankError

Config = tuple[dict[str, Any], str]  # parsed, and the name of its file

SHARDED = {"model.safetensors.index.json": "model-*.safetensors", "pytorch_model.bin.index.json": "pytorch_model-*.bin"}
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def open_checkpoint(path: str | Path, *, config: Path | None = None, step: int | None = None, adapter: str | Path | None = None) -> Checkpoint:
    """The checkpoint at a path: a folder, a file, or the name of a model on the Hugging Face Hub. Headers are read, tensors are not.

    config: a config.json that says what a file without one is. step: which of a nanochat folder's models, the last where none is given.
    adapter: a folder with a LoRA adapter that is added to the weights.
    Raises HeadrankError on anything that is not a checkpoint, and where its files contradict each other.
    """
    given: Config | None = None if config is None else (read_json(config), config.name)
    checkpoint = _open(path, given, step)
    if adapter is None:
        return checkpoint
    folder = Path(adapter)
    if not (folder / lora.CONFIG).exists():
        raise HeadrankError(f"{folder}: no adapter; a folder with {lora.CONFIG} is one")
    weights = [name for name in ("adapter_model.safetensors", "adapter_model.bin") if (folder / name).exists()]
    if not weights:
        raise HeadrankError(f"{folder}: the adapter's weights are missing; looked for adapter_model.safetensors and adapter_model.bin")
    return lora.open_adapter(checkpoint, folder, _open_file(inside(folder, weights[0]), ({}, "")))


def _open(path: str | Path, given: Config | None, step: int | None) -> Checkpoint:
    local = Path(path)
    try:
        is_folder, exists = local.is_dir(), local.exists()
    except (OSError, ValueError) as error:
        raise HeadrankError(f"{str(path)[:200]!r}: not a path: {getattr(error, 'strerror', None) or error}") from None
    if is_folder:
        return _open_folder(local, given, step)
    if exists:
        return _open_file(local, given)
    if hub.looks_like_id(str(path)):
        return hub.open_hub(str(path), lambda downloaded: _open(downloaded, given, step))
    raise HeadrankError(f"{path}: no such file or folder")


def _open_folder(folder: Path, given: Config | None, step: int | None) -> Checkpoint:
    names = sorted(entry.name for entry in folder.iterdir())
    if step is not None or nanochat.steps_of(folder):
        if not nanochat.steps_of(folder):
            raise HeadrankError(f"{folder}: --step chooses among model_NNNNNN.pt files with a meta_NNNNNN.json beside them; there is none")
        return nanochat.open_nanochat(folder, folder, step)
    if ".metadata" in names:
        from headrank.checkpoints.distributed import DistributedCheckpoint

        return DistributedCheckpoint(folder, config=(given or _config_of(folder))[0], config_name=(given or _config_of(folder))[1])
    for index_name, pattern in SHARDED.items():
        if index_name in names:
            return _open_shards(folder, index_name, pattern, given)
    for endings in ((".safetensors",), (".gguf",), PICKLES):
        if files := [name for name in names if name.endswith(endings) and not _is_aside(name)]:
            return _open_only(folder, files, given)
    if "adapter_config.json" in names:
        raise HeadrankError(f"{folder}: an adapter without the model that it belongs to; give the model, and this folder with --adapter")
    found = ", ".join(names[:8]) or "nothing"
    raise HeadrankError(f"{folder}: no checkpoint in this folder; found {found}. Looked for safetensors, GGUF, PyTorch and distributed checkpoints")


def _is_aside(name: str) -> bool:
    """Files that lie beside a model and are none: optimizer states, adapters, training arguments."""
    return name.startswith(("optim", "adapter_", "training_args", "scheduler", "rng_state", "scaler"))


def _open_only(folder: Path, files: list[str], given: Config | None) -> Checkpoint:
    """The one file of its kind in a folder, by its usual name or because there is no other."""
    usual = [name for name in files if name in ("model.safetensors", "pytorch_model.bin")]
    first = (usual or files)[0]
    if len(files) > 1 and not usual and not (first.endswith(".gguf") and len(gguf.split_files(folder / first)) == len(files)):
        kind = "parts without the index that says how many there should be" if "-of-" in first else "several models, none called as the one to take"
        raise HeadrankError(f"{folder}: {kind}: {', '.join(files[:4])}{' …' if len(files) > 4 else ''}; give one file, or the missing index")
    return _open_file(inside(folder, first), given, path=folder)


def _open_shards(folder: Path, index_name: str, pattern: str, given: Config | None) -> Checkpoint:
    shards, weight_map = index_files(folder, index_name)
    config, config_name = given or _config_of(folder)
    checkpoint: Checkpoint
    if index_name.startswith("model.safetensors"):
        checkpoint = SafetensorsCheckpoint(folder, shards, format="safetensors shards", config=config, config_name=config_name)
    else:
        from headrank.checkpoints import pytorch

        states = {shard: pytorch.state_dict_of(pytorch.load(shard), shard)[0] for shard in shards}
        checkpoint = pytorch.TorchCheckpoint(folder, states, format="pytorch shards", config=config, config_name=config_name)
    check_index(folder, index_name, weight_map, checkpoint.tensors, pattern)
    return checkpoint


def _open_file(file: Path, given: Config | None, *, path: Path | None = None) -> Checkpoint:
    regular_size(file)
    with file.open("rb") as stream:
        start = stream.read(16)
    path = path or file
    # Any byte can begin safetensors, for it begins with a length; a length that is none can begin like a pickle.
    is_safetensors = start[8:9] == b"{"
    if not (is_safetensors and int.from_bytes(start[:8], "little") <= HEADER_LIMIT):
        if start.startswith(gguf.MAGIC):
            return gguf.GgufCheckpoint(path, gguf.split_files(file))
        if start.startswith((b"PK", b"\x80")):
            return _open_pickle(path, file, given)
    if is_safetensors:
        config, config_name = given or _config_of(file.parent)
        return SafetensorsCheckpoint(path, [file], format="safetensors", config=config, config_name=config_name)
    raise HeadrankError(f"{file}: not a checkpoint of a known kind (safetensors, GGUF, PyTorch); its first bytes are {start[:8]!r}")


def _open_pickle(path: Path, file: Path, given: Config | None) -> Checkpoint:
    if (match := nanochat.MODEL.fullmatch(file.name)) and int(match.group(1)) in nanochat.steps_of(file.parent):
        return nanochat.open_nanochat(path, file.parent, int(match.group(1)))
    from headrank.checkpoints import pytorch

    state, rest = pytorch.state_dict_of(pytorch.load(file), file)
    config, config_name = given or pytorch.config_within(rest, state)
    if not config:
        config, config_name = _config_of(file.parent)
    usual = file.name == "pytorch_model.bin"
    return pytorch.TorchCheckpoint(
        path, {file: state}, format="pytorch" if usual else "state dict", config=pytorch.with_architecture(config, state), config_name=config_name
    )


def _config_of(folder: Path) -> Config:
    if not (folder / "config.json").exists():
        return {}, ""
    return read_json(inside(folder, "config.json")), "config.json"
