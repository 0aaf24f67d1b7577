"""Look of the console: the product's design tokens, applied to Gradio's components."""

from __future__ import annotations

from importlib import resources

import gradio as gr

from app.ui import brand

_FONT = [part.strip().strip('"') for part in brand.FONT.split(",")]
_MONO = [part.strip().strip('"') for part in brand.MONO.split(",")]


def theme() -> gr.themes.Base:
    """Gradio's plainest theme with system fonts, so that no font is fetched from anywhere."""
    return gr.themes.Base(
        primary_hue="teal", neutral_hue="stone", radius_size="lg", font=_FONT, font_mono=_MONO
    ).set(
        body_background_fill="var(--tc-bg)",
        body_background_fill_dark="var(--tc-bg)",
        body_text_color="var(--tc-text)",
        body_text_color_dark="var(--tc-text)",
        body_text_color_subdued="var(--tc-muted)",
        body_text_color_subdued_dark="var(--tc-muted)",
        block_background_fill="var(--tc-surface)",
        block_background_fill_dark="var(--tc-surface)",
        block_border_color="var(--tc-line)",
        block_border_color_dark="var(--tc-line)",
        block_label_text_color="var(--tc-muted)",
        block_label_text_color_dark="var(--tc-muted)",
        block_title_text_color="var(--tc-text)",
        block_title_text_color_dark="var(--tc-text)",
        block_info_text_color="var(--tc-muted)",
        block_info_text_color_dark="var(--tc-muted)",
        border_color_primary="var(--tc-line)",
        border_color_primary_dark="var(--tc-line)",
        background_fill_primary="var(--tc-surface)",
        background_fill_primary_dark="var(--tc-surface)",
        background_fill_secondary="var(--tc-side)",
        background_fill_secondary_dark="var(--tc-side)",
        input_background_fill="var(--tc-bg)",
        input_background_fill_dark="var(--tc-bg)",
        input_border_color="var(--tc-line-strong)",
        input_border_color_dark="var(--tc-line-strong)",
        color_accent="var(--tc-accent)",
        color_accent_soft="var(--tc-user)",
        color_accent_soft_dark="var(--tc-user)",
        slider_color="var(--tc-accent)",
        slider_color_dark="var(--tc-accent)",
        button_primary_background_fill="var(--tc-accent)",
        button_primary_background_fill_dark="var(--tc-accent)",
        button_primary_background_fill_hover="var(--tc-accent-strong)",
        button_primary_background_fill_hover_dark="var(--tc-accent-strong)",
        button_primary_text_color="var(--tc-on-accent)",
        button_primary_text_color_dark="var(--tc-on-accent)",
        button_secondary_background_fill="var(--tc-surface)",
        button_secondary_background_fill_dark="var(--tc-surface)",
        button_secondary_background_fill_hover="var(--tc-hover)",
        button_secondary_background_fill_hover_dark="var(--tc-hover)",
        button_secondary_text_color="var(--tc-text)",
        button_secondary_text_color_dark="var(--tc-text)",
        block_shadow="none",
        block_shadow_dark="none",
        block_border_width="1px",
    )


def css() -> str:
    """The design tokens and the console's own rules."""
    own = resources.files("admin").joinpath("admin.css").read_text(encoding="utf-8")
    return brand.token_css() + own


_SIGN_IN_AGAIN = """
const plainFetch = window.fetch.bind(window);
window.fetch = async (...request) => {
  const answer = await plainFetch(...request);
  if (answer.status === 401) location.assign("/login");
  return answer;
};
"""


def head() -> str:
    """Markup for the page's head: icon, light or dark before the first paint, the way back to the sign-in."""
    return (
        f'<link rel="icon" href="{brand.favicon_data_uri()}"><meta name="referrer" content="same-origin">'
        f"<script>{brand.THEME_SCRIPT}</script><script>(() => {{{_SIGN_IN_AGAIN}}})();</script>"
    )
