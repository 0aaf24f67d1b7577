"""The extension `conversation_id`: an answer within a stored conversation.

The history is the stored one, with its own token ids; of the request's messages only the last one is read.
The turn is stored as if it had been sent in the browser, where it can be watched too.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from app.errors import AccessEnded, BadRequest, EngineNotReady
from app.events import Event, ReplyHandle, Sampling
from app.openai_api.chat_request import ChatRequest
from app.services import Services
from db.views import UserView
from tangram.client import Usage

_NOT_HERE = (
    "tools",
    "logprobs",
    "stop",
    "response_format",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "logit_bias",
)


class StoredTurn:
    """A turn of a stored conversation, as the API answers it."""

    def __init__(self, services: Services, user: UserView, handle: ReplyHandle) -> None:
        self._services = services
        self._user = user
        self.reply_id = handle.reply.id
        self.finish_reason = "stop"
        self.usage = Usage(0, 0, 0)

    async def texts(self) -> AsyncGenerator[str, None]:
        """The text as it comes. Whoever stops reading stops the reply. Raises EngineNotReady,
        RequestStopped."""
        generation, last = self._services.generation, None
        try:
            async with contextlib.aclosing(generation.subscribe(self._user.id, self.reply_id)) as events:
                async for event in events:
                    last = event
                    if event.kind in ("snapshot", "delta") and event.text:
                        yield event.text
        finally:
            if last is None or last.kind != "done":
                await generation.stop(self._user.id, self.reply_id)
        await self._ended(last)

    async def _ended(self, last: Event | None) -> None:
        if last is None or last.status in ("error", "interrupted"):
            raise EngineNotReady((last and last.error) or "The reply could not be finished.")
        if last.status == "stopped" and last.why is not None:
            raise last.why
        if last.status == "stopped" and self._services.queue.is_shut_out(self._user.id):
            raise AccessEnded
        stored = await self._services.store.get_message(self._user.id, self.reply_id)
        self.finish_reason = stored.finish_reason or "stop"
        counts = [last.stats.get(f"{kind}_tokens") or 0 for kind in ("prompt", "completion", "cached")]
        self.usage = Usage(*counts)


async def begin_turn(body: ChatRequest, services: Services, user: UserView) -> StoredTurn:
    """Store the last message as a turn of the named conversation and have it answered.

    Raises BadRequest for fields that such an answer does not have, and as `GenerationService.send`.
    """
    if body.answers != 1:
        raise BadRequest("Only n=1 together with conversation_id.", param="n")
    for name in _NOT_HERE:
        if getattr(body, name):
            raise BadRequest(f"{name} is not supported together with conversation_id.", param=name)
    last = len(body.messages) - 1
    message = body.messages[last]
    if message.role != "user":
        raise BadRequest("The last message must be a user's.", param=f"messages.{last}.role")
    content = str(message.as_template_sees_it(last, tools=False)["content"])
    sampling = Sampling(body.temperature, body.top_p, body.token_limit, body.seed)
    handle = await services.generation.send(user.id, body.conversation_id or "", content, sampling=sampling)
    return StoredTurn(services, user, handle)
