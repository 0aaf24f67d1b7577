"""Pinned conversations stay when room is made, and never so many that others cannot run."""

from __future__ import annotations

from typing import Any

import pytest

from tangram import asked
from tangram.errors import ConfigError
from tangram.pins import pinned_pages, set_pin
from tests.tangram.test_manager import FakeRequest, G, Policy, Worker, conversation, manager, run


def idle(worker: Worker, name: str, tokens: int = 40) -> None:
    request = FakeRequest(name, conversation(name, tokens))
    run(worker, request)
    worker.finish(request)


def worker_of(pages: int, pinnable: int) -> Worker:
    worker = Worker(manager(pages))
    worker.m.configure(Policy(pinnable=pinnable))
    return worker


def names(worker: Worker) -> list[str]:
    return [row.name for row in worker.m.resident.rows()]


def test_a_pinned_conversation_outlives_others_that_were_used_later() -> None:
    worker = worker_of(2 * G.idle_pages(40) + G.pages(40), pinnable=G.pages(40))
    idle(worker, "a")
    assert set_pin(worker.m, "a", True) == {"conversations": 1, "refused": ""}
    for name in "bcde":
        idle(worker, name)
        worker.m.check_integrity()
    assert "a" in names(worker)
    assert worker.m.counters["evictions"] > 0
    set_pin(worker.m, "a", False)
    for name in "fgh":
        idle(worker, name)
    assert "a" not in names(worker)


def test_what_is_pinned_is_no_room() -> None:
    worker = worker_of(3 * G.pages(40), pinnable=G.pages(40))
    idle(worker, "a")
    idle(worker, "b")
    everything = worker.m.room.available()
    assert everything == 3 * G.pages(40)
    set_pin(worker.m, "a", True)
    held = pinned_pages(worker.m)
    assert held == G.idle_pages(40)
    assert worker.m.room.available() == everything - held
    (pinned,) = [row for row in worker.m.resident.rows() if row.pinned]
    assert worker.m.room.available(pinned) == everything - held, "the row that is continued counts once"
    assert worker.m.resident.stale_pages(0.0) == held, "that of b alone"


def test_it_stays_pinned_turn_after_turn_and_is_seen() -> None:
    worker = worker_of(400, pinnable=300)
    first = FakeRequest("1", conversation("a", 40))
    run(worker, first)
    set_pin(worker.m, "1", True)
    worker.finish(first)
    second = FakeRequest("2", conversation("a", 60))
    run(worker, second)
    assert [seq.pinned for seq in worker.m.snapshot().sequences if seq.state == "running"] == [True]
    worker.finish(second)
    assert [(seq.id, seq.pinned) for seq in worker.m.snapshot().sequences] == [("2", True)]
    assert set_pin(worker.m, "1", True)["conversations"] == 0, "its earlier turns have no row"


def test_too_much_is_refused_and_what_grew_too_large_is_let_go() -> None:
    worker = worker_of(400, pinnable=G.idle_pages(40))
    idle(worker, "a")
    idle(worker, "b")
    set_pin(worker.m, "a", True)
    answer = set_pin(worker.m, "b", True)
    assert answer["conversations"] == 0
    assert f"of at most {G.idle_pages(40)}" in str(answer["refused"])
    again = FakeRequest("a2", conversation("a", 200))
    run(worker, again)
    worker.finish(again)
    assert not any(row.pinned for row in worker.m.resident.rows())


def test_the_model_can_always_run_its_longest_conversation() -> None:
    longest, pinnable = 120, G.idle_pages(40)
    worker = worker_of(pinnable + G.pages(longest), pinnable)
    idle(worker, "a")
    set_pin(worker.m, "a", True)
    run(worker, FakeRequest("b", conversation("b", longest)))
    assert names(worker) == ["a"]


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ({}, "body"),
        ({"sequence": "x"}, "body"),
        ({"sequence": "", "pinned": True}, "sequence"),
        ({"sequence": "x", "pinned": 1}, "pinned"),
    ],
)
def test_what_makes_no_sense_is_refused(sent: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        asked.pin(sent)
