"""Plotly charts over time: the pool's last hour, and what the engine does now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from admin.figures import layout
from admin.history import PoolPoint
from admin.palette import FULL, PLOT, PLOT_SLOW, USES
from admin.series import RatePoint
from admin.text import byte_ticks, bytes_text

PLOT_POINTS = 150
PLOT_HEIGHT = 150


def pool_over_time(runs: Sequence[Sequence[PoolPoint]]) -> go.Figure:
    """The pool over the last hour in bytes, stacked by use, with what a full cache would have needed.

    Each run has traces of its own, so that nothing is drawn between two of them.
    """
    figure = go.Figure(layout=layout(height=240, revision="time"))
    points = [point for run in runs for point in run]
    newest = points[-1].time if points else 0.0
    for number, run in enumerate(runs or [()]):
        area = {"stackgroup": f"used {number}"}
        pages = [(point.ring, point.sealed, point.resident, point.free) for point in run]
        sizes = [point.page_bytes for point in run]
        shown: list[tuple[str, list[int], dict[str, Any], dict[str, Any]]] = [
            (name, [held[place] * size for held, size in zip(pages, sizes, strict=True)], _line(colour), area)
            for place, (name, colour) in enumerate(USES)
        ]
        shown.append(("Full cache", [point.full_cache_bytes for point in run], _line(FULL, 1.5, "dot"), {}))
        for name, values, line, kind in shown:
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
    totals = (
        (point.ring + point.sealed + point.resident + point.free) * point.page_bytes for point in points
    )
    ticks = byte_ticks(max([1, *totals, *(point.full_cache_bytes for point in points)]))
    figure.update_layout(
        margin={"l": 66, "r": 8, "t": 32, "b": 26},
        legend=_legend(),
        hovermode="closest",
        xaxis=time_axis([point.time for point in points]),
        yaxis={
            "fixedrange": True,
            "range": [0, ticks[-1] * 1.02],
            "tickvals": ticks,
            "ticktext": [bytes_text(tick) for tick in ticks],
            "zeroline": False,
        },
    )
    return figure


@dataclass(frozen=True)
class Plot:
    """One live plot: (name, value of a point, colour) of its lines; ``unit`` for hovering."""

    name: str
    title: str
    lines: tuple[tuple[str, Callable[[RatePoint], float | None], str], ...]
    unit: str = ""


def _rate(name: str, times: float = 1.0) -> Callable[[RatePoint], float | None]:
    return lambda at: at.rates[name] * times


def _milliseconds(field: str) -> Callable[[RatePoint], float | None]:
    def value(at: RatePoint) -> float | None:
        seconds = getattr(at.point, field)
        return None if seconds is None else seconds * 1000

    return value


PLOTS: tuple[Plot, ...] = (
    Plot(
        "ttft",
        "First token, ms",
        (("median", _milliseconds("ttft"), PLOT), ("95%", _milliseconds("ttft_slow"), PLOT_SLOW)),
        " ms",
    ),
    Plot(
        "itl",
        "Between tokens, ms",
        (("median", _milliseconds("itl"), PLOT), ("95%", _milliseconds("itl_slow"), PLOT_SLOW)),
        " ms",
    ),
    Plot("tokens", "Tokens a second", (("written", _rate("generated"), PLOT),)),
    Plot(
        "requests",
        "Requests",
        (
            ("running", lambda at: at.point.running, PLOT),
            ("waiting", lambda at: at.point.queue, PLOT_SLOW),
        ),
    ),
    Plot("takeovers", "Take-overs a minute", (("take-overs", _rate("takeovers", 60), PLOT),)),
    Plot("reprefilled", "Tokens read again a second", (("tokens", _rate("reprefilled"), PLOT_SLOW),)),
    Plot("preemptions", "Preemptions a minute", (("preemptions", _rate("preemptions", 60), PLOT_SLOW),)),
    Plot("errors", "Failed replies a minute", (("errors", _rate("errors", 60), PLOT_SLOW),)),
)


def engine_plot(plot: Plot, points: Sequence[RatePoint]) -> go.Figure:
    """One live plot over the last minutes. A line is broken where there was nothing to measure."""
    figure = go.Figure(layout=layout(height=PLOT_HEIGHT, revision=plot.name))
    newest = points[-1].point.time if points else 0.0
    top = 0.0
    for name, value_of, colour in plot.lines:
        values = [value_of(at) for at in points]
        top = max([top, *(value for value in values if value is not None)])
        figure.add_scatter(
            x=[round(at.point.time - newest, 1) for at in points],
            y=[None if value is None else round(value, 3) for value in values],
            name=name,
            mode="lines",
            line=_line(colour, 1.8),
            connectgaps=False,
            hovertemplate=f"%{{y:,.4~g}}{plot.unit} {name}<extra></extra>",
        )
    figure.update_layout(
        margin={"l": 44, "r": 16, "t": 20 if len(plot.lines) > 1 else 6, "b": 22},
        legend=_legend(),
        showlegend=len(plot.lines) > 1,
        hovermode="x",
        xaxis=time_axis([at.point.time for at in points]),
        yaxis={"fixedrange": True, "range": [0, max(top * 1.1, 1)], "nticks": 4, "zeroline": False},
    )
    return figure


def _line(colour: str, width: float = 1, dash: str = "solid") -> dict[str, Any]:
    return {"width": width, "color": colour, "dash": dash}


def time_axis(times: Sequence[float]) -> dict[str, Any]:
    """A few round minutes, counted back from now, so that labels need neither a date nor a time zone."""
    newest = times[-1] if times else 0.0
    span = newest - times[0] if times else 0.0
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
