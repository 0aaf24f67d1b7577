"""The part of the page above the tabs."""

from __future__ import annotations

from dataclasses import dataclass
from time import time
from typing import Any

import gradio as gr

from admin import panels
from admin.console import Console


@dataclass(frozen=True)
class Top:
    """Header, banner and the row of numbers."""

    console: Console
    outputs: list[Any]

    def values(self) -> list[Any]:
        """Values for :attr:`outputs`."""
        status = self.console.engine.status
        uptime = max(0.0, time() - status.since / 1000) if status.ready else None
        away = self.console.renderer.away()
        return [
            panels.header(status.state, status.model, uptime),
            gr.update(value=away, visible=bool(away)),
            self.console.renderer.cards(),
        ]


def build(console: Console) -> Top:
    """Create the components; call inside ``gr.Blocks``."""
    outputs = [
        gr.HTML(elem_id="admin-head", apply_default_css=False),
        gr.HTML(elem_id="engine-away", visible=False, apply_default_css=False),
        gr.HTML(panels.cards(None, None, None), elem_id="admin-cards", apply_default_css=False),
    ]
    return Top(console, outputs)
