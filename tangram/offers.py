"""What a waiting request could continue: an idle conversation, a shared prefix, or what another is using."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from tangram.geometry import Geometry
from tangram.hybrid import Windows, page_hashes
from tangram.live import Live
from tangram.resident import ResidentRows, Row


@dataclass(frozen=True)
class Offer:
    """A row that a waiting request could continue.

    Attributes:
        length: tokens that it need not compute.
        ticket: the first page of the source, by which vLLM hands the offer back to the manager.
        row: the idle row, or None when the source is running.
        source: the running request, or None.
        beside: blocks of sliding-window layers that are needed too.
        stays: whether an idle conversation is left as it is, as there is room for both.
    """

    length: int
    ticket: KVCacheBlock
    row: Row | None = None
    source: str | None = None
    beside: tuple[KVCacheBlock, ...] = ()
    stays: bool = False

    @property
    def forks(self) -> bool:
        """Whether the source stays: its sealed pages are shared and its raw ones copied. An idle
        conversation that goes on from its end is taken over instead."""
        return self.row is None or self.row.shared or self.stays

    @property
    def rewinds(self) -> bool:
        """Whether an idle conversation is continued from before its end: after an edit, or by another one
        that began alike."""
        return self.row is not None and not self.row.shared and self.length < max(self.row.targets)


class Offers:
    """Finds offers.

    Args:
        live: request to what is remembered of it.
        rows: request to its pages.
    """

    def __init__(
        self,
        geometry: Geometry,
        pool: BlockPool,
        resident: ResidentRows,
        live: Mapping[str, Live],
        rows: Mapping[str, Sequence[KVCacheBlock]],
    ) -> None:
        self._geometry = geometry
        self._pool = pool
        self._resident = resident
        self._live = live
        self._rows = rows

    def best(self, block_hashes: Sequence[Any], limit: int, windows: Windows, step: int) -> Offer | None:
        """The longest prefix of at most ``limit`` tokens that could be continued in this step.

        Args:
            block_hashes: vLLM's, of the waiting request.
        """
        hashes = page_hashes(block_hashes, self._pool, self._geometry.page_tokens)
        asked = (hashes, block_hashes, limit, windows, step)
        found = (self._idle(*asked), self._running(*asked))
        return max((offer for offer in found if offer), key=lambda offer: offer.length, default=None)

    def hashes(self, request: Request) -> Sequence[Any]:
        """The hash of the prefix that ends with each whole page of a request."""
        return page_hashes(request.block_hashes, self._pool, self._geometry.page_tokens)

    def idle_row(self, request: Request, windows: Windows, step: int) -> Row | None:
        """The row that a waiting request would be offered, were nobody running."""
        hashes = request.block_hashes
        offer = self._idle(self.hashes(request), hashes, request.num_tokens - 1, windows, step)
        return offer.row if offer else None

    def _idle(
        self, hashes: Sequence[Any], block_hashes: Sequence[Any], limit: int, windows: Windows, step: int
    ) -> Offer | None:
        while (found := self._resident.find(hashes, limit, step)) is not None:
            row, length = found
            if (beside := windows.blocks_at(block_hashes, length)) is not None:
                return Offer(length, self._pool.blocks[row.held()[0]], row=row, beside=tuple(beside))
            limit = length - 1
        return None

    def _running(
        self, hashes: Sequence[Any], block_hashes: Sequence[Any], limit: int, windows: Windows, step: int
    ) -> Offer | None:
        """What a running request has computed of this prompt, near its end: two answers to one question."""
        best: Offer | None = None
        for name, live in self._live.items():
            if live.request is None or live.step == step or not hashes:
                continue
            own = self.hashes(live.request)
            if not own or own[0] != hashes[0]:
                continue
            tokens = min(live.request.num_computed_tokens, live.request.num_tokens)
            for length in reversed(self._resident.resumable(tokens, live.slots, live.raw_from)):
                index = length // self._geometry.page_tokens - 1
                if length > limit or index >= min(len(own), len(hashes)) or own[index] != hashes[index]:
                    continue
                if (beside := windows.blocks_at(block_hashes, length)) is not None:
                    if best is None or length > best.length:
                        best = Offer(length, self._rows[name][0], source=name, beside=tuple(beside))
                    break
        return best
