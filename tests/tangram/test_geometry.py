"""Page arithmetic against brute force: a cache simulated token by token."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.layout import RaggedLayout
from tangram.errors import ConfigError
from tangram.geometry import Geometry, Tier, uniform_tiers


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Small geometries of every shape, with tiers of uneven budgets and a last tier that is not full."""
    size = draw(st.sampled_from([1, 2, 4]))
    chunk = size * draw(st.integers(1, 4))
    layers, kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    heads = draw(st.permutations([(layer, head) for layer in range(layers) for head in range(kv_heads)]))
    group = draw(st.integers(1, len(heads)))
    blocks = [tuple(heads[i : i + group]) for i in range(0, len(heads), group)]
    tiers = tuple(Tier(size * draw(st.integers(1, chunk // size)), block) for block in blocks)
    window, rewind = size * draw(st.integers(0, 3)), size * draw(st.integers(0, 3))
    head_size, itemsize = draw(st.sampled_from([1, 8, 64])), draw(st.sampled_from([1, 2, 4]))
    return Geometry(layers, kv_heads, head_size, itemsize, size, chunk, window, rewind, group, tiers)


class Simulated:
    """The cache of one sequence that grows a token at a time and keeps what the definition says."""

    def __init__(self, geometry: Geometry) -> None:
        self.g = geometry
        self.written: set[int] = set()  # indices of the row that were ever written
        self.n = 0
        self.chunks = 0

    def append(self) -> None:
        for tier in range(len(self.g.tiers)):
            self.written.add(self.g.ring_index(self.n, tier))
        self.n += 1
        if self.n >= (self.chunks + 1) * self.g.chunk + self.g.window:
            for tier, of in enumerate(self.g.tiers):
                self.written |= {self.g.sealed_index(self.chunks, tier, j) for j in range(of.keep)}
            self.chunks += 1


@given(geometries(), st.integers(0, 60))
def test_pages_and_sealed_follow_the_definition(g: Geometry, n: int) -> None:
    cache = Simulated(g)
    for _ in range(n):
        cache.append()
    assert g.sealed(n) == cache.chunks
    first_seal = g.chunk + g.window
    # The first seal completes the ring, whether or not the last slots were written yet.
    expected = cache.written | (set(range(g.ring_pages)) if n >= first_seal else set())
    assert g.pages(n) == len(expected)
    assert expected == set(range(g.pages(n))), "the row has no holes"
    assert sum(g.tier_pages(n, tier) for tier in range(g.num_tiers)) == g.pages(n)


@given(geometries(), st.integers(0, 60))
def test_every_visible_token_has_its_own_place(g: Geometry, n: int) -> None:
    for tier, of in enumerate(g.tiers):
        sealed = [
            (g.sealed_index(k, tier, j), j % g.page_tokens)
            for k in range(g.sealed(n))
            for j in range(of.keep)
        ]
        raw = [(g.ring_index(p, tier), p % g.page_tokens) for p in range(g.sealed(n) * g.chunk, n)]
        assert len(set(sealed + raw)) == len(sealed) + len(raw) == g.kept_tokens(n, tier)
        assert all(index < g.pages(n) for index, _ in sealed + raw)


@given(geometries(), st.integers(0, 60), st.integers(0, 60))
def test_a_row_is_as_wide_as_the_kernels_want_it_at_any_length(g: Geometry, longest: int, n: int) -> None:
    """Also in an engine whose greatest length is shorter than a ring."""
    size = g.page_tokens
    layout = RaggedLayout(size, g.ring_slots, g.chunk, g.window, g.keep, 2 * g.head_size)
    assert g.row_width(longest) >= layout.width(min(n, longest))
    assert g.row_width(longest) >= max(g.pages(longest), -(-longest // size))


@given(geometries(), st.integers(0, 60))
def test_kept_fraction_is_the_mean_over_heads(g: Geometry, n: int) -> None:
    if n == 0:
        assert g.kept_fraction(0) == 1.0
        return
    shares = [g.kept_tokens(n, tier) / n for row in g.head_tier for tier in row]
    assert g.kept_fraction(n) == pytest.approx(sum(shares) / len(shares))


@given(geometries(), st.integers(0, 60))
def test_steps_end_at_boundaries_and_all_their_queries_see_the_same_chunks(g: Geometry, start: int) -> None:
    end = g.next_boundary(start)
    assert end > start
    assert len({g.sealed(position) for position in range(start, end)}) == 1
    assert g.sealed(end) == g.sealed(start) + 1
    assert g.sealing(end) == g.sealed(start)
    assert all(g.sealing(n) is None for n in range(start + 1, end))


@given(geometries(), st.integers(0, 60), st.integers(0, 60))
def test_rewinding_needs_exactly_what_the_ring_still_holds(g: Geometry, n: int, back: int) -> None:
    target = n - back
    slots: dict[tuple[int, int], int] = {}
    for p in range(n):
        slots[g.ring_index(p, 0), p % g.page_tokens] = p
    if target < 0:
        assert not g.can_rewind(n, target)
        return
    # What resuming needs: the raw tail, and the chunk that is about to be sealed.
    needed = range((g.sealed(target - 1) if target else 0) * g.chunk, target)
    intact = all(slots[g.ring_index(p, 0), p % g.page_tokens] == p for p in needed)
    if g.can_rewind(n, target):
        assert intact
    if back <= g.rewind and target % g.page_tokens == 0:
        assert g.can_rewind(n, target), "the promise of `rewind`"


class Idle:
    """A sequence of ``n`` tokens, and what an idle row must keep of it by the definition."""

    def __init__(self, g: Geometry, n: int, observed: int = 0, raw_from: int = 0, written: int = 0) -> None:
        slots = {g.ring_index(p, 0): p // g.page_tokens for p in range(max(n, written))}
        self.lengths: set[int] = set()
        self.slots: set[tuple[int, int]] = set()
        self.sealed = 0
        size = g.page_tokens
        for back in range(g.rewind + 1):  # a prompt that leaves the sequence here
            length = max(0, n - back) // size * size
            if observed:  # the next seal wants to see all that lies so far before it
                due = min(g.boundary(k) for k in range(n + 1) if g.boundary(k) >= length)
                length = min(length, due - observed)
            # Resuming there needs all that is not sealed, and the chunk that is sealed there.
            chunks = max((k for k in range(n + 1) if g.boundary(k) < length), default=-1) + 1
            needed = range(chunks * g.chunk, length)
            there = all(slots[g.ring_index(p, 0)] == p // size for p in needed)
            if length >= size and there and needed.start >= raw_from:
                self.lengths.add(length)
                self.slots |= {(g.ring_index(p, tier), tier) for p in needed for tier in range(g.num_tiers)}
                self.sealed = max(chunks, self.sealed)

    def pages(self, g: Geometry) -> int:
        kept = [
            g.sealed_index(k, tier, j)
            for k in range(self.sealed)
            for tier in range(g.num_tiers)
            for j in range(g.keep[tier])
        ]
        return len(self.slots) + len(set(kept))


@given(geometries(), st.integers(0, 60), st.integers(0, 3))
def test_an_idle_row_keeps_what_one_of_its_lengths_needs(g: Geometry, n: int, pages: int) -> None:
    observed = min(pages * g.page_tokens, g.window, g.rewind, g.chunk - g.page_tokens)
    idle = Idle(g, n, observed)
    lengths = g.resumable(n, n, observed=observed)
    assert lengths == sorted(idle.lengths)
    assert g.held_entries(lengths) == sorted(entry for entry, _ in idle.slots)
    assert g.idle_pages(n, observed) == idle.pages(g) <= g.pages(n)
    assert bool(g.idle_pages(n, observed)) == (n >= g.page_tokens)
    assert g.idle_bytes(n, observed) == g.idle_pages(n, observed) * g.page_bytes


@given(geometries(), st.integers(0, 60), st.integers(0, 12), st.integers(0, 6))
def test_a_ring_that_lost_tokens_is_kept_for_fewer_lengths(
    g: Geometry, n: int, ahead: int, lost: int
) -> None:
    raw_from = g.oldest_raw(n) + lost * g.page_tokens
    idle = Idle(g, n, raw_from=raw_from, written=n + ahead)
    lengths = g.resumable(n, n + ahead, raw_from)
    # Of a page that was overwritten in part, what is needed could still be there; it is not counted on.
    assert set(lengths) <= idle.lengths
    assert set(g.held_entries(lengths)) <= {entry for entry, _ in idle.slots}


@given(geometries(), st.integers(1, 60))
def test_whoever_resumes_knows_from_where_on_the_ring_has_no_hole(g: Geometry, n: int) -> None:
    lengths = g.resumable(n, n)
    held = set(g.held_entries(lengths))
    for length in lengths:
        start = g.oldest_held(lengths, length)
        assert start <= g.raw_start(length)
        assert all(g.ring_index(p, 0) in held for p in range(start, length))
        kept = [p for m in lengths for p in range(g.raw_start(m), m) if p < length]
        assert start == min(kept), "nothing that was kept is forgotten"


def test_a_gap_between_lengths_ends_what_is_held() -> None:
    g = Geometry(1, 1, 8, 2, 4, 16, 8, 8, 1, (Tier(4, ((0, 0),)),))
    assert g.raw_start(28) == 16
    assert g.oldest_held([12, 28], 28) == 16, "12 .. 15 are missing"
    assert g.oldest_held([16, 28], 28) == 0
    assert g.oldest_held([16, 28], 16) == 0


@given(geometries(), st.integers(0, 60))
def test_the_chunks_of_a_row_are_told_by_its_length(g: Geometry, n: int) -> None:
    assert g.row_chunks(g.pages(n)) == g.sealed(n)
    assert g.row_chunks(g.resumed_pages(n)) == g.sealed(max(0, n - 1))


@given(geometries())
def test_the_head_tables_invert_the_tiers(g: Geometry) -> None:
    for index, tier in enumerate(g.tiers):
        for member, (layer, head) in enumerate(tier.heads):
            assert (g.head_tier[layer][head], g.head_member[layer][head]) == (index, member)


@given(geometries())
def test_a_page_fits_its_heads_and_is_an_even_share_of_every_layer(g: Geometry) -> None:
    content = g.group_size * g.page_tokens * 2 * g.head_size * g.itemsize
    states = g.layers * g.page_tokens
    step = max(g.itemsize, 64 // math.gcd(64, states))
    assert content <= g.page_bytes < content + states * step
    assert g.page_bytes % states == 0
    assert g.page_bytes % 64 == 0
    assert g.state_bytes % g.itemsize == 0
    assert -1e-9 < g.padding < 1


@given(geometries())
def test_json_round_trip(g: Geometry) -> None:
    assert Geometry.from_dict(json.loads(json.dumps(g.to_dict()))) == g


def test_the_published_example() -> None:
    """SmolLM2-135M at a quarter: the figures that the README quotes come from here."""
    heads = [(layer, head) for layer in range(30) for head in range(3)]
    g = Geometry(30, 3, 64, 2, 16, 512, 128, 64, 15, uniform_tiers(heads, 15, 128))
    assert (g.num_tiers, g.ring_slots, g.pages_per_chunk, g.page_bytes) == (6, 45, 48, 61440)
    assert g.pages(639) == 40 * 6
    assert g.pages(640) == 45 * 6 + 48
    assert g.pages(8192) == 45 * 6 + 15 * 48
    # 8128 .. 8192 are behind the boundary at 15 * 512 + 128 = 7808: raw from 7680 on.
    assert g.idle_pages(8192) == 32 * 6 + 15 * 48
    # 7744 is before it: raw from 7168 on.
    assert g.idle_pages(7808) == 40 * 6 + 14 * 48
    assert g.idle_pages(7824) == 41 * 6 + 15 * 48
    assert g.idle_pages(7872) == 44 * 6 + 15 * 48
    assert g.idle_pages(7888) == 13 * 6 + 15 * 48


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layers": 0}, "layers"),
        ({"chunk": 24}, "chunk"),
        ({"window": -1}, "window"),
        ({"tiers": [{"keep": 8, "heads": [[0, 0]]}]}, "tiers"),
        ({"tiers": [{"keep": 16, "heads": [[0, 0]]}, {"keep": 16, "heads": [[0, 0]]}]}, "tiers"),
        ({"tiers": [{"keep": 16, "heads": [[0, 1]]}]}, "tiers"),
        ({"tiers": [{"keep": 16, "heads": [[0, 0], [0, 1]]}]}, "tiers"),
        ({"tiers": 3}, "geometry"),
    ],
)
def test_bad_shapes_are_refused_by_name(change: dict[str, object], field: str) -> None:
    good = Geometry(1, 1, 8, 2, 16, 32, 16, 16, 1, (Tier(16, ((0, 0),)),)).to_dict()
    with pytest.raises(ConfigError) as error:
        Geometry.from_dict(good | change)
    assert error.value.field == field


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ConfigError, match="layers"):
        Geometry.from_dict({"tiers": []})
