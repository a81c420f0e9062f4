"""Groups of equal size and clusters, against all groupings written out and against answers worked out by hand."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrank.grouping import clusters, consecutive_groups, equal_groups, grouping_cost, n_groupings, random_groups


def all_groupings(heads: list[int], size: int) -> list[list[tuple[int, ...]]]:
    if not heads:
        return [[]]
    first, rest = heads[0], heads[1:]
    return [[(first, *others), *more] for others in combinations(rest, size - 1) for more in all_groupings([head for head in rest if head not in others], size)]


def random_cost(n_head: int, seed: int) -> np.ndarray:
    points = np.random.default_rng(seed).normal(size=(n_head, 3))
    return ((points[:, None] - points) ** 2).sum(-1)


@pytest.mark.parametrize(("n_head", "n_groups", "expected"), [(6, 3, 15), (6, 2, 10), (6, 1, 1), (12, 6, 10395), (12, 3, 5775), (18, 6, 190590400)])
def test_groupings_are_counted(n_head: int, n_groups: int, expected: int) -> None:
    assert n_groupings(n_head, n_groups) == expected


@given(seed=st.integers(0, 10**6), shape=st.sampled_from([(6, 3), (6, 2), (8, 4), (9, 3)]))
def test_few_heads_get_the_best_of_all_groupings(seed: int, shape: tuple[int, int]) -> None:
    n_head, n_groups = shape
    cost = random_cost(n_head, seed)
    found = equal_groups(cost, n_groups)
    written_out = all_groupings(list(range(n_head)), n_head // n_groups)
    assert len(written_out) == n_groupings(n_head, n_groups)
    assert found.is_best
    assert grouping_cost(cost, found.groups) == pytest.approx(min(grouping_cost(cost, groups) for groups in written_out), rel=1e-9)


@given(seed=st.integers(0, 10**6))
def test_many_heads_get_a_grouping_that_no_exchange_makes_better(seed: int) -> None:
    cost = random_cost(24, seed)
    found = equal_groups(cost, 6)
    assert not found.is_best
    assert sorted(head for group in found.groups for head in group) == list(range(24))
    assert {len(group) for group in found.groups} == {4}
    price = grouping_cost(cost, found.groups)
    for i, j in combinations(range(24), 2):
        swap = {i: j, j: i}
        assert grouping_cost(cost, [[swap.get(head, head) for head in group] for group in found.groups]) >= price - 1e-9


def test_hidden_groups_among_many_heads_are_found() -> None:
    of_head = np.random.default_rng(5).permutation(np.repeat(np.arange(7), 5))
    noise = np.random.default_rng(6).uniform(0, 0.3, size=(35, 35))
    cost = (of_head[:, None] != of_head) * 1.0 + (noise + noise.T) / 2
    found = equal_groups(cost, 7)
    assert sorted(found.groups) == sorted(tuple(np.flatnonzero(of_head == group)) for group in range(7))


def test_the_cost_of_a_group_is_its_size_times_the_squared_distance_from_its_mean() -> None:
    points = np.random.default_rng(2).normal(size=(5, 7))
    cost = ((points[:, None] - points) ** 2).sum(-1)
    assert grouping_cost(cost, [range(5)]) == pytest.approx(5 * ((points - points.mean(0)) ** 2).sum())


def test_average_linkage_joins_by_mean_distance() -> None:
    # On a line at 0, 1, 3, 7: 0 and 1 join first; 3 is 2.5 from their mean distance and 4 from 7.
    line = np.array([0.0, 1.0, 3.0, 7.0])
    distance = np.abs(line[:, None] - line)
    assert clusters(distance, 3) == ((0, 1), (2,), (3,))
    assert clusters(distance, 2) == ((0, 1, 2), (3,))
    assert clusters(distance, 1) == ((0, 1, 2, 3),)


def test_consecutive_groups_follow_the_order_of_heads() -> None:
    assert consecutive_groups(6, 2) == ((0, 1, 2), (3, 4, 5))


def test_random_groups_are_every_grouping_alike() -> None:
    random = np.random.default_rng(3)
    drawn = [random_groups(6, 3, random) for _ in range(3000)]
    counts = np.unique([all_groupings(list(range(6)), 2).index(list(groups)) for groups in drawn], return_counts=True)[1]
    assert len(counts) == 15
    assert counts.min() > 140  # 200 expected, standard deviation 14
    assert counts.max() < 260
