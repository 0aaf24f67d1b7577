"""Tab "Profiles": what heads have their budgets by, calibrating, comparing, choosing and going back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr

from admin.access import SignedIn
from admin.comparison import Comparison, attempt, in_force
from admin.comparison import build as comparison_part
from admin.console import Console
from admin.engine_panels import change_panel, log_panel
from admin.errors import TuneError
from admin.guarded import guarded
from admin.panels import doing_text, notice
from admin.profile_panels import (
    calibration_panel,
    profiles_table,
    state_notice,
    title,
)
from admin.text import duration_text
from admin.tuning import number
from app.calibration import BUILTIN, CONVERSATIONS, UPLOADED, Calibration
from app.calibration_record import CalibrationRecord, CalibrationState
from app.engine_settings import AUTO, NONE

LOG_LINES = 200
CHOICES = [("Shipped for this model, if any", AUTO), ("None: all heads keep the same", NONE)]
EQUAL = ("All heads keep the same", NONE)
ORACLES = [
    ("KVzip: what repeating a text needs", "kvzip"),
    ("KeyDiff: the keys alone", "keydiff"),
    ("Expected attention", "expected_attention"),
    ("SnapKV", "snapkv"),
]
DATA = [
    ("Built-in texts", BUILTIN),
    ("Conversations of people who allow it", CONVERSATIONS),
    ("An uploaded file", UPLOADED),
]
_USE = (
    "The engine restarts: replies being written now get about 10 seconds to finish and are then interrupted, "
    "with their text kept; resident conversations are read again. If it does not come up, it goes back."
)
_DISCARD = "The profile's file is deleted."


@dataclass(frozen=True)
class ProfilesTab:
    """Components and their values."""

    console: Console
    comparison: Comparison
    live_outputs: list[Any]

    async def live(self) -> list[Any]:
        """Values for :attr:`live_outputs`."""
        console = self.console
        entries, used = await console.profiles.every(), in_force(console)
        status = console.engine.status
        return [
            state_notice(used, status.ready and console.sampler.latest.snapshot is not None),
            profiles_table(entries, used),
            change_panel(console.profiles.activation, doing_text(status)),
            calibration_panel(console.calibration.record),
            repr([entry.name for entry in entries]),
            *buttons(console.calibration.record),
            *self.comparison.live(),
        ]


def buttons(record: CalibrationRecord | None) -> list[Any]:
    """Which of Calibrate, Cancel, Go on and Forget have a meaning now."""
    running = record is not None and record.running
    left = record is not None and record.state in (CalibrationState.CANCELLED, CalibrationState.FAILED)
    return [gr.update(visible=there) for there in (not running, running, left, left)]


def form_options(
    samples: Any, length: Any, percents: str, oracle: str, alpha: Any, data: str
) -> dict[str, Any]:
    """Options of a calibration from the form; raises :class:`TuneError` with a sentence."""
    counts = {}
    for label, name, value in (("Texts", "samples", samples), ("Tokens", "length", length)):
        counts[name] = number(label, value)
        if counts[name] != int(counts[name]) or counts[name] < 1:
            raise TuneError(f"{label} must be a whole number, 1 or more.")
    try:
        shares = [float(part.strip().removesuffix("%")) / 100 for part in percents.split(",")]
    except ValueError:
        raise TuneError("Retention must be percents such as 50, or several with commas: 50, 25.") from None
    margin = number("Safety margin", alpha)
    whole = {name: int(count) for name, count in counts.items()}
    return {**whole, "retention": shares, "oracle": oracle, "alpha": margin, "data": data}


def estimate_line(calibration: Calibration, texts: Any, tokens: Any) -> str:
    """How long it will take, by the last one, and what it does to serving."""
    try:
        seconds = calibration.estimate(int(number("Texts", texts)), int(number("Tokens", tokens)))
    except TuneError:
        seconds = None
    took = (
        f"About {duration_text(seconds)}, by the last calibration here"
        if seconds is not None
        else "None was completed here yet: how long it takes is told after the first text"
    )
    return (
        f'<p class="hint">{took}. It holds the model a second time, on the processor or GPU of this machine, '
        "and runs at the lowest priority with half of the processor: replies become slower while it runs.</p>"
    )


def build(console: Console) -> ProfilesTab:
    """Create the components; call inside ``gr.Blocks``."""
    profiles, calibration = console.profiles, console.calibration
    with gr.Row(elem_classes=["two", "tune"]):
        with gr.Column(elem_classes=["tc-panel"], min_width=280):
            gr.HTML("<h2>Profiles of the heads' budgets</h2>", apply_default_css=False)
            state = gr.HTML(elem_id="profile-state", apply_default_css=False)
            table = gr.HTML(elem_id="profile-table", apply_default_css=False)
            choice = gr.Dropdown(
                CHOICES,
                value=AUTO,
                label="Profile",
                info="What to use, compare or discard.",
                elem_id="profile-choice",
            )
            with gr.Row(elem_classes=["actions"]):
                use = gr.Button("Use…", variant="primary", size="sm", elem_id="profile-use")
                back = gr.Button("Go back…", variant="secondary", size="sm", elem_id="profile-back")
                discard = gr.Button("Discard…", variant="secondary", size="sm", elem_id="profile-discard")
            with gr.Column(visible=False, elem_id="profile-confirm") as confirm:
                question = gr.HTML(apply_default_css=False)
                with gr.Row():
                    sure = gr.Button("Do it", variant="primary", size="sm", elem_id="profile-sure")
                    no = gr.Button("Cancel", variant="secondary", size="sm")
            refusal = gr.HTML(elem_id="profile-refusal", apply_default_css=False)
            progress = gr.HTML(elem_id="profile-progress", apply_default_css=False)
            comparison = comparison_part(console, choice)
            other = comparison.other
        with gr.Column(elem_classes=["tc-panel"], min_width=280):
            gr.HTML(
                '<h2>Calibrate this model</h2><p class="hint">It reads texts and finds how much of its '
                "history each head needs. That takes minutes to hours and some memory beside the engine; it "
                "can be cancelled, and goes on after a restart.</p>",
                apply_default_css=False,
            )
            running = gr.HTML(elem_id="calibration-progress", apply_default_css=False)
            with gr.Row(elem_classes=["actions"]):
                start = gr.Button("Calibrate", variant="primary", size="sm", elem_id="calibration-start")
                less: dict[str, Any] = {"variant": "secondary", "size": "sm", "visible": False}
                cancel = gr.Button("Cancel", elem_id="calibration-cancel", **less)
                resume = gr.Button("Go on", elem_id="calibration-resume", **less)
                forget = gr.Button("Forget", elem_id="calibration-forget", **less)
            failed = gr.HTML(elem_id="calibration-refusal", apply_default_css=False)
            data = gr.Radio(DATA, value="builtin", label="Texts", elem_id="calibration-data")
            upload = gr.File(
                label="JSONL: one object with a text a line",
                file_types=[".jsonl"],
                type="binary",
                height=110,
                visible=False,
                elem_id="calibration-upload",
            )
            uploaded = gr.HTML(elem_id="calibration-uploaded", apply_default_css=False)
            samples = gr.Number(
                50, label="How many texts", info="More make it surer.", elem_id="calibration-samples"
            )
            length = gr.Number(3072, label="Tokens of a text", elem_id="calibration-length")
            percents = gr.Textbox(
                "50, 25",
                label="Retention (%)",
                info="One or more; further ones cost no time.",
                elem_id="calibration-retention",
            )
            alpha = gr.Number(1, step=0.1, label="Safety margin", elem_id="calibration-alpha")
            oracle = gr.Dropdown(ORACLES, value="kvzip", label="Judge", elem_id="calibration-oracle")
            estimate = gr.HTML(
                estimate_line(calibration, 50, 3072), elem_id="calibration-estimate", apply_default_css=False
            )
            with gr.Accordion("Log", open=False) as accordion:
                log = gr.HTML(elem_id="calibration-log", apply_default_css=False)
    # In the page but not seen, as in the tab "Tune".
    names = gr.Textbox(visible="hidden", show_label=False, container=False)
    pending = gr.State(("", ""))
    form = [samples, length, percents, oracle, alpha, data]

    async def refill(chosen: str, compared: str | None) -> tuple[Any, Any]:
        every = await profiles.every()
        entries = [(title(entry), entry.name) for entry in every]
        sound = [(title(entry), entry.name) for entry in every if not entry.problem]
        known = {AUTO, NONE, *(name for _, name in entries)}
        used = in_force(console)
        first = next((one.name for one in every if str(one.path) == used), NONE)
        # What is still there is not set: meanwhile another may have been chosen, which must stay.
        return (
            gr.update(choices=[*CHOICES, *entries], **({} if chosen in known else {"value": AUTO})),
            gr.update(
                choices=[*sound, EQUAL],
                **({} if compared in known else {"value": NONE if compared else first}),
            ),
        )

    async def ask(what: str, chosen: str) -> tuple[Any, str, tuple[str, str], str]:
        return (
            gr.update(visible=True),
            notice(_DISCARD if what == "discard" else _USE, "warn"),
            (what, chosen),
            "",
        )

    async def ask_use(chosen: str) -> Any:
        return await ask("use", chosen)

    async def ask_back(chosen: str) -> Any:
        return await ask("back", chosen)

    async def ask_discard(chosen: str) -> Any:
        return await ask("discard", chosen)

    async def do(user: SignedIn, asked: tuple[str, str]) -> tuple[Any, str]:
        what, chosen = asked
        if what == "use":
            said = await attempt(lambda: profiles.activate(user.id, chosen))
        elif what == "back":
            said = await attempt(lambda: profiles.go_back(user.id))
        else:
            said = await attempt(lambda: profiles.discard(user.id, chosen))
        return gr.update(visible=False), said

    async def hide() -> Any:
        return gr.update(visible=False)

    async def choose_data(kind: str) -> tuple[Any, str]:
        return gr.update(visible=kind == UPLOADED), ""

    async def take(user: SignedIn, content: bytes | None) -> str:
        if content is None:
            return ""

        async def work() -> None:
            counted.append(await calibration.keep_texts(user.id, content))

        counted: list[int] = []
        return await attempt(work) or notice(f"{counted[0]:,} texts are ready to be read.", "good")

    async def show_estimate(texts: Any, tokens: Any) -> str:
        return estimate_line(calibration, texts, tokens)

    async def begin(user: SignedIn, *values: Any) -> tuple[str, str]:
        async def work() -> None:
            await calibration.start(user.id, form_options(*values))

        return await attempt(work), calibration_panel(calibration.record)

    async def end(user: SignedIn) -> tuple[str, str]:
        return await attempt(lambda: calibration.cancel(user.id)), calibration_panel(calibration.record)

    async def go_on(user: SignedIn) -> tuple[str, str]:
        return await attempt(lambda: calibration.resume(user.id)), calibration_panel(calibration.record)

    async def drop(user: SignedIn) -> tuple[str, str]:
        return await attempt(lambda: calibration.discard(user.id)), calibration_panel(calibration.record)

    async def read_log() -> str:
        return log_panel(calibration.log_tail(LOG_LINES))

    access = console.access
    options: dict[str, Any] = {"show_progress": "hidden", "concurrency_limit": 8, "api_visibility": "private"}
    names.change(guarded(access, refill), [choice, other], [choice, other], **options)
    for button, handler in ((use, ask_use), (back, ask_back), (discard, ask_discard)):
        button.click(guarded(access, handler), choice, [confirm, question, pending, refusal], **options)
    once: dict[str, Any] = {**options, "trigger_mode": "once"}
    sure.click(guarded(access, do, with_user=True), pending, [confirm, refusal], **once)
    no.click(guarded(access, hide), None, [confirm], **options)
    start.click(guarded(access, begin, with_user=True), form, [failed, running], **once)
    for button, work in ((cancel, end), (resume, go_on), (forget, drop)):
        button.click(guarded(access, work, with_user=True), None, [failed, running], **once)
    data.change(guarded(access, choose_data), data, [upload, uploaded], **options)
    upload.upload(guarded(access, take, with_user=True), upload, uploaded, **options)
    gr.on(
        [samples.change, length.change],
        guarded(access, show_estimate),
        [samples, length],
        estimate,
        **options,
    )
    accordion.expand(guarded(access, read_log), None, [log], **options)
    shown = [start, cancel, resume, forget]
    live = [state, table, progress, running, names, *shown, *comparison.live_outputs]
    return ProfilesTab(console, comparison, live)
