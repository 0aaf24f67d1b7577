"""Tab "Engine": what it does now, what runs in it, and pausing, restarting or replacing it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from admin.access import SignedIn
from admin.charts import PLOT_HEIGHT, PLOTS
from admin.console import Console
from admin.engine_panels import change_panel, log_panel, requests_table, state_panel
from admin.errors import TuneError
from admin.guarded import guarded
from admin.live_html import live_html
from admin.live_plot import live_plot
from admin.panels import doing_text, notice
from app.engine_change import MODEL, RESTART
from app.errors import AppError
from app.probe import probed_text

LOG_LINES = 200
BUNDLED = "The bundled model"
_RESTART = (
    "The engine restarts: replies being written now get about 10 seconds to finish and are then interrupted, "
    "with their text kept; resident conversations are read again."
)
_SWITCH = f"{_RESTART} If the other model does not come up, it goes back to this one."


@dataclass(frozen=True)
class EngineTab:
    """Components and their values."""

    console: Console
    outputs: list[Any]
    form: list[Any]

    async def first_values(self) -> Any:
        """What the form shows when the page opens."""
        served = self.console.services.engine_settings.model or BUNDLED
        return gr.update(choices=models(self.console), value=served)

    def values(self) -> list[Any]:
        """Values for :attr:`outputs`."""
        console = self.console
        status, renderer = console.engine.status, console.renderer
        held = console.engine.held
        return [
            *renderer.engine_plots(),
            state_panel(status, held, console.services.queue.waiting),
            requests_table(console.services.active.running(), console.owners.of_user),
            change_panel(console.changes.last(MODEL, RESTART), doing_text(status)),
            gr.update(value="Accept again" if held else "Pause", interactive=status.ready or held),
            renderer.counters(),
            renderer.config(),
        ]


def models(console: Console) -> list[str]:
    """What is at hand: the bundled model, directories of models in the data directory, and what is served."""
    folder = console.services.settings.models_dir
    found = [str(path.parent) for path in sorted(folder.glob("*/config.json"))]
    served = console.services.engine_settings.model
    return list(dict.fromkeys([served or BUNDLED, BUNDLED, *found]))


def build(console: Console) -> EngineTab:
    """Create the components; call inside ``gr.Blocks``."""
    with gr.Column(elem_classes=["tc-panel", "last-on-phone"]):
        gr.HTML("<h2>The last 15 minutes</h2>", apply_default_css=False)
        with gr.Row(elem_classes=["plots"]):
            plots = []
            for plot in PLOTS:
                with gr.Column(min_width=240, elem_classes=["plot"]):
                    gr.HTML(f"<h3>{plot.title}</h3>", apply_default_css=False)
                    plots.append(live_plot(f"plot-{plot.name}", plot.title, PLOT_HEIGHT))
    with gr.Row(elem_classes=["two", "tune"]):
        with gr.Column(elem_classes=["tc-panel"], min_width=280):
            gr.HTML("<h2>Requests now</h2>", apply_default_css=False)
            stopped = live_html("request-said")
            requests = live_html("requests")
        with gr.Column(elem_classes=["tc-panel"], min_width=280):
            gr.HTML("<h2>The engine</h2>", apply_default_css=False)
            state = live_html("engine-state")
            with gr.Row(elem_classes=["actions"]):
                pause = gr.Button("Pause", variant="secondary", size="sm", elem_id="engine-pause")
                restart = gr.Button("Restart…", variant="secondary", size="sm", elem_id="engine-restart")
            model = gr.Dropdown(
                models(console),
                value=BUNDLED,
                allow_custom_value=True,
                label="Model",
                info="A directory or a hub id. Conversations go on with whatever is served.",
                elem_id="engine-model",
            )
            with gr.Row(elem_classes=["actions"]):
                switch = gr.Button("Switch model…", variant="secondary", size="sm", elem_id="engine-switch")
            with gr.Column(visible=False, elem_id="engine-confirm") as confirm:
                question = gr.HTML(apply_default_css=False)
                with gr.Row(elem_classes=["actions"]):
                    sure = gr.Button("Do it", variant="primary", size="sm", elem_id="engine-sure")
                    no = gr.Button("Cancel", variant="secondary", size="sm")
            refusal = live_html("engine-refusal")
            job = live_html("engine-job")
    with gr.Column(elem_classes=["tc-panel"]):
        gr.HTML("<h2>Since the engine started</h2>", apply_default_css=False)
        counters = live_html("counters")
    with gr.Column(elem_classes=["tc-panel"]):
        gr.HTML("<h2>Configuration</h2>", apply_default_css=False)
        config = live_html("config")
    with gr.Accordion("Engine log", open=False, elem_id="log-accordion") as accordion:
        log = gr.HTML(elem_id="log", apply_default_css=False)
        reload = gr.Button("Read again", size="sm", variant="secondary")
    pending = gr.State("")
    tab = EngineTab(console, [*plots, state, requests, job, pause, counters, config], [model])
    services = console.services

    async def read_log() -> str:
        return log_panel(list(console.engine.log_tail(LOG_LINES)))

    async def stop(user: SignedIn, event: dict[str, Any]) -> str:
        request = services.active.stop(str(event.get("name", "")))
        if request is None:
            return notice("It had ended already.", "info")
        owner = console.owners.of_user(request.origin.owner)
        await services.audit.record(user.id, "request.stop", {"owner": owner, "tokens": request.tokens()})
        return notice(f"Stopped a request of {owner or 'an unknown user'}.", "good")

    async def toggle(user: SignedIn) -> list[Any]:
        if console.engine.held:
            console.engine.release()
            await services.audit.record(user.id, "engine.release")
        else:
            console.engine.hold()
            await services.audit.record(user.id, "engine.hold")
        return tab.values()

    async def ask_restart() -> tuple[Any, str, str]:
        return gr.update(visible=True), notice(_RESTART, "warn"), "restart"

    async def ask_switch() -> tuple[Any, str, str]:
        return gr.update(visible=True), notice(_SWITCH, "warn"), "switch"

    async def do(user: SignedIn, asked: str, wanted: Any) -> tuple[Any, str]:
        try:
            if asked == "restart":

                async def work() -> str:
                    await services.engine_settings.restart(user.id)
                    return "The engine was restarted and is ready."

                console.changes.start(RESTART, "as it is", work)
            else:
                chosen = wanted_model(wanted)

                async def switch_model() -> str:
                    await services.engine_settings.use_model(user.id, chosen)
                    return (
                        f"The engine is ready with this model.{probed_text(services.engine_settings.probed)}"
                    )

                console.changes.start(MODEL, chosen or BUNDLED, switch_model)
        except (TuneError, AppError) as error:
            return gr.update(visible=False), notice(str(error), "bad")
        return gr.update(visible=False), ""

    async def hide() -> Any:
        return gr.update(visible=False)

    access = console.access
    options: dict[str, Any] = {"show_progress": "hidden", "concurrency_limit": 8, "api_visibility": "private"}
    once: dict[str, Any] = {**options, "trigger_mode": "once"}
    accordion.expand(guarded(access, read_log), None, [log], **options)
    reload.click(guarded(access, read_log), None, [log], **options)
    requests.act(guarded(access, stop, with_user=True, with_event=True), None, [stopped], **options)
    pause.click(guarded(access, toggle, with_user=True), None, tab.outputs, **once)
    restart.click(guarded(access, ask_restart), None, [confirm, question, pending], **options)
    switch.click(guarded(access, ask_switch), None, [confirm, question, pending], **options)
    sure.click(guarded(access, do, with_user=True), [pending, model], [confirm, refusal], **once)
    no.click(guarded(access, hide), None, [confirm], **options)
    return tab


def wanted_model(typed: Any) -> str:
    """The model that the form names; "" for the bundled one. Raises :class:`TuneError`."""
    text = str(typed or "").strip()
    if not text:
        raise TuneError("Choose a model, or write a directory or a hub id.")
    if text == BUNDLED:
        return ""
    if text.startswith(("/", "~", ".")) and not Path(text).expanduser().is_dir():
        raise TuneError("There is no such directory on the server.")
    return text
