"""Budgets shared out over layers, against every way of sharing them out."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrank.ranks import lost_energy, uniform_rank, water_filling


def random_losses(seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [lost_energy(np.sort(random.uniform(0, scale, size=4))[::-1]) for scale in (1.0, 3.0, 0.2)]


@given(seed=st.integers(0, 10**6), budget=st.integers(0, 30))
def test_no_other_ranks_within_the_budget_lose_less(seed: int, budget: int) -> None:
    losses = random_losses(seed)
    ranks = water_filling(losses, [2, 2, 2], budget)
    assert 2 * sum(ranks) <= budget
    lost = sum(loss[rank] for loss, rank in zip(losses, ranks, strict=True))
    assert lost == pytest.approx(min(sum(losses[i][r] for i, r in enumerate(other)) for other in product(range(5), repeat=3) if 2 * sum(other) <= budget))


def test_ranks_go_where_they_gain_most_for_their_cost() -> None:
    losses = [lost_energy(np.array([5.0, 1.0])), lost_energy(np.array([4.0, 3.0]))]
    assert water_filling(losses, [1, 1], 2) == [1, 1]
    assert water_filling(losses, [1, 1], 3) == [1, 2]
    assert water_filling(losses, [3, 1], 3) == [0, 2]  # 4 and 3 for a unit each, before 5 for three


def test_ranks_that_gain_nothing_are_not_bought() -> None:
    assert water_filling([lost_energy(np.array([1.0, 0.0, 0.0]))], [1], 3) == [1]


def test_one_rank_for_all_layers_stays_within_the_budget() -> None:
    losses = [np.zeros(5), np.zeros(3)]
    assert uniform_rank(losses, [2, 3], 4) == 0
    assert uniform_rank(losses, [2, 3], 9) == 1
    assert uniform_rank(losses, [2, 3], 13) == 3  # the second layer keeps its largest, 2
    assert uniform_rank(losses, [2, 3], 10**6) == 4
