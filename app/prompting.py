"""From a branch of a stored conversation to what the engine is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from app.context import Branch, Window, fit
from app.events import Sampling
from app.sampling import completion_budget, resolve
from app.supervisor import EngineSupervisor
from app.templating import Templating
from app.tokenising import Tokenising
from db.errors import NotFound
from db.store import Store
from db.views import ConversationView, MessageView
from tangram.client import CompletionRequest


class Prompting:
    """Makes requests for replies."""

    def __init__(self, store: Store, supervisor: EngineSupervisor, tokenising: Tokenising) -> None:
        self._tokenising = tokenising
        self._store = store
        self._supervisor = supervisor

    async def request(
        self,
        conversation: ConversationView,
        templating: Templating,
        branch: Branch,
        sampling: Sampling | None,
        *,
        spent: int = 0,
    ) -> tuple[CompletionRequest, Window]:
        """What to ask for a reply to the end of `branch`, and which part of it fits.

        spent: tokens that the reply already has of those that it may have.
        Raises ContextTooLong, BadRequest, NotFound (db).
        """
        limit, most = self._supervisor.status.max_model_len, self._supervisor.max_reply_tokens
        user = await self._store.user_by_id(conversation.user_id)
        if user is None:
            raise NotFound("user")
        chosen = resolve(sampling, conversation.settings, templating.text.defaults, most)
        wanted = max(1, (chosen.max_tokens or most) - spent)
        window = await self._tokenising.run(user.id, fit, templating, branch, limit, wanted)
        request = CompletionRequest(
            model=self._supervisor.status.model,
            prompt=window.prompt,
            max_tokens=completion_budget(wanted, len(window.prompt), limit),
            temperature=chosen.temperature,
            top_p=chosen.top_p,
            seed=chosen.seed,
            stop_token_ids=templating.stop_token_ids,
            cache_salt=user.cache_salt,
        )
        return request, window


def draft(conversation: ConversationView, path: Sequence[MessageView], content: str) -> MessageView:
    """A user's message that is not stored yet, as the next one of a path; its ids are to be filled in."""
    return MessageView(
        id="",
        user_id=conversation.user_id,
        conversation_id=conversation.id,
        parent_id=path[-1].id if path else None,
        role="user",
        content=content,
        token_ids=(),
        status="complete",
        finish_reason=None,
        error=None,
        stats={},
        model=None,
        created_at=0,
        updated_at=0,
        sibling_index=0,
        sibling_count=1,
    )


def with_ids(message: MessageView, ids: Sequence[int]) -> MessageView:
    """The message with other token ids."""
    return replace(message, token_ids=tuple(ids))
