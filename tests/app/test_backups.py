"""Backups from the console: made, listed, tried."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.audit import AuditLog
from app.backups import Backups
from app.errors import AlreadyRunning, Missing
from db.database import Database
from db.store import Store


@pytest.fixture
async def backups(tmp_path: Path) -> AsyncIterator[Backups]:
    database = Database(tmp_path / "chat.sqlite3", tmp_path / "backups")
    database.migrate()
    yield Backups(database, AuditLog(Store(database), days=1))
    await database.aclose()


@pytest.fixture
async def ann(backups: Backups) -> str:
    return (await Store(backups._database).create_user("ann", "hash", True)).id


async def test_a_backup_is_made_listed_and_found(backups: Backups, ann: str) -> None:
    assert await backups.every() == []
    first = await backups.make(ann)
    second = await backups.make(ann)
    assert {one.name for one in await backups.every()} == {first.name, second.name}
    assert (await backups.find(first.name)).size == first.path.stat().st_size > 0
    for name in ("nothing.sqlite3", "../chat.sqlite3"):
        with pytest.raises(Missing):
            await backups.find(name)
    trail = await Store(backups._database).list_audit()
    assert [entry.action for entry in trail].count("backup.make") == 2


async def test_a_rehearsal_restores_the_latest_and_leaves_nothing(backups: Backups, ann: str) -> None:
    with pytest.raises(Missing, match="no backup yet"):
        await backups.rehearse(ann)
    await backups.make(ann)
    drill = await backups.rehearse(ann)
    assert drill.findings == ()
    assert drill.counts == {"users": 1, "conversations": 0, "messages": 0}
    assert backups.drill is drill


async def test_a_damaged_backup_is_found_out(backups: Backups, ann: str) -> None:
    made = await backups.make(ann)
    content = bytearray(made.path.read_bytes())
    content[4096 : 4096 * 6] = b"\xa5" * (4096 * 5)
    made.path.write_bytes(content)
    drill = await backups.rehearse(ann)
    assert drill.findings
    assert "cannot be restored" in drill.findings[0] or "damaged" in drill.findings[0]


async def test_one_at_a_time(backups: Backups, ann: str) -> None:
    results = await asyncio.gather(backups.make(ann), backups.make(ann), return_exceptions=True)
    assert [type(result) for result in results].count(AlreadyRunning) == 1
    await backups.make(ann)
