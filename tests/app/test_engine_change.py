"""Changes of the engine run one at a time, and the app's log tells of each."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest

from app.engine_change import MODEL, PROFILE, RESTART, SETTINGS, EngineChanges
from app.errors import AlreadyRunning, EngineStartFailed


async def test_one_at_a_time_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "app.engine_change")
    changes, ended, gate = EngineChanges(), [], asyncio.Event()
    changes.on_change = lambda: ended.append(changes.last(SETTINGS))

    async def work() -> str:
        await gate.wait()
        return "It is ready."

    assert changes.last(SETTINGS, PROFILE) is None
    changes.start(SETTINGS, "retention 0.25", work)
    for kind in (SETTINGS, PROFILE, MODEL, RESTART):
        with pytest.raises(AlreadyRunning, match="being changed already"):
            changes.start(kind, "x", work)
    await changes.wait(0.01)
    running = changes.last(SETTINGS)
    assert running is not None
    assert (running.outcome, changes.running, changes.last(PROFILE)) == (None, True, None)
    gate.set()
    await changes.wait()
    (done,) = ended
    assert done is not None
    assert (done.outcome, done.message, changes.running) == ("applied", "It is ready.", False)
    begun, told = caplog.messages
    assert begun == "engine: changing its settings: retention 0.25"
    assert re.fullmatch(r"engine: applied, after \d+ s: It is ready\.", told)


async def test_a_failure_is_told_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    changes = EngineChanges()

    async def refused() -> str:
        raise EngineStartFailed("No memory.", rolled_back=True)

    async def broken() -> str:
        raise OSError("disk full")

    for kind, work, message in (
        (PROFILE, refused, "No memory."),
        (MODEL, broken, "The change could not be completed and is not stored: disk full"),
    ):
        changes.start(kind, "p", work)
        await changes.wait()
        change = changes.last(kind)
        assert change is not None
        assert (change.outcome, change.message) == ("failed", message)
    latest = changes.last(PROFILE, MODEL)
    assert latest is not None
    assert latest.kind == MODEL
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert re.fullmatch(r"engine: failed, after \d+ s: No memory\.", warnings[0])


async def test_the_end_of_the_app_ends_it() -> None:
    changes = EngineChanges()

    async def work() -> str:
        await asyncio.sleep(60)
        return ""

    changes.start(RESTART, "as it is", work)
    await asyncio.sleep(0)
    await changes.close()
    assert not changes.running
    await changes.close()
