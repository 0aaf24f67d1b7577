"""The cache manager: hands out rows of pages to requests and keeps the rows of idle conversations.

Every quantity follows from :mod:`tangram.geometry`: a running request holds exactly ``pages(n)`` pages for
the ``n`` tokens that have a slot. Idle rows stay referenced, so vLLM sees their pages as used; they are
evicted, least recently used first, when an allocation needs them and only then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request

from tangram.errors import CacheIntegrityError
from tangram.resident import ResidentRows, Row
from tangram.spec import RaggedSpec
from tangram.telemetry import CacheSnapshot
from tangram.telemetry import Sequence as SequenceState

logger = init_logger(__name__)

CHECK_VARIABLE = "TANGRAM_CHECK_INTEGRITY"
"""Set to 1 to verify the whole bookkeeping at every step (tests do; it costs time)."""


class RaggedManager(SingleTypeKVCacheManager):
    """See the module. One per engine, on the scheduler's side."""

    kv_cache_spec: RaggedSpec

    def __init__(self, kv_cache_spec: RaggedSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.geometry = kv_cache_spec.geometry
        self.resident: ResidentRows[KVCacheBlock] = ResidentRows(self.geometry)
        self.headroom = 0  # pages that the scheduler wants free beyond an allocation
        self.counters = {"takeovers": 0, "reused_tokens": 0, "evictions": 0, "seals": 0}
        self._slots: dict[str, int] = {}  # request -> tokens that have a slot
        self._requests: dict[str, Request] = {}
        self._keeps_rows = True
        self._check = os.environ.get(CHECK_VARIABLE) == "1"

    # ---- what vLLM's coordinator calls, in the order of a request's life -----------------------------

    def find_longest_cache_hit(  # called on the instance: rows are per manager
        self, block_hashes: Sequence[Any], max_length: int, **_: Any
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The pages of an idle conversation that this prompt continues, and the tokens they hold."""
        found = self.resident.find(block_hashes, max_length)
        if found is None:
            return ([],), 0
        row, length = found
        return (row.pages[: self.geometry.pages(length)],), length

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        *args: Any,
        **kwargs: Any,
    ) -> int:
        """Pages still missing for ``num_tokens``. Makes room for them at idle conversations' expense when
        that is enough to grant them."""
        taken = self.resident.owner(new_computed_blocks[0]) if new_computed_blocks else None
        held = len(taken.pages) if taken else len(self.req_to_blocks.get(request_id, ()))
        missing = max(0, self.geometry.pages(num_tokens) - held)
        # vLLM wants the headroom of waiting requests only, and of these not always: where it cannot be had,
        # the pages themselves must be.
        if not self._make_room(missing + self.headroom, spare=taken):
            self._make_room(missing, spare=taken)
        return missing

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Take an idle conversation's row over; pages beyond the resumed length are freed."""
        if num_external_computed_tokens:
            raise CacheIntegrityError("external KV cannot be loaded into the ragged cache")
        self.num_cached_block[request_id] = 0
        if not new_computed_blocks:
            return
        row = self.resident.owner(new_computed_blocks[0])
        if row is None:
            raise CacheIntegrityError(f"request {request_id} continues a conversation that is not resident")
        pages = self.resident.take(row)
        held = len(new_computed_blocks)
        self.req_to_blocks[request_id] = pages[:held]
        self._slots[request_id] = num_local_computed_tokens
        self.block_pool.free_blocks(reversed(pages[held:]))
        self.counters["takeovers"] += 1
        self.counters["reused_tokens"] += num_local_computed_tokens

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Extend the row to ``pages(num_tokens)``."""
        row = self.req_to_blocks[request_id]
        before = self._slots.get(request_id, 0)
        after = max(before, num_tokens)  # below what it was when a step's drafts were rejected
        self._slots[request_id] = after
        new = self.block_pool.get_new_blocks(max(0, self.geometry.pages(num_tokens) - len(row)))
        row.extend(new)
        self.counters["seals"] += self.geometry.sealed(after) - self.geometry.sealed(before)
        return new

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Remember whose row this is; its tokens are read when the request ends."""
        self._requests[request.request_id] = request
        self.num_cached_block[request.request_id] = 0

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """The request ended or was preempted: keep its row if it can be resumed, else give its pages back."""
        pages = self.req_to_blocks.pop(request_id, [])
        self.num_cached_block.pop(request_id, None)
        written = self._slots.pop(request_id, 0)
        request = self._requests.pop(request_id, None)
        if not pages or request is None or not self._keeps_rows:
            return pages
        # Tokens that are both computed and known: a step in flight when the request ends may have computed
        # more than is known, and the last sampled token is known but not computed.
        tokens = min(request.num_computed_tokens, request.num_tokens, written)
        excess = pages[self.geometry.pages(tokens) :]
        keep = pages[: len(pages) - len(excess)]
        if keep and self.resident.add(request_id, keep, tokens, written, request.block_hashes):
            return excess
        return pages

    def new_step_starts(self) -> None:
        """Once a step, before anything is scheduled."""
        if self._check:
            self.check_integrity()

    # ---- idle conversations ---------------------------------------------------------------------------

    def _make_room(self, pages: int, spare: Row[KVCacheBlock] | None = None) -> bool:
        """Evict until so many pages are free, or nothing where that cannot be. Returns whether they are."""
        evictable = self.resident.pages - (len(spare.pages) if spare else 0)
        if self.block_pool.get_num_free_blocks() + evictable < pages:
            return False
        while self.block_pool.get_num_free_blocks() < pages and (row := self.resident.oldest(spare)):
            self._evict(row)
        return True

    def _evict(self, row: Row[KVCacheBlock]) -> None:
        self.block_pool.free_blocks(reversed(self.resident.take(row)))
        self.counters["evictions"] += 1

    @contextmanager
    def keeping_nothing(self) -> Iterator[None]:
        """While this is open, requests that end leave no row behind."""
        self._keeps_rows = False
        try:
            yield
        finally:
            self._keeps_rows = True

    def evict_all(self) -> int:
        """Drop every idle conversation. Returns how many there were."""
        rows = self.resident.rows()
        for row in rows:
            self._evict(row)
        return len(rows)

    # ---- looking in -----------------------------------------------------------------------------------

    def snapshot(self) -> CacheSnapshot:
        """What is in the pool now. Safe to call from another thread: it only copies."""
        now = time.monotonic()
        sequences = [
            SequenceState(
                name,
                "running",
                slots,
                self.geometry.sealed(slots),
                len(self.req_to_blocks.get(name, ())),
                None,
            )
            for name, slots in list(self._slots.items())
        ]
        for row in self.resident.rows():
            sealed = self.geometry.sealed(row.tokens)
            sequences.append(
                SequenceState(row.name, "resident", row.tokens, sealed, len(row.pages), now - row.since)
            )
        return CacheSnapshot(
            total_pages=self.block_pool.num_gpu_blocks - 1,
            free_pages=self.block_pool.get_num_free_blocks(),
            sequences=sequences,
            counters=dict(self.counters),
        )

    def check_integrity(self) -> None:
        """Raise CacheIntegrityError unless every page has one owner and every row its exact length."""
        self.resident.check_integrity()
        pages = [block for row in self.resident.rows() for block in row.pages]
        for name, row in self.req_to_blocks.items():
            expected = self.geometry.pages(self._slots.get(name, 0))
            if len(row) != expected:
                raise CacheIntegrityError(
                    f"request {name} holds {len(row)} pages, the formula says {expected}"
                )
            pages.extend(row)
        if len({block.block_id for block in pages}) != len(pages):
            raise CacheIntegrityError("a page has two owners")
        if any(block.ref_cnt != 1 or block.is_null for block in pages):
            raise CacheIntegrityError("an owned page is not referenced exactly once")
        total, free = self.block_pool.num_gpu_blocks - 1, self.block_pool.get_num_free_blocks()
        if free + len(pages) != total:
            raise CacheIntegrityError(f"{total - free - len(pages)} of {total} pages have no owner")
