from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from kernels import RaggedLayout, ragged_append, ragged_attention
from tests.kernels.ragged_batch import Batch, Sizes


@dataclass(frozen=True)
class Call:
    """Arguments of both operators for one small batch."""

    key: torch.Tensor
    value: torch.Tensor
    query: torch.Tensor
    out: torch.Tensor
    pool: torch.Tensor
    rows: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    head_tier: torch.Tensor
    head_member: torch.Tensor
    layout: RaggedLayout
    sinks: torch.Tensor | None = None
    soft_cap: float = 0.0

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        return self.rows, self.query_start_loc, self.seq_lens, self.head_tier, self.head_member

    def append(self) -> None:
        ragged_append(self.key, self.value, self.pool, *self.tables, self.layout)

    def attend(self) -> None:
        scoring = (0.125, self.sinks, self.soft_cap)
        ragged_attention(self.out, self.query, self.pool, *self.tables, self.layout, *scoring)


def call() -> Call:
    batch = Batch(Sizes(head_size=32), [150, 20], [3, 1])
    key, value, query = (batch.step(parts) for parts in (batch.keys, batch.values, batch.queries))
    good = Call(key, value, query, torch.empty_like(query), batch.pool, *batch.tables, batch.sizes.layout)
    good.append()
    return good


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


Change = Callable[[Call], Call]

BOTH: dict[str, tuple[type[Exception], str, Change]] = {
    "pool shape": (ValueError, "^pool: expected", lambda c: replace(c, pool=c.pool[..., :30])),
    "pool strides": (ValueError, "^pool: only the page", lambda c: replace(c, pool=c.pool[:, ::2])),
    "pool type": (TypeError, "^pool: torch.float64", lambda c: replace(c, pool=c.pool.double())),
    "rows type": (TypeError, "^rows: must be int32", lambda c: replace(c, rows=c.rows.long())),
    "rows shape": (ValueError, "^rows: must have 2", lambda c: replace(c, rows=c.rows[0])),
    "rows strides": (ValueError, "^rows: the last", lambda c: replace(c, rows=c.rows[:, ::2])),
    "lengths": (ValueError, "^seq_lens: 1 lengths for 2", lambda c: replace(c, seq_lens=ints(150))),
    "bounds": (ValueError, "^query_start_loc: 2", lambda c: replace(c, query_start_loc=ints(0, 3))),
    "heads": (ValueError, "^head_member: 2 heads", lambda c: replace(c, head_member=ints(0, 1))),
    "bounds decrease": (
        ValueError,
        "^query_start_loc: .* request 1",
        lambda c: replace(c, query_start_loc=ints(0, 3, 2)),
    ),
    "bounds pass": (
        ValueError,
        "^query_start_loc: .* request 1",
        lambda c: replace(c, query_start_loc=ints(0, 3, 5)),
    ),
    "bounds negative": (
        ValueError,
        "^query_start_loc: .* request 0",
        lambda c: replace(c, query_start_loc=ints(-1, 3, 4)),
    ),
    "short": (ValueError, "^seq_lens: request 0 is shorter", lambda c: replace(c, seq_lens=ints(2, 20))),
    "boundary": (ValueError, "^seq_lens: .* request 0 crosses", lambda c: replace(c, seq_lens=ints(162, 20))),
    "width": (ValueError, "^rows: the row of request 0 ends", lambda c: replace(c, rows=c.rows[:, :17])),
    "page": (
        ValueError,
        "^rows: request 1 names a page",
        lambda c: replace(c, rows=c.rows + ints(0, 10**6)[:, None]),
    ),
    "page negative": (
        ValueError,
        "^rows: request 1 names a page",
        lambda c: replace(c, rows=c.rows - ints(0, 10**6)[:, None]),
    ),
    "tier": (ValueError, "^head_tier, head_member: head 1", lambda c: replace(c, head_tier=ints(0, 2, 0))),
    "member": (
        ValueError,
        "^head_tier, head_member: head 2",
        lambda c: replace(c, head_member=ints(0, 1, -1)),
    ),
}


@pytest.mark.parametrize("case", BOTH)
def test_both_operators_refuse(case: str, implementation: str) -> None:
    error, message, change = BOTH[case]
    bad = change(call())
    with pytest.raises(error, match=message):
        bad.append()
    with pytest.raises(error, match=message):
        bad.attend()


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "^key: expected", lambda c: replace(c, key=c.key[:, :2])),
        (ValueError, "^value: expected", lambda c: replace(c, value=c.value[..., :16])),
        (ValueError, "^value: 3 tokens", lambda c: replace(c, value=c.value[:3])),
        (ValueError, "^key: the elements", lambda c: replace(c, key=c.key.mT.contiguous().mT)),
        (TypeError, "^value: torch.float32 differs", lambda c: replace(c, value=c.value.float())),
    ],
)
def test_append_refuses(error: type[Exception], message: str, change: Change) -> None:
    with pytest.raises(error, match=message):
        change(call()).append()


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "^query: 8 heads", lambda c: replace(c, query=c.query[:, :8], out=c.out[:, :8])),
        (ValueError, "^out: expected", lambda c: replace(c, out=c.out[:, :8])),
        (ValueError, "^out: 3 tokens", lambda c: replace(c, out=c.out[:3])),
        (TypeError, "^query: torch.float16 differs", lambda c: replace(c, query=c.query.half())),
        (ValueError, "^sinks: expected .9.", lambda c: replace(c, sinks=torch.zeros(3))),
        (TypeError, "^sinks: must be float32", lambda c: replace(c, sinks=torch.zeros(9).half())),
        (ValueError, "^soft_cap: must be 0", lambda c: replace(c, soft_cap=-1.0)),
    ],
)
def test_attention_refuses(error: type[Exception], message: str, change: Change) -> None:
    with pytest.raises(error, match=message):
        change(call()).attend()


def test_the_operators_are_registered_with_torch() -> None:
    c = call()
    offsets = c.layout.offset_tensor(c.pool.device)
    sizes = (c.layout.page_tokens, c.layout.ring_slots, c.layout.chunk, c.layout.window)
    checks = ("test_schema", "test_faketensor")
    pool = torch.zeros_like(c.pool)  # the check compares memory, and NaN equals nothing
    append = (c.key, c.value, pool, *c.tables, offsets, *sizes)
    torch.library.opcheck(torch.ops.tangram.ragged_append.default, append, test_utils=checks)
    attention = (torch.zeros_like(c.out), c.query, pool, *c.tables, offsets, *sizes, 0.125)
    for scoring in ((), (torch.zeros(c.query.shape[1]), 5.0)):
        arguments = (*attention, *scoring)
        torch.library.opcheck(torch.ops.tangram.ragged_attention.default, arguments, test_utils=checks)
