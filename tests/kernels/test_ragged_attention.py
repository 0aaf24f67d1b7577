from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import ragged_append, ragged_attention, ragged_gather
from kernels.cpu.native import load
from tests.kernels.ragged_batch import Batch, Sizes

# The inputs are exact in their type: beyond the output's rounding there is only float32's error in the sums.
TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 4e-6}
SUMS = 4e-6


def attend(batch: Batch, sums: float = SUMS) -> None:
    """Append the step, attend it and check it against the brute-force answer."""
    layout = batch.sizes.layout
    key, value, query = (batch.step(parts) for parts in (batch.keys, batch.values, batch.queries))
    ragged_append(key, value, batch.pool, *batch.tables, layout)
    out = torch.full_like(query, float("nan"))
    ragged_attention(out, query, batch.pool, *batch.tables, layout, batch.scale, **batch.scoring)
    check(out, batch, sums)


def check(out: torch.Tensor, batch: Batch, sums: float = SUMS) -> None:
    expected = batch.expected()
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[batch.sizes.dtype], atol=sums)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 128, 256, 34])
def test_head_sizes_and_types(head_size: int, dtype: torch.dtype, implementation: str) -> None:
    sizes = Sizes(head_size=head_size, dtype=dtype, kv_heads=2, group=2)
    attend(Batch(sizes, [64 * 3 + 41, 17, 130], [9, 17, 1]))


@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8, 12, 16])
def test_query_heads_share_a_kv_head(group: int, implementation: str) -> None:
    sizes = Sizes(head_size=32, kv_heads=2, group=group)
    attend(Batch(sizes, [64 * 2 + 50, 90], [1, 37]))


def test_a_token_with_more_query_heads_than_a_tile_has_rows(native: str) -> None:
    attend(Batch(Sizes(head_size=32, kv_heads=1, group=71), [200, 40], [3, 1]))


@pytest.mark.parametrize("page", [16, 32, 48])
@pytest.mark.parametrize("tiers", [(4,), (1, 4), (3, 1, 2, 4)])
def test_pages_and_uneven_tiers(page: int, tiers: tuple[int, ...], implementation: str) -> None:
    keep = tuple(page * pages for pages in tiers)
    sizes = Sizes(page=page, chunk=page * 4, window=page + 5, keep=keep, head_size=32, page_padding=40)
    lengths = [page * 4 * 6 + page + 5 + 3, page * 9 + 1, page * 2 + 7, 1]
    attend(Batch(sizes, lengths, [3, 1, 19, 1]))


@pytest.mark.parametrize("spare", [0, 1, 5])
def test_the_ring_wraps(spare: int, implementation: str) -> None:
    sizes = Sizes(spare_slots=spare, head_size=32)
    boundary = 5 * sizes.chunk + sizes.window
    attend(Batch(sizes, [boundary + 1, boundary + sizes.chunk, boundary], [1, sizes.chunk, 5]))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("soft_cap", [0.0, 0.5, 30.0])
@pytest.mark.parametrize("sinks", [None, (-40.0, 0.0, 1.5, 60.0)])
def test_sinks_and_soft_caps(
    sinks: tuple[float, ...] | None, soft_cap: float, dtype: torch.dtype, implementation: str
) -> None:
    """A decoded token whose history is shared between threads, a prefill, and a first token."""
    sizes = Sizes(head_size=32, dtype=dtype, kv_heads=2, group=2, sinks=sinks, soft_cap=soft_cap)
    attend(Batch(sizes, [64 * 12 + 41, 130, 1], [1, 30, 1]))


def test_an_infinitely_low_sink_is_none(implementation: str) -> None:
    """Bit for bit: a sink starts the softmax, it does not change the order of its sums."""
    batch = Batch(Sizes(head_size=32, kv_heads=1, group=2), [64 * 3 + 41], [5])
    layout, query = batch.sizes.layout, batch.step(batch.queries)
    ragged_append(batch.step(batch.keys), batch.step(batch.values), batch.pool, *batch.tables, layout)
    outs = []
    for sinks in (None, torch.full((2,), float("-inf"))):
        out = torch.empty_like(query)
        ragged_attention(out, query, batch.pool, *batch.tables, layout, batch.scale, sinks=sinks)
        outs.append(out)
    assert torch.equal(*outs)


def test_large_scores_under_a_soft_cap(implementation: str) -> None:
    sizes = Sizes(head_size=64, dtype=torch.float32, soft_cap=50.0)
    batch = Batch(sizes, [350, 90], [40, 1])
    for request in range(2):
        batch.queries[request] *= 60.0
    attend(batch, sums=2e-4)


def test_empty_requests_and_padding_rows_are_left_alone(implementation: str) -> None:
    batch = Batch(Sizes(head_size=32), [0, 100, 55, 70, 0], [0, 4, 0, 1, 0])
    layout, (tokens, heads, size) = batch.sizes.layout, batch.step(batch.queries).shape
    ragged_append(batch.step(batch.keys), batch.step(batch.values), batch.pool, *batch.tables, layout)
    query = torch.full((tokens + 6, heads, size), float("nan"), dtype=batch.sizes.dtype)
    query[:tokens] = batch.step(batch.queries)
    out = torch.full_like(query, 7.0)
    ragged_attention(out, query, batch.pool, *batch.tables, layout, batch.scale)
    check(out[:tokens], batch)
    assert bool((out[tokens:] == 7.0).all())


def test_strided_queries_and_outputs(implementation: str) -> None:
    batch = Batch(Sizes(head_size=32), [96, 40], [30, 1])
    layout, query = batch.sizes.layout, batch.step(batch.queries)
    tokens, heads, size = query.shape
    ragged_append(batch.step(batch.keys), batch.step(batch.values), batch.pool, *batch.tables, layout)
    packed = torch.full((tokens, heads * size + 3 * size), float("nan"), dtype=query.dtype)
    packed[:, size : size + heads * size] = query.flatten(1)
    strided = packed[:, size : size + heads * size].unflatten(1, (heads, size))
    out = torch.zeros(heads, tokens, 2 * size, dtype=query.dtype).transpose(0, 1)[:, :, :size]
    ragged_attention(out, strided, batch.pool, *batch.tables, layout, batch.scale)
    check(out, batch)


def test_long_histories_with_many_spans(native: str) -> None:
    sizes = Sizes(chunk=512, window=128, keep=(512, 48, 256), kv_heads=3, group=3)
    attend(Batch(sizes, [5 * 512 + 128 + 301, 3000, 640], [2, 1, 3]))


def test_large_scores_stay_finite(implementation: str) -> None:
    batch = Batch(Sizes(head_size=64, dtype=torch.float32), [350, 90], [40, 1])
    for request in range(2):
        batch.queries[request] *= 60.0
    attend(batch, sums=2e-4)  # a score of some hundreds carries an error of 1e-5 into its exponential


def test_offsets_pass_two_to_the_thirty_first_element(native: str) -> None:
    batch = Batch(Sizes(head_size=32), [64 * 2 + 33, 60], [1, 60])
    pages = batch.pool.shape[0]
    stride = 5 * 2**29 // pages  # virtual memory: only the pages' own bytes are ever touched
    far = torch.empty(pages * stride, dtype=batch.sizes.dtype)
    pool = far.as_strided(batch.pool.shape, (stride, *batch.pool.stride()[1:]))
    newest = batch.rows[0, 4:6]  # the page of position 160 in either tier
    assert int(newest.min()) * stride > 2**31
    batch.pool = pool.copy_(batch.pool)
    attend(batch)


def test_gather_returns_what_a_head_sees(implementation: str) -> None:
    batch = Batch(Sizes(head_size=32), [64 * 3 + 32 + 20], [0])
    layout, length = batch.sizes.layout, batch.lengths[0]
    views = ragged_gather(batch.pool, batch.rows[0], batch.tier, batch.member, layout, length)
    for head, (keys, values) in enumerate(views):
        seen = [p for chunk in batch.kept[0][head] for p in chunk] + list(range(3 * 64, length))
        assert torch.equal(keys, batch.keys[0][seen, head])
        assert torch.equal(values, batch.values[0][seen, head])


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    page = draw(st.sampled_from([8, 16, 32]))
    pages = draw(st.integers(1, 5))
    keep = tuple(page * kept for kept in draw(st.lists(st.integers(1, pages), min_size=1, max_size=3)))
    sizes = Sizes(
        page=page,
        chunk=page * pages,
        window=draw(st.integers(0, 70)),
        keep=keep,
        head_size=draw(st.sampled_from([2, 8, 30, 32, 48, 64])),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 7)),
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        spare_slots=draw(st.integers(0, 2)),
        page_padding=draw(st.sampled_from([0, 2, 64])),
        soft_cap=draw(st.sampled_from([0.0, 5.0])),
    )
    if draw(st.booleans()):
        heads = sizes.kv_heads * sizes.group
        sizes.sinks = tuple(draw(st.lists(st.floats(-9.0, 9.0, width=32), min_size=heads, max_size=heads)))
    lengths, steps = [], []
    for _ in range(draw(st.integers(1, 4))):
        cached = draw(st.integers(0, 6 * sizes.chunk + sizes.window))
        room = sizes.layout.step_end(cached) - cached
        steps.append(draw(st.integers(0, min(room, 50))))
        lengths.append(cached + steps[-1])
    return Batch(sizes, lengths, steps, seed=draw(st.integers(0, 99)))


@settings(max_examples=60, deadline=None)
@given(batches())
def test_random_batches_match_brute_force(batch: Batch) -> None:
    library, layout = load(), batch.sizes.layout
    key, value, query = (batch.step(parts) for parts in (batch.keys, batch.values, batch.queries))
    geometry = (layout.page_tokens, layout.ring_slots, layout.chunk, layout.window)
    offsets = layout.offset_tensor(batch.pool.device)
    library.append(key, value, batch.pool, *batch.tables, offsets, *geometry)
    out = torch.full_like(query, float("nan"))
    scoring = batch.scoring
    library.attention(out, query, batch.pool, *batch.tables, offsets, *geometry, batch.scale, **scoring)
    check(out, batch)


def test_a_batch_without_requests(implementation: str) -> None:
    sizes = Sizes(head_size=32)
    batch = Batch(sizes, [50], [1])
    none = torch.empty(0, dtype=torch.int32)
    tables = (batch.rows[:0], torch.zeros(1, dtype=torch.int32), none, batch.tier, batch.member)
    query = batch.step(batch.queries)
    out = torch.full_like(query, 7.0)
    ragged_attention(out, query, batch.pool, *tables, sizes.layout, batch.scale)
    assert bool((out == 7.0).all())
