"""The product's own API under /api: conversations, the engine's state. Replies are in `replies`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import Field, StrictBool, StrictInt

from app.errors import Missing
from app.routes.deps import ServicesDep, User
from app.routes.json_body import JsonBody
from app.routes.views import conversation_json, engine_json, message_json
from app.sampling import checked
from app.transfer.own import MAX_SYSTEM_PROMPT

router = APIRouter(prefix="/api")
fallback = APIRouter(include_in_schema=False)


class NewConversation(JsonBody):
    title: str = Field(default="", max_length=200)
    system_prompt: str = Field(default="", max_length=MAX_SYSTEM_PROMPT)
    settings: dict[str, Any] = Field(default_factory=dict)


class ConversationChange(JsonBody):
    title: str | None = Field(default=None, max_length=200)
    system_prompt: str | None = Field(default=None, max_length=MAX_SYSTEM_PROMPT)
    settings: dict[str, Any] | None = None
    archived: bool | None = None
    active_message_id: str | None = None


class Consent(JsonBody):
    given: StrictBool


class Rating(JsonBody):
    rating: StrictInt | None


@router.get("/conversations")
async def list_conversations(
    user: User,
    services: ServicesDep,
    query: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: str | None = None,
    archived: bool | None = None,
) -> dict[str, Any]:
    """Own conversations, latest first. `before`: the `cursor` of the last one of the page before."""
    found = await services.store.list_conversations(
        user.id, query=query, limit=limit, before=before, archived=archived
    )
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
    """Rename, archive, change system prompt or settings, or show another branch (`active_message_id`)."""
    store = services.store
    if body.settings is not None:
        await store.get_conversation(user.id, conversation_id)  # a stranger learns nothing of the rest
        checked(body.settings)
    changed = await store.change_conversation(
        user.id,
        conversation_id,
        body.title,
        body.system_prompt,
        body.settings,
        body.archived,
        body.active_message_id,
    )
    return conversation_json(changed)


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
    conversation_id: str,
    user: User,
    services: ServicesDep,
    leaf_id: str | None = None,
    limit: Annotated[int | None, Query(ge=1, le=1000)] = None,
) -> dict[str, Any]:
    """The branch that ends in `leaf_id` (default: the active one), root first; of it the last `limit`."""
    path = await services.store.path(user.id, conversation_id, leaf_id, limit)
    return {
        "messages": [message_json(message) for message in path],
        "running_reply_id": services.generation.running(user.id, conversation_id),
    }


@router.get("/messages/{message_id}")
async def get_message(message_id: str, user: User, services: ServicesDep) -> dict[str, Any]:
    """One message, as it was written."""
    return message_json(await services.store.get_message(user.id, message_id))


@router.put("/replies/{reply_id}/rating")
async def rate_reply(reply_id: str, body: Rating, user: User, services: ServicesDep) -> dict[str, Any]:
    """Like a reply (1), dislike it (-1) or neither (null)."""
    return message_json(await services.store.rate_reply(user.id, reply_id, body.rating))


@router.get("/calibration-consent")
async def get_consent(user: User, services: ServicesDep) -> dict[str, Any]:
    """Whether one's own conversations may be used to calibrate the model."""
    return _consent_json(await services.store.calibration_consent(user.id))


@router.put("/calibration-consent")
async def set_consent(body: Consent, user: User, services: ServicesDep) -> dict[str, Any]:
    """Allow it, or not any more. Profiles that were made meanwhile stay: they hold no text."""
    return _consent_json(await services.store.set_calibration_consent(user.id, body.given))


def _consent_json(given_at: int | None) -> dict[str, Any]:
    return {"given": given_at is not None, "given_at": given_at}


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
