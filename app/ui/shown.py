"""What each open page shows, so that nothing of before is painted over what came after it.

Events of a page run side by side, and what they give back is sent some time later. Following a reply paints
only while the page is still told to follow that very reply, and a change of what is shown waits until what
was painted before it has been sent.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress

MAX_PAGES = 10_000
SENT_SECONDS = 5.0
"""After this time a change no longer waits for a picture: whoever it is sent to may be gone."""


class Shown:
    """What one open page shows, as far as it was told."""

    def __init__(self) -> None:
        self.changes = 0
        """Made greater by every change: what was read before one must not be shown after it."""
        self.told = 0
        """Made greater whenever the page is told what to follow, or to follow nothing."""
        self._live: str | None = None  # what the page was told to follow; None: nothing was said yet
        self._following: str | None = None
        self._painting = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    def touch(self) -> None:
        """Note a change. Called when it begins and when it is about to be sent."""
        self.changes += 1

    def tell(self, live: str) -> None:
        """Note what the page is told to follow: a value of its hidden component ``live``, or nothing."""
        self._live = live
        self.told += 1

    async def change(self, live: str) -> None:
        """Note that the page will show something else, with this ``live``; return when what was painted
        before has been sent."""
        self.tell(live)
        with suppress(TimeoutError):
            async with asyncio.timeout(SENT_SECONDS):
                await self._quiet.wait()

    def shows(self, live: str) -> bool:
        """Whether the page is still to show the reply that ``live`` names. It may have been told so again
        since: on a busy server the next tick comes before a page has begun to follow."""
        return self._live is None or _reply(self._live) == _reply(live)

    def follows(self, live: str) -> bool:
        """Whether that is so, and nothing else has begun to follow it since."""
        return self.shows(live) and self._following == live

    @property
    def followed(self) -> bool:
        """Whether the page is being sent the updates of the reply that it was told to follow."""
        return self._following is not None and self.shows(self._following)

    @contextmanager
    def following(self, live: str) -> Iterator[None]:
        """While updates of the reply are sent. Who followed it before is relieved."""
        self._following = live
        try:
            yield
        finally:
            if self._following == live:
                self._following = None

    @contextmanager
    def painting(self) -> Iterator[None]:
        """Around the ``yield`` of an update: a generator is resumed only when that has been sent."""
        self.touch()
        self._painting += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._painting -= 1
            if not self._painting:
                self._quiet.set()


def _reply(live: str) -> str:
    """Without the number that makes every value new."""
    return live.rpartition(":")[0]


class Pages:
    """What all open pages show, by Gradio's session."""

    def __init__(self) -> None:
        self._pages: OrderedDict[str, Shown] = OrderedDict()  # the one used longest ago first

    def of(self, session: str) -> Shown:
        """The page of this session."""
        page = self._pages.pop(session) if session in self._pages else Shown()
        self._pages[session] = page
        if len(self._pages) > MAX_PAGES:
            self._pages.popitem(last=False)
        return page
