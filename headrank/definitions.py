"""What the numbers mean, in words for a reader who has only the report, each with its source."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrank.measures import OPERATOR, find_measure

PAPER = ("arXiv\u00a02601.11471", "https://arxiv.org/abs/2601.11471")
ROY = ("Roy and Vetterli, The effective rank, EUSIPCO 2007", None)
SCHOELKOPF = ("Schölkopf, Smola and Müller, Neural Computation 10(5), 1998", "https://doi.org/10.1162/089976698300017467")
EFRON = ("Efron and Tibshirani, An Introduction to the Bootstrap, 1993, ch. 10 and 12", None)
KORNBLITH = ("Kornblith et al., arXiv\u00a01905.00414", "https://arxiv.org/abs/1905.00414")
Source = tuple[str, str | None]

CIRCUITS = {"qk": "where heads look", "ov": "what heads write"}
OPERATORS = {
    ("weights", "qk"): "The bilinear form W_Q W_Kᵀ of a head, which decides where it looks, from the weights alone.",
    ("weights", "ov"): "The map W_V W_O of a head, which decides what it writes, from the weights alone.",
    ("activations", "qk"): "The scores that enter a head's softmax on the tokens fed, each query's about their mean over the keys that it may see: "
    "the cosine of two heads is that of their log attention patterns.",
    ("activations", "ov"): "What a head writes to the residual stream on the tokens fed, z W_O, about its mean over tokens unless that is kept.",
}


@dataclass(frozen=True, kw_only=True)
class Definition:
    """One term."""

    term: str
    text: str
    source: Source | None = None
    """Where it comes from, and its address."""


def definitions(*, source: str, measure: str, circuits: Sequence[str], has_intervals: bool, has_null: bool) -> list[Definition]:
    """The terms that a report of these measurements uses, in the order in which one meets them."""
    terms = [Definition(term=f"{circuit.upper()}, from {source}", text=_compared(source, measure, circuit), source=_origin(measure)) for circuit in circuits]
    terms += [
        Definition(
            term="Similarity S",
            text="The cosine of two heads, ⟨A, B⟩ / (‖A‖ ‖B‖): 1 for the same head at any scale, 0 for unrelated ones, −1 for opposite ones.",
            source=PAPER,
        ),
        Definition(
            term="Centred S",
            text="S less its row and column means plus its mean: what is left when the part that all heads share is taken away. Its rank is at most H − 1.",
            source=SCHOELKOPF,
        ),
        Definition(
            term="Effective rank",
            text="exp(−Σ v ln v) of the eigenvalues' shares v = λ / Σ λ: as how many independent heads these heads count. Identical heads have 1, "
            "orthogonal ones H. Where all eigenvalues are 0 it is undefined, shown as – and left out of means.",
            source=ROY,
        ),
        Definition(
            term="% of H, % of max",
            text="Effective rank as a percentage of the number of heads H, as the paper gives it, and of the most that can be reached: H, or H − 1 centred.",
            source=PAPER,
        ),
        Definition(term="PCs for 90 %", text="How many of the largest eigenvalues make up nine tenths of their sum.", source=PAPER),
        Definition(term="Dead head", text="A head that is zero. Its row and column of S are 0, its diagonal too; it is hatched and lowers the effective rank."),
    ]
    if has_intervals:
        terms.append(
            Definition(
                term="[low, high]",
                text="95 % interval over sequences, by a bootstrap with its bias taken away: what other text of the same kind would give.",
                source=EFRON,
            )
        )
    if has_null:
        terms.append(
            Definition(
                term="Null",
                text="The effective rank of random weights of the same shapes and sharing: untrained heads are nearly orthogonal whatever their kind.",
            )
        )
    terms.append(
        Definition(
            term="KV cache",
            text="Bytes that keys and values of one token take in all layers in bfloat16, and as a percentage of full heads' (MHA) of the same size.",
            source=PAPER,
        )
    )
    return terms


def _compared(source: str, measure: str, circuit: str) -> str:
    if measure == OPERATOR:
        return OPERATORS[source, circuit]
    return f"Heads are compared by --measure {measure}: {find_measure(measure).compares}."


def _origin(measure: str) -> Source | None:
    return {OPERATOR: PAPER, "cka": KORNBLITH}.get(measure)
