"""The table that says what other settings would change, before anything happens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from admin.panels import notice, text_table
from admin.text import bytes_text, count_text, percent_text
from admin.tuning import TuneValues

_HINT = (
    '<p class="hint">Fit: so many of that length at once, one of them being answered, the others idle. '
    "Needs: of all heads in all calibration samples, those whose need is within what the head keeps at this "
    "retention. What a profile says it covers (tab Profiles) is the same before needs are scaled to a "
    "retention, so it is higher.</p>"
)

_ROW, _SPLIT, _UNSPLIT = "Page ids in a row", "Evenness of the split of work", "The same with a block a head"
_MEANINGS = {
    _ROW: "the length of a request's list of where its pages lie, at the model's greatest length.",
    _SPLIT: "in a decode step each layer's history is cut into equal runs for 132 blocks of a GPU; this is "
    "the share of their time in which they read rather than wait for the longest run. 100% is even.",
    _UNSPLIT: "what that share would be if one block read each head, and all waited for the head that keeps "
    "most.",
}


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
    table = text_table(rows, ("Conversation of", "Memory", "While idle", "Full cache", "Fit"), "preview")
    figures = [
        (label, _change(form, before.get(key), after.get(key)))
        for label, key, form in (
            ("A token of sealed history", "sealed_bytes_per_token", bytes_text),
            ("Raw tail of a conversation", "ring_bytes", bytes_text),
            (_ROW, "row_width", count_text),
            ("Needs that heads keep in full", "covered", percent_text),
            ("Kept beyond the heads' budgets", "fragmentation", percent_text),
            ("Padding of pages", "padding_share", percent_text),
        )
        if after.get(key) is not None or before.get(key) is not None
    ]
    figures += _by_longest(before, after)
    facts = text_table(figures, (), "facts") + _meanings([label for label, _ in figures])
    summary = (
        f'<p class="saving">With retention <b>{percent_text(values.retention)}</b>, groups of '
        f"<b>{values.group_size or automatic}</b> heads and a safety margin of <b>{values.alpha:g}</b>:</p>"
    )
    warnings = "".join(notice(_capital(str(text)), "warn") for text in after.get("warnings", []))
    pending = notice("Pending restart: nothing changes until you apply it.", "info")
    note = "<p class='empty'>This is what runs now.</p>" if before == after else pending
    return summary + note + table + _HINT + facts + warnings


def _meanings(labels: Sequence[str]) -> str:
    """What those figures are whose names do not tell; on the page, as a phone shows no tooltip."""
    lines = "".join(f"<li>{label}: {_MEANINGS[label]}</li>" for label in labels if label in _MEANINGS)
    return f'<ul class="hint meanings">{lines}</ul>' if lines else ""


def _by_longest(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Figures of the longest conversation: bytes a token, and how even a decode step's reading is cut."""
    lengths = sorted((str(key) for key in after.get("split_at", {})), key=int)
    if not lengths:
        return []
    length = lengths[-1]
    return [
        (label, _change(form, _at(before, key, length), _at(after, key, length)))
        for label, key, form in (
            (f"A token of {_thousands(length)}", "bytes_per_token_at", bytes_text),
            (_SPLIT, "split_at", percent_text),
            (_UNSPLIT, "split_unsplit_at", percent_text),
        )
    ]


def _at(report: Mapping[str, Any], key: str, length: str) -> float | None:
    values = report.get(key)
    value = values.get(length) if isinstance(values, Mapping) else None
    return value if isinstance(value, int | float) else None


def _change(form: Any, before: object, after: object) -> str:
    new = form(after) if isinstance(after, int | float) else "–"
    old = form(before) if isinstance(before, int | float) else "–"
    # A number stays with its unit; the line breaks at the arrow, where it must.
    old, new = (text.replace(" ", "\u00a0") for text in (old, new))
    return new if old == new else f"{old} → {new}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _thousands(length: str) -> str:
    count = int(length)
    return f"{count // 1024}k" if count % 1024 == 0 else escape(count_text(count))
