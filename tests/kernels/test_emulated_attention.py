"""The CUDA kernels of attention on a CPU, beside the brute-force answer: see ``emulated``.

All goes through emulated matrix products, in fibers: cases are as small as their path allows.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels import ragged_append, ragged_attention
from kernels.cuda import dispatch
from tests.kernels.cuda_batch import POISON, attend, check, decode
from tests.kernels.emulated import ORDERS, emulated
from tests.kernels.ragged_batch import Batch, Sizes

BF16, FP16 = torch.bfloat16, torch.float16
ORDER = pytest.mark.parametrize("order", ORDERS)
SHAPES = pytest.mark.parametrize(
    ("head_size", "group", "dtype"),
    [(128, 4, BF16), (64, 16, FP16), (96, 5, BF16), (256, 1, FP16), (32, 2, BF16)],
)


@SHAPES
@ORDER
def test_decode_and_prefill(folder: Path, head_size: int, group: int, dtype: torch.dtype, order: str) -> None:
    """Requests that one block holds, of all kinds, and pages of 32 tokens with padding behind them."""
    sizes = Sizes(32, 64, 32, (64, 32), head_size, 2, group, dtype, members=2, page_padding=64)
    with emulated(folder, order) as called:
        attend(Batch(sizes, [64 * 3 + 45, 1, 0, 70, 50, 33], [1, 1, 0, 19, 0, 33]), device="cpu")
    assert called == ["append", "attention"]


@ORDER
def test_sinks_and_soft_caps(folder: Path, order: str) -> None:
    sizes = Sizes(dtype=FP16, kv_heads=1, group=4, sinks=(-40.0, 0.0, 1.5, 60.0), soft_cap=5.0)
    with emulated(folder, order):
        attend(Batch(sizes, [64 * 3 + 41, 130], [1, 30]), device="cpu")


@ORDER
def test_blocks_share_a_history_in_decoding(folder: Path, order: str) -> None:
    """Few pairs have blocks of their own; the last of them to arrive merges."""
    batch = Batch(Sizes(kv_heads=1, group=4, head_size=128), [1300], [1])
    with emulated(folder, order):
        attend(batch, max_query=1, device="cpu")


@ORDER
def test_runs_hold_the_end_of_one_pair_and_the_beginning_of_another(folder: Path, order: str) -> None:
    sizes = Sizes(keep=(64, 32), kv_heads=2, group=1, members=2)
    with emulated(folder, order):
        attend(Batch(sizes, [400 - 3 * i for i in range(9)], [1] * 9), max_query=1, device="cpu")


@ORDER
@pytest.mark.parametrize("lengths", [([500], [200]), ([64 * 4 + 90, 40], [80, 40])])
def test_blocks_share_pieces_of_prefill(
    folder: Path, lengths: tuple[list[int], list[int]], order: str
) -> None:
    """Their sums are merged by another launch."""
    sizes = Sizes(chunk=512, window=128, keep=(512, 128), kv_heads=1, group=2)
    with emulated(folder, order):
        attend(Batch(sizes, *lengths), device="cpu")


@SHAPES
@ORDER
def test_one_launch_appends_and_decodes(
    folder: Path, head_size: int, group: int, dtype: torch.dtype, order: str
) -> None:
    """A first token, the last and first of a page, and a history that several blocks share."""
    sizes = Sizes(head_size=head_size, kv_heads=2, group=group, dtype=dtype, page_padding=64)
    dispatch.launch.cache_clear()
    with emulated(folder, order) as called:
        decode(Batch(sizes, [1, 16, 0, 17, 300], [1, 1, 0, 1, 1]), device="cpu")
    assert called == ["decode"]


def test_padding_and_pages_that_do_not_exist(folder: Path) -> None:
    """Behind the batch: requests of length 0, tokens of nobody, rows that name no page and are not read. At
    last, such pages also where they are read."""
    batch = Batch(Sizes(group=1), [100, 70, 0, 0], [1, 9, 0, 0])
    rows, *others = (table.clone() for table in batch.tables)
    rows[2], rows[3] = -1, 2**30
    pool = batch.pool.clone()
    key, value, query = (
        torch.nn.functional.pad(batch.step(parts), (0, 0, 0, 0, 0, 5), value=POISON)
        for parts in (batch.keys, batch.values, batch.queries)
    )
    out, layout = torch.full_like(query, 7.0), batch.sizes.layout
    with emulated(folder):
        ragged_append(key, value, pool, rows, *others, layout)
        ragged_attention(out, query, pool, rows, *others, layout, batch.scale)
        check(out[:10], batch.expected(), batch.sizes.dtype)
        assert bool((out[10:] == 7.0).all())
        rows[:, ::2] = 2**30
        ragged_append(key[:10], value[:10], pool, rows, *others, layout)
        ragged_attention(out, query, pool.fill_(1.0), rows, *others, layout, batch.scale)
    assert bool(out[:10].isfinite().all())
