"""Own API keys. They are made with a sign-in only: a key that leaked makes no further ones."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from pydantic import Field

from app.routes.deps import ServicesDep, SessionId, User
from app.routes.json_body import JsonBody
from app.routes.views import key_json

router = APIRouter(prefix="/api")


class NewKey(JsonBody):
    name: str = Field(min_length=1, max_length=200)


@router.get("/keys")
async def list_keys(user: User, services: ServicesDep) -> dict[str, Any]:
    return {"keys": [key_json(key) for key in await services.store.list_api_keys(user.id)]}


@router.post("/keys", status_code=201)
async def create_key(
    body: NewKey, user: User, session_id: SessionId, services: ServicesDep
) -> dict[str, Any]:
    """A new API key. This answer is the only place where it can be read."""
    key, record = await services.accounts.create_api_key(user.id, body.name)
    return {**key_json(record), "key": key}


@router.delete("/keys/{key_id}", status_code=204)
async def revoke_key(key_id: str, user: User, services: ServicesDep) -> Response:
    """Refuse a key from now on; a key may revoke itself."""
    await services.accounts.revoke_api_key(user.id, key_id)
    return Response(status_code=204)
