from __future__ import annotations

import random as random_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import KernelError, RaggedLayout, fallback, ragged_append, ragged_attention
from kernels.cuda import dispatch
from tests.kernels.cuda_batch import POISON, Large, attend, check, to_gpu
from tests.kernels.ragged_batch import Batch, Sizes

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("cuda_native"),
]

DTYPES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [32, 64, 96, 128, 160, 256])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_head_sizes_and_types(head_size: int, group: int, dtype: torch.dtype) -> None:
    sizes = Sizes(head_size=head_size, dtype=dtype, kv_heads=2, group=group)
    attend(Batch(sizes, [64 * 3 + 41, 17, 130, 1, 64 * 5 + 7], [9, 17, 1, 1, 1]))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 64])
def test_query_heads_share_a_kv_head(group: int) -> None:
    attend(Batch(Sizes(kv_heads=2, group=group), [64 * 2 + 50, 90, 300], [1, 37, 1]))


def test_a_group_too_large_for_the_kernels_is_still_right() -> None:
    attend(Batch(Sizes(kv_heads=1, group=71), [200, 40], [3, 1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16])
@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
@pytest.mark.parametrize("page", [16, 32, 64, 128])
def test_pages_head_sizes_and_groups(page: int, head_size: int, group: int, dtype: torch.dtype) -> None:
    """Together: decoding and prefill, a request of one token, an empty one, a request that waits, and lengths
    around the ends of pages and chunks."""
    sizes = Sizes(page, page * 2, page, (page * 2, page), head_size, 2, group, dtype, members=2)
    lengths = [page * 5 + 1, 1, 0, page * 4 - 1, page * 3, page * 3 + 2, page + 1, 2]
    attend(Batch(sizes, lengths, [1, 1, 0, 5, 1, 2, 0, 2]))


@pytest.mark.parametrize("page", [16, 32, 48, 64, 128])
@pytest.mark.parametrize("tiers", [(4,), (1, 4), (3, 1, 2, 4)])
def test_pages_and_uneven_tiers(page: int, tiers: tuple[int, ...]) -> None:
    keep = tuple(page * pages for pages in tiers)
    sizes = Sizes(page=page, chunk=page * 4, window=page + 5, keep=keep, page_padding=40)
    lengths = [page * 4 * 6 + page + 5 + 3, page * 9 + 1, page * 2 + 7, 1, page * 13 + 9]
    attend(Batch(sizes, lengths, [3, 1, 19, 1, 1]))


@pytest.mark.parametrize("spare", [0, 1, 5])
def test_the_ring_wraps(spare: int) -> None:
    sizes = Sizes(spare_slots=spare)
    boundary = 5 * sizes.chunk + sizes.window
    lengths = [boundary + 1, boundary + sizes.chunk, boundary, boundary + 40]
    attend(Batch(sizes, lengths, [1, sizes.chunk, 5, 1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("soft_cap", [0.0, 0.5, 30.0])
@pytest.mark.parametrize("sinks", [None, (-40.0, 0.0, 1.5, 60.0)])
def test_sinks_and_soft_caps(sinks: tuple[float, ...] | None, soft_cap: float, dtype: torch.dtype) -> None:
    sizes = Sizes(dtype=dtype, kv_heads=2, group=2, sinks=sinks, soft_cap=soft_cap)
    attend(Batch(sizes, [64 * 12 + 41, 130, 1], [1, 30, 1]))


@pytest.mark.parametrize("page", [8, 24])
def test_pages_that_the_kernels_do_not_take_are_still_right(page: int) -> None:
    attend(Batch(Sizes(page=page, chunk=page * 4, keep=(page * 2, page), head_size=64), [150, 33], [1, 20]))


def test_unusual_strides() -> None:
    """A query inside a packed row at an odd place, an output of odd stride: both are copied, not refused."""
    batch = Batch(Sizes(), [96, 40, 70], [30, 1, 1])
    layout, pool, query = batch.sizes.layout, to_gpu(batch.pool), batch.step(batch.queries).cuda()
    tables = [to_gpu(table) for table in batch.tables]
    key, value = (batch.step(parts).cuda() for parts in (batch.keys, batch.values))
    tokens, heads, size = query.shape
    odd = torch.zeros(tokens, key.shape[1] * size + 3, dtype=key.dtype, device="cuda")[:, 3:].unflatten(
        1, (-1, size)
    )
    ragged_append(odd.copy_(key), value, pool, *tables, layout)
    packed = torch.full((tokens, heads * size + 5), POISON, dtype=query.dtype, device="cuda")
    packed[:, 5:] = query.flatten(1)
    out = torch.full((tokens + 2, heads, size + 1), 7.0, dtype=query.dtype, device="cuda")[:, :, 1:]
    strided = torch.cat((packed, packed[:2]))[:, 5:].unflatten(1, (heads, size))
    ragged_attention(out, strided, pool, *tables, layout, batch.scale)
    check(out[:tokens], batch.expected(), batch.sizes.dtype)
    assert bool((out[tokens:] == 7.0).all())
    even = torch.zeros(heads, tokens, 2 * size, dtype=query.dtype, device="cuda").transpose(0, 1)[:, :, :size]
    ragged_attention(even, query, pool, *tables, layout, batch.scale)
    check(even, batch.expected(), batch.sizes.dtype)


@pytest.mark.parametrize("max_query", [0, 1])
def test_padding_is_left_alone(max_query: int) -> None:
    """Rows of a padded graph: requests without tokens, requests of length 0, and tokens of nobody."""
    steps = [0, 1, 0, 1, 0] if max_query else [0, 4, 0, 1, 0]
    batch = Batch(Sizes(), [0, 100, 55, 70, 0], steps)
    layout, tokens = batch.sizes.layout, sum(steps)
    rows, starts, lengths, tier, member = (to_gpu(table) for table in batch.tables)
    wild = torch.full((2, rows.shape[1]), -1, dtype=torch.int32, device="cuda")
    more = torch.tensor([tokens + 1, tokens + 2], dtype=torch.int32, device="cuda")
    tables = (
        torch.cat((rows, wild)),
        torch.cat((starts, more)),
        torch.cat((lengths, torch.zeros_like(more))),
        tier,
        member,
    )
    pool, pad = to_gpu(batch.pool), (0, 0, 0, 0, 0, 6)
    key, value, query = (
        torch.nn.functional.pad(batch.step(parts).cuda(), pad, value=POISON)
        for parts in (batch.keys, batch.values, batch.queries)
    )
    before = pool.clone()
    ragged_append(key, value, pool, *tables, layout)
    changed = (pool.view(torch.int16) != before.view(torch.int16)).flatten(2).any(-1).sum()
    assert int(changed) <= tokens * batch.sizes.kv_heads
    out = torch.full_like(query, 7.0)
    ragged_attention(out, query, pool, *tables, layout, batch.scale, max_query=max_query)
    check(out[:tokens], batch.expected(), batch.sizes.dtype)
    assert bool((out[tokens:] == 7.0).all())


def test_pages_outside_the_pool_are_never_followed() -> None:
    batch = Batch(Sizes(), [200, 90], [1, 5])
    tables = [to_gpu(table) for table in batch.tables]
    tables[0] = torch.where(torch.arange(len(tables[0][0]), device="cuda") % 2 == 0, tables[0], 2**30)
    pool = torch.zeros_like(to_gpu(batch.pool))
    key, value, query = (to_gpu(batch.step(parts)) for parts in (batch.keys, batch.values, batch.queries))
    ragged_append(key, value, pool, *tables, batch.sizes.layout)
    out = torch.full_like(query, POISON)
    ragged_attention(out, query, pool, *tables, batch.sizes.layout, batch.scale)
    assert bool(out.isfinite().all())


QWEN = RaggedLayout(16, 42, 512, 128, (16, 32, 48, 64, 96, 160, 240, 368), 128)


@pytest.mark.parametrize(
    "lengths", [[40000], [33000, 1, 700], [3000] * 9, [131072, 5, 16, 17, 640], [131000] * 3]
)
def test_long_histories_decode(lengths: list[int]) -> None:
    Large(QWEN, lengths, [1] * len(lengths)).attend()


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_size"), [(1, 16, 128), (2, 8, 256), (3, 5, 64), (40, 1, 96)]
)
def test_long_histories_of_other_shapes(kv_heads: int, group: int, head_size: int) -> None:
    layout = RaggedLayout(32, 21, 512, 128, (32, 256, 512), head_size)
    lengths, steps = [20000, 900, 3001, 5], [1, 1, 200, 1]
    Large(layout, lengths, steps, kv_heads=kv_heads, group=group, members=kv_heads).attend()


@pytest.mark.parametrize("requests", [33, 256, 1024])
def test_many_requests(requests: int) -> None:
    random = random_module.Random(requests)
    layout = RaggedLayout(16, 11, 128, 32, (16, 48), 128)
    lengths = [random.randint(1, 900) for _ in range(requests)]
    Large(layout, lengths, [1] * requests, kv_heads=2).attend()


@pytest.mark.parametrize(("cached", "step"), [(0, 512), (640, 512), (20096, 512), (20096, 33), (3000, 2)])
def test_long_histories_prefill(cached: int, step: int) -> None:
    Large(QWEN, [cached + step, 700, step], [step, 1, step]).attend()


def test_more_pieces_than_are_planned_for() -> None:
    """A step of so many requests and heads that no plan is made, beside parts of it for which one is."""
    layout = RaggedLayout(16, 3, 16, 16, (16,), 64)
    large = Large(layout, [31 + 2] * 1100, [2] * 1100, kv_heads=128, group=1, members=128)
    together = large.run(torch.full_like(large.query, POISON))
    starts = torch.arange(276, dtype=torch.int32, device="cuda") * 2
    for first in range(0, 1100, 275):
        part = slice(2 * first, 2 * first + 550)
        tables = (large.rows[first : first + 275], starts, large.seq_lens[first : first + 275])
        alone = torch.full_like(large.query[part], POISON)
        heads = (large.tier, large.member)
        ragged_attention(alone, large.query[part], large.pool, *tables, *heads, layout, 64**-0.5)
        check(together[part], alone, large.dtype)


@pytest.mark.parametrize("steps", [[1, 1], [40, 2]])
def test_hints_change_nothing(steps: list[int]) -> None:
    large = Large(QWEN, [2000, 700], steps)
    plain, hinted = (torch.full_like(large.query, POISON) for _ in range(2))
    large.run(plain)
    scale, singles = QWEN.head_size**-0.5, max(steps) == 1
    ragged_attention(
        hinted, large.query, large.pool, *large.tables, QWEN, scale, max_query=max(steps), singles=singles
    )
    assert torch.equal(plain, hinted)


def test_a_mixed_batch_of_many() -> None:
    random = random_module.Random(3)
    layout = RaggedLayout(16, 11, 128, 32, (16, 48, 128), 64)
    lengths, steps = [], []
    for _ in range(150):
        cached = random.randint(0, 2000)
        steps.append(random.choice([0, 1, 1, 1, random.randint(1, layout.step_end(cached) - cached)]))
        lengths.append(cached + steps[-1])
    Large(layout, lengths, steps, kv_heads=3, group=3, members=3).attend()


def test_the_same_call_gives_the_same_bits() -> None:
    large = Large(QWEN, [9000, 30000, 17], [1, 1, 1])
    first = large.attend()
    for _ in range(5):
        assert torch.equal(first, large.run(torch.full_like(first, POISON)))
    native = dispatch.native(large.pool.device, large.dtype, 128)
    assert native is not None
    assert int(native.workspace(large.pool.device)[1].abs().sum()) == 0  # the counters are as they were


def test_a_captured_graph_follows_the_lengths() -> None:
    lengths = [[30000, 20, 700, 1], [640, 8000, 1, 0], [5, 641, 30007, 2222]]
    large = Large(QWEN, [31000] * 4, [1] * 4)
    out = torch.full_like(large.query, POISON)
    key = torch.randn(4, 8, 128, dtype=large.dtype, device="cuda")
    large.run(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ragged_append(key, key, large.pool, *large.tables, QWEN)
        large.run(out, max_query=1)
    for case in lengths:
        large.seq_lens.copy_(torch.tensor(case, dtype=torch.int32))
        key.normal_()
        large.query.normal_()
        out.fill_(7.0)
        graph.replay()
        real = torch.tensor([n > 0 for n in case])
        assert bool((out[~real.cuda()] == 7.0).all())
        # The reference takes no request that is shorter than its new tokens: here only the last one is.
        one_token = large.query_start_loc.clone()
        large.query_start_loc.copy_(torch.tensor([0, *real.tolist()]).cumsum(0))
        check(out[real.cuda()], large.expected()[real.cuda()], large.dtype)
        large.query_start_loc.copy_(one_token)


REPLAYS = {
    1: [[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0, 0], [0] * 8, [1, 0, 0, 0, 0, 0, 0, 0]],
    0: [[1] * 8, [30, 0, 1, 0, 0, 0, 0, 0], [0] * 8, [1, 2, 300, 1, 0, 0, 0, 0], [20, 0, 0, 9, 1, 17, 0, 40]],
}


@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize("max_query", REPLAYS)
def test_a_graph_is_replayed_on_other_rows(max_query: int, kv_heads: int) -> None:
    """As vLLM does it: all tables are written in place. Requests that are only padding have length 0, repeat
    the last bound and name pages that do not exist; tokens behind the last bound are of nobody."""
    tokens = 8 if max_query else 400
    large = Large(QWEN, [9000] * 8, [1] * 8, kv_heads=kv_heads)
    every = large.rows.clone()
    large.query = torch.empty(tokens, kv_heads * 4, 128, dtype=large.dtype, device="cuda")
    out = torch.empty_like(large.query)
    key, value = torch.empty(2, tokens, kv_heads, 128, dtype=large.dtype, device="cuda")
    large.run(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ragged_append(key, value, large.pool, *large.tables, QWEN)
        large.run(out, max_query=max_query)
    random = random_module.Random(kv_heads)
    geometry = (QWEN.page_tokens, QWEN.ring_slots, QWEN.chunk, QWEN.window)
    offsets = QWEN.offset_tensor(large.pool.device)
    for steps in REPLAYS[max_query]:
        cached = [random.choice([0, 15, 640, random.randint(0, 8000)]) if step else 0 for step in steps]
        fitting = [min(step, QWEN.step_end(n) - n) for n, step in zip(cached, steps, strict=True)]
        lengths = [n + step for n, step in zip(cached, fitting, strict=True)]
        large.query_start_loc.copy_(torch.tensor([0, *fitting]).cumsum(0))
        large.seq_lens.copy_(torch.tensor(lengths))
        large.rows.copy_(every[torch.tensor(random.sample(range(8), 8))])
        large.rows[torch.tensor(fitting) == 0] = -1
        for tensor in (large.query, key, value):
            tensor.normal_()
        out.fill_(7.0)
        expected = large.pool.clone()
        graph.replay()
        fallback.append(key, value, expected, *large.tables, offsets, *geometry)
        assert torch.equal(large.pool.view(torch.int16), expected.view(torch.int16))
        real = sum(fitting)
        assert bool((out[real:] == 7.0).all())
        if real:
            check(out[:real], large.expected()[:real], large.dtype)


def test_capturing_before_the_first_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    large = Large(QWEN, [100], [1])
    native = dispatch.native(large.pool.device, large.dtype, 128)
    assert native is not None
    monkeypatch.setattr(native, "_workspaces", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(KernelError, match="must run once before"):
        large.run(torch.empty_like(large.query))


@pytest.mark.parametrize("page", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_append_writes_the_same_bytes_as_the_reference(dtype: torch.dtype, head_size: int, page: int) -> None:
    """Nothing, one token, whole pages and parts of them, past the ring's end; free pages stay as they are."""
    sizes = Sizes(page, page * 2, page + 3, (page * 2, page), head_size, 3, 1, dtype, page_padding=24)
    cached = [page * 5 + 3, 0, 0, 0, page - 1, page * 3 + 3, 7]
    steps = [page * 2, page * 3, 1, 0, 1, page, 0]
    batch = Batch(sizes, [n + q for n, q in zip(cached, steps, strict=True)], steps)
    key, value = (batch.step(parts) for parts in (batch.keys, batch.values))
    pool, layout = to_gpu(batch.pool), batch.sizes.layout
    ragged_append(to_gpu(key), to_gpu(value), pool, *(to_gpu(table) for table in batch.tables), layout)
    geometry = (layout.page_tokens, layout.ring_slots, layout.chunk, layout.window)
    offsets = layout.offset_tensor(batch.pool.device)
    fallback.append(key, value, batch.pool, *batch.tables, offsets, *geometry)
    assert torch.equal(pool.cpu().view(torch.uint8), batch.pool.view(torch.uint8))


def test_append_of_many_tokens() -> None:
    """Blocks of several tokens, at the borders of requests and beyond the last one."""
    layout = RaggedLayout(16, 42, 512, 128, (16, 512), 64)
    steps = [511, 1, 0, 512, 129, 2, 640, 1, 400]
    large = Large(layout, steps, steps, kv_heads=3, members=3)
    tokens = sum(steps) + 7
    key, value = torch.randn(2, tokens, 3, 64, device="cuda").to(large.dtype)
    expected = large.pool.clone()
    geometry = (16, 42, 512, 128)
    offsets = layout.offset_tensor(large.pool.device)
    ragged_append(key, value, large.pool, *large.tables, layout)
    fallback.append(key, value, expected, *large.tables, offsets, *geometry)
    assert tokens > 2048
    assert torch.equal(large.pool.view(torch.int16), expected.view(torch.int16))


def test_a_batch_without_requests() -> None:
    batch = Batch(Sizes(), [50], [1])
    none = torch.empty(0, dtype=torch.int32, device="cuda")
    start = torch.zeros(1, dtype=torch.int32, device="cuda")
    tables = (batch.rows[:0].cuda(), start, none, batch.tier.cuda(), batch.member.cuda())
    query = batch.step(batch.queries).cuda()
    out, pool = torch.full_like(query, 7.0), to_gpu(batch.pool)
    key = batch.step(batch.keys).cuda()
    ragged_append(key, key, pool, *tables, batch.sizes.layout)
    ragged_attention(out, query, pool, *tables, batch.sizes.layout, batch.scale)
    assert bool((out == 7.0).all())


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    page = draw(st.sampled_from([16, 32]))
    pages = draw(st.integers(1, 5))
    keep = tuple(page * kept for kept in draw(st.lists(st.integers(1, pages), min_size=1, max_size=3)))
    sizes = Sizes(
        page=page,
        chunk=page * pages,
        window=draw(st.integers(0, 70)),
        keep=keep,
        head_size=draw(st.sampled_from([64, 96, 128])),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 17)),
        dtype=draw(st.sampled_from(DTYPES)),
        spare_slots=draw(st.integers(0, 2)),
        page_padding=draw(st.sampled_from([0, 8, 64])),
        soft_cap=draw(st.sampled_from([0.0, 5.0])),
    )
    if draw(st.booleans()):
        heads = sizes.kv_heads * sizes.group
        sizes.sinks = tuple(draw(st.lists(st.floats(-9.0, 9.0, width=32), min_size=heads, max_size=heads)))
    lengths, steps = [], []
    for _ in range(draw(st.integers(1, 5))):
        cached = draw(st.integers(0, 6 * sizes.chunk + sizes.window))
        room = sizes.layout.step_end(cached) - cached
        steps.append(min(room, draw(st.one_of(st.integers(0, 1), st.integers(2, 90)))))
        lengths.append(cached + steps[-1])
    return Batch(sizes, lengths, steps, seed=draw(st.integers(0, 99)))


@settings(max_examples=100, deadline=None)
@given(batches())
def test_random_batches_match_brute_force(batch: Batch) -> None:
    if sum(batch.steps):
        attend(batch)
