"""In which of the engine's ranks a conversation lives, where the engine has several.

Each rank has a GPU, a scheduler and a cache of its own, and what a conversation holds in the cache lies in
one of them. So a conversation keeps the rank that it began in. It is written into the stats of each reply,
with the number of ranks: another number means another engine, whose caches are empty, and the conversation is
placed anew. Without several ranks nothing of this is done.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.errors import EngineNotReady
from app.job import RANK, RANKS
from app.prompt_ranks import PromptRanks
from app.supervisor import EngineSupervisor
from db.errors import NotFound, StorageUnavailable
from db.store import Store
from tangram.errors import TangramError

MOST_KNOWN = 20_000
LOOK_BACK = 8
"""Replies in which a conversation's rank is looked for: the last ones may have failed before they got one."""
ROOM_SECONDS = 0.5
"""For how long an answer about the ranks' room is used."""
ASK_SECONDS = 2.0
STEPS = 20
"""Ranks whose room differs by less than a part of so many are taken to have as much."""


@dataclass(frozen=True)
class Room:
    """held: share of each rank's pool that is in use. typical: the share that one conversation takes."""

    held: Sequence[float] = ()
    typical: float = 0.0

    @classmethod
    def of(cls, ranks: Sequence[Mapping[str, Any]]) -> Room:
        """From the engine's status."""
        held = [1 - rank["pool"]["free_pages"] / max(1, rank["pool"]["total_pages"]) for rank in ranks]
        count = sum(rank["conversations"] + rank["requests"]["running"] for rank in ranks)
        return cls(held, sum(held) / count if count else 0.0)


class Ranks:
    """One per process."""

    def __init__(self, supervisor: EngineSupervisor, store: Store) -> None:
        self._supervisor = supervisor
        self._store = store
        self._count = 1
        self._known: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._prompts = PromptRanks()
        self._busy: Counter[int] = Counter()
        self._placed: Counter[int] = Counter()
        self._room = Room()
        self._looked = float("-inf")

    @property
    def count(self) -> int:
        """Of the engine that runs. Where it is another number than before, nothing is where it was."""
        if self._count != self._supervisor.ranks:
            self._count = self._supervisor.ranks
            self._known.clear()
            self._prompts.clear()
            self._placed.clear()
            self._looked = float("-inf")
        return self._count

    async def of_conversation(self, owner: str, conversation_id: str) -> int | None:
        """The rank of a stored conversation; a new one gets one. None where the engine has only one."""
        if self.count == 1:
            return None
        key = (owner, conversation_id)
        rank, asked = self._known.get(key), True
        if rank is None:
            try:
                rank = await self._stored(owner, conversation_id)
            except StorageUnavailable:  # the reply is written all the same; the next one asks again
                asked = False
        if rank is None:
            rank = await self._choose()
        if rank >= self.count:  # the engine became another one meanwhile
            rank = await self._choose()
        if not asked:
            return rank
        self._known[key] = rank
        self._known.move_to_end(key)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        return rank

    async def of_prompt(self, owner: str, prompt: Sequence[int]) -> int | None:
        """The same for a request of a stateless client, which continues an earlier one or begins anew."""
        if self.count == 1:
            return None
        rank = self._prompts.find(owner, prompt)
        if rank is None:
            rank = await self._choose()
        self._prompts.remember(owner, prompt, rank)
        return rank

    def facts(self, rank: int | None) -> dict[str, int]:
        """What a reply's stats are to keep of it."""
        return {} if rank is None else {RANK: rank, RANKS: self.count}

    @contextlib.asynccontextmanager
    async def working(self, rank: int | None) -> AsyncIterator[None]:
        """Count a request of that rank meanwhile."""
        if rank is None:
            yield
            return
        self._busy[rank] += 1
        try:
            yield
        finally:
            self._busy[rank] -= 1

    async def _stored(self, owner: str, conversation_id: str) -> int | None:
        try:
            latest = await self._store.latest_stats(owner, conversation_id, LOOK_BACK)
        except NotFound:  # it was deleted while its reply waited, which is about to be stopped
            return None
        for stats in latest:
            if RANK in stats:
                return int(stats[RANK]) if stats.get(RANKS) == self.count else None
        return None

    async def _choose(self) -> int:
        """The rank with the most room; of those that have about as much, the one that does the least, and
        then the one in which the fewest conversations were begun."""
        await self._look()
        room = self._room

        def order(rank: int) -> tuple[int, int, int, int]:
            held = room.held[rank] if rank < len(room.held) else 0.0
            taken = held + self._busy[rank] * room.typical
            return int(taken * STEPS), self._busy[rank], self._placed[rank], rank

        rank = min(range(self.count), key=order)
        self._placed[rank] += 1
        return rank

    async def _look(self) -> None:
        """Ask the engine for the ranks' room, if that was not done just now."""
        now = asyncio.get_running_loop().time()
        if now - self._looked < ROOM_SECONDS:
            return
        self._looked = now
        try:
            async with asyncio.timeout(ASK_SECONDS):
                self._room = Room.of((await self._supervisor.client.status())["engines"])
        except (TangramError, EngineNotReady, TimeoutError, KeyError):
            self._room = Room()
