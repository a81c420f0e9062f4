"""Heads into groups, from what it costs to have two heads in one group: groups of one size, or clusters of any.

The cost of a grouping is the sum of the costs of all pairs that share a group. With squared distances as costs that is the size of a
group times the squared distance of its heads from their mean: what is lost where the mean takes their place.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Groups = tuple[tuple[int, ...], ...]

MOST_TRIED = 20_000  # groupings; up to there the best of all is found, which takes a fraction of a second


@dataclass(frozen=True)
class Grouping:
    """Groups of equal size."""

    groups: Groups
    """Heads of each group, ascending; groups by their first head."""
    is_best: bool
    """Whether no grouping of that size costs less; else it is one that no exchange of two heads makes better."""


def equal_groups(cost: Array, n_groups: int) -> Grouping:
    """Groups of H / n_groups heads each, of least cost. cost: [H, H], symmetric, none negative; n_groups divides H.

    Average linkage with groups capped at their size, then exchanges of two heads while one helps. Where there are no more than
    MOST_TRIED groupings, all are searched from there, leaving out those that cost more than the best so far.
    """
    groups = _exchanged(cost, _capped_linkage(cost, n_groups))
    size = len(cost) // n_groups
    if n_groupings(len(cost), n_groups) > MOST_TRIED:
        return Grouping(_ordered(groups), is_best=False)
    return Grouping(_ordered(_best(cost, size, groups)), is_best=True)


def clusters(cost: Array, n_clusters: int) -> Groups:
    """Clusters of any size by average linkage: the two with the least mean cost between them are joined until n_clusters are left."""
    return _ordered(_linkage(cost, n_clusters, largest=len(cost)))


def grouping_cost(cost: Array, groups: Sequence[Sequence[int]]) -> float:
    """Sum of the costs of all pairs that share a group."""
    return float(sum(cost[np.ix_(group, group)][np.triu_indices(len(group), 1)].sum() for group in map(list, groups)))


def n_groupings(n_head: int, n_groups: int) -> int:
    """How many groupings into groups of equal size there are."""
    return math.factorial(n_head) // (math.factorial(n_head // n_groups) ** n_groups * math.factorial(n_groups))


def consecutive_groups(n_head: int, n_groups: int) -> Groups:
    """Heads 0, 1, … of each group in turn: what a grouped model reads from a file."""
    size = n_head // n_groups
    return tuple(tuple(range(start, start + size)) for start in range(0, n_head, size))


def random_groups(n_head: int, n_groups: int, random: np.random.Generator) -> Groups:
    """Groups of equal size, each grouping with the same probability."""
    return _ordered(random.permutation(n_head).reshape(n_groups, -1).tolist())


def _ordered(groups: Sequence[Sequence[int]]) -> Groups:
    return tuple(sorted(tuple(sorted(int(head) for head in group)) for group in groups))


def _linkage(cost: Array, n_clusters: int, *, largest: int) -> list[list[int]]:
    """Joins the two clusters of least mean cost that together have at most `largest` heads, down to n_clusters or until none fit."""
    found = [[head] for head in range(len(cost))]
    sums = np.array(cost, dtype=np.float64)
    while len(found) > n_clusters:
        sizes = np.array([len(cluster) for cluster in found], dtype=np.float64)
        means = np.where(sizes[:, None] + sizes <= largest, sums / np.outer(sizes, sizes), np.inf)
        means[np.tril_indices(len(found))] = np.inf
        i, j = np.unravel_index(int(np.argmin(means)), means.shape)
        if not np.isfinite(means[i, j]):
            break
        found[i] += found.pop(j)
        sums[i] += sums[j]
        sums[:, i] += sums[:, j]
        sums = np.delete(np.delete(sums, j, 0), j, 1)
    return found


def _capped_linkage(cost: Array, n_groups: int) -> list[list[int]]:
    """Linkage up to the size of a group; the heads of clusters too many go where there is room and they cost least."""
    size = len(cost) // n_groups
    found = sorted(_linkage(cost, n_groups, largest=size), key=len, reverse=True)
    groups = found[:n_groups]
    for head in (head for cluster in found[n_groups:] for head in cluster):
        min((group for group in groups if len(group) < size), key=lambda group: cost[head, group].mean()).append(head)
    return groups


def _exchanged(cost: Array, groups: list[list[int]]) -> list[list[int]]:
    """Exchanges the two heads of different groups that gain most, until no exchange gains."""
    H = len(cost)
    of_head = np.empty(H, dtype=np.int64)
    for number, group in enumerate(groups):
        of_head[group] = number
    cost = np.where(np.eye(H, dtype=bool), 0.0, cost)
    rounding = 1e-12 * (np.abs(cost).sum() or 1.0)
    while True:
        to_group = np.stack([cost[:, of_head == number].sum(1) for number in range(len(groups))], 1)  # [H, G]
        there = to_group[:, of_head]  # [i, j]: cost of i among j's group
        own = to_group[np.arange(H), of_head]
        gain = own[:, None] + own - there - there.T + 2 * cost
        gain[of_head[:, None] == of_head] = 0.0
        i, j = np.unravel_index(int(np.argmax(gain)), gain.shape)
        if gain[i, j] <= rounding:
            return [np.flatnonzero(of_head == number).tolist() for number in range(len(groups))]
        of_head[i], of_head[j] = of_head[j], of_head[i]


def _best(cost: Array, size: int, groups: list[list[int]]) -> list[list[int]]:
    """The grouping of least cost; `groups`, a good one, bounds the search. Costs are not negative, so no group makes a price fall."""
    best, least = groups, grouping_cost(cost, groups) * (1 - 1e-12)
    prices = cost.tolist()

    def search(rest: list[int], chosen: list[list[int]], price: float) -> None:
        nonlocal best, least
        if not rest:
            best, least = [list(group) for group in chosen], price
            return
        first, others = rest[0], rest[1:]
        for members in combinations(others, size - 1):
            group = [first, *members]
            total = price + sum(prices[a][b] for a, b in combinations(group, 2))
            if total < least:
                search([head for head in others if head not in members], [*chosen, group], total)

    search(list(range(len(cost))), [], 0.0)
    return best
