"""Draws the figures of the documentation from what the benchmarks measured.

    python docs/plots.py [--data docs/figures/data] [--out docs/images]

Each JSON file in the data folder is what one run of a benchmark wrote (its --json); the name of a figure is
the file's name and what is shown. Nothing is measured here. The pictures are SVG, drawn by plotly in a
headless browser, so no network is needed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from docs.accuracy_plots import accuracy  # noqa: E402

WIDTH, HEIGHT = 830, 430
COLOURS = {
    "stock": "#7a7a7a",
    "tangram 1.0": "#9ecae1",
    "tangram 0.5": "#4292c6",
    "tangram 0.25": "#084594",
}
SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
NAMES = {
    "stock": "stock vLLM",
    "tangram 1.0": "Tangram, all kept",
    "tangram 0.5": "Tangram, half kept",
    "tangram 0.25": "Tangram, a quarter kept",
}
PEERS = {
    "ours": ("Tangram", "#084594"),
    "fa3": ("FlashAttention 3, a sequence for each head", "#d95f02"),
    "flashinfer": ("FlashInfer, with its planning", "#1b9e77"),
}
Data = Mapping[str, Any]
Figures = dict[str, go.Figure]


def figure(title: str, subtitle: str, x: str, y: str, **layout: Any) -> go.Figure:
    """An empty figure in the documentation's looks."""
    made = go.Figure()
    made.update_layout(
        template="plotly_white",
        width=WIDTH,
        height=HEIGHT,
        title={"text": title, "subtitle": {"text": subtitle}, "x": 0.01, "xanchor": "left", "y": 0.94},
        font={"size": 14, "family": "Helvetica, Arial, sans-serif"},
        margin={"l": 70, "r": 20, "t": 90, "b": 120},
        showlegend=True,
        legend={"orientation": "h", "yref": "container", "y": 0.02, "yanchor": "bottom", "x": 0},
        xaxis={"title": {"text": x, "standoff": 8}},
        yaxis={"title": {"text": y}, "rangemode": "tozero"},
    )
    made.update_layout(**layout)
    return made


def engines_of(rows: Sequence[Data]) -> list[str]:
    """The engines of these rows, in their usual order."""
    there = {row["engine"] for row in rows}
    return [name for name in COLOURS if name in there]


def look(engine: str) -> dict[str, Any]:
    """Colour and name of an engine's line or bars."""
    return {"name": NAMES[engine], "marker": {"color": COLOURS[engine]}}


# ---- one function for each benchmark ----------------------------------------------------------------------


def serving(data: Data) -> Figures:
    """Latency by the number of conversations, throughput by how far they exceed the memory."""
    asked, points = data["arguments"], data["points"]
    thinking = asked["thinking"]
    pause = f"{thinking:g} s of thinking between turns" if thinking else "no pause between turns"
    where = f"{asked['kv_gib']:g} GiB of KV cache, {pause}"
    latency = figure(
        "Time to the first token by the number of conversations",
        f"{where}; solid: median, dashed: 99th percentile",
        "conversations at a time",
        "seconds",
        xaxis={"tickvals": sorted({point["clients"] for point in points})},
        yaxis={"type": "log", "tickvals": SECONDS, "ticktext": [f"{value:g}" for value in SECONDS]},
    )
    turns = figure(
        "Turns per second when conversations exceed the memory",
        where,
        "what a full cache of all conversations would take, to the memory there is",
        "turns per second",
        xaxis={"ticksuffix": "x", "rangemode": "tozero"},
    )
    for engine in engines_of(points):
        own = sorted((p for p in points if p["engine"] == engine), key=lambda p: int(p["clients"]))
        timed = [point for point in own if point["ttft"]]
        for quantile, dash in (("p50", "solid"), ("p99", "dash")):
            latency.add_scatter(
                x=[point["clients"] for point in timed],
                y=[point["ttft"][quantile] for point in timed],
                mode="lines+markers",
                line={"dash": dash, "color": COLOURS[engine]},
                legendgroup=engine,
                showlegend=quantile == "p50",
                **look(engine),
            )
        turns.add_scatter(
            x=[point["exceeds"] for point in own],
            y=[point["turns_per_second"] for point in own],
            mode="lines+markers",
            **look(engine),
        )
    goal = asked["goal"]
    latency.add_hline(goal, line={"color": "#b22222", "width": 1, "dash": "dot"})
    latency.add_annotation(
        text=f"goal: {goal:g} s",
        x=0,
        xref="paper",
        xanchor="left",
        y=math.log10(goal),  # plotly places annotations on a logarithmic axis so, and lines not
        yshift=9,
        showarrow=False,
        font={"color": "#b22222", "size": 12},
    )
    return {"ttft": latency, "turns": turns}


def prompts(data: Data) -> Figures:
    """Prefill beside stock vLLM by length, and requests per second with long contexts."""
    asked = data["arguments"]
    made: Figures = {}
    alone = [row for row in data["rows"] if row["part"] == "prefill"]
    if any(row["engine"] == "stock" for row in alone):
        made["prefill"] = figure(
            "Reading prompts beside stock vLLM",
            "tokens per second to the first token, as a ratio; above 1 is faster",
            "prompts x tokens, nothing in the cache",
            "ratio to stock vLLM",
            barmode="group",
        )
        for engine in engines_of(alone)[1:]:
            own = [row for row in alone if row["engine"] == engine]
            made["prefill"].add_bar(
                x=[f"{row['prompts']} x {row['tokens']:,}" for row in own],
                y=[row["ratio"] for row in own],
                text=[f"{row['ratio']:.2f}" for row in own],
                **look(engine),
            )
        made["prefill"].add_hline(1.0, line={"color": COLOURS["stock"], "width": 2})
    if contexts := [row for row in data["rows"] if row["part"] == "contexts"]:
        low, high = asked["contexts"]
        made["contexts"] = figure(
            "Questions on long contexts, answered per second",
            f"contexts of {low:,} to {high:,} tokens, {asked['clients']} clients, "
            f"{asked['kv_gib']:g} GiB of KV cache",
            "questions on each context",
            "requests per second",
            barmode="group",
            xaxis={"type": "category"},
        )
        for engine in engines_of(contexts):
            own = [row for row in contexts if row["engine"] == engine]
            made["contexts"].add_bar(
                x=[str(row["questions"]) for row in own],
                y=[row["turns_per_second"] for row in own],
                text=[f"{row['turns_per_second']:.2f}" for row in own],
                **look(engine),
            )
    return made


def steps(data: Data) -> Figures:
    """What a decode step's time goes to."""
    rows = [row for row in data["cases"] if row.get("profile") and row.get("decode") in (None, "dependent")]
    if not rows:
        return {}
    made = figure(
        "What the time of a decode step goes to",
        "mean step in torch's profiler; conversations x tokens",
        "",
        "microseconds",
        barmode="stack",
    )
    where = [f"{NAMES[row['engine']]}<br>{row['conversations']} x {row['tokens']:,}" for row in rows]
    parts = {
        "Tangram's kernels": ("#084594", lambda p: p["ours"] * p["busy_us"]),
        "other kernels": ("#9ecae1", lambda p: (1 - p["ours"]) * p["busy_us"]),
        "gaps between a graph's kernels": (
            "#fdae6b",
            lambda p: (p["gap"] - p["gap_between_graphs"]) * p["step_us"],
        ),
        "gaps between graphs": ("#b22222", lambda p: p["gap_between_graphs"] * p["step_us"]),
    }
    for name, (colour, share) in parts.items():
        made.add_bar(x=where, y=[share(row["profile"]) for row in rows], name=name, marker={"color": colour})
    return {"": made}


def decode(data: Data) -> Figures:
    """Bandwidth of decode attention beside a copy and other kernels, a quarter kept."""
    rows = [row for row in data["cases"] if row["retention"] == 0.25 and row["budgets"] == "spread"]
    if not rows:
        return {}
    rows = sorted(rows, key=lambda row: (int(row["context"]), int(row["batch"])))
    made = figure(
        "Decode attention: bandwidth on heads of unequal lengths",
        "a quarter kept, 4% to 70% a head; keys and values read once, over the time of a layer",
        "sequences x tokens",
        "GB/s",
        barmode="group",
    )
    where = [f"{row['batch']} x {row['context'] // 1024}k" for row in rows]
    for key, (name, colour) in PEERS.items():
        if any(key in row["us"] for row in rows):
            rates = [row["bytes"] / row["us"][key] / 1e3 if key in row["us"] else None for row in rows]
            made.add_bar(x=where, y=rates, name=name, marker={"color": colour})
    made.add_scatter(
        x=where,
        y=[row["copy_bytes_a_second"] / 1e9 for row in rows],
        mode="lines",
        line={"color": "#444444", "dash": "dot"},
        name="a copy",
    )
    return {"": made}


def prefill(data: Data) -> Figures:
    """Arithmetic of prefill attention beside torch's FlashAttention on as many dense keys."""
    rows = data["prefill"]
    made = figure(
        "Prefill attention: arithmetic by what the step continues",
        "FlashAttention 2 has as many keys, dense and unmasked",
        "requests x new tokens, after cached tokens",
        "TFLOP/s",
        barmode="group",
    )
    for retention, colour, other in ((1.0, "#9ecae1", "#bdbdbd"), (0.25, "#084594", "#636363")):
        own = [row for row in rows if row["retention"] == retention]
        where = [f"{row['requests']} x {row['step']}<br>after {row['cached']:,}" for row in own]
        kept = f"retention {retention:g}"
        for name, key, paint in (
            (f"Tangram, {kept}", "tflops", colour),
            (f"FlashAttention 2, {kept}", "flash_tflops", other),
        ):
            made.add_bar(x=where, y=[row[key] for row in own], name=name, marker={"color": paint})
    return {"": made}


BENCHMARKS: dict[str, Callable[[Data], Figures]] = {
    "gpu_serving": serving,
    "gpu_prompts": prompts,
    "gpu_steps": steps,
    "cuda_decode": decode,
    "cuda_prefill": prefill,
    "accuracy": accuracy,
}
"""By the name that a file gives or, where it gives none, begins with. Others have nothing to draw."""


def figures_of(path: Path) -> Figures:
    """All figures of one file, by the names of their pictures."""
    data = json.loads(path.read_text(encoding="utf-8"))
    named = data.get("benchmark", path.stem)
    draw = next((function for name, function in BENCHMARKS.items() if named.startswith(name)), None)
    if draw is None:
        return {}
    return {"-".join(filter(None, (path.stem, part))): made for part, made in draw(data).items()}


# ---- pictures ---------------------------------------------------------------------------------------------


def save(figures: Mapping[str, go.Figure], out: Path) -> None:
    """Write each figure as ``NAME.svg``."""
    from tests.ui.support import chromium

    out.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        page = browser.new_page()
        page.set_content("<div id=place></div>")
        page.add_script_tag(content=get_plotlyjs())
        for name, made in figures.items():
            address = page.evaluate(
                """async ([figure, size]) => {
                    const place = document.getElementById("place");
                    await Plotly.newPlot(place, figure.data, figure.layout);
                    return await Plotly.toImage(place, {format: "svg", ...size});
                }""",
                [json.loads(made.to_json()), {"width": WIDTH, "height": HEIGHT}],
            )
            _, _, picture = address.partition(",")
            (out / f"{name}.svg").write_text(unquote(picture) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=ROOT / "docs" / "figures" / "data")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    arguments = parser.parse_args()
    figures: Figures = {}
    for path in sorted(arguments.data.glob("*.json")):
        figures |= figures_of(path)
    if not figures:
        sys.exit(f"nothing to draw in {arguments.data}")
    save(figures, arguments.out)
    for name in figures:
        print(arguments.out / f"{name}.svg")


if __name__ == "__main__":
    main()
