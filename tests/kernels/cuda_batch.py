"""Batches on a GPU: those of ``ragged_batch``, and large ones answered by the float32 reference."""

from __future__ import annotations

from typing import Any

import torch

from kernels import RaggedLayout, fallback, ragged_append, ragged_append_attention, ragged_attention
from tests.kernels.ragged_batch import Batch

# Weights are rounded to the elements' type before they meet the values, as in every such kernel.
LARGEST = {torch.bfloat16: 8e-3, torch.float16: 1.2e-3}
OVERALL = {torch.bfloat16: 4e-3, torch.float16: 6e-4}

POISON = float("nan")

BEYOND = (
    2**31 + 2**20
)  # where the indices of 32 bits, and with two bytes an element their offsets, have ended


def to_gpu(tensor: torch.Tensor, device: str = "cuda") -> torch.Tensor:
    """A copy on the GPU with the same strides; or on another device."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return copy.copy_(tensor)


def stretched(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """A copy on the GPU, of which the later half along ``dim`` lies beyond the element ``BEYOND``."""
    strides = list(tensor.contiguous().stride())
    strides[dim] = -(-BEYOND // (tensor.shape[dim] // 2) // 64) * 64
    storage = torch.empty(
        strides[dim] * (tensor.shape[dim] - 1) + tensor.numel(), dtype=tensor.dtype, device="cuda"
    )
    return storage.as_strided(tensor.shape, strides).copy_(tensor)


class FarPool:
    """The pages of a small pool at both ends of one on the GPU that reaches beyond ``BEYOND`` elements.

    Every other page lies at the far end. All pages between them are poisoned, and so is the padding that each
    page has behind it.
    """

    def __init__(self, pool: torch.Tensor, padding: int = 64) -> None:
        self.pages, content = len(pool), pool[0].numel()
        stride = content + padding
        total = -(-BEYOND // stride) + self.pages
        self.storage = torch.full((total, stride), POISON, dtype=pool.dtype, device="cuda")
        self.pool = self.storage[:, :content].unflatten(1, pool.shape[1:])
        self.place = torch.arange(self.pages)
        self.place[1::2] += total - self.pages
        for page, place in enumerate(self.place.tolist()):
            self.pool[place].copy_(pool[page])

    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The page ids of rows that name pages of the small pool."""
        return self.place[rows.long()].to(torch.int32).cuda()

    def content(self) -> torch.Tensor:
        """What the small pool's pages hold now, on the CPU."""
        return torch.stack([self.pool[place].cpu() for place in self.place.tolist()])

    def poisoned(self) -> bool:
        """Whether all else is still poison. The pages themselves are given up for that."""
        for place in self.place.tolist():
            self.pool[place].fill_(POISON)
        return all(bool(part.isnan().all()) for part in self.storage.split(2048))


def check(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare with the exact answer: each element, and all of them together."""
    out, expected = out.double().cpu(), expected.double().cpu()
    torch.testing.assert_close(out, expected, rtol=LARGEST[dtype], atol=LARGEST[dtype])
    assert float((out - expected).norm()) <= OVERALL[dtype] * float(expected.norm())


def attend(batch: Batch, max_query: int = 0, device: str = "cuda") -> torch.Tensor:
    """Append the step on the GPU, attend it and check it against the brute-force answer."""
    layout, pool = batch.sizes.layout, to_gpu(batch.pool, device)
    tables = [to_gpu(table, device) for table in batch.tables]
    key, value, query = (
        to_gpu(batch.step(parts), device) for parts in (batch.keys, batch.values, batch.queries)
    )
    ragged_append(key, value, pool, *tables, layout)
    out = torch.full_like(query, POISON)
    scoring: dict[str, Any] = dict(batch.scoring)
    if scoring["sinks"] is not None:
        scoring["sinks"] = scoring["sinks"].to(device)
    ragged_attention(out, query, pool, *tables, layout, batch.scale, **scoring, max_query=max_query)
    check(out, batch.expected(), batch.sizes.dtype)
    return out


def decode(
    batch: Batch,
    given: tuple[torch.Tensor, ...] | None = None,
    max_query: int = 1,
    device: str = "cuda",
) -> torch.Tensor:
    """Append and attend the step on the GPU in one call, and check its output and every bit of the pool.

    Args:
        given: the step's queries, keys and values, where they are not to be packed.
    """
    layout, pool = batch.sizes.layout, to_gpu(batch.pool, device)
    tables = [to_gpu(table, device) for table in batch.tables]
    parts = [batch.step(of) for of in (batch.queries, batch.keys, batch.values)]
    query, key, value = given or tuple(to_gpu(part, device) for part in parts)
    scoring: dict[str, Any] = dict(batch.scoring)
    if scoring["sinks"] is not None:
        scoring["sinks"] = scoring["sinks"].to(device)
    out = torch.full(query.shape, POISON, dtype=query.dtype, device=device)
    how = {**scoring, "max_query": max_query}
    ragged_append_attention(out, query, key, value, pool, *tables, layout, batch.scale, **how)
    check(out, batch.expected(), batch.sizes.dtype)
    expected, offsets = to_gpu(batch.pool, device), layout.offset_tensor(batch.pool.device)
    geometry = (layout.page_tokens, layout.ring_slots, layout.chunk, layout.window)
    fallback.append(*parts[1:], batch.pool, *batch.tables, offsets, *geometry)
    expected.copy_(batch.pool)
    assert torch.equal(pool.view(torch.int16), expected.view(torch.int16))
    return out


class Large:
    """Requests whose pages hold random numbers throughout, too many for brute force.

    The pool's first page, which no request owns, is poisoned.
    """

    def __init__(
        self,
        layout: RaggedLayout,
        lengths: list[int],
        steps: list[int],
        *,
        kv_heads: int = 8,
        group: int = 4,
        dtype: torch.dtype = torch.bfloat16,
        members: int = 8,
        seed: int = 0,
    ) -> None:
        random = torch.Generator(device="cuda").manual_seed(seed)
        self.layout, self.dtype = layout, dtype
        width = max(layout.width(n) for n in lengths)
        pages = 1 + width * len(lengths)
        order = torch.randperm(pages - 1, generator=random, device="cuda").add(1).to(torch.int32)
        self.rows = order.reshape(len(lengths), width)
        shape = (pages, members, layout.page_tokens, 2 * layout.head_size)
        self.pool = torch.randn(shape, generator=random, device="cuda", dtype=dtype)
        self.pool[0] = POISON
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        starts = torch.tensor([0, *steps]).cumsum(0)
        self.query_start_loc = starts.to(torch.int32).cuda()
        self.tier = (torch.arange(kv_heads, device="cuda") % layout.tiers).to(torch.int32)
        self.member = (torch.arange(kv_heads, device="cuda") % members).to(torch.int32)
        heads = (int(starts[-1]), kv_heads * group, layout.head_size)
        self.query = torch.randn(heads, generator=random, device="cuda", dtype=dtype)

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        return self.rows, self.query_start_loc, self.seq_lens, self.tier, self.member

    def run(self, out: torch.Tensor, max_query: int = 0) -> torch.Tensor:
        scale = self.layout.head_size**-0.5
        ragged_attention(out, self.query, self.pool, *self.tables, self.layout, scale, max_query=max_query)
        return out

    def expected(self) -> torch.Tensor:
        layout, out = self.layout, torch.zeros_like(self.query, dtype=torch.float32)
        geometry = (layout.page_tokens, layout.ring_slots, layout.chunk, layout.window)
        offsets = layout.offset_tensor(self.pool.device)
        fallback.attention(
            out, self.query, self.pool, *self.tables, offsets, *geometry, layout.head_size**-0.5
        )
        return out

    def attend(self) -> torch.Tensor:
        out = self.run(torch.full_like(self.query, POISON))
        check(out, self.expected(), self.dtype)
        return out
