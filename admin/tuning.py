"""Changing the engine's settings: what it would do, doing it, and going back when it fails."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Protocol

from admin.errors import TuneError
from app.engine_settings import EngineSettings
from app.errors import AppError, EngineStartFailed
from app.probe import probed_text
from tangram.errors import EngineRejected, TangramError

log = logging.getLogger(__name__)

FIELD_LABELS = {"retention": "Retention", "group_size": "Group size", "alpha": "Safety margin"}


@dataclass(frozen=True)
class TuneValues:
    """The settings that the console changes.

    ``alpha`` is the safety margin in standard deviations. ``group_size`` is ``None`` where the engine
    chooses, and then no part of what is stored: another model may need another size.
    """

    retention: float
    group_size: int | None
    alpha: float

    @classmethod
    def checked(
        cls, retention: object, group_size: object, alpha: object, automatic: int | None = None
    ) -> TuneValues:
        """Values of a form; raises :class:`TuneError` with a sentence that names the field.

        ``automatic`` is the group size that the engine chose, if it did: that number leaves it the choice.
        """
        group = number("Group size", group_size)
        if group != int(group) or group < 1:
            raise TuneError("Group size must be a whole number of heads, 1 or more.")
        size = None if group == automatic else int(group)
        values = cls(number("Retention", retention), size, number("Safety margin", alpha))
        if not 0 < values.retention <= 1:
            raise TuneError("Retention must be above 0% and at most 100%.")
        if not 0 <= values.alpha <= 10:
            raise TuneError("Safety margin must be between 0 and 10 standard deviations.")
        return values

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> TuneValues:
        """The values of a running engine's configuration."""
        group = config.get("group_size")
        automatic = 1 if group is None else None
        return cls.checked(config.get("retention"), group or automatic, config.get("alpha"), automatic)

    def to_dict(self) -> dict[str, float | int]:
        """As stored under the setting ``engine`` and given to the supervisor."""
        values: dict[str, float | int] = {"retention": self.retention, "alpha": self.alpha}
        return values if self.group_size is None else {**values, "group_size": self.group_size}


def number(name: str, value: object) -> float:
    """``value`` of the field ``name``, if it is a finite number; raises :class:`TuneError` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TuneError(f"{name} must be a number.")
    return float(value)


class Previewer(Protocol):
    """The part of the engine's client that tells what settings would change."""

    async def preview(self, **changes: float | int) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class TuneJob:
    """A change of settings; ``outcome`` is ``None`` while it runs, then ``applied`` or ``failed``."""

    wanted: TuneValues
    started: float
    outcome: str | None = None
    message: str = ""
    seconds: float = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the start, or until the end."""
        return self.seconds if self.outcome else monotonic() - self.started


class TuneService:
    """Runs one change at a time, as a job of the app: a closed browser tab does not interrupt it."""

    def __init__(
        self,
        previewer: Callable[[], Previewer],
        settings: EngineSettings,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._previewer = previewer
        self._settings = settings
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None
        self.job: TuneJob | None = None

    @property
    def running(self) -> bool:
        """Whether a change is being applied now."""
        return self._task is not None and not self._task.done()

    async def preview(self, values: TuneValues) -> Mapping[str, Any]:
        """What the engine says the values would do; raises :class:`TuneError` with its words when refused."""
        try:
            return await self._previewer().preview(**values.to_dict())
        except (AppError, TangramError) as error:
            if _refused(error):
                raise TuneError(_sentence(str(error))) from error
            raise TuneError(f"The engine cannot be asked now: {error}") from error

    async def check(self, values: TuneValues) -> None:
        """Ask the engine about the values; raises :class:`TuneError` when it refuses them.

        An engine that is away cannot check; new values may be what brings it back, so they pass.
        """
        try:
            await self._previewer().preview(**values.to_dict())
        except (AppError, TangramError) as error:
            if _refused(error):
                raise TuneError(_sentence(str(error))) from error
            log.info("settings are not checked: %s", error)

    async def apply(self, user_id: str, values: TuneValues) -> None:
        """Check the values with the engine, then start the change; raises :class:`TuneError` when refused."""
        await self.check(values)
        if self.running:
            raise TuneError("Another change is being applied. Wait until it is done.")
        job = self.job = TuneJob(values, monotonic())
        self._task = asyncio.create_task(self._run(user_id, job), name="tune-engine")

    async def wait(self, seconds: float) -> TuneJob | None:
        """The job after at most ``seconds``, or as soon as it has ended."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=seconds)
        return self.job

    async def stop(self) -> None:
        """Cancel a change in progress; the app is shutting down."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self, user_id: str, job: TuneJob) -> None:
        try:
            try:
                await self._settings.tune(user_id, job.wanted.to_dict())
            except EngineStartFailed as error:
                self._finish(job, "failed", failure_text(error, self._settings.engine_ready))
                return
            found = probed_text(self._settings.probed)
            self._finish(job, "applied", f"The engine is ready with the new settings.{found}")
        except Exception as error:
            log.exception("tuning the engine failed")
            if not self._ended(job):
                self._finish(job, "failed", f"The change could not be completed and is not stored: {error}")

    def _ended(self, job: TuneJob) -> bool:
        return self.job is not job

    def _finish(self, job: TuneJob, outcome: str, message: str) -> None:
        self.job = replace(job, outcome=outcome, message=message, seconds=job.elapsed)
        self._on_change()


def _refused(error: Exception) -> bool:
    """Whether the engine looked at the values and said no, rather than being unable to look."""
    return isinstance(error, EngineRejected) and error.status < 500


def _sentence(message: str) -> str:
    """The engine names the field as in its configuration; the form has other words for it."""
    for field, label in FIELD_LABELS.items():
        if message.startswith(f"{field}: "):
            return f"{label}: {message.removeprefix(f'{field}: ')}"
    return message


def failure_text(error: EngineStartFailed, runs: bool) -> str:
    """What became of a change that the engine did not start with."""
    if error.rolled_back:
        return f"The engine did not start with these settings and went back to the previous ones. {error}"
    if runs:
        return f"Nothing was changed. {error}"
    return f"The engine did not start, neither with these settings nor with the previous ones. {error}"
