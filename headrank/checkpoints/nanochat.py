"""nanochat's folders: model_NNNNNN.pt with meta_NNNNNN.json, a pair a step."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrank.checkpoints.files import inside, read_json
from headrank.errors import HeadrankError

if TYPE_CHECKING:
    from headrank.checkpoints.pytorch import TorchCheckpoint

MODEL = re.compile(r"model_(\d+)\.pt")


def steps_of(folder: Path) -> dict[int, str]:
    """Step -> file name of every model in a folder that has its meta file beside it."""
    found = {int(match.group(1)): entry.name for entry in folder.iterdir() if (match := MODEL.fullmatch(entry.name))}
    return {step: name for step, name in sorted(found.items()) if (folder / _meta_name(name)).exists()}


def open_nanochat(path: Path, folder: Path, step: int | None) -> "TorchCheckpoint":
    """The model of one step, the last where none is given. Optimizer files are not looked at."""
    from headrank.checkpoints.pytorch import TorchCheckpoint, load, state_dict_of

    steps = steps_of(folder)
    if step is not None and step not in steps:
        raise HeadrankError(f"{folder}: no step {step}; there are {', '.join(map(str, steps))}")
    name = steps[max(steps) if step is None else step]
    file, meta_name = inside(folder, name), _meta_name(name)
    meta = read_json(inside(folder, meta_name))
    config = meta.get("model_config")
    if not isinstance(config, dict):
        raise HeadrankError(f"{folder / meta_name}: has no model_config")
    state, _ = state_dict_of(load(file), file)
    config = {"model_type": "nanochat", **config}
    return TorchCheckpoint(path, {file: state}, format="nanochat", config=config, config_name=meta_name, remarks=_remarks(state, config))


def _remarks(names: Iterable[str], config: dict[str, Any]) -> tuple[str, ...]:
    """What newer models do that no tensor of a head shows."""
    remarks = []
    if any(name.startswith("value_embeds.") for name in names):
        remarks.append("values also take embeddings of their token, which no head's map from the residual stream includes")
    pattern = str(config.get("window_pattern", "L")).upper()
    if "S" in pattern:  # half of the context in some versions of nanochat, a quarter or a third in others
        remarks.append(f"layers marked S in the window pattern {pattern[:40]} are local; how far they reach is not in the file")
    return tuple(remarks)


def _meta_name(model_name: str) -> str:
    return model_name.replace("model_", "meta_").replace(".pt", ".json")
