"""Statistics against plain loops, and what they advise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.advice import Grouping, advised_margin, groupings, knee, margins, shape_of
from tangram.calibration.statistics import (
    advised_alpha,
    between_samples,
    cost,
    coverage,
    mean_and_std,
    rank_correlation,
    split_half,
)
from tangram.config import TangramConfig
from tests.tangram.calibrated import IDENTITY, made_profile

shares = st.integers(0, 20).map(lambda n: n / 20)


def tables(samples: int) -> st.SearchStrategy[list[list[list[float]]]]:
    layer = st.lists(shares, min_size=2, max_size=2)
    return st.lists(st.lists(layer, min_size=2, max_size=2), min_size=samples, max_size=samples)


@given(tables(4), st.floats(0, 3))
def test_each_sample_is_judged_by_the_others(needs: list[list[list[float]]], alpha: float) -> None:
    covered = 0
    for sample, layer, head in np.ndindex(4, 2, 2):
        others = [needs[other][layer][head] for other in range(4) if other != sample]
        mean = sum(others) / 3
        std = (sum((x - mean) ** 2 for x in others) / 2) ** 0.5
        covered += needs[sample][layer][head] <= min(1.0, max(0.05, mean + alpha * std)) + 1e-9
    assert coverage(np.array(needs), alpha, 0.05) == pytest.approx(covered / 16)


def test_one_sample_has_no_spread() -> None:
    mean, std = mean_and_std(np.array([[[0.25, 0.5]]]))
    assert (mean.tolist(), std.tolist()) == ([[0.25, 0.5]], [[0.0, 0.0]])
    assert split_half(np.array([[[0.25, 0.5]]])) is None
    assert coverage(np.array([[[0.25, 0.5]]]), 0.0, 0.0) == 1.0


def test_the_advised_alpha_is_the_least_that_covers() -> None:
    known = made_profile(20).calibration
    assert known is not None
    needs = np.array(known.needs)
    alpha = advised_alpha(needs, 0.05)
    assert alpha is not None
    assert coverage(needs, alpha, 0.05) >= 0.95 > coverage(needs, alpha - 0.05, 0.05)
    assert cost(needs, 2.0, 0.05) > cost(needs, alpha, 0.05) > cost(needs, 0.0, 0.05)
    margin = advised_margin(made_profile(20), known)
    assert margin is not None
    assert margin.alpha == alpha
    assert [m.alpha for m in margins(made_profile(20), known)] == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0]


def test_no_alpha_covers_needs_that_jump() -> None:
    needs = np.zeros((3, 1, 1))
    needs[0] = 0.9  # the other two agree on 0, so nothing covers it
    assert advised_alpha(needs, 0.05) is None


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 1, 2, 3], [1, 2, 3, 4], 0.9486832980505138),  # equal values share rank 1.5
        ([1, 2, 3, 4, 5], [2, 1, 4, 3, 5], 0.8),
        ([1, 1, 1], [1, 2, 3], 0.0),
    ],
)
def test_rank_correlation(a: list[float], b: list[float], expected: float) -> None:
    assert rank_correlation(a, b) == pytest.approx(expected)


def test_halves_agree_where_heads_differ_more_than_samples() -> None:
    known = made_profile().calibration
    assert known is not None
    agreement = split_half(np.array(known.needs))
    assert agreement is not None
    assert agreement > 0.95
    noise = np.random.default_rng(0).uniform(size=(8, 30, 3))
    assert abs(split_half(noise) or 0.0) < 0.5


def test_group_sizes_up_to_a_sixth_of_all_heads() -> None:
    identity = replace(IDENTITY, layers=24, kv_heads=2)
    profile = made_profile(identity=identity)
    assert profile.calibration is not None
    found = groupings(TangramConfig(retention=0.25), shape_of(profile.calibration.model), profile)
    assert [g.group_size for g in found] == [1, 2, 3, 4, 6, 8]
    widths = [g.row_width for g in found]
    assert widths == sorted(widths, reverse=True)
    assert knee(found) in found
    layered = groupings(TangramConfig(scope="layer"), shape_of(profile.calibration.model), profile)
    assert [g.group_size for g in layered] == [1, 2]


def test_the_knee_is_where_waste_begins_to_rise() -> None:
    def grouping(size: int, width: int, waste: float) -> Grouping:
        return Grouping(size, 1, 1, width, waste, 0.0)

    choices = [grouping(1, 1024, 0.0), grouping(4, 256, 0.01), grouping(16, 64, 0.5)]
    assert knee(choices).group_size == 4
    assert knee([grouping(1, 64, 0.1)]).group_size == 1


def test_the_pair_of_samples_that_agrees_least_is_told() -> None:
    needs = np.array([[[0.1, 0.2, 0.3]], [[0.2, 0.3, 0.4]], [[0.3, 0.2, 0.1]]])
    assert between_samples(needs) == pytest.approx(((1 - 1 - 1) / 3, -1.0))
    assert between_samples(needs[:1]) is None
