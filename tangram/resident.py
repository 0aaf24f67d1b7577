"""Rows of idle conversations, kept until their pages are needed.

Pure bookkeeping: pages are opaque, nothing here knows vLLM. A row is found by the block hashes of its
token prefix, which chain over the whole prefix and include the request's ``cache_salt``: nobody else's
prompt can produce them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tangram.errors import CacheIntegrityError
from tangram.geometry import Geometry

P = TypeVar("P")


@dataclass(eq=False)
class Row(Generic[P]):
    """An idle conversation's pages.

    Attributes:
        name: the request that left it, for people.
        pages: the row, in order; ``geometry.pages(tokens)`` or, after a step that was cut short, more.
        tokens: tokens of known identity that are in the cache.
        written: tokens that the ring was written for, at least ``tokens``.
        targets: resumable lengths (multiples of a page) to the block hash of that prefix.
    """

    name: str
    pages: list[P]
    tokens: int
    written: int
    targets: dict[int, Hashable]
    since: float = field(default_factory=time.monotonic)


class ResidentRows(Generic[P]):
    """Least recently used order of rows, and an index from prefix hash to the rows that continue it."""

    def __init__(self, geometry: Geometry, clock: Callable[[], float] = time.monotonic) -> None:
        self._geometry = geometry
        self._clock = clock
        self._rows: OrderedDict[int, Row[P]] = OrderedDict()
        self._by_hash: dict[Hashable, list[Row[P]]] = {}
        self.pages = 0

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> list[Row[P]]:
        """All rows, the next one to be evicted first."""
        return list(self._rows.values())

    def resumable(self, tokens: int, written: int) -> range:
        """Lengths, multiples of a page, from which a row of ``tokens`` can be resumed, rising. Only the last
        ``rewind`` tokens: resuming further back would destroy more history than it saves."""
        size = self._geometry.page_tokens
        last = tokens // size * size
        first = last
        while first - size >= max(size, tokens - self._geometry.rewind) and self._geometry.can_rewind(
            written, first - size
        ):
            first -= size
        usable = last >= size and self._geometry.can_rewind(written, last)
        return range(first, last + 1, size) if usable else range(0)

    def add(self, name: str, pages: list[P], tokens: int, written: int, hashes: Sequence[Hashable]) -> bool:
        """Keep a row. ``hashes[i]`` names the prefix of ``(i + 1) * page_tokens`` tokens.

        Returns:
            Whether it was kept: a row that cannot be resumed is not.
        """
        size = self._geometry.page_tokens
        tokens = min(tokens, len(hashes) * size + size - 1)
        targets = {length: hashes[length // size - 1] for length in self.resumable(tokens, written)}
        if not targets:
            return False
        row = Row(name, pages, tokens, written, targets, self._clock())
        self._rows[id(row)] = row
        for prefix in targets.values():
            self._by_hash.setdefault(prefix, []).append(row)
        self.pages += len(pages)
        return True

    def find(self, hashes: Sequence[Hashable], limit: int) -> tuple[Row[P], int] | None:
        """The longest kept prefix of at most ``limit`` tokens.

        Returns:
            The row and the length to resume from; among rows that offer the same length the one that loses
            least by it. None when there is none.
        """
        size = self._geometry.page_tokens
        for count in range(min(len(hashes), limit // size), 0, -1):
            rows = self._by_hash.get(hashes[count - 1])
            if rows:
                return min(rows, key=lambda row: row.tokens), count * size
        return None

    def owner(self, page: P) -> Row[P] | None:
        """The row whose first page this is."""
        return next((row for row in self._rows.values() if row.pages[0] is page), None)

    def take(self, row: Row[P]) -> list[P]:
        """Remove a row and hand over its pages."""
        del self._rows[id(row)]
        for prefix in row.targets.values():
            rows = self._by_hash[prefix]
            rows.remove(row)
            if not rows:
                del self._by_hash[prefix]
        self.pages -= len(row.pages)
        return row.pages

    def oldest(self, spare: Row[P] | None = None) -> Row[P] | None:
        """The row to evict next, never ``spare``."""
        return next((row for row in self._rows.values() if row is not spare), None)

    def check_integrity(self) -> None:
        """Raise CacheIntegrityError when the index, the counts and the rows contradict each other."""
        rows = self.rows()
        pages = [id(page) for row in rows for page in row.pages]
        if len(pages) != self.pages or len(set(pages)) != len(pages):
            raise CacheIntegrityError(
                f"resident rows hold {len(pages)} pages, counted {self.pages}, or share one"
            )
        indexed = sorted((id(row), hash(prefix)) for prefix, found in self._by_hash.items() for row in found)
        expected = sorted((id(row), hash(prefix)) for row in rows for prefix in row.targets.values())
        if indexed != expected:
            raise CacheIntegrityError("the prefix index does not match the resident rows")
        for row in rows:
            if len(row.pages) < self._geometry.pages(row.tokens):
                raise CacheIntegrityError(
                    f"row {row.name} has {len(row.pages)} pages for {row.tokens} tokens"
                )
