"""Geometry of our own decoder, and families of variants as TOML files: dataclasses in, refusals out."""

import json
import tomllib
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from headrank.errors import HeadrankError

KINDS = ("mha", "gqa", "mqa", "mla", "lrkv")
FIGURES = ("heatmap", "spectra", "effrank")
LARGEST = 1 << 31  # of any one size: above what any model has, below where sizes of tensors overflow
MODEL_TYPE = "headrank"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Geometry of one decoder. All sizes are counts of numbers, heads, layers or tokens.

    Raises HeadrankError where the geometry is impossible, naming the field.
    """

    kind: str
    """Attention kind: mha, gqa, mqa, mla or lrkv."""
    n_layer: int
    """Number of layers."""
    n_head: int
    """Number of query heads, H."""
    d_head: int
    """Size of one head's keys, queries and values, without a decoupled rotary part."""
    d_model: int
    """Width of the residual stream."""
    d_mlp: int
    """Width of the MLP's hidden layer."""
    vocab_size: int
    """Number of token ids."""
    context: int
    """Longest sequence that the model is trained on, in tokens."""
    n_kv_head: int = 0
    """Number of key-value heads: n_head where 0 is given and every head has its own; 1 for mqa."""
    rank: int = 0
    """lrkv: rank r of a head's own part of keys and of values; 0 leaves the shared part alone, which is mqa."""
    d_latent: int = 0
    """mla: width d_c of the latent that keys and values are rebuilt from."""
    d_rope: int = 0
    """mla: width of the decoupled rotary part; 0 rotates the rebuilt keys themselves."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise HeadrankError(f"kind {self.kind!r} is not an attention kind; known: {', '.join(KINDS)}")
        if self.n_kv_head == 0 and self.kind != "gqa":
            object.__setattr__(self, "n_kv_head", 1 if self.kind == "mqa" else self.n_head)
        for field in fields(self):
            if field.type is int:
                _check_count(field.name, getattr(self, field.name), least=1 if field.default is MISSING else 0)
        self._check_kind()
        rotary = self.d_rope or self.d_head
        if rotary % 2:
            name = "d_rope" if self.d_rope else "d_head"
            raise HeadrankError(f"{name} = {rotary} must be even: rotary embedding turns pairs")
        if not isinstance(self.rope_theta, int | float) or isinstance(self.rope_theta, bool) or not 0 < self.rope_theta < 1e30:
            raise HeadrankError(f"rope_theta = {self.rope_theta!r} must be a number between 0 and 1e30")

    def _check_kind(self) -> None:
        stray = {"rank": "lrkv", "d_latent": "mla", "d_rope": "mla"}
        for name, kind in stray.items():
            if getattr(self, name) and self.kind != kind:
                raise HeadrankError(f"{name} = {getattr(self, name)} belongs to kind {kind!r}, not to {self.kind!r}")
        if self.kind == "mla" and self.d_latent < 1:
            raise HeadrankError("kind 'mla' needs d_latent, the width of its latent, of at least 1")
        if self.kind == "gqa" and self.n_kv_head < 1:
            raise HeadrankError("kind 'gqa' needs n_kv_head, its number of key-value heads")
        if self.kind == "mqa" and self.n_kv_head != 1:
            raise HeadrankError(f"kind 'mqa' has one key-value head, but n_kv_head = {self.n_kv_head}")
        if self.kind in ("mha", "mla", "lrkv") and self.n_kv_head != self.n_head:
            raise HeadrankError(f"kind {self.kind!r} has a key-value head a head: n_head = {self.n_head}, but n_kv_head = {self.n_kv_head}")
        if self.n_head % self.n_kv_head:
            raise HeadrankError(f"n_head = {self.n_head} is not a multiple of n_kv_head = {self.n_kv_head}")
        if self.rank > min(self.d_model, self.d_head):
            raise HeadrankError(f"rank = {self.rank} exceeds the full rank {min(self.d_model, self.d_head)} of a {self.d_model}x{self.d_head} matrix")

    @property
    def kv_values_per_token_and_layer(self) -> int:
        """Numbers that a KV cache holds for one token in one layer.

        As counted in arXiv 2601.11471, Table 12: 2 G d_head for shared heads, d_c (+ d_rope) for MLA, 2 (d_head + H r) for LRKV.
        """
        if self.kind == "mla":
            return self.d_latent + self.d_rope
        if self.kind == "lrkv":
            return 2 * (self.d_head + self.n_head * self.rank)
        return 2 * self.n_kv_head * self.d_head

    def to_json(self) -> str:
        """The text of a checkpoint's config.json."""
        return json.dumps({"model_type": MODEL_TYPE, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_dict(cls, values: dict[str, Any], *, where: str) -> "ModelConfig":
        """Builds the geometry from parsed JSON or TOML. Unknown and missing keys are refused by name; `where` names the file."""
        known = {field.name for field in fields(cls)}
        required = {field.name for field in fields(cls) if field.default is MISSING}
        given = {name: value for name, value in values.items() if name != "model_type"}
        _refuse_unknown(given, known, where)
        if missing := sorted(required - set(given)):
            raise HeadrankError(f"{where}: missing {', '.join(missing)}")
        try:
            return cls(**given)
        except HeadrankError as error:
            raise HeadrankError(f"{where}: {error}") from None


def _check_count(name: str, value: Any, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise HeadrankError(f"{name} = {value!r} is not a whole number")
    if value < least:
        raise HeadrankError(f"{name} = {value} must be at least 1" if least else f"{name} = {value} must not be negative")
    if value >= LARGEST:
        raise HeadrankError(f"{name} is larger than any model's")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One member of a family: a way of sharing keys and values at the family's geometry."""

    name: str
    """Name of its folder."""
    label: str
    """Name in figures and tables."""
    model: ModelConfig
    """Its geometry."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """The variants of one scale."""

    scale: str
    """Name of the scale, as given to --scales."""
    variants: tuple[Variant, ...]
    """Every variant, in the order of the effective-rank figure."""
    figures: dict[str, tuple[str, ...]]
    """Figure name -> names of the variants that it shows, in order."""
    source: Path
    """The file it was read from."""

    def shown_in(self, figure: str) -> tuple[Variant, ...]:
        """The variants that a figure shows, in its order; all of them where the file does not say."""
        by_name = {variant.name: variant for variant in self.variants}
        return tuple(by_name[name] for name in self.figures.get(figure, tuple(by_name)))

    def variant(self, name: str) -> Variant:
        """The variant of that name. Raises HeadrankError listing the names there are."""
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise HeadrankError(f"{self.source}: no variant {name!r}; there are {', '.join(v.name for v in self.variants)}")


def load_family(path: Path) -> Family:
    """Reads a family's TOML file. Raises HeadrankError on unknown keys, impossible geometry, or a file that is not TOML."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HeadrankError(f"{path}: no such file; a family is a TOML file like configs/nano.toml") from None
    except OSError as error:
        raise HeadrankError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, of numbers with thousands of digits, of thousands of brackets
        raise HeadrankError(f"{path}: not a TOML file: {error}") from None
    return parse_family(document, source=path)


def parse_family(document: dict[str, Any], *, source: Path) -> Family:
    """Builds a family from a parsed TOML document. Raises HeadrankError naming the key that is wrong."""
    where = str(source)
    _refuse_unknown(document, {"scale", "geometry", "variants", "figures"}, where)
    scale = document.get("scale")
    if not isinstance(scale, str) or not scale or "/" in scale or "," in scale or scale.startswith((".", "-")):
        raise HeadrankError(f'{where}: scale must be a name such as "128M", not {scale!r}')
    geometry = document.get("geometry")
    if not isinstance(geometry, dict):
        raise HeadrankError(f"{where}: needs a table [geometry]")
    tables = document.get("variants")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise HeadrankError(f"{where}: needs at least one table [[variants]]")
    variants = tuple(_parse_variant(table, geometry, f"{where}: variant {number}") for number, table in enumerate(tables, 1))
    for key in ("name", "label"):
        values = [getattr(variant, key) for variant in variants]
        if repeated := sorted({value for value in values if values.count(value) > 1}):
            raise HeadrankError(f"{where}: {key} {repeated[0]!r} stands at more than one variant")
    return Family(scale=scale, variants=variants, figures=_parse_figures(document.get("figures", {}), variants, where), source=source)


def _parse_variant(table: dict[str, Any], geometry: dict[str, Any], where: str) -> Variant:
    name, label = table.get("name"), table.get("label")
    if not isinstance(name, str) or not name or "/" in name or name.startswith("."):
        raise HeadrankError(f"{where}: name must be the name of a folder, not {name!r}")
    if not isinstance(label, str) or not label:
        raise HeadrankError(f"{where} ({name}): label must be a text, not {label!r}")
    own = {key: value for key, value in table.items() if key not in ("name", "label")}
    return Variant(name=name, label=label, model=ModelConfig.from_dict({**geometry, **own}, where=f"{where} ({name})"))


def _parse_figures(table: Any, variants: tuple[Variant, ...], where: str) -> dict[str, tuple[str, ...]]:
    if not isinstance(table, dict):
        raise HeadrankError(f"{where}: figures must be a table")
    _refuse_unknown(table, set(FIGURES), f"{where}: figures")
    names = {variant.name for variant in variants}
    for figure, shown in table.items():
        if not isinstance(shown, list) or not shown or not all(isinstance(name, str) for name in shown):
            raise HeadrankError(f"{where}: figures.{figure} must be a list of variants' names")
        if repeated := sorted({name for name in shown if shown.count(name) > 1}):
            raise HeadrankError(f"{where}: figures.{figure} names {repeated[0]!r} more than once")
        _refuse_unknown(dict.fromkeys(shown), names, f"{where}: figures.{figure}")
    return {figure: tuple(shown) for figure, shown in table.items()}


def _refuse_unknown(given: dict[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(given) - known):
        raise HeadrankError(f"{where}: unknown {', '.join(map(repr, unknown))}; known: {', '.join(sorted(known))}")


def bundled_configs() -> Path:
    """The folder of the family files that come with headrank: inside an installed wheel, or at the top of a checkout."""
    inside = Path(__file__).parent / "configs"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "configs"


def bundled_families() -> dict[str, Family]:
    """Scale -> family, smallest first."""
    families = [load_family(path) for path in bundled_configs().glob("*.toml")]
    families.sort(key=lambda family: family.variants[0].model.n_layer * family.variants[0].model.d_model ** 2)
    return {family.scale: family for family in families}
