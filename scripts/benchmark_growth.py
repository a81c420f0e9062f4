"""How time should grow with a model and with what it is fed: cases of growing size, and how many operations each takes.

Operations are those of matrix products, a multiplication and an addition being two; what is done number by number, and fetching
numbers, is not counted. The exponent to expect is the slope that the counts themselves have over the same sizes: most are sums of
terms that grow differently.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

D = 128  # of a head, everywhere


@dataclass(frozen=True)
class Case:
    """A model of plain heads, and what is fed to it."""

    layers: int
    heads: int
    d_model: int
    sequences: int = 0
    seq_len: int = 0
    mlp: int = 4
    """Its width over d_model."""

    @property
    def tokens(self) -> int:
        return self.sequences * self.seq_len

    @property
    def geometry(self) -> dict[str, Any]:
        """Fields of headrank.config.ModelConfig."""
        d_mlp = max(1, self.mlp * self.d_model)
        return {"n_layer": self.layers, "n_head": self.heads, "n_kv_head": self.heads, "d_head": D, "d_model": self.d_model, "d_mlp": d_mlp, "vocab_size": 256}

    def __str__(self) -> str:
        fed = f", {self.sequences} x {self.seq_len}" if self.tokens else ""
        return f"{self.layers} layers, {self.heads} heads, d_model {self.d_model}{fed}"


def _series(case: Case, **sizes: Sequence[int]) -> dict[str, list[Case]]:
    """Quantity -> the case with that alone growing; the number of tokens grows by the number of sequences."""
    fields = {quantity: "sequences" if quantity == "tokens" else quantity for quantity in sizes}
    return {quantity: [replace(case, **{fields[quantity]: size}) for size in each] for quantity, each in sizes.items()}


# No MLP: weights mode leaves it alone. A layer's file is above the size up to which files are read whole for their fingerprint.
WEIGHTS = _series(Case(8, 12, 1536, mlp=0), layers=(4, 8, 16), heads=(6, 12, 24), d_model=(768, 1536, 3072, 6144))
# The width of 128M.
ACTIVATIONS = _series(
    Case(4, 6, 768, sequences=1, seq_len=1024),
    layers=(4, 8, 16),
    heads=(3, 6, 12, 24),
    d_model=(384, 768, 1536),
    tokens=(1, 2, 4),
    seq_len=(512, 1024, 2048, 4096),
)
LIMITS = {
    "weights": {"layers": 1, "heads": 2, "d_model": 1},
    "activations": {"layers": 1, "heads": 2, "d_model": 2, "tokens": 1, "seq_len": 2},
    "counting": {"layers": 1, "heads": 2, "d_model": 1, "tokens": 1, "seq_len": 2},
}
"""Exponents of the fastest growing term of each count, which large enough sizes come near to."""


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """p of values ~ sizes^p: the slope of log(value) on log(size), by least squares."""
    return float(np.polyfit(np.log(np.asarray(sizes, float)), np.log(np.asarray(values, float)), 1)[0])


def weights_operations(case: Case) -> int:
    """Products L_i^T L_j and R_i^T R_j of both circuits, d_model x D each, for pairs of heads on and above the diagonal."""
    return 2 * 2 * case.layers * _half(case.heads) * 2 * D**2 * case.d_model


def bare_operations(case: Case, pairs: int | None = None) -> int:
    """The forward pass up to the last layer's attention: Q, K, V, O and the MLP a token, scores and what they make of the values a pair.

    pairs: of a query and a key that are worked on, a sequence; all that causality allows where not given.
    """
    projections = 4 * 2 * case.layers * case.d_model * case.heads * D
    mlp = 2 * 2 * (case.layers - 1) * case.d_model * case.geometry["d_mlp"]
    return case.tokens * (projections + mlp) + 2 * _score_operations(case, pairs)


def pass_operations(case: Case, pairs: int | None = None) -> int:
    """headrank's pass: the bare one, whose scores it takes, and both circuits' sums."""
    return bare_operations(case, pairs) + _sum_operations(case, pairs)


def counting_operations(case: Case, pairs: int | None = None) -> int:
    """Both circuits' Gram matrices from queries, keys and what the heads hand to the output projection: the scores and all sums."""
    return _score_operations(case, pairs) + _sum_operations(case, pairs)


def _score_operations(case: Case, pairs: int | None) -> int:
    return 2 * case.layers * case.sequences * case.heads * D * _pairs(case, pairs)


def _sum_operations(case: Case, pairs: int | None) -> int:
    """Products of heads' scores, [H, H] a pair of tokens, and of their outputs, Z_i^T Z_j a token and W_O^i W_O^jT once.

    The last two are symmetric and half of them is left out, except that the diagonal heads' own are made whole.
    """
    scores = case.sequences * _pairs(case, pairs) * 2 * case.heads**2
    outputs = _half(case.heads) * 2 * D**2 * (case.tokens + case.d_model)
    mean = 2 * case.heads * D * (case.heads * D + case.heads * (case.sequences + 1))  # taken away at the end
    return case.layers * (scores + outputs + mean)


def _pairs(case: Case, pairs: int | None) -> int:
    return _half(case.seq_len) if pairs is None else pairs


def _half(n: int) -> int:
    """Pairs of n on and above the diagonal."""
    return n * (n + 1) // 2
