"""OpenAI's chat API, stateless: the client sends the whole conversation each time.

The engine recognises the part that it still holds of the same user. Here, and only here, a client that goes
away aborts the request in the engine: nobody could ever read the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from app.errors import ContextTooLong, ModelNotFound
from app.job import Job
from app.routes.deps import ServicesDep, User
from app.routes.failures import failure_body
from app.routes.openai_request import ChatRequest
from app.sampling import completion_budget
from app.services import Services
from app.sse import EventStream, encode_data, until_disconnect
from db.views import UserView
from tangram.client import CompletionChunk, CompletionRequest, Usage
from tangram.errors import EngineRejected, EngineUnavailable

router = APIRouter(prefix="/v1")


@router.get("/models")
async def models(user: User, services: ServicesDep) -> dict[str, Any]:
    """The one model that is served here."""
    return {"object": "list", "data": [_model(services)]}


@router.get("/models/{model_id:path}")
async def model(model_id: str, user: User, services: ServicesDep) -> dict[str, Any]:
    found = _model(services)
    if model_id != found["id"]:
        raise _unknown_model(model_id, services)
    return found


@router.post("/chat/completions")
async def chat_completions(
    body: ChatRequest, request: Request, user: User, services: ServicesDep
) -> Response:
    """Answer a conversation, whole or as a stream of chunks."""
    engine, templating = services.engine, services.templating
    if body.model != services.supervisor.status.model:
        raise _unknown_model(body.model, services)
    prompt = await asyncio.to_thread(templating.render, body.conversation())
    completion = _completion_request(body, prompt, user, services)
    head = {"id": f"chatcmpl-{secrets.token_hex(16)}", "created": int(time.time()), "model": body.model}
    run = _Run(services, len(prompt), services.queue.stream(user.id, engine.stream(completion)))
    if not body.stream:
        return JSONResponse(await until_disconnect(request, _whole(run, head)))
    first = await until_disconnect(request, run.first())
    return EventStream(_chunks(run, first, head, body.include_usage))


class _Run:
    """One engine request: hands on its chunks and counts it when it ends, however it ends."""

    def __init__(
        self, services: Services, prompt_tokens: int, chunks: AsyncGenerator[CompletionChunk, None]
    ) -> None:
        self._metrics = services.metrics
        self._chunks = chunks
        self._prompt_tokens = prompt_tokens
        self._job = Job("", "", "", prompt_tokens)

    @property
    def usage(self) -> Usage:
        return self._job.usage or Usage(self._prompt_tokens, len(self._job.token_ids), 0)

    async def first(self) -> CompletionChunk | None:
        """The first chunk; what is wrong with the request shows here, before an answer has begun."""
        try:
            chunk = await anext(self._chunks, None)
        except BaseException:
            await self._end("error")
            raise
        if chunk is not None:
            self._job.take(chunk)
        return chunk

    async def chunks(self, first: CompletionChunk | None) -> AsyncGenerator[CompletionChunk, None]:
        ended = "stopped"
        try:
            if first is not None:
                yield first
            async for chunk in self._chunks:
                self._job.take(chunk)
                yield chunk
            ended = "complete"
        except (EngineUnavailable, EngineRejected):
            ended = "error"
            raise
        finally:
            await self._end(ended)

    async def _end(self, status: str) -> None:
        await self._chunks.aclose()
        self._metrics.reply_ended(status, self._job.measure(None))


async def _whole(run: _Run, head: dict[str, Any]) -> dict[str, Any]:
    text, reason = [], None
    async with contextlib.aclosing(run.chunks(await run.first())) as chunks:
        async for chunk in chunks:
            text.append(chunk.text)
            reason = chunk.finish_reason or reason
    message = {"role": "assistant", "content": "".join(text), "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
    return {**head, "object": "chat.completion", "choices": [choice], "usage": _usage(run.usage)}


async def _chunks(
    run: _Run, first: CompletionChunk | None, head: dict[str, Any], include_usage: bool
) -> AsyncGenerator[bytes, None]:
    def event(delta: dict[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        body = {**head, "object": "chat.completion.chunk", "choices": [choice]}
        return encode_data({**body, "usage": None} if include_usage else body)

    yield event({"role": "assistant", "content": ""})
    try:
        async with contextlib.aclosing(run.chunks(first)) as chunks:
            async for chunk in chunks:
                if chunk.text or chunk.finish_reason:
                    yield event({"content": chunk.text} if chunk.text else {}, chunk.finish_reason)
    except (EngineUnavailable, EngineRejected) as error:
        yield encode_data(failure_body(502, f"The engine failed in the middle of the answer: {error}"))
        return
    if include_usage:
        usage = {"object": "chat.completion.chunk", "choices": [], "usage": _usage(run.usage)}
        yield encode_data({**head, **usage})
    yield encode_data("[DONE]")


def _completion_request(
    body: ChatRequest, prompt: list[int], user: UserView, services: Services
) -> CompletionRequest:
    limit = services.supervisor.status.max_model_len
    if limit and len(prompt) >= limit:
        raise ContextTooLong(len(prompt) + 1, limit)
    return CompletionRequest(
        model=body.model,
        prompt=prompt,
        max_tokens=completion_budget(body.token_limit, len(prompt), limit),
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        stop=body.stop_strings,
        stop_token_ids=services.templating.stop_token_ids,
        cache_salt=user.cache_salt,
        extra=body.engine_fields(),
    )


def _model(services: Services) -> dict[str, Any]:
    status = services.supervisor.status
    if not status.ready:  # there is no model without an engine
        raise services.supervisor.not_ready()
    return {
        "id": status.model,
        "object": "model",
        "created": status.since // 1000,
        "owned_by": "tangram",
        "max_model_len": status.max_model_len,
    }


def _unknown_model(name: str, services: Services) -> ModelNotFound:
    return ModelNotFound(
        f"The model {name!r} is not served here; {services.supervisor.status.model!r} is.", param="model"
    )


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
