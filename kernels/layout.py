"""Where a token of a conversation lies: the addressing rules that every kernel and reference shares.

A pool page holds ``B`` tokens of ``G`` heads side by side, ``pool[page, member, B, 2 * D]``, the key in the
first ``D`` elements and the value in the last. Heads are sorted into ``K`` tiers; all heads of a tier keep
the same number of tokens of each sealed chunk. A request is one row of page ids that only ever grows::

    [ ring: R slots x K tiers ][ chunk 0: S pages ][ chunk 1: S pages ] ...

    raw token at position p, tier t     row[((p // B) % R) * K + t]                   offset p % B
    kept token j of chunk k, tier t     row[R * K + k * S + offset[t] + j // B]       offset j % B

``S`` is the number of pages of one sealed chunk over all tiers and ``offset`` the running sum of the tiers'
pages. Chunk ``k`` is sealed once ``(k + 1) * C + W`` tokens are in the cache. A query at position ``p``
sees the kept tokens of its ``sealed(p)`` first chunks and every raw token from ``sealed(p) * C`` up to and
including ``p``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch


@dataclass(frozen=True)
class RaggedLayout:
    """The sizes that turn (position, head) into (page, offset).

    Args:
        page_tokens: tokens a page holds of each of its heads, ``B``.
        ring_slots: pages of the raw tail a tier owns, ``R``; at least ``ceil((C + W) / B)``.
        chunk: tokens of a chunk, ``C``; a multiple of ``B``.
        window: newest tokens that are never sealed, ``W``.
        keep: tokens each tier keeps of a sealed chunk, ``K`` numbers, each a multiple of ``B`` in ``B .. C``.
        head_size: elements of one key, ``D``; even.

    Raises:
        ValueError: a size is out of range; the message names the field.
    """

    page_tokens: int
    ring_slots: int
    chunk: int
    window: int
    keep: tuple[int, ...]
    head_size: int

    def __post_init__(self) -> None:
        for name in ("page_tokens", "ring_slots", "chunk", "head_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, is {getattr(self, name)}")
        if self.head_size % 2:
            raise ValueError(f"head_size: must be even, is {self.head_size}")
        if self.window < 0:
            raise ValueError(f"window: must not be negative, is {self.window}")
        if self.chunk % self.page_tokens:
            raise ValueError(f"chunk: {self.chunk} is not a multiple of page_tokens ({self.page_tokens})")
        least = -(-(self.chunk + self.window) // self.page_tokens)
        if self.ring_slots < least:
            raise ValueError(
                f"ring_slots: chunk + window need at least {least} slots, there are {self.ring_slots}"
            )
        if not self.keep:
            raise ValueError("keep: at least one tier is needed")
        for tier, kept in enumerate(self.keep):
            if kept % self.page_tokens or not self.page_tokens <= kept <= self.chunk:
                raise ValueError(
                    f"keep: tier {tier} keeps {kept}, which is not a multiple of {self.page_tokens}"
                    f" between {self.page_tokens} and {self.chunk}"
                )

    @property
    def tiers(self) -> int:
        """Number of tiers, ``K``."""
        return len(self.keep)

    @cached_property
    def tier_offset(self) -> tuple[int, ...]:
        """``K + 1`` running sums of the tiers' pages: tier t owns pages ``offset[t] .. offset[t + 1] - 1``
        of a chunk."""
        return tuple(accumulate((kept // self.page_tokens for kept in self.keep), initial=0))

    @property
    def pages_per_chunk(self) -> int:
        """Pages one sealed chunk takes over all tiers, ``S``."""
        return self.tier_offset[-1]

    @property
    def ring_pages(self) -> int:
        """Entries of a row before its first sealed chunk, ``R * K``."""
        return self.ring_slots * self.tiers

    def sealed(self, tokens: int) -> int:
        """Chunks that are sealed once ``tokens`` tokens are in the cache; also what position ``tokens``
        sees."""
        return max(0, tokens - self.window) // self.chunk

    def step_end(self, tokens: int) -> int:
        """The length a step that starts with ``tokens`` cached tokens must not pass: the next seal
        boundary."""
        return (self.sealed(tokens) + 1) * self.chunk + self.window

    def segments(self, cached: int, length: int) -> Iterator[tuple[int, int]]:
        """A step from ``cached`` to ``length`` tokens, cut where it crosses seal boundaries: (tokens before,
        tokens after) of each segment. Before every one but the first the chunk ``sealed(start)`` of the one
        before it is due."""
        while cached < length:
            end = min(length, self.step_end(cached))
            yield cached, end
            cached = end

    def width(self, tokens: int) -> int:
        """Row entries that a sequence of ``tokens`` tokens may use."""
        return self.ring_pages + self.sealed(tokens) * self.pages_per_chunk

    def ring_entry(self, position: int, tier: int) -> int:
        """Row entry of the page that holds the raw token at ``position``."""
        return (position // self.page_tokens) % self.ring_slots * self.tiers + tier

    def kept_entries(self, chunk: int, tier: int) -> range:
        """Row entries of the pages that ``tier`` keeps of sealed chunk number ``chunk``."""
        start = self.ring_pages + chunk * self.pages_per_chunk
        return range(start + self.tier_offset[tier], start + self.tier_offset[tier + 1])

    def raw_entries(self, sealed: int, tokens: int, tier: int) -> Iterator[int]:
        """Row entries of the raw pages that hold positions ``sealed * C .. tokens - 1``, in order of
        position."""
        first = sealed * self.chunk
        return (self.ring_entry(position, tier) for position in range(first, tokens, self.page_tokens))

    def operands(self, device: torch.device) -> tuple[torch.Tensor, int, int, int, int]:
        """What the operators of a step take of the layout: ``tier_offset``, ``page_tokens``, ``ring_slots``,
        ``chunk`` and ``window``."""
        return self.offset_tensor(device), self.page_tokens, self.ring_slots, self.chunk, self.window

    def offset_tensor(self, device: torch.device) -> torch.Tensor:
        """``tier_offset`` as an int32 tensor on ``device``, made once for each layout and device."""
        return _offset_tensor(self.tier_offset, device)


@lru_cache(maxsize=64)
def _offset_tensor(offsets: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(offsets, dtype=torch.int32, device=device)
