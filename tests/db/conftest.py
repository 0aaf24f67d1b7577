import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from db import Database, Store
from db.views import UserView
from tests.postgres_server import PostgresServer

ROOT = Path(__file__).resolve().parents[2]
StartPython = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_python() -> Iterator[StartPython]:
    """Starts a Python process that runs a script with this repository on its path, with pipes to it."""
    with ExitStack() as stack:

        def start(script: str, *arguments: object) -> "subprocess.Popen[str]":
            process = subprocess.Popen(
                [sys.executable, "-W", "error", "-c", script, *map(str, arguments)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture(params=["sqlite", "postgres"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    """Both kinds, each with the schema and without rows; see `only_sqlite` and `only_postgres` in helpers."""
    url = None
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres_server")
        url = server.emptied()
    database = Database(tmp_path / "db" / "chat.sqlite3", tmp_path / "backups", url)
    database.migrate()
    yield database
    await database.aclose()


@pytest.fixture
def store(database: Database) -> Store:
    return Store(database)


@pytest.fixture
async def owner(store: Store) -> UserView:
    return await store.create_user("Ada", "hash of a password", is_admin=True)


@pytest.fixture
async def stranger(store: Store) -> UserView:
    return await store.create_user("Eve", "hash of another password")
