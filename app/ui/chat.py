"""The chat page: layout and wiring. What events do is in `app.ui.handlers`, how things look in `static/`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr

from app.services import Services
from app.ui import brand, shell
from app.ui.dialogs import dialogs
from app.ui.handlers import ChatHandlers
from app.ui.parts import Parts
from app.ui.steady_queue import make_steady

_STATIC = Path(__file__).parent / "static"
_SCRIPTS = ("chat.js", "menu.js", "thread.js", "forms.js")

# Events at once over all browsers: a stream lasts as long as its reply, the others are short.
STREAMS = 1024
QUICK = 64
WAITING = 1024
POLL_SECONDS = 3.0

_LATEX: list[dict[str, str | bool]] = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\[", "right": "\\]", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
]

_WANTED_JS = "() => [new URLSearchParams(location.search).get('c') ?? '']"
_ADDRESS_JS = (
    "(id) => history.replaceState(null, '', id ? `?c=${encodeURIComponent(id)}` : location.pathname)"
)


def _hidden(name: str) -> gr.Textbox:
    return gr.Textbox(
        elem_id=f"tc-{name}",
        elem_classes="tc-hidden",
        show_label=False,
        label=name,
        container=False,
        interactive=True,
    )


def _html(name: str, value: str = "") -> gr.HTML:
    return gr.HTML(value, elem_id=f"tc-{name}", apply_default_css=False, js_on_load=None)


def _layout() -> tuple[gr.HTML, Parts]:
    """Create the components, top to bottom, left to right."""
    with gr.Row(elem_id="tc-app"):
        with gr.Column(elem_id="tc-side", scale=0, min_width=0):
            _html("brand-row", shell.brand_row())
            search = gr.Textbox(
                elem_id="tc-search",
                label="Search conversations",
                show_label=False,
                container=False,
                lines=1,
                max_lines=1,
                placeholder="Search",
                max_length=200,
                html_attributes=gr.InputHTMLAttributes(autocomplete="off", spellcheck=False),
            )
            conversations = _html("conversations")
            account = _html("account-row")
        with gr.Column(elem_id="tc-main", min_width=0):
            with gr.Row(elem_id="tc-bar"):
                top = _html("top-bar", shell.top_bar("New conversation"))
                meter = _html("meter-row")
            banner = _html("banner-row")
            chatbot = gr.Chatbot(
                elem_id="tc-chat",
                label="Conversation",
                show_label=False,
                container=False,
                height="100%",
                buttons=[],
                editable="user",
                layout="bubble",
                latex_delimiters=_LATEX,
                sanitize_html=True,
                allow_tags=False,
                group_consecutive_messages=False,
                allow_file_downloads=False,
                feedback_options=None,
                placeholder=shell.welcome(),
                autoscroll=True,
                examples=[{"text": text, "display_text": label} for label, text in shell.EXAMPLES],
            )
            with gr.Column(elem_id="tc-dock", min_width=0):
                notice = _html("notice-row")
                composer = gr.Textbox(
                    elem_id="tc-composer",
                    label="Message",
                    show_label=False,
                    container=False,
                    lines=1,
                    max_lines=10,
                    placeholder="Message Tangram",
                    submit_btn=True,
                    stop_btn=False,
                    autofocus=True,
                )
                _html("hint-row", '<p class="tc-hint">Replies can be wrong. Check what matters.</p>')
    toast = _html("toast-row")
    conversation, leaf, span, live = (
        _hidden("conversation"),
        _hidden("leaf"),
        _hidden("span"),
        _hidden("live"),
    )
    page = gr.HTML(
        dialogs(),
        elem_id="tc-shell",
        apply_default_css=False,
        js_on_load="\n".join((_STATIC / name).read_text(encoding="utf-8") for name in _SCRIPTS),
    )
    parts = Parts(
        conversations=conversations,
        account=account,
        top=top,
        meter=meter,
        banner=banner,
        chatbot=chatbot,
        composer=composer,
        notice=notice,
        toast=toast,
        search=search,
        conversation=conversation,
        leaf=leaf,
        span=span,
        live=live,
    )
    return page, parts


def _wire(blocks: gr.Blocks, page: gr.HTML, parts: Parts, on: ChatHandlers) -> None:
    """Connect events to handlers. What starts a reply puts its id in ``live``, whose change follows it."""
    common: dict[str, Any] = {
        "show_progress": "hidden",
        "api_visibility": "private",
        "concurrency_limit": QUICK,
        "outputs": parts.all(),
    }

    def listen(event: Callable[..., Any], handler: Callable[..., Any], *inputs: Any, **options: Any) -> None:
        event(handler, inputs=list(inputs), **{**common, **options})

    chat, query = parts.conversation, parts.search
    listen(blocks.load, on.load, chat, js=_WANTED_JS)
    listen(page.open_chat, on.open_chat, query, trigger_mode="multiple")
    listen(page.new_chat, on.new_chat, query, trigger_mode="multiple")
    listen(page.show_version, on.show_version, chat, trigger_mode="multiple")
    listen(page.delete_chat, on.delete_chat, chat, query, trigger_mode="multiple")
    listen(page.restore_chat, on.restore_chat, chat, query)
    listen(page.rename_chat, on.rename_chat, chat, query)
    listen(page.archive_chat, on.archive_chat, chat, query, trigger_mode="multiple")
    listen(page.unarchive_chat, on.unarchive_chat, chat, query, trigger_mode="multiple")
    listen(page.refresh, on.refresh, query, chat, trigger_mode="multiple")
    listen(page.regenerate_reply, on.regenerate_reply, chat)
    listen(page.continue_reply, on.continue_reply, chat)
    listen(page.show_earlier, on.show_earlier, chat, parts.leaf, parts.span)
    listen(query.change, on.search, query, chat, trigger_mode="always_last")
    listen(parts.composer.submit, on.send, parts.composer, chat, parts.leaf, query)
    listen(parts.composer.stop, on.stop, parts.live)
    listen(parts.live.change, on.follow, parts.live, concurrency_limit=STREAMS, trigger_mode="multiple")
    listen(parts.chatbot.edit, on.edit_message, chat, parts.leaf, parts.span)
    listen(parts.chatbot.example_select, on.use_example, chat, parts.leaf, query)
    chat.change(None, inputs=[chat], outputs=None, js=_ADDRESS_JS, show_progress="hidden", queue=False)
    listen(parts.leaf.change, on.measure, chat, parts.leaf, outputs=[parts.meter, parts.notice])
    timer = gr.Timer(POLL_SECONDS)
    listen(timer.tick, on.tick, parts.notice, chat, parts.leaf, parts.live, parts.span, query)


def build_chat(services: Services) -> gr.Blocks:
    """Return the chat page over ``services``; `app.ui.mount` puts it into the app."""
    with gr.Blocks(title=brand.NAME, analytics_enabled=False, fill_width=True, fill_height=True) as blocks:
        page, parts = _layout()
        _wire(blocks, page, parts, ChatHandlers(services, parts))
    blocks.queue(default_concurrency_limit=QUICK, api_open=False, max_size=WAITING)
    make_steady(blocks, at_once=STREAMS + QUICK)
    return blocks
