"""What each rung of the overhead ladder holds and costs: the arithmetic of ``benchmarks/cuda_ladder.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tangram.geometry import Geometry, ceil_div


@dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    Attributes:
        name: what it adds.
        shared_table: all heads share one page table, as long as the longest head's.
        over_allocates: pages for a whole chunk of all heads are held for each conversation, since how many it
            keeps is known only once it is compressed.
        reads_back: the host reads what was kept and writes the page table anew after each sealed chunk.
        split_ahead: our decode kernel; otherwise FlashAttention 3 without splits.
    """

    name: str
    shared_table: bool
    over_allocates: bool
    reads_back: bool
    split_ahead: bool


RUNGS = (
    Rung("dynamic reclaim (simulated)", True, True, True, False),
    Rung("+ budget reservation", True, False, False, False),
    Rung("+ ragged paging", False, False, False, False),
    Rung("+ ahead-of-time split", False, False, False, True),
)


def conversation_bytes(rung: Rung, geometry: Geometry, longest: int, tokens: int) -> int:
    """Bytes of pool that a conversation of ``tokens`` holds.

    With ragged paging, ``geometry.bytes``: ``R * K + sealed * S`` pages of ``G`` heads. With one table, each
    of the model's heads holds ``R + sealed * longest / B`` pages (``ceil(tokens / B)`` while nothing is
    sealed), and ``C / B`` more where a chunk is over-allocated; a page of one head is ``B * 2 * D`` elements.

    Args:
        longest: tokens of a chunk that the longest head keeps.
    """
    if not rung.shared_table:
        return geometry.bytes(tokens)
    page = geometry.page_tokens
    sealed = geometry.sealed(tokens)
    pages = geometry.ring_slots + sealed * ceil_div(longest, page) if sealed else ceil_div(tokens, page)
    if rung.over_allocates:
        pages += geometry.chunk // page
    head_page = page * 2 * geometry.head_size * geometry.itemsize
    return pages * geometry.layers * geometry.kv_heads * head_page


def fitting(memory: int, lengths: Iterable[int], held: Callable[[int], int], most: int) -> list[int]:
    """The first of ``lengths``, at most ``most``, whose conversations hold at most ``memory`` bytes."""
    fit: list[int] = []
    for tokens in lengths:
        memory -= held(tokens)
        if memory < 0 or len(fit) == most:
            break
        fit.append(tokens)
    return fit


@dataclass(frozen=True)
class Cost:
    """Times of one decode step of ``batch`` conversations, in microseconds.

    Attributes:
        attention: of all layers.
        seal: of one chunk of one conversation, all heads of all layers.
        rest: of everything else in a step, whatever the batch.
        chunk: tokens after which a conversation seals a chunk; each gets one token a step.
    """

    batch: int
    attention: float
    seal: float
    rest: float
    chunk: int

    @property
    def sealing(self) -> float:
        """Sealing's share of a step."""
        return self.batch * self.seal / self.chunk

    @property
    def step(self) -> float:
        """A whole step."""
        return self.attention + self.sealing + self.rest

    @property
    def tokens_a_second(self) -> float:
        """Of all conversations together."""
        return self.batch / self.step * 1e6 if self.batch else 0.0
