"""What travels between a generation and those who watch it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from app.errors import RequestStopped
from db.views import MessageView

EventKind = Literal["queued", "snapshot", "delta", "done"]


@dataclass(frozen=True, slots=True)
class Event:
    """One step of a reply, as a subscriber sees it.

    `seq` is the number of characters of the reply that the subscriber has after this event, so `seq` of the
    last event seen, given as `after` to `subscribe`, resumes without a gap or a repetition.

    kind      text                                        when
    queued    ""                                          the engine has not answered yet; `position` in the
                                                          queue (1: next), None where it does not wait there;
                                                          again whenever the position changes
    snapshot  the whole reply so far (replace what you    first event of a subscription from the start, or
              show)                                       when the text does not continue what you have
    delta     the new characters (append)                 whenever there are some
    done      the whole reply                             last event; `status` is final. `why`: who may has
                                                          ended it, unless its reader did
    """

    kind: EventKind
    text: str
    status: str
    seq: int
    stats: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    position: int | None = None
    why: RequestStopped | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one reply. None leaves the choice to the conversation, then to the model's defaults."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ReplyHandle:
    """A turn that was just committed: the user's message and the (still empty) reply to it."""

    user: MessageView
    reply: MessageView
