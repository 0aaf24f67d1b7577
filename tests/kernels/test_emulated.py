"""The CUDA kernels without tensor cores beside their references, on a CPU: see ``emulated``."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from kernels import RaggedLayout, ragged_append, ragged_seal, wide
from tests.kernels.emulated import ORDERS, emulated, library
from tests.kernels.ragged_batch import Batch, Sizes
from tests.kernels.seal_case import Case
from tests.kernels.test_cuda_wide import STEPS, Staged
from tests.kernels.test_ragged_append import expected_pool
from tests.kernels.wide_batch import Batch as WideBatch
from tests.kernels.wide_batch import layout_of, room_behind

BF16, FP16 = torch.bfloat16, torch.float16
ORDER = pytest.mark.parametrize("order", ORDERS)
BY = pytest.mark.parametrize("by", ["keys", "values", "asked"])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


def check(
    folder: Path,
    case: Case,
    sink: int,
    *,
    by: str = "keys",
    scores: torch.Tensor | None = None,
    order: str = "forward",
) -> None:
    """All bytes of all pages are what the reference makes of them, also those of free pages."""
    values, asked = by != "keys", case.asked if by == "asked" else None
    expected, pool = case.sealed(sink, scores, values, asked), case.pool.clone()
    with emulated(folder, order) as called:
        tables = (case.rows, case.due, case.tier_heads)
        ragged_seal(pool, *tables, case.layout, sink, scores, values=values, asked=asked)
    assert called == ["seal"]
    assert torch.equal(bits(pool), bits(expected))
    assert not torch.equal(bits(pool), bits(case.pool))


@ORDER
@BY
def test_sealing_in_every_order_of_threads(folder: Path, by: str, order: str) -> None:
    layout = RaggedLayout(16, 20, 256, 16, (16, 96, 256), 64)
    check(folder, Case(layout, [0, 2], 2, BF16), 4, by=by, order=order)


@BY
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("head_size", [32, 64, 96, 128, 256])
def test_sealing_head_sizes(folder: Path, head_size: int, dtype: torch.dtype, by: str) -> None:
    layout = RaggedLayout(16, 20, 256, 16, (16, 96), head_size)
    check(folder, Case(layout, [0, 3], 2, dtype), 4, by=by)


@BY
@pytest.mark.parametrize(
    ("page", "chunk", "keep"),
    [(16, 16, (16,)), (32, 96, (32, 64)), (48, 240, (48,)), (128, 1024, (128, 896))],
)
def test_sealing_pages_and_chunks(
    folder: Path, page: int, chunk: int, keep: tuple[int, ...], by: str
) -> None:
    layout = RaggedLayout(page, -(-(chunk + 40) // page) + 1, chunk, 40, keep, 64)
    check(folder, Case(layout, [0, 2], 2, BF16), 20, by=by)


@BY
@pytest.mark.parametrize("sink", [0, 1, 300, 700])
def test_sinks_reach_over_chunks(folder: Path, sink: int, by: str) -> None:
    layout = RaggedLayout(16, 34, 512, 16, (48, 320), 64)
    check(folder, Case(layout, [0, 1], 1, FP16), sink, by=by)


@ORDER
def test_given_scores_and_ties(folder: Path, order: str) -> None:
    layout = RaggedLayout(16, 42, 512, 128, (16, 128), 64)
    scores = torch.randint(0, 6, (2, 2, 3, 512)).float() - 3.0
    scores[scores == 0] = -0.0
    scores[0, 0, 0, 3::7] = 0.0
    scores[1, 1, 1, 100] = float("inf")
    scores[1, 0, 2, 200] = float("-inf")
    check(folder, Case(layout, [0, 1], 3, BF16), 4, scores=scores, order=order)


@ORDER
def test_equal_tokens_are_decided_alike_in_all_orders(folder: Path, order: str) -> None:
    """Keys, values and products that are equal to the bit: the earlier token is kept."""
    layout = RaggedLayout(16, 10, 128, 16, (32, 64), 64)
    case = Case(layout, [0], 2, BF16)
    ring = case.rows[0, : layout.ring_pages].long()
    case.pool[ring] = case.pool[ring[:1]][:, :, :1].expand_as(case.pool[ring]).clone()
    check(folder, case, 4, by="asked", order=order)


def test_rows_that_do_not_fit_are_left_alone(folder: Path) -> None:
    layout = RaggedLayout(16, 42, 512, 128, (48, 320), 64)
    case = Case(layout, [0, 1], 1, FP16)
    rows, pool = case.rows.clone(), case.pool.clone()
    rows[0, :] = 2**30
    due = torch.tensor([[0, 0], [1, 7], [5, 0], [-1, 0]], dtype=torch.int32)
    with emulated(folder):
        ragged_seal(pool, rows, due, case.tier_heads, layout, 4)
    assert torch.equal(bits(pool), bits(case.pool))


@ORDER
@pytest.mark.parametrize(
    ("steps", "dtype", "padding"), [(([70, 40, 0, 97], [30, 40, 0, 1]), BF16, 24), (([130], [30]), FP16, 0)]
)
def test_appending(
    folder: Path, steps: tuple[list[int], list[int]], dtype: torch.dtype, padding: int, order: str
) -> None:
    batch = Batch(Sizes(dtype=dtype, head_size=64, page_padding=padding), *steps)
    wanted = expected_pool(batch)
    key, value = batch.step(batch.keys), batch.step(batch.values)
    with emulated(folder, order) as called:
        ragged_append(key, value, batch.pool, *batch.tables, batch.sizes.layout)
    assert called == ["append"]
    assert torch.equal(bits(batch.pool), bits(wanted))


def test_an_append_of_odd_words(folder: Path) -> None:
    """Keys and values that are not aligned to what a copy takes at once."""
    batch = Batch(Sizes(head_size=64), [100, 70], [1, 9])
    wanted = expected_pool(batch)
    key, value = (
        torch.nn.functional.pad(batch.step(parts), (1, 0))[:, :, 1:] for parts in (batch.keys, batch.values)
    )
    with emulated(folder):
        ragged_append(key, value, batch.pool, *batch.tables, batch.sizes.layout)
    assert torch.equal(bits(batch.pool), bits(wanted))


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide, "new_room", room_behind)


@ORDER
@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize(
    ("head_size", "group", "dtype", "padding"), [(64, 1, FP16, 72), (96, 3, BF16, 0), (128, 4, BF16, 8)]
)
def test_a_wide_step(
    folder: Path, head_size: int, group: int, dtype: torch.dtype, padding: int, asked: bool, order: str
) -> None:
    """Staged from rings and from new tokens, sealed from there, packed and unpacked."""
    layout = layout_of(head_size, 16, 32, 8)
    batch = WideBatch(layout, STEPS, dtype=dtype, group=group, padding=padding)
    expected = Staged(batch, "cpu", asked)
    with emulated(folder, order) as called:
        got = Staged(batch, "cpu", asked)
    assert called == ["stage", "seal", "unpack"]
    batch.check_alike(got.pool, expected.pool)
    assert torch.equal(got.packed, expected.packed)
    assert torch.equal(got.used, expected.used)
    assert torch.equal(got.out.nan_to_num(), expected.out.nan_to_num())
    for one, other in zip(got.histories(), expected.histories(), strict=True):
        assert not one.isnan().any()
        assert torch.equal(one, other)


@pytest.mark.parametrize("whole", [True, False])
def test_a_missing_barrier_shows(folder: Path, whole: bool) -> None:
    """As a result that depends on the order of threads; with the barrier it does not."""
    results = []
    for order in range(len(ORDERS)):
        numbers = torch.zeros(64, dtype=torch.int32)
        at = ctypes.c_void_p(numbers.data_ptr())
        assert library(folder).emulated_planted(at, 0 if whole else 1, order) == 0
        results.append(numbers.tolist())
    assert (results[0] == results[1] == results[2]) == whole
    assert not whole or results[0] == list(range(63, -1, -1))


@pytest.mark.parametrize("order", range(len(ORDERS)))
def test_a_barrier_that_not_all_threads_reach_is_found(folder: Path, order: int) -> None:
    numbers = torch.zeros(64, dtype=torch.int32)
    assert library(folder).emulated_planted(ctypes.c_void_p(numbers.data_ptr()), 2, order) == 1
