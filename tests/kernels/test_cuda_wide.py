"""What a wide step hands to a dense attention kernel, on a GPU: the kernels beside their references."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels import ragged_seal, wide
from kernels.cuda import dispatch
from kernels.wide import Sequences, WidePlan
from tests.kernels.wide_batch import POISON, Batch, layout_of, room_behind

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STEPS = [(0, 200), (7, 120), (73, 1), (0, 12), (40, 90), (72, 40), (39, 2), (104, 65)]


@pytest.fixture(autouse=True)
def native_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Insist on the compiled kernels."""
    monkeypatch.setenv("TANGRAM_KERNELS", "native")
    monkeypatch.setattr(wide, "new_room", room_behind)
    dispatch.native.cache_clear()
    yield
    dispatch.native.cache_clear()


class Staged:
    """A batch on one device, staged and sealed; ``asked``: by all three orders."""

    def __init__(self, batch: Batch, device: str, asked: bool = False) -> None:
        self.batch, where = batch, torch.device(device)
        pool = batch.pool_copy(device)
        self.plan = WidePlan.make(batch.layout, batch.key.shape[1], batch.wide(), where)
        sequences = Sequences(pool, batch.layout, batch.query.shape[1], batch.key.shape[1], self.plan.pages)
        sequences.staged.fill_(POISON)
        tensors = (batch.query, batch.key, batch.value, batch.rows, *batch.heads)
        query, key, value, rows, tier, member = (tensor.to(where) for tensor in tensors)
        self.packed, self.table, self.used = sequences.stage(query, key, value, rows, tier, member, self.plan)
        none = torch.zeros(batch.layout.tiers, dtype=torch.int32, device=where)
        staged = (sequences.staged, self.plan.origin)
        layout, sink = batch.layout, batch.sink
        wanted = None
        if asked:
            shape = (len(self.plan.due), batch.key.shape[1], layout.head_size)
            wanted = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(where)
        orders = {"heads": (tier, member), "staged": staged, "values": asked, "asked": wanted}
        ragged_seal(pool, rows, self.plan.due, none, layout, sink, **orders)
        self.pool, self.sequences = pool, sequences
        self.out = torch.full_like(query, POISON)
        sequences.unpack(self.out, self.packed, self.plan)

    def histories(self) -> list[torch.Tensor]:
        """What each sequence's table names, as far as it is used: ``[tokens, 2 * D]``."""
        keys, _ = self.sequences.pages_view()
        units, size, head = keys.shape[0], keys.shape[1], keys.shape[3]
        pool, staged = self.pool.cpu(), self.sequences.staged.cpu().reshape(-1, size, 2 * head)
        apart, found = size * 2 * head // self.sequences.unit, []
        for used, table in zip(self.used.tolist(), self.table.tolist(), strict=True):
            pages = []
            for number in table[: -(-used // size)]:
                if 0 <= number < units:
                    page, rest = divmod(number * self.sequences.unit, self.pool.stride(0))
                    pages.append(pool[page, rest // self.pool.stride(1)])
                else:
                    pages.append(staged[(number - self.sequences.staged_at) // apart])
            found.append(torch.cat(pages)[:used])
        return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("head_size", "page", "group"), [(64, 16, 1), (96, 16, 3), (128, 16, 4), (128, 32, 8), (256, 64, 16)]
)
@pytest.mark.parametrize("padding", [0, 8, 72])
def test_staged_pages_tables_and_packed_queries_are_the_references(
    dtype: torch.dtype, head_size: int, page: int, group: int, padding: int
) -> None:
    """To the bit, but for the tables' numbers, which say where things lie: what they name is the same."""
    chunk = 2 * page
    layout = layout_of(head_size, page, chunk, page // 2)
    steps = [(a * chunk // 32, max(1, b * chunk // 32)) for a, b in STEPS]
    batch = Batch(layout, steps, dtype=dtype, group=group, padding=padding)
    asked = padding == 8
    expected, got = Staged(batch, "cpu", asked), Staged(batch, "cuda", asked)
    batch.check_alike(got.pool.cpu(), expected.pool)
    assert torch.equal(got.packed.cpu(), expected.packed)
    assert torch.equal(got.used.cpu(), expected.used)
    assert torch.equal(got.out.cpu().nan_to_num(), expected.out.nan_to_num())
    assert torch.equal(got.out.isnan().cpu(), expected.out.isnan()), "others' outputs are not touched"
    for one, other in zip(got.histories(), expected.histories(), strict=True):
        assert not one.isnan().any()
        assert torch.equal(one, other)
