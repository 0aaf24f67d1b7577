"""`python -m db`: a copy of a live database, put back later; what cannot be put back changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from db import Database, Store
from db.__main__ import main


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


async def names(home: Path, *add: str) -> int:
    """How many users there are, after one of each name was added."""
    database = Database(home / "db" / "chat.sqlite3", home / "backups")
    database.migrate()
    store = Store(database)
    for name in add:
        await store.create_first_user(name, "hash")
    count = await store.count_users()
    await database.aclose()
    return count


async def test_backup_and_restore(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await names(home) == 0
    assert main(["backup"]) == 0
    empty = Path(capsys.readouterr().out.strip())
    assert empty.parent == home / "backups"
    assert await names(home, "ann") == 1
    assert main(["backup", str(home / "elsewhere")]) == 0
    full = Path(capsys.readouterr().out.strip())
    assert main(["restore", str(empty)]) == 0
    assert await names(home) == 0
    kept = Path(capsys.readouterr().out.split(" as ")[1].strip())
    assert main(["restore", str(full)]) == 0
    assert await names(home) == 1
    assert main(["restore", str(kept)]) == 0
    assert await names(home) == 1


async def test_moving_to_a_new_host(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await names(home, "ann")
    assert main(["backup", str(tmp_path / "usb")]) == 0
    (copy,) = (tmp_path / "usb").iterdir()
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path / "new"))
    assert main(["restore", str(copy)]) == 0
    assert await names(tmp_path / "new") == 1


async def test_a_running_product_keeps_its_database(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await names(home, "ann")
    database = Database(home / "db" / "chat.sqlite3", home / "backups")
    database.migrate()
    store = Store(database)
    await store.set_setting("a", 1)  # the writer has its lock now
    assert main(["backup"]) == 0
    copy = capsys.readouterr().out.strip()
    assert main(["restore", copy]) == 1
    assert "stop it first" in capsys.readouterr().err
    await database.aclose()


async def test_what_is_no_backup_changes_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backup"]) == 1
    assert "TANGRAM_HOME" in capsys.readouterr().err
    await names(home, "ann")
    other = home / "other"
    for content in (b"", b"no database at all" * 100):
        other.write_bytes(content)
        assert main(["restore", str(other)]) == 1
    assert main(["restore", str(home / "missing")]) == 1
    assert await names(home) == 1
