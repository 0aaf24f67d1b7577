"""Many events in, few states out, and nothing left running."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from app.events import Event
from app.ui.progress import Progress, paced


async def words(count: int, closed: list[bool] | None = None) -> AsyncIterator[Event]:
    try:
        yield Event("queued", "", "pending", 0)
        for i in range(count):
            await asyncio.sleep(0)
            yield Event("delta", f"{i} ", "streaming", 0, {"completion_tokens": i + 1})
        whole = "".join(f"{i} " for i in range(count))
        yield Event("done", whole, "complete", 0, {"completion_tokens": count})
    finally:
        if closed is not None:
            closed.append(True)


async def test_the_last_state_is_whole_and_there_are_few() -> None:
    states = [state async for state in paced(words(5000), 0.05)]
    assert states[-1].done
    assert states[-1].status == "complete"
    assert states[-1].text.split()[-1] == "4999"
    assert states[-1].stats == {"completion_tokens": 5000}
    assert len(states) < 500


async def test_text_only_grows_and_is_never_torn() -> None:
    async for state in paced(words(300), 0.001):
        assert "".join(f"{i} " for i in range(300)).startswith(state.text)


async def test_updates_keep_their_distance() -> None:
    async def slow() -> AsyncIterator[Event]:
        for _ in range(60):
            await asyncio.sleep(0.01)
            yield Event("delta", "x", "streaming", 0)
        yield Event("done", "x" * 60, "complete", 0)

    loop = asyncio.get_running_loop()
    times = []
    async for state in paced(slow(), 0.1):
        if not state.done:
            times.append(loop.time())
    assert len(times) >= 3
    assert min(b - a for a, b in itertools.pairwise(times)) > 0.08


async def test_closing_detaches() -> None:
    closed: list[bool] = []
    async with aclosing(paced(words(10**9, closed), 0.01)) as states:
        async for _ in states:
            break
    assert closed == [True]


async def test_an_error_of_the_source_is_raised() -> None:
    async def broken() -> AsyncIterator[Event]:
        yield Event("delta", "x", "streaming", 0)
        raise RuntimeError("gone")

    seen = []

    async def watch() -> None:
        async for state in paced(broken(), 0.01):
            seen.append(state.text)

    with pytest.raises(RuntimeError, match="gone"):
        await watch()
    assert seen == ["x"]


def test_a_snapshot_replaces_and_numbers_stay() -> None:
    state = Progress(text="old", stats={"completion_tokens": 3})
    after = state.after(Event("snapshot", "new", "streaming", 3))
    assert (after.text, after.stats) == ("new", {"completion_tokens": 3})
