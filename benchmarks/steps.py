"""Decode steps as a profiler's trace of the GPU shows them: how long they take, and how much of it is
work."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
"""Categories of a trace's events that occupy the GPU."""
OURS = re.compile(r"tangram|\b(append|decode|prefill|merge|plan|seal)_kernel\b")
"""Names of the plugin's kernels."""


SEALS = re.compile(r"\bseal_kernel\b")
"""Those of them that seal chunks."""


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of what (start, end) intervals cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def graph_launches(work: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """(first start, last end) on the GPU of each replay of a graph: kernels that one call launched."""
    together: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in work:
        correlation = event.get("args", {}).get("correlation")
        if correlation is not None:
            together[correlation].append(event)
    spans = [
        (min(event["ts"] for event in events), max(event["ts"] + event["dur"] for event in events))
        for events in together.values()
        if len(events) > 1
    ]
    return sorted(spans)


def prefill_of(trace: dict[str, Any], top: int = 12) -> dict[str, Any] | None:
    """Figures of a prefill in a Chrome trace: wall and busy time in microseconds, the share of the kernels'
    time that is sealing, and the kernels by time; None if no kernel is in it."""
    work = [event for event in trace["traceEvents"] if event.get("cat") in WORK and event.get("ph") == "X"]
    if not work:
        return None
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in work:
        kernels[event["name"]].append(event["dur"])
    ranked = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    total = sum(event["dur"] for event in work)
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in work]
    return {
        "wall_us": max(end for _, end in spans) - min(start for start, _ in spans),
        "busy_us": union(spans),
        "kernels_us": total,
        "sealing": sum(sum(times) for name, times in ranked if SEALS.search(name)) / total,
        "top": [{"name": name, "us": sum(times), "count": len(times)} for name, times in ranked[:top]],
    }


def profile_of(trace: dict[str, Any], steps: int, skip: int = 2, top: int = 12) -> dict[str, Any] | None:
    """Figures of the decode steps in a Chrome trace (times in microseconds) of about ``steps`` steps, of
    which the first ``skip`` are left out; None if it holds no replays of graphs. A step lasts from its
    graph's first kernel to the next one's.

    Returned: step and busy time in microseconds a step, the share of a step in which the GPU has no kernel
    (``gap``), the part of it between a graph's last kernel and the next graph's first
    (``gap_between_graphs``), and kernels by time.
    """
    work = [event for event in trace["traceEvents"] if event.get("cat") in WORK and event.get("ph") == "X"]
    launches = graph_launches(work)
    each = max(1, round(len(launches) / steps))
    bounds = [launch[0] for launch in launches[::each]][skip:]
    if len(bounds) < 2:
        return None
    begin, end = bounds[0], bounds[-1]
    count = len(bounds) - 1
    inside = [event for event in work if begin <= event["ts"] < end]
    busy = union((event["ts"], min(end, event["ts"] + event["dur"])) for event in inside)
    ends = [launch[1] for launch in launches if begin <= launch[0] < end][each - 1 :: each]
    between = 0.0
    for graph_end, start in zip(ends, bounds[1:], strict=False):
        spans = [(event["ts"], event["ts"] + event["dur"]) for event in inside]
        covered = union((max(a, graph_end), min(b, start)) for a, b in spans if b > graph_end and a < start)
        between += max(0.0, start - graph_end) - covered
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in inside:
        kernels[event["name"]].append(event["dur"])
    ranked = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    return {
        "steps": count,
        "graphs_per_step": each,
        "step_us": (end - begin) / count,
        "busy_us": busy / count,
        "kernels_us": sum(event["dur"] for event in inside) / count,
        "kernels_per_step": len(inside) / count,
        "gap": 1 - busy / (end - begin),
        "gap_between_graphs": between / (end - begin),
        "ours": sum(sum(times) for name, times in ranked if OURS.search(name))
        / max(1e-9, sum(event["dur"] for event in inside)),
        "top": [
            {"name": name, "us_per_step": sum(times) / count, "per_step": len(times) / count}
            for name, times in ranked[:top]
        ],
    }
