"""The queue between users and the engine: its order, its bounds, and that a whole product keeps to it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from types import SimpleNamespace

import pytest

from app.errors import Busy
from app.fairness import FairQueue, Limits, Ticket
from app.settings import Settings
from db.views import QuotaView
from tests.app.conftest import eventually, running_product
from tests.fake_engine import FakeEngine

MANY = Limits(running=100, waiting=1000, per_minute=10_000)


def queue(running: int = 2, waiting: int = 1000, limits: Limits = MANY) -> FairQueue:
    return FairQueue(running=running, waiting=waiting, limits=limits)


def granted(ticket: Ticket) -> bool:
    return ticket.began is not None


def order(places: FairQueue, held: list[Ticket], tickets: list[Ticket]) -> list[str]:
    """Users in the order in which their tickets' turns come, the first to begin ending first."""
    held, came = list(held), []
    while held:
        held.pop(0).leave()
        new = [ticket for ticket in tickets if granted(ticket)]
        tickets = [ticket for ticket in tickets if not granted(ticket)]
        came += [ticket.user for ticket in new]
        held += new
    return came


@pytest.mark.parametrize("running", [1, 2, 7])
def test_fifty_requests_of_one_delay_another_by_one_place(running: int) -> None:
    places = queue(running)
    heavy = [places.join("heavy") for _ in range(50)]
    assert sum(map(granted, heavy)) == running
    other = places.join("other")
    assert not granted(other)
    assert other.position == 1
    heavy[0].leave()
    assert granted(other)
    assert other.position == 0


def test_users_take_turns() -> None:
    places = queue(1)
    held = [places.join("ann")]
    tickets = [places.join(user) for user in ("ann", "ann", "ann", "bob", "bob", "cho")]
    assert [ticket.position for ticket in tickets] == [3, 5, 6, 1, 4, 2]
    assert order(places, held, tickets) == ["bob", "cho", "ann", "bob", "ann", "ann"]
    assert (places.running, places.waiting) == (0, 0)


def test_of_many_places_nobody_holds_all() -> None:
    """With four places and three users who want more, whoever has fewest running is next."""
    places = queue(4)
    heavy = [places.join("heavy") for _ in range(20)]
    others = [places.join(user) for user in ("bob", "cho", "bob", "cho", "bob")]
    for ticket in heavy[:2]:
        ticket.leave()
    assert [granted(ticket) for ticket in others] == [True, True, False, False, False]
    heavy[2].leave()  # all have one running now; heavy's last turn is longest ago
    assert granted(heavy[4])
    heavy[3].leave()
    assert granted(others[2])
    assert places.running == 4


def test_a_user_runs_at_most_the_limit_and_the_rest_waits() -> None:
    places = queue(10, limits=Limits(running=2, waiting=1, per_minute=100))
    tickets = [places.join("ann") for _ in range(3)]
    assert [granted(ticket) for ticket in tickets] == [True, True, False]
    with pytest.raises(Busy, match="2 requests running and 1 waiting") as refused:
        places.join("ann")
    assert (refused.value.status, refused.value.code) == (429, "rate_limited")
    assert 1 <= refused.value.retry_after <= 60
    assert granted(places.join("bob"))
    tickets[0].leave()
    tickets[0].leave()
    assert granted(tickets[2])
    assert places.refused == {"rate_limited": 1, "queue_full": 0}


def test_the_whole_queue_is_bounded() -> None:
    places = queue(1, waiting=2)
    tickets = [places.join(f"user {number}") for number in range(3)]
    with pytest.raises(Busy, match="Too many people are waiting") as refused:
        places.join("late")
    assert refused.value.code == "queue_full"
    tickets[2].leave()
    assert places.join("late").position == 2
    assert places.refused == {"rate_limited": 0, "queue_full": 1}


def test_requests_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("app.fairness.time", SimpleNamespace(monotonic=lambda: clock.now))
    places = queue(limits=Limits(running=5, waiting=5, per_minute=3))
    for clock.now in (0.0, 10.0, 20.0):
        places.admit("ann")
    with pytest.raises(Busy, match=r"begin 3 requests a minute\. Try again in 40 seconds") as refused:
        places.admit("ann")
    assert refused.value.retry_after == 40
    places.admit("bob")
    clock.now = 60.5
    places.admit("ann")
    with pytest.raises(Busy) as refused:
        places.admit("ann")
    assert refused.value.retry_after == 10
    places.set_quota("ann", QuotaView(per_minute=4))
    places.admit("ann")


def test_who_has_no_room_to_wait_is_refused_before_any_work_and_not_counted() -> None:
    places = queue(1, waiting=0, limits=Limits(running=1, waiting=0, per_minute=2))
    places.admit("ann")
    held = places.join("ann")
    for _ in range(3):
        with pytest.raises(Busy, match="as many as you may have"):
            places.admit("ann")
    held.leave()
    places.admit("ann")
    with pytest.raises(Busy, match="begin 2 requests a minute"):
        places.admit("ann")


def test_quotas_win_over_defaults_and_count_at_once() -> None:
    places = queue(10, limits=Limits(running=1, waiting=5, per_minute=100))
    places.set_quotas({"ann": QuotaView(running=2), "bob": QuotaView(waiting=0)})
    ann = [places.join("ann") for _ in range(3)]
    assert [granted(ticket) for ticket in ann] == [True, True, False]
    places.join("bob")
    with pytest.raises(Busy):
        places.join("bob")
    places.set_quota("ann", QuotaView(running=3))
    assert granted(ann[2])


def test_positions_tell_the_order() -> None:
    """While nobody else comes and the first to begin end first, turns come in the order of the positions."""
    dice = random.Random(3)
    for _ in range(100):
        limits = Limits(running=dice.randint(1, 4), waiting=1000, per_minute=1000)
        places = queue(dice.randint(1, 4), limits=limits)
        tickets = [places.join(dice.choice("aaabcd")) for _ in range(dice.randint(1, 25))]
        held = [ticket for ticket in tickets if granted(ticket)]
        waiting = [ticket for ticket in tickets if not granted(ticket)]
        foreseen = sorted(waiting, key=lambda ticket: ticket.position)
        assert [ticket.position for ticket in foreseen] == list(range(1, len(waiting) + 1))
        came: list[Ticket] = []
        while held:
            held.pop(0).leave()
            new = sorted((ticket for ticket in waiting if granted(ticket)), key=lambda ticket: ticket.began)
            came += [ticket for ticket in new if ticket not in came]
            held += [ticket for ticket in new if ticket not in held]
            waiting = [ticket for ticket in waiting if not granted(ticket)]
        assert came == foreseen


def test_what_goes_on_by_itself_is_never_refused() -> None:
    moves = []
    places = queue(1, waiting=0, limits=Limits(running=1, waiting=0, per_minute=1))
    places.on_move = lambda: moves.append(1)
    places.join("ann")
    with pytest.raises(Busy):
        places.join("ann")
    assert places.rejoin("ann").position == 1
    assert len(moves) == 2


async def test_whoever_gives_up_leaves_no_hole() -> None:
    places = queue(1)
    held = places.join("ann")

    async def patient(user: str) -> None:
        ticket = places.join(user)
        try:
            await ticket.turn()
        finally:
            ticket.leave()

    waiting = [asyncio.create_task(patient(user)) for user in ("bob", "cho", "dan")]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    assert places.waiting == 2
    held.leave()
    await asyncio.gather(*waiting[1:])
    assert (places.running, places.waiting) == (0, 0)


async def test_a_stream_holds_its_place_until_it_ends_in_whatever_way() -> None:
    places = queue(1, waiting=0)

    async def three():
        for number in range(3):
            yield number

    assert [item async for item in places.stream("ann", three())] == [0, 1, 2]
    assert places.running == 0
    async with contextlib.aclosing(places.stream("ann", three())) as stream:
        assert await anext(stream) == 0
        assert places.running == 1
        with pytest.raises(Busy):
            await anext(places.stream("bob", three()))
    assert places.running == 0


def test_users_who_are_gone_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("app.fairness.time", SimpleNamespace(monotonic=lambda: clock.now))
    places = queue(5)
    stays = places.join("stays")
    for number in range(3000):
        clock.now += 1
        places.join(f"user {number}").leave()
    assert len(places._users) <= 1001
    assert granted(stays)


# ---- the product -----------------------------------------------------------------------------


@pytest.fixture
def narrow(settings: Settings) -> Settings:
    """Two places at the engine, one for each user, two to wait in."""
    return settings.model_copy(
        update={"max_running": 2, "user_running": 2, "user_waiting": 2, "max_waiting": 3}
    )


async def test_a_heavy_user_does_not_keep_another_waiting(narrow: Settings, fake_engine: FakeEngine) -> None:
    async with running_product(narrow) as product:
        quota = {"quota": {"waiting": 100, "running": 100}}
        await product.http.patch(f"/api/admin/users/{product.owner}", json=quota)
        product.services.queue._waiting = 100
        generation = product.services.generation
        conversations = [await product.conversation() for _ in range(50)]
        fake_engine.up_to = 1  # nobody's turn ends before everybody has come
        heavy = [
            await generation.send(product.owner, conversation, "/tokens 400 /delay 0.005")
            for conversation in conversations
        ]
        await eventually(lambda: len(fake_engine.running) == 2)
        last = heavy[-1].reply.id
        assert generation.position(product.owner, last) == product.services.queue.waiting == 48
        other = await product.services.store.create_user("other", "hash")
        conversation = (await product.services.store.create_conversation(other.id)).id
        handle = await generation.send(other.id, conversation, "/say hello")
        assert generation.position(other.id, handle.reply.id) == 1
        before = len(fake_engine.requests)
        fake_engine.up_to = math.inf
        async for event in generation.subscribe(other.id, handle.reply.id):
            if event.kind == "done":
                assert event.text == "hello"
        asked = [request["cache_salt"] for request in fake_engine.requests[before:]]
        assert other.cache_salt in asked[:2], "at most one request of the heavy user came between"
        assert generation.position(other.id, handle.reply.id) is None
        assert generation.position(other.id, last) is None
        # Stop works in the queue too, and frees the place.
        await generation.stop(product.owner, last)
        assert (await product.services.store.get_message(product.owner, last)).status == "stopped"
        await generation.stop_owner(product.owner)
        await eventually(lambda: not fake_engine.running)
        queue = product.services.queue
        await eventually(lambda: (queue.running, queue.waiting) == (0, 0))


async def test_too_much_is_refused_and_nothing_is_stored(narrow: Settings) -> None:
    async with running_product(narrow) as product:
        conversations = [await product.conversation() for _ in range(5)]
        generation = product.services.generation
        for conversation in conversations[:4]:
            await generation.send(product.owner, conversation, "/tokens 2000 /delay 0.05")
        path = f"/api/conversations/{conversations[4]}/messages"
        refused = await product.http.post(path, json={"content": "hello"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        assert (await product.http.get(path)).json()["messages"] == []
        body = {"model": "fake-model", "messages": [{"role": "user", "content": "/say hi"}]}
        for stream in (False, True):
            refused = await product.http.post("/v1/chat/completions", json={**body, "stream": stream})
            assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
        async with await product.stranger() as other:  # the one place that is left to wait in
            waiting = asyncio.create_task(other.post("/v1/chat/completions", json=body))
            await eventually(lambda: product.services.queue.waiting == 3)
            full = await other.post("/v1/chat/completions", json=body)
            assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
            text = (await other.get("/metrics")).text
            assert 'tangram_chat_queue_requests{kind="waiting"} 3.0' in text
            assert 'tangram_chat_refused_total{reason="rate_limited"} 3.0' in text
            await generation.stop_owner(product.owner)
            assert (await waiting).status_code == 200
        await eventually(lambda: product.services.queue.running == 0)
