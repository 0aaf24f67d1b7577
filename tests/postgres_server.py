"""A PostgreSQL server of the tests' own: in a temporary folder, on a Unix socket and a loopback port."""

from __future__ import annotations

import getpass
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from db.postgres.connection import connect
from db.postgres.migrator import migrate
from db.postgres.url import PostgresUrl
from tests.patience import PATIENCE

PASSWORD = "p@ss:w/rd%41"
"""With what must be quoted in a URL."""
TEMPLATE = "migrated"


def binaries() -> Path | None:
    """The folder of initdb and postgres, the newest version's; Debian keeps them out of the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    if (there := shutil.which("initdb")) is not None:
        found.insert(0, Path(there).resolve().parent)
    return next((path for path in reversed(found) if (path / "initdb").exists()), None)


class PostgresServer:
    """A running server. `folder` holds its data and its socket."""

    def __init__(self, programs: Path, folder: Path, *options: str) -> None:
        self._programs = programs
        self._options = options
        self._names = count(1)
        self._shared: PostgresUrl | None = None
        self._user = _unprivileged()
        self.folder = folder
        self.data = folder / "data"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        secret = folder / "password"
        secret.write_text(PASSWORD)
        if self._user:
            for path in (folder, secret):
                shutil.chown(path, self._user)
        self._run(
            "initdb", "--pgdata", self.data, "--username", "tangram", "--pwfile", secret, "--no-sync",
            "--auth-local=trust", "--auth-host=scram-sha-256", "--encoding=UTF8", "--locale=C.UTF-8",
        )  # fmt: skip
        self.start()

    def start(self) -> None:
        """Start it, or start it again after `kill`; returns when it answers."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self._programs / "postgres", "-D", self.data, "-k", self.folder, "-p", str(self.port),
                    "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off", "-c", "shared_buffers=16MB",
                    *(word for option in self._options for word in ("-c", option)),
                ],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, user=self._user, cwd="/",
                extra_groups=[] if self._user else None,
            )  # fmt: skip
        deadline = time.monotonic() + 4 * PATIENCE
        while True:
            try:
                connect(self.url("postgres")).close()
            except Exception:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.05)
            else:
                return

    def kill(self) -> None:
        """As a power cut would: no goodbye to anybody. Its children see that and end by themselves."""
        children = self._children()
        for pid in (self._process.pid, *children):
            os.kill(pid, signal.SIGKILL)
        self._process.wait()
        (self.data / "postmaster.pid").unlink()
        deadline = time.monotonic() + PATIENCE
        while any(Path(f"/proc/{pid}/cmdline").exists() for pid in children) and time.monotonic() < deadline:
            time.sleep(0.01)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(timeout=60)

    def url(self, database: str) -> PostgresUrl:
        """By the socket, where no password is asked for."""
        return PostgresUrl(str(self.folder), self.port, "tangram", PASSWORD, database)

    def text(self, database: str, *, password: str = PASSWORD) -> str:
        """By the network, as a setting."""
        return f"postgresql+pg8000://tangram:{quote(password, safe='')}@127.0.0.1:{self.port}/{database}"

    def database(self, template: str = TEMPLATE) -> PostgresUrl:
        """A new database, with the schema unless another template is named. Takes a third of a second."""
        name = f"test_{next(self._names)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return self.url(name)

    def emptied(self) -> PostgresUrl:
        """The database that tests share one after the other, with the schema and without rows."""
        if self._shared is None:
            self._shared = self.database()
        self.execute(
            *(f"DELETE FROM {name}" for name in ("users", "settings", "audit", "links")),
            database=self._shared.database,
        )
        return self._shared

    def execute(self, *statements: str, database: str = "postgres") -> list[Any]:
        """Run statements outside transactions; the rows of the last one."""
        connection = connect(self.url(database))
        try:
            connection.autocommit = True
            cursor = connection.cursor()
            for statement in statements:
                cursor.execute(statement)
            return list(cursor.fetchall()) if cursor.description else []
        finally:
            connection.close()

    def _children(self) -> list[int]:
        listed = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        return [int(pid) for pid in listed.split()]

    def _run(self, name: str, *arguments: object) -> None:
        command = [str(self._programs / name), *map(str, arguments)]
        groups: list[int] | None = [] if self._user else None
        done = subprocess.run(
            command, capture_output=True, text=True, user=self._user, extra_groups=groups, cwd="/"
        )
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr}")


def _unprivileged() -> str | None:
    """Whom to run it as: PostgreSQL refuses to be run by root."""
    if os.getuid():
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody" if "nobody" in names else getpass.getuser()


def serve(*options: str) -> Iterator[PostgresServer]:
    """A server for as long as the iterator is held; skips the test where there is none to start."""
    programs = binaries()
    if programs is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    with tempfile.TemporaryDirectory(prefix="tangram-pg-") as folder:
        server = PostgresServer(programs, Path(folder), *options)
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One for all tests that do not stop it, with a template that has the schema."""
    for server in serve():
        server.execute(f"CREATE DATABASE {TEMPLATE}")
        migrate(server.url(TEMPLATE), lambda: Path("there is nothing to back up"))
        yield server
