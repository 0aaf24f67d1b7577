"""What administrators have decided about the engine: tuned values, and the profile of its heads' budgets.

Every change goes through here, one at a time: the engine restarts with it, and only what runs is stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from app.errors import EngineStartFailed
from app.probe import ProbeResult, worse
from app.supervisor import EngineStatus

TUNED = "engine"
"""Key of the setting with the values tuned in the console."""
PROFILES = "engine_profile"
"""Key of the setting with the chosen profile by model: one is of no use for another model."""
MODEL = "engine_model"
"""Key of the setting with the model chosen in the console, and what MODEL said then."""
AUTO, NONE = "auto", "none"


class Restarter(Protocol):
    """The part of the supervisor that replaces the engine."""

    @property
    def status(self) -> EngineStatus: ...

    async def restart(self, overrides: Mapping[str, float | int | str], model: str | None = None) -> None: ...

    def choose_model(self, model: str) -> None: ...


class SettingsStore(Protocol):
    """The part of the store that keeps settings and the trail of changes."""

    async def get_setting(self, key: str) -> Any: ...

    async def set_setting(self, key: str, value: Any) -> None: ...

    async def add_audit(self, user_id: str | None, action: str, before: Any, after: Any) -> Any: ...


class EngineSettings:
    """One per process. `model`: as the app's settings name it; profiles are chosen for it.

    probe: looks whether the engine still finds details.
    probed: what it found before and after the last change.
    """

    def __init__(
        self,
        store: SettingsStore,
        restarter: Restarter,
        model: str = "",
        probe: Callable[[], Awaitable[ProbeResult | None]] | None = None,
    ) -> None:
        self._store = store
        self._restarter = restarter
        self._configured = self._model = self._before_model = model
        self._probe = probe or _unprobed
        self.probed: tuple[ProbeResult | None, ProbeResult | None] = (None, None)
        self._lock = asyncio.Lock()

    async def load_model(self) -> None:
        """Have the model that was chosen in the console served, unless MODEL was changed since; at start."""
        found = await self._store.get_setting(MODEL) or {}
        if found.get("configured") == self._configured and found.get("model") is not None:
            self._model = str(found["model"])
            self._restarter.choose_model(self._model)

    @property
    def model(self) -> str:
        """What is served, as settings name it; "" for the bundled one."""
        return self._model

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

    async def use_model(self, user_id: str, model: str) -> None:
        """Restart with another model: a directory, a hub id, or "" for the bundled one. Raises
        EngineStartFailed: nothing is stored then, and the engine runs with the one before if it can."""
        async with self._lock:
            before, self._model = self._model, model
            self._before_model = before
            try:
                overrides = {**(await self._tuned() or {}), **_option(await self.profile())}
                await self._restart(user_id, "engine.model", overrides, before, model, model=model)
            except BaseException:
                self._model = before
                raise
            await self._store.set_setting(MODEL, {"configured": self._configured, "model": model})
            await self._store.add_audit(user_id, "engine.model", before, model)

    async def restart(self, user_id: str) -> None:
        """Restart with what runs. Raises EngineStartFailed."""
        async with self._lock:
            await self._restart(user_id, "engine.restart", await self.overrides(), None, None)
            await self._store.add_audit(user_id, "engine.restart", None, None)

    async def _restart(
        self,
        user_id: str,
        action: str,
        overrides: Mapping[str, Any],
        before: Any,
        after: Any,
        model: str | None = None,
    ) -> None:
        try:
            await self._replace(overrides, model)
        except EngineStartFailed as error:
            failed = {**after, "error": str(error)} if isinstance(after, dict) else [after, str(error)]
            await self._store.add_audit(user_id, f"{action}_failed", before, failed)
            raise

    async def _replace(self, overrides: Mapping[str, Any], model: str | None) -> None:
        """Restart, and go back when the engine then finds less than half of what it found before."""
        options: tuple[Any, ...] = () if model is None else (model,)
        previous = dict(self._restarter.status.overrides)
        before = await self._probe() if model is None else None
        await self._restarter.restart(overrides, *options)
        after = await self._probe()
        self.probed = (before, after)
        if after is None or not worse(before, after):
            return
        found = f"before it found {before.told()}, now {after.told()}" if before else after.told()
        reason = f"The check of its memory for details failed: {found}."
        try:
            await self._restarter.restart(previous, *((self._before_model,) if model is not None else ()))
        except EngineStartFailed as error:
            raise EngineStartFailed(f"{reason} {error.message}") from error
        raise EngineStartFailed(f"{reason} It runs with the previous settings again.", rolled_back=True)

    async def _tuned(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = await self._store.get_setting(TUNED)
        return found

    async def _choice(self) -> dict[str, Any]:
        every = await self._store.get_setting(PROFILES) or {}
        return dict(every.get(self._model) or {})


async def _unprobed() -> None:
    return None


def _option(profile: str) -> dict[str, str]:
    """`auto` is the engine's own default, which its environment may decide otherwise."""
    return {} if profile == AUTO else {"profile": profile}
