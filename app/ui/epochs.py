"""Whether anything else was shown on a page while an update for it was being made."""

from collections import OrderedDict

MAX_PAGES = 10_000


class Epochs:
    """A number for each open page, which every change of what it shows makes greater.

    What was read before such a change must not be shown after it.
    """

    def __init__(self) -> None:
        self._now: OrderedDict[str, int] = OrderedDict()

    def of(self, session: str) -> int:
        """The page's number."""
        return self._now.get(session, 0)

    def touch(self, session: str) -> None:
        """Note a change. Called when it begins and when it is about to be sent."""
        self._now[session] = self._now.pop(session, 0) + 1
        if len(self._now) > MAX_PAGES:
            self._now.popitem(last=False)
