"""The trail of sign-ins and of what administrators did."""

from __future__ import annotations

import logging
import time
from typing import Any

from app.request_context import CURRENT
from db.errors import DbError
from db.store import Store

log = logging.getLogger(__name__)

_DAY = 86_400.0


class AuditLog:
    """Writes the trail, with the request's id and address, and forgets what is older than `days`."""

    def __init__(self, store: Store, *, days: int) -> None:
        self._store = store
        self._days = days
        self._pruned: float | None = None

    async def record(self, user_id: str | None, action: str, before: Any = None, after: Any = None) -> None:
        """Add an entry. One that cannot be written is logged: it must not undo what has happened already.

        user_id: who did it; None for a stranger and for the command line.
        """
        info = CURRENT.get()
        try:
            await self._store.add_audit(
                user_id,
                action,
                before,
                after,
                address=info.address if info is not None else None,
                request_id=info.id if info is not None else None,
            )
            if self._pruned is None or time.monotonic() - self._pruned > _DAY:
                self._pruned = time.monotonic()
                await self._store.prune_audit(int((time.time() - self._days * _DAY) * 1000))
        except DbError as error:
            log.error("the audit trail misses %s of user %s: %s", action, user_id, error)  # noqa: TRY400
