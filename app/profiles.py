"""The profiles of this installation and of the release: looking at them, choosing one, throwing one away."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.engine_change import PROFILE, EngineChange, EngineChanges
from app.engine_settings import AUTO, NONE, EngineSettings
from app.errors import AppError, BadRequest, Missing
from app.probe import probed_text
from app.settings import Settings
from app.supervisor import EngineSupervisor
from db.store import Store
from tangram.errors import ProfileError, TangramError
from tangram.profile_summary import advice, compare, costs, describe
from tangram.shipped import INDEX, folder

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.json")
RECORD = "calibration.json"
RESULTS = ".evaluations"
PATIENCE_SECONDS = 5.0


@dataclass(frozen=True)
class ProfileEntry:
    """A profile's file. `problem`: why it cannot be used, "" if it can. `about`: see `describe`."""

    name: str
    path: Path
    shipped: bool
    about: dict[str, Any]
    problem: str = ""


class Profiles:
    """One per process."""

    def __init__(
        self,
        settings: Settings,
        supervisor: EngineSupervisor,
        engine_settings: EngineSettings,
        store: Store,
        changes: EngineChanges,
        shipped: Path | None = None,
    ) -> None:
        self.folder = settings.profiles_dir
        self._shipped = shipped or folder()
        self._supervisor = supervisor
        self._engine_settings = engine_settings
        self._store = store
        self._changes = changes
        self._known: dict[Path, tuple[int, ProfileEntry]] = {}

    @property
    def activation(self) -> EngineChange | None:
        """The last change of profile."""
        return self._changes.last(PROFILE)

    # ---- looking -----------------------------------------------------------------------------

    async def every(self) -> list[ProfileEntry]:
        """Own ones, latest first, then the release's."""
        return await asyncio.to_thread(self._list)

    async def entry(self, name: str) -> ProfileEntry:
        """The profile of that name. Raises Missing."""
        for entry in await self.every():
            if entry.name == name:
                return entry
        raise Missing("There is no profile of that name.")

    async def in_force(self) -> str | None:
        """The file by which the running engine's heads have their budgets; None for none, or no engine."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                config = (await self._supervisor.client.memory())["config"]
        except (AppError, TangramError, TimeoutError, KeyError):
            return None
        found = None if config.get("scope") == "uniform" else config.get("profile")
        return None if found in (None, AUTO) else str(found)

    async def chosen(self) -> str:
        """What the next engine is started with: the name of a profile, `auto` or `none`."""
        return Path(await self._engine_settings.profile()).name

    async def before(self) -> str | None:
        """The name of the choice before; None if there was none."""
        before = await self._engine_settings.profile_before()
        return None if before is None else Path(before).name

    async def compare(self, first: str, second: str, retention: float, alpha: float) -> dict[str, Any]:
        """How two profiles' budgets differ; the second may be `none`, for equal ones. Raises Missing,
        BadRequest."""
        if not 0 < retention <= 1:
            raise BadRequest("retention must be above 0 and at most 1.", param="retention")
        if not 0 <= alpha <= 10:
            raise BadRequest("alpha must be from 0 to 10.", param="alpha")
        one = (await self.entry(first)).path
        other = None if second == NONE else (await self.entry(second)).path
        try:
            return await asyncio.to_thread(compare, one, other, retention, alpha)
        except ProfileError as error:
            raise BadRequest(f"{error}.") from error

    async def costs(
        self, name: str, config: Mapping[str, Any], lengths: Sequence[int], *, equal: bool = False
    ) -> dict[int, int]:
        """Bytes that conversations of these lengths would hold with a profile, at an engine's settings;
        `equal`: with equal budgets on its model. Empty where that cannot be said. Raises Missing."""
        entry = await self.entry(name)
        try:
            return await asyncio.to_thread(costs, entry.path, config, lengths, equal=equal)
        except TangramError as error:
            log.info("the cost of profile %s is not known: %s", name, error)
            return {}

    async def advice(self, name: str) -> dict[str, Any]:
        """Coverage and cost of safety margins by a profile's samples. Raises Missing, BadRequest."""
        entry = await self.entry(name)
        try:
            return await asyncio.to_thread(advice, entry.path)
        except ProfileError as error:
            raise BadRequest(f"{error}.") from error

    # ---- doing -------------------------------------------------------------------------------

    async def activate(self, user_id: str, choice: str) -> EngineChange:
        """Begin to restart the engine with a profile: a name, `auto` or `none`.

        It goes back by itself when the engine does not come up. Raises Missing, BadRequest for a profile of
        another model, AlreadyRunning while another change runs.
        """
        self._changes.refuse_while_running()
        if choice in (AUTO, NONE):
            return self._begin(user_id, choice, choice)
        entry = await self.entry(choice)
        self.check(entry)
        return self._begin(user_id, choice, str(entry.path))

    async def go_back(self, user_id: str) -> EngineChange:
        """Begin to restart the engine with the choice before. Raises BadRequest, AlreadyRunning."""
        self._changes.refuse_while_running()
        before = await self._engine_settings.profile_before()
        if before is None:
            raise BadRequest("No other profile was in use before.")
        if before not in (AUTO, NONE) and not await asyncio.to_thread(Path(before).is_file):
            raise BadRequest(
                f"The profile that was in use before, {Path(before).name}, is not there any more."
            )
        return self._begin(user_id, Path(before).name, before)

    async def discard(self, user_id: str, name: str) -> None:
        """Delete one's own profile. Raises Missing, BadRequest for one of the release or in use."""
        entry = await self.entry(name)
        if entry.shipped:
            raise BadRequest("Profiles of the release cannot be deleted.")
        if str(entry.path) in (await self.in_force(), await self._engine_settings.profile()):
            raise BadRequest("This profile is in use. Choose another one first.")
        await asyncio.to_thread(entry.path.unlink, missing_ok=True)
        await asyncio.to_thread(results_path(self.folder, name).unlink, missing_ok=True)
        await self._store.add_audit(user_id, "profile.discard", {"profile": name, **_kept(entry)}, None)

    # ---- parts -------------------------------------------------------------------------------

    def check(self, entry: ProfileEntry) -> None:
        """Raise BadRequest for a profile that cannot be used, or is of another model."""
        if entry.problem:
            raise BadRequest(f"{entry.problem}.")
        geometry = self._supervisor.geometry
        size = (entry.about["layers"], entry.about["kv_heads"])
        if geometry is not None and size != (geometry.layers, geometry.kv_heads):
            raise BadRequest(
                f"This profile is for another model: it has {size[0]} layers x {size[1]} KV heads, the "
                f"served one has {geometry.layers} x {geometry.kv_heads}."
            )

    def _begin(self, user_id: str, name: str, value: str) -> EngineChange:
        async def work() -> str:
            await self._engine_settings.use_profile(user_id, value)
            return f"The engine is ready with this profile.{probed_text(self._engine_settings.probed)}"

        return self._changes.start(PROFILE, name, work)

    def _list(self) -> list[ProfileEntry]:
        own = self._entries(self.folder, RECORD, shipped=False)
        own.sort(key=lambda entry: (entry.about.get("created", ""), entry.name), reverse=True)
        names = {entry.name for entry in own}
        theirs = self._entries(self._shipped, INDEX, shipped=True)
        return own + [entry for entry in theirs if entry.name not in names]

    def _entries(self, where: Path, other: str, *, shipped: bool) -> list[ProfileEntry]:
        if not where.is_dir():
            return []
        paths = [path for path in sorted(where.glob("*.json")) if path.name != other]
        return [self._read(path, shipped) for path in paths if _NAME.fullmatch(path.name)]

    def _read(self, path: Path, shipped: bool) -> ProfileEntry:
        """Files are read again only when they have changed: a list is asked for every few seconds."""
        changed = path.stat().st_mtime_ns
        known = self._known.get(path)
        if known is not None and known[0] == changed:
            return known[1]
        try:
            entry = ProfileEntry(path.name, path, shipped, describe(path))
        except ProfileError as error:
            problem = str(error).replace(str(path), path.name)
            entry = ProfileEntry(path.name, path, shipped, {}, problem)
        self._known[path] = (changed, entry)
        return entry


def results_path(folder: Path, name: str) -> Path:
    """Where what was found of a profile by trying it lies, one of the release too."""
    return folder / f"{name}{RESULTS}"


def _kept(entry: ProfileEntry) -> dict[str, Any]:
    """What the trail of changes remembers of a profile that is gone."""
    return {name: entry.about.get(name) for name in ("model", "created", "samples", "settings")}
