"""Who goes first when more conversations want to go on than the cache holds."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.core.sched.request_queue import PriorityRequestQueue

    from tangram import crowd
    from tangram.live import Return
from tests.tangram.simulation import GEOMETRY as G
from tests.tangram.simulation import Simulation, vllm_config
from tests.tangram.test_residency import LENGTH, drive, tokens

Make = Callable[..., Simulation]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = tmp_path_factory.mktemp("model")

    def build(pages: int, ours: dict[str, Any] | None = None, **engine: Any) -> Simulation:
        return Simulation(vllm_config(folder, LENGTH, ours or {}, **engine), pages)

    return build


@pytest.fixture(autouse=True)
def always_crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits makes a crowd, and nothing is short."""
    monkeypatch.setattr(crowd, "CALM", -1.0)
    monkeypatch.setattr(crowd, "CHEAP", 0)


def closed_loop(
    sim: Simulation, clients: int, turns: int, then: Callable[[], None] = lambda: None, after: int = 0
) -> float:
    """Clients who each ask the next turn as soon as they have their answer. The share of tokens of later
    turns that was in the cache; once all have had ``after`` turns, ``then`` is called, and it counts."""
    contexts = {client: tokens(client, 120) for client in range(clients)}
    done = dict.fromkeys(contexts, 0)
    hit = asked = 0

    def ask(client: int) -> None:
        sim.add(f"{client}.{done[client]}", contexts[client], 12)

    for client in contexts:
        ask(client)
    while any(turn < turns for turn in done.values()):
        sim.step()
        if min(done.values()) >= after:
            then()
        for client, turn in done.items():
            name = f"{client}.{turn}"
            if turn < turns and name in sim.finished:
                if turn and min(done.values()) >= after:
                    hit, asked = hit + sim.cached[name], asked + len(contexts[client])
                contexts[client] = contexts[client] + sim.outputs[name] + tokens(100 * client + turn, 20)
                done[client] += 1
                if done[client] < turns:
                    ask(client)
    sim.run()
    return hit / asked


def test_in_a_crowd_rows_last_until_their_users_return(make: Make) -> None:
    """Twelve who take turns, in a cache for six: in the order of arrival nobody's row is there in time."""
    shares = {}
    for order in ("off", "on"):
        sim = make(6 * G.pages(240), {"returning_first": order}, max_num_seqs=16)
        shares[order] = closed_loop(sim, clients=12, turns=8)
        sim.close()
    assert shares["on"] > shares["off"] + 0.2, shares


def test_rows_that_nobody_found_any_more_are_found_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strict order has come to the point where each comes back in vain; then it is given up."""
    monkeypatch.setattr(crowd, "CALM", 1e9)
    sim = make(6 * G.pages(300), max_num_seqs=16)
    assert closed_loop(sim, clients=16, turns=4) < 0.1
    sim.close()
    sim = make(6 * G.pages(300), max_num_seqs=16)
    crowded = lambda: monkeypatch.setattr(crowd, "CALM", -1.0)  # noqa: E731
    assert closed_loop(sim, clients=16, turns=8, then=crowded, after=4) > 0.4
    sim.close()


def test_a_trial_that_does_not_help_ends_and_is_made_again_after_a_pause(make: Make) -> None:
    sim = make(2000)
    now = 100.0
    watch = sim.scheduler._crowd
    watch._clock = lambda: now
    assert not watch._worth_it(), "nothing is known"
    sim.manager.returns.extend([Return.IN_VAIN] * 20 + [Return.NONE] * 12)
    judged = {}
    for now in (100.0, 119.0, 121.0, 179.0, 181.0, 200.0, 202.0):
        judged[now] = watch._worth_it()
    assert [at for at, worth in judged.items() if worth] == [100.0, 119.0, 181.0, 200.0]
    sim.manager.returns.extend([Return.FOUND] * 8)
    assert watch._worth_it(), "it helps"
    sim.manager.returns.extend([Return.NONE] * 30)
    now = 1000.0
    assert not watch._worth_it(), "nobody comes back"
    sim.close()


def test_nobody_is_passed_for_ever(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no patience at all the order is that of arrival again."""
    monkeypatch.setattr(crowd, "PATIENCE", -1.0)
    order = {}
    for setting in ("off", "on"):
        sim = make(2 * G.pages(LENGTH), {"returning_first": setting}, max_num_seqs=3)
        for index in range(20):
            sim.add(str(index), tokens(index, 100), 20)
        sim.run()
        order[setting] = list(sim.finished)
        sim.close()
    assert order["on"] == order["off"]


def test_a_queue_of_priorities_keeps_its_order(make: Make) -> None:
    sim = make(4 * G.pages(LENGTH), scheduling_policy="priority", max_num_seqs=2)
    assert isinstance(sim.scheduler.waiting, PriorityRequestQueue)
    for index in range(8):
        sim.add(str(index), tokens(index, 100), 5)
    sim.run()
    sim.close()


def test_nobody_waits_for_others_in_a_queue_of_priorities(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is first there would hold up all behind him, as nobody is passed."""
    monkeypatch.setattr(crowd, "RETURNING", 0.0)
    sim = make(G.pages(LENGTH) + 60, scheduling_policy="priority", max_num_seqs=4)
    for index in range(6):
        sim.add(f"idle{index}", tokens(index, 120), 2)
        sim.run()
    sim.add("runs", tokens(20, 400), 60)
    sim.step()
    sim.add("first", tokens(21, 200), 2)
    sim.step()
    assert "first" in sim.worker.requests
    sim.run()
    sim.close()


@pytest.mark.parametrize("return_too", [False, True])
def test_a_burst_makes_no_lasting_crowd_of_those_who_come_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, return_too: bool
) -> None:
    """New prompts that would fit, were the others' rows evicted, wait for these only if their users come
    back. Or each would wait as long as it may, and thereby make the crowd for which the next one waits."""
    monkeypatch.setattr(crowd, "CALM", 1.0)
    sim = make(8 * G.pages(340), max_num_seqs=32, max_num_batched_tokens=1000)
    now, serial, began = 0.0, 0, 0
    sim.scheduler._crowd._clock = lambda: now
    waited: dict[str, float] = {}
    monkeypatch.setattr(crowd, "RETURNING", 0.0 if return_too else crowd.RETURNING)

    def ask() -> None:
        nonlocal serial
        sim.add(str(serial), tokens(serial, 300), 40)
        sim.scheduler.requests[str(serial)].arrival_time = waited[str(serial)] = now
        serial += 1

    for _ in range(20):
        ask()
    for step in range(600):
        now += 0.1
        if step % 8 == 0:
            ask()
        sim.step()
        while str(began) in sim.cached:
            waited[str(began)] = now - waited[str(began)]
            began += 1
    late = [waited[str(index)] for index in range(began - 20, began)]
    assert (min(late) > crowd.PATIENCE - 1) if return_too else (max(late) < 1.0)
    sim.run()
    sim.close()


def test_within_a_turn_the_order_is_that_of_arrival(make: Make) -> None:
    """Also of one that has returned, and then lost its row."""
    sim = make(2000, max_num_seqs=1)
    sim.add("old", tokens(1, 150), 4)
    sim.run()
    sim.add("runs", tokens(9, 30), 30)
    sim.step()
    sim.add("long", tokens(2, 150), 4)
    sim.add("returns", tokens(1, 150) + sim.outputs["old"] + tokens(3, 20), 4)
    sim.step()
    assert [r.request_id for r in sim.scheduler.waiting] == ["returns", "long"]
    assert sim.manager.counters["crowded_steps"] > 0
    sim.manager.evict()
    sim.step()
    assert [r.request_id for r in sim.scheduler.waiting] == ["long", "returns"]
    sim.run()
    sim.close()


def test_who_may_not_read_the_cache_does_not_return_to_a_row(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt logprobs need every token computed. First in the queue, such a request would wait for room, and
    all who do return behind it."""
    monkeypatch.setattr(crowd, "RETURNING", 0.0)
    sim = make(G.pages(LENGTH) + 60, max_num_seqs=4)
    for index in range(4):
        sim.add(f"old{index}", tokens(index, 120), 2)
        sim.run()
    sim.add("runs", tokens(20, 300), 60)
    sim.step()
    kept = [row.name for row in sim.manager.resident.rows()]
    for name, old in zip(("all", "returns"), kept[-2:], strict=True):
        sim.add(name, sim.prompts[old][0] + sim.outputs[old] + tokens(30, 20), 2)
    sim.scheduler.requests["all"].skip_reading_prefix_cache = True
    sim.step()
    assert sim.cached.get("returns", 0) > 0
    assert "all" not in sim.worker.requests
    sim.run()
    sim.close()


def test_nobody_returns_to_a_row_whose_window_blocks_are_gone(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In models with sliding-window layers it is not offered: whoever wants it computes all again."""
    sim = make(2000, max_num_seqs=1)
    sim.add("old", tokens(1, 150), 4)
    sim.run()
    sim.add("runs", tokens(9, 30), 30)
    sim.step()
    monkeypatch.setattr(sim.manager.windows, "blocks_at", lambda *_: None)
    sim.add("long", tokens(2, 150), 4)
    sim.add("comes again", tokens(1, 150) + sim.outputs["old"] + tokens(3, 20), 4)
    sim.step()
    assert [r.request_id for r in sim.scheduler.waiting] == ["long", "comes again"]
    sim.run()
    sim.close()


def test_rows_are_looked_up_a_few_at_a_step(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands may have long prompts and begin to be a crowd at once."""
    monkeypatch.setattr(crowd, "LOOK_UPS", 100)
    sim = make(2000, max_num_seqs=1)
    sim.add("runs", tokens(99, 30), 60)
    sim.step()
    looked_up: list[str] = []
    row_of = sim.manager.row_of

    def counted(request: Any) -> Any:
        looked_up.append(request.request_id)
        return row_of(request)

    for index in range(40):
        sim.add(str(index), tokens(index, 16 * 20), 2)
    monkeypatch.setattr(sim.manager, "row_of", counted)
    for step in range(1, 9):
        sim.step()
        assert len(looked_up) == min(40, 5 * step)
    assert len(set(looked_up)) == 40, "each once"
    sim.run()
    sim.close()


def test_returning_conversations_and_short_requests_pass_long_ones(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = make(2000, max_num_seqs=1)
    sim.add("old", tokens(1, 150), 4)
    sim.run()
    monkeypatch.setattr(crowd, "CHEAP", 40)
    sim.add("runs", tokens(9, 30), 30)
    sim.step()
    sim.add("long", tokens(2, 150), 4)
    sim.add("returns", tokens(1, 150) + sim.outputs["old"] + tokens(3, 20), 4)
    sim.add("short", tokens(4, 30), 4)
    sim.run()
    assert list(sim.finished) == ["old", "runs", "returns", "short", "long"]
    sim.close()


def test_a_conversation_that_was_idle_for_long_makes_room(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its user is taken to be gone: what waits does not wait for it."""
    monkeypatch.setattr(crowd, "RETURNING", 0.0)
    deferred = {}
    for fresh in (60.0, 0.0):
        monkeypatch.setattr(crowd, "FRESH", fresh)
        sim = make(G.pages(LENGTH) + 48, max_num_seqs=4)
        for index in range(6):
            sim.add(f"idle{index}", tokens(index, 120), 2)
            sim.run()
        sim.add("runs", tokens(20, 400), 60)
        sim.step()
        sim.add("waits", tokens(21, 200), 2)
        sim.step()
        deferred[fresh] = "waits" not in sim.worker.requests
        sim.run()
        sim.close()
    assert deferred == {60.0: True, 0.0: False}


@settings(max_examples=6)
@given(st.integers(0, 2**32), st.booleans(), st.booleans(), st.integers(1, 4))
def test_a_crowd_breaks_nothing(make: Make, seed: int, reserve: bool, wide: bool, pools: int) -> None:
    ours = {"reserve": reserve, "wide_steps": wide}
    sim = make(pools * G.pages(LENGTH), ours, max_num_seqs=8)
    drive(sim, random.Random(seed), 150)
    sim.close()
