"""The table that says what other settings would change, before anything happens."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from admin.panels import notice, text_table
from admin.text import bytes_text, count_text, percent_text
from admin.tuning import TuneValues


def preview_panel(
    values: TuneValues, automatic: int | None, before: Mapping[str, Any], after: Mapping[str, Any]
) -> str:
    """Memory and capacity by conversation length, now and with ``values``, by two previews of the engine."""
    rows = [
        (
            f"{_thousands(length)} tokens",
            _change(bytes_text, _at(before, "bytes_at", length), _at(after, "bytes_at", length)),
            _change(bytes_text, _at(before, "idle_bytes_at", length), _at(after, "idle_bytes_at", length)),
            _change(bytes_text, _at(before, "full_bytes_at", length), _at(after, "full_bytes_at", length)),
            _change(
                count_text, _at(before, "conversations_at", length), _at(after, "conversations_at", length)
            ),
        )
        for length in sorted((str(key) for key in after.get("bytes_at", {})), key=int)
    ]
    table = text_table(
        rows, ("Conversation of", "Memory", "While idle", "Full cache", "How many fit"), "preview"
    )
    facts = text_table(
        [
            (label, _change(form, before.get(key), after.get(key)))
            for label, key, form in (
                ("Raw tail of a conversation", "ring_bytes", bytes_text),
                ("Page ids in a row", "row_width", count_text),
                ("Kept beyond the heads' budgets", "fragmentation", percent_text),
                ("Padding of pages", "padding_share", percent_text),
            )
        ],
        (),
        "facts",
    )
    summary = (
        f'<p class="saving">With retention <b>{percent_text(values.retention)}</b>, groups of '
        f"<b>{values.group_size or automatic}</b> heads and a safety margin of <b>{values.alpha:g}</b>:</p>"
    )
    warnings = "".join(notice(_capital(str(text)), "warn") for text in after.get("warnings", []))
    same = before == after
    note = "<p class='empty'>This is what runs now.</p>" if same else ""
    return summary + note + table + facts + warnings


def _at(report: Mapping[str, Any], key: str, length: str) -> float | None:
    values = report.get(key)
    value = values.get(length) if isinstance(values, Mapping) else None
    return value if isinstance(value, int | float) else None


def _change(form: Any, before: object, after: object) -> str:
    new = form(after) if isinstance(after, int | float) else "–"
    old = form(before) if isinstance(before, int | float) else "–"
    return new if old == new else f"{old} → {new}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _thousands(length: str) -> str:
    count = int(length)
    return f"{count // 1024}k" if count % 1024 == 0 else escape(count_text(count))
