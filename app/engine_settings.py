"""What administrators have decided about the engine: tuned values, and the profile of its heads' budgets.

Every change goes through here, one at a time: the engine restarts with it, and only what runs is stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from app.errors import EngineStartFailed
from app.supervisor import EngineStatus

TUNED = "engine"
"""Key of the setting with the values tuned in the console."""
PROFILES = "engine_profile"
"""Key of the setting with the chosen profile by model: one is of no use for another model."""
AUTO, NONE = "auto", "none"


class Restarter(Protocol):
    """The part of the supervisor that replaces the engine."""

    @property
    def status(self) -> EngineStatus: ...

    async def restart(self, overrides: Mapping[str, float | int | str]) -> None: ...


class SettingsStore(Protocol):
    """The part of the store that keeps settings and the trail of changes."""

    async def get_setting(self, key: str) -> Any: ...

    async def set_setting(self, key: str, value: Any) -> None: ...

    async def add_audit(self, user_id: str | None, action: str, before: Any, after: Any) -> Any: ...


class EngineSettings:
    """One per process. `model`: as the app's settings name it; profiles are chosen for it."""

    def __init__(self, store: SettingsStore, restarter: Restarter, model: str = "") -> None:
        self._store = store
        self._restarter = restarter
        self._model = model
        self._lock = asyncio.Lock()

    @property
    def engine_ready(self) -> bool:
        """Whether an engine runs now."""
        return self._restarter.status.ready

    async def overrides(self) -> dict[str, Any]:
        """What an engine is started with."""
        return {**(await self._tuned() or {}), **_option(await self.profile())}

    async def profile(self) -> str:
        """The chosen profile: a file, `auto` or `none`."""
        return str((await self._choice()).get("profile", AUTO))

    async def profile_before(self) -> str | None:
        """The one that was chosen before; None if none was."""
        before = (await self._choice()).get("before")
        return None if before is None else str(before)

    async def tune(self, user_id: str, values: Mapping[str, float | int]) -> None:
        """Restart with other values. Raises EngineStartFailed: nothing is stored then."""
        async with self._lock:
            before = await self._tuned()
            after = {**(before or {}), **values}
            overrides = {**after, **_option(await self.profile())}
            await self._restart(user_id, "engine.tune", overrides, before, after)
            await self._store.set_setting(TUNED, after)
            await self._store.add_audit(user_id, "engine.tune", before, after)

    async def use_profile(self, user_id: str, profile: str) -> None:
        """Restart with another profile: a file, `auto` or `none`. Raises EngineStartFailed: nothing is stored
        then, and the engine runs with the one before if it can."""
        async with self._lock:
            before = await self.profile()
            overrides = {**(await self._tuned() or {}), **_option(profile)}
            await self._restart(user_id, "engine.profile", overrides, before, profile)
            every = await self._store.get_setting(PROFILES) or {}
            await self._store.set_setting(
                PROFILES, {**every, self._model: {"profile": profile, "before": before}}
            )
            await self._store.add_audit(user_id, "engine.profile", before, profile)

    async def _restart(
        self, user_id: str, action: str, overrides: Mapping[str, Any], before: Any, after: Any
    ) -> None:
        try:
            await self._restarter.restart(overrides)
        except EngineStartFailed as error:
            failed = {**after, "error": str(error)} if isinstance(after, dict) else [after, str(error)]
            await self._store.add_audit(user_id, f"{action}_failed", before, failed)
            raise

    async def _tuned(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = await self._store.get_setting(TUNED)
        return found

    async def _choice(self) -> dict[str, Any]:
        every = await self._store.get_setting(PROFILES) or {}
        return dict(every.get(self._model) or {})


def _option(profile: str) -> dict[str, str]:
    """`auto` is the engine's own default, which its environment may decide otherwise."""
    return {} if profile == AUTO else {"profile": profile}
