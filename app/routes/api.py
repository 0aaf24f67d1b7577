"""The product's own API under /api: conversations, the engine's state. Replies are in `replies`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import Field

from app.errors import Missing
from app.routes.deps import ServicesDep, User
from app.routes.json_body import JsonBody
from app.routes.views import conversation_json, engine_json, message_json
from app.sampling import checked

router = APIRouter(prefix="/api")
fallback = APIRouter(include_in_schema=False)


class NewConversation(JsonBody):
    title: str = Field(default="", max_length=200)
    system_prompt: str = Field(default="", max_length=100_000)
    settings: dict[str, Any] = Field(default_factory=dict)


class ConversationChange(JsonBody):
    title: str | None = Field(default=None, max_length=200)
    settings: dict[str, Any] | None = None
    active_message_id: str | None = None


@router.get("/conversations")
async def list_conversations(
    user: User,
    services: ServicesDep,
    query: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: str | None = None,
) -> dict[str, Any]:
    """Own conversations, latest first. `before`: the `cursor` of the last one of the page before."""
    found = await services.store.list_conversations(user.id, query=query, limit=limit, before=before)
    return {"conversations": [conversation_json(conversation) for conversation in found]}


@router.post("/conversations", status_code=201)
async def create_conversation(body: NewConversation, user: User, services: ServicesDep) -> dict[str, Any]:
    checked(body.settings)
    created = await services.store.create_conversation(
        user.id, title=body.title, system_prompt=body.system_prompt, settings=body.settings
    )
    return conversation_json(created)


@router.get("/conversations/{conversation_id}")
async def get_conversation(conversation_id: str, user: User, services: ServicesDep) -> dict[str, Any]:
    return conversation_json(await services.store.get_conversation(user.id, conversation_id))


@router.patch("/conversations/{conversation_id}")
async def change_conversation(
    conversation_id: str, body: ConversationChange, user: User, services: ServicesDep
) -> dict[str, Any]:
    """Rename, change settings, or show another branch (`active_message_id`)."""
    store = services.store
    await store.get_conversation(user.id, conversation_id)
    if body.settings is not None:
        checked(body.settings)
        await store.set_conversation_settings(user.id, conversation_id, body.settings)
    if body.title is not None:
        await store.rename_conversation(user.id, conversation_id, body.title)
    if body.active_message_id is not None:
        await store.set_active_leaf(user.id, conversation_id, body.active_message_id)
    return conversation_json(await store.get_conversation(user.id, conversation_id))


@router.delete("/conversations/{conversation_id}", status_code=204)
async def delete_conversation(conversation_id: str, user: User, services: ServicesDep) -> Response:
    """Put the conversation aside; a reply that is being written is stopped first."""
    await services.store.get_conversation(user.id, conversation_id)
    await services.generation.stop_conversation(user.id, conversation_id)
    await services.store.delete_conversation(user.id, conversation_id)
    return Response(status_code=204)


@router.post("/conversations/{conversation_id}/restore")
async def restore_conversation(conversation_id: str, user: User, services: ServicesDep) -> dict[str, Any]:
    return conversation_json(await services.store.restore_conversation(user.id, conversation_id))


@router.get("/conversations/{conversation_id}/messages")
async def list_messages(
    conversation_id: str, user: User, services: ServicesDep, leaf_id: str | None = None
) -> dict[str, Any]:
    """The branch that ends in `leaf_id` (default: the active one), root first."""
    path = await services.store.path(user.id, conversation_id, leaf_id)
    return {
        "messages": [message_json(message) for message in path],
        "running_reply_id": services.generation.running(user.id, conversation_id),
    }


@router.get("/engine")
async def engine(user: User, services: ServicesDep) -> dict[str, Any]:
    """What the engine is doing."""
    return engine_json(services.supervisor.status)


_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


@fallback.api_route("/api/{rest:path}", methods=_METHODS)
@fallback.api_route("/v1/{rest:path}", methods=_METHODS)
async def unknown(rest: str, user: User) -> None:
    """Without this, a mistyped address would get a page."""
    raise Missing("There is no such address, or not with this method.")
