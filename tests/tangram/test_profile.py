"""Budgets from statistics, tiers from budgets, and profile files that must not be trusted."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.config import TangramConfig
from tangram.errors import ConfigError, ProfileError
from tangram.profile import ModelShape, Profile, build_geometry, default_group_size, in_force

SHAPE = ModelShape("m", 4, 3, 8, 2, "bfloat16", 4096)
shares = st.integers(0, 1000).map(lambda n: n / 1000)
matrices = st.lists(st.lists(shares, min_size=3, max_size=3), min_size=4, max_size=4)


def as_profile(mean: list[list[float]], std: list[list[float]] | None = None, floor: float = 0.05) -> Profile:
    std = std or [[0.0] * 3] * 4
    return Profile(tuple(map(tuple, mean)), tuple(map(tuple, std)), floor)


@given(matrices, st.floats(0.06, 0.99))
def test_budgets_reach_the_target_where_they_can(mean: list[list[float]], retention: float) -> None:
    profile = as_profile(mean)
    flat = [b for row in profile.budgets(retention, 1.0) for b in row]
    needs = [n for row in profile.needs(1.0) for n in row]
    assert all(profile.floor <= b <= 1.0 for b in flat)
    least = sum(1.0 if need == 1.0 else profile.floor for need in needs) / len(needs)
    if retention >= least + 1e-6:
        assert sum(flat) / len(flat) == pytest.approx(retention, abs=1e-6)
    else:  # heads that need everything keep everything, whatever the target
        assert sum(flat) / len(flat) == pytest.approx(least, abs=1e-6)


@given(matrices, st.floats(0.06, 0.99))
def test_budgets_keep_the_order_of_needs(mean: list[list[float]], retention: float) -> None:
    profile = as_profile(mean)
    pairs = sorted(
        (need, budget)
        for needs, budgets in zip(profile.needs(1.0), profile.budgets(retention, 1.0), strict=True)
        for need, budget in zip(needs, budgets, strict=True)
    )
    assert all(low <= high + 1e-9 for (_, low), (_, high) in itertools.pairwise(pairs))


def test_the_safety_margin_raises_the_need_of_uncertain_heads() -> None:
    profile = as_profile([[0.2] * 3] * 4, [[0.1, 0.0, 0.0]] * 4)
    assert profile.needs(0.0)[0] == [0.2, 0.2, 0.2]
    assert profile.needs(2.0)[0] == pytest.approx([0.4, 0.2, 0.2])


def test_uniform_reaches_every_target() -> None:
    for retention in (0.05, 0.25, 0.5, 0.9, 1.0):
        budgets = Profile.uniform(4, 3).budgets(retention, 1.0)
        assert {round(b, 9) for row in budgets for b in row} == {retention}


def test_full_retention_keeps_everything_whatever_the_profile_says() -> None:
    g = build_geometry(TangramConfig(retention=1.0), SHAPE, as_profile([[0.01] * 3] * 4))
    assert set(g.keep) == {512}
    assert g.kept_fraction(4096) == 1.0


@given(matrices, st.integers(1, 12), st.sampled_from(["model", "layer", "uniform"]), st.floats(0.1, 1.0))
def test_tiers_hold_heads_of_similar_budget(
    mean: list[list[float]], group: int, scope: str, retention: float
) -> None:
    profile = as_profile(mean)
    config = TangramConfig(group_size=group, scope=scope, retention=retention)
    g = build_geometry(config, SHAPE, profile)
    budgets = in_force(config, SHAPE, profile).budgets(retention, 1.0)
    assert sorted(head for tier in g.tiers for head in tier.heads) == [
        (la, h) for la in range(4) for h in range(3)
    ]
    for tier in g.tiers:
        mean_budget = sum(budgets[la][h] for la, h in tier.heads) / len(tier.heads)
        assert abs(tier.keep - mean_budget * 512) <= 16, "at most a page away from the members' mean"
        if scope == "layer":
            assert len({layer for layer, _ in tier.heads}) == 1
    if scope == "model":
        order = [budgets[la][h] for tier in g.tiers for la, h in tier.heads]
        assert order == sorted(order, reverse=True)


def test_the_default_group_is_a_sixth_of_all_heads() -> None:
    assert default_group_size(30, 3) == 15
    assert default_group_size(36, 8) == 48
    assert default_group_size(1, 2) == 1


def test_a_group_larger_than_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="group_size: must be at most the model's 12 heads"):
        build_geometry(TangramConfig(group_size=13), SHAPE)


def test_scope_uniform_does_not_even_read_the_profile(tmp_path: Path) -> None:
    config = TangramConfig(profile=str(tmp_path / "none.json"), scope="uniform")
    assert in_force(config, SHAPE) == Profile.uniform(4, 3)
    with pytest.raises(ProfileError, match="cannot be read"):
        in_force(replace(config, scope="model"), SHAPE)


def test_file_round_trip(tmp_path: Path) -> None:
    profile = as_profile([[0.1, 0.2, 0.3]] * 4, [[0.0, 0.1, 0.2]] * 4)
    path = tmp_path / "p.json"
    profile.save(path)
    loaded = Profile.load(path, 4, 3)
    assert (loaded.mean, loaded.std, loaded.floor) == (profile.mean, profile.std, profile.floor)
    assert build_geometry(TangramConfig(profile=str(path)), SHAPE).tiers[0].keep > 0
    assert json.loads(path.read_text())["calibration"] is None


GOOD = {"format": "tangram-profile", "version": 1, "mean": [[0.5] * 3] * 4, "std": [[0.0] * 3] * 4}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "damaged: it is not JSON"),
        ("[]", "is not a Tangram profile"),
        (GOOD | {"format": "x"}, "is not a Tangram profile"),
        (GOOD | {"version": 2}, "do not fit its checksum"),
        (GOOD | {"version": 3}, "has version 3, this release reads 1 and 2"),
        (GOOD | {"mean": [[0.5] * 3] * 5}, "for another model"),
        (GOOD | {"std": [[0.5] * 2] * 4}, "for another model"),
        (GOOD | {"mean": [[1.5] * 3] * 4}, "not a share from 0 to 1"),
        (GOOD | {"mean": [["0.5"] * 3] * 4}, "not a share from 0 to 1"),
        (GOOD | {"mean": [[float("nan")] * 3] * 4}, "not a share from 0 to 1"),
        (GOOD | {"mean": None}, "list of lists"),
        (GOOD | {"floor": 2}, "'floor'"),
    ],
)
def test_bad_files_are_refused_with_a_sentence(tmp_path: Path, content: object, says: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ProfileError, match=r"profile .*p\.json ") as error:
        Profile.load(path, 4, 3)
    assert says in str(error.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read: No such file"):
        Profile.load(tmp_path / "none.json", 4, 3)
