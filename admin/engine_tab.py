"""Tab "Engine": counters, configuration, log."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

import gradio as gr

from admin.console import Console
from admin.guarded import guarded

LOG_LINES = 200


@dataclass(frozen=True)
class EngineTab:
    """Components and their values."""

    console: Console
    live_outputs: list[Any]

    def live(self) -> list[Any]:
        """Values for :attr:`live_outputs`."""
        return [self.console.renderer.counters(), self.console.renderer.config()]


def log_panel(lines: list[str]) -> str:
    """The log as escaped, preformatted text, newest line last."""
    text = "\n".join(lines) or "The log is empty."
    return f'<pre class="log" tabindex="0" aria-label="Engine log">{escape(text)}</pre>'


def build(console: Console) -> EngineTab:
    """Create the components; call inside ``gr.Blocks``."""
    with gr.Column(elem_classes=["tc-panel"]):
        gr.HTML("<h2>Since the engine started</h2>", apply_default_css=False)
        counters = gr.HTML(elem_id="counters", apply_default_css=False)
    with gr.Column(elem_classes=["tc-panel"]):
        gr.HTML("<h2>Configuration</h2>", apply_default_css=False)
        config = gr.HTML(elem_id="config", apply_default_css=False)
    with gr.Accordion("Engine log", open=False, elem_id="log-accordion") as accordion:
        log = gr.HTML(elem_id="log", apply_default_css=False)
        reload = gr.Button("Read again", size="sm", variant="secondary")

    async def read_log() -> str:
        return log_panel(list(console.engine.log_tail(LOG_LINES)))

    options: dict[str, Any] = {"show_progress": "hidden", "concurrency_limit": 8, "api_visibility": "private"}
    accordion.expand(guarded(console.access, read_log), None, [log], **options)
    reload.click(guarded(console.access, read_log), None, [log], **options)
    return EngineTab(console, [counters, config])
