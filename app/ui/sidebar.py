"""The list of conversations in the sidebar."""

import time
from collections.abc import Sequence
from html import escape

from app.ui import icons
from app.ui.render import UNTITLED
from db.views import ConversationView


def _age(updated_at: int, now: float) -> str:
    """Return the heading that a conversation is listed under. ``updated_at``: ms since the epoch."""
    days = (now - updated_at / 1000) / 86_400
    if days < 1:
        return "Last 24 hours"
    if days < 7:
        return "Last 7 days"
    if days < 30:
        return "Last 30 days"
    return "Older"


def _row(item: ConversationView, active: bool) -> str:
    title = item.title or UNTITLED
    shown, own = escape(title, quote=True), escape(item.id, quote=True)
    current = ' aria-current="page"' if active else ""
    archived = ' data-archived="1"' if item.archived_at is not None else ""
    return (
        f'<li class="tc-row{" tc-active" if active else ""}">'
        f'<button type="button" class="tc-open" data-act="open_chat" data-id="{own}" title="{shown}"'
        f"{current}>{shown}</button>"
        f'<button type="button" class="tc-icon" data-act="ask_menu" data-id="{own}" data-title="{shown}"'
        f'{archived} aria-haspopup="menu" title="More" aria-label="More for {shown}">'
        f"{icons.MORE}</button></li>"
    )


def _rows(items: Sequence[ConversationView], active_id: str) -> str:
    return f'<ul class="tc-list">{"".join(_row(item, item.id == active_id) for item in items)}</ul>'


def conversation_list(
    items: Sequence[ConversationView],
    active_id: str,
    query: str = "",
    now: float | None = None,
    archived: Sequence[ConversationView] = (),
    more: bool = False,
) -> str:
    """Return the sidebar's list as HTML, grouped by age, newest first.

    `archived` are folded away under it, unless a search found them. `more`: there are others, older ones.
    """
    moment = time.time() if now is None else now
    groups: dict[str, list[ConversationView]] = {}
    for item in items:
        groups.setdefault(_age(item.updated_at, moment), []).append(item)
    parts = [
        f'<h2 class="tc-age">{heading}</h2>{_rows(group, active_id)}' for heading, group in groups.items()
    ]
    if not items and not (query and archived):
        note = f"Nothing found for “{escape(query)}”." if query else "No conversations yet."
        parts.append(f'<p class="tc-none">{note}</p>')
    if more:
        parts.append('<p class="tc-none">Search finds the older ones.</p>')
    if archived:
        unfolded = " open" if query or any(item.id == active_id for item in archived) else ""
        parts.append(
            f'<details class="tc-archive"{unfolded}><summary>Archived '
            f"<span>{len(archived)}</span></summary>{_rows(archived, active_id)}</details>"
        )
    return "".join(parts)
