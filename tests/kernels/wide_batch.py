"""Steps that cross seal boundaries: requests whose history is in the cache, and a step of theirs."""

from __future__ import annotations

import torch

from kernels import RaggedLayout, ragged_append, ragged_seal
from kernels.wide import WideRequest

POISON = float("nan")
BEHIND = 2**22


def room_behind(pool: torch.Tensor, elements: int) -> torch.Tensor:
    """Instead of ``kernels.wide.new_room`` on a CPU, whose memory may lie too far apart for a page table: the
    elements behind a pool that :meth:`Batch.pool_copy` made."""
    if pool.is_cuda:
        return torch.empty(elements, dtype=pool.dtype, device=pool.device)
    storage = pool.untyped_storage()
    whole = torch.empty(0, dtype=pool.dtype).set_(storage)
    assert elements <= BEHIND
    return whole[-BEHIND:][:elements]


def layout_of(head_size: int = 16, page: int = 4, chunk: int = 32, window: int = 8) -> RaggedLayout:
    slots = -(-(chunk + window) // page) + 2
    return RaggedLayout(page, slots, chunk, window, (page, chunk // 2, chunk), head_size)


class Batch:
    """Requests whose first tokens are in the cache, and a step of theirs. Other slots are poisoned.

    Args:
        steps: (cached tokens, new tokens) of each request.
    """

    def __init__(
        self,
        layout: RaggedLayout,
        steps: list[tuple[int, int]],
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        kv_heads: int = 3,
        group: int = 2,
        padding: int = 0,
        sink: int = 2,
    ) -> None:
        self.layout, self.sink, self.group = layout, sink, group
        random = torch.Generator().manual_seed(len(steps) + layout.head_size)
        lengths = [cached + new for cached, new in steps]
        width = layout.width(max(lengths))
        pages, members = width * len(steps) + 1, kv_heads
        page = members * layout.page_tokens * 2 * layout.head_size
        storage = torch.full((pages * (page + padding),), POISON, dtype=dtype, device=device)
        shape = (pages, members, layout.page_tokens, 2 * layout.head_size)
        self.pool = storage.as_strided(shape, (page + padding, page // members, 2 * layout.head_size, 1))
        order = torch.randperm(pages - 1, generator=random).add(1).to(torch.int32)
        self.rows = order.view(len(steps), width).to(device)
        self.heads = (
            torch.arange(kv_heads, dtype=torch.int32, device=device) % layout.tiers,
            torch.arange(kv_heads, dtype=torch.int32, device=device).flip(0).contiguous(),
        )
        tokens = [0]
        for _, new in steps:
            tokens.append(tokens[-1] + new)
        self.starts, self.lengths, self.tokens = [cached for cached, _ in steps], lengths, tokens
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.query_start_loc = torch.tensor(tokens, dtype=torch.int32, device=device)

        def states(count: int, heads: int) -> torch.Tensor:
            plain = torch.randn(count, heads, layout.head_size, generator=random)
            return (plain + 0.3 * torch.randn(layout.head_size, generator=random)).to(dtype).to(device)

        for row, (cached, _) in enumerate(steps):
            begin = 0
            while begin < cached:  # as narrow steps would
                end = min(cached, layout.step_end(begin))
                self._seal(row, begin)
                new = (torch.tensor([0, end - begin]), torch.tensor([end]))
                tables = (table.to(torch.int32).to(device) for table in new)
                own = (states(end - begin, kv_heads), states(end - begin, kv_heads))
                ragged_append(*own, self.pool, self.rows[row : row + 1], *tables, *self.heads, layout)
                begin = end
            self._seal(row, cached)
        self.query = states(tokens[-1], kv_heads * group)
        self.key, self.value = states(tokens[-1], kv_heads), states(tokens[-1], kv_heads)

    def _seal(self, row: int, tokens: int) -> None:
        chunk, rest = divmod(tokens - self.layout.window, self.layout.chunk)
        if rest == 0 and chunk >= 1:
            due = torch.tensor([[0, chunk - 1]], dtype=torch.int32, device=self.pool.device)
            none = torch.zeros(self.layout.tiers, dtype=torch.int32, device=self.pool.device)
            row_alone = self.rows[row : row + 1]
            ragged_seal(self.pool, row_alone, due, none, self.layout, self.sink, heads=self.heads)

    def wide(self) -> list[WideRequest]:
        """Those that cross a boundary."""
        every = zip(self.starts, self.lengths, strict=True)
        return [
            WideRequest(row, self.tokens[row], start, end)
            for row, (start, end) in enumerate(every)
            if end > self.layout.step_end(start)
        ]

    def pool_copy(self, device: str | None = None) -> torch.Tensor:
        """With the same strides."""
        size = self.pool.untyped_storage().nbytes() // self.pool.element_size()
        size += BEHIND if (device or self.pool.device.type) == "cpu" else 0
        storage = torch.empty(size, dtype=self.pool.dtype, device=device or self.pool.device)
        return storage.as_strided(self.pool.shape, self.pool.stride()).copy_(self.pool)

    def check_alike(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """Sealed pages, and all that a ring can still hold, are the same to the bit."""
        layout = self.layout
        for row, length in zip(self.rows.long(), self.lengths, strict=True):
            sealed = row[layout.ring_pages : layout.width(max(0, length - 1))]
            assert torch.equal(one[sealed].isnan(), other[sealed].isnan())
            assert torch.equal(one[sealed].nan_to_num(), other[sealed].nan_to_num())
            oldest = max(0, -(-length // layout.page_tokens) - layout.ring_slots) * layout.page_tokens
            for tier, member in zip(*(part.tolist() for part in self.heads), strict=True):
                at = torch.arange(oldest, length)
                entries = at // layout.page_tokens % layout.ring_slots * layout.tiers + tier
                ring = (row[entries], member, at % layout.page_tokens)
                assert torch.equal(one[ring].nan_to_num(), other[ring].nan_to_num())
