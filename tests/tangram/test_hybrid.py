"""Sliding-window layers on vLLM's real cache manager, with a simulated worker that checks what it reads.

The worker writes (conversation's token, position) into the blocks of every layer kind and reads all that
attention would read. A block handed out twice, freed too early or resumed from a wrong place shows as a wrong
token.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
    from vllm.v1.request import Request

    from tangram import plugin
    from tangram.hybrid import Windows
    from tangram.manager import RaggedManager
    from tangram.room import Policy
    from tangram.spec import RaggedSpec

from tangram.errors import CacheIntegrityError
from tangram.geometry import Geometry, Tier

G = Geometry(2, 2, 8, 2, 4, 16, 8, 8, 2, (Tier(4, ((0, 0), (1, 1))), Tier(12, ((0, 1), (1, 0)))))
BLOCK = 2
WINDOWS = (6, 6, 11)  # of three cache groups
LONGEST = 400


class Engine:
    """Scheduler and worker of one engine, reduced to what the cache sees."""

    def __init__(self, blocks: int, ours_first: bool = False, caching: bool = True) -> None:
        plugin.register()
        init_none_hash(sha256)
        sizes: dict[str, Any] = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
        own = RaggedSpec(
            block_size=G.page_tokens,
            num_head_slots=1,
            state_content_bytes=G.state_bytes,
            geometry=G,
            **sizes,
        )
        specs: list[Any] = [SlidingWindowSpec(block_size=BLOCK, sliding_window=w, **sizes) for w in WINDOWS]
        specs.insert(0 if ours_first else 2, own)
        groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
        config = KVCacheConfig(
            num_blocks=blocks + 1,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=0,  # vLLM's default
        )
        self.cache = KVCacheManager(
            config, LONGEST, G.page_tokens, BLOCK, max_in_flight_tokens=64, enable_caching=caching
        )
        managers = self.cache.coordinator.single_type_managers
        (self.ours,) = (m for m in managers if isinstance(m, RaggedManager))
        self.others = [m for m in managers if isinstance(m, SlidingWindowManager)]
        self.ours.room.windows = Windows.of(self.cache.coordinator, self.ours.resident.furthest_back())
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.memory: dict[tuple[int, int], tuple[int, int]] = {}
        self.serial = 0

    @property
    def free(self) -> int:
        return self.cache.block_pool.get_num_free_blocks()

    def request(self, tokens: list[int], salt: str = "user") -> Request:
        self.serial += 1
        return Request(
            f"r{self.serial}",
            list(tokens),
            SamplingParams(max_tokens=1),
            None,
            cache_salt=salt,
            block_hasher=self.hasher,
        )

    def step(self, request: Request, budget: int = 64) -> int | None:
        """One step of a request. Returns the tokens it resumed with, or None when there is no room."""
        self.cache.new_step_starts()
        fresh = request.num_computed_tokens == 0
        blocks, hit, _ = self.cache.get_computed_blocks(request) if fresh else (None, 0, 0)
        start = request.num_computed_tokens + hit
        end = min(request.num_tokens, start + budget, G.next_boundary(start))
        allocated = self.cache.allocate_slots(
            request, end - start, hit, blocks, full_sequence_must_fit=fresh, has_scheduled_reqs=False
        )
        if allocated is None:
            return None
        request.num_computed_tokens = end
        for source, target in self.ours.take_pending_cow_copies():
            self.memory |= {
                (target.block_id, offset): token
                for (block, offset), token in self.memory.items()
                if block == source.block_id
            }
            self.cache.block_pool.free_blocks([source, target])
        self.execute(request, start, end)
        self.ours.check_integrity()
        return hit

    def execute(self, request: Request, start: int, end: int) -> None:
        """Write the step's tokens for all layers, then read what its queries see."""
        tokens = request.all_token_ids
        row = [block.block_id for block in self.ours.req_to_blocks[request.request_id]]
        assert len(row) == G.pages(end)
        raw = range(G.sealed(start) * G.chunk, end)
        for positions, write in ((range(start, end), True), (raw, False)):
            for p in positions:
                for tier in range(G.num_tiers):
                    self.touch(row[G.ring_index(p, tier)], p % G.page_tokens, (tokens[p], p), write)
        for manager in self.others:
            blocks = manager.req_to_blocks[request.request_id]
            seen = range(max(0, start - manager.sliding_window + 1), end)
            for positions, write in ((range(start, end), True), (seen, False)):
                for p in positions:
                    block = blocks[p // BLOCK]
                    assert not block.is_null, "a block inside the window is gone"
                    self.touch(block.block_id, p % BLOCK, (tokens[p], p), write)

    def touch(self, block: int, offset: int, token: tuple[int, int], write: bool) -> None:
        if write:
            self.memory[block, offset] = token
        else:
            assert self.memory[block, offset] == token

    def run(self, tokens: list[int], salt: str = "user", budget: int = 64) -> tuple[Request, int]:
        """A request from its first step to its last token; it is not freed."""
        request = self.request(tokens, salt)
        hit = self.step(request, budget)
        assert hit is not None
        while request.num_computed_tokens < request.num_tokens:
            assert self.step(request, budget) is not None
        return request, hit

    def turn(self, tokens: list[int], salt: str = "user", budget: int = 64) -> int:
        """A whole request. Returns the tokens it resumed with."""
        request, hit = self.run(tokens, salt, budget)
        self.cache.free(request)
        self.ours.check_integrity()
        return hit


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(count)]


@pytest.mark.parametrize("ours_first", [False, True])
@pytest.mark.parametrize("budget", [64, 5])
def test_every_turn_resumes(ours_first: bool, budget: int) -> None:
    """Whatever the order of vLLM's cache groups and however the prompts are cut."""
    engine, text = Engine(300, ours_first), tokens(200)
    assert engine.turn(text[:50], budget=budget) == 0
    assert engine.turn(text[:90], budget=budget) == 48
    assert engine.turn(text[:91], budget=budget) == 88
    assert engine.turn(text[:171], budget=budget) == 88
    assert engine.turn(text[:168], budget=budget) == 164, "the last token is computed again"
    assert engine.ours.counters["takeovers"] == 4


@pytest.mark.parametrize("ours_first", [False, True])
@pytest.mark.parametrize("length", [68, 72, 76])
def test_no_window_block_that_is_needed_fills_a_hole(
    monkeypatch: pytest.MonkeyPatch, ours_first: bool, length: int
) -> None:
    """Whichever manager has its turn first: none of them is free while pages for the holes are taken."""
    engine, text = Engine(200, ours_first), tokens(100)
    engine.turn(text[:77])
    (row,) = engine.ours.resident.rows()
    assert row.pages.count(None) == 4
    edited = engine.request(text[:length] + tokens(1, seed=1))
    pool, asked = engine.cache.block_pool, []
    hand_out = pool.get_new_blocks

    def watched(count: int) -> Any:
        asked.append(count)
        needed = engine.ours.windows.blocks_at(edited.block_hashes, length)
        assert needed
        assert all(block.ref_cnt > 0 for block in needed)
        return hand_out(count)

    monkeypatch.setattr(pool, "get_new_blocks", watched)
    assert engine.step(edited) == length
    assert asked[0] == 4


def test_it_goes_back_within_rewind() -> None:
    engine, text = Engine(300), tokens(200)
    engine.turn(text[:131])
    other = text[:124] + tokens(30, seed=1)
    assert engine.turn(other) == 124, "7 tokens back, across nothing that the window layers let go"
    assert engine.turn(text[:112] + tokens(9, seed=2)) == 0, "beyond rewind"


def test_idle_conversations_outlive_a_busy_pool() -> None:
    """vLLM alone would hand a finished request's window blocks to whoever comes next."""
    engine, text = Engine(120), tokens(100)
    engine.turn(text[:60])
    held = len(engine.ours.windows.held(engine.ours.resident.rows()[0]))
    assert held >= sum(-(-(w - 1) // BLOCK) for w in WINDOWS)
    for i in range(12):  # each takes all that is free, and leaves nothing behind
        rest = engine.request(tokens(90, seed=i + 1))
        while engine.step(rest) is not None and rest.num_computed_tokens < rest.num_tokens:
            pass
        with engine.ours.keeping_nothing():
            engine.cache.free(rest)
    assert engine.ours.counters["evictions"] == 0
    assert engine.turn(text) == 60


def test_another_user_gets_nothing() -> None:
    engine, text = Engine(300), tokens(100)
    engine.turn(text[:60], "one")
    assert engine.turn(text, "two") == 0
    assert engine.turn(text, "one") == 60


def test_a_length_that_the_window_layers_lost_is_not_offered() -> None:
    engine, text = Engine(260), tokens(100)
    request, _ = engine.run(text[:60])
    engine.cache.free(request)
    windows, (row,) = engine.ours.windows, engine.ours.resident.rows()
    windows.release(row)
    assert windows.blocks_at(request.block_hashes, 60) is not None, "free, but nobody has taken them yet"
    for seed in range(1, 9):
        with engine.ours.keeping_nothing():
            engine.turn(tokens(100, seed))
    assert windows.blocks_at(request.block_hashes, 60) is None
    assert engine.ours.resident.rows() == [row]
    assert engine.turn(text) == 0


def test_eviction_makes_room_for_window_blocks() -> None:
    """A step whose own pages are there, but not those of its window layers, evicts all the same."""
    engine = Engine(90)
    engine.turn(tokens(20))
    request, _ = engine.run(tokens(20, seed=1))
    seen = []
    while not engine.ours.counters["evictions"]:
        seen.append((engine.free, G.pages(request.num_tokens + 1) - G.pages(request.num_tokens)))
        request.append_output_token_ids(7)
        assert engine.step(request) is not None
    free, pages = seen[-1]
    assert pages == 0 < free, "it was not for want of our own pages"
    engine.cache.free(request)
    engine.ours.evict()
    assert engine.free == 90


def test_what_is_held_is_counted_and_let_go() -> None:
    engine, text = Engine(200), tokens(100)
    engine.turn(text[:60])
    windows, (row,) = engine.ours.windows, engine.ours.resident.rows()
    (state,) = engine.ours.occupancy().snapshot(G).sequences
    assert state.pages == len(row.held()) + len(windows.held(row)) == 200 - engine.free
    assert sum(engine.ours.occupancy().snapshot(G).pages.values()) == 200
    assert windows.releasable() == len(windows.held(row))
    assert windows.releasable([row]) == 0
    request, hit = engine.run(text, budget=64)
    assert hit == 60
    assert windows.releasable() == 0
    (state,) = engine.ours.occupancy().snapshot(G).sequences
    assert state.pages == 200 - engine.free
    engine.cache.free(request)
    assert engine.ours.evict()[0] == 1
    assert engine.free == 200


def test_blocks_that_a_running_request_shares_are_not_counted_as_room() -> None:
    engine, text = Engine(200), tokens(100)
    request, _ = engine.run(text[:60])
    windows = engine.ours.windows
    windows.hold("a row", request.block_hashes, [60])
    assert windows.held("a row")
    assert windows.releasable() == 0
    windows.release("a row")
    engine.ours.check_integrity()


def test_a_lost_or_stray_reference_is_found() -> None:
    engine, text = Engine(200), tokens(100)
    request, _ = engine.run(text[:60])
    block = engine.others[0].req_to_blocks[request.request_id][-1]
    block.ref_cnt += 1
    with pytest.raises(CacheIntegrityError, match="sliding-window block"):
        engine.ours.check_integrity()
    block.ref_cnt -= 1
    engine.ours.check_integrity()


def test_without_prefix_caching_nothing_is_kept() -> None:
    engine = Engine(200, caching=False)
    engine.turn(tokens(60))
    assert engine.turn(tokens(80)) == 0
    assert engine.free == 200


def test_two_engines_in_a_process_find_their_own_rows() -> None:
    one, two, text = Engine(200), Engine(200), tokens(100)
    one.turn(text[:60])
    assert two.turn(text) == 0
    assert one.turn(text) == 60


@pytest.mark.parametrize("seed", range(3))
def test_with_reservation_nobody_who_runs_waits(seed: int) -> None:
    """What the window layers will need is reserved, too: an admitted request reaches its last token."""
    rng = random.Random(seed)
    engine = Engine(230, ours_first=bool(seed % 2))
    final: dict[str, int] = {}
    engine.ours.configure(Policy(reserve=True))
    engine.ours.final_length = lambda name: final.get(name, 0)
    known = [tokens(rng.randint(5, 50), seed=i) for i in range(5)]
    running: list[Request] = []
    admitted = waited = 0
    for _ in range(1500):
        if len(running) < 5 and rng.random() < 0.3:
            request = engine.request(rng.choice(known) + tokens(rng.randint(0, 9), seed=rng.randrange(99)))
            final[request.request_id] = request.num_tokens + rng.randint(1, 60)
            if engine.step(request, rng.choice([3, 64])) is None:
                waited += 1
            else:
                running.append(request)
                admitted += 1
        if not running:
            continue
        request = rng.choice(running)
        if request.num_computed_tokens == request.num_tokens:
            if request.num_tokens == final[request.request_id]:
                engine.cache.free(request)
                running.remove(request)
                known[rng.randrange(5)] = list(request.all_token_ids)[:120]
                continue
            request.append_output_token_ids(rng.randrange(1000))
        assert engine.step(request, rng.choice([3, 64])) is not None
    assert admitted > 20
    assert waited > 20
    assert engine.ours.counters["forks"] + engine.ours.counters["takeovers"] > 5


@pytest.mark.parametrize("seed", range(4))
def test_random_lives(seed: int) -> None:
    """Conversations of two users come, return, go back, are preempted and aborted in too little memory."""
    rng = random.Random(seed)
    engine = Engine(320, ours_first=bool(seed % 2))
    talks = [[rng.randrange(1000) for _ in range(rng.randint(5, 60))] for _ in range(8)]
    running: dict[int, Request] = {}
    resumed = 0
    for _ in range(1500):
        index = rng.randrange(len(talks))
        request = running.get(index)
        if request is None:
            if len(running) == 3:
                continue
            if len(talks[index]) > 150 or rng.random() < 0.1:  # edit, or begin anew
                talks[index] = talks[index][: rng.randint(1, 40)]
            request = running[index] = engine.request(talks[index], salt=f"user {index % 2}")
        if rng.random() < 0.05 and request.num_computed_tokens:  # preempted or aborted
            engine.cache.free(request)
            request.num_computed_tokens = 0
            if rng.random() < 0.5:
                del running[index]
            continue
        if request.num_computed_tokens == request.num_tokens:
            if rng.random() < 0.1:
                engine.cache.free(request)
                known = list(request.all_token_ids)
                talks[index] = known + [rng.randrange(1000) for _ in range(rng.randint(1, 20))]
                del running[index]
                continue
            request.append_output_token_ids(rng.randrange(1000))
        hit = engine.step(request, rng.choice([1, 7, 64]))
        if hit is None and request.num_computed_tokens:  # no room: vLLM preempts
            engine.cache.free(request)
            request.num_computed_tokens = 0
        resumed += bool(hit)
    assert resumed > 20
    assert engine.ours.counters["evictions"] > 0
    for request in running.values():
        engine.cache.free(request)
    engine.ours.evict()
    engine.ours.check_integrity()
    assert engine.free == 320
