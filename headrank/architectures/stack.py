"""One stack of layers of a checkpoint, seen through one row of the table: every number against every tensor that depends on it."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from headrank.architectures.facts import Facts
from headrank.architectures.layout import AttentionLayer, Chain, Norm, Projection, Scale, Slice, Step
from headrank.architectures.patterns import lay_out, rows_of
from headrank.architectures.table import NormSpec, ProjectionSpec, Row, StepSpec
from headrank.checkpoints import Checkpoint
from headrank.errors import HeadrankError

WEIGHT = (".weight", "")
GAIN = (".weight", ".gamma", "")
BIAS = (".bias", ".beta")
SCALES = (".weight_scale", ".weight_scale_inv")  # of 8-bit numbers: the matrix is scale times what is stored, whatever the name
PACKED = (".scales", ".SCB", ".weight.absmax", ".weight.quant_map", ".qweight", ".weight_packed", ".weight_zero_point")
EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "I8")
UNUSED = re.compile(r"(?:^|[._])(?:(?:q|k|qk|query|key)_?(?:layer)?_?(?:norm|ln)|(?:q|kv)_a_(?:layer)?norm|attn_sub_norm|attn_norm_2)(?:$|[._])")
BIASES = {"q": "query bias", "v": "value bias"}  # a bias of keys cancels in the softmax; the output's belongs to no head


def layers_of(checkpoint: Checkpoint, template: str) -> dict[int, list[str]]:
    """Layer number -> what follows the template in the names of its tensors."""
    before, after = map(re.escape, template.split("{i}"))
    pattern = re.compile(f"{before}([0-9]{{1,6}}){after}(.+)")
    layers: dict[int, list[str]] = {}
    for name in checkpoint.tensors:
        if match := pattern.fullmatch(name):
            layers.setdefault(int(match.group(1)), []).append(match.group(2))
    return layers


def find_stack(checkpoint: Checkpoint, row: Row, facts: Facts, group: str) -> "Stack | None":
    """The stack under the first prefix that fits; None where no tensor of the row is there."""
    for prefix in row.prefixes:
        stack = Stack(checkpoint, row, facts, group, prefix, layers_of(checkpoint, prefix + row.layer))
        first = next((index for index in sorted(stack.names) if stack.has_attention(index)), None)
        if first is not None and all(stack.find(stack.full_name(first, name), WEIGHT) for name in row.needs):
            return stack
    return None


@dataclass
class Stack:
    """Reads names and shapes; `folded` and `remarks` gather what it met."""

    checkpoint: Checkpoint
    row: Row
    facts: Facts
    group: str
    prefix: str
    names: dict[int, list[str]]
    """Layer -> ends of its tensors' names."""
    folded: dict[str, None] = field(default_factory=dict)
    remarks: dict[str, None] = field(default_factory=dict)

    def layers(self) -> tuple[AttentionLayer, ...]:
        """All layers with attention. Raises HeadrankError where the configuration and the tensors contradict each other."""
        n_layer = self.facts.depth()
        beyond = sorted(index for index in self.names if index >= n_layer and self.has_attention(index))
        if len(beyond) > (self.facts.optional("more_layers") or 0):
            file = self.checkpoint.tensors[self.full_name(beyond[-1], self.names[beyond[-1]][0])].file
            raise HeadrankError(f"{self.facts.where} says {self.facts.name('n_layer')} = {n_layer}, but {file} has a layer {beyond[-1]}")
        if beyond:
            self.remarks[f"layer {beyond[0]} predicts further tokens and is left apart"] = None
        d_model = self.facts.number("d_model")
        return tuple(layer for index in range(n_layer) if (layer := self.layer(index, n_layer, d_model)) is not None)

    def has_attention(self, index: int) -> bool:
        """Whether any query matrix of the row is in that layer."""
        specs = (step for chains in self.row.projections["q"].values() for chain in chains for step in chain)
        return any(self.find(self.full_name(index, step.name), WEIGHT) for step in specs)

    def layer(self, index: int, n_layer: int, d_model: int) -> AttentionLayer | None:
        H, G = self.facts.heads(index)
        is_promised = self.facts.says_attention(index)
        if not self.has_attention(index) or not G:
            if self.row.flags["hybrid"] and self.names.get(index) and not is_promised:
                return None
            wanted = next(iter(self.row.projections["q"].values()))[0][-1].name
            raise self.absent(index, wanted)
        kv_layer = self.facts.kv_layer(index, n_layer)
        q, o = (self.projection(key, index, d_model) for key in ("q", "o"))
        k, v = (self.projection(key, kv_layer, d_model) for key in ("k", "v"))
        if H % k.n or H % v.n or v.size != o.size or q.size != k.size:
            raise HeadrankError(f"{self.facts.where}: layer {index} has {H} query heads of {q.size} and {k.n} key heads of {k.size}; they do not fit")
        self.refuse_unused(index, q, k, v, o)
        cached = 0 if kv_layer != index or not self.row.flags["causal"] else _cached(k, v)
        window = self.facts.window(index)
        return AttentionLayer(
            index=index, group=self.group, n_head=H, n_kv_head=G, d_qk=q.size, d_v=v.size, window=window, q=q, k=k, v=v, o=o, kv_values_per_token=cached
        )

    def projection(self, key: str, index: int, d_model: int) -> Projection:
        H, G = self.facts.heads(index)
        counts = {"H": H, "G": G, "R": H // G}
        sizes = self.facts.head_sizes(index, d_model, H)
        spec: ProjectionSpec = self.row.projections[key]
        outer = self.row.norms.get("norm") if key != "o" and not (self.row.flags["bare_start"] and index == 0) else None
        parts = {}
        for part, chains in spec.items():
            made = tuple(self.chain(chain, key, index, counts, sizes, d_model, outer) for chain in chains)
            kept = tuple(chain for chain in made if all(step.weight.size for step in chain))  # a rotary part or a rank of 0 is none
            if kept:
                parts[part] = kept
        if not parts:
            raise HeadrankError(f"{self.facts.where}: layer {index}: its {key} heads have no size; {self.facts.name('D')} = 0 cannot be")
        widths = {part: chains[0][-1].weight.size for part, chains in parts.items()}
        n = max(len(step.weight.starts) for chains in parts.values() for chain in chains for step in chain)
        own = self.row.norms.get(f"{key}_norm")
        what = "output-norm" if key == "o" else "QK-norm"
        head_norm = None if own is None else self.norm(own, index, what, (sum(widths.values()), n * sum(widths.values())))
        return Projection(parts=parts, sizes=widths, n=n, head_norm=head_norm)

    def chain(
        self, specs: tuple[StepSpec, ...], key: str, index: int, counts: Mapping[str, int], sizes: Mapping[str, int], d_model: int, outer: NormSpec | None
    ) -> Chain:
        steps: list[Step] = []
        width = d_model
        for spec in specs:
            norm_spec = spec.norm if spec.norm is not None or steps else outer
            norm = None if norm_spec is None else self.norm(norm_spec, index, "latent" if steps else "pre-norm", (width,))
            step = self.step(spec, key, index, counts, sizes, width)
            steps.append(Step(weight=step.weight, bias=step.bias, norm=norm))
            width = step.weight.size
        return tuple(steps)

    def step(self, spec: StepSpec, key: str, index: int, counts: Mapping[str, int], sizes: Mapping[str, int], width: int) -> Step:
        full = self.full_name(index, spec.name)
        self.refuse_packed(full)
        name = self.find(full, WEIGHT)
        if name is None:
            raise self.absent(index, spec.name)
        rows = rows_of(spec.pattern, counts, sizes)
        along_columns = spec.transposed != (key == "o")  # the output projection falls to heads along its input
        expected = (width, rows) if along_columns else (rows, width)
        shape = self.checkpoint.tensors[name].shape
        if len(shape) == 3 and key != "o":  # a matrix a head: [heads, out, in], or [heads, in, out]
            shape = (shape[1], shape[0] * shape[2]) if spec.transposed else (shape[0] * shape[1], shape[2])
        if shape != expected:
            raise self.misshapen(name, expected, spec, counts, sizes, width)
        pattern = lay_out(spec.pattern, counts, sizes)
        weight = Slice(
            tensor=name,
            starts=pattern.starts[spec.part],
            size=sizes[spec.part],
            transposed=along_columns,
            scale=self.scale_of(full, name),
            pattern=spec.pattern,
        )
        bias = self.find(full, BIAS) if key != "o" else None
        if bias is not None:
            self.check_size(bias, (rows,))
        if bias is not None and key in BIASES:
            self.folded[BIASES[key]] = None
        return Step(weight=weight, bias=bias)

    def norm(self, spec: NormSpec, index: int, what: str, widths: tuple[int, ...]) -> Norm:
        if spec.centred:
            self.folded[f"{what} centring"] = None
        if spec.name is None:
            return Norm(centred=spec.centred)
        full = self.full_name(index, spec.name)
        gain, bias = self.find_all(full, GAIN), self.find_all(full, BIAS)
        if not gain:
            raise self.absent(index, spec.name)
        for names in (gain, bias):
            if len(names) == 1:
                self.check_size(names[0], widths)
            elif names and len(names) * widths[0] != widths[-1]:
                raise HeadrankError(f"{self.checkpoint.path}: layer {index} has {len(names)} of {spec.name}, but {widths[-1] // widths[0]} heads")
        self.folded[f"{what} gain"] = None
        if bias:
            self.folded[f"{what} bias"] = None
        return Norm(gain=gain, bias=bias, centred=spec.centred, plus_one=spec.plus_one)

    def full_name(self, index: int, name: str) -> str:
        return self.prefix + name[1:] if name.startswith("/") else self.prefix + self.row.layer.format(i=index) + name

    def find(self, name: str, endings: Iterable[str]) -> str | None:
        return next((name + ending for ending in endings if name + ending in self.checkpoint.tensors), None)

    def find_all(self, name: str, endings: Iterable[str]) -> tuple[str, ...]:
        """The tensor of that name; where {h} stands in it one for each head, in order."""
        if "{h}" not in name:
            found = self.find(name, endings)
            return () if found is None else (found,)
        names: list[str] = []
        while (found := self.find(name.replace("{h}", str(len(names))), endings)) is not None:
            names.append(found)
        return tuple(names)

    def check_size(self, name: str, allowed: tuple[int, ...]) -> None:
        info = self.checkpoint.tensors[name]
        size = 1
        for axis in info.shape:
            size *= axis
        if size not in allowed:
            raise HeadrankError(f"{name} in {info.file} has {size} numbers, but {self.facts.where} means {' or '.join(map(str, dict.fromkeys(allowed)))}")

    def refuse_unused(self, index: int, *projections: Projection) -> None:
        """Raises HeadrankError where a layer has norms of queries or keys that the row does not know: it would be the wrong row."""
        used = {name for projection in projections for name in tensors_of(projection)}
        strange = [name for name in self.names[index] if UNUSED.search(name) and self.full_name(index, name) not in used]
        if strange and self.facts.kv_layer(index, self.facts.depth()) == index:
            text = f"layer {index} has {', '.join(strange[:3])}, which layout {self.row.name} does not use"
            raise HeadrankError(f"{self.checkpoint.path}: {text}; describe the architecture with --layout FILE")

    def refuse_packed(self, name: str) -> None:
        """Raises HeadrankError where a matrix is quantised in a way that is not undone here."""
        if found := [name + ending for ending in PACKED if name + ending in self.checkpoint.tensors]:
            info = self.checkpoint.tensors[found[0]]
            raise HeadrankError(f"{info.file}: {name} is quantised ({found[0].removeprefix(name)}) and its scales are not applied; take the original weights")

    def scale_of(self, full: str, name: str) -> Scale | None:
        """The factors of an 8-bit matrix, one for all, one a row or one a block. Raises HeadrankError where it is not clear which."""
        info = self.checkpoint.tensors[name]
        scale = self.find(full, SCALES)
        if scale is None and info.dtype in EIGHT_BITS and self.checkpoint.config.get("quantization_config"):
            raise HeadrankError(f"{info.file}: {name} holds {info.dtype} numbers, and their scales are not in the file; take the original weights")
        if scale is None:
            return None
        shape, rows, columns = self.checkpoint.tensors[scale].shape, *info.shape[-2:]
        self.remarks[f"matrices are stored as {info.dtype} with scales, which are applied"] = None
        if info.dtype in EIGHT_BITS and len(info.shape) == 2:
            if not shape or set(shape) == {1}:
                return Scale(tensor=scale, block=(rows, columns))
            if shape in ((rows,), (rows, 1)):
                return Scale(tensor=scale, block=(1, columns))
            block = self.block_size()
            if block is not None and shape == (-(-rows // block[0]), -(-columns // block[1])):
                return Scale(tensor=scale, block=block)
        text = f"{name} ({info.dtype}, {list(info.shape)}) has scales of shape {list(shape)}"
        raise HeadrankError(f"{info.file}: {text}, and it is not clear which belongs to which number; take the original weights")

    def block_size(self) -> tuple[int, int] | None:
        settings = self.checkpoint.config.get("quantization_config")
        match settings.get("weight_block_size") if isinstance(settings, dict) else None:
            case [int(rows), int(columns)] if rows > 0 and columns > 0:
                return rows, columns
        return None

    def absent(self, index: int, name: str) -> HeadrankError:
        found = ", ".join(sorted(self.names.get(index, []))[:8]) or "nothing"
        depth = f"{self.facts.where} says {self.facts.name('n_layer')} = {self.facts.depth()}"
        return HeadrankError(f"{self.checkpoint.path}: layer {index} has no {name}.weight; found {found}\n({depth}; layout {self.row.name})")

    def misshapen(self, name: str, expected: tuple[int, ...], spec: StepSpec, counts: Mapping[str, int], sizes: Mapping[str, int], width: int) -> HeadrankError:
        info = self.checkpoint.tensors[name]
        if 0 in info.shape and 0 not in expected:
            return HeadrankError(
                f"{info.file}: {name} is empty (shape {list(info.shape)}): a part of a partitioned training checkpoint; gather it into one first"
            )
        numbers = [f"{self.facts.name(fact)} = {counts[fact]}" for fact in ("H", "G") if fact in spec.pattern]
        numbers += [f"size of {part} = {size}" for part, size in sizes.items() if re.search(rf"\b{part}\b", spec.pattern)]
        text = f"{name} in {info.file} has shape {list(info.shape)}, but {self.facts.where} means {list(expected)}"
        return HeadrankError(f"{text}\n(rows {spec.pattern}; {', '.join(numbers)}; width {width}; layout {self.row.name})")


def tensors_of(projection: Projection) -> set[str]:
    """Names of all tensors that a projection is made of."""
    steps = [step for chains in projection.parts.values() for chain in chains for step in chain]
    norms = [norm for norm in (projection.head_norm, *(step.norm for step in steps)) if norm is not None]
    biases = {step.bias for step in steps if step.bias is not None}
    return (
        {step.weight.tensor for step in steps}
        | {step.weight.scale.tensor for step in steps if step.weight.scale}
        | biases
        | {name for norm in norms for name in (*norm.gain, *norm.bias)}
    )


def _cached(k: Projection, v: Projection) -> int:
    """Numbers that keys and values keep for a token: the outputs of their first matrices, each once (MLA: the latent)."""
    first = {(step.weight.tensor, step.weight.starts): step.weight for p in (k, v) for chains in p.parts.values() for (step, *_) in chains}
    return sum(len(weight.starts) * weight.size for weight in first.values())
