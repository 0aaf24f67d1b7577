"""Part of the tab "Profiles": the chosen profile against another one, by their budgets and on the model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import gradio as gr

from admin.access import SignedIn
from admin.console import Console
from admin.errors import TuneError
from admin.evaluation_panels import evaluation_panel, result_panel
from admin.figures import difference_map
from admin.guarded import guarded
from admin.live_plot import live_plot
from admin.panels import notice
from admin.profile_panels import comparison_panel
from app.engine_settings import AUTO, NONE
from app.errors import AppError
from db.errors import DbError

LENGTHS = (4096, 16384)
_BY_NAME = '<p class="hint">To compare a profile, choose it by its name.</p>'
_SAME = '<p class="hint">Both are the same profile: choose another one to compare with.</p>'
_HINT = (
    '<p class="hint">Trying asks the model about facts that look alike, and takes its loss on text, with '
    "everything kept and with both profiles, at the engine's settings. It holds the model a second time, on "
    "the processor and at the lowest priority: nothing restarts.</p>"
)


@dataclass(frozen=True)
class Comparison:
    """Components and their values."""

    console: Console
    other: Any
    live_outputs: list[Any]

    def live(self) -> list[Any]:
        """Values for :attr:`live_outputs`."""
        record = self.console.services.evaluation.record
        running = record is not None and record.running
        ended = repr(None if record is None else (record.started, record.state.value))
        return [
            evaluation_panel(record),
            ended,
            gr.update(interactive=not running),
            gr.update(visible=running),
        ]


async def attempt(work: Callable[[], Awaitable[object]]) -> str:
    """Do it; a notice with what was refused, "" if nothing was."""
    try:
        await work()
    except (AppError, TuneError, DbError) as error:
        return notice(str(error), "bad")
    return ""


def in_force(console: Console) -> str | None:
    """The file by which the running engine's heads have their budgets, as last seen."""
    snapshot = console.sampler.latest.snapshot
    if snapshot is None or snapshot.config.get("scope") == "uniform":
        return None
    found = snapshot.config.get("profile")
    return None if found in (None, AUTO) else str(found)


def build(console: Console, choice: Any) -> Comparison:
    """Create the components; call inside ``gr.Blocks``. ``choice``: the dropdown with the chosen profile."""
    profiles, evaluation = console.profiles, console.services.evaluation
    other = gr.Dropdown([], value=None, label="Compare with", elem_id="profile-other")
    shown = gr.HTML(elem_id="profile-comparison", apply_default_css=False)
    with gr.Column(visible=False) as difference_box:
        gr.HTML("<h3>What heads gain with the other one</h3>", apply_default_css=False)
        difference = live_plot("profile-difference", "Difference of budgets by head", 170)
    less: dict[str, Any] = {"variant": "secondary", "size": "sm"}
    with gr.Column(visible=False) as trial:
        with gr.Row(elem_classes=["actions"]):
            begin = gr.Button("Try both on the model", elem_id="evaluation-start", **less)
        gr.HTML(_HINT, apply_default_css=False)
    refusal = gr.HTML(elem_id="evaluation-refusal", apply_default_css=False)
    progress = gr.HTML(elem_id="evaluation-progress", apply_default_css=False)
    with gr.Row(elem_classes=["actions"]):  # whatever is chosen: a new profile is tried by itself
        cancel = gr.Button("Cancel", visible=False, elem_id="evaluation-cancel", **less)
    result = gr.HTML(elem_id="evaluation-result", apply_default_css=False)
    # In the page but not seen, as in the tab "Tune".
    ended = gr.Textbox(visible="hidden", show_label=False, container=False)

    async def compare(chosen: str, compared: str | None) -> tuple[str, Any, Any, Any]:
        nothing = gr.skip(), gr.update(visible=False), gr.update(visible=False)
        if not compared:
            return "", *nothing
        if chosen in (AUTO, NONE):
            return _BY_NAME, *nothing
        if chosen == compared:
            return _SAME, *nothing
        snapshot = console.sampler.latest.snapshot
        config = snapshot.config if snapshot is not None else {}
        retention, margin = float(config.get("retention", 0.5)), float(config.get("alpha", 1.0))
        try:
            found = await profiles.compare(chosen, compared, min(retention, 0.99), margin)
        except AppError as error:
            return notice(str(error), "bad"), *nothing
        equal = compared == NONE
        both = (
            await profiles.costs(chosen, config, LENGTHS),
            await profiles.costs(chosen if equal else compared, config, LENGTHS, equal=equal),
        )
        picture = difference_map(found["first"], found["second"]).to_json()
        words = comparison_panel("chosen", "equal" if equal else "other", found, both)
        return words, picture, gr.update(visible=True), gr.update(visible=True)

    async def read_result(chosen: str, compared: str | None) -> str:
        if not compared or chosen in (AUTO, NONE):
            return ""
        try:
            return result_panel((await evaluation.results(chosen)).get(compared))
        except AppError:
            return ""  # the profile was discarded meanwhile

    async def start(user: SignedIn, chosen: str, compared: str | None) -> tuple[str, str]:
        refused = await attempt(lambda: evaluation.start(user.id, chosen, compared))
        return refused, evaluation_panel(evaluation.record)

    async def end(user: SignedIn) -> tuple[str, str]:
        return await attempt(lambda: evaluation.cancel(user.id)), evaluation_panel(evaluation.record)

    access = console.access
    options: dict[str, Any] = {"show_progress": "hidden", "concurrency_limit": 8, "api_visibility": "private"}
    pair = [choice, other]
    chosen = [choice.change, other.change]
    gr.on(chosen, guarded(access, compare), pair, [shown, difference, difference_box, trial], **options)
    gr.on([*chosen, ended.change], guarded(access, read_result), pair, result, **options)
    once: dict[str, Any] = {**options, "trigger_mode": "once"}
    begin.click(guarded(access, start, with_user=True), pair, [refusal, progress], **once)
    cancel.click(guarded(access, end, with_user=True), None, [refusal, progress], **once)
    return Comparison(console, other, [progress, ended, begin, cancel])
