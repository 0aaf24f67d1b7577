"""The dialogs and menus of the chat page. They are filled and answered by `static/menu.js` and `forms.js`."""

from app.sampling import DEFAULT_TEMPERATURE, DEFAULT_TOP_P
from app.transfer.own import MAX_SYSTEM_PROMPT
from app.ui import icons

_FORMATS = (("markdown", "Markdown"), ("json", "JSON, all branches"), ("sharegpt", "ShareGPT"))


def _dialog(name: str, heading: str, body: str, button: str, kind: str = "primary") -> str:
    return (
        f'<dialog id="tc-{name}-dialog" aria-labelledby="tc-{name}-title"><form method="dialog">'
        f'<h2 id="tc-{name}-title">{heading}</h2>{body}'
        '<div class="tc-buttons"><button type="button" data-act="cancel">Cancel</button>'
        f'<button type="submit" class="tc-{kind}">{button}</button></div></form></dialog>'
    )


def _number(name: str, label: str, hint: str, attributes: str) -> str:
    field = f'<input type="number" name="{name}" placeholder="{hint}" {attributes}>'
    return f"<label><span>{label}</span>{field}</label>"


def _settings() -> str:
    fields = (
        _number("temperature", "Temperature", f"{DEFAULT_TEMPERATURE:g}", 'min="0" max="2" step="any"'),
        _number("top_p", "Top p", f"{DEFAULT_TOP_P:g}", 'min="0.001" max="1" step="any"'),
        _number("max_tokens", "Longest reply (tokens)", "", 'min="1" step="1"'),
        _number("seed", "Seed", "random", 'step="1"'),
    )
    body = (
        '<label class="tc-wide"><span>System prompt</span>'
        f'<textarea name="system_prompt" rows="5" maxlength="{MAX_SYSTEM_PROMPT}" '
        'placeholder="How the model should behave in this conversation"></textarea></label>'
        f'<div class="tc-fields">{"".join(fields)}</div>'
        "<p>For this conversation, from the next reply on. Empty fields leave the choice to the model.</p>"
        '<p class="tc-problem" role="alert" hidden></p>'
    )
    return _dialog("settings", "Conversation settings", body, "Save")


def _data() -> str:
    links = "".join(
        f'<a class="tc-button" href="/api/export?format={form}" download>{label}</a>'
        for form, label in _FORMATS
    )
    return (
        '<dialog id="tc-data-dialog" aria-labelledby="tc-data-title"><form method="dialog">'
        '<h2 id="tc-data-title">Import and export</h2>'
        f'<section><h3>Export all conversations</h3><div class="tc-links">{links}</div></section>'
        "<section><h3>Import conversations</h3><p>A file of this program, ShareGPT, OpenAI messages, or "
        "<code>conversations.json</code> of a ChatGPT export; up to 32 MiB. A file with a mistake in it "
        "changes nothing.</p>"
        '<label class="tc-button tc-file"><input type="file" accept=".json,.jsonl,application/json">'
        "<span>Choose a file…</span></label></section>"
        '<p class="tc-problem" role="alert" hidden></p><p class="tc-done" role="status" hidden></p>'
        '<div class="tc-buttons"><button type="button" data-act="cancel" autofocus>Close</button></div>'
        "</form></dialog>"
    )


def _menu() -> str:
    exports = "".join(
        f'<a role="menuitem" data-format="{form}" href="#" download>{label}</a>' for form, label in _FORMATS
    )
    return (
        '<div id="tc-menu" popover role="menu" aria-label="Conversation">'
        '<button type="button" role="menuitem" data-act="ask_rename">Rename…</button>'
        '<button type="button" role="menuitem" data-act="archive_chat">Archive</button>'
        '<button type="button" role="menuitem" data-act="unarchive_chat">Take out of the archive</button>'
        f"<hr><span>Export as</span>{exports}<hr>"
        '<button type="button" role="menuitem" class="tc-danger" data-act="ask_delete">Delete…</button></div>'
        '<div id="tc-meter-note" popover role="note"></div>'
    )


def dialogs() -> str:
    """All of them."""
    rename = '<input type="text" maxlength="200" required aria-label="Title">'
    delete = "<p>“<b></b>” will be removed from your list.</p>"
    return (
        _dialog("rename", "Rename conversation", rename, "Save")
        + _dialog("delete", "Delete conversation?", delete, "Delete", "danger")
        + _settings()
        + _data()
        + _menu()
        + f'<div id="tc-said" role="status" aria-live="polite" hidden>{icons.COPY}<span></span></div>'
    )
