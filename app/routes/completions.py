"""OpenAI's older API: the model continues a text, without a chat template."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from app.errors import RequestStopped
from app.openai_api.completion_body import DEFAULT_TOKENS, CompletionBody
from app.openai_api.logprobs import completion_logprobs
from app.openai_api.run import Run, usage_json
from app.routes.deps import ServicesDep, User
from app.routes.openai import broken_off, token_budget, unknown_model
from app.sse import STREAM_OR_JSON, EventStream, encode_data, until_disconnect
from app.templating import Templating
from tangram.client import CompletionChunk, CompletionRequest, TokenLogprob
from tangram.errors import EngineRejected, EngineUnavailable

router = APIRouter(prefix="/v1")


@router.post("/completions", responses=STREAM_OR_JSON)
async def completions(body: CompletionBody, request: Request, user: User, services: ServicesDep) -> Response:
    """Continue one text or several, whole or as a stream of chunks."""
    engine, templating = services.engine, services.templating
    if body.model != services.supervisor.status.model:
        raise unknown_model(body.model, services)
    body.check()
    services.queue.admit(user.id)
    limit = services.supervisor.status.max_model_len
    prompts = await services.tokenising.run(user.id, body.prompts, templating.text, limit)
    asked = [
        CompletionRequest(
            model=body.model,
            prompt=prompt,
            max_tokens=token_budget(services, body.max_tokens or DEFAULT_TOKENS, len(prompt)),
            temperature=body.temperature,
            top_p=body.top_p,
            seed=body.seed,
            stop=body.stop_strings,
            n=body.answers,
            logprobs=body.logprobs,
            cache_salt=user.cache_salt,
            extra=body.engine_fields(),
        )
        for prompt in prompts
    ]
    run = Run(services, user.id, engine, asked)
    answer = _Answer(body, templating, prompts)
    if not body.stream:
        return JSONResponse(await until_disconnect(request, _whole(run, answer)))
    first = await until_disconnect(request, run.first())
    return EventStream(_chunks(run, first, answer, body.include_usage), run)


class _Answer:
    """The choices of an answer as they come: text, and where an echo is wanted the prompt before it."""

    def __init__(
        self, body: CompletionBody, templating: Templating, prompts: Sequence[Sequence[int]]
    ) -> None:
        self.head = {
            "id": f"cmpl-{secrets.token_hex(16)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": None,
        }
        self._top = body.logprobs
        self._spell = templating.spell
        echoes = [templating.text.decode(prompt) if body.echo else "" for prompt in prompts]
        self.echoes = [echo for echo in echoes for _ in range(body.answers)]
        self._texts = [""] * len(self.echoes)
        self._reasons: list[str | None] = [None] * len(self.echoes)
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in self.echoes]

    def take(self, chunk: CompletionChunk) -> dict[str, Any] | None:
        """The choice of a stream that follows; None for a chunk that tells nothing."""
        if not chunk.text and not chunk.finish_reason and not chunk.logprobs:
            return None
        place = chunk.index
        offset = sum(len(self._spell(one.token).decode(errors="replace")) for one in self._logprobs[place])
        logprobs = self._told(chunk.logprobs, offset) if chunk.logprobs else None
        self._texts[place] += chunk.text
        self._reasons[place] = chunk.finish_reason
        self._logprobs[place] += chunk.logprobs
        return self.choice(place, chunk.text, chunk.finish_reason, logprobs)

    def choices(self) -> list[dict[str, Any]]:
        """The choices of an answer that is not streamed."""
        return [
            self.choice(
                place,
                self.echoes[place] + text,
                self._reasons[place],
                None if self._top is None else self._told(self._logprobs[place], 0),
            )
            for place, text in enumerate(self._texts)
        ]

    @staticmethod
    def choice(
        place: int, text: str, reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {"index": place, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _told(self, found: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        return completion_logprobs(found, self._top or 0, self._spell, offset)


async def _whole(run: Run, answer: _Answer) -> dict[str, Any]:
    async with contextlib.aclosing(run.chunks(await run.first())) as chunks:
        async for chunk in chunks:
            answer.take(chunk)
    return {**answer.head, "choices": answer.choices(), "usage": usage_json(run.usage)}


async def _chunks(
    run: Run, first: CompletionChunk | None, answer: _Answer, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    def event(choice: dict[str, Any]) -> bytes:
        body = {**answer.head, "choices": [choice]}
        return encode_data({**body, "usage": None} if include_usage else body)

    for place, echo in enumerate(answer.echoes):
        if echo:
            yield event(answer.choice(place, echo))
    try:
        async with contextlib.aclosing(run.chunks(first)) as chunks:
            async for chunk in chunks:
                if choice := answer.take(chunk):
                    yield event(choice)
    except (EngineUnavailable, EngineRejected, RequestStopped) as error:
        yield broken_off(error)
        return
    if include_usage:
        yield encode_data({**answer.head, "choices": [], "usage": usage_json(run.usage)})
    yield encode_data("[DONE]")
