"""The cache manager: hands out rows of pages to requests and keeps the rows of idle conversations.

Every quantity follows from :mod:`tangram.geometry`: a running request holds exactly ``pages(n)`` pages for
the ``n`` tokens that have a slot, an idle conversation those that resuming it needs. A request that continues
an idle conversation takes its row over and fills the holes with fresh pages, whose slots are written before
they are read. One that continues what another is using (a running request, or a prefix that several share)
forks: sealed pages, which nobody writes again, are shared by reference count, and the raw tokens that it
needs are copied to a ring of its own. Idle rows stay referenced, so vLLM sees their pages as used; they are
evicted when an allocation needs them and only then: those first whose owner began another conversation, then
the least recently used, and those last whose users are back and wait.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request

from tangram import integrity, pins
from tangram.errors import CacheIntegrityError
from tangram.hybrid import ByPool, Windows
from tangram.live import Live, Return
from tangram.occupancy import Holding, Occupancy
from tangram.offers import Offer, Offers
from tangram.resident import ResidentRows, Row
from tangram.room import Policy, Room
from tangram.sharing import PrefixWatch, Prompt
from tangram.spec import RaggedSpec
from tangram.telemetry import CacheSnapshot

CHECK_VARIABLE = "TANGRAM_CHECK_INTEGRITY"
"""Set to 1 to verify the whole bookkeeping at every step (tests do; it costs time)."""

LATELY = 32
"""Of so many admitted requests it is remembered whether they took over a conversation's row."""

COUNTERS = (
    "takeovers",
    "forks",
    "rewinds",
    "misses",
    "evictions",
    "thinned",
    "seals",
    "prefixes",
    "crowded_steps",
    "reused_tokens",
    "reprefilled_tokens",
)


class RaggedManager(SingleTypeKVCacheManager):
    """See the module. One per engine, on the scheduler's side."""

    kv_cache_spec: RaggedSpec

    def __init__(self, kv_cache_spec: RaggedSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.geometry = kv_cache_spec.geometry
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.resident = ResidentRows(self.geometry, lambda page: self.block_pool.blocks[page].ref_cnt)
        self.room = Room(self.block_pool, self.resident, Windows(self.block_pool), self.counters)
        self.live: dict[str, Live] = {}
        self.final_length: Callable[[str], int] = lambda request_id: 0  # the most that a request can hold
        self.defers: Callable[[str, int, int], bool] = lambda *_: False  # see tangram.crowd
        self.returns: deque[Return] = deque(maxlen=LATELY)  # what was admitted of late
        self._offers = Offers(self.geometry, self.block_pool, self.resident, self.live, self.req_to_blocks)
        self._prefixes = PrefixWatch()
        self._offer: Offer | None = None
        self._step = 0
        self._keeps_rows = True
        self._check = os.environ.get(CHECK_VARIABLE) == "1"
        vars(RaggedManager)["find_longest_cache_hit"].register(self, self.block_pool)

    def configure(self, policy: Policy) -> None:
        """How rows may be used; the scheduler knows the configuration."""
        self.room.policy = policy
        self.resident.observed = policy.observed

    @property
    def windows(self) -> Windows:
        """The sliding-window layers' managers."""
        return self.room.windows

    # ---- what vLLM's coordinator calls, in the order of a request's life -----------------------------

    @ByPool
    def find_longest_cache_hit(
        self, block_hashes: Sequence[Any], max_length: int, **_: Any
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """A row that this prompt continues: its first page as a ticket, and the tokens it offers."""
        self._offer = self._offers.best(block_hashes, max_length, self.windows, self._step)
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
        at idle rows' expense when that is enough to grant them. A new request that does not fit, with
        reservation on as far as its last token, is told that it needs more than there is."""
        offer = self._accepted(new_computed_blocks)
        if offer is not None and request_id not in self.req_to_blocks:
            offer = self._offer = replace(offer, stays=self._room_for_both(request_id, num_tokens, offer))
        missing = self._missing(request_id, num_tokens, offer)
        beside = self.windows.missing(request_id, num_tokens, offer.length if offer else 0, *args, **kwargs)
        beside += sum(block.ref_cnt == 0 for block in offer.beside) if offer else 0
        if request_id not in self.req_to_blocks and not self._fits(request_id, num_tokens, offer, beside):
            return self.block_pool.num_gpu_blocks
        self.room.make_with_headroom(missing + beside, offer.row if offer else None)
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
        self.req_to_blocks[request_id] = self._fork(offer) if offer.forks else self._take_over(offer)
        self.live[request_id] = Live(
            self._step,
            slots=offer.length,
            resumed=offer.length,
            returned=offer.row is not None and not offer.row.shared,
            raw_from=self._raw_from(offer),
            pinned=offer.row is not None and offer.row.pinned and not offer.forks,
            next_prefix=self.geometry.sealed(offer.length),
        )
        self._offer = None
        self.counters["reused_tokens"] += offer.length

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Extend the row to ``pages(num_tokens)``."""
        row = self.req_to_blocks[request_id]
        live = self.live.get(request_id)
        if live is None:
            live = self.live[request_id] = Live(self._step)
        before, live.slots = live.slots, max(live.slots, num_tokens)  # less, where drafts were rejected
        new = self.block_pool.get_new_blocks(max(0, self.geometry.pages(num_tokens) - len(row)))
        row.extend(new)
        self.counters["seals"] += self.geometry.sealed(live.slots) - self.geometry.sealed(before)
        if live.request is not None:
            self._watch_prefix(live, live.request, self.windows.pending(request_id, num_tokens))
        return new

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Remember whose row this is; its tokens are read when the request ends."""
        self.num_cached_block[request.request_id] = 0
        live = self.live[request.request_id]
        if live.request is None:
            live.request = request
            self._count_return(live, request)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """The request ended or was preempted: keep of its row what resuming it needs, give the rest back."""
        pages = self.req_to_blocks.pop(request_id, [])
        self.num_cached_block.pop(request_id, None)
        live = self.live.pop(request_id, None)
        if not pages or live is None or live.request is None or not self._keeps_rows:
            return pages
        self._passed_prefix(live, live.request)  # a wide step may have been its first and last
        row, hashes = [page.block_id for page in pages], self._offers.hashes(live.request)
        known, owner = live.known_tokens(), live.request.cache_salt
        thins = not self.geometry.window_layers  # their blocks are kept for the end only
        if not self.resident.add(request_id, row, known, live.slots, hashes, live.raw_from, owner, thins):
            return pages
        idle = self.resident.newest()
        kept = set(idle.held())
        self.windows.hold(idle, live.request.block_hashes, idle.targets)
        pins.keep(self, idle, live.pinned)
        self.room.enforce_share()
        return [page for page in pages if page.block_id not in kept]

    def new_step_starts(self) -> None:
        """Once a step, before anything is scheduled."""
        self._step += 1
        self._offer = None
        if self._check:
            self.check_integrity()

    def step_end(self, request: Request, start: int, end: int) -> int:
        """Where a step from ``start`` cached tokens to at most ``end`` is to end: at the next seal boundary,
        unless steps may be wide and this one brings enough. One with drafts is not wide: they may be taken
        back, and what was sealed cannot. A prefix that another conversation had, too, can be kept only while
        its last tokens are raw: a wide step that would pass it ends there."""
        boundary, least = self.geometry.next_boundary(start), self.geometry.least_wide
        if end <= boundary or not self.room.policy.wide or end - start < least or end > request.num_tokens:
            return min(end, boundary)
        hashes, tokens = self._offers.hashes(request), request.prompt_token_ids
        last = self.geometry.sealed(end - self.geometry.page_tokens)
        for chunk in range(last - 1, self.geometry.sealed(start) - 1, -1):
            length = self.geometry.prefix_length(chunk)
            if start < length < end and (prefix := self._prefix(hashes, tokens, length)) is not None:
                shared = self._prefixes.known_to_others(
                    prefix, lambda: Prompt.of(hashes, tokens or (), self.geometry.page_tokens)
                )
                if shared and not self.resident.has_prefix(prefix):
                    # Where that is too near to be worth a wide step, the next step gets there.
                    return length if length - start >= least else boundary
        return end

    def arrived(self, request: Request) -> None:
        """A request waits from now on. The conversation that it goes on with is evicted last; when it goes on
        with none, those that its owner had before are evicted first: who begins another one rarely comes back
        soon. An owner is a ``cache_salt``."""
        row = self.row_of(request)
        if row is not None and not row.shared:
            self.resident.expect(row)
        elif request.cache_salt is not None:
            self.resident.leave(request.cache_salt)

    def row_of(self, request: Request) -> Row | None:
        """The idle row that a waiting request will continue, if there is one."""
        if request.skip_reading_prefix_cache:
            return None
        return self._offers.idle_row(request, self.windows, self._step)

    # ---- admission ------------------------------------------------------------------------------------

    def outstanding(self) -> int:
        """Pages that running requests may still ask for."""
        return sum(
            max(0, self.geometry.pages(self.final_length(name)) - len(row))
            + self.windows.outstanding(name, self.final_length(name))
            for name, row in self.req_to_blocks.items()
        )

    def _accepted(self, new_computed_blocks: Sequence[KVCacheBlock]) -> Offer | None:
        if not new_computed_blocks:
            return None
        if self._offer is None or self._offer.ticket is not new_computed_blocks[0]:
            raise CacheIntegrityError("a request continues a row that was not offered to it in this step")
        return self._offer

    def _room_for_both(self, request_id: str, num_tokens: int, offer: Offer) -> bool:
        """Whether an idle conversation that a request continues from before its end can stay as it is: where
        nobody's pages are needed for that, and be it for all that the request may still ask for. A pin goes
        with whoever continues; the blocks of sliding-window layers are kept for one only."""
        if not offer.rewinds or offer.row is None or offer.row.pinned or offer.beside:
            return False
        final = self.geometry.pages(max(num_tokens, self.final_length(request_id)))
        wanted = final + self.outstanding() + self.room.policy.headroom
        return wanted <= self.block_pool.get_num_free_blocks()

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
        held = sum(page is not None for page in row[:resumed])
        return max(0, needed - held - freed)

    def _fits(self, request_id: str, num_tokens: int, offer: Offer | None, beside: int) -> bool:
        """Whether there is, or can be, room for a new request. One that fits, but not beside the row that it
        continues, has that row evicted: it will be asked about again, without."""
        spare = offer.row if offer else None
        if offer is None or (spare is not None and spare.shared):
            missing = self._missing(request_id, num_tokens, offer) + beside
            if self.defers(request_id, self.geometry.pages(num_tokens), missing):
                return False
        final, others = num_tokens, beside
        if self.room.policy.reserve:
            final = max(num_tokens, self.final_length(request_id))
            others = self.outstanding() + self.windows.most(final)
            others -= self.windows.passed_on(spare) if spare and not spare.shared else 0
        if self._missing(request_id, final, offer) + others <= self.room.available(spare):
            return True
        if spare and self.geometry.pages(final) + others <= self.room.available():
            self.room.evict(spare)
        return False

    # ---- taking over and forking ------------------------------------------------------------------------

    def _raw_from(self, offer: Offer) -> int:
        """The first position that the ring of whoever accepts the offer can hold."""
        if offer.row is None or offer.forks:
            return self.geometry.raw_start(offer.length)
        # Its targets are what had not been overwritten, and what lies before them was given back.
        return self.geometry.oldest_held(offer.row.targets, offer.length)

    def _take_over(self, offer: Offer) -> list[KVCacheBlock]:
        row = offer.row
        if row is None:
            raise CacheIntegrityError("only an idle row can be taken over")
        self.resident.take(row)
        length = self.geometry.resumed_pages(offer.length)
        head, beyond = row.pages[:length], row.pages[length:]
        # The window layers' managers take over in this same call of vLLM's, but maybe after this one.
        self.block_pool.touch(offer.beside)
        self.windows.release(row)
        self.block_pool.free_blocks(reversed(self.room.blocks(page for page in beyond if page is not None)))
        fresh = iter(self.block_pool.get_new_blocks(head.count(None)))
        pages = [next(fresh) if page is None else self.block_pool.blocks[page] for page in head]
        self.block_pool.free_blocks(reversed(offer.beside))
        self.counters["takeovers"] += 1
        self.counters["rewinds"] += offer.rewinds
        return pages

    def _fork(self, offer: Offer) -> list[KVCacheBlock]:
        """A row that shares the source's sealed pages and holds copies of the raw tokens that it needs."""
        # The window layers' managers may get their turn after this has taken pages from the pool.
        self.block_pool.touch(offer.beside)
        source = self._source_pages(offer)
        sealed = source[self.geometry.ring_pages : self.geometry.resumed_pages(offer.length)]
        shared = self.room.blocks(page for page in sealed if page is not None)
        self.block_pool.touch(shared)
        self.resident.mark_forked(page.block_id for page in shared)
        ring = self.block_pool.get_new_blocks(self.geometry.ring_entries(offer.length))
        for entry in self.geometry.raw_entries(offer.length):
            self._copy(source[entry], ring[entry])
        self.block_pool.free_blocks(reversed(offer.beside))
        if offer.row:
            self.resident.leave_behind(offer.row) if offer.stays else self.resident.touch(offer.row)
        self.counters["forks"] += 1
        self.counters["rewinds"] += offer.rewinds
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

    def _prefix(self, hashes: Sequence[Any], tokens: Sequence[int] | None, length: int) -> Hashable | None:
        """The hash of a prompt's first ``length`` tokens; None where it is shorter, or not told in tokens."""
        index = length // self.geometry.page_tokens - 1
        if tokens is None or length > len(tokens) or index >= len(hashes):
            return None
        prefix: Hashable = hashes[index]
        return prefix

    def _watch_prefix(self, live: Live, request: Request, pending: int) -> None:
        """Keep the longest prefix that a request has just left behind, if another conversation had it before
        and if there is room beside ``pending`` pages."""
        found = self._passed_prefix(live, request)
        if found is not None and self._keeps_rows and not self.resident.has_prefix(found[1]):
            self._keep_prefix(request, *found, pending)

    def _passed_prefix(self, live: Live, request: Request) -> tuple[int, Hashable] | None:
        """Remember the prefixes that a request has left behind since this was last asked. Returns the longest
        that another conversation had before and that is still there to be copied, and its length."""
        computed, found, prompt = request.num_computed_tokens, None, None
        while (length := self.geometry.prefix_length(live.next_prefix)) <= computed:
            live.next_prefix += 1
            tokens, hashes = request.prompt_token_ids, self._offers.hashes(request)
            prefix = self._prefix(hashes, tokens, length)
            if prefix is None:
                live.next_prefix = max(live.next_prefix, self.geometry.sealed(computed))
                break
            prompt = prompt or Prompt.of(hashes, tokens or (), self.geometry.page_tokens)
            shared = self._prefixes.shared(prefix, prompt)
            if shared and self.geometry.intact(length, computed, live.raw_from):
                found = length, prefix
        return found

    def _keep_prefix(self, request: Request, length: int, prefix: Any, pending: int) -> None:
        name = request.request_id
        row, entries = self.req_to_blocks[name], self.geometry.raw_entries(length)
        if self.room.policy.reserve and len(entries) + self.outstanding() > self.room.available():
            return
        if not self.room.make(len(entries) + pending + self.room.policy.headroom):
            return
        pages: list[int | None] = [None] * self.geometry.ring_pages
        for entry, page in zip(entries, self.block_pool.get_new_blocks(len(entries)), strict=True):
            pages[entry] = page.block_id
            self._copy(row[entry].block_id, page)
        shared = row[self.geometry.ring_pages : self.geometry.resumed_pages(length)]
        self.block_pool.touch(shared)
        pages += [page.block_id for page in shared]
        if shorter := self.resident.unused_prefix(name):  # the longer one serves whoever shares it
            self.room.drop(shorter)
        self.resident.add_prefix(name, pages, length, prefix, self._step)
        self.windows.hold(self.resident.newest(), request.block_hashes, [length])
        self.counters["prefixes"] += 1
        self.room.enforce_share()

    def _count_return(self, live: Live, request: Request) -> None:
        """Was this a conversation that had been evicted?"""
        hashes = self._offers.hashes(request)
        again = self.room.lost.returned(hashes, self.geometry.page_tokens, live.resumed)
        if not request.num_preemptions:
            came_back = Return.IN_VAIN if again else Return.NONE
            self.returns.append(Return.FOUND if live.returned else came_back)
        self.counters["misses"] += again > 0 and not live.returned
        self.counters["reprefilled_tokens"] += max(0, again)

    # ---- idle rows ------------------------------------------------------------------------------------

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
            self.room.evict(row)
        return len(chosen), self.block_pool.get_num_free_blocks() - before

    # ---- looking in -----------------------------------------------------------------------------------

    def slots(self, request_id: str) -> int:
        """Tokens of a running request that have a slot."""
        return self.live[request_id].slots if request_id in self.live else 0

    def _pinned(self, request_id: str) -> bool:
        return request_id in self.live and self.live[request_id].pinned

    def held_rows(self) -> tuple[dict[str, list[int]], list[Row]]:
        """Page ids of the running requests, and the rows that nobody is using. Copies."""
        running = {name: [block.block_id for block in row] for name, row in list(self.req_to_blocks.items())}
        return running, self.resident.rows()

    def occupancy(self) -> Occupancy:
        """What is in the pool now."""
        now = time.monotonic()
        running, idle = self.held_rows()
        beside = self.windows.running
        holdings = [
            Holding(name, "running", self.slots(name), row, beside=beside(name), pinned=self._pinned(name))
            for name, row in running.items()
        ]
        for row in idle:
            state = "prefix" if row.shared else "resident"
            held = (list(row.pages), now - row.since, self.windows.held(row), max(row.targets))
            holdings.append(Holding(row.name, state, row.tokens, *held, pinned=row.pinned))
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
        integrity.check(self)
