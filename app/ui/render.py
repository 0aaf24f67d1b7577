"""From stored messages to what the Chatbot shows, and the notes around it."""

from collections.abc import Sequence
from html import escape
from typing import Any

from app.ui import icons
from app.ui.footer import message_footer, reply_footer
from app.ui.markdown import safe_message, safe_reply
from app.ui.reasoning import part, thoughts_html
from db.views import OPEN_STATUSES, ConversationView, MessageView

UNTITLED = "New conversation"

_EARLIER = (
    '<div class="tc-earlier"><button type="button" data-act="show_earlier">'
    "Show earlier messages</button></div>"
)


def is_live(status: str) -> bool:
    """Whether a reply with this status is still being written."""
    return status in OPEN_STATUSES


def _component(html: str) -> dict[str, Any]:
    """A piece of our own HTML inside a chat message (message text in it is escaped)."""
    return {
        "type": "component",
        "component": "html",
        "value": html,
        "constructor_args": {},
        "props": {"html_template": "${value}", "js_on_load": None, "apply_default_css": False},
    }


def chat_message(
    message: MessageView, *, first: bool = False, last: bool = True, position: int | None = None
) -> dict[str, Any]:
    """Return one message in the Chatbot's format: its text, then its footer.

    `first`: it is the first one shown, and may not be the first there is. `last`: nothing follows it.
    `position`: its place in the queue while it waits.
    """
    content = [_component(_EARLIER)] if first and message.parent_id is not None else []
    if message.role == "user":
        content.append({"type": "text", "text": safe_message(message.content)})
        content.append(_component(message_footer(message)))
        return {"role": message.role, "content": content}
    parted = part(message.content)
    if thoughts := thoughts_html(parted, is_live(message.status)):
        content.append(_component(thoughts))
    if parted.answer:
        content.append({"type": "text", "text": safe_reply(parted.answer)})
    content.append(_component(reply_footer(message, last=last, position=position)))
    return {"role": message.role, "content": content}


def chat_messages(path: Sequence[MessageView], *, more: bool = False) -> list[dict[str, Any]]:
    """Return a conversation's path, or its end, in the Chatbot's format. `more`: another message follows."""
    final = len(path) - 1
    return [
        chat_message(message, first=place == 0, last=place == final and not more)
        for place, message in enumerate(path)
    ]


def notice(text: str, kind: str = "danger") -> str:
    """Return a message above the input, announced to screen readers; empty text hides it."""
    if not text:
        return ""
    return (
        f'<div class="tc-notice tc-{kind}" role="alert"><span>{escape(text)}</span>'
        '<button type="button" class="tc-icon" data-act="dismiss" aria-label="Dismiss">'
        f"{icons.CLOSE}</button></div>"
    )


def undo_toast(conversation: ConversationView, act: str = "restore_chat") -> str:
    """Return the note shown after a deletion or archiving. It fades (CSS) and offers the way back."""
    title = escape(conversation.title or UNTITLED, quote=True)
    own = escape(conversation.id, quote=True)
    done = "Deleted" if act == "restore_chat" else "Archived"
    return (
        f'<div class="tc-toast" role="status" data-key="{own}"><span>{done} “<b>{title}</b>”</span>'
        f'<button type="button" data-act="{act}" data-id="{own}">Undo</button></div>'
    )
