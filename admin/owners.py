"""Whose a row of the pool is, by name."""

from __future__ import annotations

from app.active import ActiveRequests
from db.store import Store


class Owners:
    """Names are read again now and then, not for every row."""

    def __init__(self, active: ActiveRequests, store: Store) -> None:
        self._active = active
        self._store = store
        self._names: dict[str, str] = {}
        self.stale = False

    async def refresh(self) -> None:
        """Read everybody's name."""
        self.stale = False
        self._names = {person.id: person.name for person in await self._store.list_users()}

    def of_user(self, user_id: str) -> str:
        """A user's name; "" where it is not known yet, which is then ``stale``."""
        if user_id not in self._names:
            self.stale = True
        return self._names.get(user_id, "")

    def of(self, sequence: str) -> str:
        """The owner's name of a row; "" for one of before the app's start."""
        origin = self._active.origin(sequence)
        return self.of_user(origin.owner) if origin is not None else ""
