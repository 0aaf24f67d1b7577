"""A command of ours that takes minutes to hours, as a process at the lowest priority beside the engine.

Its lines for programs tell how far it is; all others are its log. Cancelling whoever awaits it ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.database import without_secrets
from app.engine_log import EngineLog
from app.engine_process import EngineProcess

MARK = "tangram-progress "
NICE = 15
GRACE_SECONDS = 8.0
REFUSED = 2
_SPEAKER = re.compile(r"tangram: error: ")


class CommandLog(EngineLog):
    """The command's output; its lines for programs go to `on_progress` instead."""

    def __init__(self, path: Path, on_progress: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__(path, lambda phase: None)
        self._on_progress = on_progress

    def write(self, line: str) -> None:
        if not line.startswith(MARK):
            super().write(line)
            return
        with contextlib.suppress(ValueError):
            self._on_progress(json.loads(line.removeprefix(MARK)))


class BackgroundCommand:
    """One at a time. home: TANGRAM_HOME of the process. name: of its log."""

    def __init__(self, home: Path, name: str, on_progress: Callable[[Mapping[str, Any]], None]) -> None:
        self._home = home
        self._log = CommandLog(home / "logs" / f"{name}.log", on_progress)

    async def run(self, words: Sequence[str], *, reads_database: bool = False) -> str:
        """Why it failed, "" if it did not. Only what reads the database is told where that is."""
        process = None
        try:
            process = await EngineProcess.start(
                [*_gently(), *words], self._environment(reads_database), self._log, GRACE_SECONDS
            )
            code = await process.wait()
            await process.finish_log()
        except OSError as error:
            return f"It could not be started: {error.strerror or error}."
        finally:
            if process is not None:
                await asyncio.shield(process.end())
        return self._reason(code) if code else ""

    def log_tail(self, lines: int = 200) -> list[str]:
        """The last lines of its output."""
        return self._log.tail(lines)

    def close(self) -> None:
        """Close its log."""
        self._log.close()

    def _environment(self, reads_database: bool) -> dict[str, str]:
        threads = max(1, (os.cpu_count() or 2) // 2)  # the engine wants some too
        return {
            "OMP_NUM_THREADS": str(threads),
            **(os.environ if reads_database else without_secrets(os.environ)),
            "TANGRAM_HOME": str(self._home),
            "PYTHONUNBUFFERED": "1",
        }

    def _reason(self, code: int) -> str:
        own = [line for line in self._log.tail() if _SPEAKER.match(line)]
        if own and (code == REFUSED or code == 1):
            return _SPEAKER.sub("", own[-1], count=1)[:500]
        return f"It ended with code {code}. {self._log.failure()}".strip()


def _gently() -> list[str]:
    """Words in front of a command that must not slow the engine down."""
    nice = shutil.which("nice")
    return [nice, "-n", str(NICE)] if nice else []
