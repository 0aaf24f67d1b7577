"""Name, logo and colours: the one source for the chat page and the sign-in pages."""

from urllib.parse import quote

NAME = "Tangram Chat"

# The seven pieces of the puzzle on an 8 x 8 grid: points, fill.
_PIECES = (
    ("0,0 8,0 4,4", "#0d9488"),
    ("0,0 4,4 0,8", "#115e59"),
    ("8,4 8,8 4,8", "#f59e0b"),
    ("8,0 8,4 6,2", "#f97360"),
    ("6,2 8,4 6,6 4,4", "#6366f1"),
    ("4,4 6,6 2,6", "#38bdf8"),
    ("0,8 2,6 6,6 4,8", "#a3b18a"),
)


def logo_svg(size: int, *, css_class: str = "tc-logo") -> str:
    """Return the logo as an inline SVG of ``size`` CSS pixels, hidden from screen readers."""
    pieces = "".join(f'<polygon points="{points}" fill="{fill}"/>' for points, fill in _PIECES)
    return (
        f'<svg class="{css_class}" xmlns="http://www.w3.org/2000/svg" viewBox="-0.4 -0.4 8.8 8.8" '
        f'width="{size}" height="{size}" aria-hidden="true" focusable="false" '
        f'stroke="#fff" stroke-width="0.22" stroke-linejoin="round">{pieces}</svg>'
    )


def favicon_data_uri() -> str:
    """Return the logo as a ``data:`` URI for a ``<link rel="icon">``."""
    return "data:image/svg+xml," + quote(logo_svg(32))


# Design tokens, light and dark. Every rule in the style sheets is written in terms of these.
LIGHT = {
    "--tc-bg": "#fbfaf8",
    "--tc-surface": "#ffffff",
    "--tc-side": "#f4f2ee",
    "--tc-hover": "#ebe8e2",
    "--tc-active": "#e3dfd7",
    "--tc-line": "#e4e0d8",
    "--tc-line-strong": "#cfc9be",
    "--tc-text": "#1f2428",
    "--tc-muted": "#656a70",
    "--tc-accent": "#0f766e",
    "--tc-accent-strong": "#115e59",
    "--tc-on-accent": "#ffffff",
    "--tc-user": "#eef3f1",
    "--tc-code": "#f5f3ef",
    "--tc-danger": "#b42318",
    "--tc-danger-bg": "#fef3f2",
    "--tc-warn": "#8a5a00",
    "--tc-warn-bg": "#fdf5e2",
    "--tc-warn-line": "#f0dcae",
    "--tc-shadow": "0 1px 2px rgba(31,36,40,.05), 0 8px 24px rgba(31,36,40,.06)",
}
DARK = {
    "--tc-bg": "#16181a",
    "--tc-surface": "#1f2225",
    "--tc-side": "#111315",
    "--tc-hover": "#24282c",
    "--tc-active": "#2c3136",
    "--tc-line": "#2b3035",
    "--tc-line-strong": "#40474e",
    "--tc-text": "#e8eaec",
    "--tc-muted": "#9aa1a8",
    "--tc-accent": "#2dd4bf",
    "--tc-accent-strong": "#5eead4",
    "--tc-on-accent": "#06201d",
    "--tc-user": "#24302e",
    "--tc-code": "#111315",
    "--tc-danger": "#fda29b",
    "--tc-danger-bg": "#331b19",
    "--tc-warn": "#f5d48a",
    "--tc-warn-bg": "#2d2617",
    "--tc-warn-line": "#4b3f20",
    "--tc-shadow": "0 1px 2px rgba(0,0,0,.3), 0 8px 24px rgba(0,0,0,.28)",
}

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif'
MONO = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace'


def _block(selector: str, tokens: dict[str, str], scheme: str) -> str:
    body = "".join(f"{name}:{value};" for name, value in tokens.items())
    return f"{selector}{{color-scheme:{scheme};{body}}}"


def token_css() -> str:
    """Return the tokens as CSS: light by default, dark when ``<body>`` or ``<html>`` has class ``dark``."""
    return _block(":root", LIGHT, "light") + _block("html.dark,body.dark,.dark", DARK, "dark")


# Runs before the first paint on every page, so that a dark choice never flashes white.
THEME_SCRIPT = """
(() => {
  let choice = null;
  try { choice = localStorage.getItem("tangram-theme"); } catch (error) { choice = null; }
  const dark = choice ? choice === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.classList.toggle("dark", dark);
})();
"""
