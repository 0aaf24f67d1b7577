"""Steps that cross seal boundaries: from ragged rows to what a dense attention kernel takes.

Between two boundaries a request's queries, a *segment*, see the same sealed chunks. A segment and a KV head
make one sequence: the kept pages, where they lie in the pool, then the raw ones. A ring is too short for the
raw tokens of such a step, so they are *staged* in a buffer, from the first one that any query sees raw. A
table names both kinds of page by their distance from the pool's start, in units that divide every distance::

    sequence (segment s, KV head h):   [ chunk 0 | chunk 1 | .. | chunk sealed(s) - 1 | raw tokens .. ]
    table[s * Hkv + h]:                  pages of the pool                              staged pages
    queries, packed:                   tokens of s, the query heads of h

A query at the end of the sequence sees all of it, the one before all but the last token: causal attention
with the two ends aligned, which FlashAttention computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch

from kernels import ops as ops  # registers the operators
from kernels.checks import check_pool, check_tokens
from kernels.errors import KernelError
from kernels.layout import RaggedLayout

LARGEST_INDEX = 2**31 - 1

Buffers = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Packed queries, table and used tokens, see :meth:`Sequences.stage`."""


@dataclass(frozen=True)
class WideRequest:
    """A request of the step that crosses a boundary.

    Attributes:
        row: its place in the batch.
        token: the first of its tokens among the step's.
        cached, length: tokens before and after the step.
    """

    row: int
    token: int
    cached: int
    length: int


@dataclass(frozen=True)
class WidePlan:
    """A step's wide requests, the same for all layers.

    Attributes:
        requests: int32 ``[N, 6]``: row, token, cached, length, first staged position, first staged page.
        segments: int32 ``[S, 6]``: row, first token, tokens, sealed chunks, raw tokens, first staged page.
        starts: int32 ``[S * Hkv + 1]``, the first packed row of each sequence.
        due: int32 ``[M, 2]``, row and chunk to be sealed in each layer.
        chunks: the latter on the host.
        origin: int32 ``[M]``, the first staged page of each of these.
        tokens, pages: of the step's wide requests; staged.
        most_tail, most_new: staged pages of one request that its ring holds, and that the step writes.
        most_queries, most_keys: tokens of one sequence.
    """

    layout: RaggedLayout
    kv_heads: int
    requests: torch.Tensor
    segments: torch.Tensor
    starts: torch.Tensor
    due: torch.Tensor
    chunks: tuple[int, ...]
    origin: torch.Tensor
    tokens: int
    pages: int
    most_tail: int
    most_new: int
    most_queries: int
    most_keys: int

    @classmethod
    def make(
        cls, layout: RaggedLayout, kv_heads: int, wide: Sequence[WideRequest], device: torch.device
    ) -> WidePlan:
        """Plan a step on the host; the tables go to the device in one copy that nothing waits for."""
        size, chunk = layout.page_tokens, layout.chunk
        requests, segments, starts, due, origin = [], [], [0], [], []
        pages = tail = new = 0
        for one in wide:
            first = layout.sealed(one.cached) * chunk
            requests += [one.row, one.token, one.cached, one.length, first, pages]
            for begin, end in layout.segments(one.cached, one.length):
                sealed, count = layout.sealed(begin), end - begin
                page = pages + (sealed * chunk - first) // size
                token = one.token + begin - one.cached
                segments += [one.row, token, count, sealed, end - sealed * chunk, page]
                starts += [starts[-1] + count * (head + 1) for head in range(kv_heads)]
                if end < one.length:
                    due += [one.row, sealed]
                    origin.append(page)
            tail = max(tail, -(-one.cached // size) - first // size)
            new = max(new, -(-one.length // size) - one.cached // size)
            pages += -(-(one.length - first) // size)
        parts = [torch.tensor(part, dtype=torch.int32) for part in (requests, segments, starts, due, origin)]
        host = torch.cat(parts)
        host = host.pin_memory() if device.type == "cuda" else host
        sent = host.to(device, non_blocking=True).split([len(part) for part in parts])
        counts, keys = parts[1].view(-1, 6)[:, 2], parts[1].view(-1, 6)[:, 3] * max(layout.keep)
        return cls(
            layout=layout,
            kv_heads=kv_heads,
            requests=sent[0].view(-1, 6),
            segments=sent[1].view(-1, 6),
            starts=sent[2],
            due=sent[3].view(-1, 2),
            chunks=tuple(due[1::2]),
            origin=sent[4],
            tokens=sum(one.length - one.cached for one in wide),
            pages=pages,
            most_tail=tail,
            most_new=new,
            most_queries=int(counts.max()),
            most_keys=int((keys + parts[1].view(-1, 6)[:, 4]).max()),
        )


def staged_pages(layout: RaggedLayout, tokens: int, least: int) -> int:
    """Staged pages that a step of so many tokens needs at most, if each wide request brings ``least`` of them
    or more."""
    size, requests = layout.page_tokens, max(1, tokens // least)
    return -(-tokens // size) + requests * (-(-(layout.chunk + layout.window) // size) + 1)


def new_room(like: torch.Tensor, elements: int) -> torch.Tensor:
    """Memory of a tensor's type on its device."""
    return torch.empty(elements, dtype=like.dtype, device=like.device)


def staging_room(like: torch.Tensor, layout: RaggedLayout, kv_heads: int, pages: int) -> torch.Tensor:
    """Memory for so many staged pages, wherever in it they will begin."""
    return new_room(like, (pages * kv_heads + 1) * layout.page_tokens * 2 * layout.head_size)


class Sequences:
    """The buffers of wide steps: one for each pool, used by one layer after another.

    Args:
        pool: ``[P, G, B, 2 * D]``.
        query_heads, kv_heads: of a layer.
        pages: staged ones, see :func:`staged_pages`.
        room: memory for them, from :func:`staging_room`, where there is some already.

    Raises:
        KernelError: no table of 32-bit numbers reaches from the pool to a buffer of ours.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        layout: RaggedLayout,
        query_heads: int,
        kv_heads: int,
        pages: int,
        room: torch.Tensor | None = None,
    ) -> None:
        check_pool(pool, layout)
        self.pool, self.layout, self.kv_heads = pool, layout, kv_heads
        self.group = query_heads // kv_heads
        slot, item = layout.page_tokens * 2 * layout.head_size, pool.element_size()
        room = staging_room(pool, layout, kv_heads, pages) if room is None else room
        # Where the staged pages begin is ours to choose: at a whole number of slots from the pool, so that
        # only the pages' own padding keeps the unit below a slot.
        apart = (room.data_ptr() - pool.data_ptr()) // item
        shape = (pages, kv_heads, layout.page_tokens, 2 * layout.head_size)
        self.staged = room[-apart % slot :][: pages * kv_heads * slot].view(shape)
        self.unit = gcd(slot, pool.stride(0))
        self.staged_at = (apart + -apart % slot) // self.unit
        furthest = max(
            abs(self.staged_at) + pages * kv_heads * slot // self.unit,
            pool.shape[0] * pool.stride(0) // self.unit,
        )
        if furthest > LARGEST_INDEX:
            raise KernelError(
                "the KV cache and the buffer of wide steps lie too far apart in memory for one page table: "
                "start with --tangram-wide-steps off"
            )

    def pages_view(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as a paged cache, ``[units, B, 1, D]`` each, that the table's numbers index. The
        staged pages are reached by numbers beyond (or before) the view's end."""
        size, head = self.layout.page_tokens, self.layout.head_size
        last = (self.pool.shape[0] - 1) * self.pool.stride(0) + (self.pool.shape[1] - 1) * self.pool.stride(1)
        units = last // self.unit + 1
        strides = (self.unit, 2 * head, 2 * head, 1)
        shape, first = (units, size, 1, head), self.pool.storage_offset()
        return self.pool.as_strided(shape, strides, first), self.pool.as_strided(shape, strides, first + head)

    def buffers(self, query: torch.Tensor, plan: WidePlan) -> Buffers:
        """Memory for what :meth:`stage` returns; any layer of the step may use it after another.

        Raises:
            KernelError: the step stages more than there is room for.
        """
        if plan.pages > self.staged.shape[0]:
            raise KernelError(f"a step stages {plan.pages} pages, there is room for {self.staged.shape[0]}")
        sequences, width = plan.starts.shape[0] - 1, -(-plan.most_keys // self.layout.page_tokens)
        shape = (plan.tokens * self.kv_heads, self.group, self.layout.head_size)
        table = plan.starts.new_empty(sequences, width)
        return query.new_empty(shape), table, plan.starts.new_empty(sequences)

    def stage(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: torch.Tensor,
        head_tier: torch.Tensor,
        head_member: torch.Tensor,
        plan: WidePlan,
        buffers: Buffers | None = None,
    ) -> Buffers:
        """Write a layer's new tokens, stage the raw ones, seal nothing yet.

        Args:
            query: ``[T, Hq, D]``; key, value: ``[T, Hkv, D]``. rows: int32 ``[N, width]``.
            buffers: of :meth:`buffers`; by default new ones.

        Returns:
            The packed queries ``[tokens * Hkv, Hq / Hkv, D]``, the table int32 ``[S * Hkv, width]``, and the
            tokens of each sequence int32 ``[S * Hkv]``.
        """
        check_tokens("query", query, self.pool, self.group * self.kv_heads, self.layout.head_size)
        check_tokens("key", key, self.pool, self.kv_heads, self.layout.head_size)
        check_tokens("value", value, self.pool, self.kv_heads, self.layout.head_size)
        packed, table, used = buffers = buffers or self.buffers(query, plan)
        torch.ops.tangram.ragged_stage.default(
            query,
            key,
            value,
            self.pool,
            rows,
            head_tier,
            head_member,
            *self.layout.operands(self.pool.device),
            plan.requests,
            plan.segments,
            plan.starts,
            self.staged,
            packed,
            table,
            used,
            self.unit,
            self.staged_at,
            plan.most_tail,
            plan.most_new,
            plan.most_queries,
        )
        return buffers

    def unpack(self, out: torch.Tensor, packed: torch.Tensor, plan: WidePlan) -> None:
        """Put the sequences' outputs, shaped like the packed queries, where their tokens have theirs."""
        torch.ops.tangram.ragged_unpack.default(
            out, packed, plan.segments, plan.starts, self.kv_heads, plan.most_queries
        )
