"""The engine as a child process: started, watched, restarted with backoff, and taken down with us."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from app.database import without_secrets
from app.engine_log import EngineLog
from app.engine_process import EngineProcess
from app.errors import EngineStartFailed, ModelUnusable
from app.model_source import ServedModel, open_model
from app.settings import Settings
from app.supervisor import EngineState, EngineSupervisor, Overrides
from tangram.client import EngineClient
from tangram.errors import TangramError

USAGE_ERROR = 2
"""What an engine ends with whose settings can never work; why is the last line that it printed."""
_SPEAKER = re.compile(r"tangram: (?:error: )?")


class _SettingsRefused(EngineStartFailed):
    """The engine says that its settings cannot work: another try would end alike."""


@dataclass(frozen=True)
class Timing:
    """Seconds, and counts of attempts.

    backoff doubles from `backoff` to `max_backoff`; an engine that ran for `stable` seconds starts over.
    give_up: failures in a row after which the state becomes failed.
    grace: what the engine gets between SIGTERM and SIGKILL. sick: health checks in a row that may fail.
    """

    backoff: float = 1.0
    max_backoff: float = 60.0
    stable: float = 60.0
    give_up: int = 5
    poll: float = 0.25
    health: float = 5.0
    sick: int = 6
    grace: float = 8.0


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ManagedEngine(EngineSupervisor):
    """Runs `python -m tangram serve MODEL` on a free loopback port, with a key of its own."""

    def __init__(
        self,
        settings: Settings,
        *,
        progress: Callable[[str], None] = lambda line: None,
        timing: Timing | None = None,
        pick_port: Callable[[], int] = free_port,
    ) -> None:
        super().__init__(settings, progress=progress)
        self._timing = timing or Timing()
        self._pick_port = pick_port
        self._log = EngineLog(settings.engine_log, self._phase)
        self._process: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()
        self._failures = 0
        self._condemned = ""

    def log_tail(self, lines: int = 100) -> list[str]:
        return self._log.tail(lines)

    # ---- commands ----------------------------------------------------------------------------

    async def start(self, overrides: Overrides | None = None) -> None:
        async with self._lock:
            self._set(EngineState.STARTING, overrides=dict(overrides or {}))
            self._run()

    async def restart(self, overrides: Overrides, model: str | None = None) -> None:
        _option_words(overrides)
        change = asyncio.create_task(self._restart(dict(overrides), model), name="engine restart")
        self._changes.add(change)
        change.add_done_callback(self._change_ended)
        await asyncio.shield(change)  # a caller that goes away does not leave it half done

    def condemn(self, reason: str) -> None:
        self._condemned = reason
        self.check_now()

    async def stop(self) -> None:
        for change in tuple(self._changes):
            change.cancel()
        async with self._lock:
            await self._halt()
            self._log.close()
            self._set(EngineState.STOPPED, phase="", pid=None)

    def _change_ended(self, change: asyncio.Task[None]) -> None:
        self._changes.discard(change)
        if not change.cancelled():
            change.exception()  # it was told to the caller, if there still is one

    async def _restart(self, overrides: Overrides, model: str | None) -> None:
        async with self._lock:
            previous, before = self._status.overrides, (self.settings, self._model)
            chosen = await self._other(model) if model is not None else before
            self._set(EngineState.DRAINING, phase="finishing the running replies")
            if self.drain is not None:
                await self.drain()
            await self._halt()
            self._failures = 0
            self.settings, self._model = chosen
            self._set(EngineState.STARTING, overrides=overrides, phase="")
            try:
                await self._come_up()
            except ModelUnusable as error:
                self._give_up(error.message)
                raise EngineStartFailed(error.message) from error
            except EngineStartFailed as error:
                self.settings, self._model = before
                await self._go_back(previous, error)
            else:
                self._run(up=True)

    async def _other(self, model: str) -> tuple[Settings, ServedModel]:
        """Another model, looked at while the engine still runs with the one before."""
        settings = self.settings.model_copy(update={"model": model})
        try:
            return settings, await open_model(settings, lambda text: None)
        except ModelUnusable as error:
            raise EngineStartFailed(error.message, rolled_back=self._status.ready) from error

    async def _go_back(self, previous: Overrides, error: EngineStartFailed) -> None:
        self._progress(f"engine: {error.message} Going back to the previous settings.")
        self._set(EngineState.STARTING, overrides=previous, detail=error.message)
        try:
            await self._come_up()
        except EngineStartFailed as again:
            if isinstance(again, _SettingsRefused):
                self._give_up(again.message)
            else:
                self._run()
            raise EngineStartFailed(
                f"{error.message} It does not start with the previous settings either: {again.message}"
            ) from error
        self._run(up=True)
        raise EngineStartFailed(
            f"{error.message} It runs with the previous settings again.", rolled_back=True
        ) from error

    # ---- the life of the engine --------------------------------------------------------------

    def _run(self, *, up: bool = False) -> None:
        self._task = asyncio.create_task(self._live(up), name="engine supervisor")

    async def _live(self, up: bool) -> None:
        while True:
            began = time.monotonic()
            try:
                if not up:
                    await self._come_up()
                up = False
                began = time.monotonic()
                reason = await self._watch()
                if time.monotonic() - began >= self._timing.stable:
                    self._failures = 0
            except (ModelUnusable, _SettingsRefused) as error:
                self._give_up(error.message)
                return
            except EngineStartFailed as error:
                reason = error.message
            self._failures += 1
            await self._end_child()
            if self._failures >= self._timing.give_up:
                self._give_up(f"{reason} It failed {self._failures} times in a row.")
                return
            delay = min(self._timing.max_backoff, self._timing.backoff * 2 ** (self._failures - 1))
            self._set(
                EngineState.RESTARTING,
                detail=reason,
                restarts=self._status.restarts + 1,
                phase=f"next try in {delay:g} s",
            )
            self._progress(f"engine: {reason} Next try in {delay:g} s.")
            await asyncio.sleep(delay)
            self._phase("starting")

    def _give_up(self, reason: str) -> None:
        self._set(EngineState.FAILED, phase="", detail=reason, pid=None)
        self._progress(f"engine: {reason}")

    async def _come_up(self) -> None:
        """Start the process and wait until it serves our model. Raises EngineStartFailed, ModelUnusable."""
        began = time.monotonic()
        model = await self._open_model()
        port, key = self._pick_port(), secrets.token_urlsafe(32)
        self._phase("starting")
        await self._drop_client()
        process = await self._spawn(model, port, key)
        self._client = EngineClient(f"http://127.0.0.1:{port}", api_key=key)
        try:
            async with asyncio.timeout(self.settings.start_timeout):
                limit = await self._serves(process, self._client, model.name)
            await self._became_ready(self._client, model.name, limit, time.monotonic() - began)
        except TimeoutError:
            await self._end_child()
            raise EngineStartFailed(
                f"The engine was not ready after {self.settings.start_timeout:g} seconds (it was "
                f"{self._status.phase or 'starting'})."
            ) from None
        except EngineStartFailed:
            await self._end_child()
            raise

    async def _serves(self, process: EngineProcess, client: EngineClient, name: str) -> int:
        """Wait until the engine serves `name`; its context length. A stranger on our port does not count."""
        while True:
            if process.returncode is not None:
                await process.finish_log()
                raise self._start_failure(process.returncode)
            if await client.health():
                with contextlib.suppress(TangramError):
                    for served in await client.models():
                        if served.get("id") == name:
                            return int(served.get("max_model_len") or 0)
            await asyncio.sleep(self._timing.poll)

    def _start_failure(self, code: int) -> EngineStartFailed:
        """Why the engine ended before it was ready, in its own words."""
        if code == USAGE_ERROR:
            lines = [line.strip() for line in self._log.tail() if line.strip()]
            own = [line for line in lines if _SPEAKER.match(line)]  # others may have printed after it
            last = _SPEAKER.sub("", (own or lines)[-1], count=1)[:500]
            return _SettingsRefused(_sentence(f"The engine refuses its settings: {last}"))
        failure = self._log.failure()
        return EngineStartFailed(_sentence(f"The engine ended while starting (code {code}): {failure}"))

    async def _watch(self) -> str:
        """Return, with the reason, when the running engine is dead or has stopped answering."""
        process, client = self._process, self._client
        self._condemned = ""
        if process is None or client is None:
            return "The engine is gone."
        ended = asyncio.create_task(process.wait())
        sick = 0
        try:
            while True:
                pause = asyncio.create_task(self._suspicion(self._timing.health))
                try:
                    await asyncio.wait({ended, pause}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    pause.cancel()
                if ended.done():
                    await process.finish_log()
                    failure = self._log.failure()
                    return _sentence(f"The engine ended (code {ended.result()}){failure and f': {failure}'}")
                if self._condemned:
                    return self._condemned
                sick = 0 if await client.health() else sick + 1
                if sick >= self._timing.sick:
                    return f"The engine did not answer {sick} health checks in a row."
        finally:
            ended.cancel()

    # ---- the process -------------------------------------------------------------------------

    async def _spawn(self, model: ServedModel, port: int, key: str) -> EngineProcess:
        prefix = shlex.split(self.settings.engine_command) or [sys.executable, "-m", "tangram", "serve"]
        command = [
            *prefix, model.source,
            "--host", "127.0.0.1", "--port", str(port), "--served-model-name", model.name,
            *self._parallel(), *shlex.split(self.settings.engine_args),
            *_option_words(self._status.overrides),
        ]  # fmt: skip
        cache = self.settings.home / "cache"
        environment = {
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "TANGRAM_KERNEL_CACHE": str(cache / "kernels"),
            **without_secrets(os.environ),
            "TANGRAM_HOME": str(self.settings.home),
            "VLLM_API_KEY": key,
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self._process = await EngineProcess.start(command, environment, self._log, self._timing.grace)
        self._set(pid=self._process.pid)
        return self._process

    def _parallel(self) -> list[str]:
        size = self.settings.data_parallel_size
        return ["--data-parallel-size", str(size)] if size > 1 else []

    async def _halt(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        await self._end_child()

    async def _end_child(self) -> None:
        await self._drop_client()
        process, self._process = self._process, None
        if process is not None:
            await process.end()
            self._set(pid=None)


def _sentence(text: str) -> str:
    """With a full stop at its end, so that another sentence can follow."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _option_words(overrides: Overrides) -> list[str]:
    words: list[str] = []
    for name, value in overrides.items():
        if not name.isidentifier() or isinstance(value, bool) or not isinstance(value, int | float | str):
            raise EngineStartFailed(f"{name!r} cannot be an engine option.")
        words += [f"--tangram-{name.replace('_', '-')}", str(value)]
    return words
