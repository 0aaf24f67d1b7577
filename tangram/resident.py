"""Rows that no request is using now: idle conversations, and prefixes that several conversations share.

Pure bookkeeping: pages are numbers, nothing here knows vLLM. A row is found by the block hashes of its
token prefix, which chain over the whole prefix and include the request's ``cache_salt``: nobody else's
prompt can produce them.

A page may lie in several rows: sealed pages are shared by reference count. What evicting would free is
therefore counted here, not summed: a page is *releasable* when only rows of this module hold it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from tangram.errors import CacheIntegrityError
from tangram.geometry import Geometry


@dataclass(frozen=True)
class Thin:
    """What is left of an idle row without the raw tokens that it can do without.

    Attributes:
        length: from which it is resumed then (:meth:`tangram.geometry.Geometry.thinnest`).
        prefix: the hash of that prefix.
        frees: pages that it would hold no more.
    """

    length: int
    prefix: Hashable
    frees: int


@dataclass(eq=False)
class Row:
    """A row that no request is using.

    Attributes:
        name: the request that left it, for people.
        pages: the row, in order; None where no target needs the page of the ring.
        tokens: tokens of known identity, those included that are computed again in any case.
        targets: resumable lengths (multiples of a page) to the block hash of that prefix.
        shared: a prefix for others to copy, not a conversation for one to take over.
        used: whether anybody continued it.
        step: the scheduler's step in which it was made; its copies run with that step.
        owner: whose conversation it is, None where that is not known.
        left: whether its owner began another conversation since.
        pinned: whether it stays when room is made (:mod:`tangram.pins`).
        expected: since when its user is back and waits, None for nobody.
        thin: what it can be cut down to, None where it cannot, or is already.
        thinned: whether that was done. What it offers then may be the beginning of other conversations, too.
    """

    name: str
    pages: list[int | None]
    tokens: int
    targets: dict[int, Hashable]
    since: float = field(default_factory=time.monotonic)
    shared: bool = False
    used: bool = False
    step: int = -1
    owner: str | None = None
    left: bool = False
    pinned: bool = False
    expected: float | None = None
    thin: Thin | None = None
    thinned: bool = False

    def held(self) -> list[int]:
        """The pages that the row owns a reference to."""
        return [page for page in self.pages if page is not None]


class ResidentRows:
    """The order in which rows are evicted, and an index from prefix hash to the rows that continue it.

    Args:
        geometry: the cache's arithmetic.
        references: owners of a page, rows of this object and running requests together.
        observed: tokens before a seal boundary whose queries the scorer must have seen, and which are not
            kept with a row: a request that resumes among them starts before them. 0 for none.
        clock: seconds, for the age of rows.
    """

    def __init__(
        self,
        geometry: Geometry,
        references: Callable[[int], int] = lambda page: 1,
        observed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._geometry = geometry
        self._references = references
        self._clock = clock
        self.observed = observed
        self._rows: OrderedDict[int, Row] = OrderedDict()
        self._whole: OrderedDict[int, Row] = OrderedDict()  # that can be thinned and whose users do not wait
        self._by_hash: dict[Hashable, list[Row]] = {}
        self._holds: dict[int, int] = {}  # page -> rows of this object that hold it
        self._forked: set[int] = set()  # pages that may have owners elsewhere

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> list[Row]:
        """All rows, the next one to be evicted first."""
        return list(self._rows.values())

    def newest(self) -> Row:
        """The row that was kept, or used, last."""
        return next(reversed(self._rows.values()))

    # ---- where a sequence can be resumed ----------------------------------------------------------------

    def resumable(self, tokens: int, written: int, raw_from: int = 0) -> list[int]:
        """:meth:`tangram.geometry.Geometry.resumable`, with what this engine's scorer must have seen."""
        return self._geometry.resumable(tokens, written, raw_from, self.observed)

    def furthest_back(self) -> int:
        """Tokens before its end from which on a row can be resumed, at most."""
        return self._geometry.rewind + self._geometry.page_tokens + self.observed

    # ---- rows come and go -------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        pages: Sequence[int],
        tokens: int,
        written: int,
        hashes: Sequence[Hashable],
        raw_from: int = 0,
        owner: str | None = None,
        thins: bool = False,
    ) -> bool:
        """Keep an idle conversation, and of its pages those that resuming it needs.

        Args:
            pages: its whole row.
            tokens: tokens that are known and computed.
            written, raw_from: see :meth:`tangram.geometry.Geometry.intact`.
            hashes: ``hashes[i]`` names the prefix of ``(i + 1) * page_tokens`` tokens.
            thins: whether it may be cut down later (:meth:`thin`).

        Returns:
            Whether it was kept: a row that cannot be resumed is not.
        """
        size = self._geometry.page_tokens
        tokens = min(tokens, len(hashes) * size + size - 1)
        lengths = self.resumable(tokens, written, raw_from)
        targets = {length: hashes[length // size - 1] for length in lengths}
        if targets:
            kept = self._without_surplus(pages, lengths)
            row = Row(name, kept, tokens, targets, self._clock(), owner=owner)
            row.thin = self._thin_of(row, hashes) if thins else None
            self._insert(row)
        return bool(targets)

    def _thin_of(self, row: Row, hashes: Sequence[Hashable]) -> Thin | None:
        length = self._geometry.thinnest(max(row.targets))
        if length is None:
            return None
        ring = sum(page is not None for page in row.pages[: self._geometry.ring_pages])
        frees = ring - len(self._geometry.held_entries([length]))
        return Thin(length, hashes[length // self._geometry.page_tokens - 1], frees) if frees > 0 else None

    def _without_surplus(self, pages: Sequence[int], lengths: Sequence[int]) -> list[int | None]:
        """A row with what resuming it at any of ``lengths`` needs, and holes."""
        ring = self._geometry.ring_entries(lengths[-1])
        kept: list[int | None] = [None] * ring
        for entry in self._geometry.held_entries(lengths):
            kept[entry] = pages[entry]
        return kept + list(pages[ring : self._geometry.resumed_pages(lengths[-1])])

    def add_prefix(
        self, name: str, pages: list[int | None], length: int, prefix: Hashable, step: int
    ) -> None:
        """Keep a prefix of ``length`` tokens for others to continue."""
        row = Row(name, pages, length, {length: prefix}, self._clock(), shared=True, step=step)
        self._insert(row)
        self.mark_forked(row.held())

    def _insert(self, row: Row) -> None:
        self._rows[id(row)] = row
        if row.thin is not None:
            self._whole[id(row)] = row
        self._index(row)
        for page in row.held():
            self._holds[page] = self._holds.get(page, 0) + 1

    def take(self, row: Row) -> list[int]:
        """Remove a row and hand over its references."""
        del self._rows[id(row)]
        self._whole.pop(id(row), None)
        self._unindex(row)
        return self._let_go(row.held())

    def thin(self, row: Row) -> list[int]:
        """Cut a row down to the fewest raw tokens. Hands over the references to what it holds no more. From
        now on it is resumed from one length only, at most a chunk less a page before its end, and by whoever
        has that prefix."""
        thin = row.thin
        if thin is None:
            raise CacheIntegrityError(f"row {row.name} cannot be cut down any further")
        self._whole.pop(id(row), None)  # not there while its user waits
        self._unindex(row)
        row.targets, row.tokens = {thin.length: thin.prefix}, thin.length
        row.thin, row.thinned = None, True
        self._index(row)
        needed = set(self._geometry.held_entries([thin.length]))
        given: list[int] = []
        for entry, page in enumerate(row.pages[: self._geometry.ring_pages]):
            if page is not None and entry not in needed:
                given.append(page)
                row.pages[entry] = None
        return self._let_go(given)

    def _index(self, row: Row) -> None:
        for prefix in row.targets.values():
            self._by_hash.setdefault(prefix, []).append(row)

    def _unindex(self, row: Row) -> None:
        for prefix in row.targets.values():
            rows = self._by_hash[prefix]
            rows.remove(row)
            if not rows:
                del self._by_hash[prefix]

    def _let_go(self, pages: list[int]) -> list[int]:
        for page in pages:
            self._holds[page] -= 1
            if not self._holds[page]:
                del self._holds[page]
        return pages

    def touch(self, row: Row) -> None:
        """The row was used: it is evicted last."""
        self.expect(row)
        row.since = self._clock()
        row.used = True

    def expect(self, row: Row) -> None:
        """Its user is back and waits: it is evicted last."""
        self._rows.move_to_end(id(row))
        self._whole.pop(id(row), None)  # whatever it gives up would be computed again at once
        row.left, row.expected = False, self._clock()

    def leave_behind(self, row: Row) -> None:
        """Somebody went on from before its end, with copies: it is evicted first, be it the answer before an
        edit or another conversation of whoever has just begun one."""
        row.used, row.left, row.expected = True, True, None
        self._rows.move_to_end(id(row), last=False)
        if row.thin is not None:
            self._whole[id(row)] = row
            self._whole.move_to_end(id(row), last=False)

    def leave(self, owner: str) -> None:
        """The owner began another conversation: those before are evicted first, in their order."""
        for row in [row for row in reversed(self._rows.values()) if row.owner == owner and not row.shared]:
            self._rows.move_to_end(id(row), last=False)
            row.left = True

    def mark_forked(self, pages: Iterable[int]) -> None:
        """These pages have, or may get, owners beside the rows of this object."""
        self._forked = {page for page in self._forked if self._references(page) > 1}
        self._forked.update(pages)

    # ---- looking for rows -------------------------------------------------------------------------------

    def find(self, hashes: Sequence[Hashable], limit: int, step: int = 0) -> tuple[Row, int] | None:
        """The longest kept prefix of at most ``limit`` tokens.

        Returns:
            The row and the length to resume from; among rows that offer the same length a conversation
            before a shared prefix, and that before one that was cut down to it, which may be another
            conversation; and the one that loses least by it. None when there is none. A prefix made
            in this ``step`` is passed over: its copies have not run.
        """
        size = self._geometry.page_tokens
        for count in range(min(len(hashes), limit // size), 0, -1):
            found = self._by_hash.get(hashes[count - 1])
            rows = [row for row in found if row.step != step] if found else None
            if rows:
                return min(rows, key=lambda row: (row.thinned, row.shared, row.tokens)), count * size
        return None

    def holds(self, row: Row) -> bool:
        """Whether a row is still kept."""
        return id(row) in self._rows and self._rows[id(row)] is row

    def stale_pages(self, seconds: float) -> int:
        """Pages of the rows that nobody used for so long."""
        latest, pages = self._clock() - seconds, 0
        for row in self._rows.values():  # those that were left, and then in the order of their use
            if row.since <= latest:
                pages += 0 if row.pinned else len(row.held())
            elif not row.left:
                break
        return pages

    def unused_prefix(self, name: str) -> Row | None:
        """The prefix that a request left for others, if it did and nobody continued it yet."""
        return next((r for r in self._rows.values() if r.shared and not r.used and r.name == name), None)

    def has_prefix(self, prefix: Hashable) -> bool:
        """Whether a shared row ends with this prefix."""
        return any(row.shared for row in self._by_hash.get(prefix, ()))

    def oldest(self, spare: Row | None = None) -> Row | None:
        """The row to evict next, never ``spare`` and never a pinned one."""
        return next((row for row in self._rows.values() if row is not spare and not row.pinned), None)

    def next_victim(self, spare: Row | None = None) -> tuple[Row, bool] | None:
        """The row that is to give up pages next, never ``spare`` and never a pinned one, and whether it is to
        be thinned rather than evicted.

        Of the oldest row that there is and the oldest one that can be thinned, that whose page costs less: in
        tokens that its user's return would have computed again, over the time since it was used. The longer
        ago that was, the less likely is a return. Raw tokens take several times the room of sealed ones, so
        thinning comes first unless the oldest row is old indeed.
        """
        oldest = self.oldest(spare)
        if oldest is None or oldest.left:
            return None if oldest is None else (oldest, False)
        whole = next((row for row in self._whole.values() if row is not spare and not row.pinned), None)
        if whole is None or whole.thin is None:
            return oldest, oldest.thin is not None
        thin = (max(whole.targets) - whole.thin.length) / (whole.thin.frees * self._age(whole))
        evict = max(oldest.targets) / (len(oldest.held()) * self._age(oldest))
        thins = whole is oldest or thin <= evict
        return (whole, True) if thins else (oldest, oldest.thin is not None)

    def _age(self, row: Row) -> float:
        """Seconds since somebody used a row, or came to use it; of rows that are younger still, all alike."""
        return max(self._clock() - max(row.since, row.expected or 0.0), 1e-3)

    # ---- counting ---------------------------------------------------------------------------------------

    def releasable(self, spare: Row | None = None) -> int:
        """Pages that evicting all rows but ``spare`` and pinned ones would free."""
        elsewhere = sum(self._references(page) > self._holds.get(page, 0) > 0 for page in self._forked)
        kept = {page for row in self.spared(spare) for page in row.held()}
        return len(self._holds) - elsewhere - sum(self._only_here(page) for page in kept)

    def spared(self, spare: Row | None) -> list[Row]:
        """Rows that making room does not touch: ``spare``, if it is kept here, and pinned ones."""
        return [row for row in self._rows.values() if row.pinned or row is spare]

    def _only_here(self, page: int) -> bool:
        return page not in self._forked or self._references(page) <= self._holds.get(page, 0)

    def check_integrity(self) -> None:
        """Raise CacheIntegrityError when the index, the counts and the rows contradict each other."""
        rows = self.rows()
        holds: dict[int, int] = {}
        for row in rows:
            pages = row.held()
            if len(set(pages)) != len(pages):
                raise CacheIntegrityError(f"row {row.name} holds a page twice")
            for page in pages:
                holds[page] = holds.get(page, 0) + 1
        if holds != self._holds:
            raise CacheIntegrityError(f"resident rows hold {len(holds)} pages, counted {len(self._holds)}")
        if any(self._references(page) > count and page not in self._forked for page, count in holds.items()):
            raise CacheIntegrityError("a page of a resident row has an owner that nobody was told of")
        indexed = sorted((id(row), hash(prefix)) for prefix, found in self._by_hash.items() for row in found)
        expected = sorted((id(row), hash(prefix)) for row in rows for prefix in row.targets.values())
        if indexed != expected:
            raise CacheIntegrityError("the prefix index does not match the resident rows")
        for row in rows:
            # A row that ends at a boundary has no chunk sealed there: whoever continues it seals that.
            length = self._geometry.resumed_pages(max(row.targets))
            if len(row.pages) != length:
                raise CacheIntegrityError(
                    f"row {row.name} has {len(row.pages)} entries, {max(row.targets)} tokens need {length}"
                )
            needed = {*self._geometry.held_entries(row.targets), *range(self._geometry.ring_pages, length)}
            if {entry for entry, page in enumerate(row.pages) if page is not None} != needed:
                raise CacheIntegrityError(
                    f"row {row.name} holds {len(row.held())} pages, resuming it needs {len(needed)}"
                )
