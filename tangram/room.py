"""Room in the pool: what idle rows hold is given up, in the order of tangram.resident, when it is needed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from tangram.hybrid import Windows
from tangram.resident import ResidentRows, Row
from tangram.sharing import Lost


@dataclass(frozen=True)
class Policy:
    """How rows may be used.

    Attributes:
        reserve: admit a request only when it and all that run can reach their last token.
        resident_share: the most that idle rows may hold of the pool, from 0 to 1.
        observed: see :class:`tangram.resident.ResidentRows`.
        headroom: pages that the scheduler wants free beyond an allocation.
        wide: whether a prefill step may cross seal boundaries.
        pinnable: pages that pinned conversations may hold in all.
        returning_first: whether conversations that return go first in a crowd (:mod:`tangram.crowd`).
    """

    reserve: bool = False
    resident_share: float = 1.0
    observed: int = 0
    headroom: int = 0
    wide: bool = False
    pinnable: int = 0
    returning_first: bool = False


class Room:
    """Free pages, those that could be free, and the way from one to the other.

    Args:
        counters: where evictions are counted.
    """

    def __init__(
        self, pool: BlockPool, resident: ResidentRows, windows: Windows, counters: dict[str, int]
    ) -> None:
        self._pool = pool
        self._resident = resident
        self._counters = counters
        self.windows = windows
        self.policy = Policy()
        self.lost = Lost()

    def blocks(self, pages: Iterable[int]) -> list[KVCacheBlock]:
        """vLLM's blocks of these numbers."""
        return [self._pool.blocks[page] for page in pages]

    def available(self, spare: Row | None = None) -> int:
        """Pages that are free, or would be without all idle rows but ``spare`` and pinned ones."""
        return self._pool.get_num_free_blocks() + self._releasable(spare)

    def stale(self, seconds: float) -> int:
        """Pages of the conversations that have been idle for so long."""
        return self._resident.stale_pages(seconds)

    def make(self, pages: int, spare: Row | None = None) -> bool:
        """Thin and evict idle rows until so many pages are free; none where that cannot be. Returns whether
        they are."""
        if self._pool.get_num_free_blocks() >= pages:
            return True
        if self.available(spare) < pages:
            return False
        while self._pool.get_num_free_blocks() < pages and self._give_up_next(spare):
            pass
        return self._pool.get_num_free_blocks() >= pages  # not those that a copy of this step still holds

    def make_with_headroom(self, pages: int, spare: Row | None = None) -> None:
        """Make room for pages and the headroom. vLLM wants the latter of waiting requests only, and of these
        not always: where it cannot be had, the pages themselves must be."""
        if not self.make(pages + self.policy.headroom, spare):
            self.make(pages, spare)

    def enforce_share(self) -> None:
        """Idle rows hold no more than their share of the pool."""
        most = int(self.policy.resident_share * (self._pool.num_gpu_blocks - 1))
        while self._releasable() > most and self._give_up_next():
            pass

    def _give_up_next(self, spare: Row | None = None) -> bool:
        """Take pages from the row whose turn it is. Returns whether there was one."""
        victim = self._resident.next_victim(spare)
        if victim is None:
            return False
        row, thins = victim
        self.thin(row) if thins else self.evict(row)
        return True

    def thin(self, row: Row) -> None:
        """Cut an idle row down to the fewest raw tokens that it can be resumed with."""
        self.lost.evicted(row)  # what lies beyond these will be computed again
        self._pool.free_blocks(reversed(self.blocks(self._resident.thin(row))))
        self._counters["thinned"] += 1

    def evict(self, row: Row) -> None:
        """Give an idle row up for its pages."""
        self.drop(row)
        self._counters["evictions"] += 1
        if not row.shared and not row.thinned:  # the end of one that was thinned is remembered already
            self.lost.evicted(row)

    def drop(self, row: Row) -> None:
        """Let an idle row go."""
        self._pool.free_blocks(reversed(self.blocks(self._resident.take(row))))
        self.windows.release(row)

    def _releasable(self, spare: Row | None = None) -> int:
        return self._resident.releasable(spare) + self.windows.releasable(self._resident.spared(spare))
