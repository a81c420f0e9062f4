"""How sure a number is: bootstrap intervals over sequences, from the Gram matrices that groups of sequences keep."""

import numpy as np
from numpy.typing import ArrayLike

from headrank.diversity import Array

N_RESAMPLES = 300
MIN_GROUPS = 8  # fewer say nothing about how sequences differ
Z = 1.959964  # of the normal distribution at 97.5 %


def resampled_grams(grams: Array) -> Array | None:
    """Gram matrices of N_RESAMPLES bootstrap samples of the groups, [B, H, H]; None where there are too few groups.

    grams: [S, H, H], a matrix a group of sequences. The samples depend on S alone, so that those of all layers go together.
    """
    S = len(grams)
    if S < MIN_GROUPS:
        return None
    draws = np.random.default_rng(0).multinomial(S, np.full(S, 1 / S), size=N_RESAMPLES)
    return np.tensordot(draws.astype(np.float64), grams, axes=1)


def interval(estimate: ArrayLike, resampled: Array, n_groups: int, *, low: float, high: float) -> Array:
    """95 % intervals of numbers, [..., 2], within [low, high]; NaN where a resample left the number undefined.

    estimate: [...], from all groups. resampled: [B, ...], the same from bootstrap samples. A resample repeats sequences, which makes
    noise look like structure and biases the rank of nearly orthogonal heads down; so the interval is estimate - bias +- t sd with
    the bias and the standard deviation of the resamples (Efron and Tibshirani 1993, ch. 10 and 12), the latter times
    sqrt(S / (S - 1)), and Student's quantile for S - 1 degrees of freedom. Percentiles of the resamples themselves held the true
    value in as few as 35 % of trials with 16 short sequences.
    """
    center = 2 * np.asarray(estimate, dtype=np.float64) - resampled.mean(0)
    t = Z + (Z**3 + Z) / (4 * (n_groups - 1))  # first terms of the Cornish-Fisher expansion
    half = t * resampled.std(0) * (n_groups / (n_groups - 1)) ** 0.5
    return np.clip(np.stack([center - half, center + half], -1), low, high)
