"""Trying a backup: restored to a place of its own and looked through, before anybody depends on it."""

import tempfile
from contextlib import closing
from pathlib import Path

from db.check import check
from db.connection import connect
from db.restore import restore

COUNTED = ("users", "conversations", "messages")


def rehearse(backup: Path) -> tuple[list[str], dict[str, int]]:
    """What is wrong with a backup, and how many rows it has by table; the database itself is not touched.

    Takes the backup's size in the system's folder for temporary files, for as long as it lasts.
    """
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="tangram-drill-") as folder:
        target = Path(folder) / "db" / "chat.sqlite3"
        try:
            restore(target, Path(folder) / "backups", backup)
            findings = check(target)
            with closing(connect(target, read_only=True)) as connection:
                for table in COUNTED:
                    query = f"SELECT count(*) FROM {table}"  # noqa: S608 - names of our own
                    counts[table] = connection.execute(query).fetchone()[0]
        except Exception as error:  # whatever it is, it is what the drill is there to find
            return [f"it cannot be restored: {error}"], counts
    return findings, counts
