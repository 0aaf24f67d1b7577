"""Chunks to be sealed, on any device."""

from __future__ import annotations

import torch

from kernels import RaggedLayout, fallback


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
        self.asked = torch.randn(len(chunks), layout.tiers, members, layout.head_size, generator=random)

    def sealed(
        self,
        sink: int,
        scores: torch.Tensor | None = None,
        values: bool = False,
        asked: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The pool after the reference sealed it."""
        layout, pool = self.layout, self.pool.clone()
        geometry = (layout.page_tokens, layout.ring_slots, layout.chunk, layout.window)
        tables = (self.rows, self.due, layout.offset_tensor(torch.device("cpu")), self.tier_heads)
        fallback.seal(pool, *tables, *geometry, sink, scores, values=values, asked=asked)
        return pool
