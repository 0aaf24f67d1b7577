"""The reports against sums made by hand."""

from __future__ import annotations

import json

from tangram.config import TangramConfig
from tangram.geometry import Geometry, Tier
from tangram.profile import ModelShape
from tangram.telemetry import LENGTHS, CacheSnapshot, Sequence, memory_report, preview_report

SHAPE = ModelShape("m", 2, 2, 8, 2, "bfloat16", 8192)
G = Geometry(2, 2, 8, 2, 16, 512, 128, 64, 2, (Tier(64, ((0, 0), (1, 1))), Tier(256, ((0, 1), (1, 0)))))
BUDGETS = [[0.1, 0.5], [0.5, 0.15]]
SNAPSHOT = CacheSnapshot(
    1000,
    1000 - G.pages(2000) - G.pages(100),
    [
        Sequence("run", "running", 2000, G.sealed(2000), G.pages(2000), None),
        Sequence("idle", "resident", 100, 0, G.pages(100), 3.5),
    ],
    {"takeovers": 1},
)


def test_the_snapshot_survives_json() -> None:
    assert CacheSnapshot.from_dict(json.loads(json.dumps(SNAPSHOT.to_dict()))) == SNAPSHOT


def test_the_map_sums_over_sequences() -> None:
    report = memory_report(SNAPSHOT, G, SHAPE, TangramConfig(), BUDGETS, 12.0)
    sealed = G.sealed(2000)
    raw = 2000 - sealed * 512
    small, large = sealed * 64 + raw + 100, sealed * 256 + raw + 100
    assert report["heads"]["tokens_kept"] == [[small, large], [large, small]]
    assert report["heads"]["tier"] == [[0, 1], [1, 0]]
    assert report["heads"]["budget"] == BUDGETS
    pages = [G.ring_slots + sealed * keep // 16 + 7 for keep in (64, 256)]
    assert report["heads"]["pages"] == [[pages[0], pages[1]], [pages[1], pages[0]]]
    assert sum(pages) == G.pages(2000) + G.pages(100)


def test_the_pool_adds_up() -> None:
    pool = memory_report(SNAPSHOT, G, SHAPE, TangramConfig(), BUDGETS, 12.0)["pool"]
    assert pool["running_pages"] == G.pages(2000)
    assert pool["resident_pages"] == G.pages(100)
    assert pool["free_pages"] + pool["running_pages"] + pool["resident_pages"] == pool["total_pages"]


def test_bytes_are_pages_and_the_full_cache_is_all_tokens_of_all_heads() -> None:
    report = memory_report(SNAPSHOT, G, SHAPE, TangramConfig(), BUDGETS, 12.0)
    assert report["used_bytes"] == (G.pages(2000) + G.pages(100)) * G.page_bytes
    assert report["full_cache_bytes"] == (2000 + 112) * 2 * 2 * 2 * 8 * 2


def test_a_preview_is_the_formula() -> None:
    report = preview_report(G, SHAPE, BUDGETS, pool_bytes=10**8)
    for length in LENGTHS:
        assert report["bytes_at"][str(length)] == G.pages(length) * G.page_bytes
        assert report["conversations_at"][str(length)] == 10**8 // (G.pages(length) * G.page_bytes)
    assert report["row_width"] == G.pages(8192)
    # Tier 0 keeps 0.125 of a chunk for heads that asked for 0.1 and 0.15, tier 1 exactly what was asked for.
    kept = 2 * 0.125 + 2 * 0.5
    assert abs(report["fragmentation"] - (0.125 - 0.1) / kept) < 1e-12
    assert report["warnings"] == ["groups of more than a sixth of all heads were seen to lose recall"]
    json.dumps(report)
