"""Which reply each open page follows, so that one that was left never paints over what came after it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Follower:
    """One page following one reply. ``left`` is set once the page shows something else."""

    def __init__(self) -> None:
        self.left = False
        self._quiet = asyncio.Event()
        self._quiet.set()

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Around the ``yield`` of an update: the generator is resumed only when the update has been sent."""
        self._quiet.clear()
        try:
            yield
        finally:
            self._quiet.set()

    async def leave(self) -> None:
        """Allow no further update; return when the last one has been sent."""
        self.left = True
        await self._quiet.wait()


class Followers:
    """The followers of all open pages, by Gradio's session."""

    def __init__(self) -> None:
        self._current: dict[str, Follower] = {}

    @contextmanager
    def follow(self, session: str) -> Iterator[Follower]:
        """Follow something in this session; what it followed before is left."""
        if before := self._current.get(session):
            before.left = True
        mine = self._current[session] = Follower()
        try:
            yield mine
        finally:
            if self._current.get(session) is mine:
                del self._current[session]

    def is_following(self, session: str) -> bool:
        """Whether this session's page is being sent the updates of a reply."""
        current = self._current.get(session)
        return current is not None and not current.left

    async def leave(self, session: str) -> None:
        """Call before showing something else in this session."""
        if current := self._current.get(session):
            await current.leave()
