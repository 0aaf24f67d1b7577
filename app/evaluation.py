"""Trying a profile before the engine runs with it: `tangram evaluate` as a job of the app.

The process loads the model a second time, on the processor unless told otherwise, at the lowest priority; the
engine is asked for its settings only. Results are kept beside the profile. The end of the app ends it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.background_command import BackgroundCommand
from app.calibration import Calibration
from app.calibration_record import CalibrationRecord, CalibrationState, CommandRecord
from app.engine_settings import AUTO, NONE
from app.errors import AlreadyRunning, AppError, BadRequest
from app.moments import now_ms
from app.profiles import ProfileEntry, Profiles, results_path
from app.settings import Settings
from app.supervisor import EngineSupervisor
from db.errors import DbError
from db.store import Store
from tangram.calibration.verdict import FORMAT, VERSION, file_hash
from tangram.errors import TangramError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationRecord(CommandRecord):
    """One evaluation, of `profile` against `other`, a profile's name or `none`. It counts passages, each once
    for every way to keep it."""

    profile: str
    other: str
    started: int


class Evaluation:
    """One per process, one at a time, and none while a calibration runs: each holds the model."""

    command: Sequence[str] = (sys.executable, "-m", "tangram", "evaluate")

    def __init__(
        self,
        settings: Settings,
        supervisor: EngineSupervisor,
        store: Store,
        profiles: Profiles,
        calibration: Calibration,
    ) -> None:
        self._supervisor, self._store = supervisor, store
        self._profiles, self._calibration = profiles, calibration
        self._process = BackgroundCommand(settings.home, "evaluation", self._progress)
        self._task: asyncio.Task[None] | None = None
        self._began = 0.0
        self.record: EvaluationRecord | None = None
        calibration.on_done = self._after_calibration
        calibration.busy = lambda: self.running

    @property
    def running(self) -> bool:
        """Whether profiles are being tried now."""
        return self.record is not None and self.record.running

    # ---- what was found ----------------------------------------------------------------------

    async def results(self, name: str) -> dict[str, dict[str, Any]]:
        """What was found of a profile, by the name of the other one (`none`: equal budgets). Left out is what
        was found of files that have changed since. Raises Missing."""
        entry = await self._profiles.entry(name)
        every = {one.name: one for one in await self._profiles.every()}
        return await asyncio.to_thread(self._valid, entry, every)

    def log_tail(self, lines: int = 200) -> list[str]:
        """The last lines of the command's output."""
        return self._process.log_tail(lines)

    # ---- commands ----------------------------------------------------------------------------

    async def start(self, user_id: str, name: str, other: str | None = None) -> EvaluationRecord:
        """Begin to try a profile against another one, by default what the engine runs with, at the engine's
        settings. Raises Missing, BadRequest, AlreadyRunning, EngineNotReady."""
        async with self._calibration.beginning:
            return await self._start(user_id, name, other)

    async def _start(self, user_id: str, name: str, other: str | None) -> EvaluationRecord:
        if self.running:
            raise AlreadyRunning("Profiles are being tried. Wait until that is done, or cancel it.")
        if self._calibration.record is not None and self._calibration.record.running:
            raise AlreadyRunning("A calibration is running. Wait until it is done, or cancel it.")
        entry = await self._profiles.entry(name)
        config = await self._engine_config()
        against = await self._against(config, other)
        for one in (entry, against):
            if one is not None:
                self._profiles.check(one)
        if against is not None and against.path == entry.path:
            raise BadRequest("This profile is what the engine runs with. Choose another one to compare with.")
        record = EvaluationRecord(entry.name, against.name if against else NONE, now_ms())
        out = self._profiles.folder / ".evaluation"
        words = [str(entry.path), str(against.path) if against else NONE]
        words += ["--model", self._supervisor.model_source, "--settings", json.dumps(config)]
        words += ["--out", str(out), "--progress", "json"]
        await self._store.add_audit(
            user_id, "profile.evaluate", None, {"profile": record.profile, "other": record.other}
        )
        self.record, self._began = record, time.monotonic()
        self._task = asyncio.create_task(self._run(entry, words, out), name="evaluation")
        return record

    async def cancel(self, user_id: str) -> EvaluationRecord:
        """End it. Raises AlreadyRunning where none runs."""
        task, record = self._task, self.record
        if task is None or record is None or not record.running:
            raise AlreadyRunning("No profile is being tried.")
        task.cancel()
        await asyncio.wait({task})
        if self._task is task and self.running:  # it may have come to its end just before
            self._settle(CalibrationState.CANCELLED)
        await self._store.add_audit(user_id, "profile.evaluate_cancel", None, {"profile": record.profile})
        return self.record or record

    async def wait(self) -> EvaluationRecord | None:
        """Return when nothing runs."""
        if self._task is not None:
            await asyncio.wait({self._task})
        return self.record

    async def close(self) -> None:
        """End the process; the app is shutting down."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        self._process.close()

    # ---- parts -------------------------------------------------------------------------------

    async def _engine_config(self) -> dict[str, Any]:
        try:
            return dict((await self._supervisor.client.memory())["config"])
        except TangramError as error:
            raise BadRequest(f"The engine does not tell its settings: {error}") from error

    async def _against(self, config: Mapping[str, Any], other: str | None) -> ProfileEntry | None:
        if other == NONE:
            return None
        if other is not None:
            return await self._profiles.entry(other)
        used = config.get("profile") if config.get("scope") != "uniform" else None
        if used in (None, AUTO, NONE):
            return None
        for one in await self._profiles.every():
            if str(one.path) == str(used):
                return one
        raise BadRequest(
            "The engine runs with a profile that is not listed here: name another one.", param="other"
        )

    async def _after_calibration(self, done: CalibrationRecord) -> None:
        try:
            await self.start(done.user_id, done.out)
        except (AppError, DbError, TangramError) as error:
            log.info("the new profile is not tried by itself: %s", error)

    async def _run(self, entry: ProfileEntry, words: Sequence[str], out: Path) -> None:
        try:
            reason = await self._process.run([*self.command, *words])
            if not reason:
                await asyncio.to_thread(self._keep, entry, out)
        except (OSError, ValueError, KeyError) as error:
            reason = f"Its result cannot be kept: {error}."
        finally:
            await asyncio.to_thread(out.unlink, missing_ok=True)
        self._settle(CalibrationState.FAILED if reason else CalibrationState.DONE, reason)

    def _keep(self, entry: ProfileEntry, out: Path) -> None:
        """Add the result to the profile's, in place of an earlier one against the same other."""
        found = json.loads(out.read_text(encoding="utf-8"))
        path = results_path(self._profiles.folder, entry.name)
        every = _read(path) | {found["profiles"][1]["profile"]: found}
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(json.dumps(every, indent=1) + "\n", encoding="utf-8")
        fresh.replace(path)
        # Looked at last: whoever deletes a profile deletes it first, then its results.
        if not entry.path.exists():
            path.unlink(missing_ok=True)
            raise ValueError("the profile was deleted")

    def _valid(self, entry: ProfileEntry, every: Mapping[str, ProfileEntry]) -> dict[str, dict[str, Any]]:
        found = _read(results_path(self._profiles.folder, entry.name))
        own = file_hash(entry.path)
        valid = {}
        for other, result in found.items():
            hashes = [one["file_hash"] for one in result["profiles"]]
            against = every.get(other)
            if hashes == [own, None if against is None else file_hash(against.path)]:
                valid[other] = result
        return valid

    def _progress(self, told: Mapping[str, Any]) -> None:
        record = self.record
        if record is None or not record.running:
            return
        done, total = int(told.get("done", 0)), int(told.get("total", 0))
        if not done:
            self._began = time.monotonic()
        left = (time.monotonic() - self._began) / done * (total - done) if done else None
        self.record = replace(record, done=done, total=total, remaining_seconds=left)

    def _settle(self, state: CalibrationState, message: str = "") -> None:
        if self.record is not None:
            self.record = self.record.settled(state, message)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Results by the other profile; empty where there is none that this release can read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {
            str(other): one
            for other, one in found.items()
            if one["format"] == FORMAT and one["version"] == VERSION and len(one["profiles"]) == 2
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        log.warning("%s cannot be read: what was found of the profile is not shown", path)
        return {}
