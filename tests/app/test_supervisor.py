"""The engine as a real child process: coming up, dying, refusing, being replaced, leaving nothing behind."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from app.errors import EngineNotReady, EngineStartFailed
from app.managed_engine import ManagedEngine, Timing, free_port
from app.settings import Settings
from app.supervisor import EngineState
from tests.app.conftest import eventually
from tests.fake_engine import ThreadServer
from tests.patience import PATIENCE

FAKE = Path(__file__).resolve().parents[1] / "fake_engine.py"
QUICK = Timing(backoff=0.05, max_backoff=0.2, stable=60, give_up=3, poll=0.05, health=0.1, sick=3, grace=2.0)


@pytest.fixture
def make(tmp_path: Path, bundled_model_dir: Path) -> Callable[..., Any]:
    def build(
        arguments: str = "", *, settings: dict[str, Any] | None = None, **options: Any
    ) -> ManagedEngine:
        fields = {
            "home": tmp_path / "home",
            "model": str(bundled_model_dir),
            "engine_command": shlex.join([sys.executable, str(FAKE)]),
            "engine_args": arguments,
        }
        made = Settings(**(fields | (settings or {})))
        made.make_folders()
        return ManagedEngine(made, **{"timing": QUICK, **options})

    @asynccontextmanager
    async def run(arguments: str = "", **options: Any) -> AsyncIterator[ManagedEngine]:
        overrides = options.pop("overrides", None)
        engine = build(arguments, **options)
        await engine.start(overrides)
        try:
            yield engine
        finally:
            await engine.stop()

    return run


async def state(engine: ManagedEngine) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=engine.client.base_url, trust_env=False, timeout=PATIENCE) as http:
        found: dict[str, Any] = (await http.get("/fake/state")).json()
        return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(engine: ManagedEngine, *states: EngineState) -> None:
    async with asyncio.timeout(PATIENCE):
        while engine.status.state not in states:
            await engine.changed()


async def test_comes_up_and_goes_down(make: Any) -> None:
    said: list[str] = []
    async with make("--max-model-len 4096", progress=said.append) as engine:
        with pytest.raises(EngineNotReady, match="starting"):
            _ = engine.client
        await engine.wait_ready()
        status = engine.status
        assert (status.max_model_len, status.model, status.detail) == (4096, "SmolLM2-135M-Instruct", "")
        assert engine.geometry is not None
        assert engine.geometry.layers == 30
        pid = (await state(engine))["pid"]
        guardian = status.pid
        assert pid != guardian
        assert os.getpgid(pid) not in (os.getpgid(0), os.getpgid(guardian or 0))
        async with httpx.AsyncClient(
            base_url=engine.client.base_url, trust_env=False, timeout=PATIENCE
        ) as nobody:
            assert (await nobody.get("/v1/models")).status_code == 401  # only we have the key
    assert engine.status.state is EngineState.STOPPED
    assert not alive(pid)
    assert not alive(guardian or 0)
    assert any("loading the model" in line for line in said)
    assert any(line.startswith("engine: ready in") for line in said)
    log = engine.settings.engine_log.read_text()
    assert "==== start" in log
    assert "VLLM_API_KEY" not in log


@pytest.mark.parametrize("size", [1, 2])
async def test_the_engine_gets_as_many_ranks_as_are_set(make: Any, size: int) -> None:
    async with make(settings={"data_parallel_size": size}) as engine:
        await engine.wait_ready()
        assert engine.ranks == size
        assert [one["engine"] for one in (await engine.client.memory())["engines"]] == [*range(size)]


async def test_killed_engine_is_restarted(make: Any) -> None:
    async with make() as engine:
        await engine.wait_ready()
        first = (await state(engine))["pid"]
        os.kill(first, signal.SIGKILL)
        await until(engine, EngineState.RESTARTING)
        assert "code 137" in engine.status.detail
        with pytest.raises(EngineNotReady, match="being restarted"):
            _ = engine.client
        await engine.wait_ready()
        assert engine.status.restarts == 1
        assert (await state(engine))["pid"] != first


async def test_engine_that_hangs_is_restarted(make: Any) -> None:
    async with make() as engine:
        await engine.wait_ready()
        first = (await state(engine))["pid"]
        async with httpx.AsyncClient(
            base_url=engine.client.base_url, trust_env=False, timeout=PATIENCE
        ) as http:
            await http.post("/fake/health", json={"healthy": False})
        await until(engine, EngineState.RESTARTING)
        assert "health checks" in engine.status.detail
        await engine.wait_ready()
        assert not alive(first)


async def test_who_suspects_the_engine_has_it_looked_at_at_once(make: Any) -> None:
    async with make(timing=replace(QUICK, health=60.0, sick=2)) as engine:
        await engine.wait_ready()
        await asyncio.sleep(0.05)
        engine.check_now()  # it is well: nothing happens
        await asyncio.sleep(0.1)
        assert engine.status.ready
        async with httpx.AsyncClient(
            base_url=engine.client.base_url, trust_env=False, timeout=PATIENCE
        ) as http:
            await http.post("/fake/health", json={"healthy": False})
        async with asyncio.timeout(PATIENCE):  # half as long as until the engine is looked at unasked
            while engine.status.ready:
                engine.check_now()
                await asyncio.sleep(0.05)


async def test_crash_loop_ends_in_failed_with_the_reason(make: Any) -> None:
    said: list[str] = []
    failing = "--fake-fail 'ValueError: no memory for the cache, token=abcdefgh123'"
    async with make(failing, progress=said.append) as engine:
        with pytest.raises(EngineStartFailed, match="ValueError: no memory for the cache"):
            await engine.wait_ready()
        status = engine.status
        assert status.restarts == QUICK.give_up - 1
        assert status.detail.endswith(". It failed 3 times in a row.")
        assert [line.rpartition(". ")[2] for line in said if "Next try" in line] == [
            "Next try in 0.05 s.",
            "Next try in 0.1 s.",
        ]
        assert "abcdefgh123" not in status.detail + "".join(engine.log_tail())
        with pytest.raises(EngineNotReady, match="An administrator has to look"):
            _ = engine.client


@pytest.mark.parametrize(
    ("prints", "reason"),
    [
        (
            "Traceback; ValueError: seen on the way; tangram: error: retention: must be above 0; bye",
            "retention: must be above 0.",
        ),
        (
            "launch.py: error: unrecognized arguments: --no-such",
            "launch.py: error: unrecognized arguments: --no-such.",
        ),
    ],
)
async def test_settings_that_can_never_work_are_not_tried_again(make: Any, prints: str, reason: str) -> None:
    said: list[str] = []
    script = f"echo {shlex.quote(prints)} | tr ';' '\\n' | sed 's/^ //'; exit 2"
    refusing = {"engine_command": shlex.join(["sh", "-c", script])}
    async with make(settings=refusing, progress=said.append) as engine:
        with pytest.raises(EngineStartFailed):
            await engine.wait_ready()
        assert engine.status.detail == f"The engine refuses its settings: {reason}"
        assert engine.status.restarts == 0
        assert said[-1] == f"engine: {engine.status.detail}"
        assert engine.status.pid is None


async def test_the_real_command_refuses_a_setting_once(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_RETENTION", "7")
    async with make(settings={"engine_command": ""}) as engine:
        with pytest.raises(EngineStartFailed, match=r"must be above 0 and at most 1, not 7\.0\.$"):
            await engine.wait_ready()
        assert engine.status.restarts == 0
        assert "tangram: " not in engine.status.detail


def test_an_engine_gets_five_tries() -> None:
    assert Timing().give_up == 5  # as docs/operations.md says


async def test_port_that_somebody_else_took(make: Any) -> None:
    stranger = FastAPI()

    @stranger.get("/health")
    async def health() -> None:
        """Looks healthy, but is not ours."""

    @stranger.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": "something else"}]}

    with ThreadServer(stranger) as server:
        ports = iter([int(server.url.rpartition(":")[2])])
        async with make(pick_port=lambda: next(ports, None) or free_port()) as engine:
            await engine.wait_ready()
            assert engine.client.base_url != server.url
            assert engine.status.restarts == 1


async def test_restart_with_other_settings(make: Any) -> None:
    async with make() as engine:
        await engine.wait_ready()
        first = await state(engine)
        drained = []

        async def drain() -> None:
            drained.append(engine.status.state)

        engine.drain = drain
        await engine.restart({"retention": 0.25, "group_size": 8})
        second = await state(engine)
        assert first["config"] == {"retention": 0.5, "group_size": 16}
        assert second["config"] == {"retention": 0.25, "group_size": 8}
        assert engine.geometry is not None
        assert engine.geometry.group_size == 8
        assert drained == [EngineState.DRAINING]
        assert engine.status.overrides == {"retention": 0.25, "group_size": 8}
        assert not alive(first["pid"])
        with pytest.raises(EngineStartFailed, match="cannot be an engine option"):
            await engine.restart({"retention; rm": 1})
        assert engine.status.ready


async def test_restart_goes_back_when_the_engine_refuses(make: Any) -> None:
    async with make() as engine:
        await engine.wait_ready()
        await engine.restart({"retention": 0.75})
        with pytest.raises(
            EngineStartFailed, match=r"retention: must be above 0.*previous settings again"
        ) as caught:
            await engine.restart({"retention": 7})
        assert caught.value.rolled_back
        assert engine.status.ready
        assert engine.status.overrides == {"retention": 0.75}
        assert (await state(engine))["config"]["retention"] == 0.75
        os.kill((await state(engine))["pid"], signal.SIGKILL)  # and it is watched again
        await until(engine, EngineState.RESTARTING)
        await engine.wait_ready()
        assert (await state(engine))["config"]["retention"] == 0.75


async def test_restart_between_two_refused_settings_ends_in_failed(make: Any) -> None:
    async with make(overrides={"retention": 9}) as engine:
        with pytest.raises(EngineStartFailed):
            await engine.wait_ready()
        with pytest.raises(
            EngineStartFailed, match=r"not 7\.0\. It does not start with the previous"
        ) as caught:
            await engine.restart({"retention": 7})
        assert not caught.value.rolled_back
        assert engine.status.state is EngineState.FAILED
        assert "not 9.0" in engine.status.detail


async def test_restart_that_is_never_ready_goes_back(make: Any) -> None:
    def told(line: str) -> None:
        if "not ready after" in line:
            vars(engine.settings)["start_timeout"] = 2 * PATIENCE

    async with make(progress=told) as engine:
        await engine.wait_ready()
        vars(engine.settings)["start_timeout"] = 2  # for this start only: one that works may take longer
        with pytest.raises(EngineStartFailed, match="not ready after 2 seconds") as caught:
            await engine.restart({"alpha": 99})  # the imitation takes forever with that
        assert caught.value.rolled_back
        assert engine.status.overrides == {}
        assert engine.status.ready


async def test_restart_goes_on_without_its_caller(make: Any) -> None:
    async with make() as engine:
        await engine.wait_ready()
        caller = asyncio.create_task(engine.restart({"retention": 0.25}))
        await until(engine, EngineState.DRAINING, EngineState.STARTING)
        caller.cancel()
        await until(engine, EngineState.READY)
        assert (await state(engine))["config"]["retention"] == 0.25


async def test_restart_brings_a_failed_engine_back(make: Any) -> None:
    async with make("", overrides={"retention": 9}) as engine:
        with pytest.raises(EngineStartFailed):
            await engine.wait_ready()
        await engine.restart({"retention": 0.5})
        assert engine.status.ready


async def test_stop_in_the_middle_of_a_start(make: Any) -> None:
    async with make("--fake-start-seconds 60") as engine:
        async with asyncio.timeout(PATIENCE):
            while not (engine.status.pid and engine.log_tail()[1:]):
                await engine.changed()
        guardian = engine.status.pid
        async with asyncio.timeout(PATIENCE):
            await engine.stop()
        assert not alive(guardian or 0)


async def test_engine_that_ignores_signals_is_killed(make: Any) -> None:
    async with make("--fake-deaf") as engine:
        await engine.wait_ready()
        pid = (await state(engine))["pid"]
        async with asyncio.timeout(QUICK.grace + PATIENCE):
            await engine.stop()
        assert not alive(pid)


async def test_unusable_model_fails_at_once(make: Any, tmp_path: Path) -> None:
    async with make(settings={"model": str(tmp_path / "absent")}) as engine:
        with pytest.raises(EngineStartFailed, match="no model directory"):
            await engine.wait_ready()
        assert engine.status.state is EngineState.FAILED


async def test_nothing_outlives_a_killed_guardian_parent(tmp_path: Path) -> None:
    """The guardian itself: its parent is killed, and the command and what the command started go with it."""
    guardian = Path(sys.modules["app.guardian"].__file__ or "")
    pids = tmp_path / "pids"
    script = f"sleep 60 & echo $! $$ > {shlex.quote(str(pids))}.new; mv {pids}.new {pids}; wait"
    parent = (
        "import os, subprocess, sys\n"
        f"command = ['sh', '-c', {script!r}]\n"
        f"subprocess.Popen([sys.executable, {str(guardian)!r}, '1', str(os.getpid()), *command]).wait()"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", parent)
    await eventually(pids.exists)
    started = [int(pid) for pid in pids.read_text().split()]
    assert all(map(alive, started))
    process.kill()
    await process.wait()
    await eventually(lambda: not any(map(alive, started)))
