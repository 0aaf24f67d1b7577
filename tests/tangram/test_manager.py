"""The cache manager on vLLM's real block pool, with a simulated worker that checks every page it reads.

The worker writes (conversation, position) into pages exactly where the geometry says, seals between steps,
and reads all that attention would read. A page handed out twice, a ring overwritten too early, a row resumed
from the wrong place or a page missing shows as a wrong token.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from vllm.v1.core.block_pool import BlockPool

    from tangram.manager import RaggedManager
    from tangram.room import Policy
    from tangram.spec import RaggedSpec

from tangram.errors import CacheIntegrityError
from tangram.geometry import Geometry, Tier

G = Geometry(2, 2, 8, 2, 4, 16, 8, 8, 2, (Tier(4, ((0, 0), (1, 1))), Tier(12, ((0, 1), (1, 0)))))


def manager(pages: int, enable_caching: bool = True) -> RaggedManager:
    spec = RaggedSpec(
        block_size=G.page_tokens,
        num_kv_heads=2,
        head_size=8,
        dtype=torch.bfloat16,
        num_head_slots=1,
        state_content_bytes=G.state_bytes,
        geometry=G,
    )
    pool = BlockPool(pages + 1, enable_caching, G.page_tokens)
    return RaggedManager(spec, pool, enable_caching, 0, scheduler_block_size=G.page_tokens)


@dataclass
class FakeRequest:
    """What the manager reads of vLLM's Request."""

    request_id: str
    tokens: list[Any]
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    cache_salt: str | None = None
    sealed: dict[int, list[int]] = field(default_factory=dict)

    @property
    def prompt_token_ids(self) -> list[Any]:
        return self.tokens

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[Any]:
        size = G.page_tokens
        return [hash(tuple(self.tokens[: size * i])) for i in range(1, len(self.tokens) // size + 1)]


class Worker:
    """Executes steps on a dictionary in place of memory."""

    def __init__(self, m: RaggedManager) -> None:
        self.m = m
        self.memory: dict[tuple[int, int], tuple[int, Any]] = {}

    def row(self, request: FakeRequest) -> list[int]:
        return [block.block_id for block in self.m.req_to_blocks[request.request_id]]

    def schedule(self, request: FakeRequest, budget: int) -> bool:
        """One step of a request, as vLLM's allocate_slots does it. False when there is no room."""
        m, hit, length = self.m, [], 0
        m.new_step_starts()
        fresh = request.request_id not in m.req_to_blocks
        if fresh and m.enable_caching:
            ((hit,), length) = m.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        start = request.num_computed_tokens + length
        end = min(request.num_tokens, start + budget, G.next_boundary(start))
        targets = [request.num_tokens, end] if fresh else [end]  # the admission check comes first
        for target in targets:
            if m.get_num_blocks_to_allocate(request.request_id, target, hit, start, start, target) > (
                m.block_pool.get_num_free_blocks()
            ):
                return False
        if hit:
            m.add_local_computed_blocks(request.request_id, hit, length, 0)
        m.allocate_new_blocks(request.request_id, end, end)
        if m.enable_caching:
            m.cache_blocks(request, end)  # type: ignore[arg-type]
        self.copy()
        self.execute(request, start, end)
        request.num_computed_tokens = end
        return True

    def copy(self) -> None:
        """What vLLM's worker does first in a step, and the scheduler afterwards."""
        for source, target in self.m.take_pending_cow_copies():
            for offset in range(G.page_tokens):
                key = (source.block_id, offset)
                if key in self.memory:
                    self.memory[target.block_id, offset] = self.memory[key]
            self.m.block_pool.free_blocks([source, target])

    def execute(self, request: FakeRequest, start: int, end: int) -> None:
        row = self.row(request)
        assert len(row) == G.pages(end)
        if (chunk := G.sealing(start)) is not None:
            for tier, of in enumerate(G.tiers):
                positions = self.choose(request, chunk, of.keep)
                for j, position in enumerate(positions):
                    token = self.memory[row[G.ring_index(position, tier)], position % G.page_tokens]
                    assert token == (position, request.tokens[position]), "sealing read a stale token"
                    self.memory[row[G.sealed_index(chunk, tier, j)], j % G.page_tokens] = token
        for position in range(start, end):
            for tier in range(G.num_tiers):
                self.memory[row[G.ring_index(position, tier)], position % G.page_tokens] = (
                    position,
                    request.tokens[position],
                )
        self.attend(request, row, end)

    def choose(self, request: FakeRequest, chunk: int, keep: int) -> list[int]:
        """Depends on the chunk's tokens only, as a scorer does."""
        span = range(chunk * G.chunk, (chunk + 1) * G.chunk)
        return sorted(sorted(span, key=lambda p: hash((request.tokens[p], p)))[:keep])

    def attend(self, request: FakeRequest, row: list[int], end: int) -> None:
        sealed = G.sealed(end - 1)
        for tier, of in enumerate(G.tiers):
            for chunk in range(sealed):
                for j, position in enumerate(self.choose(request, chunk, of.keep)):
                    seen = self.memory[row[G.sealed_index(chunk, tier, j)], j % G.page_tokens]
                    assert seen == (position, request.tokens[position]), "a sealed page was overwritten"
            for position in range(sealed * G.chunk, end):
                seen = self.memory[row[G.ring_index(position, tier)], position % G.page_tokens]
                assert seen == (position, request.tokens[position]), "a raw token was overwritten"

    def finish(self, request: FakeRequest) -> None:
        self.m.block_pool.free_blocks(reversed(self.m.pop_blocks_for_free(request.request_id)))


def conversation(name: str, tokens: int) -> list[Any]:
    return [(name, i) for i in range(tokens)]


def run(worker: Worker, request: FakeRequest, budget: int = 10**6) -> None:
    while request.num_computed_tokens < request.num_tokens:
        assert worker.schedule(request, budget)
        worker.m.check_integrity()


def test_a_continued_conversation_reads_only_its_new_tokens() -> None:
    worker = Worker(manager(200))
    first = FakeRequest("1", conversation("a", 70))
    run(worker, first)
    worker.finish(first)
    assert worker.m.block_pool.get_num_free_blocks() == 200 - G.idle_pages(70) > 200 - G.pages(70)
    second = FakeRequest("2", conversation("a", 90))
    assert worker.schedule(second, 1000)
    assert worker.m.counters["takeovers"] == 1
    assert worker.m.counters["reused_tokens"] == 68
    worker.m.check_integrity()


@pytest.mark.parametrize("tokens", range(4, 90))
def test_whoever_continues_a_row_has_its_holes_filled(tokens: int) -> None:
    """In a pool with not a page more than the holes need, and in one with a page less."""
    worker = Worker(manager(200))
    first = FakeRequest("1", conversation("a", tokens))
    run(worker, first)
    worker.finish(first)
    (row,) = worker.m.resident.rows()
    assert len(row.held()) == G.idle_pages(tokens) == 200 - worker.m.block_pool.get_num_free_blocks()
    held = tokens // G.page_tokens * G.page_tokens
    after = FakeRequest("2", conversation("a", held + 1))
    missing = G.pages(held + 1) - len(row.held())
    others = worker.m.block_pool.get_new_blocks(worker.m.block_pool.get_num_free_blocks() - missing + 1)
    assert not worker.schedule(after, 1000)
    if worker.m.resident.rows():  # it is not given up where that would not help either
        worker.m.block_pool.free_blocks(others[:1])
        assert worker.schedule(after, 1000)
        assert worker.m.counters["takeovers"] == 1
        assert worker.m.block_pool.get_num_free_blocks() == 0
        others = others[1:]
        worker.finish(after)
    worker.m.block_pool.free_blocks(others)
    worker.m.check_integrity()


def test_another_conversation_never_takes_a_row_over() -> None:
    worker = Worker(manager(200))
    for index, name in enumerate("ab"):
        request = FakeRequest(str(index), conversation(name, 70))
        run(worker, request)
        worker.finish(request)
    assert worker.m.counters["takeovers"] == 0
    assert len(worker.m.resident) == 2


@pytest.mark.parametrize(("pages", "stays"), [(G.idle_pages(74) + G.pages(98) - 1, False), (200, True)])
def test_regenerating_resumes_before_the_end_and_frees_what_lies_beyond(pages: int, stays: bool) -> None:
    """The answer before it stays where there is room for both: it goes first when there is none any more."""
    worker = Worker(manager(pages))
    worker.m.final_length = lambda _: 98
    first = FakeRequest("1", conversation("a", 74))  # sealed at 24, 40, 56, 72
    run(worker, first)
    worker.finish(first)
    other = FakeRequest("2", conversation("a", 68) + conversation("x", 30))
    run(worker, other, budget=3)
    assert (worker.m.counters["forks"], worker.m.counters["takeovers"]) == (stays, not stays)
    assert (worker.m.counters["rewinds"], worker.m.counters["reused_tokens"]) == (1, 68)
    assert [row.left for row in worker.m.resident.rows()] == [True] * stays
    worker.m.check_integrity()


def test_room_is_made_by_need_only_oldest_first() -> None:
    worker = Worker(manager(2 * G.idle_pages(40) + G.pages(40)))
    for name in "abc":
        request = FakeRequest(name, conversation(name, 40))
        run(worker, request)
        worker.finish(request)
    assert worker.m.counters["evictions"] == 0
    free = worker.m.block_pool.get_num_free_blocks()
    assert free == G.pages(40) - G.idle_pages(40) > 0
    request = FakeRequest("d", conversation("d", free // G.num_tiers * G.page_tokens))
    run(worker, request)
    assert worker.m.block_pool.get_num_free_blocks() == 0
    assert worker.m.counters["evictions"] == 0
    idle = {row.name: len(row.held()) for row in worker.m.resident.rows()}
    more = FakeRequest("e", conversation("e", 4))
    run(worker, more)
    assert (worker.m.counters["thinned"], worker.m.counters["evictions"]) == (1, 0)
    left = {row.name: len(row.held()) for row in worker.m.resident.rows()}
    assert left["a"] < idle["a"]
    assert left["b"] == idle["b"]
    before = worker.m.room.available()
    more = FakeRequest("f", conversation("f", before // G.num_tiers * G.page_tokens))
    run(worker, more)
    assert (worker.m.counters["thinned"], worker.m.counters["evictions"]) == (3, 3)


def test_a_thinned_conversation_goes_on_behind_its_last_boundary() -> None:
    worker = Worker(manager(G.idle_pages(40) + G.pages(44)))
    request = FakeRequest("a", conversation("a", 40))
    run(worker, request)
    worker.finish(request)
    (row,) = worker.m.resident.rows()
    worker.m.room.thin(row)
    worker.m.check_integrity()
    again = FakeRequest("b", conversation("a", 44))
    run(worker, again)  # the simulated worker checks every page that it reads
    assert worker.m.counters["reused_tokens"] == G.thinnest(40) == 28
    assert worker.m.counters["reprefilled_tokens"] == 40 - 28
    assert worker.m.counters["misses"] == 0


def test_a_new_conversation_is_no_return_of_one_that_was_thinned_and_evicted() -> None:
    worker = Worker(manager(3 * G.pages(44)))
    request = FakeRequest("a", conversation("a", 40))
    run(worker, request)
    worker.finish(request)
    (row,) = worker.m.resident.rows()
    worker.m.room.thin(row)
    worker.m.evict()
    run(worker, FakeRequest("b", [*conversation("a", 28), *conversation("b", 8)]))
    assert (worker.m.counters["misses"], worker.m.counters["reprefilled_tokens"]) == (0, 0)
    run(worker, FakeRequest("c", conversation("a", 44)))
    assert (worker.m.counters["misses"], worker.m.counters["reprefilled_tokens"]) == (1, 12)  # 28 are b's too


def test_nothing_is_evicted_for_a_request_that_cannot_fit_anyway() -> None:
    worker = Worker(manager(G.pages(40) + 1))
    request = FakeRequest("a", conversation("a", 40))
    run(worker, request)
    worker.finish(request)
    assert not worker.schedule(FakeRequest("b", conversation("b", 400)), 1000)
    assert worker.m.counters["evictions"] == 0


def test_headroom_that_cannot_be_had_does_not_keep_a_request_waiting() -> None:
    """vLLM's watermark applies to some requests only; the manager cannot know to which."""
    worker = Worker(manager(G.pages(100)))
    idle = FakeRequest("a", conversation("a", 12))
    run(worker, idle)
    worker.finish(idle)
    worker.m.configure(Policy(headroom=G.pages(100) // 2))
    run(worker, FakeRequest("b", conversation("b", 100)))
    assert worker.m.counters["evictions"] == 1


def test_headroom_is_made_where_it_can_be_had() -> None:
    worker = Worker(manager(2 * G.pages(40)))
    idle = FakeRequest("a", conversation("a", 40))
    run(worker, idle)
    worker.finish(idle)
    worker.m.configure(Policy(headroom=2 * G.pages(40) - G.idle_pages(40)))
    run(worker, FakeRequest("b", conversation("b", 8)))
    assert worker.m.counters["thinned"] == 1
    worker.m.configure(Policy(headroom=2 * G.pages(40) - 8))
    run(worker, FakeRequest("c", conversation("c", 4)))
    assert worker.m.counters["evictions"] == 1


def test_nothing_stays_while_nothing_is_to_be_kept() -> None:
    worker = Worker(manager(200))
    request = FakeRequest("a", conversation("a", 40))
    run(worker, request)
    with worker.m.keeping_nothing():
        worker.finish(request)
    assert worker.m.block_pool.get_num_free_blocks() == 200


def test_a_pool_that_one_conversation_fills_can_still_be_resumed() -> None:
    """The row being resumed is never evicted for its own sake, and its surplus counts as room."""
    worker = Worker(manager(G.pages(74)))
    first = FakeRequest("1", conversation("a", 74))
    run(worker, first)
    worker.finish(first)
    second = FakeRequest("2", conversation("a", 68) + conversation("x", 6))
    run(worker, second)
    assert worker.m.counters["takeovers"] == 1


def test_without_prefix_caching_nothing_stays() -> None:
    worker = Worker(manager(200, enable_caching=False))
    request = FakeRequest("1", conversation("a", 70))
    run(worker, request)
    worker.finish(request)
    assert worker.m.block_pool.get_num_free_blocks() == 200
    assert len(worker.m.resident) == 0


def test_evicting_all_returns_every_page() -> None:
    worker = Worker(manager(200))
    request = FakeRequest("1", conversation("a", 70))
    run(worker, request)
    worker.finish(request)
    assert worker.m.evict()[0] == 1
    assert worker.m.block_pool.get_num_free_blocks() == 200


def test_a_lost_page_is_reported() -> None:
    worker = Worker(manager(200))
    run(worker, FakeRequest("1", conversation("a", 30)))
    worker.m.req_to_blocks["1"].pop()
    with pytest.raises(CacheIntegrityError, match="the formula says"):
        worker.m.check_integrity()


def test_the_snapshot_adds_up() -> None:
    worker = Worker(manager(200))
    idle, busy = FakeRequest("1", conversation("a", 70)), FakeRequest("2", conversation("b", 30))
    run(worker, idle)
    worker.finish(idle)
    run(worker, busy)
    snapshot = worker.m.snapshot()
    assert {(s.id, s.state, s.tokens, s.pages) for s in snapshot.sequences} == {
        ("1", "resident", 70, G.idle_pages(70)),
        ("2", "running", 30, G.pages(30)),
    }
    assert snapshot.free_pages + sum(s.pages for s in snapshot.sequences) == snapshot.total_pages == 200


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(30, 140), st.integers(1, 40))
def test_no_order_of_events_mixes_up_a_page(seed: int, pool: int, budget: int) -> None:
    """Random turns, aborts, preemptions, regenerations and steps in a pool that is far too small."""
    rng = random.Random(seed)
    worker = Worker(manager(max(pool, G.pages(100))))
    histories = {name: conversation(name, rng.randint(1, 20)) for name in "abcdef"}
    running: dict[str, FakeRequest] = {}
    for serial in range(60):
        name = rng.choice("abcdef")
        if name not in running:
            history = histories[name]
            back = rng.choice([0, 0, 0, 1, 5, 12, 20, 30, len(history)])
            history = history[: max(1, len(history) - back)]
            history = history + [(name, serial, i) for i in range(rng.randint(1, 30))]
            histories[name] = history = history[:90]
            running[name] = FakeRequest(f"{name}{serial}", history)
        request = running[name]
        if not worker.schedule(request, rng.randint(1, budget)):
            victim = running.pop(rng.choice(sorted(running)))  # preempted, or aborted while waiting
            worker.finish(victim)
            victim.num_computed_tokens = 0
        elif request.num_computed_tokens == request.num_tokens or rng.random() < 0.1:
            worker.finish(running.pop(name))
        worker.m.check_integrity()
    for request in running.values():
        worker.finish(request)
    worker.m.check_integrity()
    worker.m.evict()
    assert worker.m.block_pool.get_num_free_blocks() == worker.m.block_pool.num_gpu_blocks - 1
