"""Index files of sharded checkpoints: which shard holds which tensor."""

from collections.abc import Mapping
from pathlib import Path

from headrank.checkpoints.base import TensorInfo
from headrank.checkpoints.files import inside, read_json
from headrank.errors import HeadrankError


def index_files(folder: Path, index_name: str) -> tuple[list[Path], Mapping[str, str]]:
    """Shards that an index names, and tensor -> shard. Raises HeadrankError on a shard that is absent or outside the folder."""
    index = inside(folder, index_name)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise HeadrankError(f"{index}: has no weight_map from tensors to files")
    shards = [inside(folder, name) for name in sorted(set(weight_map.values()))]
    if missing := [shard.name for shard in shards if not shard.exists()]:
        raise HeadrankError(f"{index}: {len(missing)} of {len(shards)} files that it names are not in the folder, such as {missing[0]}")
    return shards, weight_map


def check_index(folder: Path, index_name: str, weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo], pattern: str) -> None:
    """Raises HeadrankError where index and shards disagree: a tensor elsewhere than said, or a shard that the index does not name."""
    index = folder / index_name
    for name, shard in weight_map.items():
        if name not in tensors:
            raise HeadrankError(f"{index}: says that {shard} holds {name}; it does not")
        if tensors[name].file.name != Path(shard).name:
            raise HeadrankError(f"{index}: says that {shard} holds {name}; {tensors[name].file.name} does")
    if stray := sorted({info.file.name for name, info in tensors.items() if name not in weight_map}):
        raise HeadrankError(f"{index}: does not list all tensors of {stray[0]}")
    named = {Path(shard).name for shard in weight_map.values()}
    if stray := sorted(path.name for path in folder.glob(pattern) if path.name not in named):
        raise HeadrankError(f"{index}: does not name the shard {stray[0]} that lies beside it; remove it, or fetch the index again")
