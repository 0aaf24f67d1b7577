"""How long tests wait for what is there in a moment on an idle machine.

They wait for conditions, so patience costs nothing where one holds; and it is no assertion about speed, since
any number of other tests may keep the machine busy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 30.0
"""Seconds."""
TRIES = 8


async def fastest(measure: Callable[[], Awaitable[float]], seconds: float) -> float:
    """The least time that a thing took which is measured until it once took less than so long, eight times at
    most: whatever else the machine does may hold up any one of them."""
    least = float("inf")
    for attempt in range(TRIES):
        await asyncio.sleep(attempt * seconds / 4)
        least = min(least, await measure())
        if least < seconds:
            break
    return least


async def quickest(work: Callable[[], Awaitable[T]], seconds: float) -> tuple[T, float]:
    """What comes of work that is done until it once took less than so long; and the least time."""
    found: list[T] = []

    async def measured() -> float:
        began = time.perf_counter()
        found.append(await work())
        return time.perf_counter() - began

    least = await fastest(measured, seconds)
    return found[-1], least
