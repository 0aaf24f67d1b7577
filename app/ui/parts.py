"""The components of the chat page that events change."""

from dataclasses import dataclass, fields
from typing import Any

import gradio as gr


@dataclass(frozen=True)
class Parts:
    """The components of the page that events change."""

    conversations: gr.HTML
    account: gr.HTML
    top: gr.HTML
    meter: gr.HTML
    banner: gr.HTML
    chatbot: gr.Chatbot
    composer: gr.Textbox
    notice: gr.HTML
    toast: gr.HTML
    search: gr.Textbox
    conversation: gr.Textbox
    """Hidden: id of the open conversation, empty for a new one."""
    leaf: gr.Textbox
    """Hidden: id of the last message shown."""
    span: gr.Textbox
    """Hidden: how many messages are shown at most, the last ones."""
    live: gr.Textbox
    """Hidden: id of the reply being written, the span, and a number that makes every value new."""

    def all(self) -> list[Any]:
        return [getattr(self, each.name) for each in fields(self)]
