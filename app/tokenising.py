"""Turning text into token ids in threads, few at a time, and one of each user.

A long text takes seconds of a core. Without a bound one user could hold every thread of the process; what
is beyond it waits here, where it costs no thread.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

P = ParamSpec("P")
T = TypeVar("T")

THREADS = max(2, min(4, (os.cpu_count() or 2) // 2))


class Tokenising:
    """One per process.

    Args:
        threads: how many texts are worked on at once; above 1, so that nobody holds all.
    """

    def __init__(self, threads: int = THREADS) -> None:
        self._threads = asyncio.Semaphore(threads)
        self._users: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(self, user: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work` in a thread, once it is the user's turn and a thread is free.

        Whoever is cancelled leaves at once, but a thread that has begun counts until its work is done.
        """
        own = self._users.setdefault(user, asyncio.Lock())
        await own.acquire()
        try:
            await self._threads.acquire()
        except BaseException:
            own.release()
            raise

        def ended(thread: asyncio.Task[T]) -> None:
            self._threads.release()
            own.release()
            if not thread.cancelled():
                thread.exception()  # seen: perhaps nobody waits for it any more

        thread = asyncio.create_task(asyncio.to_thread(work, *args, **kwargs))
        thread.add_done_callback(ended)
        return await asyncio.shield(thread)
