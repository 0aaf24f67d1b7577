"""The page /account: one's own sign-ins, API keys and password, with forms."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from app.accounts import browser_of
from app.errors import AppError
from app.routes.auth import set_cookie
from app.routes.deps import ServicesDep, SessionId, User
from app.routes.forms import Field, retry_after
from app.services import Services
from app.ui.account_page import account_page
from db.errors import InvalidInput
from db.views import UserView

router = APIRouter(prefix="/account")


@router.get("")
async def show(user: User, session_id: SessionId, services: ServicesDep) -> Response:
    return await _page(services, user, session_id)


@router.post("/password")
async def change_password(
    request: Request,
    user: User,
    session_id: SessionId,
    services: ServicesDep,
    current: Field = "",
    password: Field = "",
) -> Response:
    try:
        signed_in = await services.accounts.change_password(
            user, current, password, browser=browser_of(request)
        )
    except AppError as error:
        answer = await _page(services, user, session_id, error=error.message, status=error.status)
        answer.headers.update(retry_after(error))
        return answer
    done = RedirectResponse("/account", status_code=303)
    set_cookie(request, done, signed_in)
    return done


@router.post("/keys")
async def create_key(user: User, session_id: SessionId, services: ServicesDep, name: Field = "") -> Response:
    try:
        key, record = await services.accounts.create_api_key(user.id, name)
    except InvalidInput as error:
        return await _page(services, user, session_id, error=f"The key's {error}.", status=400)
    said = f"This is the key “{record.name}”. Copy it now: it is not shown again."
    return await _page(services, user, session_id, done=said, secret=key)


@router.post("/keys/{key_id}/revoke")
async def revoke_key(key_id: str, user: User, session_id: SessionId, services: ServicesDep) -> Response:
    await services.accounts.revoke_api_key(user.id, key_id)
    return RedirectResponse("/account", status_code=303)


@router.post("/sessions/revoke")
async def revoke_others(user: User, session_id: SessionId, services: ServicesDep) -> Response:
    await services.accounts.revoke_other_sessions(user.id, session_id)
    return RedirectResponse("/account", status_code=303)


@router.post("/sessions/{session_id}/revoke")
async def revoke_session(session_id: str, user: User, current: SessionId, services: ServicesDep) -> Response:
    await services.accounts.revoke_session(user.id, session_id)
    return RedirectResponse("/account", status_code=303)


async def _page(
    services: Services,
    user: UserView,
    current: str,
    *,
    error: str | None = None,
    done: str | None = None,
    secret: str | None = None,
    status: int = 200,
) -> Response:
    sessions = await services.store.list_sessions(user.id)
    keys = await services.store.list_api_keys(user.id)
    page = account_page(user, sessions, keys, current=current, error=error, done=done, secret=secret)
    return HTMLResponse(page, status_code=status, headers={"Cache-Control": "no-store"})
