"""Calibration as a job of the app: `tangram calibrate` in a process of its own, at low priority.

One at a time. A closed browser tab does not end it. When the app stops, it stops too, and goes on when the
app is back: the command keeps what it found of each sample in a file beside the profile.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.background_command import BackgroundCommand
from app.calibration_record import CalibrationRecord, CalibrationState
from app.errors import AlreadyRunning, BadRequest, Missing
from app.moments import now_ms
from app.settings import Settings
from app.supervisor import EngineSupervisor
from db.store import Store
from tangram.calibration.settings import Settings as CalibrationSettings
from tangram.errors import ConfigError

log = logging.getLogger(__name__)

BUILTIN, CONVERSATIONS, UPLOADED = "builtin", "conversations", "uploaded"
DATA = (BUILTIN, CONVERSATIONS, UPLOADED)
MOST_UPLOADED = 64 << 20
RETENTIONS = (0.5, 0.25)
"""Needs at these are noted by default: one file then serves both settings that the documents name."""


class Calibration:
    """One per process. `folder` has the profiles.

    on_done: is told of each that is complete. busy: whether something else needs the model's memory now.
    beginning: held from the look whether something runs until it does, also by what else needs that memory.
    """

    command: Sequence[str] = (sys.executable, "-m", "tangram", "calibrate")

    def __init__(self, settings: Settings, supervisor: EngineSupervisor, store: Store) -> None:
        self.folder = settings.profiles_dir
        self._settings = settings
        self._supervisor = supervisor
        self._store = store
        self._path = self.folder / "calibration.json"
        self.texts = settings.home / "calibration" / "texts.jsonl"
        self.on_done: Callable[[CalibrationRecord], Awaitable[None]] = _nothing_more
        self.beginning = asyncio.Lock()
        self.busy: Callable[[], bool] = lambda: False
        self._process = BackgroundCommand(settings.home, "calibration", self._progress)
        self._task: asyncio.Task[None] | None = None
        self._began = 0.0
        self._new = 0
        self.record: CalibrationRecord | None = None

    # ---- before it begins --------------------------------------------------------------------

    async def keep_texts(self, user_id: str, content: bytes) -> int:
        """Keep a JSONL file of objects with a `text` as the data called "uploaded"; how many texts it has.

        It takes the place of the one before. Raises BadRequest naming the line that is wrong.
        """
        if len(content) > MOST_UPLOADED:
            raise BadRequest(f"The file is larger than {MOST_UPLOADED >> 20} MiB.", param="data")
        count = await asyncio.to_thread(_checked_texts, content)
        await asyncio.to_thread(_write_private, self.texts, content)
        await self._store.add_audit(
            user_id, "calibration.texts", None, {"texts": count, "bytes": len(content)}
        )
        return count

    def estimate(self, samples: int, length: int) -> float | None:
        """Seconds that a calibration would take, by the last complete one here; None without one."""
        last = self.record
        if last is None or last.state is not CalibrationState.DONE or not last.ended or not last.done:
            return None
        tokens = last.done * int(last.options.get("length", CalibrationSettings.length))
        return (last.ended - last.started) / 1000 * samples * length / tokens

    def log_tail(self, lines: int = 200) -> list[str]:
        """The last lines of the command's output. It names files and samples by kind, never their text."""
        return self._process.log_tail(lines)

    # ---- commands ----------------------------------------------------------------------------

    async def start(self, user_id: str, options: Mapping[str, Any]) -> CalibrationRecord:
        """Begin a calibration of the served model. Raises BadRequest, AlreadyRunning, EngineNotReady."""
        async with self.beginning:
            self._refuse_beside()
            source, name = self._supervisor.model_source, self._supervisor.status.model
            checked = checked_options(source, options)
            if checked["data"] == UPLOADED and not self.texts.is_file():
                raise BadRequest("No texts were uploaded yet.", param="data")
            stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
            record = CalibrationRecord(
                out=f"{_slug(name)}-{stamp}.json",
                model=name,
                source=source,
                options=checked,
                user_id=user_id,
                started=now_ms(),
            )
            await self._store.add_audit(user_id, "calibration.start", None, {"out": record.out, **checked})
            self._run(record)
            return record

    async def resume(self, user_id: str) -> CalibrationRecord:
        """Go on with the one that was cancelled, or failed. Raises Missing, AlreadyRunning."""
        async with self.beginning:
            self._refuse_beside()
            record = self._present()
            if record.state is CalibrationState.DONE:
                raise AlreadyRunning("The calibration is complete.")
            await self._store.add_audit(user_id, "calibration.resume", None, {"out": record.out})
            record = replace(record, state=CalibrationState.RUNNING, ended=None, message="")
            self._run(record)
            return record

    async def cancel(self, user_id: str) -> CalibrationRecord:
        """End it; what was found is kept, and `resume` goes on. Raises Missing, AlreadyRunning."""
        record = self._present()
        task = self._task
        if task is None or not record.running:
            raise AlreadyRunning("No calibration is running.")
        task.cancel()
        await asyncio.wait({task})
        if self._task is task and self._present().running:  # it may have come to its end just before
            self._settle(CalibrationState.CANCELLED)
        await self._store.add_audit(user_id, "calibration.cancel", None, {"out": record.out})
        return self._present()

    async def discard(self, user_id: str) -> None:
        """Forget one that is not complete, and what it found. Raises Missing, AlreadyRunning."""
        async with self.beginning:
            self._refuse_while_running()
            record = self._present()
            await asyncio.to_thread(self._remove, record)
            self.record = None
            await self._store.add_audit(user_id, "calibration.discard", {"out": record.out}, None)

    # ---- the app's life ----------------------------------------------------------------------

    async def recover(self) -> None:
        """Know the last calibration again, and go on with one that the end of the app interrupted."""
        self.record = await asyncio.to_thread(CalibrationRecord.load, self._path)
        if self.record is not None and self.record.running:
            log.info("going on with the calibration of %s", self.record.model)
            self._run(self.record)

    async def close(self) -> None:
        """End the process. The record still says that it runs, so that the next start goes on."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        self._process.close()

    async def wait(self) -> CalibrationRecord | None:
        """Return when nothing runs."""
        if self._task is not None:
            await asyncio.wait({self._task})
        return self.record

    # ---- parts -------------------------------------------------------------------------------

    def _refuse_while_running(self) -> None:
        if self.record is not None and self.record.running:
            raise AlreadyRunning("A calibration is running. Wait until it is done, or cancel it.")

    def _refuse_beside(self) -> None:
        self._refuse_while_running()
        if self.busy():
            raise AlreadyRunning("Profiles are being tried. Wait until that is done, or cancel it.")

    def _present(self) -> CalibrationRecord:
        if self.record is None:
            raise Missing("There is no calibration.")
        return self.record

    def _run(self, record: CalibrationRecord) -> None:
        record.save(self._path)
        self.record = record
        self._began, self._new = time.monotonic(), 0
        self._task = asyncio.create_task(self._calibrate(record), name="calibration")

    async def _calibrate(self, record: CalibrationRecord) -> None:
        words = record.words(self.folder, {UPLOADED: str(self.texts)})
        reads = record.options.get("data") == CONVERSATIONS
        reason = await self._process.run([*self.command, *words], reads_database=reads)
        if reason:
            self._settle(CalibrationState.FAILED, reason)
            return
        self._settle(CalibrationState.DONE)
        await self.on_done(self._present())

    def _progress(self, told: Mapping[str, Any]) -> None:
        record = self.record
        if record is None or not record.running:
            return
        done, total = int(told.get("done", 0)), int(told.get("total", 0))
        self._new += bool(told.get("new"))
        remaining = None
        if self._new:
            remaining = (time.monotonic() - self._began) / self._new * (total - done)
        self.record = replace(record, done=done, total=total, remaining_seconds=remaining)

    def _settle(self, state: CalibrationState, message: str = "") -> None:
        self.record = self._present().settled(state, message)
        self.record.save(self._path)

    def _remove(self, record: CalibrationRecord) -> None:
        for left in (f"{record.out}.state", f"{record.out}.state.new", f"{record.out}.state.old"):
            (self.folder / left).unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)


async def _nothing_more(record: CalibrationRecord) -> None:
    """What follows a calibration where nobody asked for more."""


def checked_options(source: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the command, checked as it would. Raises BadRequest naming the field."""
    named = {"retention": list(RETENTIONS), "data": DATA[0], **options}
    if named["data"] not in DATA:
        raise BadRequest(f"data must be one of {', '.join(DATA)}.", param="data")
    first, *others = named["retention"] or [0.0]
    rest = {name: value for name, value in named.items() if name != "retention"}
    try:
        CalibrationSettings(model=source, retention=first, others=tuple(others), **rest)
    except ConfigError as error:
        raise BadRequest(f"{error}.", param=error.field) from None
    return named


def _checked_texts(content: bytes) -> int:
    """How many texts there are. Raises BadRequest."""
    try:
        lines = content.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise BadRequest("The file is not UTF-8 text.", param="data") from None
    count = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError:
            raise BadRequest(f"Line {number} is not JSON.", param="data") from None
        if not isinstance(found, dict) or not isinstance(found.get("text"), str) or not found["text"].strip():
            raise BadRequest(f"Line {number} is no object with a `text`.", param="data")
        count += 1
    if not count:
        raise BadRequest("The file is empty: one JSON object with a `text` a line is wanted.", param="data")
    return count


def _write_private(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    fresh.replace(path)


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name.rsplit("/", 1)[-1]).strip("-.") or "model"
