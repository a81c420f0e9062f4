"""Which models and layers a command is about: paths as given, families on disk, or the bundled family."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrank.config import Family, bundled_configs, bundled_families, load_family
from headrank.errors import HeadrankError
from headrank.store import LayerFacts

DEFAULT_CHECKPOINTS = Path("checkpoints")
BUNDLED_SCALE = "nano"


@dataclass(frozen=True, kw_only=True)
class ModelRef:
    """A model that was chosen: what it is called and where it lies."""

    label: str
    """Name in figures and tables."""
    path: str
    """Checkpoint, measurement file, or hub id."""
    scale: str | None = None
    """Its family's scale."""


def checkpoints_folder(given: Path | None) -> Path:
    """The folder that families live in: as given, else $HEADRANK_CHECKPOINTS, else checkpoints/."""
    return given or Path(os.environ.get("HEADRANK_CHECKPOINTS") or DEFAULT_CHECKPOINTS)


def bundled_checkpoints() -> Path:
    """The folder of the trained family that comes with headrank, laid out like any other."""
    return Path(__file__).parent / "data"


def named_models(models: Sequence[str]) -> list[ModelRef]:
    """Models given as [LABEL=]PATH. Raises HeadrankError where two would have the same label."""
    refs = []
    for model in models:
        label, equals, path = model.partition("=")
        if not equals or "/" in label or os.path.exists(model):  # a path may contain an equals sign
            label, path = default_label(model), model
        if not path or not label:
            raise HeadrankError(f"{model!r}: a model is given as PATH or LABEL=PATH")
        text = label.encode(errors="surrogateescape").decode(errors="replace")  # a name on disk may hold bytes that are none
        refs.append(ModelRef(label=text, path=path))
    labels = [ref.label for ref in refs]
    if repeated := sorted({label for label in labels if labels.count(label) > 1}):
        raise HeadrankError(f"two models are called {repeated[0]!r}; give each a name of its own: LABEL=PATH")
    return refs


def default_label(path: str) -> str:
    """The last part of a path that says anything."""
    name = Path(path).name
    if name in ("", ".."):
        name = Path(path).resolve().name
    return name.removesuffix(".safetensors").removesuffix(".gguf")


def family_models(
    scales: Sequence[str],
    *,
    figure: str,
    largest_only: bool,
    folder: Path,
    configs: Sequence[Path],
    remark: Callable[[str], None],
) -> list[ModelRef]:
    """The variants of families that are on disk, in the order in which the figure shows them.

    scales: names asked for; none means all that are on disk (the largest alone where largest_only), or else the bundled family.
    Raises HeadrankError where a scale that was asked for has no variant on disk; variants missing beside others are a remark.
    """
    families = bundled_families()
    for path in configs:
        family = load_family(path)
        families[family.scale] = family
    if unknown := [scale for scale in scales if scale not in families]:
        raise HeadrankError(f"no family has the scale {unknown[0]!r}; there are {', '.join(families)}. Give your own with --config FILE")
    chosen = list(dict.fromkeys(scales)) or ([load_family(path).scale for path in configs] if configs else _on_disk(families, folder))
    if not chosen:
        remark(f"no family is in {folder}/; showing the bundled one ({BUNDLED_SCALE})")
        chosen = [BUNDLED_SCALE]
    if largest_only and not scales:
        chosen = chosen[-1:]
    return [ref for scale in chosen for ref in _variants(families[scale], figure, folder, remark)]


def _on_disk(families: dict[str, Family], folder: Path) -> list[str]:
    return [scale for scale, family in families.items() if any(_lies(folder, family, variant.name) for variant in family.variants)]


def _lies(folder: Path, family: Family, variant: str) -> bool:
    return (folder / family.scale / variant / "config.json").is_file()


def _variants(family: Family, figure: str, folder: Path, remark: Callable[[str], None]) -> list[ModelRef]:
    shown = family.shown_in(figure)
    is_bundled = family.scale == BUNDLED_SCALE and family.source.parent == bundled_configs()  # and no family of one's own of that name
    if is_bundled and not any(_lies(folder, family, variant.name) for variant in shown):
        folder = bundled_checkpoints()
    present = [variant for variant in shown if _lies(folder, family, variant.name)]
    missing = [variant.label for variant in shown if variant not in present]
    if not present:
        raise HeadrankError(
            f"scale {family.scale}: none of {', '.join(missing)} is on disk; looked in {folder / family.scale}/<variant>/\n"
            f"Train them: python scripts/train.py --config {_config_argument(family)} --text FILE, "
            f"or make untrained ones: python scripts/make_checkpoint.py --config {_config_argument(family)}"
        )
    if missing:
        remark(f"scale {family.scale}: {', '.join(missing)} not on disk ({folder / family.scale}/<variant>/); left out")
    return [ModelRef(label=v.label, path=str(folder / family.scale / v.name), scale=family.scale) for v in present]


def _config_argument(family: Family) -> str:
    return f"configs/{family.source.name}" if family.source.parent.name == "configs" else str(family.source)


def resolve_layers(asked: Sequence[int], layers: Sequence[LayerFacts], *, label: str) -> list[LayerFacts]:
    """The layers of the indices asked for; negative ones count from the last layer with attention.

    Where a model has several stacks, an index means that layer in each of them. Raises HeadrankError naming the range that exists.
    """
    depths: dict[str, int] = {}
    for layer in layers:
        depths[layer.group] = max(depths.get(layer.group, 0), layer.index + 1)
    chosen: list[LayerFacts] = []
    for index in asked:
        found = [layer for layer in layers if layer.index == (index + depths[layer.group] if index < 0 else index)]
        if not found:
            depth = max(depths.values())
            indices = sorted({layer.index for layer in layers})
            there_are = f"0 to {depth - 1} (or -1 to -{depth} from the end)" if len(indices) == depth else ", ".join(map(str, indices))
            raise HeadrankError(f"{label}: no layer {index} with attention; there are {there_are}")
        chosen.extend(layer for layer in found if layer not in chosen)
    return chosen


def middle_layer(layers: Sequence[LayerFacts]) -> int:
    """The index of the middle layer: 18 of 36, 6 of 12."""
    indices = sorted({layer.index for layer in layers})
    return indices[len(indices) // 2]


def early_middle_late(layers: Sequence[LayerFacts]) -> list[int]:
    """The first, the middle and the last layer's index, each once."""
    indices = sorted({layer.index for layer in layers})
    return sorted({indices[0], middle_layer(layers), indices[-1]})
