"""Plotly figures of the console: pure functions from data to figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import plotly.graph_objects as go

from admin.history import PoolPoint
from admin.palette import FREE, FULL, RESIDENT, RUNNING, SEQUENTIAL, TIERS
from admin.snapshot import Heads, MemorySnapshot
from admin.text import byte_ticks, bytes_text

BUDGET: Final = "Budget"
TOKENS: Final = "Tokens kept now"
PAGES: Final = "Pages now"
TIER: Final = "Tier"
MAP_VIEWS: Final = (BUDGET, TOKENS, PAGES, TIER)

_CELL_MIN_WIDTH = 9
_LONGEST_TICKED = 40


def memory_map(snapshot: MemorySnapshot, view: str) -> go.Figure:
    """Heat map with one column a layer and one row a KV head.

    ``view`` is one of :data:`MAP_VIEWS`; anything else raises ``ValueError``. Hovering shows all four values.
    ``layout.meta.min_width`` is the narrowest width in pixels at which cells stay readable. Where less is
    seen at a time, ``layout.meta.narrow_colorbar`` lays the colour bar flat above the cells.
    """
    heads, layers, kv_heads = snapshot.heads, snapshot.layers, snapshot.kv_heads
    trace = go.Heatmap(
        x=list(range(layers)),
        y=list(range(kv_heads)),
        z=_transposed(_view_values(heads, view)),
        customdata=_hover_values(heads),
        hovertemplate=(
            "<b>Layer %{x}, KV head %{y}</b><br>Tier %{customdata[0]}<br>Budget %{customdata[1]:.1%}<br>"
            "Tokens kept %{customdata[2]:,}<br>Pages %{customdata[3]:,}<extra></extra>"
        ),
        xgap=1,
        ygap=1,
        **_colours(snapshot, view),
    )
    layout = _layout(height=max(210, 110 + 30 * min(kv_heads, 24)), revision="map")
    layout.update(
        meta={
            "min_width": 110 + _CELL_MIN_WIDTH * layers,
            "narrow_colorbar": _narrow_colorbar(snapshot.tier_keep if view == TIER else ()),
        },
        margin={"l": 46, "r": 8, "t": 8, "b": 40},
        xaxis=_cell_axis("Layer", layers),
        # Head 0 at the top, as in a matrix.
        yaxis={**_cell_axis("KV head", kv_heads), "autorange": "reversed"},
    )
    return go.Figure(trace, layout)


def pool_bar(snapshot: MemorySnapshot) -> go.Figure:
    """One stacked horizontal bar: pages of running and of resident sequences, and free ones."""
    pool = snapshot.pool
    figure = go.Figure(layout=_layout(height=44, revision="pool"))
    for name, pages, colour in (
        ("Running", pool.running, RUNNING),
        ("Resident", pool.resident, RESIDENT),
        ("Free", pool.free, FREE),
    ):
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


def pool_over_time(runs: Sequence[Sequence[PoolPoint]]) -> go.Figure:
    """Bytes held over the last hour, stacked by kind, with what a full cache would have needed.

    Each run has traces of its own, so that nothing is drawn between two of them.
    """
    figure = go.Figure(layout=_layout(height=240, revision="time"))
    points = [point for run in runs for point in run]
    newest = points[-1].time if points else 0.0
    for number, run in enumerate(runs or [()]):
        area = {"stackgroup": f"used {number}"}
        for name, values, line, kind in (
            ("Running", [point.running * point.page_bytes for point in run], _line(RUNNING), area),
            ("Resident", [point.resident * point.page_bytes for point in run], _line(RESIDENT), area),
            ("Full cache", [point.full_cache_bytes for point in run], _line(FULL, 1.5, "dot"), {}),
        ):
            figure.add_scatter(
                x=[round(point.time - newest, 1) for point in run],
                y=values,
                name=name,
                legendgroup=name,
                showlegend=number == 0,
                mode="lines",
                line=line,
                customdata=[bytes_text(value) for value in values],
                hovertemplate=f"{name} %{{customdata}}<extra></extra>",
                **kind,
            )
    sizes = ((point.running + point.resident) * point.page_bytes for point in points)
    ticks = byte_ticks(max([1, *sizes, *(point.full_cache_bytes for point in points)]))
    figure.update_layout(
        margin={"l": 66, "r": 8, "t": 32, "b": 26},
        legend=_legend(),
        hovermode="closest",
        xaxis=_time_axis(points),
        yaxis={
            "fixedrange": True,
            "range": [0, ticks[-1] * 1.02],
            "tickvals": ticks,
            "ticktext": [bytes_text(tick) for tick in ticks],
            "zeroline": False,
        },
    )
    return figure


def _line(colour: str, width: float = 1, dash: str = "solid") -> dict[str, Any]:
    return {"width": width, "color": colour, "dash": dash}


def _view_values(heads: Heads, view: str) -> Sequence[Sequence[float]]:
    values = {BUDGET: heads.budget, TOKENS: heads.tokens_kept, PAGES: heads.pages, TIER: heads.tier}
    if view not in values:
        raise ValueError(f"unknown map view {view!r}")
    return values[view]


def _transposed(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """``[layer][head]`` to the figure's ``[head][layer]``."""
    return [list(column) for column in zip(*matrix, strict=True)]


def _hover_values(heads: Heads) -> list[list[list[float]]]:
    per_layer = (
        [list(cell) for cell in zip(*rows, strict=True)]
        for rows in zip(heads.tier, heads.budget, heads.tokens_kept, heads.pages, strict=True)
    )
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
    values = _view_values(snapshot.heads, view)
    top = max((max(row, default=0) for row in values), default=0)
    return {
        "zmin": 0,
        "zmax": max(top, 1),
        "colorscale": SEQUENTIAL,
        "colorbar": {**bar, "tickformat": ",d" if top < 10_000 else ".2s", "nticks": 5},
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


def _time_axis(points: Sequence[PoolPoint]) -> dict[str, Any]:
    """A few round minutes, counted back from now, so that labels need neither a date nor a time zone."""
    newest = points[-1].time if points else 0.0
    span = newest - points[0].time if points else 0.0
    step = next((minutes for minutes in (1, 2, 5, 10) if span <= minutes * 60 * 4), 20)
    back = range(int(span // 60) // step * step, -1, -step)
    return {
        "fixedrange": True,
        "showgrid": False,
        "zeroline": False,
        "range": [min(-60.0, -span), max(1.0, 0.02 * span)],
        "tickvals": [-60 * minutes for minutes in back],
        "ticktext": ["now" if minutes == 0 else f"−{minutes} min" for minutes in back],
        "tickangle": 0,
    }


def _legend() -> dict[str, Any]:
    return {
        "orientation": "h",
        "x": 0,
        "y": 1.02,
        "yanchor": "bottom",
        "traceorder": "normal",
        "itemwidth": 30,
    }


def _layout(height: int, revision: str) -> dict[str, Any]:
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
