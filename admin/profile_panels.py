"""HTML of the tab "Profiles": pure functions from data to markup. All text is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from admin.panels import notice, text_table
from admin.text import bytes_text, duration_text, percent_text
from app.calibration_record import CalibrationRecord, CalibrationState
from app.profiles import ProfileEntry

SHOWN_HEADS = 5
MADE_LABELS = {"oracle": "Judge", "scope": "Scope", "data": "Texts", "length": "Tokens of a text"}
MADE_LABELS |= {"samples": "Texts read", "model": "Model", "created": "Made", "dtype": "Computed in"}
MADE_LABELS |= {"seed": "Seed", "alpha": "Safety margin", "retention": "Retention"}
MADE_LABELS |= {"weights": "Weights", "samples_hash": "Hash of the texts"}


def profiles_table(entries: Sequence[ProfileEntry], in_force: str | None) -> str:
    """One row a profile: what it is for, what it is based on, whether heads have their budgets by it."""
    if not entries:
        return '<p class="empty">No profile yet. Calibrate one beside.</p>'
    rows = "".join(_profile_row(entry, str(entry.path) == in_force) for entry in entries)
    return f'<ul class="profiles">{rows}</ul>'


def _profile_row(entry: ProfileEntry, used: bool) -> str:
    tags = '<span class="tag used">in use</span>' if used else ""
    tags += '<span class="tag">shipped</span>' if entry.shipped else ""
    lines = [f'<b title="{escape(entry.name)}">{escape(title(entry))}</b>{tags}']
    if entry.problem:
        lines.append(f'<small class="bad">{escape(entry.problem)}</small>')
    else:
        lines.append(f"<small>{escape(_basis(entry.about))}</small>")
        lines += [f'<small class="note">Note: {escape(note)}</small>' for note in entry.about["notes"]]
    return f"<li>{''.join(lines)}</li>"


def title(entry: ProfileEntry) -> str:
    """How a profile is called in lists: its model and when it was made, or its file."""
    about = entry.about
    if entry.problem or about.get("model") is None:
        return entry.name
    return f"{about['model']}, {str(about['created']).replace('T', ' ')[:16]}"


def _basis(about: Mapping[str, Any]) -> str:
    shape = f"{about['layers']} layers × {about['kv_heads']} KV heads"
    if about.get("model") is None:
        return f"{shape}, written by hand"
    made = about["settings"]
    shares = " and ".join(percent_text(share) for share in about["retentions"])
    drift = "" if about["watches_drift"] else ", no reference for drift"
    return (
        f"{shape}; {about['samples']} texts of {made['length']:,} tokens ({made['data']}), judged by "
        f"{made['oracle']} at {shares}{drift}"
    )


def state_notice(in_force: str | None, ready: bool) -> str:
    """What heads have their budgets by now."""
    if not ready:
        return ""
    if in_force is None:
        return notice(
            "No profile is in use: all heads keep the same, which loses details. Calibrate this model, or "
            "choose a profile that was made for it.",
            "warn",
        )
    return ""


def calibration_panel(record: CalibrationRecord | None) -> str:
    """How far a calibration is, or how it ended; empty when there was none."""
    if record is None:
        return ""
    share = record.done / record.total if record.total else 0.0
    counted = f"{record.done} of {record.total} texts" if record.total else "loading the model"
    if record.state is CalibrationState.RUNNING:
        left = record.remaining_seconds
        more = f", about {duration_text(left)} left" if left is not None and record.total else ""
        return progress_bar(f"Calibrating {record.model}: {counted}{more}", share)
    if record.state is CalibrationState.CANCELLED:
        return progress_bar(f"Cancelled at {counted}. What was found is kept.", share)
    if record.state is CalibrationState.FAILED:
        return notice(f"The calibration of {record.model} failed. {record.message}", "bad")
    took = (record.ended or record.started) - record.started
    text = f"Calibrated {record.model} on {record.done} texts in {duration_text(took / 1000)}: {record.out}"
    return notice(text, "good")


def progress_bar(text: str, share: float, label: str = "Texts read") -> str:
    """A line with a bar."""
    percent = round(100 * share)
    return (
        f'<div class="calibrating" role="status"><span>{escape(text)}</span>'
        f'<div class="bar" role="progressbar" aria-valuenow="{percent}" aria-valuemin="0" '
        f'aria-valuemax="100" aria-label="{escape(label)}"><i style="width:{percent}%"></i></div></div>'
    )


def comparison_panel(
    first: str,
    second: str,
    found: Mapping[str, Any],
    costs: tuple[Mapping[int, int], Mapping[int, int]] = ({}, {}),
) -> str:
    """How two profiles' budgets differ, in a sentence, and the heads that differ most. ``costs``: bytes that
    conversations hold with each, by their lengths."""
    alike = found["rank_correlation"]  # None where the second puts heads in no order
    order = "" if alike is None else f". The heads' order agrees by <b>{alike:.2f}</b> (1 is the same)"
    summary = (
        f'<p class="saving">At retention <b>{percent_text(found["retention"])}</b> budgets differ by '
        f"<b>{percent_text(found['mean_difference'])}</b> of a head's history on average, "
        f"<b>{percent_text(found['largest_difference'])}</b> at most{order}; half of the difference moves "
        "between heads.</p>"
    )
    heads = [
        (
            f"Layer {one['layer']}, KV head {one['head']}",
            percent_text(one["first"]),
            percent_text(one["second"]),
        )
        for one in found["heads"][:SHOWN_HEADS]
    ]
    made = [
        (MADE_LABELS.get(name, name), str(ours), str(theirs))
        for name, (ours, theirs) in found["made_differently"].items()
    ]
    memory = [
        (f"{tokens:,} tokens", bytes_text(costs[0][tokens]), bytes_text(costs[1][tokens]))
        for tokens in sorted(costs[0].keys() & costs[1].keys())
    ]
    if memory:
        summary += text_table(memory, ("Predicted memory of", first, second), "compared")
    table = text_table(heads, ("Heads that differ most", first, second), "compared")
    return summary + table + (text_table(made, ("Made with", first, second), "compared") if made else "")
