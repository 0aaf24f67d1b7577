"""Drift: what is looked at, what it is compared with, and what is told."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tangram import drift_sampler
from tangram.config import TangramConfig
from tangram.drift import (
    FIRST_CHUNKS,
    LEAST_CHUNKS,
    LEAST_SPREAD,
    MEMORY_CHUNKS,
    WARN_CHUNKS,
    DriftMeter,
    KeyReference,
    reference,
)
from tangram.drift_sampler import DriftSampler
from tangram.geometry import Geometry
from tangram.key_needs import key_scores, shares_above
from tangram.profile import ModelShape, Profile, build_geometry
from tangram.wide import Bounds
from tests.tangram.calibrated import key_needs_of, made_profile

LAYERS, HEADS, SIZE = 4, 3, 16
SHAPE = ModelShape("m", LAYERS, HEADS, SIZE, 4, "float32", 4096)
CONFIG = TangramConfig(retention=0.5, chunk=64, window=32, rewind=32, group_size=5)


def needs(mean: Any, spread: float, count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    draw = np.random.default_rng(seed)
    return np.clip(mean + draw.normal(0, spread, size=(count, LAYERS, HEADS)), 0, 1)


def usual() -> np.ndarray[Any, Any]:
    found = np.random.default_rng(7).uniform(0.2, 0.8, size=(LAYERS, HEADS))
    return found - found.mean() + 0.5


def told(meter: DriftMeter, name: str = "drift") -> Any:
    return meter.to_dict()[name]


def test_the_spread_is_each_sample_s_distance_from_the_others() -> None:
    every = needs(usual(), 0.05, 9)
    others = [np.delete(every, place, axis=0).mean(axis=0) for place in range(9)]
    expected = np.mean([np.abs(one - rest).mean() for one, rest in zip(every, others, strict=True)])
    assert KeyReference.of(every).spread == pytest.approx(expected)
    assert KeyReference.of(np.stack([usual()] * 3)).spread == LEAST_SPREAD


def test_text_like_the_samples_drifts_little_and_other_text_much() -> None:
    meter = DriftMeter(KeyReference.of(needs(usual(), 0.03, 16)), 2.0)
    for one in needs(usual(), 0.03, LEAST_CHUNKS - 1, seed=1):
        meter.observe(one)
    assert told(meter) is None, "too few chunks"
    for one in needs(usual(), 0.03, 60, seed=2):
        meter.observe(one)
    assert 0 < told(meter) < 0.6
    assert told(meter, "rank_correlation") > 0.95
    moved = usual() + np.where(np.arange(HEADS) == 0, 0.2, -0.1)
    for one in needs(moved, 0.03, 6 * MEMORY_CHUNKS, seed=3):
        meter.observe(one)
    found = meter.to_dict()
    assert found["drift"] > 4
    assert found["drift"] == pytest.approx(found["difference"] / found["spread"], rel=1e-2)
    np.testing.assert_allclose(found["live"], moved, atol=0.03)


def test_one_warning_and_not_too_soon(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "vllm.tangram.drift")
    moved = needs(1 - usual(), 0.01, 2 * WARN_CHUNKS)
    silent = DriftMeter(KeyReference.of(needs(usual(), 0.03, 16)), 0.0)
    meter = DriftMeter(KeyReference.of(needs(usual(), 0.03, 16)), 2.0)
    for count, one in enumerate(moved, 1):
        silent.observe(one)
        meter.observe(one)
        assert len(caplog.records) == (1 if count >= WARN_CHUNKS else 0)
    assert "Calibrate again" in caplog.text


def test_without_needs_by_keys_the_first_chunks_are_the_reference() -> None:
    meter = DriftMeter(reference(made_profile()), 2.0)
    for one in needs(usual(), 0.03, FIRST_CHUNKS):
        assert told(meter, "reference") is None
        meter.observe(one)
    assert told(meter, "reference") == "first chunks"
    for one in needs(1 - usual(), 0.03, LEAST_CHUNKS):
        meter.observe(one)
    assert told(meter) > 2
    assert told(meter, "chunks") == LEAST_CHUNKS


def test_an_empty_row_s_equal_keys_do_not_count() -> None:
    meter = DriftMeter(KeyReference.of(needs(usual(), 0.03, 16)), 2.0)
    meter.observe(np.ones((LAYERS, HEADS)))
    assert told(meter, "chunks") == 0


def test_which_profiles_have_a_reference() -> None:
    known = made_profile()
    assert known.calibration is not None
    with_keys = key_needs_of(known)
    found = reference(with_keys)
    assert found is not None
    assert found.mean.shape == (4, 3)
    calibration = with_keys.calibration
    assert calibration is not None
    assert calibration.key_needs is not None
    for changed in ({"scorer": "other"}, {"share": 0.25}, {"needs": calibration.key_needs.needs[:2]}):
        other = replace(calibration, key_needs=replace(calibration.key_needs, **changed))
        assert reference(replace(with_keys, calibration=other)) is None, changed
    assert reference(Profile.uniform(4, 3)) is None


def test_shares_are_of_the_best_half_of_all_scores() -> None:
    scores = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    best = scores.flatten().topk(120).indices // 40
    expected = torch.bincount(best, minlength=6) / 40
    torch.testing.assert_close(shares_above(scores), expected)
    scores[2] = torch.nan
    assert shares_above(scores)[2] == 0


class Rows:
    """A pool of random states and rows of page ids into it."""

    def __init__(self, geometry: Geometry, rows: int) -> None:
        self.geometry = geometry
        draw = torch.Generator().manual_seed(3)
        width = geometry.row_width(1024)
        pages = rows * width
        size = (pages, geometry.group_size, geometry.page_tokens, 2 * SIZE)
        self.pool = torch.randn(size, generator=draw)
        self.rows = torch.randperm(pages, generator=draw, dtype=torch.int32).reshape(rows, width)

    def keys(self, row: int, first: int) -> torch.Tensor:
        """[layers * kv_heads, chunk, head_size], by the geometry's own addresses."""
        g = self.geometry
        keys = torch.empty(LAYERS, HEADS, g.chunk, SIZE)
        for tier, of in enumerate(g.tiers):
            for member, (layer, head) in enumerate(of.heads):
                for place in range(g.chunk):
                    page = int(self.rows[row, g.ring_index(first + place, tier)])
                    at = (first + place) % g.page_tokens
                    keys[layer, head, place] = self.pool[page, member, at, :SIZE]
        return keys.flatten(0, 1)

    def expected(self, row: int, first: int) -> torch.Tensor:
        keys = self.keys(row, first)
        every = torch.zeros(len(keys), dtype=torch.int64)
        return shares_above(key_scores(every, every, keys)).reshape(LAYERS, HEADS)


class Noted(DriftMeter):
    """Keeps what it observes."""

    def __init__(self) -> None:
        super().__init__(None, 0.0)
        self.seen: list[torch.Tensor] = []

    def observe(self, needs: Any) -> None:
        self.seen.append(torch.tensor(needs, dtype=torch.float32))


def steps(*spans: tuple[int, int]) -> Bounds:
    """A step of a batch, from (tokens before, tokens after)."""
    tokens = [0]
    for start, end in spans:
        tokens.append(tokens[-1] + end - start)
    return Bounds([start for start, _ in spans], [end for _, end in spans], tokens)


@pytest.fixture
def rows() -> Rows:
    return Rows(build_geometry(CONFIG, SHAPE, made_profile()), 3)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift_sampler, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(drift_sampler, "MOST_OF_TIME", 1e9)


def sampler(rows: Rows, every: int = 1) -> tuple[DriftSampler, Noted]:
    meter = Noted()
    return DriftSampler(rows.geometry, meter, every, torch.device("cpu")), meter


@pytest.mark.usefixtures("eager")
def test_the_chunk_at_a_boundary_is_read_where_it_lies(rows: Rows) -> None:
    watch, meter = sampler(rows)
    before = rows.pool.clone()
    boundary = rows.geometry.boundary(3)
    watch.between_steps(rows.pool, rows.rows, steps((7, 8), (boundary, boundary + 1), (40, 90)))
    (seen,) = meter.seen
    torch.testing.assert_close(seen, rows.expected(1, 3 * 64))
    assert torch.equal(rows.pool, before), "looking writes nothing"
    watch.between_steps(rows.pool, rows.rows, steps((8, 9), (boundary + 1, boundary + 2)))
    assert len(meter.seen) == 1


@pytest.mark.usefixtures("eager")
def test_chunks_sealed_inside_a_wide_step_are_looked_at_after_it(rows: Rows) -> None:
    watch, meter = sampler(rows, every=3)
    watch.between_steps(rows.pool, rows.rows, steps((10, 11), (0, 311)))
    assert meter.seen == []
    watch.between_steps(rows.pool, rows.rows, steps((11, 12), (311, 312)))
    (seen,) = meter.seen
    torch.testing.assert_close(seen, rows.expected(1, 304 - 64))  # the last whole pages
    watch.between_steps(rows.pool, rows.rows, steps((12, 13), (312, 313)))
    assert len(meter.seen) == 1


@pytest.mark.usefixtures("eager")
def test_one_chunk_in_so_many(rows: Rows) -> None:
    watch, meter = sampler(rows, every=4)
    for _ in range(9):
        watch.between_steps(rows.pool, rows.rows, steps((96, 97)))
    assert len(meter.seen) == 3, "the first, the fifth and the ninth"


def test_and_no_more_than_a_hundredth_of_the_time(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(drift_sampler.time, "monotonic", lambda: now[0])
    watch, meter = sampler(rows)
    look = DriftSampler._look

    def slowly(*given: Any) -> None:
        now[0] += 0.05
        look(*given)

    monkeypatch.setattr(DriftSampler, "_look", slowly)
    for _ in range(2000):
        watch.between_steps(rows.pool, rows.rows, steps((96, 97)))
        now[0] += 0.01
    assert len(meter.seen) == 4, "20 seconds of steps, 5 seconds apart"
