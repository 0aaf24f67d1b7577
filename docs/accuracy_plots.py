"""Figures of answers and of heads' regularity, from what ``python -m benchmarks.accuracy`` summarised.

Drawn by ``python docs/plots.py``, which knows a summary by its benchmark's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

BARS = {
    "full": ("all kept", "#7a7a7a"),
    "profile keyvalue_query 0.25": ("calibrated, keyvalue_query", "#084594"),
    "profile keyvalue 0.25": ("calibrated, keyvalue", "#6baed6"),
    "uniform keyvalue_query 0.25": ("equal, keyvalue_query", "#d95f02"),
    "uniform keyvalue 0.25": ("equal, keyvalue", "#fdae6b"),
    "shuffled keyvalue_query 0.25": ("shuffled, keyvalue_query", "#b22222"),
}
"""Conditions that are drawn, where they were measured: name and colour."""
TASKS = {
    "multi_key": "eight<br>alike",
    "many_keys": "32<br>alike",
    "single": "one<br>fact",
    "dialogue": "ten<br>turns",
    "near_keys": "near<br>names",
    "multi_value": "several<br>values",
    "people": "people",
    "tracking": "tracking",
    "common_words": "common<br>words",
}
"""What the documentation calls them, in two lines where one has no room."""
LAYOUT: dict[str, Any] = {
    "template": "plotly_white",
    "width": 830,
    "height": 430,
    "font": {"size": 14, "family": "Helvetica, Arial, sans-serif"},
    "margin": {"l": 70, "r": 20, "t": 90, "b": 110},
    "legend": {"orientation": "h", "yref": "container", "y": 0.02, "yanchor": "bottom", "x": 0},
}
Data = Mapping[str, Any]
Figures = dict[str, go.Figure]


def figure(title: str, subtitle: str, x: str, y: str, **layout: Any) -> go.Figure:
    """An empty figure in the documentation's looks."""
    made = go.Figure()
    heading = {"text": title, "subtitle": {"text": subtitle}, "x": 0.01, "xanchor": "left", "y": 0.94}
    axes = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    made.update_layout(**(LAYOUT | {"title": heading} | axes | layout))
    return made


def accuracy(data: Data) -> Figures:
    """Answers by task, and three figures for each calibrated profile."""
    made: Figures = {}
    for model in dict.fromkeys(row["model"] for row in data["figures"]):
        rows = [row for row in data["figures"] if row["model"] == model]
        made[f"{model}-answers"] = answers(model, rows)
    for one in data["regularity"]:
        name = f"{one['model']}-{one['oracle']}-{one['retention']:g}"
        made |= {f"{name}-{part}": drawn for part, drawn in regularity(one).items()}
    return made


def answers(model: str, rows: Sequence[Data]) -> go.Figure:
    """Percent right of each task at the length of most cells, at retention 0.25, by budgets."""
    scored = [row for row in rows if not row["cell"].startswith("loss@")]
    lengths = [row["cell"].partition("@")[2] for row in scored]
    length = max(set(lengths), key=lambda one: (lengths.count(one), one))
    made = figure(
        f"Right answers about a history of {int(length):,} tokens, {model}",
        "a quarter kept, by budgets and scorer; asked when all of the text is sealed; 95% intervals",
        "",
        "percent",
        barmode="group",
        yaxis={"title": {"text": "percent"}, "range": [0, 100]},
        xaxis={"tickangle": 0, "categoryorder": "array", "categoryarray": list(TASKS.values())},
    )
    for condition, (name, colour) in BARS.items():
        own = [row for row in scored if row["condition"] == condition and row["cell"].endswith(f"@{length}")]
        tasks = [row["cell"].partition("@")[0] for row in own]
        if own:
            made.add_bar(
                x=[TASKS.get(task, task) for task in tasks],
                y=[100 * row["value"] for row in own],
                error_y={
                    "array": [100 * (row["high"] - row["value"]) for row in own],
                    "arrayminus": [100 * (row["value"] - row["low"]) for row in own],
                },
                name=name,
                marker={"color": colour},
            )
    return made


def regularity(one: Data) -> Figures:
    """Ranks of heads across kinds of text, spread of each head, and coverage by alpha."""
    where = (
        f"{one['model']}, oracle {one['oracle']}, retention {one['retention']:g}, {one['samples']} samples"
    )
    made = {"heads": heads(one, where), "alpha": alpha(one, where)}
    return ({"kinds": kinds(one, where)} if one["kinds"] else {}) | made


def kinds(one: Data, where: str) -> go.Figure:
    """Spearman's correlation of heads' needs between samples of two kinds of text."""
    names = list(dict.fromkeys(name for pair in one["kinds"] for name in pair.split("/")))
    table = [[one["kinds"].get(f"{a}/{b}", one["kinds"].get(f"{b}/{a}")) for b in names] for a in names]
    made = figure("Heads rank alike whatever the text", f"rank correlation of needs; {where}", "", "")
    made.add_heatmap(z=table, x=names, y=names, zmin=0, zmax=1, colorscale="Blues", texttemplate="%{z:.2f}")
    return made


def heads(one: Data, where: str) -> go.Figure:
    """The mean need of each head, and its range over samples."""
    table = one["heads"]
    places = list(range(1, len(table["mean"]) + 1))
    made = figure("What heads need, and how much that differs between texts", where, "head, by need", "share")
    made.add_scatter(x=places, y=table["most"], mode="lines", line={"width": 0}, showlegend=False)
    band = {"fill": "tonexty", "fillcolor": "rgba(66,146,198,0.3)", "line": {"width": 0}}
    made.add_scatter(x=places, y=table["least"], mode="lines", name="least to most", **band)
    made.add_scatter(x=places, y=table["mean"], mode="lines", name="mean", line={"color": "#084594"})
    return made


def alpha(one: Data, where: str) -> go.Figure:
    """How many needs a safety margin covers, and the retention at which it does."""
    made = figure("What a safety margin covers, and what it costs", where, "alpha", "share")
    at = [point["alpha"] for point in one["alphas"]]
    for key, name, colour in (("covered", "needs covered", "#084594"), ("cost", "retention", "#d95f02")):
        made.add_scatter(x=at, y=[point[key] for point in one["alphas"]], name=name, line={"color": colour})
    return made
