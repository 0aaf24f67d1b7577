"""Tab "Memory": which head holds what, how full the pool is, who holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr

from admin.console import Console
from admin.figures import MAP_VIEWS, TOKENS
from admin.guarded import guarded
from admin.live_plot import live_plot
from admin.panels import map_title


@dataclass(frozen=True)
class MemoryTab:
    """Components and their values."""

    console: Console
    view: gr.Radio
    quick_outputs: list[Any]
    over_time: gr.HTML

    def quick(self, view: str) -> list[Any]:
        """Values for :attr:`quick_outputs`."""
        renderer = self.console.renderer
        return [
            renderer.map_title(),
            renderer.memory_map(view),
            renderer.pool_bar(),
            renderer.pool_table(),
            renderer.saving(),
            renderer.sequences(),
        ]


def build(console: Console) -> MemoryTab:
    """Create the components; call inside ``gr.Blocks``."""
    with gr.Column(elem_classes=["tc-panel"]):
        title = gr.HTML(map_title(None), elem_id="map-title", apply_default_css=False)
        view = gr.Radio(
            list(MAP_VIEWS),
            value=TOKENS,
            label="Colour shows",
            show_label=False,
            container=False,
            elem_id="map-view",
            elem_classes=["segments"],
        )
        memory_map = live_plot("memory-map", "Memory by layer and KV head", 210)
    with gr.Row(equal_height=True, elem_classes=["two"]):
        with gr.Column(elem_classes=["tc-panel"], min_width=280):
            gr.HTML("<h2>Page pool</h2>", apply_default_css=False)
            bar = live_plot("pool-bar", "Pages of the pool by use", 44)
            table = gr.HTML(elem_id="pool-table", apply_default_css=False)
            saving = gr.HTML(elem_id="saving", apply_default_css=False)
        with gr.Column(elem_classes=["tc-panel"], min_width=280):
            gr.HTML("<h2>The last hour</h2>", apply_default_css=False)
            over_time = live_plot("pool-time", "Memory in use over the last hour", 240)
    with gr.Column(elem_classes=["tc-panel"]):
        gr.HTML("<h2>Conversations by memory</h2>", apply_default_css=False)
        sequences = gr.HTML(elem_id="sequences", apply_default_css=False)

    async def show(chosen: str) -> str:
        return console.renderer.memory_map(chosen)

    view.change(
        guarded(console.access, show),
        [view],
        [memory_map],
        show_progress="hidden",
        queue=False,
        api_visibility="private",
    )
    return MemoryTab(console, view, [title, memory_map, bar, table, saving, sequences], over_time)
