"""Changing the engine's settings: what it would do, doing it, and going back when it fails."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from admin.errors import TuneError
from app.engine_change import SETTINGS, EngineChange, EngineChanges
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

    def told(self) -> str:
        """In words, for the log."""
        group = "automatic" if self.group_size is None else self.group_size
        return f"retention {self.retention:g}, group size {group}, safety margin {self.alpha:g}"

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


class TuneService:
    """Asks the engine about values, and has it changed."""

    def __init__(
        self, previewer: Callable[[], Previewer], settings: EngineSettings, changes: EngineChanges
    ) -> None:
        self._previewer = previewer
        self._settings = settings
        self.changes = changes

    @property
    def job(self) -> EngineChange | None:
        """The last change of settings."""
        return self.changes.last(SETTINGS)

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

    async def apply(self, user_id: str, values: TuneValues) -> EngineChange:
        """Check the values with the engine, then start the change; raises :class:`TuneError` when refused."""
        await self.check(values)

        async def work() -> str:
            try:
                await self._settings.tune(user_id, values.to_dict())
            except EngineStartFailed as error:
                said = failure_text(error, self._settings.engine_ready)
                raise EngineStartFailed(said, rolled_back=error.rolled_back) from error
            return f"The engine is ready with the new settings.{probed_text(self._settings.probed)}"

        try:
            return self.changes.start(SETTINGS, values.told(), work)
        except AppError as error:
            raise TuneError(error.message) from error


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
