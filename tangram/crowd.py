"""Who goes first when more conversations want to go on than the cache holds.

In calm times requests are served in their order, and idle conversations are evicted least recently used
first (:mod:`tangram.resident`). When users return in turn and their rows together exceed the cache, that
order is the worst there is: each conversation is evicted shortly before its user returns, everything is read
again, and the cache serves nobody. So once a request has waited for a while, the engine is crowded, and until
nobody has:

- requests whose row is still there, and short ones, are admitted first: they cost a few tokens instead of a
  whole history;
- any other that would have to evict a conversation that was active lately waits, as long as what runs holds
  its share of the cache, so that rows last until their users are back. That holds only while users do find
  theirs: other rows are not worth waiting for, and waiting for them would keep the engine crowded. Where many
  come back in vain it is tried for a while, and again after a pause if that did not help;
- nobody is passed for longer than ``PATIENCE``: who waited that long goes first and may evict.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping

from vllm.v1.core.sched.request_queue import FCFSRequestQueue, RequestQueue
from vllm.v1.request import Request

from tangram.live import Return
from tangram.manager import RaggedManager
from tangram.resident import Row

CALM = 2.0
"""Seconds that a request may wait before the engine counts as crowded."""

PATIENCE = 15.0
"""Seconds after which a request is not passed any more."""

CHEAP = 1024
"""Tokens that a request may have to be computed from nothing and still count as short."""

SHARE = 0.4
"""Share of the cache that running requests hold at least before one waits for lack of room."""

FRESH = 60.0
"""Seconds for which a conversation is taken to be active after its last answer."""

RETURNING = 0.25
"""Share of the requests of late that must have found their conversation for others to wait for room."""

IN_VAIN = 0.5
"""Share of them that must have come back, in vain or not, for a trial."""

TRIAL, PAUSE = 20.0, 60.0
"""Seconds that others wait for room although few users find their conversation, and until the next trial."""

LOOK_UPS = 4096
"""Pages of prompts that are looked up at a step, half a millisecond; the others wait for the next one."""


class Crowd:
    """Watches the waiting requests of one scheduler.

    Args:
        requests: all of its requests, by id.
        clock: seconds, as of ``Request.arrival_time``.
    """

    def __init__(
        self,
        manager: RaggedManager,
        requests: Mapping[str, Request],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._manager = manager
        self._requests = requests
        self._clock = clock
        self._rows: dict[str, Row | None] = {}
        self._tried = -math.inf
        self.crowded = False

    def arrange(self, waiting: RequestQueue) -> None:
        """Before a step: see whether it is crowded, and put the queue in order if so. A queue that has an
        order of its own, by priority, is left alone: nobody of it is passed, so nobody is to wait either."""
        now = self._clock()
        queued = isinstance(waiting, FCFSRequestQueue)
        self.crowded = queued and any(now - request.arrival_time > CALM for request in waiting)
        if not self.crowded:
            self._rows.clear()
            return
        self._look_up(waiting)
        order = sorted(waiting, key=lambda request: (self._turn(request, now), request.arrival_time))
        waiting.clear()
        waiting.extend(order)

    def defers(self, request_id: str, needed: int, missing: int) -> bool:
        """Whether a request that continues no conversation of the cache is to wait.

        Args:
            needed, missing: pages that it would hold, and those of them that must be found.
        """
        request = self._requests.get(request_id)
        if not self.crowded or request is None or request.num_tokens <= CHEAP:
            return False
        if self._clock() - request.arrival_time > PATIENCE or not self._worth_it():
            return False
        pool, running = self._manager.block_pool, self._manager.req_to_blocks
        if not running or missing <= pool.get_num_free_blocks() + self._manager.room.stale(FRESH):
            return False
        held = sum(len(row) for row in running.values())
        return held + needed > SHARE * pool.num_gpu_blocks

    def _worth_it(self) -> bool:
        """Whether enough users find their conversation, or might if others waited."""
        lately = self._manager.returns
        count, found = max(1, len(lately)), lately.count(Return.FOUND)
        if found >= RETURNING * count:
            return True
        if found + lately.count(Return.IN_VAIN) < IN_VAIN * count:
            return False
        now = self._clock()
        if now > self._tried + TRIAL + PAUSE:
            self._tried = now
        return now <= self._tried + TRIAL

    def _look_up(self, waiting: Iterable[Request]) -> None:
        """Find the row of each request that is new, and forget those of requests that are not waiting."""
        known, budget = self._rows, LOOK_UPS
        self._rows = {}
        for request in waiting:
            name = request.request_id
            if name in known:
                self._rows[name] = known[name]
            elif budget > 0:
                self._rows[name] = self._manager.row_of(request)
                budget -= len(request.block_hashes)

    def _turn(self, request: Request, now: float) -> int:
        """0, 1 or 2: who has waited too long, who returns to a row or is short, and the others. Within each
        the order is that of arrival."""
        if now - request.arrival_time > PATIENCE:
            return 0
        row = self._rows.get(request.request_id)
        returns = row is not None and not row.shared and self._manager.resident.holds(row)
        return 1 if returns or request.num_tokens <= CHEAP else 2
