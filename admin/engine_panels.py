"""HTML of the tab "Engine": pure functions from data to markup. All text is escaped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from admin.live_html import button
from admin.panels import notice, table
from admin.text import count_text, duration_text
from app.active import ActiveRequest
from app.engine_change import MODEL, EngineChange
from app.supervisor import EngineStatus

SHOWN_REQUESTS = 50


def state_panel(status: EngineStatus, held: bool, waiting: int) -> str:
    """What the engine is doing, in a table."""
    rows = [
        ("State", "accepts nothing new" if held else "stalled" if status.stalled else status.state.value),
        ("Doing", status.phase or "–"),
        ("Model", status.model or "–"),
        ("Started in", duration_text(status.ready_seconds)),
        ("Restarts after a death", count_text(status.restarts)),
        ("Waiting in the app", count_text(waiting)),
    ]
    if status.detail:
        rows.insert(2, ("Why", status.detail))
    body = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return table("facts", "", body)


def requests_table(requests: Sequence[ActiveRequest], owner: Callable[[str], str]) -> str:
    """Requests that have not ended, oldest first, each with a button that stops it."""
    if not requests:
        return '<p class="empty">No request is running.</p>'
    body = "".join(
        _request_row(request, owner(request.origin.owner)) for request in requests[:SHOWN_REQUESTS]
    )
    rest = len(requests) - SHOWN_REQUESTS
    if rest > 0:
        body += f'<tr class="rest" data-key="rest"><td colspan=5>and {rest} more</td></tr>'
    head = "<th>Owner</th><th>State</th><th class=num>Tokens</th><th class=num>Since</th><th></th>"
    return table("requests", head, body)


def _request_row(request: ActiveRequest, owner: str) -> str:
    kind = "chat" if request.origin.conversation_id else "API"
    state = ("good", "running") if request.at_engine else ("calm", "waiting")
    stop = button("stop", escape(request.name), "Stop", title="Its text so far is kept")
    return (
        f'<tr data-key="{escape(request.name)}"><td>{escape(owner) or "–"} '
        f'<span class="muted">{kind}</span></td>'
        f'<td><span class="tag {state[0]}">{state[1]}</span></td>'
        f'<td class="num">{count_text(request.tokens())}</td>'
        f'<td class="num">{duration_text(request.seconds)}</td><td class="acts">{stop}</td></tr>'
    )


def change_panel(change: EngineChange | None, doing: str) -> str:
    """What the last change does or did; empty when there was none."""
    if change is None:
        return ""
    if change.outcome is None:
        what = f"Switching to {change.to}" if change.kind == MODEL else "Restarting the engine"
        return notice(f"{what}, {duration_text(change.elapsed)} so far: {doing}.", "info")
    tone = "good" if change.outcome == "applied" else "bad"
    return notice(f"{change.message} ({duration_text(change.elapsed)})", tone)


def log_panel(lines: list[str]) -> str:
    """The log as escaped, preformatted text, newest line last."""
    text = "\n".join(lines) or "The log is empty."
    return f'<pre class="log" tabindex="0" aria-label="Engine log">{escape(text)}</pre>'
