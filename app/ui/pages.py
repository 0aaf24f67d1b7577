"""The pages outside Gradio: sign-in, first-run setup, invitations and resets, as self-contained HTML.

Forms post ``name`` and ``password``, and a link's secret (setup: ``key``, others: ``token``), to the page's
own address.
"""

from functools import cache
from html import escape
from pathlib import Path

from app.ui import brand

_STATIC = Path(__file__).parent / "static"

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="robots" content="noindex">
<meta name="referrer" content="same-origin">
<title>{title} · {name}</title>
<link rel="icon" href="{icon}">
<script>{theme_script}</script>
<style>{css}</style>
</head>
<body>
<main>
<div class="brand">{logo}<div><h1>{heading}</h1><p class="lead">{lead}</p></div></div>
<form method="{method}" action="{action}">{error}{fields}<button type="submit">{button}</button></form>
<p class="foot">{foot}</p>
</main>
</body>
</html>
"""


@cache
def style() -> str:
    """The style sheet of these pages."""
    fonts = f":root{{--tc-font:{brand.FONT};--tc-mono:{brand.MONO};}}"
    return brand.token_css() + fonts + (_STATIC / "pages.css").read_text(encoding="utf-8")


def field(name: str, label: str, attributes: str, *, value: str = "", hint: str = "") -> str:
    """A labelled input, which must be filled in."""
    described = f' aria-describedby="{name}-hint"' if hint else ""
    note = f'<span class="hint" id="{name}-hint">{escape(hint)}</span>' if hint else ""
    filled = f' value="{escape(value, quote=True)}"' if value else ""
    return (
        f'<div class="field"><label for="{name}">{escape(label)}</label>'
        f'<input id="{name}" name="{name}" required {attributes}{filled}{described}>{note}</div>'
    )


def _page(
    *,
    title: str,
    heading: str,
    lead: str,
    action: str,
    fields: str,
    button: str,
    foot: str,
    error: str | None,
    method: str = "post",
) -> str:
    alert = f'<div class="error" role="alert">{escape(error)}</div>' if error else ""
    return _PAGE.format(
        title=escape(title),
        name=brand.NAME,
        icon=brand.favicon_data_uri(),
        theme_script=brand.THEME_SCRIPT,
        css=style(),
        logo=brand.logo_svg(56),
        heading=escape(heading),
        lead=escape(lead),
        action=action,
        method=method,
        error=alert,
        fields=fields,
        button=escape(button),
        foot=escape(foot),
    )


def login_page(error: str | None = None, *, name: str = "") -> str:
    """Return the sign-in page.

    ``error`` is shown above the form; ``name`` fills the name field after a failed attempt.
    """
    plain = 'autocomplete="username" autocapitalize="none" spellcheck="false"'
    hidden = 'type="password" autocomplete="current-password"'
    first, second = (plain, f"{hidden} autofocus") if name else (f"{plain} autofocus", hidden)
    fields = field("name", "Name", first, value=name) + field("password", "Password", second)
    return _page(
        title="Sign in",
        heading="Welcome back",
        lead=f"Sign in to {brand.NAME}.",
        action="/login",
        fields=fields,
        button="Sign in",
        foot="Your conversations stay on this server.",
        error=error,
    )


_CHOSEN = 'type="password" minlength="8" maxlength="1024" autocomplete="new-password"'
_NAME = 'maxlength="64" autocomplete="username" autocapitalize="none" spellcheck="false" autofocus'


def _hidden(name: str, value: str) -> str:
    return f'<input type="hidden" name="{name}" value="{escape(value, quote=True)}">'


def _new_account(name: str) -> str:
    return field("name", "Your name", _NAME, value=name) + field(
        "password", "Password", _CHOSEN, hint="At least 8 characters."
    )


def setup_page(error: str | None = None, *, name: str = "", key: str = "") -> str:
    """Return the first-run page that creates the administrator.

    ``key`` is the setup key that came with the link; without it the page asks for it.
    """
    fields = _new_account(name)
    if key:
        fields += _hidden("key", key)
    else:
        fields += field(
            "key",
            "Setup key",
            'autocomplete="off" autocapitalize="none" spellcheck="false"',
            hint="The end of the link that the server printed when it started.",
        )
    return _page(
        title="Set up",
        heading=f"Set up {brand.NAME}",
        lead="Create the administrator of this server. It takes a minute and happens once.",
        action="/setup",
        fields=fields,
        button="Create account",
        foot="Everything stays on this server: accounts, conversations and the model.",
        error=error,
    )


def invite_page(token: str, error: str | None = None, *, name: str = "") -> str:
    """Return the page of an invitation, which makes an account."""
    return _page(
        title="Join",
        heading=f"Join {brand.NAME}",
        lead="You are invited. Choose a name and a password for your account.",
        action="/invite",
        fields=_new_account(name) + _hidden("token", token),
        button="Create account",
        foot="Your conversations stay on this server.",
        error=error,
    )


def reset_page(token: str, error: str | None = None) -> str:
    """Return the page of a reset, which asks for another password."""
    password = field("password", "New password", f"{_CHOSEN} autofocus", hint="At least 8 characters.")
    return _page(
        title="New password",
        heading="New password",
        lead="Choose another password for your account.",
        action="/reset",
        fields=password + _hidden("token", token),
        button="Save and sign in",
        foot="You are signed out everywhere else.",
        error=error,
    )


def spent_page(error: str) -> str:
    """Return the page of a link that cannot be used."""
    return _page(
        title="Link expired",
        heading="This link does not work",
        lead="Links work once, and for some days.",
        action="/login",
        method="get",
        fields="",
        button="To the sign-in",
        foot="Your conversations stay on this server.",
        error=error,
    )
