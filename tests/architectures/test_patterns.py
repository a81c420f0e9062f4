"""The row language: starts worked out by hand, laws, and texts that are no pattern."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrank.architectures import patterns
from headrank.architectures.patterns import lay_out, parts_of, rows_of
from headrank.errors import HeadrankError

COUNTS = {"H": 6, "G": 3, "R": 2}
SIZES = {"q": 5, "k": 5, "v": 7, "gate": 5}


def test_the_examples_in_its_documentation_hold() -> None:
    assert doctest.testmod(patterns).failed == 0


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        ("H*q", {"q": (0, 5, 10, 15, 20, 25)}),
        ("q", {"q": (0,)}),
        ("k v", {"k": (0,), "v": (5,)}),
        ("G*k G*v", {"k": (0, 5, 10), "v": (15, 22, 29)}),
        ("G*[k v]", {"k": (0, 12, 24), "v": (5, 17, 29)}),
        ("G*[R*q k v]", {"q": (0, 5, 22, 27, 44, 49), "k": (10, 32, 54), "v": (15, 37, 59)}),
        ("2*[H/2*q H/2*v]", {"q": (0, 5, 10, 36, 41, 46), "v": (15, 22, 29, 51, 58, 65)}),
        ("G*R*q", {"q": (0, 5, 10, 15, 20, 25)}),
        ("3*[q 2*[k v]]", {"q": (0, 29, 58), "k": (5, 17, 34, 46, 63, 75), "v": (10, 22, 39, 51, 68, 80)}),
    ],
)
def test_rows_fall_to_heads(text: str, starts: dict[str, tuple[int, ...]]) -> None:
    assert lay_out(text, COUNTS, SIZES).starts == starts


@given(st.permutations(["H*q", "G*[k v]", "2*[H/2*gate v]"]))
def test_every_row_belongs_to_exactly_one_occurrence(terms: list[str]) -> None:
    pattern = lay_out(" ".join(terms), COUNTS, SIZES)
    rows = [row for part, starts in pattern.starts.items() for start in starts for row in range(start, start + SIZES[part])]
    assert sorted(rows) == list(range(pattern.rows))
    assert rows_of(pattern.text, COUNTS, SIZES) == pattern.rows


def test_parts_are_listed_in_order() -> None:
    assert parts_of("G*[R*q k v]") == ("q", "k", "v")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "ends too early"),
        ("H*", "ends too early"),
        ("H q", "is not understood at 'q'"),
        ("*q", r"is not understood at '\*q'"),
        ("G*[q k", "ends too early"),
        ("q]", "a bracket has no match"),
        ("G*[]", "a bracket has no match"),
        ("q + k", r"is not understood at '\+ k'"),
        ("X*q", "'X' is no count; known: G, H, R"),
        ("H/4*q", "H = 6 is not a multiple of 4"),
        ("H/0*q", "H = 6 is not a multiple of 0"),
        ("H*z", "no size is known for 'z'; known: gate, k, q, v"),
    ],
)
def test_a_text_that_is_no_pattern_says_where(text: str, message: str) -> None:
    with pytest.raises(HeadrankError, match=message):
        rows_of(text, COUNTS, SIZES)


def test_a_count_beyond_all_bounds_takes_no_memory() -> None:
    assert rows_of("H*q", {"H": 10**12}, SIZES) == 5 * 10**12
