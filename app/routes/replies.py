"""Sending messages and following replies, as server-sent events.

    event: message   {"user": {...}, "reply": {...}}      once, first, when the turn is stored
    event: queued    {"position"}  the engine has not answered yet; its place in the queue or null
    event: snapshot  {"text"}  the whole text so far
    event: delta     {"text"}  more text
    event: done      {"text", "status", "stats", "error"}

The id of an event is the number of characters so far: a client that reconnects with Last-Event-ID gets
the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Header, Response
from starlette.responses import JSONResponse

from app.errors import Missing
from app.events import Event, ReplyHandle, Sampling
from app.routes.deps import ServicesDep, User
from app.routes.json_body import JsonBody
from app.routes.views import event_json, message_json
from app.sampling import checked
from app.services import Services
from app.sse import STREAM_OR_JSON, EventStream, encode_event

router = APIRouter(prefix="/api")


class SamplingBody(JsonBody):
    """stream: follow the reply in the answer (server-sent events), or wait for its end (JSON)."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stream: bool = True

    def sampling(self) -> Sampling:
        return checked(self.model_dump())


class NewMessage(SamplingBody):
    content: str
    parent_id: str | None = None


class Edit(SamplingBody):
    content: str


@router.post("/conversations/{conversation_id}/messages", responses=STREAM_OR_JSON)
async def send(conversation_id: str, body: NewMessage, user: User, services: ServicesDep) -> Response:
    """Store a message and answer it."""
    handle = await services.generation.send(
        user.id, conversation_id, body.content, body.parent_id, body.sampling()
    )
    return await _answer(services, user.id, handle, body.stream)


@router.post("/messages/{message_id}/edit", responses=STREAM_OR_JSON)
async def edit(message_id: str, body: Edit, user: User, services: ServicesDep) -> Response:
    """Store another version of an own message beside it, and answer that."""
    message = await services.store.get_message(user.id, message_id)
    handle = await services.generation.edit(
        user.id, message.conversation_id, message_id, body.content, body.sampling()
    )
    return await _answer(services, user.id, handle, body.stream)


@router.post("/replies/{reply_id}/regenerate", responses=STREAM_OR_JSON)
async def regenerate(
    reply_id: str, user: User, services: ServicesDep, body: SamplingBody | None = None
) -> Response:
    """Another reply to the same message, beside the first."""
    reply = await services.store.get_message(user.id, reply_id)
    body = body or SamplingBody()
    handle = await services.generation.regenerate(user.id, reply.conversation_id, reply_id, body.sampling())
    return await _answer(services, user.id, handle, body.stream)


@router.post("/replies/{reply_id}/continue", responses=STREAM_OR_JSON)
async def continue_reply(
    reply_id: str, user: User, services: ServicesDep, body: SamplingBody | None = None
) -> Response:
    """Let a reply that was cut short go on in its place."""
    reply = await services.store.get_message(user.id, reply_id)
    body = body or SamplingBody()
    handle = await services.generation.continue_reply(
        user.id, reply.conversation_id, reply_id, body.sampling()
    )
    return await _answer(services, user.id, handle, body.stream)


@router.get("/conversations/{conversation_id}/context")
async def context(
    conversation_id: str, user: User, services: ServicesDep, leaf_id: str | None = None
) -> dict[str, Any]:
    """How full the model's context is, for the branch that ends in `leaf_id` (default: the active one)."""
    return asdict(await services.generation.context(user.id, conversation_id, leaf_id))


@router.get("/replies/{reply_id}")
async def get_reply(reply_id: str, user: User, services: ServicesDep) -> dict[str, Any]:
    message = await services.store.get_message(user.id, reply_id)
    if message.role != "assistant":
        raise Missing("Reply not found.")
    return message_json(message)


@router.get("/replies/{reply_id}/events", responses=STREAM_OR_JSON)
async def follow(
    reply_id: str, user: User, services: ServicesDep, last_event_id: Annotated[str | None, Header()] = None
) -> Response:
    """Follow a reply, from where `Last-Event-ID` says. Works for finished ones too."""
    await get_reply(reply_id, user, services)
    services.generation.check_follow(user.id, reply_id)
    return EventStream(_events(services, user.id, reply_id, _place(last_event_id or "")))


@router.post("/replies/{reply_id}/stop")
async def stop(reply_id: str, user: User, services: ServicesDep) -> dict[str, Any]:
    """Abort the reply; its text is kept."""
    await services.generation.stop(user.id, reply_id)
    return message_json(await services.store.get_message(user.id, reply_id))


async def _answer(services: Services, owner: str, handle: ReplyHandle, stream: bool) -> Response:
    if stream:
        return EventStream(_events(services, owner, handle.reply.id, 0, handle))
    last: Event | None = None
    async with contextlib.aclosing(services.generation.subscribe(owner, handle.reply.id)) as events:
        async for event in events:
            last = event
    reply = message_json(await services.store.get_message(owner, handle.reply.id))
    if last is not None:  # the stored reply may be behind, when the disk is full
        reply |= {"content": last.text, "status": last.status, "stats": dict(last.stats), "error": last.error}
    return JSONResponse({"user": message_json(handle.user), "reply": reply})


def _place(last_event_id: str) -> int:
    """The number of characters that a client has; 0 for what no event of ours was named."""
    return int(last_event_id) if last_event_id.isdecimal() and len(last_event_id) < 20 else 0


async def _events(
    services: Services, owner: str, reply_id: str, after: int, handle: ReplyHandle | None = None
) -> AsyncGenerator[bytes, None]:
    if handle is not None:
        yield encode_event(
            "message", {"user": message_json(handle.user), "reply": message_json(handle.reply)}
        )
    async with contextlib.aclosing(services.generation.subscribe(owner, reply_id, after)) as events:
        async for event in events:
            yield encode_event(event.kind, event_json(event), event.seq)
