"""One life of the engine as a process, under its guardian, its output going to the log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from app import guardian
from app.engine_log import EngineLog

_LAST_WORDS_SECONDS = 1.0
_GUARDIAN_SECONDS = 4.0


class EngineProcess:
    """A started engine. `grace`: seconds between SIGTERM and SIGKILL."""

    def __init__(self, process: asyncio.subprocess.Process, pump: asyncio.Task[None], grace: float) -> None:
        self._process = process
        self._pump = pump
        self._grace = grace

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], log: EngineLog, grace: float
    ) -> Self:
        """Start `command` in a session of its own: a Ctrl-C in our terminal does not reach it."""
        log.mark(f"start {shlex.join(command)}")
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(Path(guardian.__file__)), str(grace), str(os.getpid()), *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )  # fmt: skip
        if process.stdout is None:
            raise RuntimeError("a process was started without its pipe")
        return cls(process, asyncio.create_task(log.pump(process.stdout), name="engine log"), grace)

    @property
    def pid(self) -> int:
        """Of the guardian."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The engine's exit code (128 + signal if it was killed), None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    async def finish_log(self) -> None:
        """Read what the dead engine still had to say; helpers that hold the pipe open get a second."""
        await asyncio.wait({self._pump}, timeout=_LAST_WORDS_SECONDS)

    async def end(self) -> None:
        """Stop it, gently first, and everything that it started."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._process.wait(), self._grace + _GUARDIAN_SECONDS)
            except TimeoutError:
                guardian.kill_group(self._process.pid, signal.SIGKILL)
                await self._process.wait()
        self._pump.cancel()
        await asyncio.wait({self._pump})
