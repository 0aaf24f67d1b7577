"""The part of the page above the tabs."""

from __future__ import annotations

from dataclasses import dataclass
from time import time
from typing import Any

import gradio as gr

from admin import panels
from admin.console import Console
from admin.live_html import live_html


@dataclass(frozen=True)
class Top:
    """Header, alerts, banner and the row of numbers."""

    console: Console
    outputs: list[Any]

    def values(self) -> list[Any]:
        """Values for :attr:`outputs`."""
        status, alerts = self.console.engine.status, self.console.watch.alerts
        uptime = max(0.0, time() - status.since / 1000) if status.ready else None
        down = any(alert.name == "engine_down" for alert in alerts)
        away = self.console.renderer.away(short=down)
        state = "stalled" if status.stalled else "paused" if self.console.engine.held else status.state.value
        return [
            panels.header(state, status.model, uptime, alerts),
            panels.alerts_panel(alerts),
            gr.update(value=away, visible=bool(away)),
            self.console.renderer.cards(),
        ]


def build(console: Console) -> Top:
    """Create the components; call inside ``gr.Blocks``."""
    outputs = [
        live_html("admin-head"),
        live_html("alerts"),
        gr.HTML(elem_id="engine-away", visible=False, apply_default_css=False),
        live_html("admin-cards"),
    ]
    outputs[-1].value = panels.cards(None, None, None)
    return Top(console, outputs)
