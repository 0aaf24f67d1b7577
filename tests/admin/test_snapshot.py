"""The memory report is checked before anything is drawn."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from admin.errors import BadSnapshot
from admin.snapshot import MemorySnapshot
from tests.admin.support import report


def test_everything_is_taken_over() -> None:
    data = report(4, 2, sequences=3, tiers=3)
    snapshot = MemorySnapshot.parse(data)
    assert (snapshot.layers, snapshot.kv_heads) == (4, 2)
    assert snapshot.tier_keep == (64, 128, 192)
    assert [list(row) for row in snapshot.heads.pages] == data["heads"]["pages"]
    assert snapshot.pool.total == data["pool"]["total_pages"]
    assert [row.id for row in snapshot.sequences] == [row["id"] for row in data["sequences"]]
    assert snapshot.sequences[0].idle_seconds is None
    assert snapshot.sequences[1].idle_seconds == 3.0
    assert snapshot.counters == data["counters"]


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("pool",), None, "pool"),
        (("pool", "free_pages"), -1, "free_pages"),
        (("pool", "free_pages"), 1.5, "free_pages"),
        (("model", "layers"), True, "layers"),
        (("model", "layers"), 5, "heads.budget"),
        (("heads", "pages"), [[1]], "heads.pages"),
        (("heads", "tier", 1), [1, 2, 3], "heads.tier"),
        (("heads", "budget", 0, 0), float("nan"), "heads.budget"),
        (("sequences",), {}, "sequences"),
        (("sequences", 0, "tokens"), "7", "tokens"),
        (("geometry", "tiers"), [1], "tiers"),
        (("used_bytes",), float("inf"), "used_bytes"),
        (("time",), "now", "time"),
    ],
)
def test_a_damaged_report_is_refused_by_name(path: tuple[Any, ...], value: Any, named: str) -> None:
    data: Any = copy.deepcopy(report(4, 2))
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(BadSnapshot, match=named):
        MemorySnapshot.parse(data)
