"""HTML of trying profiles: how far it is, and what was found. All text is escaped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from html import escape
from typing import Any

from admin.panels import notice, text_table
from admin.profile_panels import progress_bar
from admin.text import duration_text, percent_text, time_text
from app.calibration_record import CalibrationState
from app.evaluation import EvaluationRecord
from tangram.calibration.verdict import sentences

Form = Callable[[Mapping[str, Any]], str]
ROWS: tuple[tuple[str, Form], ...] = (
    ("Right answers about facts", lambda one: f"{one['right']} of {one['asked']}"),
    ("Loss of an answer", lambda one: f"{one['answer_loss']:.3f}"),
    ("Loss of other text", lambda one: f"{one['text_loss']:.3f}"),
)


def evaluation_panel(record: EvaluationRecord | None) -> str:
    """How far it is, or that it failed; empty when there was none, and when its result can be shown."""
    if record is None or record.state is CalibrationState.DONE:
        return ""
    share = record.done / record.total if record.total else 0.0
    counted = f"{record.done} of {record.total} readings" if record.total else "loading the model"
    names = f"{record.profile} against {_called(record.other)}"
    if record.running:
        left = record.remaining_seconds
        more = f", about {duration_text(left)} left" if left is not None else ""
        return progress_bar(f"Trying {names}: {counted}{more}", share, "Readings")
    if record.state is CalibrationState.CANCELLED:
        return notice(f"Trying {names} was cancelled at {counted}.", "info")
    return notice(f"Trying {names} failed. {record.message}", "bad")


def result_panel(found: Mapping[str, Any] | None) -> str:
    """What was found of two profiles; empty where they were not tried."""
    if found is None:
        return ""
    first, second = found["profiles"]
    rows = [(label, *(form(one) for one in (found["everything"], first, second))) for label, form in ROWS]
    table = text_table(rows, ("Tried", "all kept", "chosen", "other"), "compared tried")
    said = "".join(f"<li>{escape(one)}</li>" for one in sentences(found, "the chosen one", "the other one"))
    return f'{table}<ul class="said">{said}</ul><p class="hint">{escape(_provenance(found))}</p>'


def _provenance(found: Mapping[str, Any]) -> str:
    made_at = time_text(datetime.fromisoformat(found["created"]).timestamp())
    made, probe, names = found["settings"], found["probe"], [one["profile"] for one in found["profiles"]]
    return (
        f"{names[0]} against {_called(names[1])}, at retention {percent_text(made['retention'])} and safety "
        f"margin {made['alpha']:g}{_ranked(found)}, on {probe['passages']} texts of "
        f"{probe['tokens']:,} tokens; {found['model']['name']} in {found['dtype']}, {made_at}, "
        f"{duration_text(found['seconds'])}."
    )


def _ranked(found: Mapping[str, Any]) -> str:
    """By which scorer; "" in results that do not tell, as those of earlier releases."""
    first, second = (one.get("scorer", "") for one in found["profiles"])
    if not first or not second:
        return ""
    return f", ranked by {first}" + ("" if first == second else f" against {second}")


def _called(name: str) -> str:
    return "equal budgets" if name == "none" else name
