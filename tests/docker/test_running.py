"""What the images run, as plain processes: init, entrypoint, health check, stop; and the proxy in front."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from app.managed_engine import free_port
from tests.app.conftest import eventually
from tests.app.test_process import begin, ready, signed_in, start
from tests.leftovers import kill_session, session_of
from tests.patience import PATIENCE
from tests.tree import ROOT

DOCKER = ROOT / "docker"
STOP_SECONDS = 30
"""What docker-compose.yml gives the container to stop."""


def health(url: str) -> int:
    environment = {"TANGRAM_PORT": url.rpartition(":")[2]}
    command = [sys.executable, str(DOCKER / "healthcheck.py")]
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode


@pytest.mark.skipif(shutil.which("tini") is None, reason="no tini here (Debian: package tini)")
async def test_the_container_s_command_gets_healthy_and_stops_with_its_replies_settled(
    tmp_path: Path, bundled_model_dir: Path
) -> None:
    # A test's init is not process 1: -s lets it look after orphans all the same.
    init = ("tini", "-s", "--", str(DOCKER / "entrypoint.sh"))
    home = tmp_path / "home"
    async with start(home, bundled_model_dir, *init) as running:
        assert await asyncio.to_thread(health, running.url) == 1
        await ready(running)
        assert await asyncio.to_thread(health, running.url) == 0
        async with signed_in(running) as http:
            _, reply = await begin(http)
            running.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(STOP_SECONDS):
                assert await running.process.wait() == 0
        assert session_of(running.process.pid) == [], "the init took all with it"
        assert await asyncio.to_thread(health, running.url) == 1
    with closing(sqlite3.connect(home / "db" / "chat.sqlite3")) as opened:
        query = "SELECT status, length(content) FROM messages WHERE id = ?"
        ((status, length),) = opened.execute(query, [reply]).fetchall()
    assert status == "interrupted"  # which the next start goes on with
    assert length > 400


async def test_the_preflight_s_code_is_the_container_s(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    command = (str(DOCKER / "entrypoint.sh"),)
    path = f"{tools}:/usr/bin:/bin"
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho '0, T4, 15360, 15000, 7.5, 580.65.06, GPU-1'\n")
    (tools / "nvidia-smi").chmod(0o755)
    async with start(tmp_path / "home", tmp_path, *command, PATH=path, TANGRAM_EXPECT_GPU="1") as running:
        assert await running.process.wait() == 13
    assert any("compute capability 7.5" in line for line in running.lines)
    assert not any("Traceback" in line for line in running.lines)


@pytest.mark.skipif(shutil.which("caddy") is None, reason="no caddy here (Debian: package caddy)")
async def test_the_proxy_passes_streams_on_at_once_and_overwrites_forwarded_headers(tmp_path: Path) -> None:
    told: list[str] = []
    go_on = asyncio.Event()

    async def upstream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        writer.write(head + b"data: one\n\n")
        await writer.drain()
        await go_on.wait()
        writer.write(b"data: two\n\n")
        await writer.drain()
        writer.close()

    port, behind = free_port(), await asyncio.start_server(upstream, "127.0.0.1", 0)
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "XDG_DATA_HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path),
        "CADDY_ADMIN": f"localhost:{free_port()}",
        "TANGRAM_DOMAIN": f"http://127.0.0.1:{port}",  # TLS would want ports 80 and 443
        "TANGRAM_UPSTREAM": f"127.0.0.1:{behind.sockets[0].getsockname()[1]}",
    }
    command = ["caddy", "run", "--adapter", "caddyfile", "--config", str(DOCKER / "caddy" / "Caddyfile")]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=quiet, stderr=quiet, start_new_session=True
    )
    try:

        def up() -> bool:
            try:
                return (
                    httpx.get(environment["TANGRAM_DOMAIN"] + "/", trust_env=False, timeout=0.2) is not None
                )
            except httpx.ReadTimeout:
                return True  # it waits for the rest of the stream
            except httpx.HTTPError:
                return False

        await eventually(up)
        headers = {"X-Forwarded-For": "203.0.113.7"}
        url = environment["TANGRAM_DOMAIN"] + "/api/replies/x/events"
        async with (
            httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as http,
            http.stream("GET", url, headers=headers) as answer,
        ):
            lines = answer.aiter_lines()
            assert (
                await asyncio.wait_for(anext(lines), PATIENCE) == "data: one"
            )  # while the second is held back
            go_on.set()
            assert "data: two" in [line async for line in lines]
        assert "x-forwarded-for: 127.0.0.1\r\n" in told[-1]
        assert "203.0.113.7" not in told[-1]
    finally:
        go_on.set()
        await asyncio.to_thread(kill_session, process.pid)
        await process.wait()
        behind.close()
        await behind.wait_closed()
