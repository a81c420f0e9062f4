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

FACTS = ("n_layer", "d_model", "H", "G", "D", "vocab_size", "context", "window", "global_every", "local_from", "kv_shared", "more_layers")
FLAGS = {"hybrid": False, "causal": True, "bare_start": False, "global_first": False}
NORMS = {"rms": (False, False), "rms+1": (False, True), "layernorm": (True, False), "layernorm+1": (True, True)}  # centred, gain stored less 1
NORM_KEYS = ("norm", "q_norm", "k_norm", "o_norm")
PROJECTIONS = ("q", "k", "v", "o")
TABLES = ("when", "sizes", "defaults", "nested", "groups")
KEYS = {"like", "model_types", "needs", "prefixes", "layer", "qkv", "window_if", *PROJECTIONS, *NORM_KEYS, *TABLES, *FACTS, *FLAGS}
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

    @property
    def centred(self) -> bool:
        return NORMS[self.kind][0]

    @property
    def plus_one(self) -> bool:
        return NORMS[self.kind][1]


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
    needs: tuple[str, ...]
    """Tensors of a layer without which the row is not meant."""
    prefixes: tuple[str, ...]
    layer: str
    facts: dict[str, Source]
    sizes: dict[str, Source]
    defaults: dict[str, Any]
    nested: dict[str, Any]
    window_if: str
    """Key of the configuration that must be true for the window to hold; empty where nothing has to be."""
    projections: dict[str, ProjectionSpec]
    """q, k, v, o."""
    norms: dict[str, NormSpec]
    """norm, q_norm, k_norm, o_norm; those there are."""
    flags: dict[str, bool]
    groups: dict[str, "Row"]
    """Name of the stack -> its row; empty where the row is one stack itself."""

    @property
    def stacks(self) -> dict[str, "Row"]:
        """Name -> row of every stack of layers; one without a name where there is only one."""
        return self.groups or {"": self}


@functools.cache
def families() -> tuple[Row, ...]:
    """The rows of families.toml; those with more conditions first, since they say more."""
    document, shared = _table_file()
    rows = {name: _parse_with_groups(name, document, shared, "families.toml") for name in document}
    return tuple(sorted((row for row in rows.values() if row.model_types), key=lambda row: -len(row.when) - len(row.needs)))


def readable() -> list[tuple[str, tuple[str, ...]]]:
    """First row -> the model types that it and its variants read, each once, for people."""
    found: dict[str, list[str]] = {}
    seen: set[str] = set()
    document, _ = _table_file()
    rows = {row.name: row for row in families()}
    for name in document:
        if name in rows and (new := [model_type for model_type in rows[name].model_types if model_type not in seen]):
            found[name] = new
            seen.update(new)
    return [(name, tuple(types)) for name, types in found.items()]


def read_layout(path: Path) -> Row:
    """A user's layout file. Raises HeadrankError naming the key that is wrong."""
    try:
        own = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HeadrankError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HeadrankError(f"{path}: not a TOML file: {error}") from None
    document, shared = _table_file()
    if "like" in own and own["like"] not in document:
        raise HeadrankError(f"{path}: like = {own['like']!r} is no row of the table; known: {', '.join(document)}")
    return _parse_with_groups("layout", {**document, "layout": {"model_types": [], "when": {}, **own}}, shared, str(path))


@functools.cache
def _table_file() -> tuple[dict[str, Any], dict[str, Any]]:
    document = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
    shared = document.pop("defaults")
    return document, shared


def _parse_with_groups(name: str, document: Mapping[str, Any], shared: Mapping[str, Any], source: str) -> Row:
    table = {**shared, **_inherit(name, document)}
    groups = {}
    for group, member in _table(table.get("groups", {}), f"{source}: {name}: groups").items():
        if member not in document:
            raise HeadrankError(f"{source}: {name}: groups.{group} = {member!r} is no row of the table")
        groups[group] = _parse_row(member, {**shared, **_inherit(member, document)}, source, {})
    if groups:  # the stacks say it all; the first stands for the row where one layout is asked for
        first = next(iter(table["groups"].values()))
        table = {**shared, **_inherit(first, document), **{key: table[key] for key in ("model_types", "when") if key in table}}
    return _parse_row(name, table, source, groups)


def _inherit(name: str, document: Mapping[str, Any]) -> dict[str, Any]:
    own = document[name]
    if "like" not in own:
        return dict(own)
    parent = _inherit(own["like"], document)
    parent.pop("nested", None)  # the library's defaults are each family's own
    if own.keys() & {"q", "k", "v"}:
        parent.pop("qkv", None)
    if "qkv" in own:
        parent = {key: value for key, value in parent.items() if key not in ("q", "k", "v")}
    return {**parent, **own}


def _parse_row(name: str, table: Mapping[str, Any], source: str, groups: dict[str, Row]) -> Row:
    where = f"{source}: {name}"
    if unknown := sorted(table.keys() - KEYS):
        raise HeadrankError(f"{where}: unknown {', '.join(unknown)}; known: {', '.join(sorted(KEYS))}")
    layer = table.get("layer")
    if not isinstance(layer, str) or layer.count("{i}") != 1:
        raise HeadrankError(f'{where}: layer must hold {{i}} for the number, such as "layers.{{i}}.", not {layer!r}')
    projections = {}
    for key in PROJECTIONS:
        value = table.get(key, table.get("qkv") if key != "o" else None)
        if value is None:
            raise HeadrankError(f'{where}: says nothing about {key}; an example: {key} = "self_attn.{key}_proj: H*{"v" if key == "o" else key}"')
        projections[key] = _projection(value, "v" if key == "o" else key, f"{where}: {key}")
    window_if = table.get("window_if", "")
    if not isinstance(window_if, str):
        raise HeadrankError(f"{where}: window_if must be a key of the configuration, not {window_if!r}")
    norms = {key: _norm(table[key], f"{where}: {key}") for key in NORM_KEYS if table.get(key)}
    if "o_norm" in norms and norms["o_norm"].centred:
        raise HeadrankError(f"{where}: o_norm can only be an RMS norm: a LayerNorm there mixes the heads")
    return Row(
        name=name,
        source=source,
        model_types=tuple(_strings(table.get("model_types", []), f"{where}: model_types")),
        when=_table(table.get("when", {}), f"{where}: when"),
        needs=tuple(_strings(table.get("needs", []), f"{where}: needs")),
        prefixes=tuple(_strings(table["prefixes"], f"{where}: prefixes")),
        layer=layer,
        facts={key: _source(table[key], f"{where}: {key}") for key in FACTS if key in table},
        sizes={key: _source(value, f"{where}: sizes.{key}") for key, value in _table(table.get("sizes", {}), f"{where}: sizes").items()},
        defaults=_table(table.get("defaults", {}), f"{where}: defaults"),
        nested=_table(table.get("nested", {}), f"{where}: nested"),
        window_if=window_if,
        projections=projections,
        norms=norms,
        flags={key: _flag(table.get(key, default), f"{where}: {key}") for key, default in FLAGS.items()},
        groups=groups,
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
