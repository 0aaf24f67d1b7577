"""`python -m app` as a whole process: starting, being killed in mid-reply, stopping cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.managed_engine import free_port
from tests.app.conftest import PASSWORD, eventually
from tests.app.test_supervisor import alive
from tests.fake_engine import LOREM
from tests.leftovers import kill_session
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
SETUP_KEY = "key of the tests' first account"
FAKE = ROOT / "tests" / "fake_engine.py"
IN_A_TERMINAL = (
    sys.executable,
    "-c",
    "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))",
)


@dataclass
class Running:
    process: asyncio.subprocess.Process
    url: str
    lines: list[str] = field(default_factory=list)

    @property
    def engine_pids(self) -> list[int]:
        """The engine and its guardian, by the port that only they name."""
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                command = (folder / "cmdline").read_bytes() if folder.name.isdigit() else b""
                if str(FAKE).encode() in command and self.home.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found

    home: str = ""


@contextlib.asynccontextmanager
async def start(home: Path, model: Path, *before: str, **environment: str) -> AsyncIterator[Running]:
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *before, sys.executable, "-m", "app",
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        env={
            **os.environ,
            "TANGRAM_HOME": str(home),
            "TANGRAM_PORT": str(port),
            "TANGRAM_ENGINE_COMMAND": shlex.join([sys.executable, str(FAKE)]),
            "TANGRAM_ENGINE_ARGS": "--fake-token-seconds 0.02",
            "TANGRAM_SETUP_KEY": SETUP_KEY,
            "MODEL": str(model),
            **environment,
        },
    )  # fmt: skip
    running = Running(process, f"http://127.0.0.1:{port}", home=str(home))
    pump = asyncio.create_task(_pump(process, running.lines))
    try:
        yield running
    finally:
        # All of its session: an init that is killed, a shell or a terminal leaves the app behind.
        await asyncio.to_thread(kill_session, process.pid)
        await process.wait()
        await pump


async def _pump(process: asyncio.subprocess.Process, lines: list[str]) -> None:
    if process.stdout is not None:
        async for line in process.stdout:
            lines.append(line.decode().rstrip())


async def ready(running: Running) -> None:
    await eventually(lambda: any("engine: ready" in line for line in running.lines), 4 * PATIENCE)


@contextlib.asynccontextmanager
async def signed_in(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url, timeout=2 * PATIENCE, trust_env=False) as http:
        form = {"name": "ann", "password": PASSWORD, "key": SETUP_KEY}
        if (await http.post("/setup", data=form)).status_code != 303:
            assert (await http.post("/login", data=form)).status_code == 303
        yield http


async def begin(http: httpx.AsyncClient) -> tuple[str, str]:
    """(conversation, reply) of a long reply of which at least two seconds have been written."""
    conversation = (await http.post("/api/conversations", json={})).json()["id"]
    path = f"/api/conversations/{conversation}/messages"
    async with http.stream("POST", path, json={"content": "/tokens 3000"}) as response:
        async for line in response.aiter_lines():
            if (found := re.match(r"id: (\d+)", line)) and int(found[1]) > 400:
                break
    reply = (await http.get(path)).json()["messages"][-1]
    assert reply["status"] == "streaming"
    assert reply["content"]
    return conversation, reply["id"]


async def test_killed_in_mid_reply_then_stopped_in_mid_reply(tmp_path: Path, bundled_model_dir: Path) -> None:
    home = tmp_path / "home"
    async with start(home, bundled_model_dir) as first:
        await ready(first)
        assert any(first.url in line and "Tangram Chat is at" in line for line in first.lines)
        assert any(f"{first.url}/setup?key=key+of+the+tests" in line for line in first.lines)
        async with signed_in(first) as http:
            conversation, reply = await begin(http)
            engine = first.engine_pids
            assert len(engine) == 2
            first.process.kill()
        await first.process.wait()
        await eventually(lambda: not any(map(alive, engine)))

    async with start(home, bundled_model_dir) as second:
        await ready(second)
        assert not any("/setup" in line for line in second.lines)
        async with signed_in(second) as http:
            stored = (await http.get(f"/api/replies/{reply}")).json()
            assert stored["status"] in ("pending", "streaming"), "it goes on by itself"
            kept = stored["content"]
            assert kept.startswith("lorem ipsum")
            have = {"Last-Event-ID": str(len(kept))}
            async with http.stream("GET", f"/api/replies/{reply}/events", headers=have) as response:
                async for line in response.aiter_lines():
                    if (found := re.match(r"id: (\d+)", line)) and int(found[1]) > len(kept) + 100:
                        break
            stored = (await http.post(f"/api/replies/{reply}/stop")).json()
            words = stored["content"].split()
            assert stored["content"].startswith(kept)
            assert words[:-1] == [LOREM[place % len(LOREM)] for place in range(len(words) - 1)], "no seam"
            path = f"/api/conversations/{conversation}/messages"
            answer = (await http.post(path, json={"content": "/say back", "stream": False})).json()
            assert answer["reply"]["content"] == "back"
            assert [m["status"] for m in (await http.get(path)).json()["messages"]][1] == "stopped"

            conversation, reply = await begin(http)
            engine = second.engine_pids
            async with http.stream("GET", f"/api/replies/{reply}/events") as response:
                second.process.send_signal(signal.SIGTERM)
                watched = [line async for line in response.aiter_lines() if line.startswith("data: ")]
            assert '"status": "interrupted"' in watched[-1]
            async with asyncio.timeout(2 * PATIENCE):
                assert await second.process.wait() == 0
            assert not any(map(alive, engine))
            assert not any("Traceback" in line for line in second.lines), second.lines

    database = (home / "db").glob("*")
    assert {path.name for path in database} >= {"chat.sqlite3"}
    from app.settings import Settings
    from db.database import Database
    from db.store import Store

    settings = Settings(home=home)
    opened = Database(settings.database_path, settings.backups_dir)
    opened.migrate()
    store = Store(opened)
    user = await store.user_by_name("ann")
    assert user is not None
    message = await store.get_message(user.id, reply)
    assert message.status == "interrupted"
    assert len(message.content) > 400
    await opened.aclose()


async def test_ctrl_c_in_a_terminal(tmp_path: Path, bundled_model_dir: Path) -> None:
    async with start(tmp_path / "home", bundled_model_dir, *IN_A_TERMINAL) as running:
        await ready(running)
        assert running.process.stdin is not None
        running.process.stdin.write(b"\x03")
        async with asyncio.timeout(2 * PATIENCE):
            assert await running.process.wait() == 0
    at = running.lines.index("^C")
    assert running.lines[at + 1].startswith("stopping: ")


async def test_a_taken_port_is_said_and_nothing_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        async with start(tmp_path / "home", tmp_path, TANGRAM_PORT=port) as running:
            assert await running.process.wait() == 2
    text = "\n".join(running.lines)
    assert f"cannot serve on 127.0.0.1:{port}" in text
    assert "TANGRAM_PORT" in text
    assert "Traceback" not in text
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"TANGRAM_PORT": "many"}, "setting port"),
        ({"TANGRAM_ENGINE_ARGS": "'open"}, "setting engine_args"),
    ],
)
async def test_bad_settings_are_named(tmp_path: Path, environment: dict[str, Any], words: str) -> None:
    async with start(tmp_path / "home", tmp_path, **environment) as running:
        assert await running.process.wait() == 2
    assert words in "\n".join(running.lines)


async def test_a_damaged_database_is_said(tmp_path: Path, bundled_model_dir: Path) -> None:
    path = tmp_path / "home" / "db" / "chat.sqlite3"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a database at all" * 100)
    async with start(tmp_path / "home", bundled_model_dir) as running:
        assert await running.process.wait() == 1
    assert any(line.startswith("cannot start: ") for line in running.lines)
    assert path.read_bytes().startswith(b"not a database")
