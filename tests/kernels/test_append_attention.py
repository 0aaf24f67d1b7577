"""The operator that writes a step's tokens and attends, and which launches a GPU makes of it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from kernels import KernelConfigError, ragged_append, ragged_append_attention, ragged_attention
from kernels.choice import DECODE_LAUNCH, DECODE_LAUNCHES, decode_launch
from kernels.cuda import dispatch
from tests.kernels.ragged_batch import Batch, Sizes


def step_of(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The step's queries, keys and values."""
    query, key, value = (batch.step(parts) for parts in (batch.queries, batch.keys, batch.values))
    return query, key, value


@pytest.mark.parametrize("steps", [[1, 1, 1, 0], [30, 1, 5, 0]])
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_it_is_append_and_attention(soft_cap: float, steps: list[int], implementation: str) -> None:
    """Bit for bit, in a pool whose other slots are poisoned."""
    sinks = None if soft_cap else tuple(float(head) for head in range(9))
    lengths = [64 * 2 + 90, 17, 33, 0]
    one, two = (Batch(Sizes(head_size=32, soft_cap=soft_cap, sinks=sinks), lengths, steps) for _ in range(2))
    layout, (query, key, value) = one.sizes.layout, step_of(one)
    got, wanted = torch.full_like(query, float("nan")), torch.full_like(query, float("nan"))
    hints = {"max_query": max(steps), "singles": True}
    given = (*one.tables, layout, one.scale)
    ragged_append_attention(got, query, key, value, one.pool, *given, **one.scoring, **hints)
    ragged_append(key, value, two.pool, *two.tables, layout)
    ragged_attention(wanted, query, two.pool, *given, **one.scoring, **hints)
    assert bool(got.isfinite().all())
    assert torch.equal(got, wanted)
    assert torch.equal(one.pool.view(torch.int16), two.pool.view(torch.int16))


def test_it_takes_views_of_a_fused_projection(implementation: str) -> None:
    batch = Batch(Sizes(head_size=32), [70, 1, 40], [1, 1, 1])
    query, key, value = step_of(batch)
    packed = torch.cat((query, key, value), dim=1)
    parts = packed.split([query.shape[1], key.shape[1], value.shape[1]], dim=1)
    out = torch.full_like(query, float("nan"))
    given = (batch.pool, *batch.tables, batch.sizes.layout, batch.scale)
    ragged_append_attention(out, *parts, *given, max_query=1)
    torch.testing.assert_close(out.double(), batch.expected(), rtol=8e-3, atol=8e-3)


@pytest.mark.parametrize(
    ("message", "cut"),
    [
        ("^key: 2 tokens, but query has 3", lambda q, k, v: (q, k[:2], v[:2])),
        ("^value: 2 tokens, but key has 3", lambda q, k, v: (q, k, v[:2])),
        ("^key: expected .tokens, 3, 32.", lambda q, k, v: (q, k[:, :2], v)),
        ("^query: 8 heads are not a multiple of the 3", lambda q, k, v: (q[:, :8], k, v)),
    ],
)
def test_it_refuses(message: str, cut: Any, implementation: str) -> None:
    batch = Batch(Sizes(head_size=32), [70, 1, 40], [1, 1, 1])
    query, key, value = cut(*step_of(batch))
    out, given = torch.empty_like(query), (*batch.tables, batch.sizes.layout, batch.scale)
    before = batch.pool.clone()
    with pytest.raises(ValueError, match=message):
        ragged_append_attention(out, query, key, value, batch.pool, *given)
    assert torch.equal(batch.pool.view(torch.int16), before.view(torch.int16))


def test_it_is_registered_with_torch() -> None:
    batch = Batch(Sizes(head_size=32), [70, 20], [3, 1])
    layout, (query, key, value) = batch.sizes.layout, step_of(batch)
    sizes = (layout.page_tokens, layout.ring_slots, layout.chunk, layout.window)
    pool = torch.zeros_like(batch.pool)  # the check compares memory, and NaN equals nothing
    given = (torch.zeros_like(query), query, key, value, pool, *batch.tables)
    arguments = (*given, layout.offset_tensor(pool.device), *sizes, 0.125)
    checks = ("test_schema", "test_faketensor")
    for hints in ((), (None, 5.0, 0, True)):
        operator = torch.ops.tangram.ragged_append_attention.default
        torch.library.opcheck(operator, (*arguments, *hints), test_utils=checks)


class Launches:
    """Stands in for the compiled library and remembers what was launched."""

    def __init__(self) -> None:
        self.made: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def launch(*arguments: Any) -> None:
            self.made.append((name, arguments))

        return launch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    made = Launches()
    monkeypatch.setattr(dispatch, "native", lambda *_: made)
    monkeypatch.setattr(dispatch, "launch", functools.partial(decode_launch))
    monkeypatch.delenv("TANGRAM_DECODE_LAUNCH", raising=False)
    return made


def run(batch: Batch, *scoring: Any, odd: int | None = None) -> None:
    """Call the GPU's side of the operator with what torch's dispatcher would pass."""
    layout, parts = batch.sizes.layout, list(step_of(batch))
    if odd is not None:  # a place that copies of 16 bytes cannot read
        parts[odd] = torch.nn.functional.pad(parts[odd], (1, 0))[:, :, 1:]
    sizes = (layout.page_tokens, layout.ring_slots, layout.chunk, layout.window)
    given = (batch.pool, *batch.tables, layout.offset_tensor(batch.pool.device), *sizes)
    dispatch.append_attention(torch.empty_like(parts[0]), *parts, *given, *scoring)


@pytest.mark.parametrize("name", DECODE_LAUNCHES)
def test_one_launch_decodes_unless_told_otherwise(
    name: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANGRAM_DECODE_LAUNCH", name)
    run(Batch(Sizes(), [70, 20], [1, 1]), 0.125, None, 5.0, 1)
    if name == "separate":
        assert [kind for kind, _ in launches.made] == ["append", "attention"]
    else:
        ((kind, arguments),) = launches.made
        assert kind == "decode"
        assert arguments[-2:] == ((0.125, None, 5.0), name)


@pytest.mark.parametrize(
    ("sizes", "steps", "scoring", "odd"),
    [
        (Sizes(), [1, 1], (0.125,), None),  # nothing is known of the step
        (Sizes(), [3, 1], (0.125, None, 0.0, 3), None),
        (Sizes(), [1, 1], (0.125, None, 0.0, 1), 1),
        (Sizes(), [1, 1], (0.125, None, 0.0, 1), 2),
        (Sizes(group=17), [1, 1], (0.125, None, 0.0, 1), None),
    ],
)
def test_two_launches_where_one_cannot(
    sizes: Sizes, steps: list[int], scoring: tuple[Any, ...], odd: int | None, launches: Launches
) -> None:
    run(Batch(sizes, [70, 20], steps), *scoring, odd=odd)
    assert [kind for kind, _ in launches.made] == ["append", "attention"]


def test_how_decode_steps_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANGRAM_DECODE_LAUNCH", raising=False)
    assert decode_launch() == DECODE_LAUNCH
    monkeypatch.setenv("TANGRAM_DECODE_LAUNCH", " Early ")
    assert decode_launch() == "early"
    monkeypatch.setenv("TANGRAM_DECODE_LAUNCH", "fast")
    message = "TANGRAM_DECODE_LAUNCH: 'fast' is not one of separate, fused, dependent, early"
    with pytest.raises(KernelConfigError, match=message):
        decode_launch()
