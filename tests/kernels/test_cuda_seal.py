from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels import RaggedLayout, fallback, ragged_seal
from kernels.cuda import dispatch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def native_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Insist on the compiled kernels."""
    monkeypatch.setenv("TANGRAM_KERNELS", "native")
    dispatch.native.cache_clear()
    yield
    dispatch.native.cache_clear()


class Case:
    """Requests whose rings are full of random tokens and whose other pages are poisoned."""

    def __init__(self, layout: RaggedLayout, chunks: list[int], members: int, dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(layout.head_size + len(chunks))
        self.layout = layout
        width = layout.ring_pages + (max(chunks) + 1) * layout.pages_per_chunk
        pages = width * len(chunks) + 3
        order = torch.randperm(pages, generator=random).to(torch.int32)
        self.rows = order[: width * len(chunks)].reshape(len(chunks), width)
        shape = (pages, members, layout.page_tokens, 2 * layout.head_size)
        self.pool = torch.full(shape, float("nan"), dtype=dtype)
        for row in self.rows:
            ring = row[: layout.ring_pages].long()
            # A common direction, so that keys are not all alike in their distance from the mean.
            content = torch.randn(len(ring), *shape[1:], generator=random) + torch.randn(
                shape[3], generator=random
            )
            self.pool[ring] = content.to(dtype)
        self.due = torch.tensor(list(enumerate(chunks)), dtype=torch.int32)
        sizes = [max(1, members - tier % 2) for tier in range(layout.tiers)]
        self.tier_heads = torch.tensor(sizes, dtype=torch.int32)

    def both(
        self, sink: int, scores: torch.Tensor | None = None, values: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The pool sealed by the reference and by the kernel, as bytes."""
        layout, expected = self.layout, self.pool.clone()
        geometry = (layout.page_tokens, layout.ring_slots, layout.chunk, layout.window)
        offsets = layout.offset_tensor(torch.device("cpu"))
        tables = (self.rows, self.due, offsets, self.tier_heads)
        fallback.seal(expected, *tables, *geometry, sink, scores, values=values)
        pool = self.pool.cuda()
        on_gpu = None if scores is None else scores.cuda()
        tables = (self.rows.cuda(), self.due.cuda(), self.tier_heads.cuda())
        ragged_seal(pool, *tables, layout, sink, on_gpu, values=values)
        return expected.view(torch.int16), pool.cpu().view(torch.int16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("values", [False, True])
def test_it_keeps_the_tokens_that_the_reference_keeps(
    values: bool, head_size: int, dtype: torch.dtype
) -> None:
    layout = RaggedLayout(16, 42, 512, 128, (16, 512, 128, 336), head_size)
    expected, sealed = Case(layout, [0, 3, 1], 3, dtype).both(sink=4, values=values)
    assert torch.equal(expected, sealed)


@pytest.mark.parametrize(
    ("page", "chunk", "keep"), [(16, 16, (16,)), (32, 96, (32, 64)), (128, 1024, (128, 896))]
)
def test_pages_and_chunks(page: int, chunk: int, keep: tuple[int, ...]) -> None:
    layout = RaggedLayout(page, -(-(chunk + 40) // page) + 1, chunk, 40, keep, 64)
    case = Case(layout, [0, 2], 2, torch.bfloat16)
    for values in (False, True):
        expected, sealed = case.both(sink=20, values=values)
        assert torch.equal(expected, sealed)


def test_given_scores_and_ties() -> None:
    layout = RaggedLayout(16, 42, 512, 128, (16, 128), 64)
    case = Case(layout, [0, 1], 3, torch.bfloat16)
    scores = torch.randint(0, 6, (2, 2, 3, 512)).float() - 3.0
    scores[scores == 0] = -0.0
    scores[0, 0, 0, 3::7] = 0.0
    scores[1, 1, 1, 100] = float("inf")
    scores[1, 0, 2, 200] = float("-inf")
    expected, sealed = case.both(sink=4, scores=scores)
    assert torch.equal(expected, sealed)


@pytest.mark.parametrize("sink", [0, 1, 300, 700])
def test_sinks_reach_over_chunks(sink: int) -> None:
    layout = RaggedLayout(16, 42, 512, 128, (48, 320), 64)
    expected, sealed = Case(layout, [0, 1, 2], 1, torch.float16).both(sink=sink, values=sink > 1)
    assert torch.equal(expected, sealed)


def test_rows_that_do_not_fit_are_left_alone() -> None:
    layout = RaggedLayout(16, 42, 512, 128, (48, 320), 64)
    case = Case(layout, [0, 1], 1, torch.float16)
    rows = case.rows.cuda()
    rows[0, :] = 2**30
    due = torch.tensor([[0, 0], [1, 7], [5, 0], [-1, 0]], dtype=torch.int32, device="cuda")
    pool = case.pool.cuda()
    ragged_seal(pool, rows, due, case.tier_heads.cuda(), layout, 4)
    assert torch.equal(pool.cpu().view(torch.int16), case.pool.view(torch.int16))


def test_nothing_due() -> None:
    layout = RaggedLayout(16, 42, 512, 128, (48,), 64)
    case = Case(layout, [0], 1, torch.float16)
    pool, due = case.pool.cuda(), torch.empty((0, 2), dtype=torch.int32, device="cuda")
    ragged_seal(pool, case.rows.cuda(), due, case.tier_heads.cuda(), layout, 4)
    assert torch.equal(pool.cpu().view(torch.int16), case.pool.view(torch.int16))
