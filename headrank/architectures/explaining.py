"""Where each head's rows lie: tensor -> slice -> head, for people who want to check."""

from collections.abc import Iterator
from dataclasses import dataclass

from headrank.architectures.layout import AttentionLayer, Norm, Projection

ROLES = {"q": "query", "k": "key", "v": "value", "o": "output"}


@dataclass(frozen=True)
class Placement:
    """One head's share of one tensor."""

    role: str
    """query, key, value or output; with the part behind it where a head has several (query nope)."""
    head: int | None
    """Number of the query head, or of the key-value head for keys and values; None where all heads share it."""
    tensor: str
    start: int
    stop: int
    """First row and the one after the last."""
    axis: int
    """0 where these are rows as stored, 1 where they are columns."""
    through: tuple[str, ...]
    """Tensors that are folded in before and after: gains, biases."""


def explain(layer: AttentionLayer) -> Iterator[Placement]:
    """Every share of every head of a layer, in the order in which they are applied."""
    for key, role in ROLES.items():
        projection: Projection = getattr(layer, key)
        for part, chains in projection.parts.items():
            name = role if len(projection.parts) == 1 else f"{role} {part}"
            for chain in chains:
                for step in chain:
                    weight = step.weight
                    folded = (*_tensors(step.norm), *((step.bias,) if step.bias and key != "k" else ()))
                    folded += _tensors(projection.head_norm) if step is chain[-1] else ()
                    for number, start in enumerate(weight.starts):
                        head = number if len(weight.starts) > 1 or layer.n_head == 1 or (key in "kv" and projection.n == 1 == len(chain)) else None
                        yield Placement(name, head, weight.tensor, start, start + weight.size, int(weight.transposed), folded)


def _tensors(norm: Norm | None) -> tuple[str, ...]:
    return () if norm is None else (*norm.gain, *norm.bias)
