from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import RaggedLayout

PLAIN = RaggedLayout(page_tokens=16, ring_slots=41, chunk=512, window=128, keep=(512, 256, 16), head_size=64)


@st.composite
def layouts(draw: st.DrawFn) -> RaggedLayout:
    page = draw(st.sampled_from([1, 4, 16, 24]))
    pages = draw(st.integers(1, 6))
    window = draw(st.integers(0, 3 * page))
    keep = draw(st.lists(st.integers(1, pages), min_size=1, max_size=5))
    slots = -(-(page * pages + window) // page) + draw(st.integers(0, 3))
    return RaggedLayout(page, slots, page * pages, window, tuple(page * kept for kept in keep), 8)


@given(layouts(), st.integers(0, 4))
def test_every_token_has_an_entry_of_its_own(layout: RaggedLayout, chunks: int) -> None:
    tokens = (chunks + 1) * layout.chunk + layout.window  # as many as there ever are before the next seal
    assert layout.sealed(tokens - 1) == chunks
    places: dict[tuple[int, int], tuple[str, int, int]] = {}
    for tier, kept in enumerate(layout.keep):
        for position in range(chunks * layout.chunk, tokens):
            place = (layout.ring_entry(position, tier), position % layout.page_tokens)
            assert places.setdefault(place, ("raw", tier, position)) == ("raw", tier, position)
        for chunk in range(chunks):
            entries = list(layout.kept_entries(chunk, tier))
            for index in range(kept):
                place = (entries[index // layout.page_tokens], index % layout.page_tokens)
                assert places.setdefault(place, ("kept", tier, index)) == ("kept", tier, index)
    assert max(entry for entry, _ in places) < layout.width(tokens - 1)


@given(layouts(), st.integers(0, 5000))
def test_a_step_ends_where_the_next_chunk_seals(layout: RaggedLayout, tokens: int) -> None:
    end = layout.step_end(tokens)
    assert end > tokens
    assert layout.sealed(end) == layout.sealed(tokens) + 1
    assert layout.sealed(end - 1) == layout.sealed(tokens)


def test_raw_entries_name_each_page_once_in_order_of_position() -> None:
    expected = [PLAIN.ring_entry(position, 1) for position in range(1024, 1100)]
    assert list(PLAIN.raw_entries(2, 1100, 1)) == list(dict.fromkeys(expected))


def test_offsets_are_running_sums_of_pages() -> None:
    assert PLAIN.tier_offset == (0, 32, 48, 49)
    assert PLAIN.pages_per_chunk == 49
    tensor = PLAIN.offset_tensor(torch.device("cpu"))
    assert tensor.dtype == torch.int32
    assert tensor.tolist() == [0, 32, 48, 49]
    assert PLAIN.offset_tensor(torch.device("cpu")) is tensor


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_tokens", 0),
        ("ring_slots", 39),
        ("chunk", 500),
        ("window", -1),
        ("keep", ()),
        ("keep", (0,)),
        ("keep", (24,)),
        ("keep", (528,)),
        ("head_size", 0),
        ("head_size", 65),
    ],
)
def test_a_bad_size_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: "):
        replace(PLAIN, **{field: value})
