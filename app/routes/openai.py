"""OpenAI's chat API. Without the extension `conversation_id` it is stateless: the client sends all each time.

The engine recognises the part that it still holds of the same user. Here, and only here, a client that goes
away aborts the request in the engine: nobody could ever read the rest.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from app.chat_template import Message
from app.errors import AppError, ContextTooLong, ModelNotFound, RequestStopped
from app.openai_api.chat_answer import ChatAnswer
from app.openai_api.chat_request import ChatRequest
from app.openai_api.run import Run, usage_json
from app.openai_api.stored import StoredTurn, begin_turn
from app.openai_api.tool_calls import ToolUse, call_style, tool_use
from app.reply_memory import spoken_ids
from app.routes.deps import ServicesDep, User
from app.routes.failures import failure_body
from app.sampling import completion_budget
from app.services import Services
from app.sse import STREAM_OR_JSON, EventStream, encode_data, until_disconnect
from app.templating import Templating
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
        raise unknown_model(model_id, services)
    return found


@router.post("/chat/completions", responses=STREAM_OR_JSON)
async def chat_completions(
    body: ChatRequest, request: Request, user: User, services: ServicesDep
) -> Response:
    """Answer a conversation, whole or as a stream of chunks."""
    engine, templating = services.engine, services.templating
    if body.model != services.supervisor.status.model:
        raise unknown_model(body.model, services)
    body.check()
    if body.conversation_id is not None:
        return await _within(body, request, user, services)
    services.queue.admit(user.id)
    asked = await services.tokenising.run(user.id, _ask, body, user, services, templating)
    run = Run(services, user.id, engine, [asked.request])
    stream = _Stream(body)
    if not body.stream:
        return JSONResponse(await until_disconnect(request, _whole(run, asked, stream)))
    first = await until_disconnect(request, run.first())
    return EventStream(_chunks(run, first, asked, stream), run)


@dataclass(frozen=True)
class _Asked:
    """What the engine is asked for a conversation, and what is needed to understand its answer."""

    owner: str
    services: Services
    templating: Templating
    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]]
    use: ToolUse | None
    request: CompletionRequest

    def answers(self) -> list[ChatAnswer]:
        spell = self.templating.spell
        top = self.request.logprobs
        return [ChatAnswer(index, self.use, top, spell) for index in range(self.request.n)]

    def remember(self, answer: ChatAnswer) -> None:
        """Keep the answer's token ids for the client's next request."""
        if self.use is not None and self.use.prefix:
            return  # the template would not write it like this
        ids = spoken_ids(self.templating, answer.token_ids, answer.raw_text, answer.stop_string)
        if ids is not None:
            self.services.reply_memory.remember(
                self.owner,
                self.templating,
                [*self.messages, answer.message],
                self.tools,
                [*self.request.prompt, *ids],
            )


class _Stream:
    """The events of one answer."""

    def __init__(
        self, body: ChatRequest, name: str | None = None, more: dict[str, Any] | None = None
    ) -> None:
        self.head = {
            "id": f"chatcmpl-{name or secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": None,
            **(more or {}),
        }
        self._include_usage = body.include_usage

    def chunk(self, choice: dict[str, Any]) -> bytes:
        event = {**self.head, "object": "chat.completion.chunk", "choices": [choice]}
        return encode_data({**event, "usage": None} if self._include_usage else event)

    def end(self, usage: Usage) -> bytes:
        event = {**self.head, "object": "chat.completion.chunk", "choices": [], "usage": usage_json(usage)}
        return (encode_data(event) if self._include_usage else b"") + encode_data("[DONE]")

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {**self.head, "object": "chat.completion", "choices": choices, "usage": usage_json(usage)}


def _ask(body: ChatRequest, user: UserView, services: Services, templating: Templating) -> _Asked:
    use = tool_use(body, templating.text)
    has_tools = call_style(templating.text) is not None
    messages = [one.as_template_sees_it(index, has_tools) for index, one in enumerate(body.messages)]
    tools = body.offered_tools
    templating.text.check_length(_characters([messages, tools]), services.supervisor.status.max_model_len)
    prompt = services.reply_memory.prompt(user.id, templating, messages, tools)
    if use is not None:
        prompt += templating.text.encode(use.prefix)
    request = CompletionRequest(
        model=body.model,
        prompt=prompt,
        max_tokens=token_budget(services, body.token_limit, len(prompt)),
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        stop=body.stop_strings,
        stop_token_ids=templating.stop_token_ids,
        n=body.answers,
        logprobs=body.wanted_logprobs,
        cache_salt=user.cache_salt,
        extra={**body.engine_fields(), **body.format_fields(), **(use.engine_fields if use else {})},
    )
    return _Asked(user.id, services, templating, messages, tools, use, request)


def _characters(value: Any) -> int:
    """Characters that a value is written with at least, however deep it is."""
    found, left = 0, [value]
    while left:  # no recursion: the client chooses the depth
        one = left.pop()
        if isinstance(one, str):
            found += len(one)
        elif isinstance(one, Mapping):
            left += [*one, *one.values()]
        elif isinstance(one, list | tuple):
            left += one
        else:
            found += 1
    return found


async def _whole(run: Run, asked: _Asked, stream: _Stream) -> dict[str, Any]:
    answers = asked.answers()
    async with contextlib.aclosing(run.chunks(await run.first())) as chunks:
        async for chunk in chunks:
            _take(answers, chunk, asked)
    return stream.whole([answer.whole() for answer in answers], run.usage)


async def _chunks(
    run: Run, first: CompletionChunk | None, asked: _Asked, stream: _Stream
) -> AsyncGenerator[bytes, None]:
    answers = asked.answers()
    for answer in answers:
        yield stream.chunk(answer.begin())
    try:
        async with contextlib.aclosing(run.chunks(first)) as chunks:
            async for chunk in chunks:
                for choice in _take(answers, chunk, asked):
                    yield stream.chunk(choice)
    except (EngineUnavailable, EngineRejected, RequestStopped) as error:
        yield broken_off(error)
        return
    yield stream.end(run.usage)


def _take(answers: Sequence[ChatAnswer], chunk: CompletionChunk, asked: _Asked) -> list[dict[str, Any]]:
    if not chunk.token_ids and not chunk.text and not chunk.finish_reason:
        return []  # the one that carries the usage
    answer = answers[chunk.index]
    choices = answer.take(chunk)
    if chunk.finish_reason in ("stop", "length"):
        asked.remember(answer)
    return choices


async def _within(body: ChatRequest, request: Request, user: UserView, services: Services) -> Response:
    """Answer within a stored conversation."""
    turn = await begin_turn(body, services, user)
    stream = _Stream(body, turn.reply_id, {"conversation_id": body.conversation_id})
    if body.stream:
        return EventStream(_stored_chunks(turn, stream))
    text = "".join(await until_disconnect(request, _all(turn)))
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": turn.finish_reason}
    return JSONResponse(stream.whole([choice], turn.usage))


async def _all(turn: StoredTurn) -> list[str]:
    async with contextlib.aclosing(turn.texts()) as texts:
        return [text async for text in texts]


async def _stored_chunks(turn: StoredTurn, stream: _Stream) -> AsyncGenerator[bytes, None]:
    def choice(delta: dict[str, Any], reason: str | None = None) -> bytes:
        return stream.chunk({"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason})

    yield choice({"role": "assistant", "content": ""})
    try:
        async with contextlib.aclosing(turn.texts()) as texts:
            async for text in texts:
                yield choice({"content": text})
    except AppError as error:
        yield broken_off(error)
        return
    yield choice({}, turn.finish_reason)
    yield stream.end(turn.usage)


def token_budget(services: Services, asked: int | None, prompt_tokens: int) -> int:
    """Tokens that an answer may have. Raises ContextTooLong when the prompt leaves none."""
    limit = services.supervisor.status.max_model_len
    if limit and prompt_tokens >= limit:
        raise ContextTooLong(prompt_tokens + 1, limit)
    return completion_budget(asked or services.supervisor.max_reply_tokens, prompt_tokens, limit)


def broken_off(error: Exception) -> bytes:
    """The event that ends a stream in the middle of an answer."""
    if isinstance(error, RequestStopped):
        return encode_data(failure_body(error.status, error.message, code=error.code))
    words = f"The engine failed in the middle of the answer: {error}"
    return encode_data(failure_body(502, words, code="engine_failed"))


def unknown_model(name: str, services: Services) -> ModelNotFound:
    return ModelNotFound(
        f"The model {name!r} is not served here; {services.supervisor.status.model!r} is.", param="model"
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
