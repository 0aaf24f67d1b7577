"""The context meter: how full the model's context is, and how much of it the cache still keeps."""

import time
from html import escape

from app.context import ContextMeter

_NEARLY_FULL = 0.85
LIVE_SECONDS = 0.5
"""How often it moves while a reply is written."""


def meter(context: ContextMeter | None) -> str:
    """The meter in the top bar; empty while there is nothing to measure."""
    if context is None or not context.tokens or not context.limit:
        return ""
    share = min(1.0, context.tokens / context.limit)
    kind = " tc-warn" if share > _NEARLY_FULL else ""
    short = f"{share * 100:.0f}%" if share >= 0.01 else "<1%"
    lines = [f"{context.tokens:,} of {context.limit:,} tokens in context"]
    if context.kept_fraction is not None and context.kept_tokens is not None:
        lines.append(
            f"{context.kept_tokens:,} of them kept after compression ({context.kept_fraction * 100:.0f}%)"
        )
    if context.left_out:
        was = "message is" if context.left_out == 1 else "messages are"
        lines.append(f"The oldest {context.left_out:,} {was} no longer shown to the model")
    told = escape("\n".join(lines), quote=True)
    label = escape(". ".join(lines), quote=True)
    filled = f'stroke-dasharray="{max(2, share * 100):.1f} 100"'
    return (
        f'<button type="button" class="tc-meter{kind}" data-act="show_meter" data-text="{told}" '
        f'title="{told}" aria-label="Context: {label}">'
        '<svg viewBox="0 0 20 20" width="18" height="18" aria-hidden="true">'
        '<circle cx="10" cy="10" r="8" pathLength="100"/>'
        f'<circle cx="10" cy="10" r="8" pathLength="100" {filled}/></svg>'
        f"<span>{escape(short)}</span></button>"
    )


class LiveMeter:
    """The meter while a reply is written, drawn anew now and then and only when it changed."""

    def __init__(self, interval: float = LIVE_SECONDS) -> None:
        self._interval = interval
        self._drawn = ""
        self._next = 0.0

    def drawn(self, context: ContextMeter | None) -> str | None:
        """The meter, where it is to be drawn anew now."""
        now = time.monotonic()
        if context is None or now < self._next:
            return None
        html = meter(context)
        if html == self._drawn:
            return None
        self._drawn, self._next = html, now + self._interval
        return html
