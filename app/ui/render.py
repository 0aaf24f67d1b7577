"""From stored messages to what the page shows: chat messages, reply footers, the list of conversations."""

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from app.ui import icons
from app.ui.markdown import safe_message, safe_reply
from db.views import ConversationView, MessageView

UNTITLED = "New conversation"

_LIVE = frozenset({"pending", "streaming"})
_MARKS = {
    "stopped": ("muted", "Stopped"),
    "interrupted": ("warn", "Interrupted by a restart"),
    "error": ("danger", "The reply failed"),
}


def is_live(status: str) -> bool:
    """Whether a reply with this status is still being written."""
    return status in _LIVE


def stats_parts(stats: Mapping[str, Any]) -> list[str]:
    """Return the phrases of the status line, in order, leaving out what is not known."""
    parts: list[str] = []
    completion = stats.get("completion_tokens")
    if isinstance(completion, int):
        parts.append(f"{completion:,} token{'' if completion == 1 else 's'}")
    rate = stats.get("tokens_per_second")
    if isinstance(rate, int | float) and rate > 0:
        parts.append(f"{rate:.1f} tokens/s")
    cached = stats.get("cached_tokens")
    if isinstance(cached, int):
        parts.append(f"{cached:,} cached")
    kept = stats.get("kept_fraction")
    if isinstance(kept, int | float):
        parts.append(f"KV kept: {kept * 100:.0f}%")
    return parts


def _siblings(message: MessageView) -> str:
    if message.sibling_count < 2:
        return ""
    place, count, own = message.sibling_index, message.sibling_count, escape(message.id, quote=True)
    previous = "" if place > 0 else " disabled"
    following = "" if place < count - 1 else " disabled"
    return (
        '<span class="tc-versions" role="group" aria-label="Versions">'
        f'<button type="button" data-act="show_version" data-id="{own}" data-step="-1" '
        f'aria-label="Previous version"{previous}>{icons.LEFT}</button>'
        f"<span>{place + 1}/{count}</span>"
        f'<button type="button" data-act="show_version" data-id="{own}" data-step="1" '
        f'aria-label="Next version"{following}>{icons.RIGHT}</button></span>'
    )


def _reply_footer(message: MessageView) -> str:
    parts = [_siblings(message)]
    if message.status in _LIVE:
        waiting = "Waiting for the engine" if message.status == "pending" else "Writing"
        parts.append(
            '<span class="tc-live" role="status"><i></i><i></i><i></i>'
            f'<span class="tc-sr">{waiting}</span></span>'
        )
    if message.status in _MARKS:
        kind, label = _MARKS[message.status]
        if message.status == "error" and message.error:
            label = message.error
        parts.append(f'<span class="tc-mark tc-{kind}">{escape(label)}</span>')
    elif message.finish_reason == "length":
        parts.append('<span class="tc-mark tc-muted">Cut off at the length limit</span>')
    stats = "".join(f"<span>{escape(part)}</span>" for part in stats_parts(message.stats))
    if stats:
        parts.append(f'<span class="tc-stats">{stats}</span>')
    if message.status not in _LIVE:
        parts.append(
            f'<button type="button" class="tc-icon tc-again" data-act="regenerate_reply" '
            f'data-id="{escape(message.id, quote=True)}" title="Regenerate" aria-label="Regenerate">'
            f"{icons.AGAIN}</button>"
        )
    return f'<div class="tc-foot" data-status="{escape(message.status, quote=True)}">{"".join(parts)}</div>'


def _component(html: str) -> dict[str, Any]:
    """A piece of our own HTML inside a chat message (never built from message text)."""
    return {
        "type": "component",
        "component": "html",
        "value": html,
        "constructor_args": {},
        "props": {"html_template": "${value}", "js_on_load": None, "apply_default_css": False},
    }


def chat_message(message: MessageView) -> dict[str, Any]:
    """Return one message in the Chatbot's format: its text, then its footer."""
    content: list[dict[str, Any]] = []
    if message.role == "user":
        content.append({"type": "text", "text": safe_message(message.content)})
        if siblings := _siblings(message):
            content.append(_component(f'<div class="tc-foot tc-foot-user">{siblings}</div>'))
    else:
        if message.content:
            content.append({"type": "text", "text": safe_reply(message.content)})
        content.append(_component(_reply_footer(message)))
    return {"role": message.role, "content": content}


def chat_messages(path: Iterable[MessageView]) -> list[dict[str, Any]]:
    """Return a whole conversation path in the Chatbot's format, one entry a message."""
    return [chat_message(message) for message in path]


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
    return (
        f'<li class="tc-row{" tc-active" if active else ""}">'
        f'<button type="button" class="tc-open" data-act="open_chat" data-id="{own}" title="{shown}"'
        f"{current}>{shown}</button>"
        f'<button type="button" class="tc-icon" data-act="ask_rename" data-id="{own}" data-title="{shown}" '
        f'title="Rename" aria-label="Rename {shown}">{icons.PENCIL}</button>'
        f'<button type="button" class="tc-icon" data-act="ask_delete" data-id="{own}" data-title="{shown}" '
        f'title="Delete" aria-label="Delete {shown}">{icons.TRASH}</button></li>'
    )


def conversation_list(
    items: Sequence[ConversationView], active_id: str, query: str = "", now: float | None = None
) -> str:
    """Return the sidebar's list as HTML, grouped by age, newest first."""
    if not items:
        note = f"Nothing found for “{escape(query)}”." if query else "No conversations yet."
        return f'<p class="tc-none">{note}</p>'
    moment = time.time() if now is None else now
    groups: dict[str, list[str]] = {}
    for item in items:
        groups.setdefault(_age(item.updated_at, moment), []).append(_row(item, item.id == active_id))
    return "".join(
        f'<h2 class="tc-age">{heading}</h2><ul class="tc-list">{"".join(rows)}</ul>'
        for heading, rows in groups.items()
    )


def notice(text: str, kind: str = "danger") -> str:
    """Return a message above the input, announced to screen readers; empty text hides it."""
    if not text:
        return ""
    return (
        f'<div class="tc-notice tc-{kind}" role="alert"><span>{escape(text)}</span>'
        '<button type="button" class="tc-icon" data-act="dismiss" aria-label="Dismiss">'
        f"{icons.CLOSE}</button></div>"
    )


def undo_toast(conversation: ConversationView) -> str:
    """Return the note shown after a deletion. It fades by itself (CSS) and offers the way back."""
    title = escape(conversation.title or UNTITLED, quote=True)
    own = escape(conversation.id, quote=True)
    return (
        f'<div class="tc-toast" role="status" data-key="{own}"><span>Deleted “<b>{title}</b>”</span>'
        f'<button type="button" data-act="restore_chat" data-id="{own}">Undo</button></div>'
    )
