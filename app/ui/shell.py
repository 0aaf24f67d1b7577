"""The fixed HTML around the Gradio components: brand, top bar, account row, dialogs."""

from html import escape

from app.ui import brand, icons


def brand_row() -> str:
    """Logo, name and the New chat button at the top of the sidebar."""
    return (
        f'<div class="tc-brand">{brand.logo_svg(26)}<span>{brand.NAME}</span></div>'
        f'<button type="button" class="tc-new" data-act="new_chat">{icons.PLUS}<span>New chat</span></button>'
    )


def account_row(name: str, is_admin: bool) -> str:
    """The signed-in user at the bottom of the sidebar."""
    admin = (
        f'<a class="tc-icon" href="/admin" title="Admin console" aria-label="Admin console">{icons.GAUGE}</a>'
        if is_admin
        else ""
    )
    return (
        '<div class="tc-account">'
        '<a class="tc-me" href="/account" title="Your account">'
        f'<span class="tc-avatar" aria-hidden="true">{escape(name[:1].upper())}</span>'
        f'<span class="tc-name">{escape(name)}</span></a>{admin}'
        '<button type="button" class="tc-icon" data-act="ask_data" title="Import and export" '
        f'aria-label="Import and export">{icons.FILES}</button>'
        f'<button type="button" class="tc-icon" data-act="toggle_theme" title="Light or dark" '
        f'aria-label="Switch between light and dark">{icons.MOON}</button>'
        '<form method="post" action="/logout"><button type="submit" class="tc-icon" title="Sign out" '
        f'aria-label="Sign out">{icons.LEAVE}</button></form></div>'
    )


def top_bar(
    title: str,
    conversation_id: str = "",
    *,
    adjusted: bool = False,
    archived: bool = False,
    longest: int | None = None,
) -> str:
    """The bar over the messages: menu button, the conversation's title, its settings and its own menu.

    `adjusted`: it has a system prompt or settings of its own. `longest`: tokens of a reply where nobody names
    a number, which the dialog of the settings shows.
    """
    shown, own = escape(title, quote=True), escape(conversation_id, quote=True)
    put_away = ' data-archived="1"' if archived else ""
    more = (
        f'<button type="button" class="tc-icon" data-act="ask_menu" data-id="{own}" data-title="{shown}"'
        f'{put_away} aria-haspopup="menu" title="More" aria-label="More for this conversation">'
        f"{icons.MORE}</button>"
        if conversation_id
        else ""
    )
    limit = "" if longest is None else f' data-longest="{longest}"'
    changed = ", changed" if adjusted else ""
    return (
        '<header class="tc-top"><button type="button" class="tc-icon" data-act="toggle_nav" '
        'aria-controls="tc-side" '
        f'title="Show or hide conversations" aria-label="Show or hide conversations">{icons.MENU}</button>'
        f'<h1 title="{shown}">{shown}</h1>'
        f'<button type="button" class="tc-icon{" tc-adjusted" if adjusted else ""}" data-act="ask_settings" '
        f'data-id="{own}"{limit} title="Conversation settings{changed}" '
        f'aria-label="Conversation settings{changed}">{icons.SLIDERS}</button>{more}'
        f'<button type="button" class="tc-icon" data-act="new_chat" title="New chat" aria-label="New chat">'
        f"{icons.PLUS}</button></header>"
    )


def welcome() -> str:
    """What an empty conversation shows."""
    return (
        "## What can I help you with?\n"
        "Every conversation stays in memory between turns, so you can come back to it at once."
    )


EXAMPLES = (
    ("Explain a tricky idea", "Explain how a hash map works to someone who has never written code."),
    ("Write some code", "Write a Python function that returns the n-th Fibonacci number, with a docstring."),
    ("Draft a message", "Draft a short, friendly message that moves a meeting from Tuesday to Thursday."),
    ("Plan something", "Plan a quiet weekend for two people in a small town by the sea."),
)


def engine_banner(state: str, detail: str) -> str:
    """What the page says while the engine cannot answer; empty while it can.

    ``state``: stopped, starting, ready, restarting, draining or failed; ``detail``: what the engine reports.
    """
    texts = {
        "starting": ("warn", "The model is loading. You can write already; sending works once it is ready."),
        "restarting": (
            "warn",
            "The engine is restarting. Your conversations are safe, and sending works again soon.",
        ),
        "draining": (
            "warn",
            (
                "The engine is about to restart. "
                "Replies that are being written get a few seconds to finish; their text is kept."
            ),
        ),
        "stopped": ("danger", "The engine is stopped. An administrator can start it from the console."),
        "failed": ("danger", "The engine did not start. An administrator can see why in the console."),
    }
    if state not in texts:
        return ""
    kind, text = texts[state]
    spin = '<span class="tc-spin" aria-hidden="true"></span>' if kind == "warn" else ""
    more = f'<span class="tc-detail">{escape(detail)}</span>' if detail else ""
    return f'<div class="tc-banner tc-{kind}" role="status">{spin}<span>{text}{more}</span></div>'
