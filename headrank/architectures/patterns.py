"""How the rows of a fused matrix fall to heads, in one small language.

A pattern reads the rows of an out × in matrix from the top. `H*q G*k G*v` is all queries, then all keys, then all values;
`H*[q k v]` is query, key and value of each head in turn; `G*[R*q k v]` a group of R = H/G queries with its key and value;
`4*[H/4*q H/4*v H/4*k]` four blocks. Lower-case names are parts, as many rows as their size says; capitals and numbers are counts.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headrank.errors import HeadrankError

Term = tuple[int, "str | list[Term]"]  # how often, what

TOKEN = re.compile(r"\s*(?:([a-z_][a-z_0-9]*)|([A-Z]|\d+)(?:\s*/\s*(\d+))?|([*\[\]]))")


@dataclass(frozen=True)
class Pattern:
    """A pattern with all its counts and sizes filled in."""

    text: str
    """As it is written."""
    rows: int
    """Rows of the whole matrix."""
    starts: dict[str, tuple[int, ...]]
    """Part -> first row of each of its occurrences, in order: head h's is number h."""


def rows_of(text: str, counts: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """Rows that a matrix of this pattern has, from arithmetic alone: check it against the file before anything is laid out."""
    return _rows(_parse(text, counts), sizes, text)


def parts_of(text: str) -> tuple[str, ...]:
    """Names of the pattern's parts, in order."""
    return tuple(dict.fromkeys(match.group(1) for match in TOKEN.finditer(text) if match.group(1)))


def lay_out(text: str, counts: Mapping[str, int], sizes: Mapping[str, int]) -> Pattern:
    """Raises HeadrankError where the text is no pattern, or names a count or a part that has no size.

    >>> lay_out("G*[R*q k]", {"G": 2, "R": 2}, {"q": 5, "k": 3}).starts
    {'q': (0, 5, 13, 18), 'k': (10, 23)}
    """
    terms = _parse(text, counts)
    starts: dict[str, list[int]] = {part: [] for part in parts_of(text)}
    row = 0
    for part in _walk(terms):
        starts[part].append(row)
        row += sizes[part]
    return Pattern(text, _rows(terms, sizes, text), {part: tuple(rows) for part, rows in starts.items()})


def _rows(terms: list[Term], sizes: Mapping[str, int], text: str) -> int:
    total = 0
    for count, what in terms:
        if isinstance(what, str) and what not in sizes:
            raise HeadrankError(f"row pattern {text!r}: no size is known for {what!r}; known: {', '.join(sorted(sizes))}")
        total += count * (sizes[what] if isinstance(what, str) else _rows(what, sizes, text))
    return total


def _walk(terms: list[Term]) -> Iterator[str]:
    for count, what in terms:
        for _ in range(count):
            if isinstance(what, str):
                yield what
            else:
                yield from _walk(what)


def _parse(text: str, counts: Mapping[str, int]) -> list[Term]:
    stack: list[tuple[int, list[Term]]] = []
    terms: list[Term] = []
    count, expect_star = 1, False
    position = 0
    while text[position:].strip():
        match = TOKEN.match(text, position)
        if match is None or expect_star != (match.group(4) == "*"):
            raise HeadrankError(f"row pattern {text!r} is not understood at {text[position:].strip()!r}; an example: 'G*[R*q k v]'")
        position = match.end()
        part, number, divisor, sign = match.groups()
        expect_star = number is not None
        if part:
            terms.append((count, part))
            count = 1
        elif number:
            count *= _count(number, divisor, counts, text)
        elif sign == "[":
            stack.append((count, terms))
            count, terms = 1, []
        elif sign == "]":
            if not stack or count != 1 or not terms:
                raise HeadrankError(f"row pattern {text!r}: a bracket has no match")
            outer, before = stack.pop()
            terms = [*before, (outer, terms)]
    if stack or expect_star or count != 1 or not terms:
        raise HeadrankError(f"row pattern {text!r} ends too early; an example: 'G*[R*q k v]'")
    return terms


def _count(number: str, divisor: str | None, counts: Mapping[str, int], text: str) -> int:
    if not number.isdigit() and number not in counts:
        raise HeadrankError(f"row pattern {text!r}: {number!r} is no count; known: {', '.join(sorted(counts))}")
    value = int(number) if number.isdigit() else counts[number]
    if divisor is None:
        return value
    if int(divisor) == 0 or value % int(divisor):
        raise HeadrankError(f"row pattern {text!r}: {number} = {value} is not a multiple of {divisor}")
    return value // int(divisor)
