"""The whole of scheduling and residency: vLLM's scheduler, our rules, a worker that checks every slot."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tangram.errors import ConfigError
from tangram.geometry import Geometry, Tier
from tangram.predict import measure
from tests.tangram.simulated_worker import VOCABULARY
from tests.tangram.simulation import GEOMETRY as G
from tests.tangram.simulation import ODD_GEOMETRIES, Simulation, vllm_config

Make = Callable[..., Simulation]
LENGTH = 512


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Build a simulation; ``ours`` are our settings, the rest is vLLM's."""
    folder = tmp_path_factory.mktemp("model")

    def build(
        pages: int,
        depth: int = 2,
        ours: dict[str, Any] | None = None,
        geometry: Geometry = G,
        **engine: Any,
    ) -> Simulation:
        return Simulation(vllm_config(folder, LENGTH, ours or {}, **engine), pages, depth, geometry)

    return build


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(count)]


@pytest.fixture(params=["off", "on"], ids=["narrow", "wide"])
def sim(make: Make, request: pytest.FixtureRequest) -> Iterator[Simulation]:
    simulation = make(2000, ours={"wide_steps": request.param})
    yield simulation
    simulation.close()


# ---- take-over, rewind ------------------------------------------------------------------------------------


def test_a_next_turn_reads_only_what_is_new(sim: Simulation) -> None:
    prompt, held = tokens(1, 150), 0
    for turn in range(5):
        sim.add(f"t{turn}", prompt, 20)
        sim.run()
        if turn:
            assert sim.cached[f"t{turn}"] == (held - 1) // G.page_tokens * G.page_tokens
        prompt = prompt + sim.outputs[f"t{turn}"]
        held = len(prompt)
        prompt = prompt + tokens(turn, 13)
    assert sim.manager.counters["takeovers"] == 4
    assert sim.manager.counters["rewinds"] == 0


@pytest.mark.parametrize("back", [1, 16, 20, 32])
def test_an_edit_within_rewind_resumes(sim: Simulation, back: int) -> None:
    sim.add("first", tokens(1, 200), 1)
    sim.run()
    sim.add("edited", tokens(1, 200)[: 200 - back] + tokens(9, 30), 4)
    sim.run()
    assert sim.cached["edited"] == (200 - back) // G.page_tokens * G.page_tokens
    assert sim.manager.counters["rewinds"] == (back > 8)


@pytest.mark.parametrize("rest", [9, 20, 32])
def test_a_conversation_that_begins_alike_leaves_a_short_one_be(sim: Simulation, rest: int) -> None:
    """One that is hardly longer than what they have in common looks like one that goes back so far."""
    system = tokens(1, 64)
    sim.add("short", system + tokens(2, rest), 8)
    sim.run()
    sim.add("other", system + tokens(3, 200), 40)
    sim.run()
    assert (sim.cached["other"], sim.manager.counters["forks"]) == (64, 1)
    history = system + tokens(2, rest) + sim.outputs["short"]
    sim.add("short again", history + tokens(4, 10), 4)
    sim.run()
    assert sim.cached["short again"] == (len(history) - 1) // G.page_tokens * G.page_tokens
    assert sim.manager.counters["evictions"] == 0


def test_what_was_left_behind_goes_first(sim: Simulation) -> None:
    sim.add("kept", tokens(5, 100), 8)
    sim.run()
    sim.add("first", tokens(1, 200), 1)
    sim.run()
    sim.add("edited", tokens(1, 190) + tokens(9, 30), 4)
    sim.run()
    rows = {row.name: row for row in sim.manager.resident.rows()}
    assert rows.keys() == {"kept", "first", "edited"}
    assert sim.manager.resident.next_victim() == (rows["first"], False)


def test_a_pin_goes_with_whoever_continues(sim: Simulation) -> None:
    sim.add("first", tokens(1, 200), 1)
    sim.run()
    (row,) = sim.manager.resident.rows()
    row.pinned = True
    sim.add("edited", tokens(1, 190) + tokens(9, 30), 4)
    sim.run()
    assert [(row.name, row.pinned) for row in sim.manager.resident.rows()] == [("edited", True)]


def test_an_edit_of_an_edit_never_resumes_from_what_the_first_had_overwritten(sim: Simulation) -> None:
    """Written to 150, the ring of 144 has lost its first page; going back twice must not want it."""
    start = tokens(1, 150)
    for index, kept in enumerate((150, 118, 90, 70)):
        sim.add(str(index), start[:kept] + tokens(10 + index, 1), 1)
        sim.run()
    assert sim.cached["1"] == 112
    assert (sim.cached["2"], sim.cached["3"]) == (0, 64), (
        "computed anew, and then one that never went further"
    )


def test_an_edit_beyond_rewind_computes_all_again(sim: Simulation) -> None:
    sim.add("first", tokens(1, 200), 1)
    sim.run()
    sim.add("edited", tokens(1, 150) + tokens(9, 30), 4)
    sim.run()
    assert sim.cached["edited"] == 0


@pytest.mark.parametrize("length", range(150, 200, 3))
def test_resuming_at_around_and_on_a_seal_boundary(sim: Simulation, length: int) -> None:
    """The first boundaries are at 96 and 160."""
    sim.add("first", tokens(1, length), 1)
    sim.run()
    sim.add("second", tokens(1, length) + sim.outputs["first"] + tokens(2, 90), 2)
    sim.run()
    assert sim.cached["second"] == length // G.page_tokens * G.page_tokens


# ---- fork -------------------------------------------------------------------------------------------------


def test_two_requests_continue_one_conversation_at_once(sim: Simulation) -> None:
    sim.add("first", tokens(1, 300), 8)
    sim.run()
    history = tokens(1, 300) + sim.outputs["first"]
    sim.add("left", history + tokens(2, 20), 40)
    sim.step()
    sim.add("right", history + tokens(3, 20), 40)
    sim.run()
    # The first of them takes the row over; the second forks what runs, and shares its sealed pages.
    assert sim.cached["left"] == sim.cached["right"] == 304
    assert sim.manager.counters["takeovers"] == sim.manager.counters["forks"] == 1
    ends = [len(sim.prompts[name][0]) + 40 - 1 for name in ("left", "right")]
    shared = G.sealed(303) * G.pages_per_chunk
    used = sim.pages - sim.manager.block_pool.get_num_free_blocks()
    assert used == sum(G.idle_pages(end) for end in ends) - shared


def test_a_fork_survives_its_source(sim: Simulation) -> None:
    sim.add("source", tokens(1, 300), 60)
    for _ in range(8):
        sim.step()
    sim.add("fork", tokens(1, 300), 60)
    sim.step()
    sim.step()
    assert sim.manager.counters["forks"] == 1
    sim.abort("source")
    sim.scheduler._evict({"all": True})
    sim.run()
    assert sim.outputs["fork"] == sim.expected("fork")


def test_nothing_forks_from_what_is_not_computed_yet(sim: Simulation) -> None:
    """Both are admitted in one step: neither has anything that the other could copy."""
    for name in "ab":
        sim.add(name, tokens(1, 120), 5)
    sim.run()
    assert sim.manager.counters["forks"] == 0


# ---- common prefixes --------------------------------------------------------------------------------------


def test_conversations_with_one_system_prompt_share_its_sealed_pages(sim: Simulation) -> None:
    system = tokens(7, 200)
    length = G.prefix_length(1)
    assert length <= 200
    for index in range(6):
        sim.add(f"c{index}", system + tokens(100 + index, 40), 5)
        sim.run()
    # The second one shows that the prompt is shared; from the third on it is.
    assert [sim.cached[f"c{index}"] for index in range(6)] == [0, 0, *[length] * 4]
    boundaries = 1 if sim.worker.wide else 2
    assert sim.manager.counters["prefixes"] == boundaries, "where a step ends within the prompt"
    (kept,) = (s for s in sim.manager.snapshot().sequences if s.state == "prefix")
    assert kept.tokens == length, "the longer one took the place of the shorter"
    rows = {row.name: row for row in sim.manager.resident.rows() if not row.shared}
    sealed = [rows[f"c{index}"].pages[G.ring_pages :][: 2 * G.pages_per_chunk] for index in range(2, 6)]
    assert all(pages == sealed[0] for pages in sealed)


def test_a_prefix_is_noticed_however_short_the_answers(sim: Simulation) -> None:
    """A wide step may compute a prompt and its only answer: nothing of it is scheduled again."""
    system = tokens(7, 200)
    for index in range(4):
        sim.add(f"c{index}", system + tokens(100 + index, 40), 1)
        sim.run()
    assert [sim.cached[f"c{index}"] for index in range(4)] == [0, 0, *[G.prefix_length(1)] * 2]


def test_a_prefix_outlives_its_conversations_and_goes_when_room_is_needed(sim: Simulation) -> None:
    system = tokens(7, 120)
    for index in range(2):
        sim.add(f"c{index}", system + tokens(100 + index, 40), 5)
        sim.run()
    rows = [row for row in sim.manager.resident.rows() if not row.shared]
    sim.manager.evict(rows)
    sim.add("later", system + tokens(300, 10), 5)
    sim.run()
    assert sim.cached["later"] == G.prefix_length(0)


def test_a_fork_is_not_resumed_before_the_raw_tokens_that_it_copied(sim: Simulation) -> None:
    """It copied those from the boundary on; what lies before is in its source's ring only."""
    system = tokens(7, G.prefix_length(1))
    for index, more in enumerate((60, 60, 9)):
        sim.add(f"c{index}", system + tokens(100 + index, more), 2)
        sim.run()
    assert sim.manager.counters["forks"] == 1
    sim.manager.evict([row for row in sim.manager.resident.rows() if row.name != "c2"])
    sim.add("edit", system[: G.boundary(1) + 1] + tokens(9, 60), 2)
    sim.run()
    assert sim.cached["c2"] == G.prefix_length(1)
    assert sim.cached["edit"] == 0


def test_answers_alike_are_no_shared_prompt(sim: Simulation) -> None:
    """Only prompts are watched, or every regenerated answer would be kept twice."""
    for name in "ab":
        sim.add(name, tokens(1, 40), 150)
        sim.run()
        sim.manager.evict()
    assert sim.manager.counters["prefixes"] == 0


def test_a_conversation_that_is_computed_again_shares_nothing_with_itself(sim: Simulation) -> None:
    """Repeated as it was, and continued, after its row was evicted."""
    prompt = tokens(1, 250)
    for turn in range(3):
        sim.add(f"t{turn}", prompt, 5)
        sim.run()
        sim.add(f"again{turn}", prompt, 5)
        sim.run()
        sim.manager.evict()
        prompt = prompt + sim.outputs[f"t{turn}"] + tokens(turn, 30)
    assert sim.manager.counters["prefixes"] == 0


@pytest.mark.parametrize("more", range(1, 20, 3))
def test_the_shortest_message_after_a_system_prompt_tells_conversations_apart(
    sim: Simulation, more: int
) -> None:
    system = tokens(7, G.prefix_length(0))
    for index in range(3):
        sim.add(f"c{index}", system + tokens(100 + index, more), 60)
        sim.run()
    assert sim.cached["c2"] == G.prefix_length(0)


# ---- isolation --------------------------------------------------------------------------------------------


def test_another_salt_never_hits(sim: Simulation) -> None:
    prompt = tokens(1, 250)
    for index, salt in enumerate(["me", "you", "me", "you", "they"]):
        sim.add(f"r{index}", prompt, 3, salt=salt)
    sim.run()
    for index, salt in enumerate(["me", "you", "new"]):
        sim.add(f"s{index}", prompt + tokens(5, 20), 3, salt=salt)
        sim.run()
    assert [sim.cached[f"s{index}"] for index in range(3)] == [240, 240, 0]


def test_running_requests_of_another_salt_are_not_forked(sim: Simulation) -> None:
    sim.add("mine", tokens(1, 200), 60, salt="me")
    for _ in range(6):
        sim.step()
    sim.add("yours", tokens(1, 200), 60, salt="you")
    sim.run()
    assert sim.cached["yours"] == 0


# ---- room -------------------------------------------------------------------------------------------------


def test_idle_conversations_hold_no_more_than_their_share(make: Make) -> None:
    sim = make(200, ours={"resident_share": 0.25})
    for index in range(12):
        sim.add(str(index), tokens(index, 100), 2)
        sim.run()
        assert sim.manager.resident.releasable() <= 50
    assert len(sim.manager.resident) > 0
    sim.close()


@pytest.mark.parametrize("length", [90, 200, 239, 240, 290])
def test_as_many_idle_conversations_stay_as_is_predicted(make: Make, length: int) -> None:
    """One being answered and the others idle; the next one evicts the oldest."""
    pool = 6 * G.pages(LENGTH)
    (at,) = measure(G, [[0.5] * 2] * 2, LENGTH, [length]).within(pool * G.page_bytes).at
    assert at.conversations > pool // G.pages(length)
    sim = make(pool)
    for index in range(at.conversations + 1):
        assert sim.manager.counters["evictions"] == 0
        sim.add(str(index), tokens(index, length), 1)
        sim.run()
    assert sim.manager.counters["evictions"] == 1
    sim.close()


def test_all_idle_conversations_return_and_none_is_lost(make: Make) -> None:
    """In a pool that could not hold them with whole rings; each return fills its holes from what is free."""
    ends, count = [170, 205, 240, 275], 16
    lengths = [ends[index % len(ends)] for index in range(count)]
    room = sum(G.idle_pages(n + 40) for n in lengths) + max(G.pages(n + 40) for n in lengths)
    assert room < sum(G.pages(n + 40) for n in lengths)
    sim = make(room)
    for index, length in enumerate(lengths):
        sim.add(f"first{index}", tokens(index, length), 1)
        sim.run()
    for index, length in enumerate(lengths):
        sim.add(f"again{index}", tokens(index, length) + tokens(100 + index, 30), 11)
        sim.run()
        assert sim.cached[f"again{index}"] == length // G.page_tokens * G.page_tokens
    assert sim.manager.counters["evictions"] == 0
    assert sim.manager.counters["takeovers"] == count
    sim.close()


def names(sim: Simulation) -> list[str]:
    """Idle conversations, the next one to be evicted first."""
    return [row.name for row in sim.manager.resident.rows()]


def test_a_conversation_whose_user_waits_is_evicted_last(make: Make) -> None:
    """While the one before him is read, which takes the room of an idle conversation."""
    sim = make(G.pages(480) + 2 * G.idle_pages(200) + 2, max_num_seqs=1)
    for index, salt in enumerate(("me", "you")):
        sim.add(f"first{index}", tokens(index, 200), 1, salt=salt)
        sim.run()
    sim.add("long", tokens(9, 470), 1, salt="somebody")
    sim.add("again0", tokens(0, 230), 30, salt="me")
    assert names(sim) == ["first1", "first0"]
    sim.run()
    assert sim.cached["again0"] == 200 - 200 % G.page_tokens
    sim.close()


def test_who_begins_another_conversation_leaves_those_before(make: Make) -> None:
    """They are evicted first, the least recently used before the others. Other users' keep their places, and
    so do all of one who only goes on with a conversation."""
    sim = make(2000)
    for index, name in enumerate(("b1", "a1", "c1", "a2")):
        sim.add(name, tokens(index, 100), 1, salt=name[0])
        sim.run()
    assert names(sim) == ["a1", "b1", "c1", "a2"]
    sim.add("a3", tokens(50, 100), 1, salt="a")
    assert names(sim) == ["a1", "a2", "b1", "c1"]
    sim.run()
    sim.add("b1 goes on", tokens(0, 130), 1, salt="b")
    sim.run()
    assert names(sim) == ["a1", "a2", "c1", "a3", "b1 goes on"]
    assert [row.left for row in sim.manager.resident.rows()] == [True, True, False, False, False]
    sim.add("a2 goes on", tokens(3, 130), 1, salt="a")
    assert names(sim) == ["a1", "c1", "a3", "b1 goes on", "a2"]
    sim.run()
    assert [row.left for row in sim.manager.resident.rows()] == [True, False, False, False, False]
    sim.close()


def test_nobody_leaves_a_conversation_where_users_are_not_told_apart(make: Make) -> None:
    sim = make(2000)
    for index in range(3):
        sim.add(str(index), tokens(index, 100), 1, salt=None)
        sim.run()
    assert names(sim) == ["0", "1", "2"]
    assert not any(row.left for row in sim.manager.resident.rows())
    sim.close()


def test_a_returning_conversation_whose_row_is_gone_is_counted(make: Make) -> None:
    sim = make(G.pages(LENGTH))
    sim.add("first", tokens(1, 200), 2)
    sim.run()
    sim.add("other", tokens(2, 480), 2)
    sim.run()
    assert sim.manager.counters["evictions"] == 1
    assert sim.manager.counters["misses"] == 0
    sim.add("again", tokens(1, 200) + sim.outputs["first"] + tokens(3, 9), 2)
    sim.run()
    assert sim.manager.counters["misses"] == 1
    assert sim.manager.counters["reprefilled_tokens"] == 192
    sim.close()


def test_a_pool_too_small_for_one_conversation_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="lower --max-model-len"):
        make(G.pages(LENGTH) - 1)


def crowd(sim: Simulation, count: int) -> None:
    """Requests that together want many times the pool."""
    rng = random.Random(5)
    for index in range(count):
        sim.add(str(index), tokens(index, rng.randint(20, 250)), rng.randint(1, 200))


def test_with_reservation_nothing_is_ever_preempted(make: Make) -> None:
    sim = make(2 * G.pages(LENGTH), ours={"reserve": "on"})
    crowd(sim, 25)
    sim.run()
    assert sim.scheduler.preemptions == 0
    assert len(sim.finished) == 25
    sim.close()


def test_reservation_counts_drafts_beyond_the_last_token(make: Make) -> None:
    sim = make(2 * G.pages(LENGTH), ours={"reserve": "on"})
    sim.scheduler.num_spec_tokens = 5
    sim.add("a", tokens(1, 90), 20)
    assert sim.scheduler._final_length("a") == 90 + 20 + 5
    sim.add("b", tokens(2, 90), LENGTH)
    assert sim.scheduler._final_length("b") == LENGTH
    sim.abort("a")
    sim.abort("b")
    sim.close()


@pytest.mark.parametrize("reserve", ["on", "off"])
def test_a_request_that_fits_the_pool_but_not_beside_its_prefix_does_not_wait_for_ever(
    make: Make, reserve: str
) -> None:
    """The copies that a shared prefix holds are more than is left beside the longest conversation."""
    sim = make(G.pages(LENGTH), ours={"reserve": reserve})
    system = tokens(7, G.prefix_length(1))
    for index in range(2):
        sim.add(f"c{index}", system + tokens(100 + index, 60), 2)
        sim.run()
    assert any(row.shared for row in sim.manager.resident.rows())
    sim.add("long", system + tokens(300, LENGTH - len(system) - 21), 20)
    sim.run()
    assert sim.cached["long"] == 0, "the prefix had to go"
    sim.close()


def test_without_reservation_preemption_is_bounded_and_all_end(make: Make) -> None:
    sim = make(2 * G.pages(LENGTH))
    crowd(sim, 25)
    sim.run()
    assert 0 < sim.scheduler.preemptions <= 25 * 8
    assert len(sim.finished) == 25
    sim.close()


def test_a_preempted_request_resumes_from_its_row(make: Make) -> None:
    """Two that grow in a pool that holds one and a half: the younger waits with its row, which is cut only
    as far as the older one needs."""
    sim = make(G.pages(LENGTH) + 20)
    sim.add("old", tokens(1, 90), 12)
    sim.add("young", tokens(2, 90), 200)
    sim.run()
    assert sim.outputs["young"] == sim.expected("young")
    sim.close()


# ---- everything at once -----------------------------------------------------------------------------------


def drive(sim: Simulation, rng: random.Random, steps: int) -> None:
    """New conversations on shared system prompts, next turns, twins, edits, aborts, evictions."""
    systems = [tokens(1000, 130), tokens(1001, 40), []]
    histories: list[tuple[list[int], str]] = []
    serial = 0
    for _ in range(steps):
        waiting = len(sim.prompts) - len(sim.finished)
        if waiting < 12 and rng.random() < 0.35:
            serial += 1
            kind = rng.choice(["new", "next", "next", "edit", "edit", "twin"])
            if kind == "new" or not histories:
                prompt, salt = rng.choice(systems) + tokens(serial, rng.randint(1, 60)), rng.choice("uv")
            else:
                past, salt = rng.choice(histories[-8:])
                if kind == "edit":
                    past = past[: max(1, len(past) - rng.randint(0, 45))]
                prompt = past + tokens(serial, rng.randint(0 if kind == "twin" else 1, 80))
            prompt = prompt[:400] or [1]
            name, count = f"r{serial}", rng.randint(1, 100)
            sim.add(name, prompt, count, salt)
            if kind == "twin":
                sim.add(f"{name}twin", prompt, rng.randint(1, 60), salt)
            histories.append((prompt + sim.expected(name)[: rng.randint(0, count)], salt))
        alive = [name for name in sim.prompts if name not in sim.finished]
        if alive and rng.random() < 0.03:
            sim.abort(rng.choice(alive))
        if rng.random() < 0.01:
            sim.scheduler._evict({"idle_seconds": 0.0})
        sim.step()
    sim.run()


def test_many_who_stop_at_one_prefix_stage_no_more_than_there_is_room_for(make: Make) -> None:
    """All resume just before the boundary behind which a known prefix ends: steps of a few tokens each, whose
    raw tails would have to be staged whole, were they to cross it."""
    few = Geometry(2, 2, 8, 4, 4, 128, 32, 4, 2, (Tier(32, ((0, 0), (1, 1))), Tier(128, ((0, 1), (1, 0)))))
    sim = make(70 * few.pages(300), 2, {"wide_steps": True}, few, max_num_seqs=64, max_num_batched_tokens=900)
    system, before = tokens(7, few.prefix_length(0)), few.boundary(0) - few.page_tokens
    sim.add("known", system + tokens(8, 50), 2)
    sim.run()
    sim.manager.evict()
    for index in range(60):
        sim.add(f"first{index}", system[:before], 1)
    sim.run()
    for index in range(60):
        sim.add(f"second{index}", system + tokens(100 + index, 60), 2)
    sim.run()
    assert {sim.cached[f"second{index}"] for index in range(60)} <= {before, few.prefix_length(0)}
    assert before in sim.cached.values()
    assert sim.manager.counters["prefixes"] > 0
    sim.close()


@pytest.mark.parametrize("drafts", [1, 20, 200])
def test_a_step_with_drafts_is_never_wide(make: Make, drafts: int) -> None:
    """What they say may be taken back, and a chunk that they sealed could not."""
    sim = make(200, ours={"wide_steps": True})
    sim.add("drafts", tokens(1, 150), 20)
    request = sim.scheduler.requests["drafts"]
    assert sim.manager.step_end(request, 0, 150) == 150
    for start in (0, 90, 95, 96, 149):
        end = sim.manager.step_end(request, start, 150 + drafts)
        assert end == min(150 + drafts, G.next_boundary(start))
    sim.run()
    sim.close()


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 2**32),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1.0, 0.5]),
    st.integers(1, 4),
)
def test_no_order_of_events_breaks_anything(
    make: Make, seed: int, depth: int, reserve: bool, wide: bool, share: float, pools: int
) -> None:
    """Hundreds of steps each; the worker checks every slot that is read, written, sealed or copied, the
    manager checks its books twice a step, and every answer is the model's."""
    budget = random.Random(seed).choice([32, 100, 1000])
    sim = make(
        pools * G.pages(LENGTH),
        depth,
        {"reserve": reserve, "resident_share": share, "wide_steps": wide},
        max_num_batched_tokens=budget,
        max_num_seqs=8,
    )
    drive(sim, random.Random(seed), 250)
    assert sim.worker.reads > 0
    if reserve:
        assert sim.scheduler.preemptions == 0
    sim.close()


@pytest.mark.parametrize("geometry", ODD_GEOMETRIES)
@pytest.mark.parametrize("reserve", [True, False])
@pytest.mark.parametrize("wide", [True, False])
def test_settings_at_their_limits_break_nothing(
    make: Make, geometry: Geometry, wide: bool, reserve: bool
) -> None:
    ours = {"reserve": reserve, "wide_steps": wide}
    sim = make(2 * geometry.pages(LENGTH), 2, ours, geometry, max_num_seqs=6)
    drive(sim, random.Random(7), 120)
    assert sim.manager.counters["takeovers"] + sim.manager.counters["forks"] > 0
    sim.close()
