"""The recorder of queries, driven like a worker: any cuts, any company, pages that change hands."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.errors import CacheIntegrityError
from tangram.geometry import Geometry, Tier
from tangram.observation import NULL_PAGE, PATIENCE, QueryRecorder

CHUNK, WINDOW, WIDTH, ROOM = 16, 8, 4, 40
G = Geometry(2, 1, 2, 4, 2, CHUNK, WINDOW, 4, 2, (Tier(4, ((0, 0), (1, 0))),))


def recorder(room: int = ROOM) -> QueryRecorder:
    names = {"a.0": 0, "a.1": 1}
    return QueryRecorder(G, names, 3, WIDTH, room, torch.float64, torch.device("cpu"))


def queries(of: int, positions: range, layer: int) -> torch.Tensor:
    """[tokens, 3, 2]: every number tells whose it is and where."""
    rows = torch.tensor([[of * 1e6 + layer * 1e5 + p * 10.0 + h for h in range(3)] for p in positions])
    return rows.double().view(len(positions), 3, 1).expand(-1, -1, 2)


@dataclass
class Driver:
    """Takes requests through steps as the backend's builder and forward pass do, and checks every seal."""

    recorder: QueryRecorder
    seals: int = 0
    lengths: dict[int, int] = field(default_factory=dict)  # request -> tokens in the cache

    def step(self, work: dict[int, int], pages: dict[int, int]) -> None:
        """``work``: request to new tokens; ``pages``: request to first page."""
        starts = [self.lengths.get(r, 0) for r in work]
        ends = [start + new for start, new in zip(starts, work.values(), strict=True)]
        for request, start in zip(work, starts, strict=True):
            if G.sealing(start) is not None:
                taken = self.recorder.take(pages[request], start)
                for layer in range(2):
                    expected = queries(request, range(start - WIDTH, start), layer)
                    assert torch.equal(taken[layer], expected)
                self.seals += 1
        capture = self.recorder.plan([pages[r] for r in work], starts, ends)
        for name, layer in (("a.0", 0), ("a.1", 1)) if capture else ():
            spans = zip(work, starts, ends, strict=True)
            batch = torch.cat([queries(r, range(start, end), layer) for r, start, end in spans])
            padded = torch.cat([batch, torch.full((3, 3, 2), torch.nan, dtype=torch.float64)])
            capture.keep(name, padded)
        self.lengths |= dict(zip(work, ends, strict=True))


@settings(max_examples=60)
@given(st.integers(0, 10**9), st.integers(1, 6))
def test_every_seal_gets_its_own_request_s_last_queries(seed: int, running: int) -> None:
    """Requests end at any length and their first page goes to the next one; some step back and some wait."""
    rng = random.Random(seed)
    driver = Driver(recorder())
    pages: dict[int, int] = {}
    born = 0
    for _ in range(150):
        while len(pages) < running:
            born += 1
            free = [page for page in range(1, running + 2) if page not in pages.values()]
            pages[born] = rng.choice(free)
            if rng.random() < 0.3:  # resumed, at a length from which all of a window is computed
                driver.lengths[born] = rng.choice([0, 2, CHUNK, CHUNK + WINDOW - WIDTH, 2 * CHUNK])
        room, work = ROOM, {}
        for request in pages:
            at = driver.lengths.get(request, 0)
            new = min(rng.choice([1, 1, 3, 7, 30]), G.next_boundary(at) - at, room)
            if new > 0:
                work[request], room = new, room - new
        driver.step(work, pages)
        for request in list(pages):
            at = driver.lengths.get(request, 0)
            if rng.random() < 0.03 or at > 5 * CHUNK:
                del pages[request]
            elif rng.random() < 0.03:  # preempted or rewound: to before the window, or to the very start
                back = [0, G.next_boundary(max(0, at - 1)) - WIDTH]
                driver.lengths[request] = min(at, rng.choice(back))
    assert driver.seals > 0
    assert driver.recorder.slots <= 2 * running


def test_a_gap_is_never_sealed_over() -> None:
    boundary = G.boundary(0)
    # Resumed inside the window, with and without what an earlier owner of the page left in it.
    for left in (0, 1, WIDTH - 1, WIDTH):
        driver = Driver(recorder())
        if left:
            driver.step({1: CHUNK}, {1: 5})
            driver.step({1: WINDOW - WIDTH + left}, {1: 5})
        driver.lengths[2] = boundary - WIDTH + 2
        driver.step({2: WIDTH - 2}, {2: 5})
        if left == 2:  # cannot be told apart by its positions, and is a multiple of nothing
            continue
        with pytest.raises(
            CacheIntegrityError, match=f"seal at {boundary} tokens lacks queries of the 4 tok"
        ):
            driver.step({2: 1}, {2: 5})
    driver = Driver(recorder())
    driver.lengths[3] = boundary  # resumed at the boundary itself
    with pytest.raises(CacheIntegrityError, match="lacks queries"):
        driver.step({3: 1}, {3: 5})


def test_rows_of_padding_are_nobody_s() -> None:
    own = recorder()
    assert own.plan([NULL_PAGE, 7], [CHUNK, 0], [CHUNK + WINDOW, 1]) is None
    assert own.slots == 0


def test_room_grows_with_who_is_recorded_at_once_and_is_given_back() -> None:
    own = recorder()
    begin, end = CHUNK + WINDOW - WIDTH, CHUNK + WINDOW - 1
    for page in range(1, 6):
        assert own.plan([page], [begin], [end]) is not None
    assert own.slots == 8
    # Of those five nothing is heard again. Steps without room say nothing about it, calm ones do.
    for _ in range(2 * PATIENCE):
        own.plan([9, 10], [0, 0], [ROOM // 2] * 2)
    for page in range(11, 14):
        own.plan([page], [begin], [end])
    for _ in range(PATIENCE):
        own.plan([9], [0], [1])
    own.plan([14], [begin], [end])
    assert own.slots == 8
    with pytest.raises(CacheIntegrityError):
        own.take(1, CHUNK + WINDOW)


def test_one_who_waits_for_room_is_not_forgotten() -> None:
    driver = Driver(recorder())
    driver.step({1: CHUNK + WINDOW - WIDTH}, {1: 1})
    driver.step({1: 1}, {1: 1})
    for _ in range(3 * PATIENCE):  # long prompts take all the room, and each ends where it is recorded
        driver.recorder.plan([2, 3, 4], [0, 0, CHUNK + WINDOW - WIDTH], [20, 17, CHUNK + WINDOW - 1])
    driver.step({1: WIDTH - 1}, {1: 1})
    driver.step({1: 1}, {1: 1})
    assert driver.seals == 1
