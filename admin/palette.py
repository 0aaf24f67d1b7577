"""Colours of the figures. Text and grid colours come from the page's theme in the browser."""

from __future__ import annotations

RUNNING = "#0f766e"
RESIDENT = "#5eead4"
FREE = "rgba(128,140,155,0.22)"
FULL = "#e07a3f"

# Low to high; the low end stays visible on a light and on a dark page.
SEQUENTIAL: list[tuple[float, str]] = [
    (0.0, "#dfe9ee"),
    (0.15, "#b5dcd9"),
    (0.35, "#6dc0bb"),
    (0.6, "#2b938f"),
    (0.8, "#14686a"),
    (1.0, "#0b3f46"),
]

TIERS = (
    "#0b3f46",
    "#14736f",
    "#3ca89f",
    "#8fd0c3",
    "#e9c46a",
    "#e39a5b",
    "#cf6a54",
    "#a14a6b",
    "#6b4c8f",
    "#4a5f9e",
)
