"""The manager's books against the geometry: called by tests at every step, and on demand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tangram.errors import CacheIntegrityError

if TYPE_CHECKING:
    from tangram.manager import RaggedManager


def check(manager: RaggedManager) -> None:
    """Raise CacheIntegrityError unless each request holds ``pages(n)`` pages for its slots, each page is
    referenced by exactly the rows that hold it, only sealed pages are shared and lie at the same place of
    each of their rows, and every other page is free."""
    geometry, pool = manager.geometry, manager.block_pool
    running, idle = manager.held_rows()
    for name, row in running.items():
        expected = geometry.pages(manager.slots(name))
        if len(row) != expected:
            raise CacheIntegrityError(f"request {name} holds {len(row)} pages, the formula says {expected}")
    places: dict[int, list[int]] = {}
    rows: list[Sequence[int | None]] = [*running.values(), *(row.pages for row in idle)]
    for pages in rows:
        for place, page in enumerate(pages):
            if page is not None:
                places.setdefault(page, []).append(place)
    for page, found in places.items():
        block = pool.blocks[page]
        if block.is_null or block.ref_cnt != len(found):
            raise CacheIntegrityError(f"page {page} has {len(found)} owners and {block.ref_cnt} references")
        if len(found) > 1 and (len(set(found)) > 1 or found[0] < geometry.ring_pages):
            raise CacheIntegrityError(f"page {page} has two owners and is not one sealed page of both")
    owned = len(places) + manager.windows.in_use()
    total, free = pool.num_gpu_blocks - 1, pool.get_num_free_blocks()
    if free + owned != total:
        raise CacheIntegrityError(f"{total - free - owned} of {total} pages have no owner")
