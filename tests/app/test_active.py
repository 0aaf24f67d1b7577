"""Requests that run, whose rows are whose, and stopping one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from app.active import ActiveRequests, Origin
from app.errors import AccessEnded, RequestStopped
from app.openai_api.run import unless
from tangram.client import CompletionChunk
from tangram.errors import EngineRejected
from tests.patience import PATIENCE


def test_a_request_is_known_while_it_runs_and_its_row_afterwards() -> None:
    active = ActiveRequests()
    stopped: list[RequestStopped] = []
    with active.begin(Origin("ann", "c1"), tokens=lambda: 7, stop=stopped.append) as request:
        assert [one.name for one in active.running()] == [request.name]
        assert len(active) == 1
        assert active.stop(request.name) is request
        active.stop_owner("bob")
        active.stop_owner("ann")
        assert [type(why) for why in stopped] == [RequestStopped, AccessEnded]
    assert active.running() == []
    assert active.stop(request.name) is None
    # vLLM adds the place among several prompts and a random end.
    assert active.origin(f"cmpl-{request.name}-0-1a2b3c4d") == Origin("ann", "c1")
    assert active.origin("cmpl-0123456789abcdef01234567-0-1a2b3c4d") is None
    assert active.origin("") is None


def test_what_is_remembered_is_bounded() -> None:
    active = ActiveRequests(most_known=3)
    names = []
    for user in "abcde":
        with active.begin(Origin(user), tokens=int, stop=lambda why: None) as request:
            names.append(request.name)
    assert [active.origin(f"cmpl-{name}-0") is not None for name in names] == [False, False, True, True, True]


async def chunks_of(
    texts: list[str], wait: asyncio.Event | None = None
) -> AsyncGenerator[CompletionChunk, None]:
    for text in texts:
        if wait is not None:
            await wait.wait()
        yield CompletionChunk(text, (1,))


async def test_chunks_pass_until_somebody_stops_them() -> None:
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[RequestStopped] = loop.create_future()
    running = unless(stopped, chunks_of(["a", "b", "c"]))
    assert [(await anext(running)).text, (await anext(running)).text] == ["a", "b"]
    stopped.set_result(RequestStopped())
    with pytest.raises(RequestStopped, match="An administrator stopped this request"):
        await anext(running)
    assert [chunk.text async for chunk in unless(loop.create_future(), chunks_of(["x", "y"]))] == ["x", "y"]
    assert [chunk async for chunk in unless(loop.create_future(), chunks_of([]))] == []


@pytest.mark.parametrize("before", [0, 2])
async def test_one_that_waits_for_a_chunk_is_stopped_too(before: int) -> None:
    more = asyncio.Event()
    stopped: asyncio.Future[RequestStopped] = asyncio.get_running_loop().create_future()
    more.set()
    never = unless(stopped, chunks_of(["a"] * 3, more))
    for _ in range(before):
        await anext(never)
    more.clear()
    waiting = asyncio.create_task(anext(never))
    await asyncio.sleep(0.01)
    stopped.set_result(AccessEnded())
    with pytest.raises(RequestStopped, match="Access was ended"):
        await asyncio.wait_for(waiting, PATIENCE)


async def test_the_engine_s_failure_is_passed_on() -> None:
    async def broken() -> AsyncGenerator[CompletionChunk, None]:
        raise EngineRejected(400, "no")
        yield  # pragma: no cover

    with pytest.raises(EngineRejected, match="no"):
        await anext(unless(asyncio.get_running_loop().create_future(), broken()))
