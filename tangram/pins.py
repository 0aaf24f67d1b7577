"""Conversations that an administrator keeps: evicted by nobody else, as long as others fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tangram.resident import Row

if TYPE_CHECKING:
    from tangram.manager import RaggedManager


def pinned_pages(manager: RaggedManager, more: Row | None = None) -> int:
    """Pages of the pinned idle rows, and of one more, each counted once; those of window layers too."""
    rows = [row for row in manager.resident.rows() if row.pinned or row is more]
    pages = {page for row in rows for page in row.held()}
    return len(pages | {block for row in rows for block in manager.windows.held(row)})


def keep(manager: RaggedManager, row: Row, pinned: bool) -> None:
    """The row of a request that ended stays pinned if its conversation was, unless it has grown too large."""
    row.pinned = pinned and pinned_pages(manager, row) <= manager.room.policy.pinnable


def set_pin(manager: RaggedManager, name: str, pinned: bool) -> dict[str, int | str]:
    """Pin a conversation, running or idle, or let it go.

    Returns:
        How many ``conversations`` of that name there are, and why it was ``refused``, "" if it was not.
    """
    rows = [row for row in manager.resident.rows() if row.name == name and not row.shared]
    live = manager.live.get(name)
    for row in rows if pinned else ():
        pages, most = pinned_pages(manager, row), manager.room.policy.pinnable
        if pages > most:
            refused = (
                f"pinned conversations would hold {pages} pages of at most {most}: the rest is for a "
                "conversation of the model's greatest length. Let another one go first"
            )
            return {"conversations": 0, "refused": refused}
    for row in rows:
        row.pinned = pinned
    if live is not None:
        live.pinned = pinned
    return {"conversations": len(rows) + (live is not None), "refused": ""}
