"""kill -9 of the engine at random moments of busy use. The app goes on, and what was answered is there.

By hand, with more rounds:  TANGRAM_TEST_CRASHES=50 pytest tests/app/test_engine_crashes.py -s
"""

from __future__ import annotations

import asyncio
import os
import random
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from app.factory import build_services, create_app
from app.services import Services
from app.settings import Settings
from db.check import check
from tests.app.conftest import eventually
from tests.app.test_crashes import CLIENTS, KEY, Answered, prepare
from tests.app.test_supervisor import FAKE, QUICK
from tests.fake_engine import ThreadServer
from tests.patience import PATIENCE

ROUNDS = int(os.environ.get("TANGRAM_TEST_CRASHES", "3"))
BROKEN = {"error", "interrupted"}


async def engine_pid(services: Services) -> int:
    async with httpx.AsyncClient(
        base_url=services.engine.base_url, trust_env=False, timeout=PATIENCE
    ) as http:
        return int((await http.get("/fake/state")).json()["pid"])


async def talk(http: httpx.AsyncClient, dice: random.Random, answered: Answered) -> None:
    """Send messages for ever; while the engine is away the app says so, and the message can be sent again."""
    conversation = (await http.post("/api/conversations", json={})).json()["id"]
    answered.conversations.add(conversation)
    path = f"/api/conversations/{conversation}/messages"
    while True:
        said = await http.post(
            path, json={"content": f"/tokens {dice.randint(5, 80)} /delay 0.005", "stream": False}
        )
        if said.status_code == 503:
            assert said.json()["error"]["code"] == "engine_not_ready"
            await asyncio.sleep(0.1)
            continue
        assert said.status_code == 200, said.text
        reply = said.json()["reply"]
        assert reply["status"] in BROKEN | {"complete"}, reply
        if reply["status"] == "complete":
            answered.replies[reply["id"]] = reply["content"]
            answered.another.set()


async def nothing_is_lost(http: httpx.AsyncClient, answered: Answered) -> None:
    found: dict[str, tuple[str, str]] = {}
    for conversation in answered.conversations:
        messages = (await http.get(f"/api/conversations/{conversation}/messages")).json()["messages"]
        found |= {message["id"]: (message["status"], message["content"]) for message in messages}
    for reply, text in answered.replies.items():
        assert found[reply] == ("complete", text)


@pytest.mark.timeout(3600 if ROUNDS > 10 else 300)
async def test_the_engine_is_killed_at_random_moments(
    tmp_path: Path, bundled_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.managed_engine.Timing", lambda: replace(QUICK, give_up=10**6))
    command = shlex.join([sys.executable, str(FAKE)])
    settings = Settings(
        home=tmp_path / "home",
        model=str(bundled_model_dir),
        engine_command=command,
        user_per_minute=10**6,
        resume_replies=False,
    )
    await prepare(settings)
    services = build_services(settings)
    dice, answered = random.Random(int(os.environ.get("TANGRAM_TEST_SEED", "1"))), Answered()
    with ThreadServer(create_app(settings, services=services, chat_ui=False)) as server:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(
            base_url=server.url, headers=headers, timeout=2 * PATIENCE, trust_env=False
        ) as http:
            await eventually(lambda: services.supervisor.status.ready, 2 * PATIENCE)
            work = [
                asyncio.create_task(talk(http, random.Random(dice.random()), answered))
                for _ in range(CLIENTS)
            ]
            for number in range(ROUNDS):
                answered.another.clear()
                await asyncio.wait_for(answered.another.wait(), 2 * PATIENCE)
                await asyncio.sleep(dice.uniform(0.0, 1.0))
                pid = await engine_pid(services)
                os.kill(pid, signal.SIGKILL)
                await eventually(lambda: not services.supervisor.status.ready, 2 * PATIENCE)
                await eventually(lambda: services.supervisor.status.ready, 2 * PATIENCE)
                assert await engine_pid(services) != pid
                assert all(not task.done() for task in work), [task for task in work if task.done()]
                assert await asyncio.to_thread(check, settings.database_path) == []
                print(f"round {number + 1}: {len(answered.replies)} replies answered so far")
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            await eventually(lambda: services.queue.running == 0 and services.queue.waiting == 0)
            await nothing_is_lost(http, answered)
    assert len(answered.replies) >= ROUNDS
    assert await asyncio.to_thread(check, settings.database_path) == []
