"""Backups of the database, as the console shows and makes them."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from pathlib import Path

from app.audit import AuditLog
from app.errors import AlreadyRunning, Missing
from db.database import Database
from db.drill import rehearse
from db.maintenance import back_up_now

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.sqlite3")


@dataclass(frozen=True)
class Backup:
    """made: unix seconds. size: bytes."""

    name: str
    path: Path
    made: float
    size: int


@dataclass(frozen=True)
class Drill:
    """A backup restored to a place of its own and looked through. findings: what is wrong with it.

    counts: rows by table. at: unix seconds. seconds: how long it took.
    """

    backup: str
    findings: tuple[str, ...]
    counts: dict[str, int]
    at: float
    seconds: float


class Backups:
    """One per process."""

    def __init__(self, database: Database, audit: AuditLog) -> None:
        self._database = database
        self._audit = audit
        self._busy = False
        self.drill: Drill | None = None

    async def every(self) -> list[Backup]:
        """Those in the backups' folder, latest first."""
        return await asyncio.to_thread(self._list)

    async def find(self, name: str) -> Backup:
        """The one of that name. Raises Missing."""
        for backup in await self.every():
            if backup.name == name:
                return backup
        raise Missing("There is no backup of that name.")

    async def make(self, user_id: str) -> Backup:
        """Copy the database, checked. Raises StorageUnavailable (db), AlreadyRunning."""
        with _Once(self):
            path = await back_up_now(self._database)
        await self._audit.record(user_id, "backup.make", None, {"backup": path.name})
        return await self.find(path.name)

    async def rehearse(self, user_id: str) -> Drill:
        """Restore the latest backup to a temporary folder and check it; the database is not touched.

        Raises Missing without a backup, AlreadyRunning.
        """
        backups = await self.every()
        if not backups:
            raise Missing("There is no backup yet. Make one first.")
        with _Once(self):
            self.drill = await asyncio.to_thread(_rehearse, backups[0])
        result = {"backup": self.drill.backup, "findings": list(self.drill.findings)}
        await self._audit.record(user_id, "backup.drill", None, result)
        return self.drill

    def _list(self) -> list[Backup]:
        folder = self._database.backup_dir
        if not folder.is_dir():
            return []
        found = []
        for path in folder.iterdir():
            if _NAME.fullmatch(path.name) and path.is_file():
                about = path.stat()
                found.append(Backup(path.name, path, about.st_mtime, about.st_size))
        return sorted(found, key=lambda backup: (backup.made, backup.name), reverse=True)

    def claim(self) -> None:
        if self._busy:
            raise AlreadyRunning("A backup is being made or tried. Wait until it is done.")
        self._busy = True

    def release(self) -> None:
        self._busy = False


class _Once:
    """One at a time: two copies at once would only take twice the space."""

    def __init__(self, backups: Backups) -> None:
        self._backups = backups

    def __enter__(self) -> None:
        self._backups.claim()

    def __exit__(self, *_: object) -> None:
        self._backups.release()


def _rehearse(backup: Backup) -> Drill:
    began = time.monotonic()
    findings, counts = rehearse(backup.path)
    return Drill(backup.name, tuple(findings), counts, time.time(), time.monotonic() - began)
