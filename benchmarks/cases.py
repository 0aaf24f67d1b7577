"""A decode step over ragged histories, in our page tables and as the sequences that other kernels take.

A pool page ``[members, B, 2 * D]`` holds ``B`` tokens of each member head; one member of one page is exactly
a block of a paged cache with a single KV head. So whatever takes a block table can read the very same memory,
one sequence for each (request, KV head): block ``page * members + member``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.budgets import GROUP, HEAD_SIZE, KV_HEADS, TOKEN_BYTES, geometry_layout, tier_lengths
from kernels import RaggedLayout, ragged_attention
from tangram.geometry import Geometry

ENOUGH_BYTES = 2**29
"""A step reads at least so much, so that no layer finds its data in the L2 cache."""
MOST_LAYERS = 64


@dataclass(frozen=True)
class Heads:
    """Where each layer's KV heads lie: ``[layers][kv_heads]`` tiers and members, and members of a page."""

    tier: tuple[tuple[int, ...], ...]
    member: tuple[tuple[int, ...], ...]
    members: int


@dataclass(frozen=True)
class Sequences:
    """One layer for kernels that know block tables only.

    Attributes:
        table: int32 ``[sequences, blocks]`` of blocks in the cache; entries behind a sequence's end are 0.
        lengths: tokens of each sequence.
    """

    table: torch.Tensor
    lengths: list[int]


def row_entries(layout: RaggedLayout, tokens: int, tier: int) -> torch.Tensor:
    """Entries of a row that hold what a tier's heads see at the end of ``tokens``, by position."""
    sealed = layout.sealed(tokens - 1)
    first, last = layout.tier_offset[tier : tier + 2]
    chunks = torch.arange(sealed)[:, None] * layout.pages_per_chunk
    kept = layout.ring_pages + chunks + torch.arange(first, last)[None]
    slots = torch.arange(sealed * layout.chunk // layout.page_tokens, -(-tokens // layout.page_tokens))
    return torch.cat((kept.flatten(), slots % layout.ring_slots * layout.tiers + tier))


class Case:
    """The layers of one decode step of a batch.

    Args:
        layout: sizes behind a row.
        heads: where the heads of each layer lie.
        lengths: tokens of each request, the new one included.
        memory: a flat tensor that the pool is cut from.
    """

    def __init__(self, layout: RaggedLayout, heads: Heads, lengths: list[int], memory: torch.Tensor) -> None:
        self.layout, self.heads, self.lengths = layout, heads, lengths
        device, requests = memory.device, len(lengths)
        width = layout.width(max(lengths))
        pages = width * requests
        size = heads.members * layout.page_tokens * 2 * layout.head_size
        if pages * size > memory.numel():
            raise MemoryError(f"{pages} pages of {size} elements do not fit {memory.numel()}")
        self.pool = memory[: pages * size].view(
            pages, heads.members, layout.page_tokens, 2 * layout.head_size
        )
        random = torch.Generator().manual_seed(0)
        self.host_rows = torch.randperm(pages, generator=random).to(torch.int32).view(requests, width)
        self.rows = self.host_rows.to(device)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.starts = torch.arange(requests + 1, dtype=torch.int32, device=device)
        self.tables = [
            (
                torch.tensor(tier, dtype=torch.int32, device=device),
                torch.tensor(member, dtype=torch.int32, device=device),
            )
            for tier, member in zip(heads.tier, heads.member, strict=True)
        ]
        self.kv_heads = len(heads.tier[0])
        shape = (requests, self.kv_heads * GROUP, layout.head_size)
        self.query = torch.randn(shape, generator=random).to(device, memory.dtype)
        self.out = torch.empty_like(self.query)
        self.seen = [tier_lengths(layout, tokens) for tokens in lengths]
        tokens = sum(seen[tier] for seen in self.seen for layer in heads.tier for tier in layer)
        self.layer_bytes = tokens * 2 * layout.head_size * memory.element_size() / self.layers

    @property
    def layers(self) -> int:
        """How many the step has."""
        return len(self.heads.tier)

    def attend(self, layer: int) -> None:
        """Our attention of one layer: one launch."""
        tier, member = self.tables[layer]
        batch = (self.pool, self.rows, self.starts, self.seq_lens, tier, member, self.layout)
        ragged_attention(self.out, self.query, *batch, self.layout.head_size**-0.5, max_query=1)

    def step(self) -> None:
        """All layers."""
        for layer in range(self.layers):
            self.attend(layer)

    def sequences(self) -> list[Sequences]:
        """Each layer as one sequence for each (request, KV head), in that order, in ``cache()``'s blocks."""
        pages = self._pages()
        result = []
        for tiers, members in zip(self.heads.tier, self.heads.member, strict=True):
            member = torch.tensor(members, dtype=torch.int32, device=pages.device)
            chosen = pages[:, list(tiers)]
            blocks = torch.where(chosen < 0, 0, chosen * self.heads.members + member[None, :, None])
            lengths = [seen[tier] for seen in self.seen for tier in tiers]
            used = -(-max(lengths) // self.layout.page_tokens)
            result.append(Sequences(blocks.flatten(0, 1)[:, :used].contiguous(), lengths))
        return result

    def cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as ``[blocks, B, 1, D]`` views of the pool."""
        return cache_views(self.pool, self.layout.page_tokens, 1, self.layout.head_size)

    def _pages(self) -> torch.Tensor:
        """int32 ``[requests, tiers, blocks]``: pages that a tier's heads see; -1 behind their end."""
        layout = self.layout
        most = max(-(-length // layout.page_tokens) for seen in self.seen for length in seen)
        pages = torch.full((len(self.lengths), layout.tiers, most), -1, dtype=torch.int32)
        entries: dict[tuple[int, int], torch.Tensor] = {}
        for request, tokens in enumerate(self.lengths):
            for tier in range(layout.tiers):
                key = (tokens, tier)
                if key not in entries:
                    entries[key] = row_entries(layout, tokens, tier)
                pages[request, tier, : len(entries[key])] = self.host_rows[request, entries[key]]
        return pages.to(self.rows.device)


def cache_views(
    memory: torch.Tensor, page_tokens: int, kv_heads: int, head_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a paged cache ``[blocks, B, kv_heads, D]`` over memory that holds, block by block
    and head by head, tokens of a key followed by a value, as vLLM's own cache does.

    Strides of an axis of length one are those of a packed tensor: FlashAttention 3 may describe them to the
    hardware, which refuses others.
    """
    block = kv_heads * page_tokens * 2 * head_size
    shape = (memory.numel() // block, page_tokens, kv_heads, head_size)
    head = page_tokens * 2 * head_size if kv_heads > 1 else head_size
    strides = (block, 2 * head_size, head, 1)
    flat, start = memory.view(-1), memory.storage_offset()
    keys, values = (flat.as_strided(shape, strides, start + offset) for offset in (0, head_size))
    return keys, values


def spread_case(layout: RaggedLayout, lengths: list[int], memory: torch.Tensor) -> Case:
    """Layers whose heads lie at the layout's tiers, each layer at other members of the same pages."""
    bytes_of_layer = sum(sum(tier_lengths(layout, tokens)) for tokens in lengths) * TOKEN_BYTES
    page = layout.page_tokens * 2 * HEAD_SIZE
    fit = memory.numel() // (page * layout.width(max(lengths)) * len(lengths))
    layers = min(MOST_LAYERS, max(16, 1 + ENOUGH_BYTES // bytes_of_layer), fit)
    if layers < 1:
        raise MemoryError("not even one layer fits")
    tier = tuple(range(KV_HEADS))
    members = tuple(tuple((3 * head + layer) % layers for head in tier) for layer in range(layers))
    return Case(layout, Heads((tier,) * layers, members, layers), lengths, memory)


def model_case(geometry: Geometry, layout: RaggedLayout, lengths: list[int], memory: torch.Tensor) -> Case:
    """All layers of a model; ``layout`` has the geometry's tiers, whatever these keep."""
    heads = Heads(geometry.head_tier, geometry.head_member, geometry.group_size)
    return Case(layout, heads, lengths, memory)


def whole_model(geometry: Geometry, lengths: list[int], memory: torch.Tensor) -> Case:
    """All layers of a model with the geometry's own budgets."""
    return model_case(geometry, geometry_layout(geometry), lengths, memory)


def stock_sequences(case: Case, memory: torch.Tensor, layers: int) -> tuple[list[Sequences], int]:
    """As many bytes in vLLM's own layout: one sequence for each request, all KV heads in a block.

    Returns:
        The layers, at most ``layers`` and no more than fit, at blocks of their own; and the bytes of one.
    """
    page, heads = case.layout.page_tokens, case.kv_heads
    block = heads * page * 2 * case.layout.head_size
    means = [
        round(sum(seen[tier] for layer in case.heads.tier for tier in layer) / (case.layers * heads))
        for seen in case.seen
    ]
    counts = [-(-mean // page) for mean in means]
    total = memory.numel() // block
    fit = min(layers, total // sum(counts))
    if fit < 1:
        raise MemoryError("not even one layer of the stock layout fits")
    random = torch.Generator().manual_seed(1)
    order = torch.randperm(fit * sum(counts), generator=random).to(torch.int32)
    result = []
    for layer in range(fit):
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        at = layer * sum(counts)
        for request, count in enumerate(counts):
            table[request, :count] = order[at : at + count]
            at += count
        result.append(Sequences(table.to(memory.device), means))
    return result, sum(means) * heads * 2 * case.layout.head_size * memory.element_size()


def by_head(tensor: torch.Tensor) -> torch.Tensor:
    """``[requests, heads, D]`` as one sequence for each (request, KV head): ``[sequences, GROUP, D]``."""
    return tensor.view(-1, GROUP, tensor.shape[-1])
