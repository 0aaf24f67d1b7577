"""What the console draws of a live engine under load is what the cache manager's books say, page by page."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from admin import figures
from admin.snapshot import MemorySnapshot
from tangram.geometry import Geometry, Tier
from tangram.profile import Profile
from tests.engine.children import run_child
from tests.tiny_models import random_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SETTINGS = {"retention": 0.4, "chunk": 64, "window": 32, "rewind": 32, "page_tokens": 16, "group_size": 3}


@pytest.fixture(scope="module")
def seen(bundled_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("console")
    model = random_llama(folder / "model", bundled_model_dir)
    shape = json.loads((model / "config.json").read_text())
    layers, heads = shape["num_hidden_layers"], shape["num_key_value_heads"]
    mean = tuple(
        tuple(0.1 + 0.8 * ((5 * layer + 3 * head) % 7) / 7 for head in range(heads))
        for layer in range(layers)
    )
    Profile(mean, ((0.05,) * heads,) * layers).save(folder / "profile.json")
    lengths = (40, 130, 230, 330, 90, 180)
    first = [[[1000 * user + t for t in range(length)], 40] for user, length in enumerate(lengths)]
    second = [[[*tokens, *range(30000, 30050)], 60] for tokens, _ in first]
    job = {
        "engine": {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_batched_tokens": 256,
        },
        "tangram": {**SETTINGS, "profile": str(folder / "profile.json")},
        "cache_bytes": 24 << 20,
        "waves": [first, second],
    }
    given = folder / "numbers.job"
    given.write_text(json.dumps(job))
    found: dict[str, Any] = run_child("console_child.py", given, folder)
    return found


def geometry_of(data: dict[str, Any]) -> Geometry:
    tiers = tuple(Tier(tier["keep"], tuple(map(tuple, tier["heads"]))) for tier in data["tiers"])
    names = ("layers", "kv_heads", "head_size", "itemsize", "page_tokens", "chunk", "window", "rewind")
    return Geometry(*(data[name] for name in names), data["group_size"], tiers)


def tier_of_place(g: Geometry, place: int) -> int:
    """The tier of the page at a place of a row: the ring first, then the sealed chunks, tier after tier."""
    if place < g.ring_pages:
        return place % g.num_tiers
    inside = (place - g.ring_pages) % g.pages_per_chunk
    return max(tier for tier, before in enumerate(g.prefix) if before <= inside)


def rows_of(look: dict[str, Any]) -> list[tuple[str, list[int | None]]]:
    return [*look["running"].items(), *((name, pages) for name, pages, *_ in look["idle"])]


def drawn(snapshot: MemorySnapshot, view: str) -> list[list[float]]:
    """[layer][head], from the picture as the browser gets it."""
    z = json.loads(figures.memory_map(snapshot, view).to_json())["data"][0]["z"]
    return [list(column) for column in zip(*z, strict=True)]


def test_the_load_was_a_load(seen: dict[str, Any]) -> None:
    assert max(len(look["running"]) for look in seen["looks"]) >= 4
    assert any(look["report"]["pool"]["pages"]["sealed"] for look in seen["looks"])
    counters = seen["looks"][-1]["report"]["counters"]
    assert counters["takeovers"] + counters["forks"] >= 3, "turns that found their conversation"
    assert len(seen["looks"]) >= 10


def test_the_pool_s_parts_are_the_manager_s_pages(seen: dict[str, Any]) -> None:
    g = geometry_of(seen["geometry"])
    for look in seen["looks"]:
        pool = MemorySnapshot.parse(look["report"]).pool
        rows = look["running"].values()
        running = {page for row in rows for page in row if page is not None}
        sealed = {page for row in rows for page in row[g.ring_pages :] if page is not None}
        idle = {page for _, pages, *_ in look["idle"] for page in pages if page is not None}
        assert (pool.ring + pool.sealed, pool.free, pool.total) == (len(running), look["free"], look["total"])
        assert pool.sealed == len(sealed)
        assert pool.idle == len(idle - running)
        assert pool.ring + pool.sealed + pool.idle + pool.free == pool.total, "the parts are the pool"
        bars = json.loads(figures.pool_bar(MemorySnapshot.parse(look["report"])).to_json())["data"]
        assert sum(bar["x"][0] for bar in bars) == pool.total


def test_every_map_is_the_manager_s_rows(seen: dict[str, Any]) -> None:
    g = geometry_of(seen["geometry"])
    for look in seen["looks"]:
        snapshot = MemorySnapshot.parse(look["report"])
        pages: Counter[int] = Counter()
        for _, row in rows_of(look):
            pages.update(tier_of_place(g, place) for place, page in enumerate(row) if page is not None)
        maps = {view: drawn(snapshot, view) for view in figures.MAP_VIEWS}
        kept = tokens_by_tier(g, look)
        for tier, members in enumerate(g.tiers):
            for layer, head in members.heads:
                assert maps[figures.TIER][layer][head] == tier
                assert maps[figures.PAGES][layer][head] == pages[tier]
                assert maps[figures.TOKENS][layer][head] == kept[tier]
                share = pages[tier] / len(members.heads) / look["total"]
                assert maps[figures.SHARE][layer][head] == pytest.approx(share, abs=1e-6)
                assert maps[figures.BUDGET][layer][head] == pytest.approx(seen["budgets"][layer][head])
                assert 0 <= maps[figures.WASTE][layer][head] <= pages[tier] * g.page_tokens
        held = sum(page is not None for _, row in rows_of(look) for page in row)
        assert sum(map(sum, maps[figures.SHARE])) == pytest.approx(held / look["total"], abs=1e-5)


def tokens_by_tier(g: Geometry, look: dict[str, Any]) -> list[int]:
    """What a head of each tier sees, from the rows' shapes and lengths alone."""
    held = [(row, look["computed"][name]) for name, row in look["running"].items()]
    for _, pages, tokens, shared, _ in look["idle"]:
        end = tokens if shared else tokens // g.page_tokens * g.page_tokens
        held.append((pages, end))
    kept = [0] * g.num_tiers
    for row, tokens in held:
        chunks = max(0, len(row) - g.ring_pages) // g.pages_per_chunk
        for tier in range(g.num_tiers):
            kept[tier] += chunks * g.keep[tier] + max(0, tokens - chunks * g.chunk)
    return kept


def test_one_conversation_s_map_is_its_row(seen: dict[str, Any]) -> None:
    g, compared = geometry_of(seen["geometry"]), 0
    for look in seen["looks"]:
        if look["single"] is None:
            continue
        snapshot = MemorySnapshot.parse(look["single"])
        (sequence,) = snapshot.sequences
        rows = [row for name, row in rows_of(look) if name == sequence.id]
        pages: Counter[int] = Counter()
        for row in rows:
            pages.update(tier_of_place(g, place) for place, page in enumerate(row) if page is not None)
        shown = drawn(snapshot, figures.PAGES)
        for tier, members in enumerate(g.tiers):
            assert {shown[layer][head] for layer, head in members.heads} == {pages[tier]}
        assert sequence.pages == sum(pages.values())
        compared += 1
    assert compared >= 10


def test_a_pin_holds_through_the_next_turn(seen: dict[str, Any]) -> None:
    name, answer = seen["pinned"]
    assert answer == {"conversations": 1, "refused": ""}
    assert [pinned for *_, pinned in seen["looks"][-1]["idle"]].count(True) == 1
    row = next(one for one in MemorySnapshot.parse(seen["looks"][-1]["report"]).sequences if one.pinned)
    assert row.id.split("-")[1] == name.split("-")[1], "the same user's, under its next turn's name"
