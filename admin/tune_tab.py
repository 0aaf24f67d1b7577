"""Tab "Tune": retention, group size and safety margin, with what they would change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr

from admin.access import SignedIn
from admin.console import Console
from admin.engine_panels import change_panel
from admin.errors import TuneError
from admin.guarded import Handler, guarded
from admin.panels import doing_text, notice
from admin.preview import preview_panel
from admin.sliders import slider
from admin.tuning import TuneValues, number

_WARNING = (
    "The engine restarts: replies being written now get about 10 seconds to finish and are then interrupted, "
    "with their text kept; resident conversations are read again."
)


PRESETS = {"Quality": (75, 1.0), "Balanced": (50, 1.0), "Capacity": (25, 1.0)}
"""Retention in percent and safety margin. Measured recall at them: docs/accuracy.md."""


@dataclass(frozen=True)
class TuneTab:
    """Components and their values."""

    console: Console
    form: list[Any]
    live_outputs: list[Any]

    def live(self) -> list[Any]:
        """Values for :attr:`live_outputs`: the change in progress, and the running values."""
        return [progress_panel(self.console), repr(current_values(self.console))]

    async def first_values(self) -> list[Any]:
        """What the form shows when the page opens: the running values and no change."""
        values = current_values(self.console)
        if values is None:
            return [gr.skip() for _ in self.form]
        group = values.group_size or automatic_group(self.console)
        return [round(values.retention * 100, 2), group, values.alpha]


def current_values(console: Console) -> TuneValues | None:
    """The running engine's values, or ``None`` when none was seen yet."""
    snapshot = console.sampler.latest.snapshot
    if snapshot is None:
        return None
    try:
        return TuneValues.of_config(snapshot.config)
    except TuneError:
        return None


def automatic_group(console: Console) -> int | None:
    """The group size that the engine chose by itself, or ``None`` when it was told one."""
    snapshot = console.sampler.latest.snapshot
    if snapshot is None or snapshot.config.get("group_size") is not None:
        return None
    return snapshot.group_size


def progress_panel(console: Console) -> str:
    """What the last change does or did; empty when there was none."""
    return change_panel(console.tuning.job, doing_text(console.engine.status))


def build(console: Console) -> TuneTab:
    """Create the components; call inside ``gr.Blocks``."""
    with gr.Row(elem_classes=["two", "tune"]):
        with gr.Column(elem_classes=["tc-panel"], min_width=280):
            gr.HTML("<h2>Settings of the cache</h2>", apply_default_css=False)
            with gr.Row(elem_classes=["actions"]):
                presets = [
                    gr.Button(name, variant="secondary", size="sm", elem_id=f"preset-{name.lower()}")
                    for name in PRESETS
                ]
            # Without bounds: Gradio answers a value beyond them with words of its own and replaces it.
            retention = gr.Number(
                50,
                step=1,
                label="Retention (%)",
                info="Percent of the sealed history that an average head keeps, 1 to 100.",
                elem_id="tune-retention",
            )
            slider("tune-retention", "Retention in percent", 1, 100, 1)
            group_size = gr.Number(
                16,
                label="Group size",
                info="Heads that share one page table. Larger: fewer pages to manage, coarser budgets.",
                elem_id="tune-group",
            )
            slider("tune-group", "Group size", 1, 128, 1)
            alpha = gr.Number(
                1,
                step=0.1,
                label="Safety margin",
                info="Standard deviations added to each head's measured need.",
                elem_id="tune-alpha",
            )
            slider("tune-alpha", "Safety margin", 0, 3, 0.1)
            apply = gr.Button("Apply…", variant="primary", elem_id="tune-apply")
            with gr.Column(visible=False, elem_id="tune-confirm") as confirm:
                gr.HTML(notice(_WARNING, "warn"), apply_default_css=False)
                with gr.Row():
                    sure = gr.Button("Restart the engine", variant="primary", elem_id="tune-restart")
                    cancel = gr.Button("Cancel", variant="secondary", elem_id="tune-cancel")
            refusal = gr.HTML(elem_id="tune-refusal", apply_default_css=False)
            progress = gr.HTML(elem_id="tune-progress", apply_default_css=False)
        with gr.Column(elem_classes=["tc-panel"], min_width=280):
            gr.HTML("<h2>What it would change</h2>", apply_default_css=False)
            preview = gr.HTML(elem_id="tune-preview", apply_default_css=False)
    # In the page but not seen: a component left out, or a State set outside the queue, fires no change.
    running_now = gr.Textbox(visible="hidden", show_label=False, container=False)
    form = [retention, group_size, alpha]

    async def show_preview(percent: Any, group: Any, margin: Any) -> tuple[str, Any]:
        try:
            automatic = automatic_group(console)
            values = form_values(percent, group, margin, automatic)
            after = await console.tuning.preview(values)
            running = current_values(console) or values
            before = after if running == values else await console.tuning.preview(running)
        except TuneError as error:
            return notice(str(error), "bad"), gr.skip()
        return preview_panel(values, automatic, before, after), ""

    async def ask(percent: Any, group: Any, margin: Any) -> tuple[Any, str]:
        try:
            await console.tuning.check(form_values(percent, group, margin, automatic_group(console)))
        except TuneError as error:
            return gr.update(visible=False), notice(str(error), "bad")
        return gr.update(visible=True), ""

    async def start(user: SignedIn, percent: Any, group: Any, margin: Any) -> tuple[Any, str, str]:
        try:
            values = form_values(percent, group, margin, automatic_group(console))
            await console.tuning.apply(user.id, values)
        except TuneError as error:
            return gr.update(visible=False), notice(str(error), "bad"), progress_panel(console)
        return gr.update(visible=False), "", progress_panel(console)

    async def hide() -> Any:
        return gr.update(visible=False)

    def chooser(name: str) -> Handler:
        async def choose() -> list[Any]:
            percent, margin = PRESETS[name]
            return [percent, automatic_group(console) or gr.skip(), margin]

        return choose

    access = console.access
    options: dict[str, Any] = {"show_progress": "hidden", "concurrency_limit": 8, "api_visibility": "private"}
    gr.on(
        [retention.change, group_size.change, alpha.change, running_now.change],
        guarded(access, show_preview),
        form,
        [preview, refusal],
        trigger_mode="always_last",
        **options,
    )
    apply.click(guarded(access, ask), form, [confirm, refusal], **options)
    sure.click(
        guarded(access, start, with_user=True),
        form,
        [confirm, refusal, progress],
        trigger_mode="once",
        **options,
    )
    cancel.click(guarded(access, hide), None, [confirm], **options)
    for preset, name in zip(presets, PRESETS, strict=True):
        preset.click(guarded(access, chooser(name)), None, form, **options)
    return TuneTab(console, form, [progress, running_now])


def form_values(percent: Any, group: Any, margin: Any, automatic: int | None = None) -> TuneValues:
    """Checked values of the form, where retention is in percent; see :meth:`TuneValues.checked`."""
    share = number("Retention", percent)
    if 0 < share < 1:
        raise TuneError("Retention is in percent here: 25 keeps a quarter.")
    if not 1 <= share <= 100:
        raise TuneError("Retention must be between 1 and 100 percent.")
    return TuneValues.checked(share / 100, group, margin, automatic)
