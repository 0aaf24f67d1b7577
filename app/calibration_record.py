"""What is known of the one calibration, kept in a file so that a restarted app goes on with it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from app.moments import now_ms

log = logging.getLogger(__name__)


class CalibrationState(StrEnum):
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class CommandRecord:
    """How far a command is that runs beside the engine, and how it ended. Times are unix milliseconds.

    done, total: what it counts; total is 0 until the model is loaded.
    message: why it failed, "" if it did not.
    """

    state: CalibrationState = CalibrationState.RUNNING
    ended: int | None = None
    done: int = 0
    total: int = 0
    message: str = ""
    remaining_seconds: float | None = None

    @property
    def running(self) -> bool:
        return self.state is CalibrationState.RUNNING

    def settled(self, state: CalibrationState, message: str = "") -> Self:
        """The same, come to its end now."""
        return replace(self, state=state, message=message, ended=now_ms(), remaining_seconds=None)


@dataclass(frozen=True)
class CalibrationRecord(CommandRecord):
    """One calibration, which counts samples.

    out: the file that it writes, in the folder of profiles. source: the model, as the command takes it.
    options: the command's options by name.
    remaining_seconds: by the samples that this run has read, None before the first.
    """

    out: str
    model: str
    source: str
    options: dict[str, Any]
    user_id: str
    started: int

    def words(self, folder: Path, places: Mapping[str, str] | None = None) -> list[str]:
        """The options of `tangram calibrate`. places: what some kinds of data stand for."""
        words = ["--model", self.source, "--out", str(folder / self.out), "--progress", "json"]
        named = (places or {}).get(str(self.options.get("data")))
        for name, value in {**self.options, **({"data": named} if named else {})}.items():
            words += [f"--{name}", ",".join(map(str, value)) if isinstance(value, list) else str(value)]
        return words

    def save(self, path: Path) -> None:
        """Write it whole or not at all."""
        fresh = path.with_suffix(".new")
        with fresh.open("w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """What was saved; None if nothing was, or nothing that can be read."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            found = cls(**data)
            return replace(found, state=CalibrationState(found.state), remaining_seconds=None)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError):
            log.warning("%s cannot be read: the last calibration is forgotten", path)
            return None
