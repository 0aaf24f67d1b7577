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
    return rows.add(name, pages, tokens, written or tokens, hashes(name, tokens))


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
    st.tuples(st.sampled_from(["add", "find", "evict"]), st.sampled_from("abc"), st.integers(0, 70)),
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
        rows.check_integrity()
    assert rows.releasable() == sum(G.idle_pages(row.tokens) for row in rows.rows())


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
