"""Requests that the engine works on, whose they are, and how an administrator stops one.

The engine knows a request by a name that we make. It names the row that the request leaves behind, too, so
the owner of an idle conversation's memory is still known here, until the app ends.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from app.errors import AccessEnded, RequestStopped

MOST_KNOWN = 20_000
_NAME = re.compile(r"cmpl-([0-9a-f]{24})\b")


@dataclass(frozen=True)
class Origin:
    """Whose a request is. conversation_id: "" for one of the stateless API."""

    owner: str
    conversation_id: str = ""


@dataclass(eq=False)
class ActiveRequest:
    """One that has not ended.

    tokens: how many it has written. stop: end it soon, keeping its text, and tell its client why.
    """

    name: str
    origin: Origin
    tokens: Callable[[], int]
    stop: Callable[[RequestStopped], None]
    began: float = field(default_factory=time.monotonic)
    at_engine: bool = False

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.began


class ActiveRequests:
    """One per process."""

    def __init__(self, most_known: int = MOST_KNOWN) -> None:
        self._most = most_known
        self._running: dict[str, ActiveRequest] = {}
        self._known: OrderedDict[str, Origin] = OrderedDict()

    def __len__(self) -> int:
        return len(self._running)

    @contextlib.contextmanager
    def begin(
        self, origin: Origin, *, tokens: Callable[[], int], stop: Callable[[RequestStopped], None]
    ) -> Iterator[ActiveRequest]:
        """Name a request, and know it until it ends."""
        request = ActiveRequest(secrets.token_hex(12), origin, tokens, stop)
        self._running[request.name] = request
        self._known[request.name] = origin
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        try:
            yield request
        finally:
            del self._running[request.name]

    def running(self) -> list[ActiveRequest]:
        """Those that have not ended, oldest first."""
        return list(self._running.values())

    def origin(self, sequence: str) -> Origin | None:
        """Whose row of that id, as the engine lists them, it is; None for one of before the app's start."""
        found = _NAME.search(sequence)
        return self._known.get(found[1]) if found else None

    def stop_owner(self, owner: str) -> None:
        """End all requests of a user soon, who was shut out."""
        for request in self.running():
            if request.origin.owner == owner:
                request.stop(AccessEnded())

    def stop(self, name: str) -> ActiveRequest | None:
        """End a request soon, as an administrator wants it. None: it had ended already."""
        request = self._running.get(name)
        if request is not None:
            request.stop(RequestStopped())
        return request
