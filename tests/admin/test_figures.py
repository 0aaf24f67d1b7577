"""What goes in is what the figures show."""

from __future__ import annotations

import json
from typing import Any

import pytest

from admin import charts, figures, palette
from admin.history import PoolPoint
from admin.snapshot import MemorySnapshot
from app.ui import brand
from tests.admin.support import report


def drawn(figure: Any) -> Any:
    return json.loads(figure.to_json())


def point(time: float, running: int = 1, resident: int = 2) -> PoolPoint:
    return PoolPoint(time, running, 3, resident, 10, 1024**2, 0, 9 * 1024**2, 3, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("view", "key"),
    [
        (figures.BUDGET, "budget"),
        (figures.TOKENS, "tokens_kept"),
        (figures.PAGES, "pages"),
        (figures.WASTE, "waste"),
        (figures.TIER, "tier"),
    ],
)
@pytest.mark.parametrize(("layers", "kv_heads"), [(30, 3), (80, 8), (2, 5), (1, 1)])
def test_map_has_a_column_a_layer_and_a_row_a_head(layers: int, kv_heads: int, view: str, key: str) -> None:
    data = report(layers, kv_heads)
    trace = drawn(figures.memory_map(MemorySnapshot.parse(data), view))["data"][0]
    assert trace["type"] == "heatmap"
    assert trace["x"] == list(range(layers))
    assert trace["y"] == list(range(kv_heads))
    for layer in range(layers):
        for head in range(kv_heads):
            assert trace["z"][head][layer] == data["heads"][key][layer][head]


def test_hover_names_the_head_and_gives_all_values() -> None:
    data = report(5, 2)
    trace = drawn(figures.memory_map(MemorySnapshot.parse(data), figures.BUDGET))["data"][0]
    heads = data["heads"]
    for layer in range(5):
        for head in range(2):
            told = trace["customdata"][head][layer]
            assert told[:4] == [heads[key][layer][head] for key in ("tier", "budget", "tokens_kept", "pages")]
            assert told[5] == heads["waste"][layer][head]
    for part in ("Layer %{x}", "KV head %{y}", "Tier %{customdata[0]}", "Budget %{customdata[1]",
                 "Tokens kept %{customdata[2]", "Pages %{customdata[3]", "Share of pool %{customdata[4]",
                 "Waste %{customdata[5]"):  # fmt: skip
        assert part in trace["hovertemplate"]


def test_shares_of_the_pool_add_up_to_what_sequences_hold() -> None:
    """A page belongs to all heads of its tier; each head of a tier has an equal part of it."""
    data = report(6, 3)
    snapshot = MemorySnapshot.parse(data)
    trace = drawn(figures.memory_map(snapshot, figures.SHARE))["data"][0]
    of_tier = {}
    for layer, row in enumerate(data["heads"]["tier"]):
        for head, tier in enumerate(row):
            of_tier.setdefault(tier, []).append(data["heads"]["pages"][layer][head])
    held = sum(sum(pages) / len(pages) for pages in of_tier.values())
    assert sum(map(sum, trace["z"])) == pytest.approx(held / data["pool"]["total_pages"])


def test_map_stays_readable_for_many_layers() -> None:
    small = drawn(figures.memory_map(MemorySnapshot.parse(report(30, 3)), figures.TOKENS))["layout"]
    large = drawn(figures.memory_map(MemorySnapshot.parse(report(80, 8)), figures.TOKENS))["layout"]
    for layout, layers, kv_heads in ((small, 30, 3), (large, 80, 8)):
        assert layout["yaxis"]["autorange"] == "reversed", "head 0 is on top"
        assert (layout["meta"]["min_width"] - 110) / layers >= 8, "a cell is at least 8 pixels wide"
        plotted = layout["height"] - layout["margin"]["t"] - layout["margin"]["b"]
        assert plotted / kv_heads >= 24, "and at least 24 high"
        assert layers / layout["xaxis"]["dtick"] <= 10, "few enough labels to read"
        assert layout["uirevision"] == "map", "constant, so that an update keeps the view"


def test_colours_cover_the_values() -> None:
    snapshot = MemorySnapshot.parse(report(4, 2, sequences=0))
    empty = drawn(figures.memory_map(snapshot, figures.TOKENS))["data"][0]
    assert (empty["zmin"], empty["zmax"]) == (0, 1), "an empty cache is drawn, not an error"
    budget = drawn(figures.memory_map(snapshot, figures.BUDGET))["data"][0]
    assert (budget["zmin"], budget["zmax"]) == (0, 1)
    tier = drawn(figures.memory_map(MemorySnapshot.parse(report(4, 2, tiers=3)), figures.TIER))["data"][0]
    assert (tier["zmin"], tier["zmax"]) == (-0.5, 2.5)
    assert tier["colorbar"]["ticktext"] == ["0: keeps 64", "1: keeps 128", "2: keeps 192"]
    bands = [tier["colorscale"][2 * index : 2 * index + 2] for index in range(3)]
    assert all(low[1] == high[1] for low, high in bands), "one flat colour a tier"
    assert len({low[1] for low, _ in bands}) == 3


def test_unknown_view_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown map view 'Heat'"):
        figures.memory_map(MemorySnapshot.parse(report(2, 2)), "Heat")


def test_pool_bar_stacks_to_the_pool() -> None:
    data = report(4, 2, sequences=9)
    figure = drawn(figures.pool_bar(MemorySnapshot.parse(data)))
    bars = {trace["name"]: trace["x"][0] for trace in figure["data"]}
    pool = data["pool"]
    assert bars == {
        "Ring": pool["pages"]["ring"],
        "Sealed, running": pool["pages"]["sealed"],
        "Resident": pool["resident_pages"],
        "Free": pool["free_pages"],
    }
    assert figure["layout"]["barmode"] == "stack"
    assert figure["layout"]["xaxis"]["range"] == [0, pool["total_pages"]] == [0, sum(bars.values())]


def test_time_chart_shows_bytes_by_kind_relative_to_now() -> None:
    points = [point(1000.0), point(1060.0, running=4), point(1120.0, resident=5)]
    figure = drawn(charts.pool_over_time([points]))
    traces = {trace["name"]: trace for trace in figure["data"]}
    mebibyte = 1024**2
    assert traces["Ring"]["x"] == [-120, -60, 0]
    assert traces["Ring"]["y"] == [mebibyte, 4 * mebibyte, mebibyte]
    assert traces["Resident"]["y"] == [2 * mebibyte, 2 * mebibyte, 5 * mebibyte]
    assert traces["Full cache"]["y"] == [9 * mebibyte] * 3
    assert traces["Free"]["y"] == [10 * mebibyte] * 3
    stacked = ("Ring", "Sealed, running", "Resident", "Free")
    assert len({traces[name]["stackgroup"] for name in stacked}) == 1
    axes = figure["layout"]
    assert axes["xaxis"]["ticktext"] == ["−2 min", "−1 min", "now"]
    assert axes["yaxis"]["range"][1] > 18 * mebibyte


def test_time_chart_is_broken_where_samples_are_missing() -> None:
    runs = [[point(1000.0), point(1002.0)], [point(1100.0), point(1102.0)]]
    traces = drawn(charts.pool_over_time(runs))["data"]
    for name in ("Ring", "Sealed, running", "Resident", "Free", "Full cache"):
        parts = [trace for trace in traces if trace["name"] == name]
        assert [part["x"] for part in parts] == [[-102, -100], [-2, 0]]
        assert [part["showlegend"] for part in parts] == [True, False], "one entry in the legend"
        assert {part["legendgroup"] for part in parts} == {name}, "that switches both parts"
    groups = [trace["stackgroup"] for trace in traces if trace["name"] == "Ring"]
    assert len(set(groups)) == 2, "a common stack would fill the hole"


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("page", [brand.LIGHT, brand.DARK], ids=["light", "dark"])
def test_colours_stand_out_from_the_page(page: dict[str, str]) -> None:
    surface = page["--tc-surface"]
    scale = [colour for _, colour in palette.SEQUENTIAL]
    assert contrast(scale[-1], surface) >= 3, "a full map"
    assert min(contrast(colour, surface) for colour in scale) >= 1.2
    assert min(contrast(colour, surface) for colour in palette.TIERS) >= 1.5
    assert scale == sorted(scale, key=luminance, reverse=True), "more is darker all the way"
    assert len(set(palette.TIERS)) == len(palette.TIERS)


def test_time_chart_without_points_is_an_empty_chart() -> None:
    figure = drawn(charts.pool_over_time([]))
    assert [trace["y"] for trace in figure["data"]] == [[]] * 5
    assert figure["layout"]["xaxis"]["ticktext"] == ["now"]
