"""Sealing for every size of pages, heads and chunks, and pages with padding behind them."""

from __future__ import annotations

import pytest
import torch

from kernels import RaggedLayout, fallback, ragged_seal
from tests.kernels.cuda_batch import POISON
from tests.kernels.seal_case import Case

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("cuda_native"),
]


def check(case: Case, sink: int, padding: int = 0, values: bool = False) -> None:
    """Seal on the GPU and by the reference: all bytes of all pages are the same, also those of free pages."""
    layout, content = case.layout, case.pool[0].numel()
    storage = torch.full((len(case.pool), content + padding), POISON, dtype=case.pool.dtype, device="cuda")
    pool = storage[:, :content].unflatten(1, case.pool.shape[1:])
    pool.copy_(case.pool)
    ragged_seal(pool, case.rows.cuda(), case.due.cuda(), case.tier_heads.cuda(), layout, sink, values=values)
    geometry = (layout.page_tokens, layout.ring_slots, layout.chunk, layout.window)
    offsets = layout.offset_tensor(case.pool.device)
    fallback.seal(case.pool, case.rows, case.due, offsets, case.tier_heads, *geometry, sink, values=values)
    assert torch.equal(pool.cpu().view(torch.int16), case.pool.view(torch.int16))
    assert bool(storage[:, content:].isnan().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
@pytest.mark.parametrize("page", [16, 32, 48, 64, 128])
def test_pages_and_head_sizes(page: int, head_size: int, dtype: torch.dtype) -> None:
    layout = RaggedLayout(page, 7, page * 5, page + 5, (page, page * 5, page * 3), head_size)
    check(Case(layout, [0, 3, 1, 12], 3, dtype), sink=4, padding=40)


@pytest.mark.parametrize("chunk", [16, 48, 2048, 8192, 8208])
@pytest.mark.parametrize("values", [False, True])
def test_chunks_of_all_lengths(values: bool, chunk: int) -> None:
    """The last one is longer than the kernel takes."""
    layout = RaggedLayout(16, chunk // 16 + 2, chunk, 16, (16, chunk), 64)
    check(Case(layout, [0, 1], 2, torch.bfloat16), sink=4, values=values)


@pytest.mark.parametrize("page", [8, 24])
def test_pages_that_the_kernel_does_not_take_are_still_right(page: int) -> None:
    layout = RaggedLayout(page, 7, page * 5, page, (page, page * 2), 64)
    check(Case(layout, [2, 0], 2, torch.float16), sink=1)


@pytest.mark.parametrize("ring", [40, 42, 57])
def test_chunks_that_begin_anywhere_in_the_ring(ring: int) -> None:
    layout = RaggedLayout(16, ring, 512, 128, (16, 160), 128)
    check(Case(layout, [0, 1, 2, 3, 7, 100], 2, torch.bfloat16), sink=4)
