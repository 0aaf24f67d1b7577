"""What is in the pool at one moment: copied from the manager's books in one go, counted at leisure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Pages
from dataclasses import dataclass

from tangram.geometry import Geometry
from tangram.telemetry import KINDS, CacheSnapshot, Sequence


@dataclass(frozen=True)
class Holding:
    """One row.

    Attributes:
        state: as in :class:`tangram.telemetry.Sequence`.
        pages: page ids, in order; None where the row needs none.
        beside: page ids of its sliding-window layers.
        resumes_at, pinned: as in :class:`tangram.telemetry.Sequence`.
    """

    name: str
    state: str
    tokens: int
    pages: Pages[int | None]
    idle_seconds: float | None = None
    beside: Pages[int] = ()
    resumes_at: int | None = None
    pinned: bool = False

    def places(self) -> list[tuple[int, int]]:
        """All its pages, and the place of each in the row; those of window layers are as young as the
        ring's."""
        row = [(place, page) for place, page in enumerate(self.pages) if page is not None]
        return row + [(0, page) for page in self.beside]


@dataclass(frozen=True)
class Occupancy:
    """All rows, and what is free beside them. Taken under the scheduler's lock; counting needs no lock."""

    holdings: list[Holding]
    total_pages: int
    free_pages: int
    counters: dict[str, int]

    def snapshot(self, geometry: Geometry, running: int = 0, waiting: int = 0) -> CacheSnapshot:
        """Count. A page with several owners counts once by kind, under the first of ``KINDS``."""
        owners = Counter(page for holding in self.holdings for _, page in holding.places())
        by_kind = dict.fromkeys(KINDS, 0) | {"free": self.free_pages}
        counted: set[int] = set()
        for state in ("running", "resident", "prefix"):
            for holding in (h for h in self.holdings if h.state == state):
                for place, page in holding.places():
                    if page in counted:
                        continue
                    if owners[page] > 1:
                        counted.add(page)
                    sealed = place >= geometry.ring_pages
                    by_kind[("sealed" if sealed else "ring") if state == "running" else state] += 1
        sequences = [
            Sequence(
                id=holding.name,
                state=holding.state,
                tokens=holding.tokens,
                sealed_chunks=geometry.row_chunks(len(holding.pages)),
                pages=len(holding.places()),
                idle_seconds=holding.idle_seconds,
                shared_pages=sum(owners[page] > 1 for _, page in holding.places()),
                resumes_at=holding.resumes_at,
                pinned=holding.pinned,
            )
            for holding in self.holdings
        ]
        return CacheSnapshot(
            total_pages=self.total_pages,
            free_pages=self.free_pages,
            sequences=sequences,
            counters=self.counters,
            pages=by_kind,
            running=running,
            waiting=waiting,
        )
