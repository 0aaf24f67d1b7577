"""One request to the API as one or several requests to the engine, counted when it ends, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from app.active import Origin
from app.errors import RequestStopped
from app.job import Job
from app.reply_runner import is_engines_fault
from app.services import Services
from tangram.client import CompletionChunk, CompletionRequest, EngineClient, Usage
from tangram.errors import EngineRejected, EngineUnavailable


class Run:
    """The chunks of several prompts, one prompt after another, in one place of the owner's in the queue.

    The answers to prompt k have the indices k * n to k * n + n - 1.
    """

    def __init__(
        self, services: Services, owner: str, engine: EngineClient, requests: Sequence[CompletionRequest]
    ) -> None:
        self._services = services
        self._job = Job("", "", "", sum(len(request.prompt) for request in requests))
        self._owner = owner
        self._stopped: asyncio.Future[RequestStopped] = asyncio.get_running_loop().create_future()
        self._usages: list[Usage] = []
        self._ended = False
        self._chunks = services.queue.stream(owner, self._read(engine, requests))

    @property
    def usage(self) -> Usage:
        """What the engine counted so far."""
        return Usage(
            self._job.prompt_tokens,
            sum(usage.completion_tokens for usage in self._usages),
            sum(usage.cached_tokens for usage in self._usages),
        )

    async def first(self) -> CompletionChunk | None:
        """The first chunk; what is wrong with the request shows here, before an answer has begun."""
        try:
            return await anext(self._chunks, None)
        except BaseException as error:
            await self._end("error", error)
            raise

    async def chunks(self, first: CompletionChunk | None) -> AsyncGenerator[CompletionChunk, None]:
        """All chunks, `first` being what `first()` gave."""
        ended, failure = "stopped", None
        try:
            if first is not None:
                yield first
            async for chunk in self._chunks:
                yield chunk
            ended = "complete"
        except (EngineUnavailable, EngineRejected) as error:
            ended, failure = "error", error
            raise
        finally:
            await self._end(ended, failure)

    async def aclose(self) -> None:
        """Stop, if it has not ended."""
        await self._end("stopped", None)

    async def _read(
        self, engine: EngineClient, requests: Sequence[CompletionRequest]
    ) -> AsyncGenerator[CompletionChunk, None]:
        for place, request in enumerate(requests):
            with self._services.active.begin(
                Origin(self._owner), tokens=lambda: len(self._job.token_ids), stop=self._stop
            ) as active:
                ranks = self._services.ranks
                rank = await ranks.of_prompt(self._owner, request.prompt)
                active.at_engine = True
                named = replace(request, request_id=active.name, rank=rank)
                answer = unless(self._stopped, engine.stream(named))
                async with ranks.working(rank), contextlib.aclosing(answer) as chunks:
                    async for chunk in chunks:
                        self._job.take(chunk)
                        if chunk.usage is not None:
                            self._usages.append(chunk.usage)
                        yield replace(chunk, index=place * request.n + chunk.index)

    def _stop(self, why: RequestStopped) -> None:
        if not self._stopped.done():
            self._stopped.set_result(why)

    async def _end(self, status: str, failure: BaseException | None) -> None:
        await self._chunks.aclose()
        if self._ended:
            return
        self._ended = True
        if is_engines_fault(failure):
            self._services.supervisor.check_now()
        self._job.usage = self.usage if self._usages else None
        self._services.metrics.reply_ended(status, self._job.measure(None))


async def unless(
    stopped: asyncio.Future[RequestStopped], chunks: AsyncGenerator[CompletionChunk, None]
) -> AsyncGenerator[CompletionChunk, None]:
    """The chunks, until somebody stops them: what they say is raised then, without waiting for a chunk."""
    async with contextlib.aclosing(chunks):
        while True:
            step = asyncio.ensure_future(anext(chunks, None))
            either: set[asyncio.Future[Any]] = {step, stopped}
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not step.done():
                    step.cancel()
                    await asyncio.wait({step})
            if stopped.done():
                if not step.cancelled():
                    step.exception()  # seen: it no longer matters
                raise stopped.result()
            chunk = step.result()
            if chunk is None:
                return
            yield chunk


def usage_json(usage: Usage) -> dict[str, Any]:
    """Token counts as OpenAI's API writes them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
