"""One small case for each path through the CUDA kernels.

``scripts/sanitize_kernels.py`` runs this file under compute-sanitizer, which slows every access down, so the
cases are as small as their path allows and nothing is captured in a graph.
"""

from __future__ import annotations

import pytest
import torch

from kernels import RaggedLayout, fallback, ragged_append, ragged_attention, wide
from tests.kernels.cuda_batch import POISON, attend, check, decode, to_gpu
from tests.kernels.ragged_batch import Batch, Sizes
from tests.kernels.seal_case import Case
from tests.kernels.test_cuda_seal import both
from tests.kernels.test_cuda_wide import STEPS as WIDE_STEPS
from tests.kernels.test_cuda_wide import Staged
from tests.kernels.wide_batch import Batch as WideBatch
from tests.kernels.wide_batch import layout_of, room_behind

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("cuda_native"),
]

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("head_size", "group", "dtype"), [(128, 4, BF16), (64, 16, FP16), (96, 5, BF16), (256, 1, FP16)]
)
def test_decode_and_prefill(head_size: int, group: int, dtype: torch.dtype) -> None:
    """Requests that one block holds, of all kinds, and pages of 32 tokens with padding behind them."""
    sizes = Sizes(32, 64, 32, (64, 32), head_size, 2, group, dtype, members=2, page_padding=64)
    attend(Batch(sizes, [64 * 3 + 45, 1, 0, 70, 50, 33], [1, 1, 0, 19, 0, 33]))


def test_sinks_and_soft_caps() -> None:
    sizes = Sizes(dtype=FP16, kv_heads=1, group=4, sinks=(-40.0, 0.0, 1.5, 60.0), soft_cap=5.0)
    attend(Batch(sizes, [64 * 3 + 41, 130], [1, 30]))


def test_blocks_share_a_history_in_decoding() -> None:
    """Few pairs have blocks of their own; the last of them to arrive merges."""
    attend(Batch(Sizes(kv_heads=1, group=4, head_size=128), [1300, 40], [1, 1]), max_query=1)


@pytest.mark.parametrize(("head_size", "group", "dtype"), [(128, 4, BF16), (64, 16, FP16), (256, 1, BF16)])
def test_one_launch_appends_and_decodes(head_size: int, group: int, dtype: torch.dtype) -> None:
    """A first token, the last and first of a page, and a history that many blocks share."""
    sizes = Sizes(head_size=head_size, kv_heads=2, group=group, dtype=dtype, page_padding=64)
    decode(Batch(sizes, [1, 16, 0, 17, 1300], [1, 1, 0, 1, 1]))


def test_runs_hold_the_end_of_one_pair_and_the_beginning_of_another() -> None:
    """More pairs than a quarter of the blocks, with histories of several runs."""
    sizes = Sizes(keep=(64, 32), kv_heads=2, group=1, members=2)
    attend(Batch(sizes, [400 - request for request in range(150)], [1] * 150), max_query=1)


def test_blocks_share_a_piece_in_prefill() -> None:
    """Sums of a long history are left in the workspace and merged in a launch of their own."""
    attend(Batch(Sizes(kv_heads=1, group=4, head_size=128), [1308, 64], [60, 3]))


def test_a_group_too_large_for_decoding() -> None:
    attend(Batch(Sizes(kv_heads=1, group=17), [200, 40], [1, 2]))


def test_append_of_several_tokens_a_block() -> None:
    sizes = Sizes(16, 2048, 16, (16,), 64, 1, 1, BF16, members=1)
    batch = Batch(sizes, [2052, 3, 0, 1], [2052, 3, 0, 1])
    assert sizes.ring == 131
    pool, key = to_gpu(batch.pool), batch.step(batch.keys)
    tables = [to_gpu(table) for table in batch.tables]
    ragged_append(to_gpu(key), to_gpu(key), pool, *tables, sizes.layout)
    geometry = (16, 131, 2048, 16)
    offsets = sizes.layout.offset_tensor(torch.device("cpu"))
    fallback.append(key, key, batch.pool, *batch.tables, offsets, *geometry)
    assert torch.equal(pool.cpu().view(torch.int16), batch.pool.view(torch.int16))


def test_padding_and_pages_that_do_not_exist() -> None:
    """Behind the batch: requests of length 0, tokens of nobody, rows that name no page and are not read. At
    last, such pages also where they are read."""
    batch = Batch(Sizes(group=1), [100, 70, 0, 0], [1, 9, 0, 0])
    rows, starts, lengths, tier, member = (to_gpu(table) for table in batch.tables)
    rows[2], rows[3] = -1, 2**30
    pool = to_gpu(batch.pool)
    key, value, query = (
        torch.nn.functional.pad(batch.step(parts), (0, 0, 0, 0, 0, 5), value=POISON).cuda()
        for parts in (batch.keys, batch.values, batch.queries)
    )
    tables = (rows, starts, lengths, tier, member)
    ragged_append(key, value, pool, *tables, batch.sizes.layout)
    out = torch.full_like(query, 7.0)
    ragged_attention(out, query, pool, *tables, batch.sizes.layout, batch.scale)
    check(out[:10], batch.expected(), batch.sizes.dtype)
    assert bool((out[10:] == 7.0).all())
    rows[:, ::2] = 2**30
    ragged_append(key[:10], value[:10], pool, *tables, batch.sizes.layout)
    ragged_attention(out, query, pool.fill_(1.0), *tables, batch.sizes.layout, batch.scale)
    assert bool(out[:10].isfinite().all())


def test_an_append_of_odd_words() -> None:
    """Keys and values that are not aligned to what a copy takes at once."""
    batch = Batch(Sizes(group=1), [100, 70], [1, 9])
    pool, tables = to_gpu(batch.pool), [to_gpu(table) for table in batch.tables]
    key, value = (
        torch.nn.functional.pad(batch.step(parts), (1, 0)).cuda()[:, :, 1:]
        for parts in (batch.keys, batch.values)
    )
    ragged_append(key, value, pool, *tables, batch.sizes.layout)
    out = torch.full_like(batch.step(batch.queries).cuda(), POISON)
    query = batch.step(batch.queries).cuda()
    ragged_attention(out, query, pool, *tables, batch.sizes.layout, batch.scale)
    check(out, batch.expected(), batch.sizes.dtype)


@pytest.mark.parametrize(("head_size", "dtype"), [(128, BF16), (64, FP16)])
@pytest.mark.parametrize("by", ["keys", "values", "asked", "scores"])
def test_seal(by: str, head_size: int, dtype: torch.dtype) -> None:
    """Tiers that keep one page, some of a chunk, and all of it."""
    layout = RaggedLayout(16, 20, 256, 16, (16, 96, 256), head_size)
    case = Case(layout, [0, 2], 2, dtype)
    scores = torch.randn(2, 3, 2, 256) if by == "scores" else None
    asked = case.asked if by == "asked" else None
    expected, sealed = both(case, 4, scores, by in ("values", "asked"), asked)
    assert torch.equal(expected, sealed)


@pytest.mark.parametrize(("head_size", "dtype", "padding"), [(128, BF16, 0), (64, FP16, 72)])
def test_a_wide_step(
    monkeypatch: pytest.MonkeyPatch, head_size: int, dtype: torch.dtype, padding: int
) -> None:
    """Staged from rings and from new tokens, sealed from there, packed and unpacked."""
    monkeypatch.setattr(wide, "new_room", room_behind)
    batch = WideBatch(layout_of(head_size, 16, 32, 8), WIDE_STEPS, dtype=dtype, padding=padding)
    expected, got = Staged(batch, "cpu"), Staged(batch, "cuda")
    batch.check_alike(got.pool.cpu(), expected.pool)
    assert torch.equal(got.out.cpu().nan_to_num(), expected.out.nan_to_num())
