"""Puts the app together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence

from fastapi import FastAPI

from app import __version__
from app.accounts import Accounts, auth_dependency
from app.active import ActiveRequests
from app.audit import AuditLog
from app.backups import Backups
from app.calibration import Calibration
from app.control import ControlServer
from app.database import open_database
from app.engine_change import EngineChanges
from app.engine_settings import EngineSettings
from app.evaluation import Evaluation
from app.fairness import FairQueue, Limits
from app.generation import GenerationService
from app.managed_engine import ManagedEngine
from app.metrics import Metrics
from app.metrics_listener import metrics_port
from app.middleware import Identify, LimitBody, Observe, OriginGuard
from app.operator_commands import Operator
from app.passwords import Passwords
from app.people import People
from app.probe import Probe
from app.profiles import Profiles
from app.ranks import Ranks
from app.remote_engine import RemoteEngine
from app.routes import (
    account,
    account_page,
    api,
    auth,
    completions,
    failures,
    health,
    keys,
    metrics,
    openai,
    people,
    profiles,
    replies,
    transfer,
)
from app.services import Services
from app.settings import Settings
from app.supervisor import EngineSupervisor
from app.tokenising import Tokenising
from db.store import Store

log = logging.getLogger(__name__)


MountFn = Callable[[FastAPI, Services], None]


def build_services(
    settings: Settings,
    *,
    supervisor: EngineSupervisor | None = None,
    progress: Callable[[str], None] = log.info,
) -> Services:
    """Make every part; nothing runs and no file is opened yet."""
    settings.make_folders()
    if supervisor is None:
        kind = RemoteEngine if settings.engine_url else ManagedEngine
        supervisor = kind(settings, progress=progress)
    database = open_database(settings)
    store = Store(database)
    engine_settings = EngineSettings(store, supervisor, settings.model, Probe(supervisor))
    limits = Limits(settings.user_running, settings.user_waiting, settings.user_per_minute)
    queue = FairQueue(running=settings.max_running, waiting=settings.max_waiting, limits=limits)
    counters = Metrics(supervisor, queue)
    audit, passwords = AuditLog(store, days=settings.audit_days), Passwords()
    active, tokenising, ranks = ActiveRequests(), Tokenising(), Ranks(supervisor, store)
    changes = EngineChanges()
    profiles = Profiles(settings, supervisor, engine_settings, store, changes)
    calibration = Calibration(settings, supervisor, store)
    generation = GenerationService(
        store,
        supervisor,
        counters,
        queue,
        resume_replies=settings.resume_replies,
        active=active,
        tokenising=tokenising,
        ranks=ranks,
    )
    return Services(
        settings=settings,
        database=database,
        store=store,
        supervisor=supervisor,
        engine_settings=engine_settings,
        changes=changes,
        profiles=profiles,
        calibration=calibration,
        evaluation=Evaluation(settings, supervisor, store, profiles, calibration),
        generation=generation,
        accounts=Accounts(
            store, passwords, audit, session_days=settings.session_days, setup_key=settings.setup_key
        ),
        metrics=counters,
        people=People(
            store, passwords, audit, queue, link_hours=settings.link_hours, cut_off=generation.stop_owner
        ),
        queue=queue,
        audit=audit,
        active=active,
        tokenising=tokenising,
        backups=Backups(database, audit),
        ranks=ranks,
    )


def create_app(
    settings: Settings,
    *,
    services: Services | None = None,
    mounts: Sequence[MountFn] = (),
    chat_ui: bool = True,
) -> FastAPI:
    """The ASGI app.

    Args:
        services: ready-made parts, for callers that need them before the app runs.
        mounts: called in order to add pages (the console), before the chat takes everything else at "/".
        chat_ui: whether to mount the chat at "/".
    """
    services = services or build_services(settings)
    app = FastAPI(
        title="Tangram Chat",
        version=__version__,
        docs_url=None,  # these pages load their scripts from elsewhere
        redoc_url=None,
        openapi_url=None,
        responses=failures.FAILURES,
        lifespan=_lifespan,
    )
    app.state.services = services
    failures.install(app)
    for module in (
        health,
        metrics,
        auth,
        account,
        account_page,
        keys,
        people,
        openai,
        completions,
        replies,
        transfer,
        profiles,
        api,
    ):
        app.include_router(module.router)
    app.include_router(api.fallback)
    for mount in mounts:
        mount(app, services)
    if chat_ui:
        # Read by Gradio when it is imported: no word about this installation leaves the host.
        os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
        from app.ui.mount import mount as mount_chat

        mount_chat(app, services, auth_dependency)
    # The last one added is the first one that a request meets.
    app.add_middleware(Identify, accounts=services.accounts)
    app.add_middleware(OriginGuard)
    app.add_middleware(LimitBody)
    app.add_middleware(Observe, metrics=services.metrics)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    services: Services = app.state.services
    await asyncio.to_thread(services.database.migrate)
    control = ControlServer(services.settings.control_dir, Operator.of(services))
    try:
        if count := await services.store.discard_unfinished_imports():
            log.info("%d conversations of an import that was cut off are removed", count)
        if count := await services.store.recover_interrupted():
            log.info("%d unfinished replies of the last run are marked as interrupted", count)
        await services.people.load_quotas()
        await control.start()
        if count := await services.generation.resume_interrupted():
            log.info("%d of the interrupted replies go on when the engine is ready", count)
        await services.engine_settings.load_model()
        await services.supervisor.start(await services.engine_settings.overrides())
        await services.calibration.recover()
        async with metrics_port(services):
            yield
    finally:
        await control.stop()
        await services.calibration.close()
        await services.evaluation.close()
        await services.changes.close()
        await services.generation.close()
        await services.supervisor.stop()
        await services.database.aclose()
