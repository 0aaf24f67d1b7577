"""Rows of idle conversations: found by prefix, never by somebody else's, evicted oldest first."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.errors import CacheIntegrityError
from tangram.geometry import Geometry, Tier
from tangram.resident import ResidentRows

G = Geometry(1, 1, 8, 2, 4, 16, 8, 8, 1, (Tier(4, ((0, 0),)),))


PAGE = itertools.count()


def hashes(conversation: str, tokens: int) -> list[str]:
    return [f"{conversation}:{count}" for count in range(1, tokens // G.page_tokens + 1)]


def add(rows: ResidentRows, name: str, tokens: int, written: int | None = None) -> bool:
    pages = [next(PAGE) for _ in range(G.pages(tokens))]
    return rows.add(name, pages, tokens, written or tokens, hashes(name, tokens), thins=True)


def test_a_continuation_finds_the_longest_whole_page() -> None:
    rows: ResidentRows = ResidentRows(G)
    assert add(rows, "a", 50)
    row, length = rows.find(hashes("a", 80), limit=79)  # type: ignore[misc]
    assert (row.name, length) == ("a", 48)


def test_the_last_token_is_always_recomputed() -> None:
    rows: ResidentRows = ResidentRows(G)
    add(rows, "a", 48)
    found = rows.find(hashes("a", 48), limit=47)
    assert found is not None
    assert found[1] == 44


def test_other_prefixes_find_nothing() -> None:
    rows: ResidentRows = ResidentRows(G)
    add(rows, "a", 50)
    assert rows.find(hashes("b", 80), limit=79) is None


def test_resuming_goes_back_by_rewind_and_no_further() -> None:
    rows: ResidentRows = ResidentRows(G)
    add(rows, "a", 50)
    assert list(rows.resumable(50, 50)) == [40, 44, 48]
    assert rows.find(hashes("a", 40), limit=40) is not None
    assert rows.find(hashes("a", 36), limit=36) is None


def test_too_short_rows_are_not_kept() -> None:
    rows: ResidentRows = ResidentRows(G)
    assert not add(rows, "a", 3)
    assert add(rows, "a", 4)


def test_a_ring_overwritten_by_a_step_in_flight_limits_rewinding() -> None:
    rows: ResidentRows = ResidentRows(G)
    assert list(rows.resumable(50, 200)) == []


def test_the_oldest_goes_first_and_the_spared_row_never() -> None:
    rows: ResidentRows = ResidentRows(G)
    for name in "abc":
        add(rows, name, 40)
    first, second = rows.rows()[:2]
    assert rows.oldest() is first
    assert rows.oldest(spare=first) is second
    rows.take(first)
    assert rows.oldest() is second
    assert rows.find(hashes("a", 40), 40) is None


def test_of_two_rows_with_one_prefix_the_one_that_loses_least_is_taken() -> None:
    rows: ResidentRows = ResidentRows(G)
    for tokens in (50, 48):
        pages = [next(PAGE) for _ in range(G.pages(tokens))]
        rows.add(str(tokens), pages, tokens, tokens, hashes("a", tokens))
    row, length = rows.find(hashes("a", 60), 59)  # type: ignore[misc]
    assert (row.name, length) == ("48", 48)


operations = st.lists(
    st.tuples(
        st.sampled_from(["add", "find", "evict", "thin", "expect"]),
        st.sampled_from("abc"),
        st.integers(0, 70),
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(operations)
def test_integrity_holds_under_any_order_of_operations(todo: list[tuple[str, str, int]]) -> None:
    rows: ResidentRows = ResidentRows(G)
    for what, name, tokens in todo:
        if what == "add":
            add(rows, name, tokens)
        elif what == "find" and (found := rows.find(hashes(name, tokens), tokens)):
            row, length = found
            assert row.name == name
            assert row.tokens - length < G.rewind + G.page_tokens
            rows.take(row)
        elif what == "evict" and (oldest := rows.oldest()):
            rows.take(oldest)
        elif what == "expect" and (oldest := rows.oldest()):
            rows.expect(oldest)
        elif what == "thin" and (victim := rows.next_victim()) and victim[1]:
            before = rows.releasable()
            frees = victim[0].thin.frees  # type: ignore[union-attr]
            assert len(rows.thin(victim[0])) == frees == before - rows.releasable() > 0
        rows.check_integrity()
    assert rows.releasable() == sum(len(row.held()) for row in rows.rows())


@pytest.mark.parametrize("tokens", range(4, 120))
def test_a_row_is_thinned_to_the_least_that_keeps_its_sealed_chunks(tokens: int) -> None:
    rows: ResidentRows = ResidentRows(G)
    add(rows, "a", tokens)
    (row,) = rows.rows()
    last, held, pages = max(row.targets), len(row.held()), list(row.pages)
    least = [m for m in range(G.page_tokens, last, G.page_tokens) if G.resumed_pages(m) == len(pages)]
    least = [m for m in least if G.raw_start(m) == G.raw_start(last) and G.sealed(m)]
    if row.thin is None:
        assert not least or len(G.held_entries(least[:1])) >= held - (len(pages) - G.ring_pages)
        return
    length = row.thin.length
    assert length == min(m for m in least if G.sealing(m) is None)
    given = rows.thin(row)
    assert (list(row.targets), row.tokens, row.thin) == ([length], length, None)
    assert sorted([*row.held(), *given]) == sorted(page for page in pages if page is not None)
    assert rows.find(hashes("a", tokens), tokens) == (row, length)
    rows.check_integrity()
    with pytest.raises(CacheIntegrityError, match="any further"):
        rows.thin(row)


def test_a_prefix_for_others_comes_before_a_thinned_conversation() -> None:
    rows: ResidentRows = ResidentRows(G)
    add(rows, "a", 68)
    (row,) = rows.rows()
    rows.thin(row)
    pages = [next(PAGE) for _ in row.held()]
    shared = [None if page is None else pages.pop() for page in row.pages]
    rows.add_prefix("b", shared, 60, hashes("a", 60)[-1], 1)
    found = rows.find(hashes("a", 64), 64)
    assert found is not None
    assert found[0].shared


def test_what_gives_up_pages_next_costs_least_for_a_page_and_by_age() -> None:
    now = [0.0]
    rows: ResidentRows = ResidentRows(G, clock=lambda: now[0])
    for name in ("stale", "recent"):
        add(rows, name, 68)
        now[0] += 1.0
    stale, recent = rows.rows()
    assert rows.next_victim() == (stale, True)
    rows.thin(stale)
    assert rows.next_victim() == (recent, True)  # 2 s and 1 s: thinning costs less than half as much
    now[0] = 100.0
    recent.since = 99.9
    assert rows.next_victim() == (stale, False)  # nobody has asked for it for so long
    rows.expect(stale)
    rows.take(recent)
    assert rows.next_victim() == (stale, False)
    add(rows, "next", 68)
    now[0] = 100.1
    assert rows.next_victim() == (rows.newest(), True)  # rather than the row whose user waits
    now[0] = 1000.0
    rows.newest().since = 999.9
    assert rows.next_victim() == (stale, False)  # but not if the user went away meanwhile
    rows.take(stale)
    waiting = rows.newest()
    rows.expect(waiting)
    assert rows.next_victim() == (waiting, True)  # gives up its raw tokens before all it has
    rows.thin(waiting)
    assert rows.next_victim() == (waiting, False)
    add(rows, "left", 68)
    rows.newest().owner = "somebody"
    rows.leave("somebody")
    victim = rows.next_victim()
    assert victim is not None
    assert (victim[0].name, victim[1]) == ("left", False)


@pytest.mark.parametrize("tokens", range(4, 80))
def test_a_row_keeps_its_pages_at_their_places_and_nothing_else(tokens: int) -> None:
    rows: ResidentRows = ResidentRows(G)
    pages = list(range(1000, 1000 + G.pages(tokens)))
    rows.add("a", pages, tokens, tokens, hashes("a", tokens))
    (row,) = rows.rows()
    for entry, page in enumerate(row.pages):
        assert page in (None, pages[entry])
    for length in row.targets:
        needed = [*G.raw_entries(length), *range(G.ring_pages, G.resumed_pages(length))]
        assert None not in [row.pages[entry] for entry in needed]
    assert rows.releasable() == len(row.held()) == G.idle_pages(tokens)
    assert sorted(rows.take(row)) == row.held()


def test_broken_bookkeeping_is_reported() -> None:
    for harm in (
        lambda row: row.pages.pop(),
        lambda row: row.pages.insert(0, row.pages.pop()),
        lambda row: row.pages.append(None),
    ):
        rows: ResidentRows = ResidentRows(G)
        add(rows, "a", 50)
        harm(rows.rows()[0])
        with pytest.raises(CacheIntegrityError):
            rows.check_integrity()
