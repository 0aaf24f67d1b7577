"""What a measurement of closed-loop clients says: rates, latencies, cache hits, and where to look next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class TurnLike(Protocol):
    """See ``clients.Turn``."""

    number: int
    prompt: int
    asked: float
    joining: bool
    parts: list[tuple[float, int]]
    cached: int
    preemptions: int
    ended: float | None
    error: str | None

    @property
    def first(self) -> float | None: ...


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Median and 99th percentile (interpolated) and how many values there are; None for none."""
    if not values:
        return None
    p50, p99 = np.quantile(np.asarray(values), (0.5, 0.99)).tolist()
    return {"p50": p50, "p99": p99, "count": len(values)}


def summarise(turns: Sequence[TurnLike], begin: float, end: float) -> dict[str, Any]:
    """Figures of what happened from ``begin`` to ``end``; what began earlier and what was not finished count
    by what arrived in between.

    Seconds: ``ttft`` from asking to the first token, ``itl`` from one token to the next. Tokens that arrived
    together share the time since those before them; ``merged`` is their share, 0 unless the client was late.
    """
    inside = [turn for turn in turns if turn.first is not None and begin <= turn.first < end]
    regular = [turn for turn in inside if not turn.joining]
    ended = [turn for turn in turns if turn.ended is not None and begin <= turn.ended < end]
    complete = [turn for turn in ended if turn.error is None]
    tokens, merged, gaps = 0, 0, []
    for turn in turns:
        before = None
        for when, count in turn.parts:
            if begin <= when < end:
                tokens += count
                merged += count if count > 1 else 0
                if before is not None:
                    gaps += [(when - before) / count] * count
            before = when
    waiting = [end - turn.asked for turn in turns if turn.asked < end and _unanswered(turn, end)]
    by_turn = {
        str(number): quantiles([turn.first - turn.asked for turn in regular if turn.number == number])
        for number in sorted({turn.number for turn in regular})
    }
    seconds = end - begin
    return {
        "seconds": seconds,
        "turns": len(complete),
        "turns_per_second": len(complete) / seconds,
        "tokens_per_second": tokens / seconds,
        "ttft": quantiles([turn.first - turn.asked for turn in regular]),
        "ttft_by_turn": by_turn,
        "itl": quantiles(gaps),
        "merged": merged / tokens if tokens else 0.0,
        "hit_rate": _share(regular),
        "preemptions": sum(turn.preemptions for turn in complete),
        "errors": sum(turn.error is not None for turn in ended),
        "error": next((turn.error for turn in ended if turn.error), None),
        "waiting_at_end": len(waiting),
        "longest_wait_at_end": max(waiting, default=0.0),
    }


def _unanswered(turn: TurnLike, end: float) -> bool:
    return (turn.first is None or turn.first >= end) and (turn.ended is None or turn.ended >= end)


def _share(turns: Sequence[TurnLike]) -> float | None:
    prompts = sum(turn.prompt for turn in turns)
    return sum(turn.cached for turn in turns) / prompts if prompts else None


def meets(point: dict[str, Any], goal: float) -> bool:
    """Whether 99% of first tokens came within ``goal`` seconds, nobody still waits for longer at the end, and
    no turn failed."""
    ttft = point["ttft"]
    return bool(ttft and ttft["p99"] <= goal and not point["errors"] and point["longest_wait_at_end"] <= goal)


def largest(points: Sequence[dict[str, Any]], goal: float) -> int | None:
    """The most clients that meet the goal where all smaller measured numbers meet it too."""
    best = None
    for point in sorted(points, key=lambda point: point["clients"]):
        if not meets(point, goal):
            break
        best = point["clients"]
    return best


def next_probe(
    points: Sequence[dict[str, Any]], low: int, high: int, goal: float, close: float = 0.05
) -> int | None:
    """The number of clients to measure next, to find the most that meet the goal between ``low`` and
    ``high``; None once the answer is known to within a share ``close``. The limits are measured only when it
    comes to them."""
    best = largest(points, goal)
    worse = [point["clients"] for point in points if not meets(point, goal)]
    above = min((count for count in worse if best is None or count > best), default=None)
    bottom = max(low, best or 0)
    top = min(high, above) if above is not None else high
    if above is not None and above <= low:
        return None
    measured = {point["clients"] for point in points}
    if top - bottom <= max(1, math.floor(close * bottom)):
        return next((count for count in (top, bottom) if count not in measured), None)
    return round(math.sqrt(bottom * top)) if top - bottom > 2 else bottom + 1
