"""Measurements: what one checkpoint's heads gave, kept in a file and found again."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from headrank.errors import HeadrankError
from headrank.measures import GRAMS
from headrank.output import replace_atomically

SCHEMA = 1
TOKENS = {"source": str, "sha256": str, "n_sequences": int, "seq_len": int, "n_tokens": int, "seed": int}
MOST_HEADS = 1 << 14
MAX_GROUPS = 256  # of sequences that keep Grams of their own; enough for any bootstrap, and bounded
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """One layer with attention."""

    index: int
    """Its place in the model, from 0."""
    n_head: int
    """Query heads."""
    n_kv_head: int
    """Key-value heads."""
    group: str = ""
    """encoder, decoder or cross, where a model has several stacks."""
    window: int | None = None
    """Tokens that a query sees; None for all."""

    @property
    def key(self) -> str:
        """Unique name of the layer within its model."""
        return f"{self.group}.{self.index}" if self.group else str(self.index)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What a measurement knows of its model."""

    checkpoint: str
    """The path or hub id that it was read from."""
    fingerprint: str
    """sha256 of its contents, see Checkpoint.fingerprint."""
    family: str
    """Architecture."""
    kind: str
    """Attention kind: mha, gqa, mqa, mla or lrkv."""
    n_layer: int
    """Depth."""
    n_head: int
    """Query heads, H, of the widest layer."""
    n_kv_head: int
    """Key-value heads."""
    d_model: int
    """Width of the residual stream."""
    d_head: int
    """Size of a head's queries."""
    n_parameters: int
    """Parameters."""
    kv_values_per_token: int
    """Numbers that the KV cache holds for one token, all layers."""
    kv_values_per_token_of_mha: int = 0
    """What the cache would hold if every query head had keys and values of its own; 0 where nothing is cached."""
    trained: dict[str, Any] = field(default_factory=dict)
    """tokens_seen and validation_loss, where the checkpoint's training.json says them."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Gram matrices of one checkpoint from one source, and where they come from."""

    model: ModelFacts
    """The model."""
    source: str
    """weights or activations."""
    settings: dict[str, Any]
    """Every setting that changes a number."""
    tokens: dict[str, Any] | None
    """What was fed: the entries of TOKENS; None for weights."""
    layers: tuple[LayerFacts, ...]
    """The layers that were measured."""
    grams: dict[str, NDArray[np.float64]]
    """'qk/3' -> [S, H, H]: a Gram matrix for each of S groups of sequences (1 for weights, and for measures that are no sums over
    sequences); their sum is the layer's. Before the stroke stands a name of headrank.measures.GRAMS."""
    faults: dict[str, str]
    """'qk/3' -> why that layer has no numbers."""
    null: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """'qk' -> 'uncentered' and 'centered' -> effective ranks of random heads of the same geometry, where they were asked for."""

    def gram(self, circuit: str, layer: LayerFacts) -> NDArray[np.float64] | None:
        """[H, H], summed over the groups of sequences; None where the layer has a fault."""
        parts = self.grams.get(f"{circuit}/{layer.key}")
        return None if parts is None else parts.sum(0)

    def joined(self, other: "Measurement") -> "Measurement":
        """This measurement with another's layers added; where both have one, this one's stays. They must agree in all but the layers."""
        own = {layer.key for layer in self.layers}
        layers = sorted((*self.layers, *(layer for layer in other.layers if layer.key not in own)), key=lambda layer: (layer.group, layer.index))
        grams = {name: gram for name, gram in other.grams.items() if name.partition("/")[2] not in own} | self.grams
        faults = {name: fault for name, fault in other.faults.items() if name.partition("/")[2] not in own} | self.faults
        return replace(self, layers=tuple(layers), grams=grams, faults=faults, null={**other.null, **self.null})


def write_measurement(measurement: Measurement, path: Path) -> None:
    """Writes one safetensors file: the Grams, and all the rest as JSON in its header. Whole or not at all."""
    rest = {"schema": SCHEMA, **asdict(replace(measurement, grams={}))}
    grams = {name: np.ascontiguousarray(gram) for name, gram in measurement.grams.items()}  # save writes memory as it lies, whatever the strides
    rest = json.loads(json.dumps(rest, allow_nan=False))
    data = save(grams, metadata={"headrank": json.dumps({**rest, "sha256": _sha256(rest, grams)})})
    with replace_atomically(path) as temporary:
        temporary.write_bytes(data)


def read_measurement(path: Path) -> Measurement:
    """Reads a measurement. Raises HeadrankError where the file is none, is broken, was changed, or has another schema."""
    try:
        with safe_open(path, framework="numpy") as file:
            rest = json.loads((file.metadata() or {})["headrank"], parse_constant=_refuse_constant)
            grams = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        digest, found = rest.pop("sha256", None), _sha256(rest, grams)
        if rest.pop("schema") != SCHEMA:
            raise HeadrankError(f"{path}: a measurement of another version of headrank; measure again")
        layers = tuple(_typed(LayerFacts, layer) for layer in rest.pop("layers"))
        model = _typed(ModelFacts, rest.pop("model"))
        measurement = _checked(_typed(Measurement, {**rest, "model": model, "layers": layers, "grams": grams}))
        if digest != found:
            raise HeadrankError(f"{path}: a measurement that was changed after it was written; measure again")
        return measurement
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise HeadrankError(f"{path}: not a measurement of headrank: {error}") from None


def _sha256(rest: dict[str, Any], grams: dict[str, Any]) -> str:
    """Of everything in the file: one bit of a Gram matrix that a disk or a transfer turns gives numbers that look right."""
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True, allow_nan=False).encode())
    for name, gram in sorted(grams.items()):
        digest.update(f"\n{name} {gram.dtype} {gram.shape}\n".encode())
        digest.update(np.ascontiguousarray(gram).tobytes())
    return f"sha256:{digest.hexdigest()}"


def is_measurement(path: Path) -> bool:
    """Whether a file says of itself that it is a measurement."""
    try:
        with safe_open(path, framework="numpy") as file:
            return "headrank" in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it says {name}")


def _typed(cls: type[T], values: dict[str, Any]) -> T:
    """The dataclass from parsed JSON. Raises TypeError where a field is unknown, missing, or of another type than it should be."""
    for name, hint in get_type_hints(cls).items():
        if name in values and not _fits(values[name], hint):
            raise TypeError(f"{name} is of the wrong type")
    return cls(**values)


def _fits(value: Any, hint: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return any(_fits(value, part) for part in parts)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(key, parts[0]) and _fits(item, parts[1]) for key, item in value.items())
    if origin in (list, tuple):
        return isinstance(value, origin) and all(_fits(item, parts[0]) for item in value)
    if hint is Any or origin is np.ndarray:
        return True
    return type(value) in ((int, float) if hint is float else (hint,))


def _checked(measurement: Measurement) -> Measurement:
    """The measurement. Raises ValueError where its layers and its Gram matrices contradict each other."""
    heads = {layer.key: layer.n_head for layer in measurement.layers}
    if len(heads) < len(measurement.layers) or any(layer.index < 0 or not 1 <= layer.n_kv_head <= layer.n_head for layer in measurement.layers):
        raise ValueError("its list of layers is impossible")
    fed = measurement.tokens
    if fed is not None and {name: type(value) for name, value in fed.items()} != TOKENS:
        raise ValueError("what it says of the tokens is not what a measurement says")
    ranks = [rank for null in measurement.null.values() for ranks in null.values() for rank in ranks]
    if not all(0 <= rank <= min(measurement.model.n_head, MOST_HEADS) + 1e-6 for rank in ranks):
        raise ValueError("random heads cannot have such ranks")
    for name, gram in measurement.grams.items():
        H = heads.get(name.partition("/")[2])
        if H is None or gram.dtype != np.float64 or gram.ndim != 3 or not len(gram) or gram.shape[1:] != (H, H) or not np.isfinite(gram).all():
            raise ValueError(f"{name} of shape {list(gram.shape)} is no finite Gram matrix of a layer it names")
    names = [*measurement.grams, *measurement.faults]
    measured = {name.partition("/")[0] for name in names}
    if not measured <= set(GRAMS) or sorted(names) != sorted(f"{gram}/{layer}" for gram in measured for layer in heads):
        raise ValueError("not every layer has a Gram matrix or a reason why not")
    return measurement


class Store:
    """A folder of measurements, found by what they were made of. Where it cannot be written, nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        """folder: None where there is none to keep anything in."""
        self.folder = folder

    @classmethod
    def default(cls) -> "Store":
        """$HEADRANK_CACHE, else headrank in $XDG_CACHE_HOME, else in ~/.cache."""
        named = os.environ.get("HEADRANK_CACHE")
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        if not named and base.startswith("~"):  # a user without a home that the system knows
            return cls(None)
        return cls(Path(named) if named else Path(base) / "headrank")

    @staticmethod
    def key(**parts: Any) -> str:
        """A name made of everything that decides the numbers."""
        return hashlib.sha256(json.dumps({"schema": SCHEMA, **parts}, sort_keys=True).encode()).hexdigest()[:32]

    def find(self, key: str) -> Measurement | None:
        """The measurement of that key, or None; a broken file counts as none."""
        if self.folder is None:
            return None
        path = self.folder / f"{key}.safetensors"
        try:
            return read_measurement(path) if path.is_file() else None
        except (HeadrankError, OSError):
            return None

    def keep(self, key: str, measurement: Measurement) -> str | None:
        """Writes the measurement. Returns why not, where the folder cannot be written."""
        if self.folder is None:
            return "measurements are not kept: there is no home folder; name one with HEADRANK_CACHE"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_measurement(measurement, self.folder / f"{key}.safetensors")
        except OSError as error:
            return f"{self.folder}: measurements are not kept: {error.strerror or error}"
        return None
