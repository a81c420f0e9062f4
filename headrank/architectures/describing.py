"""From names, shapes and a configuration to an Architecture, with every number checked against every tensor that depends on it."""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headrank.architectures.layout import Architecture, AttentionLayer, Norm, Projection, Slice, Step
from headrank.architectures.patterns import lay_out, rows_of
from headrank.architectures.table import EXAMPLE, NORMS, NormSpec, ProjectionSpec, Row, Source, StepSpec, families, read_layout
from headrank.checkpoints import Checkpoint
from headrank.config import MODEL_TYPE, ModelConfig
from headrank.errors import HeadrankError

MOST_HEADS = 1 << 14  # more is a broken file: heads are laid out one by one
ATTENTION_LIKE = re.compile(r"attn|attention|qkv|query|key|value|[._](q|k|v|o)[._]|wq|wk|wv|wo\b", re.IGNORECASE)


def describe(checkpoint: Checkpoint, *, layout: Path | None = None) -> Architecture:
    """What the tensors of a checkpoint mean; no tensor is read.

    layout: a TOML file in the form of families.toml, for an architecture that the table does not have.
    Raises HeadrankError on an unknown family, and where the configuration and the tensors contradict each other.
    """
    config = checkpoint.config
    if config.get("model_type") == MODEL_TYPE:
        ModelConfig.from_dict(config, where=_config_file(checkpoint))
    rows = [read_layout(layout)] if layout is not None else _candidates(checkpoint, config)
    for row in rows:
        for prefix in row.prefixes:
            names = _layers_of(checkpoint, prefix + row.layer)
            if any(_has(checkpoint, row, prefix, index) for index in names):
                return _Description(checkpoint, config, row, prefix, names).architecture()
    raise HeadrankError(_nothing_found(checkpoint, rows))


def _candidates(checkpoint: Checkpoint, config: Mapping[str, Any]) -> list[Row]:
    model_type = config.get("model_type")
    rows = [row for row in families() if model_type in row.model_types]
    if not rows:
        raise HeadrankError(_unknown(checkpoint, model_type))
    fitting = [row for row in rows if all(_fits(config.get(key, row.defaults.get(key)), value) for key, value in row.when.items())]
    if not fitting:
        raise HeadrankError(
            f"{_config_file(checkpoint)}: no layout of {model_type} has {', '.join(sorted({key for row in rows for key in row.when}))} as given there"
        )
    return fitting


def _fits(value: Any, wanted: Any) -> bool:
    return value in wanted if isinstance(wanted, list) else value == wanted


def _unknown(checkpoint: Checkpoint, model_type: Any) -> str:
    what = f"model_type {model_type!r} is not in the table of architectures" if model_type else "nothing says what architecture this is (no model_type)"
    found = [name for name in checkpoint.tensors if ATTENTION_LIKE.search(name)][:8]
    return (
        f"{checkpoint.path}: {what}; attention-like tensors: {', '.join(found) or 'none'}\n"
        + f"Describe it in a TOML file and give it with --layout FILE, for example:\n{EXAMPLE}"
    )


def _nothing_found(checkpoint: Checkpoint, rows: list[Row]) -> str:
    row = rows[0]
    wanted = row.layer.format(i=0) + next(iter(row.projections["q"].values()))[0][0].name
    found = [name for name in checkpoint.tensors if ATTENTION_LIKE.search(name)][:5]
    return f"{checkpoint.path}: no tensor of a {row.name} layer such as {wanted}; found {', '.join(found) or 'no attention-like tensor'}"


def _layers_of(checkpoint: Checkpoint, template: str) -> dict[int, list[str]]:
    """Layer number -> what follows the template in the names of its tensors."""
    before, after = map(re.escape, template.split("{i}"))
    pattern = re.compile(f"{before}([0-9]{{1,6}}){after}(.+)")
    layers: dict[int, list[str]] = {}
    for name in checkpoint.tensors:
        if match := pattern.fullmatch(name):
            layers.setdefault(int(match.group(1)), []).append(match.group(2))
    return layers


def _has(checkpoint: Checkpoint, row: Row, prefix: str, index: int) -> bool:
    """Whether any of the row's query matrices is in that layer."""
    names = (step.name for chains in row.projections["q"].values() for chain in chains for step in chain)
    return any(_find(checkpoint, _full_name(row, prefix, index, name)) for name in names)


def _full_name(row: Row, prefix: str, index: int, name: str) -> str:
    return prefix + name[1:] if name.startswith("/") else prefix + row.layer.format(i=index) + name


def _find(checkpoint: Checkpoint, name: str, endings: Iterable[str] = (".weight", "")) -> str | None:
    return next((name + ending for ending in endings if name + ending in checkpoint.tensors), None)


def _config_file(checkpoint: Checkpoint) -> str:
    return str(checkpoint.path / checkpoint.config_name) if checkpoint.path.is_dir() else f"{checkpoint.config_name} of {checkpoint.path}"


class _Description:
    """One checkpoint seen through one row of the table."""

    def __init__(self, checkpoint: Checkpoint, config: Mapping[str, Any], row: Row, prefix: str, names: dict[int, list[str]]) -> None:
        self.checkpoint, self.config, self.row, self.prefix, self.names = checkpoint, config, row, prefix, names
        self.folded: dict[str, None] = {}

    def architecture(self) -> Architecture:
        n_layer = self.fact("n_layer")
        self.d_model = self.fact("d_model")
        if beyond := sorted(index for index in self.names if index >= n_layer and _has(self.checkpoint, self.row, self.prefix, index)):
            raise self.contradiction(f"{self.key('n_layer')} = {n_layer}", f"there is a layer {beyond[-1]}", self.any_file(beyond[-1]))
        layers = tuple(layer for index in range(n_layer) if (layer := self.layer(index)) is not None)
        largest = max(layers, key=lambda layer: layer.n_head)
        return Architecture(
            family=self.row.name,
            kind=self.kind(layers),
            layers=layers,
            n_layer=n_layer,
            d_model=self.d_model,
            n_head=largest.n_head,
            n_kv_head=max(layer.n_kv_head for layer in layers),
            d_head=max(layer.d_qk - layer.k.sizes.get("rope", 0) for layer in layers),
            vocab_size=self.optional("vocab_size"),
            context=self.optional("context"),
            n_parameters=sum(math.prod(info.shape) for info in self.checkpoint.tensors.values()),
            kv_values_per_token=sum(layer.kv_values_per_token for layer in layers),
            folded=tuple(self.folded),
        )

    def kind(self, layers: tuple[AttentionLayer, ...]) -> str:
        keys = self.row.projections["k"]
        if "nope" in keys:
            return "mla"
        if any(len(chains) > 1 for chains in keys.values()):
            return "lrkv"
        if all(layer.n_kv_head == layer.n_head for layer in layers):
            return "mha"
        return "mqa" if all(layer.n_kv_head == 1 for layer in layers) else "gqa"

    def layer(self, index: int) -> AttentionLayer | None:
        if not _has(self.checkpoint, self.row, self.prefix, index):
            if self.row.flags["hybrid"] and self.names.get(index):
                return None
            found = ", ".join(self.names.get(index, [])[:6]) or "nothing"
            wanted = next(iter(self.row.projections["q"].values()))[0][-1].name
            raise HeadrankError(f"{self.checkpoint.path}: layer {index} has no {wanted}; found {found} ({self.key('n_layer')} = {self.fact('n_layer')} layers)")
        H = self.fact("H", index)
        G = self.optional("G", index) or H
        if H > MOST_HEADS or not H or H % G:
            raise HeadrankError(f"{_config_file(self.checkpoint)}: {self.key('H')} = {H} query heads cannot share {self.key('G')} = {G} key-value heads")
        counts = {"H": H, "G": G, "R": H // G}
        sizes = self.part_sizes(index, H)
        q, k, v, o = (self.projection(self.row.projections[key], key, index, counts, sizes) for key in ("q", "k", "v", "o"))
        return AttentionLayer(
            index=index, n_head=H, n_kv_head=G, d_qk=q.size, d_v=v.size, q=q, k=k, v=v, o=o,
            kv_values_per_token=_cached(k, v) if self.row.flags["causal"] else 0,
        )  # fmt: skip

    def part_sizes(self, index: int, H: int) -> dict[str, int]:
        sizes = {part: self.value(source, part, index) for part, source in self.row.sizes.items()}
        if not sizes.keys() >= {"q", "k", "v"}:
            D = self.optional("D", index)
            if D is None and self.d_model % H:
                text = f"{self.key('d_model')} = {self.d_model} is not a multiple of {self.key('H')} = {H}"
                raise HeadrankError(f"{_config_file(self.checkpoint)}: {text}, and no head size is stated")
            sizes = {part: self.d_model // H if D is None else D for part in ("q", "k", "v")} | sizes
        return sizes

    def projection(self, spec: ProjectionSpec, key: str, index: int, counts: Mapping[str, int], sizes: Mapping[str, int]) -> Projection:
        norm = self.norm(self.row.norm, index, "pre-norm") if self.row.norm is not None and key != "o" else None
        parts = {}
        for part, chains in spec.items():
            made = tuple(self.chain(chain, key, index, counts, sizes, norm) for chain in chains)
            kept = tuple(chain for chain in made if all(step.weight.size for step in chain))  # a rotary part or a rank of 0 is none
            if kept:
                parts[part] = kept
        n = max(len(step.weight.starts) for chains in parts.values() for chain in chains for step in chain)
        widths = {part: chains[0][-1].weight.size for part, chains in parts.items()}
        head_norm = self.norm(self.row.head_norms[key], index, "QK-norm") if key in self.row.head_norms else None
        return Projection(parts=parts, sizes=widths, n=n, head_norm=head_norm)

    def chain(
        self, specs: tuple[StepSpec, ...], key: str, index: int, counts: Mapping[str, int], sizes: Mapping[str, int], norm: Norm | None
    ) -> tuple[Step, ...]:
        steps = []
        width = self.d_model
        for number, spec in enumerate(specs):
            step = self.step(spec, key, index, counts, sizes, width)
            inner = self.norm(spec.norm, index, "latent" if number else "pre-norm") if spec.norm is not None else None
            steps.append(Step(weight=step.weight, bias=step.bias, norm=inner or (norm if not number else None)))
            width = step.weight.size
        return tuple(steps)

    def step(self, spec: StepSpec, key: str, index: int, counts: Mapping[str, int], sizes: Mapping[str, int], width: int) -> Step:
        full = _full_name(self.row, self.prefix, index, spec.name)
        name = _find(self.checkpoint, full)
        if name is None:
            found = ", ".join(self.names.get(index, [])[:8])
            raise HeadrankError(f"{self.checkpoint.path}: layer {index} has no {spec.name}.weight; found {found}")
        shape = self.checkpoint.tensors[name].shape
        cut = spec.transposed != (key == "o")  # along columns
        rows = rows_of(spec.pattern, counts, sizes)
        expected = (width, rows) if cut else (rows, width)
        if shape != expected:
            raise self.misshapen(name, shape, expected, spec, counts, sizes)
        pattern = lay_out(spec.pattern, counts, sizes)
        bias = _find(self.checkpoint, full, (".bias",)) if key != "o" else None
        if bias is not None:
            self.check_vector(bias, (rows,))
            if key != "k":
                self.folded[{"q": "query bias", "v": "value bias"}[key]] = None
        weight = Slice(tensor=name, starts=pattern.starts[spec.part], size=sizes[spec.part], transposed=cut, pattern=spec.pattern)
        return Step(weight=weight, bias=bias)

    def norm(self, spec: NormSpec | None, index: int, what: str) -> Norm | None:
        if spec is None:
            return None
        centred, plus_one = NORMS[spec.kind]
        if centred:
            self.folded[f"{what} centring"] = None
        if spec.name is None:
            return Norm(centred=centred)
        full = _full_name(self.row, self.prefix, index, spec.name)
        gain = self.tensors_of(full, (".weight", ".gamma", ""))
        bias = self.tensors_of(full, (".bias", ".beta"))
        if not gain:
            raise HeadrankError(f"{self.checkpoint.path}: layer {index} has no {spec.name}.weight; found {', '.join(self.names.get(index, [])[:8])}")
        self.folded[f"{what} gain"] = None
        if bias:
            self.folded[f"{what} bias"] = None
        return Norm(gain=gain, bias=bias, centred=centred, plus_one=plus_one)

    def tensors_of(self, name: str, endings: Iterable[str]) -> tuple[str, ...]:
        """The tensor of that name, or where {h} stands in it one for each head, in order."""
        if "{h}" not in name:
            found = _find(self.checkpoint, name, endings)
            return () if found is None else (found,)
        names: list[str] = []
        while (found := _find(self.checkpoint, name.replace("{h}", str(len(names))), endings)) is not None:
            names.append(found)
        return tuple(names)

    def check_vector(self, name: str, expected: tuple[int, ...]) -> None:
        shape = self.checkpoint.tensors[name].shape
        if shape != expected:
            raise HeadrankError(f"{self.checkpoint.tensors[name].file}: {name} has shape {list(shape)}, but its matrix means {list(expected)}")

    def misshapen(
        self, name: str, shape: tuple[int, ...], expected: tuple[int, ...], spec: StepSpec, counts: Mapping[str, int], sizes: Mapping[str, int]
    ) -> HeadrankError:
        file = self.checkpoint.tensors[name].file
        if 0 in shape and 0 not in expected:
            return HeadrankError(f"{file}: {name} is empty (shape {list(shape)}): a part of a partitioned training checkpoint; gather it into one first")
        numbers = [f"{count} = {counts[count]}" for count in ("H", "G") if count in spec.pattern]
        numbers += [f"{part} = {sizes[part]}" for part in sizes if re.search(rf"\b{part}\b", spec.pattern)]
        text = f"{name} in {file} has shape {list(shape)}, but {self.checkpoint.config_name or 'the layout'} means {list(expected)}"
        return HeadrankError(f"{text}\n({spec.pattern} with {', '.join(numbers)}, d_model = {self.d_model})")

    def contradiction(self, configured: str, found: str, file: Path) -> HeadrankError:
        return HeadrankError(f"{_config_file(self.checkpoint)} says {configured}, but in {file} {found}")

    def any_file(self, index: int) -> Path:
        return self.checkpoint.tensors[self.prefix + self.row.layer.format(i=index) + self.names[index][0]].file

    def key(self, fact: str) -> str:
        source = self.row.facts.get(fact)
        return source[0] if isinstance(source, tuple) else fact

    def fact(self, fact: str, index: int | None = None) -> int:
        if fact not in self.row.facts:
            raise HeadrankError(f"{self.row.source}: says nothing about {fact}")
        return self.value(self.row.facts[fact], fact, index)

    def optional(self, fact: str, index: int | None = None) -> int | None:
        source = self.row.facts.get(fact)
        if isinstance(source, tuple) and self.lookup(source)[1] is None:
            return None
        return None if source is None else self.value(source, fact, index)

    def value(self, source: Source, what: str, index: int | None = None) -> int:
        """A number of the configuration; of one layer where it is given as a list. Raises HeadrankError where it is none."""
        if isinstance(source, int):
            return source
        key, value = self.lookup(source)
        if isinstance(value, list) and index is not None and index < len(value):
            value = value[index]
        if value is None:
            raise HeadrankError(f"{_config_file(self.checkpoint)}: has no {' or '.join(source)} ({what})")
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise HeadrankError(f"{_config_file(self.checkpoint)}: {key} = {str(value)[:60]} is not a whole number")
        return value

    def lookup(self, source: tuple[str, ...]) -> tuple[str, Any]:
        for key in source:
            value = self.config.get(key, self.row.defaults.get(key))
            if value is not None:
                return key, value
        return source[0], None


def _cached(k: Projection, v: Projection) -> int:
    """Numbers that keys and values keep for a token: the outputs of their first matrices, each once (MLA: the latent)."""
    first = {(step.weight.tensor, step.weight.starts): step.weight for p in (k, v) for chains in p.parts.values() for (step, *_) in chains}
    return sum(len(weight.starts) * weight.size for weight in first.values())
