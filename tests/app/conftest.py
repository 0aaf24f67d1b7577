"""The real app over HTTP, on a real SQLite file and the imitated engine, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from argon2 import PasswordHasher
from fastapi import FastAPI

from app.accounts import COOKIE
from app.factory import build_services, create_app
from app.services import Services
from app.settings import Settings
from tests.fake_engine import FakeConfig, FakeEngine, ThreadServer
from tests.patience import PATIENCE

NAME, PASSWORD = "ann", "correct horse"


class LoopServer(uvicorn.Server):
    """uvicorn in the running event loop, leaving the signals alone."""

    def __init__(self, app: Any) -> None:
        super().__init__(
            uvicorn.Config(app, port=0, lifespan="on", log_config=None, timeout_graceful_shutdown=1)
        )
        self.listening = asyncio.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}"


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    server = LoopServer(app)
    task = asyncio.create_task(server.serve())
    ready = asyncio.create_task(server.listening.wait())
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    if task.done():
        raise RuntimeError("the server did not start")
    try:
        yield server.url
    finally:
        server.should_exit = True
        await task


@dataclass
class Product:
    """A running app. `http` is signed in as its administrator, `stranger` as another user."""

    app: FastAPI
    services: Services
    url: str
    http: httpx.AsyncClient
    owner: str

    def client(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=2 * PATIENCE, trust_env=False, **options)

    async def stranger(self) -> httpx.AsyncClient:
        """A client with the API key of another, ordinary user."""
        user = await self.services.store.create_user("stranger", _hash())
        key, _ = await self.services.accounts.create_api_key(user.id, "test")
        return self.client(headers={"Authorization": f"Bearer {key}"})

    async def sign_in(self, http: httpx.AsyncClient, name: str = NAME) -> str:
        """Give a client a session of the user of that name, without a password; return its id."""
        user = await self.services.store.user_by_name(name)
        assert user is not None
        token = secrets.token_urlsafe(8)
        expires = int(time.time() + 3600) * 1000
        session = await self.services.store.create_session(
            user.id, hashlib.sha256(token.encode()).hexdigest(), expires
        )
        http.cookies.set(COOKIE, token, domain="127.0.0.1")
        return session.id

    async def conversation(self, **fields: Any) -> str:
        return str((await self.services.store.create_conversation(self.owner, **fields)).id)

    async def reply(self, conversation: str, content: str, **options: Any) -> Any:
        """Send a message, wait for the end, return the reply as stored."""
        handle = await self.services.generation.send(self.owner, conversation, content, **options)
        return await self.finish(handle.reply.id)

    async def finish(self, reply_id: str) -> Any:
        async for event in self.services.generation.subscribe(self.owner, reply_id):
            if event.kind == "done":
                break
        return await self.services.store.get_message(self.owner, reply_id)

    async def wait_for_text(self, reply_id: str) -> str:
        async with contextlib.aclosing(self.services.generation.subscribe(self.owner, reply_id)) as events:
            async for event in events:
                if event.text:
                    return event.text
        raise AssertionError("the reply ended without text")


@pytest.fixture
def fake_engine(bundled_model_dir: Path) -> FakeEngine:
    return FakeEngine(FakeConfig(model=str(bundled_model_dir), name="fake-model", token_seconds=0.002))


@pytest.fixture
def engine_url(fake_engine: FakeEngine) -> Iterator[str]:
    with ThreadServer(fake_engine.app) as server:
        yield server.url


@pytest.fixture
def settings(tmp_path: Path, engine_url: str, bundled_model_dir: Path) -> Settings:
    return Settings(home=tmp_path / "home", model=str(bundled_model_dir), engine_url=engine_url)


@contextlib.asynccontextmanager
async def running_product(
    settings: Settings, services: Services | None = None, *, engine: bool = True
) -> AsyncIterator[Product]:
    services = services or build_services(settings)
    app = create_app(settings, services=services, chat_ui=False)
    async with (
        serving(app) as url,
        httpx.AsyncClient(base_url=url, timeout=2 * PATIENCE, trust_env=False) as http,
    ):
        if engine:
            await services.supervisor.wait_ready()
        user = await services.store.user_by_name(NAME) or await services.store.create_first_user(
            NAME, _hash()
        )
        key = "test of the session"
        expires = int(time.time() + 3600) * 1000
        await services.store.create_session(user.id, hashlib.sha256(key.encode()).hexdigest(), expires)
        http.cookies.set(COOKIE, key)
        yield Product(app, services, url, http, user.id)
        await services.store.delete_session(hashlib.sha256(key.encode()).hexdigest())


@functools.cache
def _hash() -> str:
    return cheap_hasher().hash(PASSWORD)


def cheap_hasher() -> PasswordHasher:
    """argon2id in next to no time; what real passwords get has a test of its own."""
    return PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)


@pytest.fixture(autouse=True)
def _cheap_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.passwords.PasswordHasher", cheap_hasher)


@pytest.fixture
async def product(settings: Settings) -> AsyncIterator[Product]:
    async with running_product(settings) as running:
        yield running


async def eventually(check: Callable[[], Any], seconds: float = PATIENCE) -> None:
    """Wait until something that happens in another thread or process is so."""
    async with asyncio.timeout(seconds):
        while not check():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
