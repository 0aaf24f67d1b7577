"""The page of one's own account, as self-contained HTML: sign-ins, API keys, password.

Forms do everything; a script only copies a new key.
"""

import time
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from pathlib import Path

from app.ui import brand
from app.ui.pages import field, style
from db.views import ApiKeyView, SessionView, UserView

_STATIC = Path(__file__).parent / "static"

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="robots" content="noindex">
<title>Your account · {product}</title>
<link rel="icon" href="{icon}">
<script>{theme_script}</script>
<style>{css}</style>
</head>
<body>
<main>
<header>{logo}<h1>{name}</h1><a href="/">Back to the chat</a></header>
{message}
<section><h2>Password</h2><p>All other sign-ins end when it changes.</p>{password}</section>
<section><h2>API keys</h2><p>For programs that use this server's API.</p>{keys}{new_key}</section>
<section><h2>Where you are signed in</h2>{sessions}{others}</section>
</main>
</body>
</html>
"""


@cache
def _css() -> str:
    return style() + (_STATIC / "account.css").read_text(encoding="utf-8")


@cache
def _copy_script() -> str:
    return (_STATIC / "copy.js").read_text(encoding="utf-8")


def account_page(
    user: UserView,
    sessions: Sequence[SessionView],
    keys: Sequence[ApiKeyView],
    *,
    current: str,
    error: str | None = None,
    done: str | None = None,
    secret: str | None = None,
) -> str:
    """Return the page.

    ``current`` is the id of this browser's sign-in. ``error`` and ``done`` say what came of a form;
    ``secret`` is a new API key, shown this once.
    """
    usable = [key for key in keys if key.revoked_at is None]
    others = _form("/account/sessions/revoke", "Sign out everywhere else", css="quiet")
    return _PAGE.format(
        product=brand.NAME,
        icon=brand.favicon_data_uri(),
        theme_script=brand.THEME_SCRIPT,
        css=_css(),
        logo=brand.logo_svg(36),
        name=escape(user.name),
        message=_message(error, done, secret),
        password=_password_form(),
        keys=_list(map(_key, usable)),
        new_key=_form(
            "/account/keys",
            "Create key",
            field("name", "Name of a new key", 'maxlength="200" autocomplete="off"'),
        ),
        sessions=_list(_session(session, current) for session in sessions),
        others=others if len(sessions) > 1 else "",
    )


def _message(error: str | None, done: str | None, secret: str | None) -> str:
    if error:
        return f'<div class="error" role="alert">{escape(error)}</div>'
    if not done:
        return ""
    if not secret:
        return f'<div class="done" role="status">{escape(done)}</div>'
    shown = (
        f'<div class="secret"><code id="secret">{escape(secret)}</code>'
        '<button type="button" id="copy" hidden>Copy key</button></div>'
    )
    return f'<div class="done" role="status">{escape(done)}{shown}</div><script>{_copy_script()}</script>'


def _password_form() -> str:
    hidden = 'type="password" maxlength="1024"'
    fields = field("current", "Current password", f'{hidden} autocomplete="current-password"')
    fields += field(
        "password",
        "New password",
        f'{hidden} minlength="8" autocomplete="new-password"',
        hint="At least 8 characters.",
    )
    return _form("/account/password", "Change password", fields)


def _form(action: str, button: str, fields: str = "", *, css: str = "") -> str:
    kind = f' class="{css}"' if css else ""
    return (
        f'<form method="post" action="{escape(action, quote=True)}"{kind}>{fields}'
        f'<button type="submit">{escape(button)}</button></form>'
    )


def _list(items: Iterable[str]) -> str:
    made = "".join(items)
    return f"<ul>{made}</ul>" if made else ""


def _key(key: ApiKeyView) -> str:
    used = f"last used {_day(key.last_used_at)}" if key.last_used_at else "never used"
    about = f"<div>{escape(key.name)}<small>made {_day(key.created_at)}, {used}</small></div>"
    return f"<li>{about}{_form(f'/account/keys/{key.id}/revoke', 'Revoke')}</li>"


def _session(session: SessionView, current: str) -> str:
    where = escape(session.user_agent or "An unknown browser")
    seen = f"{escape(session.address)}, last seen {_day(session.last_seen_at)}"
    about = f"<div>{where}<small>{seen}</small></div>"
    if session.id == current:
        return f'<li>{about}<span class="here">This browser</span></li>'
    return f"<li>{about}{_form(f'/account/sessions/{session.id}/revoke', 'Sign out')}</li>"


def _day(milliseconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(milliseconds / 1000))
