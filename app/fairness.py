"""Who is next: a queue between the users and the engine, in which nobody can be crowded out.

The engine serves whom it is given first come, first served. So it is given at most `running` requests at a
time, and each place that becomes free goes to the waiting user who has the fewest requests running; among
equals, to the one whose last turn is longest ago, and then to the one who came first. Somebody with one
request waits for one place, however many requests somebody else has waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from app.errors import Busy, Forbidden
from db.views import QuotaView

T = TypeVar("T")

MINUTE = 60.0
_LONGEST_WAIT = 60


@dataclass(frozen=True, slots=True)
class Limits:
    """What one user may have: requests that run at once, that wait behind them, that begin in a minute."""

    running: int
    waiting: int
    per_minute: int

    def with_quota(self, quota: QuotaView) -> Limits:
        """These limits, save where the user's own quota says something."""
        return Limits(
            self.running if quota.running is None else quota.running,
            self.waiting if quota.waiting is None else quota.waiting,
            self.per_minute if quota.per_minute is None else quota.per_minute,
        )


@dataclass(eq=False)
class Ticket:
    """One request's place. Whoever joined must `leave`, however the request ends."""

    user: str
    number: int
    _queue: FairQueue = field(repr=False)
    _granted: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    began: float | None = None

    async def turn(self) -> None:
        """Return when the engine may be asked. Raises Forbidden when the user is shut out first."""
        await self._granted.wait()
        if self._queue.is_shut_out(self.user):
            raise _shut_out()

    @property
    def position(self) -> int:
        """1 for the next one, 2 for the one behind it; 0 once its turn has come."""
        return self._queue.position(self)

    def leave(self) -> None:
        """Give the place to the next one. Leaving twice changes nothing."""
        self._queue.leave(self)


@dataclass
class _User:
    """running: tickets whose turn has come. served: the number of the user's last turn."""

    running: int = 0
    waiting: deque[Ticket] = field(default_factory=deque)
    began: deque[float] = field(default_factory=deque)
    served: int = 0


class FairQueue:
    """The places of all users.

    Args:
        running: places at the engine.
        waiting: requests that may wait for one, of all users together.
        limits: those of a user without a quota.

    on_move: called whenever positions may have changed.
    """

    def __init__(self, *, running: int, waiting: int, limits: Limits) -> None:
        self._running = running
        self._waiting = waiting
        self._limits = limits
        self._quotas: dict[str, QuotaView] = {}
        self._users: dict[str, _User] = {}
        self._shut_out: set[str] = set()
        self._held: dict[Ticket, None] = {}  # in the order of their turns
        self.on_move: Callable[[], None] | None = None
        self._numbers = itertools.count(1)
        self._turns = itertools.count(1)
        self._ranks: dict[Ticket, int] | None = None
        self._seconds_a_turn = 5.0
        self.refused: dict[str, int] = {"rate_limited": 0, "queue_full": 0}

    # ---- limits ------------------------------------------------------------------------------

    def set_quotas(self, quotas: Mapping[str, QuotaView]) -> None:
        """Take over the quotas of all users."""
        self._quotas = dict(quotas)
        self._dispatch()

    def set_quota(self, user: str, quota: QuotaView) -> None:
        """Change one user's quota; what is running goes on."""
        self._quotas[user] = quota
        self._dispatch()

    def limits(self, user: str) -> Limits:
        """What the user may have."""
        quota = self._quotas.get(user)
        return self._limits.with_quota(quota) if quota is not None else self._limits

    def shut_out(self, user: str) -> None:
        """Refuse a user from now on, whatever the request: also those that wait, or are about to join.

        What runs is not ended here.
        """
        self._shut_out.add(user)
        for ticket in tuple(self._state(user).waiting):
            ticket.leave()
            ticket._granted.set()

    def is_shut_out(self, user: str) -> bool:
        """Whether a user is refused."""
        return user in self._shut_out

    def let_in(self, user: str) -> None:
        """Take a user again."""
        self._shut_out.discard(user)

    # ---- one request -------------------------------------------------------------------------

    def admit(self, user: str) -> None:
        """Count a request that begins, before any work is done for it. Raises Busy, Forbidden.

        What is found wrong with it afterwards does not take it back: finding that out is work too.
        """
        if user in self._shut_out:
            raise _shut_out()
        limits, state = self.limits(user), self._state(user)
        now = time.monotonic()
        while state.began and state.began[0] <= now - MINUTE:
            state.began.popleft()
        if len(state.began) >= limits.per_minute:
            wait = math.ceil(state.began[len(state.began) - limits.per_minute] + MINUTE - now)
            raise self._refusal(
                f"You may begin {limits.per_minute} requests a minute.", max(1, wait), "rate_limited"
            )
        self._check_room(user)
        state.began.append(now)

    def join(self, user: str) -> Ticket:
        """Take a place, at the engine or behind others, for a request that was admitted.

        Raises Busy when there is none left to wait in, Forbidden for a user who was shut out.
        """
        self._check_room(user)
        return self.rejoin(user)

    def _check_room(self, user: str) -> None:
        limits, state = self.limits(user), self._state(user)
        if self.running >= self._running or state.running >= limits.running:
            if len(state.waiting) >= limits.waiting:
                raise self._refusal(
                    f"You have {state.running} requests running and {len(state.waiting)} waiting, "
                    "which is as many as you may have.",
                    self._until_free(state.running),
                    "rate_limited",
                )
            if self.waiting >= self._waiting:
                raise self._refusal(
                    "Too many people are waiting for the model.", self._until_free(self.running), "queue_full"
                )

    def rejoin(self, user: str) -> Ticket:
        """As `join`, for what was let in already, such as a reply that goes on. Raises Forbidden, no Busy."""
        if user in self._shut_out:
            raise _shut_out()
        ticket = Ticket(user, next(self._numbers), self)
        self._state(user).waiting.append(ticket)
        self._dispatch()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """See `Ticket.leave`."""
        state = self._users.get(ticket.user)
        if state is None:
            return
        if ticket in self._held:
            del self._held[ticket]
            state.running -= 1
            if ticket.began is not None:
                took = time.monotonic() - ticket.began
                self._seconds_a_turn += 0.1 * (took - self._seconds_a_turn)
        elif ticket in state.waiting:
            state.waiting.remove(ticket)
        else:
            return
        self._dispatch()

    async def stream(self, user: str, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """`items`, once there is a place, which is held until they end. Raises Busy at the first step."""
        async with contextlib.aclosing(items):
            ticket = self.join(user)
            try:
                await ticket.turn()
                async for item in items:
                    yield item
            finally:
                ticket.leave()

    # ---- looking -----------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests whose turn has come."""
        return len(self._held)

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return sum(len(state.waiting) for state in self._users.values())

    def position(self, ticket: Ticket) -> int:
        """See `Ticket.position`. Right if nobody else comes, and those who came first end first."""
        if self._ranks is None:
            self._ranks = {ticket: rank for rank, ticket in enumerate(self._foreseen(), start=1)}
        return self._ranks.get(ticket, 0)

    # ---- parts -------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Give the free places away."""
        self._ranks = None
        while self.running < self._running:
            ready = [
                (state.running, state.served, state.waiting[0].number, user)
                for user, state in self._users.items()
                if state.waiting and state.running < self.limits(user).running
            ]
            if not ready:
                break
            state = self._users[min(ready)[3]]
            ticket = state.waiting.popleft()
            state.running += 1
            state.served = next(self._turns)
            self._held[ticket] = None
            ticket.began = time.monotonic()
            ticket._granted.set()
        if self.on_move is not None:
            self.on_move()

    def _foreseen(self) -> Iterator[Ticket]:
        """The waiting tickets in the order in which `_dispatch` will choose them."""
        running = {user: state.running for user, state in self._users.items()}
        served = {user: state.served for user, state in self._users.items()}
        left = {user: deque(state.waiting) for user, state in self._users.items() if state.waiting}
        turns = itertools.count(max(served.values(), default=0) + 1)
        held = deque(ticket.user for ticket in self._held)

        def entry(user: str) -> tuple[int, int, int, str]:
            return running[user], served[user], left[user][0].number, user

        heap = [entry(user) for user in left]
        heapq.heapify(heap)
        while left and held:
            freed = held.popleft()
            running[freed] -= 1
            if freed in left:
                heapq.heappush(heap, entry(freed))
            full = []
            while heap and len(held) < self._running:
                found = heapq.heappop(heap)
                user = found[-1]
                if user not in left or found != entry(user):
                    continue  # an entry of before the user's last change
                if running[user] >= self.limits(user).running:
                    full.append(found)
                    continue
                yield left[user].popleft()
                held.append(user)
                running[user], served[user] = running[user] + 1, next(turns)
                if left[user]:
                    heapq.heappush(heap, entry(user))
                else:
                    del left[user]
            for found in full:
                heapq.heappush(heap, found)

    def _state(self, user: str) -> _User:
        if user not in self._users and len(self._users) >= 1000:
            self._forget_idle()
        return self._users.setdefault(user, _User())

    def _forget_idle(self) -> None:
        old = time.monotonic() - MINUTE
        for user, state in tuple(self._users.items()):
            if not state.running and not state.waiting and (not state.began or state.began[-1] <= old):
                del self._users[user]

    def _until_free(self, running: int) -> int:
        """Seconds until one of so many requests will probably have ended."""
        return max(1, min(_LONGEST_WAIT, math.ceil(self._seconds_a_turn / max(1, running))))

    def _refusal(self, message: str, retry_after: int, code: str) -> Busy:
        self.refused[code] += 1
        return Busy(message, retry_after, code=code)


def _shut_out() -> Forbidden:
    return Forbidden("This account has been disabled.")
