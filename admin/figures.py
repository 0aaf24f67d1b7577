"""Plotly figures of the console: pure functions from data to figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import plotly.graph_objects as go

from admin.palette import DIVERGING, SEQUENTIAL, TIERS, USES
from admin.snapshot import MemorySnapshot, Pool
from admin.text import bytes_text

BUDGET: Final = "Budget"
TOKENS: Final = "Tokens kept now"
PAGES: Final = "Pages now"
SHARE: Final = "Share of pool"
WASTE: Final = "Waste"
TIER: Final = "Tier"
MAP_VIEWS: Final = (BUDGET, TOKENS, PAGES, SHARE, WASTE, TIER)

_CELL_MIN_WIDTH = 9
_MARGIN: Final = {"l": 46, "r": 8, "t": 8, "b": 40}
_LONGEST_TICKED = 40


def memory_map(snapshot: MemorySnapshot, view: str) -> go.Figure:
    """Heat map with one column a layer and one row a KV head.

    ``view`` is one of :data:`MAP_VIEWS`; anything else raises ``ValueError``. Hovering shows all values.
    ``layout.meta.min_width`` is the narrowest width in pixels at which cells stay readable. Where less is
    seen at a time, ``layout.meta.narrow_colorbar`` lays the colour bar flat above the cells, which then
    need ``layout.meta.narrow_width``.
    ``layout.meta.view`` names what is shown.
    """
    layers, kv_heads = snapshot.layers, snapshot.kv_heads
    trace = go.Heatmap(
        x=list(range(layers)),
        y=list(range(kv_heads)),
        z=_transposed(_view_values(snapshot, view)),
        customdata=_hover_values(snapshot),
        hovertemplate=(
            "<b>Layer %{x}, KV head %{y}</b><br>Tier %{customdata[0]}<br>Budget %{customdata[1]:.1%}<br>"
            "Tokens kept %{customdata[2]:,}<br>Pages %{customdata[3]:,}<br>"
            "Share of pool %{customdata[4]:.3%}<br>Waste %{customdata[5]:,.0f} token slots<extra></extra>"
        ),
        xgap=1,
        ygap=1,
        **_colours(snapshot, view),
    )
    look = layout(height=max(210, 110 + 30 * min(kv_heads, 24)), revision="map")
    look.update(
        meta={
            "view": view,
            **_widths(layers),
            "narrow_colorbar": _narrow_colorbar(snapshot.tier_keep if view == TIER else ()),
        },
        margin=_MARGIN,
        xaxis=_cell_axis("Layer", layers),
        # Head 0 at the top, as in a matrix.
        yaxis={**_cell_axis("KV head", kv_heads), "autorange": "reversed"},
    )
    return go.Figure(trace, look)


def difference_map(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> go.Figure:
    """Heat map of ``second`` minus ``first``, both ``[layer][head]`` budgets: what heads gain and lose."""
    layers, kv_heads = len(first), len(first[0])
    gained = [
        [round(new - old, 4) for old, new in zip(*rows, strict=True)]
        for rows in zip(first, second, strict=True)
    ]
    most = max(0.01, max(abs(value) for row in gained for value in row))
    trace = go.Heatmap(
        x=list(range(layers)),
        y=list(range(kv_heads)),
        z=_transposed(gained),
        zmin=-most,
        zmax=most,
        xgap=1,
        ygap=1,
        colorscale=DIVERGING,
        colorbar={"thickness": 10, "outlinewidth": 0, "ypad": 4, "tickformat": "+.0%", "nticks": 5},
        hovertemplate="<b>Layer %{x}, KV head %{y}</b><br>%{z:+.1%} of its history<extra></extra>",
    )
    look = layout(height=max(170, 90 + 26 * min(kv_heads, 24)), revision="difference")
    look.update(
        meta={**_widths(layers), "narrow_colorbar": _narrow_colorbar(())},
        margin=_MARGIN,
        xaxis=_cell_axis("Layer", layers),
        yaxis={**_cell_axis("KV head", kv_heads), "autorange": "reversed"},
    )
    return go.Figure(trace, look)


def pool_bar(snapshot: MemorySnapshot) -> go.Figure:
    """One stacked horizontal bar: the pool's pages by what holds them."""
    pool = snapshot.pool
    figure = go.Figure(layout=layout(height=44, revision="pool"))
    for name, pages, colour in pool_uses(pool):
        figure.add_bar(
            x=[pages],
            y=[""],
            name=name,
            orientation="h",
            marker={"color": colour, "line": {"width": 0}},
            customdata=[bytes_text(pages * pool.page_bytes)],
            hovertemplate=f"<b>{name}</b><br>%{{x:,}} pages<br>%{{customdata}}<extra></extra>",
        )
    figure.update_layout(
        barmode="stack",
        bargap=0,
        margin={"l": 0, "r": 0, "t": 0, "b": 0},
        showlegend=False,
        xaxis={"visible": False, "range": [0, max(pool.total, 1)], "fixedrange": True},
        yaxis={"visible": False, "fixedrange": True},
    )
    return figure


def pool_uses(pool: Pool) -> list[tuple[str, int, str]]:
    """(name, pages, colour) of what the pool's pages are held by; they add up to the pool."""
    pages = (pool.ring, pool.sealed, pool.idle, pool.free)
    return [(name, count, colour) for (name, colour), count in zip(USES, pages, strict=True)]


def _view_values(snapshot: MemorySnapshot, view: str) -> Sequence[Sequence[float]]:
    heads = snapshot.heads
    values = {BUDGET: heads.budget, TOKENS: heads.tokens_kept, PAGES: heads.pages, TIER: heads.tier}
    values |= {SHARE: snapshot.share, WASTE: heads.waste}
    if view not in values:
        raise ValueError(f"unknown map view {view!r}")
    return values[view]


def _transposed(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """``[layer][head]`` to the figure's ``[head][layer]``."""
    return [list(column) for column in zip(*matrix, strict=True)]


def _hover_values(snapshot: MemorySnapshot) -> list[list[list[float]]]:
    heads = snapshot.heads
    share = [[round(value, 7) for value in row] for row in snapshot.share]
    tables = (heads.tier, heads.budget, heads.tokens_kept, heads.pages, share, heads.waste)
    per_layer = ([list(cell) for cell in zip(*rows, strict=True)] for rows in zip(*tables, strict=True))
    return [list(column) for column in zip(*per_layer, strict=True)]


def _colours(snapshot: MemorySnapshot, view: str) -> dict[str, Any]:
    bar: dict[str, Any] = {"thickness": 10, "outlinewidth": 0, "len": 1.0, "ypad": 4}
    if view == TIER:
        return _tier_colours(snapshot.tier_keep, bar)
    if view == BUDGET:
        return {
            "zmin": 0,
            "zmax": 1,
            "colorscale": SEQUENTIAL,
            "colorbar": {**bar, "tickformat": ".0%", "nticks": 5},
        }
    values = _view_values(snapshot, view)
    top = max((max(row, default=0) for row in values), default=0)
    if view == SHARE:
        form, least = ".2%", 1e-6
    else:
        form, least = ",d" if top < 10_000 else ".2s", 1
        if top < 5:  # halves would be told as whole numbers
            bar["dtick"] = 1
    return {
        "zmin": 0,
        "zmax": max(top, least),
        "colorscale": SEQUENTIAL,
        "colorbar": {**bar, "tickformat": form, "nticks": 5},
    }


def _tier_colours(keeps: Sequence[int], bar: dict[str, Any]) -> dict[str, Any]:
    count = max(len(keeps), 1)
    scale: list[tuple[float, str]] = []
    for tier in range(count):
        colour = TIERS[tier % len(TIERS)]
        scale += [(tier / count, colour), ((tier + 1) / count, colour)]
    shown = _labelled_tiers(keeps)
    return {
        "zmin": -0.5,
        "zmax": count - 0.5,
        "colorscale": scale,
        "colorbar": {
            **bar,
            "tickvals": list(shown),
            "ticktext": [f"{tier}: keeps {keeps[tier]}" for tier in shown],
        },
    }


def _labelled_tiers(keeps: Sequence[int]) -> Sequence[int]:
    return range(0, len(keeps), max(1, len(keeps) // 6))


def _narrow_colorbar(keeps: Sequence[int]) -> dict[str, Any]:
    """What changes in a colour bar that lies flat; ``keeps`` is what the tiers keep, if it shows tiers."""
    flat = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "lenmode": "pixels"}
    if not keeps:
        return flat
    # Side by side there is no room for sentences.
    title = {"text": "Tokens that a tier keeps of a chunk", "side": "top"}
    return {**flat, "title": title, "ticktext": [str(keeps[tier]) for tier in _labelled_tiers(keeps)]}


def _widths(layers: int) -> dict[str, int]:
    """The least width of a map with its colour bar beside it, and with that above it."""
    cells = _CELL_MIN_WIDTH * layers
    return {"min_width": 110 + cells, "narrow_width": _MARGIN["l"] + _MARGIN["r"] + cells}


def _cell_axis(title: str, count: int) -> dict[str, Any]:
    step = 1 if count <= 12 else 5 if count <= _LONGEST_TICKED else 10
    return {
        "title": {"text": title, "standoff": 6},
        "tick0": 0,
        "dtick": step,
        "range": [-0.5, count - 0.5],
        "showgrid": False,
        "zeroline": False,
        "fixedrange": True,
    }


def layout(height: int, revision: str) -> dict[str, Any]:
    """Common layout. A constant ``uirevision`` keeps zoom, legend and hover while data changes."""
    return {
        "template": "none",
        "height": height,
        "autosize": True,
        "uirevision": revision,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 12},
        "hoverlabel": {"font": {"size": 12}},
    }
