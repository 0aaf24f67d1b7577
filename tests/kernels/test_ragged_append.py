from __future__ import annotations

import pytest
import torch

from kernels import ragged_append
from tests.kernels.ragged_batch import Batch, Sizes

CASES = {
    "plain": (Sizes(), [70, 40, 0, 97], [30, 40, 0, 1]),
    "ring wraps": (Sizes(spare_slots=0), [64 * 9 + 90, 64 * 5 + 33], [50, 1]),
    "wide pages, padded": (Sizes(page=32, keep=(64, 32, 32), page_padding=24), [200, 33], [9, 33]),
    "float32": (Sizes(dtype=torch.float32, head_size=80), [130], [30]),
    "float16": (Sizes(dtype=torch.float16, head_size=256), [130], [30]),
    "many": (Sizes(chunk=512, window=128, keep=(512, 128)), [640, 640, 5], [600, 640, 5]),
}


def expected_pool(batch: Batch) -> torch.Tensor:
    """The pool's bits once the step's tokens lie where the rules put them."""
    before = batch.pool.clone()
    for request, (n, count) in enumerate(zip(batch.lengths, batch.steps, strict=True)):
        for position in range(n - count, n):
            for head in range(batch.sizes.kv_heads):
                both = (batch.keys[request][position, head], batch.values[request][position, head])
                batch.slot_raw(request, head, position).copy_(torch.cat(both))
    after = batch.pool.clone()
    batch.pool.copy_(before)
    return after


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


@pytest.mark.parametrize("case", CASES)
def test_new_tokens_go_to_their_slots_and_nothing_else_changes(case: str, implementation: str) -> None:
    batch = Batch(*CASES[case])
    wanted = expected_pool(batch)
    key, value = batch.step(batch.keys), batch.step(batch.values)
    ragged_append(key, value, batch.pool, *batch.tables, batch.sizes.layout)
    assert torch.equal(bits(batch.pool), bits(wanted))


def test_strided_inputs_and_padding_rows(implementation: str) -> None:
    batch = Batch(*CASES["plain"])
    wanted = expected_pool(batch)
    key, value = batch.step(batch.keys), batch.step(batch.values)
    tokens, heads, size = key.shape
    packed = torch.full((tokens + 3, 5, heads, size), float("nan"), dtype=key.dtype)
    packed[:tokens, 1], packed[:tokens, 4] = key, value
    ragged_append(packed[:, 1], packed[:, 4], batch.pool, *batch.tables, batch.sizes.layout)
    assert torch.equal(bits(batch.pool), bits(wanted))


def test_an_empty_batch_writes_nothing(implementation: str) -> None:
    batch = Batch(Sizes(), [20, 0], [0, 0])
    before = batch.pool.clone()
    empty = batch.keys[0][:0]
    ragged_append(empty, empty, batch.pool, *batch.tables, batch.sizes.layout)
    assert torch.equal(bits(batch.pool), bits(before))
