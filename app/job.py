"""One running reply: its text so far, and those who watch it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.context import CUT, LEFT_OUT, STARTS_AT
from app.errors import RequestStopped
from app.events import Event
from app.fairness import Ticket
from db.views import FinalStatus, MessageView
from tangram.client import CompletionChunk, Usage

_UPDATE_SECONDS = 0.02
_LEAST_RATED_SECONDS = 0.2

RESUMED = "resumed"
"""In a reply's stats: how many times it went on by itself after a restart."""
RANK, RANKS = "engine", "engines"
"""In a reply's stats: which of the engine's ranks wrote it, and of how many; absent where there is one."""
FACTS = (LEFT_OUT, STARTS_AT, CUT, RESUMED)
"""What is in a reply's stats before the engine is asked."""

UNSAVED = (
    "The reply could not be saved. Is the disk full? It is tried again by itself; once there is space, "
    "the conversation goes on."
)


@dataclass
class Job:
    """State of a generation. Text only grows, so a subscriber's place is a number of characters.

    facts: numbers for the stats that were known from the start (app.context).
    prior: how many of `token_ids` an earlier run wrote; this one continues them.
    ticket: its place in the queue, which the runner gives back.
    ending: how to settle it: what somebody asked for (Stop, or the app going down), else how it went.
    why: what its client is told of that, where somebody else asked.
    settled: it has ended for its watchers. unsaved: it has ended, but the database has not taken it yet.
    saving: held while it is being given to the database.
    """

    owner: str
    conversation_id: str
    reply_id: str
    prompt_tokens: int
    ticket: Ticket | None = None
    status: str = "pending"
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    usage: Usage | None = None
    finish_reason: str | None = None
    error: str | None = None
    stats: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    prior: int = 0
    ending: FinalStatus | None = None
    why: RequestStopped | None = None
    end: asyncio.Event = field(default_factory=asyncio.Event)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    unsaved: bool = False
    saving: asyncio.Lock = field(default_factory=asyncio.Lock)
    began: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None
    first_tokens: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def of(
        cls,
        reply: MessageView,
        prompt_tokens: int,
        facts: Mapping[str, Any],
        ticket: Ticket | None = None,
    ) -> Job:
        """The job of a reply that was just stored, still empty."""
        return cls(
            reply.user_id,
            reply.conversation_id,
            reply.id,
            prompt_tokens=prompt_tokens,
            facts=dict(facts),
            ticket=ticket,
        )

    @classmethod
    def going_on(cls, reply: MessageView) -> Job:
        """The job of a reply that has text already; `aim` tells what it is asked."""
        before = {name: reply.stats[name] for name in FACTS if name in reply.stats}
        return cls(
            reply.user_id,
            reply.conversation_id,
            reply.id,
            prompt_tokens=int(reply.stats.get("prompt_tokens") or 0),
            text=reply.content,
            token_ids=list(reply.token_ids),
            stats=dict(reply.stats),
            facts=before,
            prior=len(reply.token_ids),
        )

    def aim(self, written: Sequence[int], prompt_tokens: int, facts: Mapping[str, Any]) -> None:
        """Set what a job that goes on begins with.

        Args:
            written: ids of its text so far.
            prompt_tokens: length of the prompt, these included.
        """
        self.token_ids, self.prior = list(written), len(written)
        self.prompt_tokens = prompt_tokens - len(written)
        self.facts |= facts

    def take(self, chunk: CompletionChunk) -> None:
        """Add what the engine sent."""
        if chunk.token_ids:
            self.last_token = time.monotonic()
            if self.first_token is None:
                self.first_token, self.first_tokens = self.last_token, len(chunk.token_ids)
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.usage = chunk.usage or self.usage
        self.notify()

    def ask_to_end(self, how: FinalStatus, why: RequestStopped | None = None) -> None:
        """Have the generation stop soon and settle as `how`. The first to ask decides."""
        if self.ending is None:
            self.ending, self.why = how, why
            self.end.set()

    @property
    def told(self) -> tuple[str, str | None]:
        """(status, error) as a watcher sees them; what is to be stored stays in `status` and `error`."""
        return ("error", UNSAVED) if self.unsaved else (self.status, self.error)

    @property
    def position(self) -> int | None:
        """Its place in the queue for the engine: 1 is next; None when it does not wait there."""
        return (self.ticket.position or None) if self.ticket is not None else None

    def notify(self) -> None:
        """Wake the subscribers."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def measure(self, kept_fraction: float | None) -> dict[str, Any]:
        """The numbers under the reply: tokens, milliseconds, tokens a second, share of the cache kept.

        tokens_per_second is None when the tokens came at once or nearly so: that is no speed of the engine.
        """
        now = time.monotonic()
        completion = len(self.token_ids)
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.usage.cached_tokens if self.usage else None,
            "completion_tokens": completion,
            "duration_ms": round((now - self.began) * 1000),
            "ttft_ms": round((self.first_token - self.began) * 1000) if self.first_token else None,
            "tokens_per_second": self._rate(completion),
            "kept_fraction": kept_fraction,
            **self.facts,
        }

    def _rate(self, completion: int) -> float | None:
        if self.first_token is None or self.last_token is None:
            return None
        span, later = self.last_token - self.first_token, completion - self.prior - self.first_tokens
        return round(later / span, 2) if span >= _LEAST_RATED_SECONDS and later > 0 else None

    async def watch(self, after: int) -> AsyncGenerator[Event, None]:
        """Events from character `after` on, until the reply is settled. Slow readers get larger deltas."""
        seen: int | None = after if 0 < after <= len(self.text) else None
        told: tuple[int | None] | None = None
        while True:
            changed = self._changed
            settled = self.settled.is_set()
            status, error = self.told
            if seen is None or seen > len(self.text):
                if self.text or settled:
                    seen = len(self.text)
                    yield Event("snapshot", self.text, status, seen, self.stats, error)
            elif seen < len(self.text):
                delta, seen = self.text[seen:], len(self.text)
                yield Event("delta", delta, status, seen, self.stats)
            if self.first_token is None and not settled and (place := (self.position,)) != told:
                told = place
                yield Event("queued", "", status, seen or 0, position=place[0])
            if settled:
                yield Event("done", self.text, status, len(self.text), self.stats, error, why=self.why)
                return
            await changed.wait()
            await asyncio.sleep(_UPDATE_SECONDS)  # gather what comes at once into one event


async def replay(message: MessageView, after: int) -> AsyncGenerator[Event, None]:
    """The events of a reply that is finished."""
    text, size = message.content, len(message.content)
    if not 0 < after <= size:
        yield Event("snapshot", text, message.status, size, message.stats, message.error)
    elif after < size:
        yield Event("delta", text[after:], message.status, size, message.stats)
    yield Event("done", text, message.status, size, message.stats, message.error)
