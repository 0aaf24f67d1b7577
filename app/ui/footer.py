"""The line under a message: its state, its versions, what can be done with it, its numbers."""

from collections.abc import Mapping
from html import escape
from typing import Any

from app.context import can_continue
from app.context import notice as context_notice
from app.ui import icons
from db.views import OPEN_STATUSES, MessageView

_MARKS = {
    "stopped": ("muted", "Stopped"),
    "interrupted": ("warn", "Interrupted by a restart"),
    "error": ("danger", "The reply failed"),
}


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


def _button(act: str, own: str, icon: str, label: str, more: str = "") -> str:
    return (
        f'<button type="button" class="tc-icon" data-act="{act}" data-id="{own}" title="{label}" '
        f'aria-label="{label}"{more}>{icon}</button>'
    )


def versions(message: MessageView) -> str:
    """The way to the other versions of a message; empty when it is the only one."""
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


def _waiting(message: MessageView, position: int | None) -> str:
    if message.status != "pending":
        return _live("Writing")
    if not position:
        return _live("Waiting for the engine")
    ahead = "Next in the queue" if position == 1 else f"Number {position} in the queue"
    return f'{_live("")}<span class="tc-queue" role="status">{ahead}</span>'


def _live(words: str) -> str:
    said = f'<span class="tc-sr">{words}</span>' if words else ""
    return f'<span class="tc-live" role="status"><i></i><i></i><i></i>{said}</span>'


def _mark(message: MessageView) -> str:
    if message.status in _MARKS:
        kind, label = _MARKS[message.status]
        if message.status == "error" and message.error:
            label = message.error
        return f'<span class="tc-mark tc-{kind}">{escape(label)}</span>'
    if message.finish_reason == "length":
        return '<span class="tc-mark tc-muted">Cut off at the length limit</span>'
    return ""


def _rating(message: MessageView, own: str) -> str:
    out = []
    for value, icon, label in ((1, icons.LIKE, "Good reply"), (-1, icons.DISLIKE, "Bad reply")):
        pressed = "true" if message.rating == value else "false"
        out.append(_button("rate", own, icon, label, f' data-rating="{value}" aria-pressed="{pressed}"'))
    return "".join(out)


def _actions(message: MessageView, last: bool) -> str:
    own = escape(message.id, quote=True)
    actions = ""
    if message.content:
        actions = _button("copy", own, icons.COPY, "Copy") + _rating(message, own)
    actions += _button("regenerate_reply", own, icons.AGAIN, "Regenerate")
    if last and can_continue(message):
        actions += (
            f'<button type="button" class="tc-go-on" data-act="continue_reply" data-id="{own}">'
            f"{icons.GO_ON}<span>Continue</span></button>"
        )
    return f'<span class="tc-actions">{actions}</span>'


def reply_footer(message: MessageView, *, last: bool = True, position: int | None = None) -> str:
    """The footer of a reply. `last`: nothing follows it; `position`: its place in the queue, from 1."""
    live = message.status in OPEN_STATUSES
    parts = [
        versions(message),
        _waiting(message, position) if live else "",
        _mark(message),
        "" if live else _actions(message, last),
    ]
    if stats := "".join(f"<span>{escape(phrase)}</span>" for phrase in stats_parts(message.stats)):
        parts.append(f'<span class="tc-stats">{stats}</span>')
    foot = f'<div class="tc-foot" data-status="{escape(message.status, quote=True)}">{"".join(parts)}</div>'
    if told := context_notice(message):
        foot += f'<p class="tc-told" role="note">{escape(told)}</p>'
    return foot


def message_footer(message: MessageView) -> str:
    """The footer of a user's message."""
    own = escape(message.id, quote=True)
    actions = _button("copy", own, icons.COPY, "Copy") + _button("edit", own, icons.PENCIL, "Edit message")
    actions = f'<span class="tc-actions">{actions}</span>'
    return f'<div class="tc-foot tc-foot-user">{actions}{versions(message)}</div>'
