"""How much of Gradio's queue one user may hold: open pages, their events and their streams."""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from typing import TypeVar

from gradio.queueing import Queue

from app.errors import AppError

_Key = TypeVar("_Key", bound=Hashable)

USER_SESSIONS = 32
USER_EVENTS = 64
USER_STREAMS = 64
ALL_SESSIONS = 1800
"""Below the 2,000 after which Gradio drops the messages of sessions that may still wait for them."""


class TooManyEvents(AppError):
    """This user, or everybody together, has more open on the pages than the server holds."""

    status = 429
    code = "too_many_requests"
    retry_after = 5


class NotYourSession(AppError):
    """The session of a page is in use by somebody else."""

    status = 404
    code = "not_found"


class PageSessions:
    """Which user each session of a page belongs to. An idle one is forgotten for a newer one."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._owners: OrderedDict[str, str] = OrderedDict()  # the one used longest ago first
        self._joining: Counter[str] = Counter()  # by session
        self._streams: Counter[tuple[str, str]] = Counter()  # by kind and user
        self._streaming: Counter[str] = Counter()  # by session

    def __len__(self) -> int:
        return len(self._owners)

    @contextlib.contextmanager
    def joining(self, user: str, session: str) -> Iterator[None]:
        """While one event of ``user`` is put into the queue. Raises TooManyEvents, NotYourSession."""
        events = sum(event.username == user for event in self._queue.event_ids_to_events.values())
        events += sum(count for held, count in self._joining.items() if self._owners.get(held) == user)
        if events >= USER_EVENTS:
            raise TooManyEvents("Too much is going on in your open pages. Close some, or wait a little.")
        self._own(user, session)
        with _counted(self._joining, session):
            yield

    @contextlib.contextmanager
    def streaming(self, kind: str, user: str, session: str) -> Iterator[None]:
        """While an answer of ``kind`` that lasts is sent. Raises TooManyEvents, NotYourSession."""
        if self._owners.get(session, user) != user:
            raise NotYourSession("There is no such session.")
        if self._streams[kind, user] >= USER_STREAMS:
            raise TooManyEvents("Too many of your pages are open. Close some.")
        with _counted(self._streams, (kind, user)), _counted(self._streaming, session):
            yield

    def _own(self, user: str, session: str) -> None:
        owner, busy = self._owners.get(session), self._busy()
        if owner not in (None, user) and session in busy:
            raise NotYourSession("There is no such session.")
        if owner != user:  # new, or of a page that stayed open while somebody else signed in
            self._forget(session)
            own = [held for held, holder in self._owners.items() if holder == user]
            if len(own) >= USER_SESSIONS:
                self._make_room(own, busy)
            elif len(self._owners) >= ALL_SESSIONS:
                self._make_room(list(self._owners), busy)
        self._owners[session] = user
        self._owners.move_to_end(session)

    def _busy(self) -> set[str]:
        events = {event.session_hash for event in self._queue.event_ids_to_events.values()}
        return events | set(self._joining) | set(self._streaming)

    def _make_room(self, candidates: list[str], busy: set[str]) -> None:
        idle = next((session for session in candidates if session not in busy), None)
        if idle is None:
            raise TooManyEvents("Too many pages are open at once. Close some, or try again in a moment.")
        self._forget(idle)

    def _forget(self, session: str) -> None:
        self._owners.pop(session, None)
        self._queue.pending_messages_per_session.pop(session, None)
        self._queue.pending_event_ids_session.pop(session, None)


@contextlib.contextmanager
def _counted(counter: Counter[_Key], key: _Key) -> Iterator[None]:
    counter[key] += 1
    try:
        yield
    finally:
        counter[key] -= 1
        if not counter[key]:
            del counter[key]
