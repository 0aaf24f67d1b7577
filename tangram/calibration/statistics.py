"""From the needs of heads in each sample to what a profile says of them, and how far it can be trusted.

Without torch: a profile is looked at in a fraction of a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

Needs = NDArray[np.float64]
"""[samples, layers, kv_heads], shares from 0 to 1."""

DECIMALS = 5
"""Of the needs in a file: of a cache of 32k tokens a third of a token."""
COVERED = 0.95
"""The share of needs that an advised alpha covers."""
ALPHAS = tuple(step / 20 for step in range(101))
Z = 1.959964
"""Of a 95% interval."""
LEAST_LEFT_OUT = 3
"""With fewer samples none is left out: no deviation can be computed from the others."""


def mean_and_std(needs: Needs) -> tuple[Needs, Needs]:
    """[layers, kv_heads] each. The deviation is the unbiased estimate; 0 of one sample."""
    mean = needs.mean(axis=0)
    return mean, needs.std(axis=0, ddof=1) if len(needs) > 1 else np.zeros_like(mean)


def coverage(needs: Needs, alpha: float, floor: float) -> float:
    """The share of all (sample, head) whose need is at most what mean + alpha x std allows.

    With three samples or more each is judged by the others' mean and deviation, as a text to come will be.
    """
    if len(needs) < LEAST_LEFT_OUT:
        return float((needs <= _allowed(needs, alpha, floor) + 1e-9).mean())
    covered = [
        (need <= _allowed(np.delete(needs, number, axis=0), alpha, floor) + 1e-9).mean()
        for number, need in enumerate(needs)
    ]
    return float(np.mean(covered))


def _allowed(needs: Needs, alpha: float, floor: float) -> Needs:
    mean, std = mean_and_std(needs)
    allowed: Needs = np.clip(mean + alpha * std, floor, 1.0)
    return allowed


def cost(needs: Needs, alpha: float, floor: float) -> float:
    """Mean over heads of the share that mean + alpha x std allows: the retention at which the needs, with
    this margin, are met without being scaled."""
    return float(_allowed(needs, alpha, floor).mean())


def advised_alpha(needs: Needs, floor: float, covered: float = COVERED) -> float | None:
    """The least alpha that covers so many of the needs; None if none of ``ALPHAS`` does."""
    return next((alpha for alpha in ALPHAS if coverage(needs, alpha, floor) >= covered), None)


def rank_correlation(a: Any, b: Any) -> float:
    """Spearman's, of two tables of the same heads; equal values share their mean rank. 0 if one is flat."""
    x, y = (_ranks(np.asarray(table, dtype=np.float64).ravel()) for table in (a, b))
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / scale if scale else 0.0


def _ranks(values: Needs) -> Needs:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Needs = (last - (counts - 1) / 2.0)[places]
    return ranks


def split_half(needs: Needs) -> float | None:
    """Rank correlation of the heads' mean needs in every other sample and in the rest; None of fewer than
    two samples."""
    if len(needs) < 2:
        return None
    return rank_correlation(needs[::2].mean(axis=0), needs[1::2].mean(axis=0))


def between_samples(needs: Needs) -> tuple[float, float] | None:
    """Mean and least rank correlation of the heads' needs over all pairs of samples; None of one sample."""
    found = [rank_correlation(a, b) for a, b in combinations(needs, 2)]
    return (float(np.mean(found)), min(found)) if found else None


def interval_of_mean(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and a 95% interval of it by the normal distribution; infinitely wide for one value."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    half = Z * math.sqrt(variance / len(values))
    return mean, mean - half, mean + half


def sign_test(first_only: int, second_only: int) -> float:
    """How likely so uneven a split is by chance, of questions that one of two answered and the other did not:
    two-sided, exact (McNemar's)."""
    count = first_only + second_only
    tail = sum(math.comb(count, few) for few in range(min(first_only, second_only) + 1))
    return min(1.0, 2 * tail / 2**count)
