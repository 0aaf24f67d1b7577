"""Everybody's accounts under /api/admin: for signed-in administrators."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from app.people import IssuedLink
from app.routes.deps import Admin, ServicesDep, SessionId
from app.routes.json_body import JsonBody
from app.routes.views import link_json, person_json
from db.views import AuditView, QuotaView

router = APIRouter(prefix="/api/admin")

Hours = Annotated[int | None, Field(ge=1, le=24 * 366)]


class NewInvitation(JsonBody):
    is_admin: bool = False
    note: str = Field(default="", max_length=200)
    hours: Hours = None


class Reset(JsonBody):
    hours: Hours = None


class QuotaBody(JsonBody):
    running: int | None = None
    waiting: int | None = None
    per_minute: int | None = None


class UserChange(JsonBody):
    disabled: bool | None = None
    is_admin: bool | None = None
    quota: QuotaBody | None = None


@router.get("/users")
async def list_users(admin: Admin, session_id: SessionId, services: ServicesDep) -> dict[str, Any]:
    """All accounts, by name."""
    return {"users": [person_json(person) for person in await services.people.list_users()]}


@router.patch("/users/{user_id}")
async def change_user(
    user_id: str, body: UserChange, admin: Admin, session_id: SessionId, services: ServicesDep
) -> dict[str, Any]:
    """Disable or enable a user, give or take an administrator's rights, set the quota: all or nothing.

    Answers all users.
    """
    quota = None if body.quota is None else QuotaView(**body.quota.model_dump())
    await services.people.change(admin, user_id, quota=quota, is_admin=body.is_admin, disabled=body.disabled)
    return await list_users(admin, session_id, services)


@router.post("/users/{user_id}/reset", status_code=201)
async def reset_password(
    user_id: str,
    request: Request,
    admin: Admin,
    session_id: SessionId,
    services: ServicesDep,
    body: Reset | None = None,
) -> dict[str, Any]:
    """A link, shown once, with which the user chooses another password. The user's sign-ins end now."""
    hours = body.hours if body is not None else None
    return _issued(request, await services.people.reset_password(admin, user_id, hours=hours))


@router.post("/invitations", status_code=201)
async def invite(
    request: Request, admin: Admin, session_id: SessionId, services: ServicesDep, body: NewInvitation
) -> dict[str, Any]:
    """A link, shown once, with which somebody makes an account."""
    return _issued(
        request,
        await services.people.invite(admin, is_admin=body.is_admin, note=body.note, hours=body.hours),
    )


@router.get("/links")
async def list_links(admin: Admin, session_id: SessionId, services: ServicesDep) -> dict[str, Any]:
    """Invitations and resets that can still be used, without their secrets."""
    return {"links": [link_json(link) for link in await services.people.list_links()]}


@router.delete("/links/{link_id}", status_code=204)
async def revoke_link(link_id: str, admin: Admin, session_id: SessionId, services: ServicesDep) -> Response:
    await services.people.revoke_link(admin, link_id)
    return Response(status_code=204)


@router.get("/audit")
async def audit(
    admin: Admin,
    session_id: SessionId,
    services: ServicesDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> dict[str, Any]:
    """The latest sign-ins and administrative changes, newest first."""
    return {"entries": [_audit_json(entry) for entry in await services.store.list_audit(limit)]}


def _issued(request: Request, issued: IssuedLink) -> dict[str, Any]:
    return {**link_json(issued.link), "url": str(request.base_url).rstrip("/") + issued.path}


def _audit_json(entry: AuditView) -> dict[str, Any]:
    return {
        "id": entry.id,
        "user_id": entry.user_id,
        "action": entry.action,
        "before": entry.before,
        "after": entry.after,
        "address": entry.address,
        "request_id": entry.request_id,
        "created_at": entry.created_at,
    }
