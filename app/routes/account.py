"""One's own account under /api/account: sign-ins and the password. With a sign-in, not with an API key."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from app.accounts import browser_of
from app.routes.auth import set_cookie
from app.routes.deps import ServicesDep, SessionId, User
from app.routes.json_body import JsonBody
from app.routes.views import session_json

router = APIRouter(prefix="/api/account")


class NewPassword(JsonBody):
    current: str
    password: str


@router.get("")
async def account(user: User, session_id: SessionId, services: ServicesDep) -> dict[str, Any]:
    """Who one is, and what one may do at once."""
    limits = services.queue.limits(user.id)
    return {
        "id": user.id,
        "name": user.name,
        "is_admin": user.is_admin,
        "created_at": user.created_at,
        "limits": {
            "running": limits.running,
            "waiting": limits.waiting,
            "per_minute": limits.per_minute,
        },
    }


@router.get("/sessions")
async def list_sessions(user: User, session_id: SessionId, services: ServicesDep) -> dict[str, Any]:
    found = await services.store.list_sessions(user.id)
    return {"sessions": [session_json(session, session_id) for session in found]}


@router.delete("/sessions")
async def revoke_others(user: User, session_id: SessionId, services: ServicesDep) -> dict[str, int]:
    """End all own sign-ins but this one."""
    return {"revoked": await services.accounts.revoke_other_sessions(user.id, session_id)}


@router.delete("/sessions/{session_id}", status_code=204)
async def revoke_session(session_id: str, user: User, current: SessionId, services: ServicesDep) -> Response:
    """End one of one's own sign-ins, this one too."""
    await services.accounts.revoke_session(user.id, session_id)
    return Response(status_code=204)


@router.post("/password")
async def change_password(
    body: NewPassword, request: Request, user: User, session_id: SessionId, services: ServicesDep
) -> Response:
    """Another password. All sign-ins end; this browser gets a new one with the answer."""
    signed_in = await services.accounts.change_password(
        user, body.current, body.password, browser=browser_of(request)
    )
    answer = JSONResponse({"status": "changed"})
    set_cookie(request, answer, signed_in)
    return answer
