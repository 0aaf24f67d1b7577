"""`python -m db`: backups of the histories, and back again.

    python -m db backup [DIRECTORY]     a checked copy, while the product runs or not
    python -m db restore FILE           put a copy in place, while it does not run

The database is the one in TANGRAM_HOME. What restore replaces is kept beside the backups.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from db.backup import back_up
from db.connection import connect
from db.errors import DbError, StorageUnavailable
from db.filelock import FileLock

DEFAULT_HOME = "~/.local/share/tangram-chat"


def restore(copy: Path, database: Path, backups: Path) -> Path | None:
    """Put a backup in the database's place. Returns where what was there is kept, None if nothing was.

    Raises DatabaseInUse while the product runs, StorageUnavailable for a copy that is damaged.
    """
    try:
        with closing(connect(copy, read_only=True)) as found:
            tables = {row[0] for row in found.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            verdict = found.execute("PRAGMA quick_check(1)").fetchone()[0]
    except (OSError, sqlite3.Error) as error:
        raise StorageUnavailable(f"{copy} cannot be read as a backup: {error}") from error
    if verdict != "ok" or "messages" not in tables:
        raise StorageUnavailable(f"{copy} is no backup of Tangram Chat, or is damaged: {verdict}")
    database.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = FileLock(database.with_name(database.name + ".lock"))
    lock.acquire(0.0)
    try:
        kept = back_up(database, backups, "replaced") if database.exists() else None
        part = database.with_suffix(".part")
        shutil.copyfile(copy, part)
        part.chmod(0o600)
        # Without these first: a WAL of the old database would be read into the new one.
        for ending in ("-wal", "-shm"):
            database.with_name(database.name + ending).unlink(missing_ok=True)
        part.replace(database)
    finally:
        lock.release()
    return kept


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 1 where it could not be done."""
    parser = argparse.ArgumentParser(prog="python -m db", description="Backups of the histories.")
    commands = parser.add_subparsers(dest="command", required=True)
    backup = commands.add_parser("backup", help="make a checked copy, while the product runs or not")
    backup.add_argument("directory", nargs="?", type=Path, help="where; default: backups in TANGRAM_HOME")
    back = commands.add_parser("restore", help="put a copy in place, while the product does not run")
    back.add_argument("file", type=Path)
    chosen = parser.parse_args(arguments)
    home = Path(os.environ.get("TANGRAM_HOME") or DEFAULT_HOME).expanduser()
    database, backups = home / "db" / "chat.sqlite3", home / "backups"
    try:
        if chosen.command == "backup":
            if not database.exists():
                raise StorageUnavailable(f"there is no database at {database}: does TANGRAM_HOME name it?")
            print(back_up(database, chosen.directory or backups, "manual"))
        elif kept := restore(chosen.file, database, backups):
            print(f"restored; what was there is kept as {kept}")
        else:
            print("restored")
    except (DbError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
