"""Tab "Audit": who did what and when, with what was before and after."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import gradio as gr

from admin.console import Console
from admin.guarded import guarded
from admin.live_html import live_html
from admin.panels import table
from admin.text import time_text
from db.views import AuditView

READ, SHOWN = 2000, 200
_LONGEST = 600


@dataclass(frozen=True)
class AuditTab:
    """Components and their values. ``choices``: the words that are looked for."""

    console: Console
    choices: list[Any]
    outputs: list[Any]

    async def values(self, words: str) -> list[Any]:
        """Values for :attr:`outputs`."""
        entries = await self.console.services.store.list_audit(READ)
        return [audit_table(entries, self.console.owners.of_user, words)]


def audit_table(entries: Sequence[AuditView], name: Callable[[str], str], words: str = "") -> str:
    """Entries that have all the words anywhere, newest first, at most :data:`SHOWN`."""
    wanted = words.lower().split()
    rows = []
    for entry in entries:
        who = _who(entry, name)
        before, after = (_json(value) for value in (entry.before, entry.after))
        text = f"{who} {entry.action} {before} {after} {entry.address or ''}".lower()
        if all(word in text for word in wanted):
            rows.append(_row(entry, who, before, after))
        if len(rows) == SHOWN:
            break
    if not rows:
        return '<p class="empty">Nothing was found.</p>'
    head = "<th>When</th><th>Who</th><th>What</th><th>Before</th><th>After</th><th>From</th>"
    return table("audit", head, "".join(rows))


def _who(entry: AuditView, name: Callable[[str], str]) -> str:
    """Whoever has no account came with a request, or typed a command on the server."""
    if entry.user_id:
        return name(entry.user_id)
    return "" if entry.request_id else "command line"


def _row(entry: AuditView, who: str, before: str, after: str) -> str:
    at = time_text(entry.created_at / 1000, "%Y-%m-%d %H:%M:%S")
    return (
        f'<tr data-key="{escape(entry.id)}"><td>{at}</td><td>{escape(who) or "–"}</td>'
        f"<td><code>{escape(entry.action)}</code></td><td class=wrap>{escape(before)}</td>"
        f"<td class=wrap>{escape(after)}</td><td>{escape(entry.address or '–')}</td></tr>"
    )


def _json(value: Any) -> str:
    if value is None:
        return ""
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def build(console: Console) -> AuditTab:
    """Create the components; call inside ``gr.Blocks``."""
    with gr.Column(elem_classes=["tc-panel"]):
        gr.HTML(
            '<h2>Audit</h2><p class="hint">Sign-ins, failures, keys, and what administrators did.</p>',
            apply_default_css=False,
        )
        words = gr.Textbox(
            "",
            label="Find",
            placeholder="a name, engine.tune, an address",
            elem_id="audit-words",
            elem_classes=["framed"],
        )
        entries = live_html("audit")
    tab = AuditTab(console, [words], [entries])
    words.change(
        guarded(console.access, tab.values),
        [words],
        tab.outputs,
        show_progress="hidden",
        queue=False,
        trigger_mode="always_last",
        api_visibility="private",
    )
    return tab
