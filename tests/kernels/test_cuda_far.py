"""Memory beyond two to the thirty-first element: pools, rows and a step's tensors."""

from __future__ import annotations

import pytest
import torch

from kernels import RaggedLayout, fallback, ragged_append, ragged_attention, ragged_seal
from tests.kernels.cuda_batch import BEYOND, POISON, FarPool, check, stretched, to_gpu
from tests.kernels.ragged_batch import Batch, Sizes
from tests.kernels.seal_case import Case

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("cuda_native"),
]

DTYPES = (torch.bfloat16, torch.float16)
STEPS = {"decode": [1, 1, 1], "prefill": [9, 64, 3], "both": [1, 40, 1]}


def appended(batch: Batch) -> torch.Tensor:
    """The batch's pool after the step, by the reference."""
    layout, pool = batch.sizes.layout, batch.pool.clone()
    geometry = (layout.page_tokens, layout.ring_slots, layout.chunk, layout.window)
    key, value = (batch.step(parts) for parts in (batch.keys, batch.values))
    fallback.append(key, value, pool, *batch.tables, layout.offset_tensor(pool.device), *geometry)
    return pool


@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("steps", STEPS)
def test_pages_at_both_ends_of_a_large_pool(steps: str, dtype: torch.dtype, head_size: int) -> None:
    sizes = Sizes(64, 128, 64, (128, 64), head_size, 2, 4, dtype, members=2)
    batch = Batch(sizes, [128 * 3 + 64 + 70, 128 * 2 + 64, 70], STEPS[steps])
    far = FarPool(batch.pool)
    assert int(far.rows(batch.rows).max()) * far.pool.stride(0) > BEYOND
    tables = [far.rows(batch.rows), *(to_gpu(table) for table in batch.tables[1:])]
    key, value, query = (to_gpu(batch.step(parts)) for parts in (batch.keys, batch.values, batch.queries))
    ragged_append(key, value, far.pool, *tables, sizes.layout)
    out = torch.full_like(query, POISON)
    ragged_attention(out, query, far.pool, *tables, sizes.layout, batch.scale)
    check(out, batch.expected(), dtype)
    assert torch.equal(far.content().view(torch.int16), appended(batch).view(torch.int16))
    assert far.poisoned()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scored", [False, True])
def test_chunks_at_both_ends_of_a_large_pool_are_sealed(scored: bool, dtype: torch.dtype) -> None:
    layout = RaggedLayout(64, 10, 512, 128, (64, 512, 192), 128)
    case = Case(layout, [0, 2, 1], 2, dtype)
    scores = torch.randn(3, 3, 2, 512) if scored else None
    far = FarPool(case.pool)
    rows = far.rows(case.rows)
    on_gpu = None if scores is None else scores.cuda()
    ragged_seal(far.pool, rows, case.due.cuda(), case.tier_heads.cuda(), layout, 4, on_gpu)
    geometry = (layout.page_tokens, layout.ring_slots, layout.chunk, layout.window)
    offsets = layout.offset_tensor(case.pool.device)
    fallback.seal(case.pool, case.rows, case.due, offsets, case.tier_heads, *geometry, 4, scores)
    assert torch.equal(far.content().view(torch.int16), case.pool.view(torch.int16))
    assert far.poisoned()


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("rows", 0),
        ("key", 0),
        ("key", 1),
        ("value", 0),
        ("value", 1),
        ("query", 0),
        ("query", 1),
        ("out", 0),
        ("out", 1),
    ],
)
def test_strides_reach_far(name: str, dim: int) -> None:
    """Of the rows, or of the step's tokens or heads."""
    batch = Batch(Sizes(head_size=128, kv_heads=2, group=2), [300, 129, 200, 64], [7, 1, 5, 1])
    layout, tables = batch.sizes.layout, [to_gpu(table) for table in batch.tables]
    key, value, query = (to_gpu(batch.step(parts)) for parts in (batch.keys, batch.values, batch.queries))
    given = {"rows": tables[0], "key": key, "value": value, "query": query, "out": torch.zeros_like(query)}
    given[name] = stretched(given[name], dim)
    assert given[name].stride(dim) * (given[name].shape[dim] - 1) > 2**31
    pool = to_gpu(batch.pool)
    ragged_append(given["key"], given["value"], pool, given["rows"], *tables[1:], layout)
    assert torch.equal(pool.cpu().view(torch.int16), appended(batch).view(torch.int16))
    ragged_attention(given["out"], given["query"], pool, given["rows"], *tables[1:], layout, batch.scale)
    check(given["out"], batch.expected(), batch.sizes.dtype)
