"""Line icons as inline SVG (24-unit grid, current colour), so that the page needs no icon font."""


def _icon(body: str) -> str:
    return (
        '<svg viewBox="0 0 24 24" width="18" height="18" fill="none" stroke="currentColor" '
        'stroke-width="1.8" '
        f'stroke-linecap="round" stroke-linejoin="round" aria-hidden="true" focusable="false">{body}</svg>'
    )


MENU = _icon('<path d="M4 7h16M4 12h16M4 17h10"/>')
PLUS = _icon('<path d="M12 5v14M5 12h14"/>')
PENCIL = _icon('<path d="M4 20h4L19 9l-4-4L4 16z"/><path d="M13 7l4 4"/>')
TRASH = _icon('<path d="M4 7h16M9 7V4h6v3M6 7l1 13h10l1-13"/>')
CLOSE = _icon('<path d="M6 6l12 12M18 6L6 18"/>')
LEFT = _icon('<path d="M14 6l-6 6 6 6"/>')
RIGHT = _icon('<path d="M10 6l6 6-6 6"/>')
AGAIN = _icon('<path d="M20 11a8 8 0 1 0-2.3 6.3"/><path d="M20 5v6h-6"/>')
MOON = _icon('<path d="M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5z"/>')
LEAVE = _icon('<path d="M10 4H5v16h5M15 8l4 4-4 4M19 12H9"/>')
GAUGE = _icon('<path d="M4 18a9 9 0 1 1 16 0"/><path d="M12 14l4-5"/>')
