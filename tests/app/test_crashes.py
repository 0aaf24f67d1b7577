"""kill -9 of the app at random moments of busy use. The database is in order, and what was answered is there.

By hand, with more rounds:  TANGRAM_TEST_CRASHES=50 pytest tests/app/test_crashes.py -s
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.managed_engine import free_port
from app.settings import Settings
from db import Database, Store
from db import backup as db_backup
from db.check import check
from db.errors import DatabaseInUse
from tests.app.conftest import NAME
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = int(os.environ.get("TANGRAM_TEST_CRASHES", "4"))
KEY = "tc-key of the crash test"
CLIENTS = 4


@pytest.fixture
def nursery(settings: Settings) -> Iterator[subprocess.Popen[str]]:
    """A process that forks apps."""
    command = [sys.executable, "-m", "tests.app.crash_child"]
    process = subprocess.Popen(
        [*command, str(settings.home), settings.model, settings.engine_url],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        yield process
        process.kill()


@dataclass
class Answered:
    """What the app has said it did: conversations, and whole replies by id."""

    conversations: set[str] = field(default_factory=set)
    replies: dict[str, str] = field(default_factory=dict)
    another: asyncio.Event = field(default_factory=asyncio.Event)


@contextlib.asynccontextmanager
async def app(nursery: subprocess.Popen[str]) -> AsyncIterator[tuple[httpx.AsyncClient, int]]:
    port = free_port()
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    nursery.stdin.write(f"{port}\n")
    nursery.stdin.flush()
    pid = int(nursery.stdout.readline())
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=2 * PATIENCE, trust_env=False
    ) as http:
        async with asyncio.timeout(4 * PATIENCE):
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await http.get("/health/ready")).status_code == 200:
                        break
                await asyncio.sleep(0.05)
        yield http, pid


async def use(http: httpx.AsyncClient, dice: random.Random, answered: Answered) -> None:
    """Talk, search, edit and delete, until the app is gone; note what was answered."""
    while True:
        made = await http.post("/api/conversations", json={"title": f"talk {dice.random()}"})
        conversation = made.json()["id"]
        answered.conversations.add(conversation)
        path = f"/api/conversations/{conversation}/messages"
        for _ in range(dice.randint(1, 3)):
            body = {"content": f"/tokens {dice.randint(5, 120)}", "stream": False}
            reply = (await http.post(path, json=body)).json()["reply"]
            assert reply["status"] == "complete"
            answered.replies[reply["id"]] = reply["content"]
            answered.another.set()
            await http.get("/api/conversations", params={"query": dice.choice(["lorem", "do", "talk 0.5"])})
        await http.patch(f"/api/conversations/{conversation}", json={"title": f"renamed {dice.random()}"})
        await http.post(f"/api/replies/{reply['id']}/regenerate", json={"stream": False})


async def back_up(settings: Settings) -> None:
    """The command, in a thread of this other process."""
    while True:
        await asyncio.to_thread(db_backup.back_up, settings.database_path, settings.backups_dir, "manual")
        await asyncio.sleep(0.1)


async def prepare(settings: Settings) -> str:
    settings.make_folders()
    database = Database(settings.database_path, settings.backups_dir)
    database.migrate()
    store = Store(database)
    owner = await store.create_user(NAME, "hash", is_admin=True)
    await store.create_api_key(owner.id, "crash", hashlib.sha256(KEY.encode()).hexdigest())
    await database.aclose()
    return owner.id


async def verify(settings: Settings, owner: str, answered: Answered) -> dict[str, int]:
    """Fail when the file is not in order or lacks what was answered; count the messages by status."""
    assert check(settings.database_path) == []
    database = Database(settings.database_path, settings.backups_dir)
    database.migrate()
    store = Store(database)
    try:
        stored = {found.id for found in await store.list_conversations(owner, limit=1000)}
        for conversation in answered.conversations - stored:
            await store.get_conversation(owner, conversation)
        for reply, text in answered.replies.items():
            message = await store.get_message(owner, reply)
            assert (message.status, message.content) == ("complete", text)
        counts: dict[str, int] = {}
        for found in stored & answered.conversations:
            for message in await store.path(owner, found):
                counts[message.status] = counts.get(message.status, 0) + 1
        return counts
    finally:
        await database.aclose()


async def lock_is_free(settings: Settings) -> None:
    """The killed process is gone: a write gets the lock."""
    database = Database(settings.database_path, settings.backups_dir)
    database.migrate()
    end = time.monotonic() + PATIENCE
    while True:
        try:
            await Store(database).set_setting("after the crash", time.time())
        except DatabaseInUse:
            assert time.monotonic() < end
            continue
        break
    await database.aclose()


@pytest.mark.timeout(3600 if ROUNDS > 10 else 300)
async def test_killed_at_random_moments(settings: Settings, nursery: subprocess.Popen[str]) -> None:
    owner = await prepare(settings)
    dice = random.Random(int(os.environ.get("TANGRAM_TEST_SEED", "1")))
    answered = Answered()
    left: dict[str, Any] = {}
    for number in range(ROUNDS):
        async with app(nursery) as (http, pid):
            work = [
                asyncio.create_task(use(http, random.Random(dice.random()), answered)) for _ in range(CLIENTS)
            ]
            work.append(asyncio.create_task(back_up(settings)))
            if number % 2:  # on a busy machine a moment alone could be too short for any answer
                answered.another.clear()
                await asyncio.wait_for(answered.another.wait(), 2 * PATIENCE)
            await asyncio.sleep(dice.uniform(0.1, 1.5))
            os.kill(pid, signal.SIGKILL)
            clients, saving = work[:-1], work[-1]
            ends = await asyncio.gather(*clients, return_exceptions=True)
            saving.cancel()
            await asyncio.wait([saving])
        assert all(isinstance(end, httpx.HTTPError) for end in ends), ends
        if not saving.cancelled() and (error := saving.exception()) is not None:
            raise error
        left = await verify(settings, owner, answered)
        await lock_is_free(settings)
        for copy in settings.backups_dir.iterdir():
            assert check(copy) == [], copy
            copy.unlink()
        print(f"round {number + 1}: {len(answered.replies)} replies answered so far, stored: {left}")
    assert len(answered.replies) >= ROUNDS // 2
    assert not list(settings.backups_dir.iterdir())
