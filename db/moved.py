"""A note beside an SQLite file that was moved to PostgreSQL: nothing written since is in the file."""

from pathlib import Path

from db.errors import StorageUnavailable

_SUFFIX = ".moved"


def note_beside(path: Path) -> Path:
    """Where the note of the database at `path` lies, if it has one."""
    return path.with_name(path.name + _SUFFIX)


def leave_note(path: Path, where: object) -> None:
    """Note that the database at `path` was moved to `where`. Raises StorageUnavailable."""
    try:
        note_beside(path).write_text(f"moved to PostgreSQL: {where}\n", encoding="utf-8")
    except OSError as error:
        raise StorageUnavailable(f"cannot write beside {path}: {error}") from error


def refuse_moved(path: Path) -> None:
    """Raise StorageUnavailable where a note says that the file is not the database any more."""
    note = note_beside(path)
    if note.exists():
        raise StorageUnavailable(
            f"the database was moved to PostgreSQL: set TANGRAM_DATABASE_URL. {path} has nothing of what was "
            f"written since; to use it all the same, delete {note.name} beside it"
        )
