"""The cache manager: hands out rows of pages to requests and keeps the rows of idle conversations.

Every quantity follows from :mod:`tangram.geometry`: a running request holds exactly ``pages(n)`` pages for
the ``n`` tokens that have a slot. A request that continues an idle conversation takes its row over. One that
continues what another is using (a running request, or a prefix that several share) forks: sealed pages, which
nobody writes again, are shared by reference count, and the raw tokens that it needs are copied to a ring of
its own. Idle rows stay referenced, so vLLM sees their pages as used; they are evicted, least recently used
first, when an allocation needs them and only then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request

from tangram import integrity
from tangram.errors import CacheIntegrityError
from tangram.hybrid import ByPool, Windows, page_hashes
from tangram.occupancy import Holding, Occupancy
from tangram.resident import ResidentRows, Row
from tangram.sharing import Lost, Offer, PrefixWatch, Prompt
from tangram.spec import RaggedSpec
from tangram.telemetry import CacheSnapshot

CHECK_VARIABLE = "TANGRAM_CHECK_INTEGRITY"
"""Set to 1 to verify the whole bookkeeping at every step (tests do; it costs time)."""

COUNTERS = (
    "takeovers",
    "forks",
    "rewinds",
    "misses",
    "evictions",
    "seals",
    "prefixes",
    "reused_tokens",
    "reprefilled_tokens",
)


@dataclass(frozen=True)
class Policy:
    """How rows may be used.

    Attributes:
        reserve: admit a request only when it and all that run can reach their last token.
        resident_share: the most that idle rows may hold of the pool, from 0 to 1.
        observed: see :class:`tangram.resident.ResidentRows`.
        headroom: pages that the scheduler wants free beyond an allocation.
    """

    reserve: bool = False
    resident_share: float = 1.0
    observed: int = 0
    headroom: int = 0


class RaggedManager(SingleTypeKVCacheManager):
    """See the module. One per engine, on the scheduler's side."""

    kv_cache_spec: RaggedSpec

    def __init__(self, kv_cache_spec: RaggedSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.geometry = kv_cache_spec.geometry
        self.resident = ResidentRows(self.geometry, lambda page: self.block_pool.blocks[page].ref_cnt)
        self.windows = Windows(self.block_pool)  # the scheduler brings the real one
        vars(RaggedManager)["find_longest_cache_hit"].register(self, self.block_pool)
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.final_length: Callable[[str], int] = lambda request_id: 0  # the most that a request can hold
        self._policy = Policy()
        self._slots: dict[str, int] = {}  # request -> tokens that have a slot
        self._requests: dict[str, Request] = {}
        self._resumed: dict[str, int] = {}  # request -> tokens that it did not compute
        self._raw_from: dict[str, int] = {}  # request -> the first position that its ring can hold
        self._next_prefix: dict[str, int] = {}  # request -> chunk whose prefix is looked at next
        self._offer: Offer | None = None
        self._step = 0
        self._fresh: set[str] = set()  # admitted in this step: their copies have not run
        self._prefixes = PrefixWatch()
        self._lost = Lost()
        self._keeps_rows = True
        self._check = os.environ.get(CHECK_VARIABLE) == "1"

    @property
    def policy(self) -> Policy:
        """How rows may be used; set by the scheduler, which knows the configuration."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = policy
        self.resident.observed = policy.observed

    # ---- what vLLM's coordinator calls, in the order of a request's life -----------------------------

    @ByPool
    def find_longest_cache_hit(
        self, block_hashes: Sequence[Any], max_length: int, **_: Any
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """A row that this prompt continues: its first page as a ticket, and the tokens it offers."""
        offers = [self._idle_offer(block_hashes, max_length), self._running_offer(block_hashes, max_length)]
        self._offer = max((o for o in offers if o), key=lambda offer: offer.length, default=None)
        return (([self._offer.ticket],), self._offer.length) if self._offer else (([],), 0)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        *args: Any,
        **kwargs: Any,
    ) -> int:
        """Pages still missing for ``num_tokens``. Makes room for them, and for what the window layers miss,
        at idle rows' expense when that is enough to grant them. With reservation on, a new request that could
        not be carried to its end is told that it needs more than there is."""
        offer = self._accepted(new_computed_blocks)
        missing = self._missing(request_id, num_tokens, offer)
        spare = offer.row if offer else None
        beside = self.windows.missing(request_id, num_tokens, offer.length if offer else 0, *args, **kwargs)
        beside += sum(block.ref_cnt == 0 for block in offer.beside) if offer else 0
        if request_id not in self.req_to_blocks:
            final, others = num_tokens, beside
            if self._policy.reserve:
                final = max(num_tokens, self.final_length(request_id))
                others = self.outstanding() + self.windows.most(final)
                others -= self.windows.passed_on(spare) if spare and not spare.shared else 0
            if self._missing(request_id, final, offer) + others > self._available(spare):
                if spare and self.geometry.pages(final) + others <= self._available(None):
                    self._evict(spare)  # it does not fit beside the row that it continues, but without
                return self.block_pool.num_gpu_blocks
        # vLLM wants the headroom of waiting requests only, and of these not always: where it cannot be had,
        # the pages themselves must be.
        room = missing + beside
        if not self._make_room(room + self._policy.headroom, spare):
            self._make_room(room, spare)
        return missing

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Begin a request: take the offered row over, fork it, or start from nothing."""
        if num_external_computed_tokens:
            raise CacheIntegrityError("external KV cannot be loaded into the ragged cache")
        self.num_cached_block[request_id] = 0
        offer = self._accepted(new_computed_blocks)
        if offer is None:
            return
        if offer.length != num_local_computed_tokens:
            raise CacheIntegrityError(
                f"request {request_id} resumes {num_local_computed_tokens} tokens of {offer.length} offered"
            )
        if offer.forks:
            self._raw_from[request_id] = self.geometry.raw_start(offer.length)
            # The window layers' managers may get their turn after the fork has taken pages from the pool.
            self.block_pool.touch(offer.beside)
            self.req_to_blocks[request_id] = self._fork(offer)
            self.block_pool.free_blocks(reversed(offer.beside))
        else:
            self._raw_from[request_id] = offer.row.raw_from if offer.row else 0
            self.req_to_blocks[request_id] = self._take_over(offer)
        self._slots[request_id] = self._resumed[request_id] = offer.length
        self._next_prefix[request_id] = self.geometry.sealed(offer.length)
        self._fresh.add(request_id)
        self._offer = None
        self.counters["reused_tokens"] += offer.length

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
        if request := self._requests.get(request_id):
            self._watch_prefix(request, self.windows.pending(request_id, num_tokens))
        return new

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Remember whose row this is; its tokens are read when the request ends."""
        name = request.request_id
        self.num_cached_block[name] = 0
        if name not in self._requests:
            self._requests[name] = request
            self._fresh.add(name)
            self._count_return(request)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """The request ended or was preempted: keep its row if it can be resumed, else give its pages back."""
        pages = self.req_to_blocks.pop(request_id, [])
        self.num_cached_block.pop(request_id, None)
        self._next_prefix.pop(request_id, None)
        self._resumed.pop(request_id, None)
        raw_from = self._raw_from.pop(request_id, 0)
        written = self._slots.pop(request_id, 0)
        request = self._requests.pop(request_id, None)
        if not pages or request is None or not self._keeps_rows:
            return pages
        # Tokens that are both computed and known: a step in flight when the request ends may have computed
        # more than is known, and the last sampled token is known but not computed.
        tokens = min(request.num_computed_tokens, request.num_tokens, written)
        excess = pages[self.geometry.pages(tokens) :]
        keep = [page.block_id for page in pages[: len(pages) - len(excess)]]
        if keep and self.resident.add(request_id, keep, tokens, written, self._hashes(request), raw_from):
            kept = self.resident.newest()
            self.windows.hold(kept, request.block_hashes, kept.targets)
            self._enforce_share()
            return excess
        return pages

    def new_step_starts(self) -> None:
        """Once a step, before anything is scheduled."""
        self._step += 1
        self._fresh.clear()
        self._offer = None
        if self._check:
            self.check_integrity()

    # ---- offers ---------------------------------------------------------------------------------------

    def _hashes(self, request: Request) -> Sequence[Any]:
        """The hash of the prefix that ends with each whole page of a request."""
        return page_hashes(request.block_hashes, self.block_pool, self.geometry.page_tokens)

    def _idle_offer(self, block_hashes: Sequence[Any], limit: int) -> Offer | None:
        hashes = page_hashes(block_hashes, self.block_pool, self.geometry.page_tokens)
        while (found := self.resident.find(hashes, limit, self._step)) is not None:
            row, length = found
            if (beside := self.windows.blocks_at(block_hashes, length)) is not None:
                return Offer(length, self.block_pool.blocks[row.held()[0]], row=row, beside=tuple(beside))
            limit = length - 1
        return None

    def _running_offer(self, block_hashes: Sequence[Any], limit: int) -> Offer | None:
        """What a running request has computed of this prompt, near its end: two answers to one question."""
        hashes = page_hashes(block_hashes, self.block_pool, self.geometry.page_tokens)
        if not hashes:
            return None
        best: Offer | None = None
        for name, request in self._requests.items():
            own = self._hashes(request)
            if name in self._fresh or not own or own[0] != hashes[0]:
                continue
            # Written so far, or in this step: of its drafts some may have been rejected.
            written = self._slots[name]
            tokens = min(request.num_computed_tokens, request.num_tokens)
            lengths = self.resident.resumable(tokens, written, self._raw_from.get(name, 0))
            for length in reversed(lengths):
                index = length // self.geometry.page_tokens - 1
                if (
                    length <= limit
                    and index < min(len(own), len(hashes))
                    and own[index] == hashes[index]
                    and (beside := self.windows.blocks_at(block_hashes, length)) is not None
                ):
                    if best is None or length > best.length:
                        ticket = self.req_to_blocks[name][0]
                        best = Offer(length, ticket, source=name, beside=tuple(beside))
                    break
        return best

    def _accepted(self, new_computed_blocks: Sequence[KVCacheBlock]) -> Offer | None:
        if not new_computed_blocks:
            return None
        if self._offer is None or self._offer.ticket is not new_computed_blocks[0]:
            raise CacheIntegrityError("a request continues a row that was not offered to it in this step")
        return self._offer

    def _missing(self, request_id: str, num_tokens: int, offer: Offer | None) -> int:
        """Pages to be found for a request to hold ``num_tokens``."""
        needed = self.geometry.pages(num_tokens)
        if offer is None:
            return max(0, needed - len(self.req_to_blocks.get(request_id, ())))
        resumed = self.geometry.resumed_pages(offer.length)
        if offer.forks:
            return needed - (resumed - self.geometry.ring_entries(offer.length))
        # What lies beyond the resumed length is given back first, which frees what has no other owner.
        row = offer.row.pages if offer.row else []
        freed = sum(page is not None and self.block_pool.blocks[page].ref_cnt == 1 for page in row[resumed:])
        return max(0, needed - min(resumed, len(row)) - freed)

    # ---- taking over and forking ------------------------------------------------------------------------

    def _take_over(self, offer: Offer) -> list[KVCacheBlock]:
        row = offer.row
        if row is None:
            raise CacheIntegrityError("only an idle row can be taken over")
        pages = self._blocks(self.resident.take(row))
        self.windows.release(row)  # their managers take them over in this same call of vLLM's
        held = self.geometry.resumed_pages(offer.length)
        self.block_pool.free_blocks(reversed(pages[held:]))
        self.counters["takeovers"] += 1
        self.counters["rewinds"] += offer.length < max(row.targets)
        return pages[:held]

    def _fork(self, offer: Offer) -> list[KVCacheBlock]:
        """A row that shares the source's sealed pages and holds copies of the raw tokens that it needs."""
        source = self._source_pages(offer)
        sealed = source[self.geometry.ring_pages : self.geometry.resumed_pages(offer.length)]
        shared = self._blocks(page for page in sealed if page is not None)
        self.block_pool.touch(shared)
        self.resident.mark_forked(page.block_id for page in shared)
        ring = self.block_pool.get_new_blocks(self.geometry.ring_entries(offer.length))
        for entry in self.geometry.raw_entries(offer.length):
            self._copy(source[entry], ring[entry])
        if offer.row:
            self.resident.touch(offer.row)
        self.counters["forks"] += 1
        return ring + shared

    def _source_pages(self, offer: Offer) -> list[int | None]:
        if offer.row is not None:
            return offer.row.pages
        if offer.source is None:
            raise CacheIntegrityError("an offer without a source")
        return [page.block_id for page in self.req_to_blocks[offer.source]]

    def _copy(self, source: int | None, target: KVCacheBlock) -> None:
        """Have the worker copy a page before the step runs; vLLM gives the two extra references back."""
        if source is None:
            raise CacheIntegrityError("a raw token's page is missing from the row that is forked")
        pair = (self.block_pool.blocks[source], target)
        self.block_pool.touch(pair)
        self._pending_cow_copies.append(pair)

    # ---- prefixes that several conversations share ------------------------------------------------------

    def _watch_prefix(self, request: Request, pending: int) -> None:
        """Keep the prefix that the request has just left behind, if another request had it before and if
        there is room beside ``pending`` pages."""
        name, computed = request.request_id, request.num_computed_tokens
        chunk = self._next_prefix.get(name, 0)
        length = self.geometry.prefix_length(chunk)
        if computed < length:
            return
        self._next_prefix[name] = chunk + 1
        index = length // self.geometry.page_tokens - 1
        prompt = request.prompt_token_ids
        hashes = self._hashes(request)
        if prompt is None or length > len(prompt) or index >= len(hashes):
            return
        prefix = hashes[index]
        known = Prompt.of(hashes, prompt, self.geometry.page_tokens)
        shared = self._prefixes.shared(prefix, known)
        if not shared or self.resident.has_prefix(prefix):
            return
        raw_from = self._raw_from.get(name, 0)
        if (
            self._keeps_rows
            and self.geometry.can_rewind(computed, length)
            and self.geometry.raw_start(length) >= raw_from
        ):
            self._keep_prefix(request, length, prefix, pending)

    def _keep_prefix(self, request: Request, length: int, prefix: Any, pending: int) -> None:
        name = request.request_id
        row = self.req_to_blocks[name]
        entries = self.geometry.raw_entries(length)
        if self._policy.reserve and len(entries) + self.outstanding() > self._available(None):
            return
        if not self._make_room(len(entries) + pending + self._policy.headroom):
            return
        pages: list[int | None] = [None] * self.geometry.ring_pages
        for entry, page in zip(entries, self.block_pool.get_new_blocks(len(entries)), strict=True):
            pages[entry] = page.block_id
            self._copy(row[entry].block_id, page)
        shared = row[self.geometry.ring_pages : self.geometry.resumed_pages(length)]
        self.block_pool.touch(shared)
        pages += [page.block_id for page in shared]
        if shorter := self.resident.unused_prefix(name):  # the longer one serves whoever shares it
            self.block_pool.free_blocks(self._blocks(self.resident.take(shorter)))
            self.windows.release(shorter)
        self.resident.add_prefix(name, pages, length, prefix, self._step)
        self.windows.hold(self.resident.newest(), request.block_hashes, [length])
        self.counters["prefixes"] += 1
        self._enforce_share()

    def _count_return(self, request: Request) -> None:
        """Was this a conversation that had been evicted?"""
        resumed = self._resumed.get(request.request_id, 0)
        again = self._lost.returned(self._hashes(request), self.geometry.page_tokens, resumed)
        self.counters["misses"] += again > 0
        self.counters["reprefilled_tokens"] += max(0, again)

    # ---- room -------------------------------------------------------------------------------------------

    def outstanding(self) -> int:
        """Pages that running requests may still ask for."""
        return sum(
            max(0, self.geometry.pages(self.final_length(name)) - len(row))
            + self.windows.outstanding(name, self.final_length(name))
            for name, row in self.req_to_blocks.items()
        )

    def _releasable(self, spare: Row | None = None) -> int:
        return self.resident.releasable(spare) + self.windows.releasable(spare)

    def _available(self, spare: Row | None) -> int:
        return self.block_pool.get_num_free_blocks() + self._releasable(spare)

    def _make_room(self, pages: int, spare: Row | None = None) -> bool:
        """Evict until so many pages are free, or nothing where that cannot be. Returns whether they are."""
        if self.block_pool.get_num_free_blocks() >= pages:
            return True
        if self._available(spare) < pages:
            return False
        while self.block_pool.get_num_free_blocks() < pages and (row := self.resident.oldest(spare)):
            self._evict(row)
        return True

    def _enforce_share(self) -> None:
        """Idle rows hold no more than their share of the pool."""
        most = int(self._policy.resident_share * (self.block_pool.num_gpu_blocks - 1))
        while self._releasable() > most and (row := self.resident.oldest()):
            self._evict(row)

    def _evict(self, row: Row) -> None:
        self.block_pool.free_blocks(reversed(self._blocks(self.resident.take(row))))
        self.windows.release(row)
        self.counters["evictions"] += 1
        if not row.shared:
            self._lost.evicted(row)

    def _blocks(self, pages: Iterable[int]) -> list[KVCacheBlock]:
        return [self.block_pool.blocks[page] for page in pages]

    @contextmanager
    def keeping_nothing(self) -> Iterator[None]:
        """While this is open, requests that end leave no row behind."""
        self._keeps_rows = False
        try:
            yield
        finally:
            self._keeps_rows = True

    def evict(self, rows: Iterable[Row] | None = None) -> tuple[int, int]:
        """Drop idle rows, by default all. Returns how many there were and the pages that this freed."""
        chosen = self.resident.rows() if rows is None else list(rows)
        before = self.block_pool.get_num_free_blocks()
        for row in chosen:
            self._evict(row)
        return len(chosen), self.block_pool.get_num_free_blocks() - before

    # ---- looking in -----------------------------------------------------------------------------------

    def held_rows(self) -> tuple[dict[str, list[int]], list[Row]]:
        """Page ids of the running requests, and the rows that nobody is using. Copies."""
        running = {name: [block.block_id for block in row] for name, row in list(self.req_to_blocks.items())}
        return running, self.resident.rows()

    def occupancy(self) -> Occupancy:
        """What is in the pool now."""
        now = time.monotonic()
        running, idle = self.held_rows()
        holdings = [
            Holding(name, "running", self._slots.get(name, 0), row, beside=self.windows.running(name))
            for name, row in running.items()
        ]
        for row in idle:
            state = "prefix" if row.shared else "resident"
            beside = self.windows.held(row)
            holdings.append(Holding(row.name, state, row.tokens, list(row.pages), now - row.since, beside))
        return Occupancy(
            holdings,
            total_pages=self.block_pool.num_gpu_blocks - 1,
            free_pages=self.block_pool.get_num_free_blocks(),
            counters=dict(self.counters),
        )

    def snapshot(self) -> CacheSnapshot:
        """The same, counted."""
        return self.occupancy().snapshot(self.geometry)

    def check_integrity(self) -> None:
        """Raise CacheIntegrityError unless every page has its exact number of owners and every row its exact
        length. Between steps only: within one, copies hold references of their own."""
        self.resident.check_integrity()
        integrity.check(self, self._slots)
