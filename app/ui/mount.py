"""Puts the chat page at "/" of the app."""

from pathlib import Path
from string import Template

import gradio as gr
from fastapi import FastAPI

from app.services import Services
from app.ui import brand
from app.ui.chat import build_chat
from app.ui.door import UserOf, guard_mounted

_STATIC = Path(__file__).parent / "static"


def theme() -> gr.themes.Base:
    """Gradio's plain theme on system fonts: nothing is fetched from elsewhere."""
    return gr.themes.Base(
        primary_hue="teal",
        secondary_hue="teal",
        neutral_hue="stone",
        font=[
            "system-ui",
            "-apple-system",
            "Segoe UI",
            "Roboto",
            "Helvetica Neue",
            "Noto Sans",
            "sans-serif",
        ],
        font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"],
    ).set(
        # Gradio paints these before any style sheet of ours is there.
        body_background_fill=brand.LIGHT["--tc-bg"],
        body_background_fill_dark=brand.DARK["--tc-bg"],
        body_text_color=brand.LIGHT["--tc-text"],
        body_text_color_dark=brand.DARK["--tc-text"],
    )


def head() -> str:
    """What the page adds to its <head>: icon, style, light or dark, and where an ended session goes.

    The style sheet is a <style> here and not Gradio's ``css``, which would confine it to the component tree.
    """
    template = Template((_STATIC / "head.html").read_text(encoding="utf-8"))
    return template.substitute(
        icon=brand.favicon_data_uri(),
        theme_script=brand.THEME_SCRIPT,
        css=css(),
        logo=brand.logo_svg(26),
        name=brand.NAME,
    )


def css() -> str:
    """The page's style sheet: the colours, then the rules."""
    fonts = f":root{{--tc-font:{brand.FONT};--tc-mono:{brand.MONO};}}"
    return (
        brand.token_css()
        + fonts
        + "\n".join((_STATIC / name).read_text(encoding="utf-8") for name in ("chat.css", "panels.css"))
    )


def mount(app: FastAPI, services: Services, user_of: UserOf) -> None:
    """Mount the chat page. ``user_of``: id of the user of a request, or None, which is answered by 401."""
    blocks = build_chat(services)
    gr.mount_gradio_app(
        app,
        blocks,
        path="/",
        auth_dependency=user_of,
        show_error=False,
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        enable_monitoring=False,
        footer_links=[],
        max_file_size=0,
        favicon_path=str(_STATIC / "favicon.png"),
        theme=theme(),
        head=head(),
    )
    guard_mounted(app, blocks, user_of)
