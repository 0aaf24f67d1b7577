"""The reports against sums made by hand."""

from __future__ import annotations

import itertools
import json

import pytest

from tangram.config import TangramConfig
from tangram.geometry import Geometry, Tier
from tangram.occupancy import Holding, Occupancy
from tangram.profile import ModelShape
from tangram.telemetry import CacheSnapshot, Sequence, memory_report

SHAPE = ModelShape("m", 2, 2, 8, 2, "bfloat16", 8192)
G = Geometry(2, 2, 8, 2, 16, 512, 128, 64, 2, (Tier(64, ((0, 0), (1, 1))), Tier(256, ((0, 1), (1, 0)))))
BUDGETS = [[0.1, 0.5], [0.5, 0.15]]
SEQUENCES = [
    Sequence("run", "running", 2000, G.sealed(2000), G.pages(2000), None),
    Sequence("idle", "resident", 100, 0, G.pages(100), 3.5),
]
FREE = 1000 - G.pages(2000) - G.pages(100)
HOLDINGS = [
    Holding("run", "running", 2000, range(G.pages(2000))),
    Holding("idle", "resident", 100, range(500, 500 + G.pages(100)), 3.5),
]
SNAPSHOT = Occupancy(HOLDINGS, 1000, FREE, {"takeovers": 1}).snapshot(G, running=1, waiting=2)


def test_a_page_with_several_owners_counts_once() -> None:
    """A prefix of 656 tokens that one running and one idle conversation share."""
    R, S, n = G.ring_pages, G.pages_per_chunk, G.prefix_length(0)
    sealed = list(range(S))
    ring: list[int | None] = [None] * R
    for place, page in zip(G.raw_entries(n), range(1000, 2000), strict=False):
        ring[place] = page
    held = len(G.raw_entries(n))
    rows = [
        Holding("idle", "resident", 700, [*range(100, 100 + R), *sealed], 1.0),
        Holding("prefix", "prefix", n, ring + sealed, 2.0),
        Holding("run", "running", 700, [*range(300, 300 + R), *sealed]),
    ]
    snapshot = Occupancy(rows, 5000, 5000 - 2 * R - S - held, {}).snapshot(G)
    assert snapshot.pages == {
        "ring": R, "sealed": S, "resident": R, "prefix": held, "free": snapshot.free_pages
    }  # fmt: skip
    assert sum(snapshot.pages.values()) == snapshot.total_pages
    assert [sequence.shared_pages for sequence in snapshot.sequences] == [S, S, S]
    assert [sequence.pages for sequence in snapshot.sequences] == [R + S, held + S, R + S]
    report = memory_report(snapshot, G, SHAPE, TangramConfig(), BUDGETS, 12.0)
    assert report["used_bytes"] == (2 * R + S + held) * G.page_bytes


@pytest.mark.parametrize("n", [20, 639, 640, 650, 656, 700, 1999, 2000])
def test_an_idle_conversation_counts_what_it_holds(n: int) -> None:
    """Slot by slot: the tokens in the pages of its row, with holes, and those that are seen."""
    last, pages = n // 16 * 16, itertools.count(1)
    ring: list[int | None] = [None] * G.ring_entries(last)
    for entry in G.held_entries(G.resumable(n, n)):
        ring[entry] = next(pages)
    sealed = [next(pages) for _ in range(G.ring_pages, G.resumed_pages(last))]
    held = next(pages) - 1
    assert held == G.idle_pages(n)
    holding = Holding("idle", "resident", n, ring + sealed, 1.0, resumes_at=last)
    snapshot = Occupancy([holding], 1000, 1000 - held, {}).snapshot(G)
    assert snapshot.pages["resident"] == held
    report = memory_report(snapshot, G, SHAPE, TangramConfig(), BUDGETS, 12.0)
    for tier, keep in enumerate(G.keep):
        first, chunks = G.raw_start(last), G.sealed(last - 1)
        slots = sum(page is not None for page in ring[tier::2]) + chunks * keep // 16
        layer, head = G.tiers[tier].heads[0]
        assert report["heads"]["pages"][layer][head] == slots
        assert report["heads"]["tokens_kept"][layer][head] == chunks * keep + len(range(first, last))
        assert report["heads"]["waste"][layer][head] >= 0


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


def test_pages_by_kind_split_a_row_at_its_ring() -> None:
    assert SNAPSHOT.pages == {
        "ring": G.ring_pages,
        "sealed": G.sealed(2000) * G.pages_per_chunk,
        "resident": G.pages(100),
        "prefix": 0,
        "free": FREE,
    }
    assert sum(SNAPSHOT.pages.values()) == SNAPSHOT.total_pages


def test_an_older_snapshot_without_the_new_fields_is_understood() -> None:
    old = {name: SNAPSHOT.to_dict()[name] for name in ("total_pages", "free_pages", "sequences", "counters")}
    snapshot = CacheSnapshot.from_dict(old)
    assert (snapshot.sequences, snapshot.pages, snapshot.waiting) == (SEQUENCES, {}, 0)


def test_waste_is_what_the_pages_hold_beyond_what_the_heads_asked_for() -> None:
    """Counted slot by slot: which tokens lie in the pages of each head, and which its own budget wants."""
    report = memory_report(SNAPSHOT, G, SHAPE, TangramConfig(), BUDGETS, 12.0)
    for layer in range(2):
        for head in range(2):
            tier = G.head_tier[layer][head]
            slots = wanted = 0.0
            for n in (2000, 100):
                indices = {G.ring_index(p, tier) for p in (range(2000) if G.sealed(n) else range(n))}
                chunks = range(G.sealed(n))
                indices |= {G.sealed_index(k, tier, j) for k in chunks for j in range(G.keep[tier])}
                slots += len(indices) * 16
                wanted += n - G.sealed(n) * 512
                wanted += G.sealed(n) * min(G.keep[tier], BUDGETS[layer][head] * 512)
            assert report["heads"]["waste"][layer][head] == pytest.approx(slots - wanted, abs=0.01)


def test_one_conversation_alone() -> None:
    report = memory_report(SNAPSHOT, G, SHAPE, TangramConfig(), BUDGETS, 12.0, "idle")
    assert [sequence["id"] for sequence in report["sequences"]] == ["idle"]
    assert report["heads"]["tokens_kept"] == [[100, 100], [100, 100]]
    assert report["heads"]["pages"] == [[7, 7], [7, 7]]
    assert report["used_bytes"] == G.bytes(100)
    assert report["full_cache_bytes"] == G.full_bytes(100)
    assert report["pool"]["running_pages"] == G.pages(2000), "the pool is everybody's"


def test_shared_pages_count_once_in_the_pool_and_a_prefix_is_no_conversation() -> None:
    """Two conversations on one shared chunk, which a prefix row without a ring holds too."""
    shared = G.pages_per_chunk
    sequences = [
        Sequence("a", "running", 700, 1, G.pages(700), None, shared),
        Sequence("b", "resident", 650, 1, G.pages(650), 1.0, shared),
        Sequence("p", "prefix", 512, 1, shared, 2.0, shared),
    ]
    used = 2 * G.ring_pages + shared
    pages = {
        "ring": G.ring_pages,
        "sealed": shared,
        "resident": G.ring_pages,
        "prefix": 0,
        "free": 1000 - used,
    }
    snapshot = CacheSnapshot(1000, 1000 - used, sequences, {}, pages)
    report = memory_report(snapshot, G, SHAPE, TangramConfig(), BUDGETS, 12.0)
    assert report["used_bytes"] == used * G.page_bytes
    assert report["full_cache_bytes"] == G.full_bytes(700) + G.full_bytes(650)
    assert report["heads"]["tokens_kept"][0][0] == 3 * 64 + (700 - 512) + (650 - 512)
    assert report["heads"]["pages"][0][0] == 2 * G.ring_slots + 3 * 64 // 16
    assert report["sequences"][1]["shared_pages"] == shared
    assert snapshot.held("resident") == 1
