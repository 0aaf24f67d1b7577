"""A query's result is a function of its position: the same bits however the work is cut and shared."""

from __future__ import annotations

import pytest
import torch

from kernels import ragged_append, ragged_attention
from tests.kernels.ragged_batch import Batch, Sizes

pytestmark = pytest.mark.usefixtures("native")

SHAPES = {
    "SmolLM2": Sizes(chunk=512, window=128, keep=(304, 512), kv_heads=3, group=3),
    "Qwen": Sizes(chunk=512, window=128, keep=(80, 512), kv_heads=2, group=7, dtype=torch.float16),
    "odd": Sizes(chunk=96, window=40, keep=(48, 96, 16), kv_heads=2, group=2, head_size=80),
    "one head": Sizes(chunk=512, window=0, keep=(128,), kv_heads=1, group=1, head_size=128),
    "sinks": Sizes(chunk=96, window=40, keep=(96,), kv_heads=1, group=2, sinks=(2.0, -1.0), soft_cap=9.0),
    "float32": Sizes(chunk=256, window=64, keep=(48, 256), kv_heads=2, group=4, dtype=torch.float32),
}


def window_of(sizes: Sizes, sealed: int) -> tuple[int, int]:
    """First and last length between two seals."""
    begin = sealed * sizes.chunk + sizes.window if sealed else 0
    return begin, (sealed + 1) * sizes.chunk + sizes.window


def run(batch: Batch, cuts: list[int]) -> torch.Tensor:
    """Answer the one request of a fresh batch in steps that end at ``cuts``."""
    pool, layout = batch.pool.clone(), batch.sizes.layout
    end, begin = batch.lengths[0], batch.lengths[0] - batch.steps[0]
    outs = []
    for stop in [*cuts, end]:
        tables = (
            batch.rows,
            torch.tensor([0, stop - begin], dtype=torch.int32),
            torch.tensor([stop], dtype=torch.int32),
            batch.tier,
            batch.member,
        )
        key, value, query = (parts[0][begin:stop] for parts in (batch.keys, batch.values, batch.queries))
        ragged_append(key, value, pool, *tables, layout)
        out = torch.full_like(query, float("nan"))
        ragged_attention(out, query, pool, *tables, layout, batch.scale, **batch.scoring)
        outs.append(out)
        begin = stop
    return torch.cat(outs)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.isfinite(a).all()) and torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sealed", [0, 3])
def test_cutting_a_step_changes_no_bit(shape: str, sealed: int) -> None:
    sizes = SHAPES[shape]
    begin, end = window_of(sizes, sealed)
    batch = Batch(sizes, [end], [end - begin], seed=sealed)
    whole = run(batch, [])
    assert same_bits(whole, run(batch, list(range(end - 70, end))))
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        cuts = sorted(set(torch.randint(begin + 1, end, (6,), generator=generator).tolist()))
        assert same_bits(whole, run(batch, cuts))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_company_and_threads_change_no_bit(shape: str, threads: int) -> None:
    sizes = SHAPES[shape]
    ends = [window_of(sizes, sealed)[1] for sealed in (0, 1, 2, 3)]
    lengths = [ends[3] - 7, ends[0], ends[2], 1, ends[1] - 60, ends[3], 33]
    steps = [1, min(ends[0], 90), 21, 1, 4, 64, 33]
    batch = Batch(sizes, lengths, steps)
    layout = sizes.layout
    key, value, query = (batch.step(parts) for parts in (batch.keys, batch.values, batch.queries))
    ragged_append(key, value, batch.pool, *batch.tables, layout)
    torch.set_num_threads(threads)
    together = torch.empty_like(query)
    ragged_attention(together, query, batch.pool, *batch.tables, layout, batch.scale, **batch.scoring)
    torch.set_num_threads(1)
    starts = batch.query_start_loc.tolist()
    for index, count in enumerate(steps):
        rows = slice(starts[index], starts[index] + count)
        alone = torch.empty_like(query[rows])
        tables = (
            batch.rows[index : index + 1],
            torch.tensor([0, count], dtype=torch.int32),
            batch.seq_lens[index : index + 1],
            batch.tier,
            batch.member,
        )
        ragged_attention(alone, query[rows], batch.pool, *tables, layout, batch.scale, **batch.scoring)
        assert same_bits(together[rows], alone)


def test_a_later_token_that_is_not_finite_does_not_reach_an_earlier_query() -> None:
    sizes = Sizes(head_size=64)
    batch = Batch(sizes, [90], [90])
    whole = run(batch, [])
    batch.values[0][70:] = float("inf")
    batch.keys[0][71:] = float("nan")
    assert same_bits(whole[:70], run(batch, [])[:70])
