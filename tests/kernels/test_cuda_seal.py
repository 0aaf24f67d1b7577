from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels import RaggedLayout, ragged_seal
from kernels.cuda import dispatch
from tests.kernels.seal_case import Case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def native_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Insist on the compiled kernels."""
    monkeypatch.setenv("TANGRAM_KERNELS", "native")
    dispatch.native.cache_clear()
    yield
    dispatch.native.cache_clear()


def both(
    case: Case,
    sink: int,
    scores: torch.Tensor | None = None,
    values: bool = False,
    asked: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pool sealed by the reference and by the kernel, as bytes."""
    pool = case.pool.cuda()
    on_gpu = [None if given is None else given.cuda() for given in (scores, asked)]
    tables = (case.rows.cuda(), case.due.cuda(), case.tier_heads.cuda())
    ragged_seal(pool, *tables, case.layout, sink, on_gpu[0], values=values, asked=on_gpu[1])
    expected = case.sealed(sink, scores, values, asked)
    return expected.view(torch.int16), pool.cpu().view(torch.int16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("orders", [1, 2, 3])
def test_it_keeps_the_tokens_that_the_reference_keeps(
    orders: int, head_size: int, dtype: torch.dtype
) -> None:
    layout = RaggedLayout(16, 42, 512, 128, (16, 512, 128, 336), head_size)
    case = Case(layout, [0, 3, 1], 3, dtype)
    expected, sealed = both(case, 4, values=orders > 1, asked=case.asked if orders > 2 else None)
    assert torch.equal(expected, sealed)


@pytest.mark.parametrize(
    ("page", "chunk", "keep"), [(16, 16, (16,)), (32, 96, (32, 64)), (128, 1024, (128, 896))]
)
def test_pages_and_chunks(page: int, chunk: int, keep: tuple[int, ...]) -> None:
    layout = RaggedLayout(page, -(-(chunk + 40) // page) + 1, chunk, 40, keep, 64)
    case = Case(layout, [0, 2], 2, torch.bfloat16)
    for values, asked in ((False, None), (True, None), (True, case.asked)):
        expected, sealed = both(case, 20, values=values, asked=asked)
        assert torch.equal(expected, sealed)


def test_given_scores_and_ties() -> None:
    layout = RaggedLayout(16, 42, 512, 128, (16, 128), 64)
    case = Case(layout, [0, 1], 3, torch.bfloat16)
    scores = torch.randint(0, 6, (2, 2, 3, 512)).float() - 3.0
    scores[scores == 0] = -0.0
    scores[0, 0, 0, 3::7] = 0.0
    scores[1, 1, 1, 100] = float("inf")
    scores[1, 0, 2, 200] = float("-inf")
    expected, sealed = both(case, 4, scores)
    assert torch.equal(expected, sealed)


@pytest.mark.parametrize("sink", [0, 1, 300, 700])
def test_sinks_reach_over_chunks(sink: int) -> None:
    layout = RaggedLayout(16, 42, 512, 128, (48, 320), 64)
    case = Case(layout, [0, 1, 2], 1, torch.float16)
    expected, sealed = both(case, sink, values=sink > 1, asked=case.asked if sink > 300 else None)
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
