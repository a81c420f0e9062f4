"""Where the parts of attention lie in a checkpoint: the plain data that `describe` makes and `factors` evaluates."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A normalisation whose gain and bias can be folded into the matrix beside it."""

    gain: tuple[str, ...] = ()
    """Tensor of the gain, or one a head; none where it has no gain."""
    bias: tuple[str, ...] = ()
    """Likewise of the bias."""
    centred: bool = False
    """A LayerNorm: it takes the mean away."""
    plus_one: bool = False
    """The gain is stored less 1."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Factors that 8-bit numbers are stored without: the matrix is theirs times what is stored."""

    tensor: str
    block: tuple[int, int]
    """Rows and columns, as stored, that share one factor."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Rows of one stored matrix that belong to heads."""

    tensor: str
    """Name as on disk."""
    starts: tuple[int, ...]
    """First row of each head, rows being outputs."""
    size: int
    """Rows a head."""
    transposed: bool = False
    """Stored in × out: what is called a row here is a column on disk."""
    scale: Scale | None = None
    pattern: str = ""
    """The row pattern that it was cut by, for people."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One linear map: y = W norm(x) + b, for every head."""

    weight: Slice
    bias: str | None = None
    """Tensor of the bias, cut as the weight's rows are."""
    norm: Norm | None = None
    """What its input goes through first."""


Chain = tuple[Step, ...]
"""Steps in the order in which they are applied to the residual stream: the product of their matrices is one head's."""


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Queries, keys, values or the output projection of one layer."""

    parts: dict[str, tuple[Chain, ...]]
    """Name -> chains whose sum it is; the parts stand side by side in a head (MLA: nope, rope)."""
    sizes: dict[str, int]
    """Name -> its share of the head size."""
    n: int
    """Number of different heads: shared ones count once."""
    head_norm: Norm | None = None
    """What each head goes through afterwards (QK norm); of the output projection, what its input goes through first."""

    @property
    def size(self) -> int:
        """Head size."""
        return sum(self.sizes.values())


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """One attention block."""

    index: int
    """Number of the layer in the model, from 0; layers without attention are counted."""
    group: str = ""
    """Empty, or which stack it is in: encoder, decoder, cross."""
    n_head: int
    n_kv_head: int
    d_qk: int
    """Size of a head's queries and keys, a rotary part of its own included."""
    d_v: int
    """Size of a head's values."""
    window: int | None = None
    """Tokens that a query can look back on, itself included; None for all."""
    q: Projection
    k: Projection
    v: Projection
    o: Projection
    """(W_O^h)^T: cut by head along its input."""
    kv_values_per_token: int
    """Numbers that a cache holds for one token; 0 where the keys of another layer are read."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What the tensors of a checkpoint mean."""

    family: str
    """Row of the table."""
    kind: str
    """mha, gqa, mqa, mla or lrkv."""
    layers: tuple[AttentionLayer, ...]
    """Only layers with attention."""
    n_layer: int
    """Depth, layers without attention included; encoder and decoder together."""
    d_model: int
    n_head: int
    """Of the layer with most; likewise the following."""
    n_kv_head: int
    d_head: int
    """Size of a head's keys without a rotary part of their own."""
    vocab_size: int | None
    context: int | None
    """Longest sequence in tokens, as configured."""
    n_parameters: int
    kv_values_per_token: int
    """Numbers that a cache holds for one token, all layers together."""
    kv_values_per_token_of_mha: int
    """Numbers that it would hold if every query head had keys and values of its own."""
    folded: tuple[str, ...]
    """What the factors include beside the matrices, unless they are taken raw."""
    remarks: tuple[str, ...] = ()
    """What was left aside, for people."""
