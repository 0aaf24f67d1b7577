"""Keeps the pool's history in the database, so that the chart of the last hour survives a restart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from time import time
from typing import Any

from admin.history import HOUR_SECONDS, PoolPoint
from db.database import Database
from db.maintenance import Thinning, add_memory_sample, memory_samples, thin_memory_samples

_POINTS_AN_HOUR = 3600 // 10
_FIELDS = tuple(field.name for field in fields(PoolPoint))


_MINUTE = 60_000
THINNING = (Thinning(2 * 60 * _MINUTE, _MINUTE), Thinning(2 * 1440 * _MINUTE, 10 * _MINUTE))
"""Of what is older than two hours one a minute is kept, of what is older than two days one in ten minutes."""
_THIN_EVERY = 60


class PoolStorage:
    """Rows of the table ``memory_samples``, one every ten seconds, fewer of the older ones."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._since_thinned = _THIN_EVERY

    async def add(self, point: PoolPoint) -> None:
        """Append one point."""
        row = {**point.to_row(), "time": int(point.time * 1000)}
        await add_memory_sample(self._database, row)
        self._since_thinned += 1
        if self._since_thinned >= _THIN_EVERY:
            self._since_thinned = 0
            await thin_memory_samples(self._database, THINNING)

    async def last_hour(self) -> list[PoolPoint]:
        """The stored points of the last hour, oldest first. Rows of another shape are left out."""
        rows = await memory_samples(self._database, limit=2 * _POINTS_AN_HOUR)
        points = [point for row in rows if (point := _point(row)) is not None]
        return [point for point in points if point.time >= time() - HOUR_SECONDS]


def _point(row: Mapping[str, Any]) -> PoolPoint | None:
    values = {name: row.get(name) for name in _FIELDS}
    if not all(isinstance(value, int) for value in values.values()):
        return None
    return PoolPoint(**{**values, "time": row["time"] / 1000})
