"""Decode steps on a GPU, in every way to launch them: one launch writes the new token and attends."""

from __future__ import annotations

import random as random_module

import pytest
import torch

from kernels import RaggedLayout, fallback, ragged_append, ragged_append_attention
from kernels.choice import DECODE_LAUNCHES
from kernels.cuda import dispatch
from kernels.cuda.native import Native
from tests.kernels.cuda_batch import POISON, Large, check, decode, to_gpu
from tests.kernels.ragged_batch import Batch, Sizes

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("cuda_native"),
]

QWEN = RaggedLayout(16, 42, 512, 128, (16, 32, 48, 64, 96, 160, 240, 368), 128)


@pytest.fixture(params=DECODE_LAUNCHES)
def launch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every way to launch a decode step."""
    return _chosen(request.param, monkeypatch)


@pytest.fixture(params=[name for name in DECODE_LAUNCHES if name != "separate"])
def one_launch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Those with one launch, and a failure where there are two."""

    def second(*_: object) -> None:
        pytest.fail("the new token was written by a launch of its own")

    monkeypatch.setattr(Native, "append", second)
    return _chosen(request.param, monkeypatch)


def _chosen(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TANGRAM_DECODE_LAUNCH", name)
    dispatch.launch.cache_clear()
    return name


@pytest.mark.parametrize("page", [16, 32, 64])
def test_the_newest_token_at_every_place_of_a_page(page: int, one_launch: str) -> None:
    """Of a first page, from the first token ever on, and behind sealed chunks. Unwritten slots are NaN."""
    sizes = Sizes(page, page * 2, page + 5, (page * 2, page), 128, 2, 4, members=2, page_padding=24)
    for place in range(page + 1):
        decode(Batch(sizes, [place + 1, page * 6 + place + 1], [1, 1]))


@pytest.mark.parametrize("spare", [0, 2])
def test_around_seal_boundaries_and_the_end_of_the_ring(spare: int, one_launch: str) -> None:
    sizes = Sizes(spare_slots=spare)
    for chunks in (0, 1, 2, 5):
        boundary = chunks * sizes.chunk + sizes.window
        decode(Batch(sizes, [boundary - 1, boundary, boundary + 1, boundary + sizes.chunk], [1] * 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [1, 3, 8, 16])
@pytest.mark.parametrize("head_size", [32, 64, 96, 128, 160, 256])
def test_head_sizes_groups_and_types(head_size: int, group: int, dtype: torch.dtype, one_launch: str) -> None:
    sizes = Sizes(head_size=head_size, dtype=dtype, kv_heads=2, group=group)
    decode(Batch(sizes, [64 * 9 + 41, 17, 0, 130, 1, 64 * 5 + 7], [1, 1, 0, 1, 1, 1]))


def test_sinks_and_soft_caps(one_launch: str) -> None:
    sizes = Sizes(kv_heads=1, group=4, sinks=(-40.0, 0.0, 1.5, 60.0), soft_cap=5.0)
    decode(Batch(sizes, [64 * 3 + 41, 130, 1], [1, 1, 1]))


def test_blocks_share_a_history(one_launch: str) -> None:
    """So many that their sums are merged in several rounds; one of them writes the token."""
    sizes = Sizes(head_size=128, kv_heads=1, group=4, keep=(64, 32))
    decode(Batch(sizes, [64 * 300 + 40], [1]))
    decode(Batch(sizes, [64 * 150 + 40, 64 * 90 + 1, 40], [1, 1, 1]))


def test_runs_hold_the_end_of_one_pair_and_the_beginning_of_another(one_launch: str) -> None:
    sizes = Sizes(keep=(64, 32), kv_heads=2, group=1, members=2)
    decode(Batch(sizes, [400 - request for request in range(150)], [1] * 150))


@pytest.mark.parametrize("requests", [33, 256])
def test_many_requests(requests: int, one_launch: str) -> None:
    random = random_module.Random(requests)
    layout = RaggedLayout(16, 11, 128, 32, (16, 48), 128)
    lengths = [random.choice([0, 1, random.randint(2, 900)]) for _ in range(requests)]
    decode_large(Large(layout, lengths, [int(n > 0) for n in lengths], kv_heads=2))


@pytest.mark.parametrize("lengths", [[40000], [33000, 1, 700], [131072, 5, 16, 17, 640], [3000] * 9])
def test_long_histories(lengths: list[int], one_launch: str) -> None:
    decode_large(Large(QWEN, lengths, [1] * len(lengths)))


def test_views_of_a_fused_projection(one_launch: str) -> None:
    """As a model's projection leaves them: queries, keys and values side by side in each token's row."""
    batch = Batch(Sizes(head_size=128), [200, 90, 33, 1], [1] * 4)
    query, key, value = (batch.step(parts) for parts in (batch.queries, batch.keys, batch.values))
    heads, kv_heads = query.shape[1], key.shape[1]
    packed = torch.full((4, heads + 2 * kv_heads + 1, 128), POISON, dtype=query.dtype)
    parts = packed.split([heads, kv_heads, kv_heads, 1], dim=1)[:3]
    for part, of in zip(parts, (query, key, value), strict=True):
        part.copy_(of)
    on_gpu = packed.cuda().split([heads, kv_heads, kv_heads, 1], dim=1)[:3]
    decode(batch, on_gpu)


@pytest.mark.parametrize("what", ["odd key", "odd value", "group", "mixed", "page"])
def test_what_one_launch_does_not_take_is_still_right(what: str, launch: str) -> None:
    """Keys and values that a copy of 16 bytes cannot read, groups of 17 heads, prompts beside, pages of 8."""
    sizes = Sizes(kv_heads=2, group=17 if what == "group" else 2)
    if what == "page":
        sizes = Sizes(page=8, chunk=32, keep=(16, 8), kv_heads=2, group=2)
    batch = Batch(sizes, [200, 90, 33], [1, 9, 1] if what == "mixed" else [1, 1, 1])
    parts = [batch.step(of).cuda() for of in (batch.queries, batch.keys, batch.values)]
    for index, name in ((1, "odd key"), (2, "odd value")):
        if what == name:
            parts[index] = torch.nn.functional.pad(parts[index], (1, 0))[:, :, 1:]
    decode(batch, tuple(parts), max_query=0 if what == "mixed" else 1)


def test_padding_is_left_alone(one_launch: str) -> None:
    """Requests of a padded graph: no page of theirs exists, and tokens behind the batch are of nobody."""
    batch = Batch(Sizes(), [100, 55, 70], [1, 1, 1])
    rows, starts, lengths, tier, member = (to_gpu(table) for table in batch.tables)
    wild = torch.full((2, rows.shape[1]), -1, dtype=torch.int32, device="cuda")
    more = torch.tensor([4, 5], dtype=torch.int32, device="cuda")
    tables = (
        torch.cat((rows, wild)),
        torch.cat((starts, more)),
        torch.cat((lengths, more * 0)),
        tier,
        member,
    )
    pad = (0, 0, 0, 0, 0, 3)
    query, key, value = (
        torch.nn.functional.pad(batch.step(parts).cuda(), pad, value=POISON)
        for parts in (batch.queries, batch.keys, batch.values)
    )
    layout, pool, out = batch.sizes.layout, to_gpu(batch.pool), torch.full_like(query, 7.0)
    ragged_append_attention(out, query, key, value, pool, *tables, layout, batch.scale, max_query=1)
    check(out[:3], batch.expected(), batch.sizes.dtype)
    assert bool((out[3:] == 7.0).all())
    geometry = (layout.page_tokens, layout.ring_slots, layout.chunk, layout.window)
    offsets = layout.offset_tensor(batch.pool.device)
    fallback.append(key[:3].cpu(), value[:3].cpu(), batch.pool, *batch.tables, offsets, *geometry)
    assert torch.equal(pool.cpu().view(torch.int16), batch.pool.view(torch.int16))


def test_a_page_that_does_not_exist_takes_no_token(launch: str) -> None:
    batch = Batch(Sizes(group=1), [40, 70], [1, 1])
    tables = [to_gpu(table) for table in batch.tables]
    tables[0] = torch.where(torch.arange(len(tables[0][0]), device="cuda") % 2 == 0, tables[0], 2**30)
    pool = torch.zeros_like(to_gpu(batch.pool))
    query, key, value = (batch.step(of).cuda() for of in (batch.queries, batch.keys, batch.values))
    out, layout, expected = torch.full_like(query, POISON), batch.sizes.layout, pool.clone()
    ragged_append(key, value, expected, *tables, layout)
    ragged_append_attention(out, query, key, value, pool, *tables, layout, batch.scale, max_query=1)
    assert bool(out.isfinite().all())
    assert torch.equal(pool, expected)


class Chain:
    """Layers that follow one another with nothing between them, each with the output before as its query, and
    work on torch's own kernels in front and behind. Every layer has members of its own in the same pages."""

    def __init__(self, requests: int, layers: int, kv_heads: int = 8) -> None:
        self.large = Large(
            QWEN, [9000] * requests, [1] * requests, kv_heads=kv_heads, members=layers * kv_heads
        )
        self.every = self.large.rows.clone()
        member = torch.arange(layers * kv_heads, dtype=torch.int32, device="cuda").view(layers, kv_heads)
        self.members = list(member)
        shape = (requests, kv_heads, 6, 128)
        self.source = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        self.packed = torch.empty_like(self.source)
        self.outs = [torch.empty_like(self.large.query) for _ in range(layers)]
        self.result = torch.empty_like(self.large.query)
        self.none = torch.zeros_like(self.large.seq_lens)

    def step(self, empty: int | None = None) -> None:
        """``empty``: a layer for which no request has any token, so that its blocks have nothing to do."""
        large = self.large
        torch.mul(self.source, 2.0, out=self.packed)
        key, value = self.packed[:, :, 4], self.packed[:, :, 5]
        query = large.query
        for layer, (member, out) in enumerate(zip(self.members, self.outs, strict=True)):
            lengths = self.none if layer == empty else large.seq_lens
            tables = (large.rows, large.query_start_loc, lengths, large.tier, member)
            given = (out, query, key, value, large.pool, *tables, QWEN, 128**-0.5)
            ragged_append_attention(*given, max_query=1)
            query = query if layer == empty else out
        torch.add(query, self.outs[0], out=self.result)


@pytest.mark.parametrize("empty", [None, 3])
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_a_chain_in_a_graph_is_replayed_on_other_rows(
    kv_heads: int, empty: int | None, launch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and pool bit for bit as with two launches each; tables are written in place between replays."""
    chain = Chain(8, 6, kv_heads)
    large = chain.large
    large.query.normal_()
    chain.source.normal_()
    chain.step(empty)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.step(empty)
    random = random_module.Random(kv_heads)
    for active in (8, 3, 0, 1, 8):
        lengths = [random.choice([1, 16, 17, 640, 641, random.randint(1, 9000)]) for _ in range(active)]
        large.seq_lens.copy_(torch.tensor(lengths + [0] * (8 - active)))
        large.query_start_loc.copy_(torch.arange(9).clamp(max=active))
        large.rows.copy_(chain.every[torch.tensor(random.sample(range(8), 8))])
        large.rows[active:] = -1
        chain.source.normal_()
        before = large.pool.clone()
        written = [*chain.outs, chain.result]
        for tensor in written:
            tensor.fill_(7.0)
        graph.replay()
        got, pool = [tensor.clone() for tensor in written], large.pool.clone()
        large.pool.copy_(before)
        for tensor in written:
            tensor.fill_(7.0)
        with monkeypatch.context() as two:
            two.setattr(dispatch, "launch", lambda: "separate")
            chain.step(empty)
        for one, other in zip(got, written, strict=True):
            assert torch.equal(one[:active], other[:active])
            assert bool((one[active:] == other[active:]).all())
        assert torch.equal(pool.view(torch.int16), large.pool.view(torch.int16))
    native = dispatch.native(large.pool.device, large.dtype, 128)
    assert native is not None
    assert int(native.workspace(large.pool.device)[1].abs().sum()) == 0  # the counters are as they were


def test_tokens_are_decoded_one_after_another(one_launch: str) -> None:
    """Each step reads what the steps before wrote: across a page's end and a seal boundary's last token."""
    layout = RaggedLayout(16, 11, 128, 32, (16, 48), 128)
    large = Large(layout, [640] * 3, [1] * 3, kv_heads=2)
    other = large.pool.clone()
    for step in range(40):
        lengths = torch.tensor([1 + step, 100 + step, 121 + step], dtype=torch.int32)
        large.seq_lens.copy_(lengths)
        large.query.normal_()
        key, value = torch.randn(2, 3, 2, 128, device="cuda").to(large.dtype)
        out = torch.full_like(large.query, POISON)
        scale = 128**-0.5
        ragged_append_attention(
            out, large.query, key, value, large.pool, *large.tables, layout, scale, max_query=1
        )
        geometry, offsets = (16, 11, 128, 32), layout.offset_tensor(large.pool.device)
        fallback.append(key, value, other, *large.tables, offsets, *geometry)
        assert torch.equal(large.pool.view(torch.int16), other.view(torch.int16))
        check(out, large.expected(), large.dtype)


def decode_large(large: Large) -> None:
    """One step of a large batch, checked against the reference: its output and every bit of the pool."""
    layout, tokens = large.layout, len(large.query)
    heads = len(large.tier)
    key, value = torch.randn(2, tokens, heads, layout.head_size, device="cuda").to(large.dtype)
    expected = large.pool.clone()
    geometry = (layout.page_tokens, layout.ring_slots, layout.chunk, layout.window)
    fallback.append(key, value, expected, *large.tables, layout.offset_tensor(expected.device), *geometry)
    out, scale = torch.full_like(large.query, POISON), layout.head_size**-0.5
    tables = (*large.tables, layout)
    ragged_append_attention(out, large.query, key, value, large.pool, *tables, scale, max_query=1)
    assert torch.equal(large.pool.view(torch.int16), expected.view(torch.int16))
    check(out, large.expected(), large.dtype)
