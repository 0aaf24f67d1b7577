"""Pacing: many small events of a reply in, few whole states of it out."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from app.events import Event


@dataclass(frozen=True, slots=True)
class Progress:
    """A reply as far as it is known: its whole text, status, numbers, and place in the queue."""

    text: str = ""
    status: str = "pending"
    stats: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    done: bool = False
    position: int | None = None

    def after(self, event: Event) -> "Progress":
        """Return the state that follows ``event``."""
        text = self.text
        if event.kind == "delta":
            text += event.text
        elif event.kind in ("snapshot", "done"):
            text = event.text
        return replace(
            self,
            text=text,
            status=event.status,
            stats=event.stats or self.stats,
            error=event.error or self.error,
            done=event.kind == "done",
            position=event.position if event.kind == "queued" else None,
        )


async def paced(events: AsyncIterator[Event], interval: float) -> AsyncGenerator[Progress, None]:
    """Yield the newest state at most once every ``interval`` seconds; the last one is always yielded.

    Closing this iterator closes ``events``. An error of ``events`` is raised here.
    """
    state = Progress()
    changed = asyncio.Event()

    async def collect() -> None:
        nonlocal state
        try:
            async for event in events:
                state = state.after(event)
                changed.set()
        finally:
            close = getattr(events, "aclose", None)
            if close is not None:
                await close()
            changed.set()

    task = asyncio.create_task(collect())
    try:
        shown: Progress | None = None
        while True:
            await changed.wait()
            changed.clear()
            if state is not shown:
                shown = state
                yield state
            if task.done():
                task.result()
                if state is shown:
                    return
            await asyncio.wait({task}, timeout=interval)
            if task.done():
                changed.set()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task
