"""Line icons as inline SVG (24-unit grid, current colour), so that the page needs no icon font."""


def _icon(body: str) -> str:
    return (
        '<svg viewBox="0 0 24 24" width="18" height="18" fill="none" stroke="currentColor" '
        'stroke-width="1.8" '
        f'stroke-linecap="round" stroke-linejoin="round" aria-hidden="true" focusable="false">{body}</svg>'
    )


_THUMB = (
    '<path d="M7 10v10H4V10z"/><path d="M7 10l4-7c1.7 0 2.7 1.2 2.4 2.9L13 9h5.4c1.3 0 2.2 1.2 1.9 2.4l-1.7 '
    '6.8c-.2 1-1.1 1.8-2.2 1.8H7"/>'
)

MENU = _icon('<path d="M4 7h16M4 12h16M4 17h10"/>')
PLUS = _icon('<path d="M12 5v14M5 12h14"/>')
PENCIL = _icon('<path d="M4 20h4L19 9l-4-4L4 16z"/><path d="M13 7l4 4"/>')
CLOSE = _icon('<path d="M6 6l12 12M18 6L6 18"/>')
LEFT = _icon('<path d="M14 6l-6 6 6 6"/>')
RIGHT = _icon('<path d="M10 6l6 6-6 6"/>')
AGAIN = _icon('<path d="M20 11a8 8 0 1 0-2.3 6.3"/><path d="M20 5v6h-6"/>')
GO_ON = _icon('<path d="M5 5v14l9-7z"/><path d="M19 5v14"/>')
MOON = _icon('<path d="M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5z"/>')
LEAVE = _icon('<path d="M10 4H5v16h5M15 8l4 4-4 4M19 12H9"/>')
GAUGE = _icon('<path d="M4 18a9 9 0 1 1 16 0"/><path d="M12 14l4-5"/>')
MORE = _icon(
    '<circle cx="5" cy="12" r="1.1"/><circle cx="12" cy="12" r="1.1"/><circle cx="19" cy="12" r="1.1"/>'
)
SLIDERS = _icon(
    '<path d="M4 7h9M17 7h3M4 17h3M11 17h9"/><circle cx="15" cy="7" r="2"/><circle cx="9" cy="17" r="2"/>'
)
COPY = _icon(
    '<rect x="9" y="9" width="11" height="11" rx="2"/>'
    '<path d="M15 5.5V5a1 1 0 0 0-1-1H5a1 1 0 0 0-1 1v9a1 1 0 0 0 1 1h.5"/>'
)
LIKE = _icon(_THUMB)
DISLIKE = _icon(f'<g transform="rotate(180 12 12)">{_THUMB}</g>')
BOX = _icon('<path d="M4 8v12h16V8M3 4h18v4H3zM10 12h4"/>')
FILES = _icon('<path d="M8 4v12M4.5 7.5L8 4l3.5 3.5M16 20V8M12.5 16.5L16 20l3.5-3.5"/>')
