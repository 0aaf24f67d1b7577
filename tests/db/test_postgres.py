"""What only PostgreSQL has: its migrations, refusals in a sentence, copies to and from SQLite, search without
the extension."""

import asyncio
import re
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pg8000.dbapi
import pytest
from sqlalchemy import text

from db import Database, Store
from db.check import check
from db.drill import rehearse
from db.errors import Conflict, DatabaseInUse, MigrationError, NewerSchema, NotADatabase, StorageUnavailable
from db.migrations import MIGRATIONS, Migration
from db.migrations.base import statements
from db.moved import refuse_moved
from db.postgres import connection as pg_connection
from db.postgres.dialect import PostgresDialect
from db.postgres.lock import lock
from db.postgres.migrator import migrate
from db.postgres.moving import move_in
from db.postgres.probe import LOST_SECONDS, why_unusable
from db.postgres.url import PostgresUrl, parse_url
from db.restore import restore
from db.transfer import NewConversation
from db.views import UserView
from tests.db.helpers import check_integrity, dump, exchange, only_postgres, rows, twin
from tests.db.test_transfer import TALK
from tests.postgres_server import PASSWORD, PostgresServer, serve

NEXT = len(MIGRATIONS) + 1
COUNT = "SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace"
INDEXES = "SELECT count(*) FROM pg_indexes WHERE indexname LIKE '%_trigrams'"


def no_backup() -> Path:
    raise AssertionError("nothing was there to back up")


def upgrade(database: Database, *steps: Migration) -> Path | None:
    assert isinstance(database.dialect, PostgresDialect)
    url = database.dialect.url
    return migrate(
        url, lambda: database.dialect.back_up(database.backup_dir, "before"), (*MIGRATIONS, *steps)
    )


def step(number: int, *sql: str) -> Migration:
    return Migration(number, "a step", statements(), sql)


@pytest.fixture
def empty(postgres_server: PostgresServer) -> PostgresUrl:
    """A database without anything in it."""
    return postgres_server.database("template1")


@pytest.fixture
async def own(postgres_server: PostgresServer, tmp_path: Path) -> AsyncIterator[Database]:
    """A database that a test may change the schema of, with a user in it."""
    database = Database(tmp_path / "db" / "chat.sqlite3", tmp_path / "backups", postgres_server.database())
    database.migrate()
    await Store(database).create_user("Ada", "hash", is_admin=True)
    yield database
    await database.aclose()


# ---- migrations ------------------------------------------------------------------------------


def test_the_first_start_makes_the_schema(empty: PostgresUrl, postgres_server: PostgresServer) -> None:
    assert migrate(empty, no_backup) is None
    assert migrate(empty, no_backup) is None
    assert postgres_server.execute("SELECT version FROM tangram", database=empty.database) == [
        [len(MIGRATIONS)]
    ]
    assert postgres_server.execute(INDEXES, database=empty.database) == [[2]]


async def test_concurrent_starts(empty: PostgresUrl, tmp_path: Path) -> None:
    databases = [Database(tmp_path / "chat.sqlite3", url=empty) for _ in range(4)]
    outcomes = await asyncio.gather(*(asyncio.to_thread(database.migrate) for database in databases))
    assert outcomes == [None] * 4
    check_integrity(databases[0])
    for database in databases:
        await database.aclose()


async def test_an_upgrade_is_backed_up_and_a_failed_one_undone(own: Database) -> None:
    before = dump(own)
    await own.aclose()
    good, bad = step(NEXT, "CREATE TABLE shelf (id TEXT)"), step(NEXT + 1, "SELECT * FROM missing")
    with pytest.raises(MigrationError, match=rf"step {NEXT + 1} .* was undone: relation .missing.") as caught:
        upgrade(own, good, bad)
    assert caught.value.backup is not None
    assert rows(Database(caught.value.backup)) == rows(own)
    assert dump(own) == before
    with pytest.raises(MigrationError, match="ended its transaction"):
        upgrade(own, step(NEXT, "CREATE TABLE left_behind (id TEXT)", "COMMIT"))
    with pytest.raises(MigrationError, match="is not there for PostgreSQL"):
        upgrade(own, Migration(NEXT, "sqlite only", statements()))
    assert upgrade(own, good) is not None
    with pytest.raises(NewerSchema, match=f"has schema version {NEXT}, .* knows {len(MIGRATIONS)}"):
        twin(own).migrate()


def test_a_database_of_another_program_is_left_alone(
    empty: PostgresUrl, postgres_server: PostgresServer
) -> None:
    postgres_server.execute("CREATE TABLE users (id TEXT)", database=empty.database)
    before = postgres_server.execute(COUNT, database=empty.database)
    with pytest.raises(NotADatabase, match=r"tables of another program \(such as users\)"):
        migrate(empty, no_backup)
    assert postgres_server.execute(COUNT, database=empty.database) == before


# ---- refusals --------------------------------------------------------------------------------


def test_what_cannot_work_is_said_in_a_sentence(
    empty: PostgresUrl, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = postgres_server
    good = parse_url(server.text(empty.database))
    assert why_unusable(good) == ""
    cases = {
        "does not let the user tangram in: check user and password": replace(good, password="wrong-word"),
        "there is no such database": replace(good, database="nowhere"),
        r"cannot be reached \(Connection refused\)": replace(good, port=1),
        r"cannot be reached \(No such file or directory\)": replace(good, host="/nowhere"),
        r"no trusted connection|cannot be reached \(Server refuses SSL\)": replace(good, sslmode="require"),
    }
    server.execute("CREATE ROLE guest LOGIN", f"CREATE DATABASE latin_{empty.database} TEMPLATE template0 "
                   "ENCODING 'SQL_ASCII' LOCALE 'C'")  # fmt: skip
    cases["guest may not create tables in the schema public"] = replace(
        server.url(empty.database), user="guest"
    )
    cases["has the encoding SQL_ASCII"] = server.url(f"latin_{empty.database}")
    for words, url in cases.items():
        said = why_unusable(url)
        assert re.search(words, said), said
        assert "wrong-word" not in said
        assert PASSWORD not in said
        with pytest.raises((StorageUnavailable, MigrationError)) as caught:
            migrate(url, no_backup)
        assert str(caught.value) == said
    monkeypatch.setattr("db.postgres.migrator.LEAST_VERSION", 99)
    assert "is too old: 99 or newer is needed" in why_unusable(good)


def test_a_missing_driver_is_said(empty: PostgresUrl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pg8000.dbapi", None)
    assert "pip install 'tangram-chat[postgres]'" in why_unusable(empty)
    with pytest.raises(MigrationError, match="its driver pg8000 is not installed"):
        Database(Path("chat.sqlite3"), url=empty)


@only_postgres
async def test_a_database_in_use_is_said(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(database.dialect, PostgresDialect)
    monkeypatch.setattr("db.dialect.LOCK_SECONDS", 0.1)
    assert why_unusable(database.dialect.url) == ""
    await Store(database).create_user("Ada", "hash", is_admin=True)
    assert "another process writes to this database" in why_unusable(database.dialect.url)


def test_a_lock_that_a_lost_host_may_hold_is_waited_for(
    empty: PostgresUrl, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("db.dialect.LOCK_SECONDS", 0.1)
    with (postgres_server.data / "pg_hba.conf").open("a") as rules:
        rules.write("\nhost all all 127.0.0.0/8 scram-sha-256\n")
    postgres_server.execute("SELECT pg_reload_conf()")
    url = parse_url(postgres_server.text(empty.database))
    names = {"user": url.user, "password": url.password, "port": url.port, "database": url.database}
    for source, words in (("127.0.0.1", "another process writes"), ("127.0.0.2", "")):
        holder = pg8000.dbapi.connect(host="127.0.0.1", source_address=(source, 0), **names)
        lock(holder, 1, url)
        # A near one lets it go only when whoever waited for it as for a far one would just get it.
        ending = threading.Timer(LOST_SECONDS - 5 if words else 1.5, holder.close)
        ending.start()
        said = why_unusable(url)
        if words:
            ending.cancel()
            holder.close()
        ending.join()
        assert said.startswith(words), (source, said)
        assert words or not said, (source, said)


# ---- copies ----------------------------------------------------------------------------------


async def fill(database: Database) -> UserView:
    """Rows in every table, with every odd text and value that the stores let in."""
    store = Store(database)
    ada = await store.create_user("Ada", "hash", is_admin=True)
    eve = await store.create_user("Éve 灯塔", "hash")
    for number in range(3):
        made = await store.create_conversation(ada.id, f"talk {number}", settings={"t": 0.1, "x": None})
        _, reply = await exchange(store, ada.id, made.id, None, "a\0b \ud800 👩‍🚀 ' \" \\ \r\n", "灯塔 " * 50)
        await store.rate_reply(ada.id, reply.id, -1)
        await store.add_turn(ada.id, made.id, reply.id, "and then?", range(700), "m\0odel")
    await store.import_conversations(eve.id, [NewConversation("taken in", TALK)])
    await store.set_setting("odd", {"nul": "\0", "float": 1e-7, "list": [None, True, 2**53]})
    await store.set_setting("nothing", None)
    await store.create_session(ada.id, "token", 2**52, user_agent="x")
    await store.create_api_key(eve.id, "key", "hash")
    await store.create_invitation("invite", 2**52, is_admin=False, note="", created_by=ada.id)
    await store.set_calibration_consent(eve.id, True)
    await store.add_audit(ada.id, "did", {"a": 1}, None, address="::1")
    await database.write(lambda session: session.execute(
        text("INSERT INTO quotas (user_id, running, updated_at) VALUES (:id, 3, 0)"), {"id": ada.id}
    ) and None)  # fmt: skip
    return ada


@pytest.fixture
async def sqlite(tmp_path: Path) -> Database:
    """A closed SQLite database with rows in every table."""
    database = Database(tmp_path / "old" / "chat.sqlite3", tmp_path / "backups")
    database.migrate()
    await fill(database)
    await database.aclose()
    return database


async def test_a_database_moves_over_whole(
    sqlite: Database, empty: PostgresUrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("db.postgres.copy._BATCH_ROWS", 4)
    counts = move_in(sqlite.path, empty, tmp_path / "backups")
    assert counts == {table: len(found) for table, found in rows(sqlite).items()}
    assert all(counts.values()), counts
    database = Database(tmp_path / "new" / "chat.sqlite3", tmp_path / "backups", empty)
    assert database.migrate() is None
    assert rows(database) == rows(sqlite)
    check_integrity(database)
    store = Store(database)
    ada = await store.user_by_name("ADA")
    assert ada is not None
    (latest, *_), found = (
        await store.list_conversations(ada.id),
        await store.list_conversations(ada.id, "灯塔"),
    )
    assert len(found) == 3
    path = await store.path(ada.id, latest.id)
    await store.finish_reply(ada.id, path[-1].id, "complete", "goes on", [1])
    await store.add_turn(ada.id, latest.id, path[-1].id, "here too", [1], None)
    await database.aclose()
    with pytest.raises(Conflict, match="is not empty: there are rows in users"):
        move_in(sqlite.path, empty, tmp_path / "backups")


async def test_a_move_that_fails_leaves_nothing(
    sqlite: Database, empty: PostgresUrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("db.postgres.backup.make_search_index", lambda connection: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            move_in(sqlite.path, empty, tmp_path / "backups")
    refuse_moved(sqlite.path)  # it was not
    database = Database(tmp_path / "new" / "chat.sqlite3", tmp_path / "backups", empty)
    database.migrate()
    assert not any(dump(database).values())
    assert await database.read(lambda session: session.scalar(text(INDEXES))) == 2
    # While the app is running on either side, nothing is moved.
    await Store(database).set_setting("running", 1)
    monkeypatch.setattr("db.dialect.LOCK_SECONDS", 0.1)
    with pytest.raises(DatabaseInUse):
        move_in(sqlite.path, empty, tmp_path / "backups")
    await database.aclose()
    again = Database(sqlite.path, sqlite.backup_dir)
    again.migrate()
    await Store(again).set_setting("running", 1)
    monkeypatch.setattr("db.postgres.moving._LOCK_SECONDS", 0.1)
    with pytest.raises(DatabaseInUse):
        move_in(sqlite.path, empty, tmp_path / "backups")
    await again.aclose()


@only_postgres
async def test_a_backup_is_a_file_that_leads_anywhere(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(database)
    then = rows(database)
    backup = database.dialect.back_up(database.backup_dir, "manual")
    assert list(database.backup_dir.iterdir()) == [backup]
    assert backup.stat().st_mode & 0o777 == 0o600
    assert check(backup) == []
    assert rows(Database(backup)) == then
    findings, counts = rehearse(backup)
    assert (findings, counts["conversations"]) == ([], 4)
    restore(tmp_path / "back" / "chat.sqlite3", tmp_path / "backups", backup)
    assert rows(Database(tmp_path / "back" / "chat.sqlite3")) == then

    # In its own place, while nobody uses it, with what is there now kept.
    await Store(database).create_user("later", "hash")
    later = rows(database)
    with monkeypatch.context() as soon:
        soon.setattr("db.dialect.LOCK_SECONDS", 0.1)
        with pytest.raises(DatabaseInUse):
            database.dialect.restore(backup)
    await database.aclose()
    kept = database.dialect.restore(backup)
    assert rows(database) == then
    assert kept is not None
    assert rows(Database(kept)) == later
    backup.write_bytes(b"damaged" * 1000)
    with pytest.raises(NotADatabase):
        database.dialect.restore(backup)
    assert rows(database) == then


# ---- search, order and maintenance -----------------------------------------------------------


async def test_search_needs_no_extension(
    empty: PostgresUrl, postgres_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr("db.postgres.migrator.EXTENSION", "CREATE EXTENSION not_to_be_had")
    database = Database(tmp_path / "chat.sqlite3", url=empty)
    database.migrate()
    assert "there is no index" in caplog.text
    store = Store(database)
    ada = await store.create_user("Ada", "hash", is_admin=True)
    made = await store.create_conversation(ada.id, "Title")
    await exchange(store, ada.id, made.id, None, "100% of MÜNCHEN", "灯塔")
    for query in ("münch", "0% o", "灯塔", "itl"):
        assert len(await store.list_conversations(ada.id, query)) == 1, query
    assert await store.list_conversations(ada.id, "0_ o") == []
    monkeypatch.undo()
    assert postgres_server.execute(INDEXES, database=empty.database) == [[0]]
    await database.vacuum()
    assert postgres_server.execute(INDEXES, database=empty.database) == [[2]]
    await database.aclose()


@only_postgres
async def test_the_index_answers(database: Database, store: Store, owner: UserView) -> None:
    def plan(session: Any) -> str:
        cursor = session.connection().connection.cursor()
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute(
            "EXPLAIN SELECT seq FROM messages WHERE content ILIKE %s "
            "AND status NOT IN ('pending', 'streaming')",
            ["%lighthouse%"],
        )
        return "\n".join(row[0] for row in cursor.fetchall())

    assert "messages_trigrams" in await database.read(plan)


@only_postgres
async def test_damage_that_a_client_can_see_is_found(
    database: Database, store: Store, owner: UserView
) -> None:
    assert database.dialect.check() == []
    made = await store.create_conversation(owner.id, "Title")
    await exchange(store, owner.id, made.id, None, "q", "a")
    await database.write(lambda session: session.execute(text("UPDATE users SET is_admin = false")) and None)
    await database.write(
        lambda session: session.execute(text("UPDATE conversations SET active_leaf_id = NULL")) and None
    )
    found = database.dialect.check()
    assert found == [
        f"a conversation with messages of which none is shown: {made.id}",
        "an installation without an enabled administrator: 1",
    ]


@only_postgres
async def test_size_and_version(database: Database) -> None:
    assert database.dialect.size() > 1_000_000
    assert re.match(r"\d+\.\d+", database.dialect.version())
    result = await database.vacuum()
    assert result.after > 1_000_000


@only_postgres
async def test_ids_that_cannot_be_stored_are_not_found(store: Store, owner: UserView) -> None:
    for odd in ("a\0b", "\ud800"):
        assert await store.user_by_id(odd) is None


# ---- encryption ------------------------------------------------------------------------------


def test_encryption_is_asked_for_and_the_server_looked_at(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the server's certificate")
    for server in serve():
        certificate, key = server.data / "server.crt", server.data / "server.key"
        command = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "1",
            "-subj",
            "/CN=localhost",
        ]
        command += ["-addext", "subjectAltName=DNS:localhost", "-out", str(certificate), "-keyout", str(key)]
        subprocess.run(command, check=True, capture_output=True)
        for path in (certificate, key):
            shutil.chown(path, server.data.owner())
        key.chmod(0o600)
        server.execute("ALTER SYSTEM SET ssl = on", "SELECT pg_reload_conf()")
        shutil.copy(certificate, tmp_path / "ca.pem")

        def encrypted(options: str, host: str = "localhost") -> bool:
            text = server.text("postgres").replace("127.0.0.1", host)  # noqa: B023 - used in this round only
            with closing(pg_connection.connect(parse_url(f"{text}?{options}"))) as connection:
                cursor = connection.cursor()
                cursor.execute("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()")
                return bool(cursor.fetchone()[0])

        trusted = f"sslrootcert={tmp_path}/ca.pem"
        assert encrypted("sslmode=prefer")
        assert encrypted("sslmode=require")
        assert not encrypted("sslmode=disable")
        assert encrypted(f"sslmode=verify-full&{trusted}")
        assert encrypted(f"sslmode=verify-ca&{trusted}", "127.0.0.1")
        for options, host in (
            (f"sslmode=verify-full&{trusted}", "127.0.0.1"),
            ("sslmode=verify-ca", "localhost"),
        ):
            with pytest.raises(StorageUnavailable, match="no trusted connection"):
                encrypted(options, host)
