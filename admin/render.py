"""What the page shows, drawn once a sample and shared by all viewers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import plotly.graph_objects as go

from admin import charts, figures, memory_panels, panels
from admin.sampler import Sampler
from admin.snapshot import MemorySnapshot

T = TypeVar("T")


class Renderer:
    """Pictures and panels of the sampler's newest sample; each is made at most once a sample."""

    def __init__(self, sampler: Sampler, owner: Callable[[str], str] = lambda _: "") -> None:
        self._sampler = sampler
        self._owner = owner
        self._number = -1
        self._made: dict[tuple[str, str], str] = {}

    @property
    def number(self) -> int:
        """Number of the newest sample; it grows by one with each."""
        return self._sampler.latest.number

    def map_title(self, sequence: str = "") -> str:
        """The map's heading; of one conversation, if it is named."""
        return memory_panels.map_title(self._shown(sequence), sequence, self._owner(sequence))

    def memory_map(self, view: str, sequence: str = "") -> str:
        """JSON of the heat map, of all or of one conversation; an empty text where there is none."""
        snapshot = self._shown(sequence)
        if snapshot is None:
            return ""
        return self._once("map", f"{view}|{sequence}", lambda: _json(figures.memory_map(snapshot, view)))

    def tier(self, number: int, sequence: str = "") -> str:
        """What a tier is."""
        return memory_panels.tier_panel(self._shown(sequence), number)

    def _shown(self, sequence: str) -> MemorySnapshot | None:
        latest = self._sampler.latest
        return latest.own.get(sequence) if sequence else latest.snapshot

    def pool_bar(self) -> str:
        """JSON of the pool's bar, or an empty text before the first sample."""
        snapshot = self._sampler.latest.snapshot
        if snapshot is None:
            return ""
        return self._once("bar", "", lambda: _json(figures.pool_bar(snapshot)))

    def pool_over_time(self) -> str:
        """JSON of the chart of the last hour."""
        runs = self._sampler.history.chart()
        return self._once("time", "", lambda: _json(charts.pool_over_time(runs)))

    def engine_plots(self) -> list[str]:
        """JSON of the live plots, in the order of :data:`admin.charts.PLOTS`."""
        points = self._sampler.series.chart(charts.PLOT_POINTS)
        return [
            self._once("plot", plot.name, lambda plot=plot: _json(charts.engine_plot(plot, points)))  # type: ignore[misc]
            for plot in charts.PLOTS
        ]

    def cards(self) -> str:
        """The row of numbers on top."""
        sample = self._sampler.latest
        return panels.cards(sample.snapshot, sample.ttft, sample.itl)

    def pool_table(self) -> str:
        """The pool's pages and bytes in numbers."""
        snapshot = self._sampler.latest.snapshot
        return memory_panels.pool_table(snapshot.pool) if snapshot else ""

    def saving(self) -> str:
        """The sentence that compares with a full cache."""
        snapshot = self._sampler.latest.snapshot
        return memory_panels.saving_line(snapshot) if snapshot else ""

    def sequences(self) -> str:
        """The table of sequences by memory."""
        snapshot = self._sampler.latest.snapshot
        if snapshot is None:
            return ""
        return self._once("rows", "", lambda: memory_panels.sequences_table(snapshot, self._owner))

    def counters(self) -> str:
        """What the cache did since the engine started."""
        snapshot = self._sampler.latest.snapshot
        return panels.counters_panel(snapshot.counters) if snapshot else ""

    def config(self) -> str:
        """The running model and its cache configuration."""
        snapshot = self._sampler.latest.snapshot
        return panels.config_table(snapshot) if snapshot else ""

    def away(self, *, short: bool = False) -> str:
        """A banner while the engine does not answer; ``short`` where an alert says why already."""
        sample = self._sampler.latest
        if sample.error is None:
            return ""
        shown = " The numbers below are the last ones seen." if sample.snapshot else ""
        if short:
            return panels.notice(shown.strip(), "warn")
        return panels.notice(f"The engine does not answer now: {sample.error}{shown}", "warn")

    def _once(self, kind: str, variant: str, make: Callable[[], str]) -> str:
        if self._number != self.number:
            self._number = self.number
            self._made.clear()
        key = (kind, variant)
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def _json(figure: go.Figure) -> str:
    text: str = figure.to_json()
    return text
