"""A cache budget shared out over layers: where one more rank loses least elsewhere."""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
NOTHING = 1e-12  # a share of a layer's energy below which a rank brings nothing but rounding


def lost_energy(energies: Array) -> Array:
    """What a low rank loses. energies: [n], descending. Returns [n + 1]: the sum of all but the first r, for r from 0 to n.

    >>> lost_energy(np.array([3.0, 1.0])).tolist()
    [4.0, 1.0, 0.0]
    """
    return np.append(np.cumsum(energies[::-1])[::-1], 0.0)


def water_filling(lost: Sequence[Array], steps: Sequence[int], budget: int) -> list[int]:
    """Ranks of all layers, the sum of whose losses is least within the budget.

    lost: a layer's loss at rank 0, 1, …, falling ever more slowly, as lost_energy does. steps: what one more rank costs in that layer.
    budget: what there is for ranks. One rank at a time goes where it gains most for its cost. With equal steps no other choice loses
    less; with unequal ones the last few ranks may be spent better. A rank that gains nothing is not bought.
    """
    ranks = [0] * len(lost)
    waiting: list[tuple[float, int]] = []

    def offer(layer: int) -> None:
        rank = ranks[layer]
        if rank + 1 < len(lost[layer]) and (gain := float(lost[layer][rank] - lost[layer][rank + 1])) > NOTHING:
            heapq.heappush(waiting, (-gain / steps[layer], layer))

    for layer in range(len(lost)):
        offer(layer)
    while waiting:
        _, layer = heapq.heappop(waiting)
        if steps[layer] <= budget:
            budget -= steps[layer]
            ranks[layer] += 1
            offer(layer)
    return ranks


def uniform_rank(lost: Sequence[Array], steps: Sequence[int], budget: int) -> int:
    """The largest rank that every layer can have within the budget; a layer that has no such rank keeps its largest."""
    rank = 0
    while rank + 1 < max(map(len, lost)):
        if sum(step * min(rank + 1, len(losses) - 1) for step, losses in zip(steps, lost, strict=True)) > budget:
            break
        rank += 1
    return rank
