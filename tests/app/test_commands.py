"""`tangram-chat ...`: on a running app through its socket, and without one; on good and on damaged files."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from app.__main__ import main
from app.control import SOCKET, ControlServer, Refused, ask
from app.settings import Settings
from db.check import check
from tests.app.conftest import NAME, PASSWORD, Product, running_product

Run = Callable[..., "tuple[int, str]"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs a command on this test's home; returns its exit code and what it printed."""
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TANGRAM_PORT", "8123")

    def command(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return code, said.out + said.err

    return command


async def on(run: Run, *arguments: object) -> tuple[int, str]:
    """A command beside the app that runs in this test's event loop."""
    return await asyncio.to_thread(run, *arguments)


async def test_users_while_the_app_runs(product: Product, run: Run) -> None:
    code, said = await on(run, "user", "invite", "--note", "for Bob", "--hours", 2)
    port = product.services.settings.port  # not that of the command's own environment
    assert port != 8123
    path = re.match(rf"http://127\.0\.0\.1:{port}(/invite\?token=\S+)\n", said)
    assert (code, path is not None) == (0, True), said
    (link,) = await product.services.people.list_links()
    assert (link.note, link.is_admin, link.created_by) == ("for Bob", False, None)
    assert 7_100_000 < link.expires_at - link.created_at <= 7_200_000
    async with product.client() as http:
        assert path is not None
        token = path[1].partition("=")[2]
        form = {"name": "Bob", "password": PASSWORD, "token": token}
        assert (await http.post("/invite", data=form)).status_code == 303
        assert (await on(run, "user", "admin", "bob")) == (0, "Bob is now an administrator\n")
        assert (await http.get("/api/admin/users")).status_code == 200
        assert (await on(run, "user", "admin", "bob", "--revoke"))[0] == 0
        assert (await http.get("/api/admin/users")).status_code == 403
        assert (await on(run, "user", "quota", "bob", "--running", 3)) == (
            0,
            "bob: running: 3, waiting: default, per minute: default\n",
        )
        assert (await http.get("/api/account")).json()["limits"]["running"] == 3
        assert (await on(run, "user", "disable", "BOB")) == (0, "Bob is disabled\n")
        assert (await http.get("/api/account")).status_code == 401
        listed = (await on(run, "user", "list"))[1].splitlines()
        assert [line.split("(")[0].split() for line in listed] == [["admin", NAME], ["disabled", "Bob"]]
        assert (await on(run, "user", "reset", "bob")) == (1, "tangram-chat: the user is disabled\n")
        assert (await on(run, "user", "enable", "bob"))[0] == 0
        code, said = await on(run, "user", "reset", "bob")
        assert (code, "/reset?token=" in said) == (0, True)
    assert (await on(run, "user", "disable", "nobody")) == (1, "tangram-chat: user not found\n")
    refused = "tangram-chat: the last administrator must stay one\n"
    assert (await on(run, "user", "disable", NAME)) == (1, refused)
    assert (await on(run, "user", "quota", NAME, "--running", 0))[0] == 1
    actions = {entry.action for entry in await product.services.store.list_audit()}
    assert {"user.invite", "user.join", "user.disable", "user.reset", "user.quota"} <= actions


async def test_the_database_while_the_app_runs(product: Product, run: Run, tmp_path: Path) -> None:
    conversation = await product.conversation(title="../../escape")
    await product.reply(conversation, "/say " + "much text " * 500)
    await product.services.store.delete_conversation(product.owner, conversation)
    code, said = await on(run, "vacuum")
    assert (code, bool(re.fullmatch(r"\d+ bytes before, \d+ after\n", said))) == (0, True)
    assert (await on(run, "check")) == (0, f"{product.services.settings.database_path} is in order\n")
    made = []
    for _ in range(3):
        code, said = await on(run, "backup", "--keep", 2)
        assert code == 0
        made.append(Path(said.strip()))
    assert sorted(product.services.settings.backups_dir.iterdir()) == sorted(made[1:])
    assert stat.S_IMODE(made[-1].stat().st_mode) == 0o600
    assert (await on(run, "check", made[-1])) == (0, f"{made[-1]} is in order\n")
    code, said = await on(run, "restore", made[-1])
    assert (code, "another process writes to this database" in said) == (1, True)
    code, said = await on(run, "export", "--user", NAME, tmp_path / "ann.json")
    assert (code, said) == (0, f"{tmp_path / 'ann.json'}\n")
    exported = json.loads((tmp_path / "ann.json").read_text())
    assert exported["conversations"][0]["messages"][1]["content"].startswith("much text")
    assert stat.S_IMODE((tmp_path / "ann.json").stat().st_mode) == 0o600
    assert (await on(run, "export", "--user", NAME, tmp_path / "ann.json"))[0] == 1  # nothing is overwritten
    assert (await on(run, "export", "--user", "x", tmp_path / "x.json")) == (
        1,
        "tangram-chat: user not found\n",
    )
    assert not (tmp_path / "x.json").exists()
    await product.services.store.create_user("../../etc/passwd", "hash")
    assert (await on(run, "export", "--all", tmp_path / "all"))[0] == 0
    assert len(list((tmp_path / "all").iterdir())) == 2
    await product.reply(await product.conversation(), "/say still here")


async def test_without_the_app(settings: Settings, run: Run, tmp_path: Path) -> None:
    """What was written is read and changed by commands alone, after a kill too: the socket is still there."""
    async with running_product(settings) as product:
        backup = Path((await on(run, "backup", tmp_path / "elsewhere"))[1].strip())
        assert backup.parent == tmp_path / "elsewhere"
        await product.services.store.create_user("later", "hash")
    with socket.socket(socket.AF_UNIX) as left, pytest.MonkeyPatch.context() as patch:
        patch.chdir(settings.control_dir)
        left.bind(SOCKET)
    assert (await on(run, "user", "disable", "later")) == (0, "later is disabled\n")
    assert (await on(run, "vacuum"))[0] == 0
    code, said = await on(run, "restore", backup)
    kept = re.search(r"kept at (\S+)\n", said)
    assert (code, kept is not None) == (0, True), said
    assert "later" not in (await on(run, "user", "list"))[1]
    assert kept is not None
    assert check(Path(kept[1])) == []
    assert (await on(run, "restore", kept[1]))[0] == 0
    assert "disabled  later" in (await on(run, "user", "list"))[1]
    assert not list(settings.database_path.parent.glob("*.restoring*"))


async def test_moving_to_another_host(
    settings: Settings, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup from a disk that is carried over, before the first start there; again changes nothing."""
    async with running_product(settings):
        assert (await on(run, "backup", tmp_path / "disk"))[0] == 0
    (copy,) = (tmp_path / "disk").iterdir()
    copy.chmod(0o400)
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path / "other" / "host"))
    assert await on(run, "restore", copy) == (0, f"restored from {copy}\n")
    assert NAME in (await on(run, "user", "list"))[1]
    code, said = await on(run, "restore", copy)
    assert (code, "kept at" in said) == (0, True)
    assert NAME in (await on(run, "user", "list"))[1]


def test_where_there_is_nothing(run: Run, tmp_path: Path) -> None:
    for arguments in (
        ["backup"],
        ["check"],
        ["vacuum"],
        ["user", "list"],
        ["export", "--all", tmp_path / "x"],
    ):
        code, said = run(*arguments)
        assert (code, "there is no database at" in said) == (1, True), arguments
    code, said = run("restore", tmp_path / "missing")
    assert (code, "there is no database at" in said) == (1, True)
    assert not (tmp_path / "home").exists()
    for wrong in (["nothing"], ["user"], ["user", "disable"], ["backup", "--keep", "0"], ["export", "x"]):
        assert run(*wrong)[0] == 2


def test_bad_backups_are_not_restored(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text.sqlite3").write_text("no database at all " * 300)
    with closing(sqlite3.connect(tmp_path / "foreign.sqlite3")) as foreign:
        foreign.execute("CREATE TABLE t (a)")
    for name in ("text", "foreign"):
        code, said = run("restore", tmp_path / f"{name}.sqlite3")
        assert (code, said.startswith("tangram-chat: ")) == (1, True)
        assert "Traceback" not in said
    assert not (tmp_path / "home" / "db" / "chat.sqlite3").exists()


async def test_the_socket_is_the_owners(product: Product) -> None:
    folder = product.services.settings.control_dir
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / SOCKET).stat().st_mode) == 0o600
    with pytest.raises(Refused, match="There is no command 'shutdown' in the app"):
        await asyncio.to_thread(ask, folder, "shutdown", {})
    with pytest.raises(Refused, match="unexpected keyword argument"):
        await asyncio.to_thread(ask, folder, "vacuum", {"now": True})
    reader, writer = await asyncio.open_unix_connection(os.path.relpath(folder / SOCKET))
    writer.write(b"not json\n")
    assert "does not understand" in json.loads(await reader.readline())["error"]
    writer.close()
    await writer.wait_closed()
    assert (await product.http.get("/health/ready")).status_code == 200


async def test_a_long_path_is_no_obstacle(tmp_path: Path) -> None:
    class Echo:
        async def run(self, command: str, arguments: object) -> object:
            return [command, arguments]

    folder = tmp_path / ("long " * 30) / ("longer " * 20)
    server = ControlServer(folder, Echo())
    await server.start()
    assert await asyncio.to_thread(ask, folder, "x", {"a": "é"}) == ["x", {"a": "é"}]
    await server.stop()
    assert list(folder.iterdir()) == []
