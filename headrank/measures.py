"""How alike two heads are: headrank's own measure and others that people compare it with. Which there are, and where each is defined.

Every measure ends in a Gram matrix of heads, whose cosines are the similarity matrix that all commands show.
"""

from dataclasses import dataclass

from headrank.errors import HeadrankError

OPERATOR = "operator"


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One way to compare heads."""

    name: str
    """As given to --measure."""
    grams: dict[str, str]
    """Circuit -> the name under which a measurement keeps this measure's Gram matrices."""
    sources: tuple[str, ...]
    """Where it is defined: weights, activations."""
    compares: str
    """What of two heads it compares, for messages."""


MEASURES = {
    measure.name: measure
    for measure in (
        Measure(name=OPERATOR, grams={"qk": "qk", "ov": "ov"}, sources=("weights", "activations"), compares="heads as operators"),
        Measure(name="cka", grams={"ov": "cka"}, sources=("activations",), compares="what heads write on tokens (linear CKA)"),
        Measure(
            name="projection-kernel",
            grams={"qk": "projection-kernel-qk", "ov": "projection-kernel-ov"},
            sources=("weights",),
            compares="subspaces that weights span",
        ),
        Measure(name="keys", grams={"qk": "keys"}, sources=("weights", "activations"), compares="keys alone"),
        Measure(name="values", grams={"ov": "values"}, sources=("weights", "activations"), compares="values alone"),
    )
}
GRAMS = tuple(gram for measure in MEASURES.values() for gram in measure.grams.values())


def find_measure(name: str) -> Measure:
    """The measure of that name. Raises HeadrankError listing those there are."""
    if name not in MEASURES:
        raise HeadrankError(f"no measure is called {name!r}; there are {', '.join(MEASURES)}")
    return MEASURES[name]


def check_source(measure: str, source: str) -> None:
    """Raises HeadrankError where a measure is not defined on weights or on activations."""
    chosen = find_measure(measure)
    if source not in chosen.sources:
        raise HeadrankError(f"--measure {measure} compares {chosen.compares}, so it is not defined from {source}; give --source {chosen.sources[0]}")


def circuit_of(measure: str, asked: str | None) -> str:
    """The circuit that a measure is shown for: as asked for, else qk where it has that, else its only one.

    Raises HeadrankError where the measure does not have the circuit that was asked for.
    """
    chosen = find_measure(measure)
    if asked is None:
        return next(iter(chosen.grams))
    if asked not in chosen.grams:
        raise HeadrankError(f"--measure {measure} compares {chosen.compares}: it belongs to circuit {next(iter(chosen.grams))}, not to {asked}")
    return asked


def gram_name(measure: str, circuit: str) -> str:
    """The name of a measure's Gram matrices in a measurement: 'qk' and 'ov' for headrank's own.

    >>> gram_name("operator", "qk"), gram_name("cka", "ov")
    ('qk', 'cka')
    """
    return find_measure(measure).grams[circuit]
