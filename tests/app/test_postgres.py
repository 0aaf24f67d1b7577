"""The app on PostgreSQL: a whole process with the imitated engine, and a server that dies in mid-reply."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import cli
from app.__main__ import main
from app.factory import build_services
from app.settings import Settings
from db.errors import StorageUnavailable
from db.postgres.migrator import migrate
from tests.app.conftest import eventually, running_product
from tests.app.test_process import ready, signed_in, start
from tests.fake_engine import FakeEngine
from tests.patience import PATIENCE
from tests.postgres_server import PASSWORD, TEMPLATE, PostgresServer, serve


@pytest.fixture(scope="module")
def mortal() -> Iterator[PostgresServer]:
    """A server that a test kills."""
    for server in serve():
        server.execute(f"CREATE DATABASE {TEMPLATE}")
        migrate(server.url(TEMPLATE), lambda: Path("there is nothing to back up"))
        yield server


def processes(home: Path) -> dict[str, tuple[str, str]]:
    """Command line and environment of every process that has this home, by its id."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (folder / "environ").read_bytes().decode(errors="replace")
            if f"TANGRAM_HOME={home}\0" in environment:
                found[folder.name] = ((folder / "cmdline").read_bytes().decode(), environment)
    return found


async def test_a_whole_life(
    tmp_path: Path,
    bundled_model_dir: Path,
    postgres_server: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Sign up, chat, search, a second app, commands, a restart."""
    database = postgres_server.database("template1").database
    url = postgres_server.text(database)
    home, said = tmp_path / "home", ""
    monkeypatch.setenv("TANGRAM_HOME", str(home))
    monkeypatch.setenv("TANGRAM_DATABASE_URL", url)
    async with start(home, bundled_model_dir, TANGRAM_DATABASE_URL=url) as first:
        await ready(first)
        async with signed_in(first) as http:
            made = (await http.post("/api/conversations", json={"title": "On lighthouses"})).json()["id"]
            path = f"/api/conversations/{made}/messages"
            reply = (await http.post(path, json={"content": "/say 灯塔 it is", "stream": False})).json()[
                "reply"
            ]
            assert (reply["status"], reply["content"]) == ("complete", "灯塔 it is")
            for query in ("灯塔", "LIGHTHOUSE", "it is"):
                found = (await http.get("/api/conversations", params={"query": query})).json()
                assert [one["id"] for one in found["conversations"]] == [made], query
            odd = await http.get("/api/conversations/a%00b")
            assert odd.status_code == 404

        running = {pid: told for pid, told in processes(home).items() if int(pid) != os.getpid()}
        assert len(running) >= 3, "the app, the engine's guardian, the engine"
        assert not any(PASSWORD in command or url in command for command, _ in running.values())
        assert [name for name, (_, has) in running.items() if url in has] == [str(first.process.pid)]

        async with start(tmp_path / "other", bundled_model_dir, TANGRAM_DATABASE_URL=url) as second:
            async with asyncio.timeout(4 * PATIENCE):
                assert await second.process.wait() == 18
        assert any("another process writes to this database" in line for line in second.lines), second.lines
        said += "\n".join(second.lines)

        listed = await command(capsys, "user", "list")
        assert listed.startswith("admin     ann")
        backup = (await command(capsys, "backup")).strip()
        assert f"{backup} is in order" in await command(capsys, "check", backup)
        assert "is in order" in await command(capsys, "check")
        said += "\n".join(first.lines) + listed
    assert not (home / "db" / "chat.sqlite3").exists()

    async with start(home, bundled_model_dir, TANGRAM_DATABASE_URL=url) as again:
        await ready(again)
        assert not any("/setup" in line for line in again.lines)
        async with signed_in(again) as http:
            kept = (await http.get(path)).json()["messages"]
            assert [message["content"] for message in kept] == ["/say 灯塔 it is", "灯塔 it is"]
        said += "\n".join(again.lines)
    assert PASSWORD not in said
    assert url not in said


async def command(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command prints; it runs here, beside the app."""
    capsys.readouterr()
    code = await asyncio.to_thread(lambda: cli.run(Settings(), cli.parse(words)))
    said = capsys.readouterr()
    assert code == 0, said.err
    return said.out


async def test_a_server_that_is_away_is_said_before_anything_starts(
    tmp_path: Path, bundled_model_dir: Path
) -> None:
    url = "postgresql://ann:hunter2-hunter2@127.0.0.1:1/chat"
    async with start(tmp_path / "home", bundled_model_dir, TANGRAM_DATABASE_URL=url) as running:
        async with asyncio.timeout(4 * PATIENCE):
            assert await running.process.wait() == 18
    text = "\n".join(running.lines)
    assert "cannot be reached (Connection refused)" in text
    assert "hunter2" not in text
    assert "engine" not in text


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (
            "postgresql+psycopg://ann:hunter2-hunter2@h/chat",
            "names the driver psycopg, and pg8000 is supported",
        ),
        ("hunter2-hunter2", "cannot be read: it has the form postgresql+pg8000://"),
    ],
)
def test_a_wrong_url_is_a_wrong_setting(
    url: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANGRAM_DATABASE_URL", url)
    assert main([]) == 2
    said = capsys.readouterr().out
    assert said.startswith(f"setting database_url: Value error, {words}")
    assert "hunter2" not in said


async def test_replies_outlive_the_server(
    settings: Settings, mortal: PostgresServer, fake_engine: FakeEngine
) -> None:
    settings = settings.model_copy(update={"database_url": mortal.text(mortal.emptied().database)})
    async with running_product(settings) as product:
        conversation = await product.conversation()
        generation = product.services.generation
        fake_engine.up_to = 10
        before = await generation.send(product.owner, conversation, "/tokens 60")
        await product.wait_for_text(before.reply.id)
        other = await product.conversation()
        shorter = await generation.send(product.owner, other, "/tokens 20")
        await product.wait_for_text(shorter.reply.id)
        await asyncio.to_thread(mortal.kill)
        fake_engine.up_to = 40  # the shorter one ends while there is no server
        await eventually(lambda: len(fake_engine.running) == 1)
        await asyncio.sleep(1)
        assert (await product.http.get("/health/ready")).status_code == 503
        assert (await product.http.get("/api/conversations")).status_code == 503
        await asyncio.to_thread(mortal.start)
        fake_engine.up_to = math.inf
        await eventually(lambda: generation.running(product.owner, conversation) is None)
        for handle, asked in ((before, "/tokens 60"), (shorter, "/tokens 20")):
            async with asyncio.timeout(PATIENCE):
                # Its watchers are told before it is stored, so only the store can be asked.
                while not (await product.services.store.get_message(product.owner, handle.reply.id)).is_final:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            stored = await product.services.store.get_message(product.owner, handle.reply.id)
            whole = await product.reply(await product.conversation(), asked)
            assert (stored.status, stored.content) == ("complete", whole.content)
        assert (await product.http.get("/health/ready")).status_code == 200
        assert (await product.reply(conversation, "/say it goes on")).content == "it goes on"


async def test_the_command_that_moves(
    tmp_path: Path, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path / "home"))
    settings = Settings()

    def run(settings: Settings) -> tuple[int, str]:
        code = cli.run(settings, cli.parse(["to-postgres"]))
        out = capsys.readouterr()
        return code, out.out + out.err

    assert run(settings) == (
        1, "tangram-chat: set TANGRAM_DATABASE_URL to the address of an empty PostgreSQL database first\n",
    )  # fmt: skip
    url = postgres_server.text(postgres_server.database("template1").database)
    monkeypatch.setenv("TANGRAM_DATABASE_URL", url)
    settings = Settings()
    code, said = run(settings)
    assert code == 1
    assert "there is no database at" in said
    from db import Database, Store

    old = Database(settings.database_path, settings.backups_dir)
    old.migrate()
    await Store(old).create_user("ann", "hash", is_admin=True)
    await old.aclose()
    code, said = await asyncio.to_thread(run, settings)
    assert code == 0, said
    assert "        1 users\n" in said
    code, said = await asyncio.to_thread(run, settings)
    assert code == 1
    assert "is not empty: there are rows in users" in said
    assert PASSWORD not in said

    copy = (await command(capsys, "backup")).strip()
    monkeypatch.delenv("TANGRAM_DATABASE_URL")
    there = set(settings.backups_dir.glob("*"))
    for words in (["backup", "--keep", "1"], ["check"], ["user", "list"], ["export", "--all", str(tmp_path)]):
        assert await asyncio.to_thread(cli.run, Settings(), cli.parse(words)) == 1, words
        assert "moved to PostgreSQL: set TANGRAM_DATABASE_URL" in capsys.readouterr().err
    assert set(settings.backups_dir.glob("*")) == there, "nothing stale beside, nothing pruned"
    with pytest.raises(StorageUnavailable, match="moved to PostgreSQL"):
        build_services(Settings())
    await command(capsys, "restore", copy)
    assert (await command(capsys, "user", "list")).startswith("admin     ann")
