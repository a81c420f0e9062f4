"""Numbers of a configuration as one row of the table reads them; a layer at a time where it gives lists."""

from collections.abc import Mapping
from typing import Any

from headrank.architectures.table import Row, Source
from headrank.errors import HeadrankError

MOST_HEADS = 1 << 14  # more is a broken file: heads are laid out one by one
MOST_LAYERS = 1 << 14
LOCAL = ("sliding", "local", "chunked")
ATTENTION = ("attention", "sliding", "local", "chunked", "global")


class Facts:
    """One configuration seen through one row."""

    def __init__(self, config: Mapping[str, Any], row: Row, *, where: str, nested: bool) -> None:
        self.row, self.where = row, where
        self.values: dict[str, Any] = {**row.defaults, **(row.nested if nested else {}), **{key: value for key, value in config.items() if value is not None}}

    def number(self, fact: str, index: int | None = None) -> int:
        """A number that must be there; of one layer where it is a list. Raises HeadrankError where it is none."""
        if fact not in self.row.facts:
            raise HeadrankError(f"{self.row.source}: {self.row.name} says nothing about {fact}")
        return self.value(self.row.facts[fact], fact, index)

    def optional(self, fact: str, index: int | None = None) -> int | None:
        """A number, or None where neither row nor configuration says."""
        source = self.row.facts.get(fact)
        if source is None or (not isinstance(source, int) and self._lookup(source)[1] is None):
            return None
        return self.value(source, fact, index)

    def value(self, source: Source, what: str, index: int | None = None) -> int:
        if isinstance(source, int):
            return source
        key, value = self._lookup(source)
        if isinstance(value, list) and index is not None:
            if index >= len(value):
                raise HeadrankError(f"{self.where}: {key} has {len(value)} entries, but there is a layer {index}")
            key, value = f"{key}[{index}]", value[index]
        if isinstance(value, list) and value and index is None:
            value = max((entry for entry in value if type(entry) is int), default=None)
        if value is None:
            raise HeadrankError(f"{self.where}: has no {' or '.join(source) or what}, which {self.row.name} needs")
        if type(value) is not int or not 0 <= value < 1 << 40:
            raise HeadrankError(f"{self.where}: {key} = {str(value)[:60]} is not a whole number that can be")
        return value

    def name(self, fact: str) -> str:
        """How the configuration calls a fact, for messages."""
        source = self.row.facts.get(fact)
        return self._lookup(source)[0] if source and not isinstance(source, int) else fact

    def _lookup(self, source: tuple[str, ...]) -> tuple[str, Any]:
        for key in source:
            if self.values.get(key) is not None:
                return key, self.values[key]
        return source[0] if source else "", None

    def depth(self) -> int:
        """Number of layers; where the configuration lists them, of its entries."""
        source = self.row.facts.get("n_layer")
        listed = None if source is None or isinstance(source, int) else self._lookup(source)[1]
        n_layer = len(listed) if isinstance(listed, list) else self.number("n_layer")
        if not 0 < n_layer <= MOST_LAYERS:
            raise HeadrankError(f"{self.where}: {self.name('n_layer')} = {n_layer} layers cannot be")
        return n_layer

    def heads(self, index: int) -> tuple[int, int]:
        """Query heads and key-value heads of one layer; as many of both where the configuration says nothing of the second."""
        H = self.number("H", index)
        G = self.optional("G", index)
        G = H if G is None else G
        if not 0 < H <= MOST_HEADS or (G and H % G):
            raise HeadrankError(f"{self.where}: {self.name('H')} = {H} query heads cannot share {self.name('G')} = {G} key-value heads")
        return H, G

    def head_sizes(self, index: int, d_model: int, H: int) -> dict[str, int]:
        """Rows of each part that a pattern may name. d_model / H is taken only where no head size is stated."""
        sizes = {part: self.value(source, part, index) for part, source in self.row.sizes.items()}
        if sizes.keys() >= {"q", "k", "v"} or ("nope" in sizes and "v" in sizes):
            return sizes
        D = self.optional("D", index)
        if D is None and d_model % H:
            text = f"{self.name('d_model')} = {d_model} is not a multiple of {self.name('H')} = {H}"
            raise HeadrankError(f"{self.where}: {text}, and no head size is stated")
        return {part: d_model // H if D is None else D for part in ("q", "k", "v")} | sizes

    def layer_type(self, index: int) -> str | None:
        """What the configuration calls a layer, such as "full_attention"; None where it does not say."""
        types = self.values.get("layer_types") or self.values.get("attention_layers") or self.values.get("layers_block_type")
        if not isinstance(types, list):
            return None
        if index >= len(types) or not isinstance(types[index], str):
            raise HeadrankError(f"{self.where}: layer_types has {len(types)} entries, but there is a layer {index}")
        return types[index]

    def says_attention(self, index: int) -> bool:
        """Whether the configuration promises attention in a layer."""
        name = self.layer_type(index) or ""
        return any(word in name for word in ATTENTION) and "linear" not in name

    def window(self, index: int) -> int | None:
        """Tokens within a query's reach, itself included; None for all."""
        reach = self.optional("window")
        if not reach or (self.row.window_if and self.values.get(self.row.window_if) is not True):
            return None
        if (name := self.layer_type(index)) is not None:
            return reach if any(word in name for word in LOCAL) else None
        if every := self.optional("global_every"):
            is_global = index % every == 0 if self.row.flags["global_first"] else (index + 1) % every == 0
            return None if is_global else reach
        first = self.optional("local_from")
        return reach if first is None or index >= first else None

    def kv_layer(self, index: int, n_layer: int) -> int:
        """The layer whose keys and values this one reads; mostly itself."""
        first_shared = n_layer - (self.optional("kv_shared") or 0)
        if index < first_shared:
            return index
        kind = self.layer_type(index) or self.window(index)
        for earlier in range(first_shared - 1, -1, -1):
            if (self.layer_type(earlier) or self.window(earlier)) == kind:
                return earlier
        raise HeadrankError(f"{self.where}: layer {index} shares keys, but no earlier layer has its own of the same kind")
