"""Colours of the figures. Text and grid colours come from the page's theme in the browser."""

from __future__ import annotations

USES = (
    ("Ring", "#b7791f"),
    ("Sealed, running", "#0f766e"),
    ("Resident", "#5eead4"),
    ("Free", "rgba(128,140,155,0.22)"),
)
"""What a page of the pool can be held by: the raw tail or the sealed chunks of a running request, an idle
conversation or a shared prefix, nobody."""
FULL = "#e05252"
PLOT = "#12a594"
PLOT_SLOW = "#e07a3f"

# Low to high, pale to saturated: both ends stand out from a light and from a dark page.
SEQUENTIAL: list[tuple[float, str]] = [
    (0.0, "#dfe9ee"),
    (0.2, "#b5dfda"),
    (0.45, "#7cc9c0"),
    (0.7, "#41b0a6"),
    (1.0, "#0d9488"),
]

# Less, the same, more.
DIVERGING: list[tuple[float, str]] = [(0.0, "#cf6a54"), (0.5, "#e6e4df"), (1.0, "#0d9488")]

TIERS = (
    "#127d76",
    "#31a297",
    "#66bfb2",
    "#a3d9cc",
    "#e9c46a",
    "#e39a5b",
    "#cf6a54",
    "#a14a6b",
    "#6b4c8f",
    "#4a5f9e",
)
