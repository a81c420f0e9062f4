"""Rotary embeddings in the attention form of the weights: W_Q R W_K^T, R turning a key N tokens before its query, or the mean over such offsets.

A rotary embedding turns pairs of a head's dimensions by an angle in proportion to the position (arXiv 2104.09864), so what a query and a
key have to do with each other depends on positions only through the offset N between them: R_N turns each pair by N times its
frequency. R_0 is the identity: the form that is measured unless another is asked for.
"""

import cmath
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrank.architectures import AttentionLayer
from headrank.checkpoints import Checkpoint
from headrank.config import MODEL_TYPE, ModelConfig
from headrank.errors import HeadrankError
from headrank.factors import HeadFactors

REMEDY = "leave out --rope-offset and --rope-mean"


@dataclass(frozen=True)
class Rotary:
    """How one layer's heads are turned, pair by pair."""

    first: tuple[int, ...]
    """Column of each pair's first number within a head's queries and keys."""
    second: tuple[int, ...]
    """Column of its second number."""
    angles: tuple[float, ...]
    """Radians by which (first, second) of a key is turned, towards second, for each token that its query comes after it."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a family turns its heads, as far as its configuration does not say."""

    neighbours: bool = False
    """Pairs are (0, 1), (2, 3), …; else (0, n/2), (1, n/2 + 1), …"""
    share: str = "partial_rotary_factor"
    """Configuration key of the share of a head that is turned."""
    count: str = "rotary_dim"
    """Configuration key of the number of dimensions that are turned."""
    default_share: float | None = 1.0
    """Where neither key is given; None: then it is not known."""
    default_theta: float | None = None
    """Likewise of the base of the frequencies."""


# By model_type, since one row of the architecture table serves families that differ in this. Each is tested against the
# library that defines it. Families that normalise queries and keys with a gain after turning them have no form at an offset.
PLAIN = ("mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "granite", "starcoder2", "olmo", "olmo2", "olmoe", "phi3")
LAYOUTS = {
    **dict.fromkeys(PLAIN, Layout()),
    **dict.fromkeys(("llama", "gemma"), Layout(default_theta=10000.0)),
    **dict.fromkeys(("cohere", "ernie4_5", "deepseek_v2", "deepseek_v3"), Layout(neighbours=True)),
    **dict.fromkeys(("glm", "glm4"), Layout(neighbours=True, default_share=0.5)),
    **dict.fromkeys(("gptj", "codegen"), Layout(neighbours=True, default_share=None, default_theta=10000.0)),
    **dict.fromkeys(("phi", "persimmon", "nemotron"), Layout(default_share=0.5)),
    "stablelm": Layout(default_share=0.25),
    "gpt_neox": Layout(share="rotary_pct", default_share=0.25),
}


def rotary_of(checkpoint: Checkpoint, layer: AttentionLayer, *, mla_part: str = "both") -> Rotary:
    """How a layer's queries and keys are turned, for columns as `head_factors(…, "qk", mla_part=…)` gives them.

    Raises HeadrankError where the family's layout is not recorded, or its frequencies are of a kind that is not known.
    """
    parts = layer.k.sizes
    has_part = "rope" in parts  # MLA's, which alone is turned; else whole heads are
    start = sum(parts[part] for part in list(parts)[: list(parts).index("rope")]) if has_part and mla_part == "both" else 0
    size = parts["rope"] if has_part else layer.d_qk
    if checkpoint.config.get("model_type") == MODEL_TYPE:
        own = ModelConfig.from_dict(checkpoint.config, where=str(checkpoint.path))
        return _pairs(_frequencies(size, own.rope_theta), start, neighbours=False, sign=1)  # turned backwards, as nanochat's are
    config = checkpoint.config.get("text_config") or checkpoint.config
    model_type = config.get("model_type")
    where = f"{checkpoint.path}: {checkpoint.config_name or 'its configuration'}"
    if model_type not in LAYOUTS:  # GGUF files too, whose rows may be permuted
        named = f"model_type {model_type!r}" if model_type else "this architecture"
        raise HeadrankError(f"{checkpoint.path}: how {named} turns its heads is not recorded; {REMEDY}")
    layout = LAYOUTS[model_type]
    if model_type == "deepseek_v3" and not config.get("rope_interleave", True):
        layout = replace(layout, neighbours=False)
    try:
        rope = _settings(config, layer, where)
        theta = rope.get("rope_theta", config.get("rope_theta", config.get("rotary_emb_base", layout.default_theta)))
        if theta is None:
            raise HeadrankError(f"{where} does not say the base of the rotary frequencies (rope_theta); {REMEDY}")
        turned = size if has_part else _turned(config, rope, layout, size, where)
        frequencies = _scaled(_frequencies(turned, float(theta)), rope, config, where)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise HeadrankError(f"{where} has rotary settings that cannot be read: {error!r}; {REMEDY}") from None
    return _pairs(frequencies, start, neighbours=layout.neighbours, sign=-1)


def _settings(config: Mapping[str, Any], layer: AttentionLayer, where: str) -> dict[str, Any]:
    """The rotary settings of one layer: for all layers alike, or by layer_types, or as Gemma 3 had them for its local layers."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        return dict(rope[config["layer_types"][layer.index]])
    if "rope_local_base_freq" in config and layer.window is not None:
        return {"rope_theta": config["rope_local_base_freq"]}
    return dict(rope)


def _turned(config: Mapping[str, Any], rope: Mapping[str, Any], layout: Layout, size: int, where: str) -> int:
    """Dimensions of a head that are turned."""
    if config.get(layout.count) is not None:
        turned = int(config[layout.count])
    else:
        share = rope.get("partial_rotary_factor", config.get(layout.share, config.get("partial_rotary_factor", layout.default_share)))
        if share is None:
            raise HeadrankError(f"{where} does not say how much of a head is turned ({layout.count}); {REMEDY}")
        turned = int(size * float(share))
    if turned % 2 or not 0 <= turned <= size:
        raise HeadrankError(f"{where} means that {turned} of a head's {size} dimensions are turned, which are no pairs; {REMEDY}")
    return turned


def _frequencies(n: int, theta: float) -> list[float]:
    """Radians a token of each of n / 2 pairs: theta^(-2 i / n)."""
    return [theta ** (-i / n) for i in range(0, n, 2)]


def _scaled(frequencies: list[float], rope: Mapping[str, Any], config: Mapping[str, Any], where: str) -> list[float]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return frequencies
    if kind == "linear":
        return [frequency / float(rope["factor"]) for frequency in frequencies]
    if kind == "llama3":
        original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
        return [
            _llama3(frequency, float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"]), original) for frequency in frequencies
        ]
    raise HeadrankError(f"{where} has rotary frequencies of the kind {kind!r}, which is not known; {REMEDY}")


def _llama3(frequency: float, factor: float, low: float, high: float, original: float) -> float:
    """Llama 3.1's stretching: long waves by `factor`, short ones not, those between in part."""
    waves = original * frequency / (2 * math.pi)  # in the original context
    kept = min(max((waves - low) / (high - low), 0.0), 1.0)
    return frequency * (kept + (1 - kept) / factor)


def _pairs(frequencies: list[float], start: int, *, neighbours: bool, sign: int) -> Rotary:
    n = len(frequencies)
    first = tuple(start + (2 * i if neighbours else i) for i in range(n))
    second = tuple(start + (2 * i + 1 if neighbours else i + n) for i in range(n))
    return Rotary(first=first, second=second, angles=tuple(sign * frequency for frequency in frequencies))


def at_offset(factors: HeadFactors, rotary: Rotary, offset: int) -> HeadFactors:
    """Heads as the forms W_Q R W_K^T between a query and the key `offset` tokens before it: still thin factors, the keys turned."""
    turns = torch.tensor([cmath.exp(1j * offset * angle) for angle in rotary.angles], dtype=torch.complex128, device=factors.right.device)
    right = factors.right.double()  # angles at large offsets need it
    turned = right.clone()
    columns = torch.complex(right[..., list(rotary.first)], right[..., list(rotary.second)]) * turns
    turned[..., list(rotary.first)], turned[..., list(rotary.second)] = columns.real, columns.imag
    return replace(factors, right=turned.to(factors.right.dtype))


def mean_gram_over_offsets(factors: HeadFactors, rotary: Rotary, n: int) -> Tensor:
    """The mean of the Gram matrices of the forms at the offsets N = 0 … n - 1, in closed form, from thin factors. [H, H] float64.

    A pair of columns (x, y) is the complex column u = x + iy, which an offset multiplies by e^(iwN), and a product of two pairs is

        <A, B> = 1/2 Re(P* P' + Q* Q')        P = u^H v, Q = u^T v of the queries, P', Q' of the keys

    P' turns with the difference of the two pairs' frequencies and Q' with their sum, so each is multiplied by its mean over N,

        1/n sum of e^(iwN) = e^(iw(n-1)/2) sin(nw/2) / (n sin(w/2))

    (Dirichlet's kernel): over many offsets only products within one frequency remain. Columns that are not turned have frequency 0.
    """
    left, right = (_complex_columns(factor, rotary) for factor in (factors.left, factors.right))
    angles = [*rotary.angles, *[0.0] * (left.shape[-1] - len(rotary.angles))]
    of_difference = torch.tensor([[_mean(b - a, n) for b in angles] for a in angles], dtype=torch.complex128, device=left.device)
    of_sum = torch.tensor([[_mean(a + b, n) for b in angles] for a in angles], dtype=torch.complex128, device=left.device)
    i, j = list(factors.left_of_head), list(factors.right_of_head)
    gram = torch.empty(len(i), len(i), dtype=torch.float64, device=left.device)
    for head in range(len(i)):
        P, P_keys = left[i[head]].mH @ left, right[j[head]].mH @ right  # [heads, pairs, pairs]
        Q, Q_keys = left[i[head]].mT @ left, right[j[head]].mT @ right
        terms = P.conj()[i] * P_keys[j] * of_difference + Q.conj()[i] * Q_keys[j] * of_sum
        gram[head] = terms.real.sum((1, 2)) / 2
    return (gram + gram.T) / 2


def _complex_columns(factor: Tensor, rotary: Rotary) -> Tensor:
    """[n, d, k] -> [n, d, pairs] complex: the pairs that are turned, then every other column with nothing beside it."""
    factor = factor.double()
    rest = sorted(set(range(factor.shape[-1])) - set(rotary.first) - set(rotary.second))
    alone = torch.complex(factor[..., rest], torch.zeros_like(factor[..., rest]))
    return torch.cat((torch.complex(factor[..., list(rotary.first)], factor[..., list(rotary.second)]), alone), -1)


def _mean(angle: float, n: int) -> complex:
    half = math.remainder(angle, 2 * math.pi) / 2
    if abs(math.sin(half)) < 1e-12:  # a whole turn a token: every offset gives the same
        return complex(1.0)
    return cmath.exp(1j * half * (n - 1)) * math.sin(n * half) / (n * math.sin(half))
