"""The console on the real app with the imitated engine, and on stand-ins that a test controls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from admin.access import Access
from admin.console import Console
from admin.mount import mount, mount_console
from admin.owners import Owners
from admin.render import Renderer
from admin.sampler import Sampler
from admin.tuning import TuneService
from admin.watch import Watch
from app.calibration import Calibration
from app.engine_change import EngineChanges
from app.engine_settings import EngineSettings
from app.factory import build_services, create_app
from app.profiles import Profiles
from app.services import Services
from app.settings import Settings
from tests.admin.support import Engine, Keeper, Person, Supervisor
from tests.fake_engine import FakeConfig, FakeEngine, ThreadServer


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def supervisor(tmp_path: Path, engine: Engine) -> Supervisor:
    return Supervisor(Settings(home=tmp_path), engine)


@pytest.fixture
def keeper() -> Keeper:
    return Keeper()


@dataclass
class Bench:
    """A console on stand-ins. ``person`` is whoever asks; ``None`` is a stranger."""

    console: Console
    app: FastAPI
    engine: Engine
    supervisor: Supervisor
    keeper: Keeper
    person: Person | None = None

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://console")


@pytest.fixture
async def bench(engine: Engine, supervisor: Supervisor, keeper: Keeper) -> AsyncIterator[Bench]:
    app = FastAPI()

    async def resolve(_: Any) -> Person | None:
        return made.person

    sampler = Sampler(supervisor.reader)
    decided = EngineSettings(keeper, supervisor)
    changes = EngineChanges()
    changes.on_change = sampler.poke
    tuning = TuneService(supervisor.reader, decided, changes)
    settings = supervisor.settings
    settings.make_folders()
    profiles = Profiles(settings, supervisor, decided, keeper, changes)
    calibration = Calibration(settings, supervisor, keeper)
    services = build_services(settings, supervisor=supervisor)
    services.database.migrate()
    owners = Owners(services.active, services.store)
    console = Console(
        access=Access(resolve),
        sampler=sampler,
        renderer=Renderer(sampler, owners.of),
        tuning=tuning,
        engine=supervisor,
        profiles=profiles,
        calibration=calibration,
        services=services,
        owners=owners,
        watch=Watch(services, sampler, owners),
        changes=changes,
    )
    made = Bench(console, app, engine, supervisor, keeper, Person("1", True))
    mount_console(app, console)
    yield made
    await calibration.close()
    await changes.close()
    await services.database.aclose()


@dataclass
class Installed:
    """The console in the real app: real accounts and database, the imitated engine over HTTP."""

    app: FastAPI
    services: Services
    fake: FakeEngine

    @property
    def console(self) -> Console:
        console: Console = self.app.state.console
        return console

    @contextlib.asynccontextmanager
    async def client(self, name: str | None, is_admin: bool = False) -> AsyncIterator[httpx.AsyncClient]:
        """A browser in which the user ``name``, made here, is signed in; ``None``: nobody is."""
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://localhost"
        ) as http:
            if name is not None:
                await self.services.accounts.create_user(name, "a long password", is_admin=is_admin)
                form = {"name": name, "password": "a long password"}
                assert (await http.post("/login", data=form)).status_code == 303
            yield http


@pytest.fixture(scope="session")
def fake(bundled_model_dir: Path) -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine(FakeConfig(model=str(bundled_model_dir), token_seconds=0.001))
    with ThreadServer(engine.app) as server:
        yield engine, server.url


@pytest.fixture
async def installed(
    tmp_path: Path, fake: tuple[FakeEngine, str], bundled_model_dir: Path
) -> AsyncIterator[Installed]:
    settings = Settings(home=tmp_path / "home", model=str(bundled_model_dir), engine_url=fake[1])
    services = build_services(settings)
    app = create_app(settings, services=services, mounts=[mount], chat_ui=False)
    async with app.router.lifespan_context(app):
        async with asyncio.timeout(60):
            await services.supervisor.wait_ready()
        yield Installed(app, services, fake[0])
