"""Puts the console at /admin of the app."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

# Read by Gradio when it is imported: no word about this installation leaves the host.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import gradio as gr
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.routing import Mount, Route

from admin import live_plot, theme
from admin.access import Access, AdminOnly
from admin.console import Console
from admin.downloads import backup_response
from admin.owners import Owners
from admin.page import build_admin
from admin.render import Renderer
from admin.sampler import UNWATCHED_SECONDS, Sampler
from admin.storage import PoolStorage
from admin.tuning import TuneService
from admin.watch import Watch
from app.services import Services
from app.ui.door import guard_mounted
from tangram.client import EngineClient

PATH = "/admin"


def mount(app: FastAPI, services: Services) -> None:
    """Mount the console of ``services``; see :func:`mount_console`."""

    def engine() -> EngineClient:
        return services.engine

    def watching() -> EngineClient:
        return services.supervisor.watching

    sampler = Sampler(
        watching,
        store=PoolStorage(services.database),
        unwatched=UNWATCHED_SECONDS,
        beside=lambda: (services.queue.waiting, services.metrics.replies("error")),
    )
    owners = Owners(services.active, services.store)
    console = Console(
        access=Access(services.accounts.identify),
        sampler=sampler,
        renderer=Renderer(sampler, owners.of),
        tuning=TuneService(engine, services.engine_settings, services.changes),
        engine=services.supervisor,
        profiles=services.profiles,
        calibration=services.calibration,
        services=services,
        owners=owners,
        watch=Watch(services, sampler, owners),
        changes=services.changes,
    )
    services.changes.on_change = sampler.poke
    app.state.console = console
    mount_console(app, console)


def mount_console(app: FastAPI, console: Console) -> None:
    """Mount the page of ``console`` at :data:`PATH`, behind a door for administrators, and run its sampler.

    Call it before anything is mounted at ``/``: routes are tried in order.
    """
    page = build_admin(console)
    gr.mount_gradio_app(
        app,
        page,
        PATH,
        footer_links=[],
        run_history=False,
        auth_dependency=console.access.admin_id,
        show_error=False,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        theme=theme.theme(),
        css=theme.css(),
        head=theme.head(),
    )
    guard_mounted(app, page, console.access.admin_id, direct=True, uploads=True)
    gradio_route = app.router.routes.pop()
    if not isinstance(gradio_route, Mount):
        raise TypeError("Gradio did not mount an application")
    door = Middleware(AdminOnly, access=console.access)
    app.router.routes += [
        Route(PATH, _to_page, include_in_schema=False),
        Route(
            f"{PATH}/{live_plot.SCRIPT_NAME}",
            live_plot.script_response,
            middleware=[door],
            include_in_schema=False,
        ),
        Route(
            f"{PATH}/backups/{{name}}",
            backup_response(console),
            middleware=[door],
            include_in_schema=False,
        ),
        Mount(PATH, AdminOnly(gradio_route.app, console.access), name="admin"),
    ]
    _run_with(app, console)


def _to_page(request: Request) -> RedirectResponse:
    return RedirectResponse(f"{request.scope.get('root_path', '')}{PATH}/", status_code=307)


def _run_with(app: FastAPI, console: Console) -> None:
    """Run the sampler while the app runs: started after the app's own start, stopped before its end."""
    lifespan = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def with_console(running: Any) -> AsyncIterator[Any]:
        async with lifespan(running) as state:
            console.sampler.start()
            console.watch.start()
            try:
                yield state
            finally:
                await console.watch.stop()
                await console.sampler.stop()

    app.router.lifespan_context = with_console
