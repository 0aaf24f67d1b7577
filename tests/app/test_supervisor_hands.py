"""What administrators do to a running engine: pause it, serve another model; one that hangs is replaced."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.errors import EngineNotReady, EngineStartFailed
from app.supervisor import EngineState
from tests.app.test_supervisor import make, state, until

__all__ = ["make"]


async def test_a_paused_engine_refuses_what_is_new_and_can_be_looked_at(make: Any) -> None:
    async with make() as engine:
        await engine.wait_ready()
        engine.hold()
        assert engine.held
        with pytest.raises(EngineNotReady, match="accepts nothing new"):
            _ = engine.client
        assert (await engine.watching.memory())["pool"]["total_pages"] > 0
        engine.release()
        assert engine.status.ready
        assert engine.client is engine.watching


async def test_another_model_is_served_and_a_bad_one_is_not(
    make: Any, bundled_model_dir: Path, tmp_path: Path
) -> None:
    other = tmp_path / "Other-Model"
    shutil.copytree(bundled_model_dir, other)
    async with make() as engine:
        await engine.wait_ready()
        await engine.restart({"retention": 0.25}, str(other))
        assert engine.status.model == "Other-Model"
        assert engine.templating.model_name == "Other-Model"
        assert [served["id"] for served in await engine.client.models()] == ["Other-Model"]
        pid = (await state(engine))["pid"]
        with pytest.raises(EngineStartFailed) as error:
            await engine.restart({}, str(tmp_path))
        assert error.value.rolled_back
        assert (await state(engine))["pid"] == pid, "it was looked at before anything was stopped"
        with pytest.raises(EngineStartFailed, match="runs with the previous settings again") as refused:
            await engine.restart({"group_size": 1000}, str(bundled_model_dir))
        assert refused.value.rolled_back
        assert engine.status.model == "Other-Model"
        assert (await state(engine))["config"]["retention"] == 0.25


async def test_a_condemned_engine_is_replaced(make: Callable[..., Any]) -> None:
    async with make() as engine:
        await engine.wait_ready()
        engine.report_stall(True)
        assert engine.status.stalled
        first = (await state(engine))["pid"]
        engine.condemn("The engine had work and did nothing for 240 seconds.")
        await until(engine, EngineState.RESTARTING)
        assert "did nothing for 240 seconds" in engine.status.detail
        await engine.wait_ready()
        assert not engine.status.stalled
        assert (await state(engine))["pid"] != first
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
