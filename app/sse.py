"""Server-sent events, and answers that end when the client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

STREAM_OR_JSON: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Server-sent events, or JSON where no stream is wanted.",
        "content": {
            "text/event-stream": {"schema": {"type": "object", "required": ["data"]}},  # of each event
            "application/json": {"schema": {"type": "object"}},
        },
    }
}
"""For the description of a route that answers in one of these ways."""

PING_SECONDS = 15.0
_HEADERS = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}


class Closable(Protocol):
    """What holds something until it is closed; closing it again does nothing."""

    async def aclose(self) -> None: ...


class ClientGone(Exception):
    """The client closed the connection before there was an answer."""


def encode_event(name: str, data: Any, event_id: int | str | None = None) -> bytes:
    """One named event with JSON data."""
    head = f"id: {event_id}\n" if event_id is not None else ""
    return f"{head}event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def encode_data(data: Any) -> bytes:
    """One unnamed event, as OpenAI's API sends them; a string goes as it is."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


class EventStream(Response):
    """Sends what `events` yields, with a comment now and then that keeps the connection open.

    When the client goes away, `events` is cancelled at once, even while it waits, and closed; so is `source`,
    from which they come and which has begun before them.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        source: Closable | None = None,
        *,
        ping: float = PING_SECONDS,
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._source = source
        self._ping = ping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGone):
                await _while_connected(receive, self._send(send))
        finally:  # also where the client was gone before the first event was asked for
            if self._source is not None:
                await self._source.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with (
            contextlib.aclosing(self._events),
            contextlib.aclosing(_with_pings(self._events, self._ping)) as out,
        ):
            async for block in out:
                await send({"type": "http.response.body", "body": block, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away; then raises ClientGone."""
    return await _while_connected(request.receive, work)


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for running in (task, gone):
            running.cancel()
        await asyncio.wait({task, gone})
        if not task.cancelled():
            task.exception()  # seen: what it says no longer matters when the client is gone


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _with_pings(events: AsyncIterator[bytes], seconds: float) -> AsyncGenerator[bytes, None]:
    while True:
        step = asyncio.ensure_future(_step(events))
        try:
            while not (await asyncio.wait({step}, timeout=seconds))[0]:
                yield b": ping\n\n"
        finally:
            if not step.done():
                step.cancel()
                await asyncio.wait({step})
        block = step.result()
        if block is None:
            return
        yield block


async def _step(events: AsyncIterator[bytes]) -> bytes | None:
    return await anext(events, None)
