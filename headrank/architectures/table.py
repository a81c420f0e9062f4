"""The table of families: `families.toml`, or a user's own layout file in the same form, as plain data."""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrank.architectures.patterns import parts_of
from headrank.errors import HeadrankError

Source = int | tuple[str, ...]  # a number, or keys of the configuration of which the first that is there counts

FACTS = ("n_layer", "d_model", "H", "G", "D", "vocab_size", "context")
FLAGS = {"post_norm": False, "hybrid": False, "causal": True}
NORMS = {"rms": (False, False), "rms+1": (False, True), "layernorm": (True, False), "layernorm+1": (True, True)}  # centred, gain stored less 1
KEYS = {"like", "model_types", "when", "prefixes", "layer", "sizes", "defaults", "q", "k", "v", "o", "qkv", "norm", "q_norm", "k_norm", *FACTS, *FLAGS}
EXAMPLE = """layer = "layers.{i}."
n_layer = "num_hidden_layers"
d_model = "hidden_size"
H = "num_attention_heads"
G = "num_key_value_heads"
D = 64
norm = "rms input_layernorm"
q = "attn.q_proj: H*q"
k = "attn.k_proj: G*k"
v = "attn.v_proj: G*v"
o = "attn.o_proj: H*v\""""


@dataclass(frozen=True)
class NormSpec:
    """A norm as the table names it."""

    kind: str
    name: str | None


@dataclass(frozen=True)
class StepSpec:
    """One matrix of a product as the table names it."""

    name: str
    pattern: str
    part: str
    transposed: bool
    norm: NormSpec | None


ProjectionSpec = dict[str, tuple[tuple[StepSpec, ...], ...]]  # part of the head -> chains whose sum it is


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout."""

    name: str
    source: str
    """The file that it stands in, for messages."""
    model_types: tuple[str, ...]
    when: dict[str, Any]
    prefixes: tuple[str, ...]
    layer: str
    facts: dict[str, Source]
    sizes: dict[str, Source]
    defaults: dict[str, Any]
    projections: dict[str, ProjectionSpec]
    """q, k, v, o."""
    norm: NormSpec | None
    head_norms: dict[str, NormSpec]
    """q, k -> QK norm."""
    flags: dict[str, bool]


@functools.cache
def families() -> tuple[Row, ...]:
    """The rows of families.toml; those with `when` first, since they say more."""
    path = Path(__file__).with_name("families.toml")
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    shared = document.pop("defaults")
    rows = [parse_row(name, {**shared, **_inherit(name, document)}, path.name) for name in document]
    return tuple(sorted(rows, key=lambda row: not row.when))


def _inherit(name: str, document: Mapping[str, Any]) -> dict[str, Any]:
    own = document[name]
    if "like" not in own:
        return dict(own)
    parent = {key: value for key, value in _inherit(own["like"], document).items() if key not in ("model_types",) or key not in own}
    if own.keys() & {"q", "k", "v"}:
        parent.pop("qkv", None)
    if "qkv" in own:
        parent = {key: value for key, value in parent.items() if key not in ("q", "k", "v")}
    return {**parent, **own}


def read_layout(path: Path) -> Row:
    """A user's layout file. Raises HeadrankError naming the key that is wrong."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HeadrankError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HeadrankError(f"{path}: not a TOML file: {error}") from None
    if "like" in document:
        known = {row.name for row in families()}
        if document["like"] not in known:
            raise HeadrankError(f"{path}: like = {document['like']!r} is no row of the table; known: {', '.join(sorted(known))}")
        table = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
        shared = table.pop("defaults")
        return parse_row(path.stem, {**shared, **_inherit(path.stem, {**table, path.stem: document})}, str(path))
    shared = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))["defaults"]
    return parse_row(path.stem, {**shared, **document}, str(path))


def parse_row(name: str, table: Mapping[str, Any], source: str) -> Row:
    """Builds a row from a TOML table. Raises HeadrankError naming the key that is wrong."""
    where = f"{source}: {name}"
    if unknown := sorted(table.keys() - KEYS):
        raise HeadrankError(f"{where}: unknown {', '.join(unknown)}; known: {', '.join(sorted(KEYS))}")
    layer = table.get("layer")
    if not isinstance(layer, str) or layer.count("{i}") != 1:
        raise HeadrankError(f'{where}: layer must hold {{i}} for the number, such as "layers.{{i}}.", not {layer!r}')
    projections = {}
    for key in ("q", "k", "v", "o"):
        value = table.get(key, table.get("qkv") if key != "o" else None)
        if value is None:
            raise HeadrankError(f'{where}: says nothing about {key}; an example: {key} = "self_attn.{key}_proj: H*{"v" if key == "o" else key}"')
        projections[key] = _projection(value, "v" if key == "o" else key, f"{where}: {key}")
    return Row(
        name=name,
        source=source,
        model_types=tuple(_strings(table.get("model_types", []), f"{where}: model_types")),
        when=_table(table.get("when", {}), f"{where}: when"),
        prefixes=tuple(_strings(table["prefixes"], f"{where}: prefixes")),
        layer=layer,
        facts={key: _source(table[key], f"{where}: {key}") for key in FACTS if key in table},
        sizes={key: _source(value, f"{where}: sizes.{key}") for key, value in _table(table.get("sizes", {}), f"{where}: sizes").items()},
        defaults=_table(table.get("defaults", {}), f"{where}: defaults"),
        projections=projections,
        norm=_norm(table["norm"], f"{where}: norm") if "norm" in table else None,
        head_norms={key: _norm(table[f"{key}_norm"], f"{where}: {key}_norm") for key in ("q", "k") if f"{key}_norm" in table},
        flags={key: _flag(table.get(key, default), f"{where}: {key}") for key, default in FLAGS.items()},
    )


def _projection(value: Any, key: str, where: str) -> ProjectionSpec:
    parts = value if isinstance(value, dict) else {key: value}
    return {part: _sum(chains, part, f"{where}.{part}" if part != key else where) for part, chains in parts.items()}


def _sum(value: Any, part: str, where: str) -> tuple[tuple[StepSpec, ...], ...]:
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list) and value and all(isinstance(entry, str) for entry in value):
        value = [value]
    if not isinstance(value, list) or not value or not all(isinstance(chain, list) and chain for chain in value):
        raise HeadrankError(f'{where}: must be "TENSOR: PATTERN", a list of these (a product), or a list of lists (a sum)')
    return tuple(_chain(chain, part, where) for chain in value)


def _chain(entries: list[Any], part: str, where: str) -> tuple[StepSpec, ...]:
    steps: list[StepSpec] = []
    norm = None
    for entry in _strings(entries, where):
        if ":" not in entry:
            norm = _norm(entry, where)
            continue
        steps.append(_step(entry, part, norm, where))
        norm = None
    if norm is not None or not steps:
        raise HeadrankError(f'{where}: a product ends with a matrix, "TENSOR: PATTERN"')
    return tuple(steps)


def _step(entry: str, part: str, norm: NormSpec | None, where: str) -> StepSpec:
    name, _, rest = entry.partition(":")
    pattern, arrow, chosen = (text.strip() for text in rest.partition("->"))
    parts = parts_of(pattern)
    if not arrow:
        chosen = part if part in parts else parts[0] if len(parts) == 1 else ""
    if chosen not in parts:
        raise HeadrankError(f'{where}: {entry!r} does not say which part is meant: add "-> {parts[0] if parts else "q"}"')
    name = name.strip()
    return StepSpec(name.removesuffix("^T"), pattern, chosen, name.endswith("^T"), norm)


def _norm(value: Any, where: str) -> NormSpec:
    words = value.split() if isinstance(value, str) else []
    if not 1 <= len(words) <= 2 or words[0] not in NORMS:
        raise HeadrankError(f"{where}: a norm is one of {', '.join(NORMS)}, then the name of its tensor; found {value!r}")
    return NormSpec(words[0], words[1] if len(words) == 2 else None)


def _source(value: Any, where: str) -> Source:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        return (value,)
    return tuple(_strings(value, where))


def _strings(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise HeadrankError(f"{where}: must be a list of texts, not {value!r}")
    return value


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise HeadrankError(f"{where}: must be a table, not {value!r}")
    return value


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise HeadrankError(f"{where}: must be true or false, not {value!r}")
    return value
