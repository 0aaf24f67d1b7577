"""How much work a picture is, counted in Python calls, so that a slow machine changes nothing."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from admin import figures
from admin.render import Renderer
from admin.sampler import Sampler
from admin.snapshot import MemorySnapshot
from tests.admin.support import Engine, Supervisor, report


def calls(work: Callable[[], Any]) -> int:
    """Python and C calls that ``work`` makes."""
    count = 0

    def hook(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(hook)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


async def drawn_from(
    engine: Engine, supervisor: Supervisor, data: dict[str, Any]
) -> tuple[Sampler, Renderer]:
    engine.data = data
    sampler = Sampler(supervisor.reader)
    assert await sampler.sample()
    return sampler, Renderer(sampler)


def all_of(renderer: Renderer) -> list[str]:
    return [
        renderer.memory_map(figures.TOKENS),
        renderer.pool_bar(),
        renderer.pool_over_time(),
        renderer.sequences(),
        renderer.cards(),
        renderer.saving(),
        renderer.pool_table(),
        renderer.counters(),
        renderer.config(),
    ]


async def test_500_sequences_and_80_layers_of_8_heads(engine: Engine, supervisor: Supervisor) -> None:
    work, size = {}, {}
    for sequences in (30, 500):
        _, renderer = await drawn_from(engine, supervisor, report(80, 8, sequences=sequences))
        texts = all_of(renderer)  # what is imported and cached at the first use is not counted
        _, renderer = await drawn_from(engine, supervisor, report(80, 8, sequences=sequences))
        work[sequences] = calls(functools.partial(all_of, renderer))
        size[sequences] = sum(map(len, texts))
    assert work[500] < 400_000, "about 30 ms"
    assert work[500] - work[30] < 5_000, "ten times the sequences are a longer sum, not more drawing"
    assert size[500] < 60_000, "characters sent to a viewer every two seconds"
    assert size[500] - size[30] < 3_000


async def test_parsing_grows_with_the_report_and_no_faster() -> None:
    small, large = report(80, 8, sequences=250), report(80, 8, sequences=500)
    first = calls(lambda: MemorySnapshot.parse(small))
    assert calls(lambda: MemorySnapshot.parse(large)) < 2 * first


async def test_a_hundred_viewers_cost_one_drawing(engine: Engine, supervisor: Supervisor) -> None:
    sampler, renderer = await drawn_from(engine, supervisor, report(80, 8, sequences=500))
    first = all_of(renderer)

    def the_others() -> None:
        for _ in range(99):
            assert renderer.memory_map(figures.TOKENS) is first[0]
            assert renderer.pool_bar() is first[1]
            assert renderer.sequences() is first[3]

    assert calls(the_others) < 99 * 100
    assert engine.memory_calls == 1
    await sampler.sample()
    assert renderer.memory_map(figures.TOKENS) is not first[0], "a new sample is drawn anew"


async def test_before_the_first_sample_there_is_nothing_to_draw(supervisor: Supervisor) -> None:
    renderer = Renderer(Sampler(supervisor.reader))
    assert renderer.memory_map(figures.TOKENS) == renderer.pool_bar() == renderer.sequences() == ""
    assert renderer.cards().count("–") == 4


async def test_the_banner_says_that_numbers_are_old(engine: Engine, supervisor: Supervisor) -> None:
    sampler, renderer = await drawn_from(engine, supervisor, report(4, 2))
    assert renderer.away() == ""
    engine.up = False
    await sampler.sample()
    assert "does not answer" in renderer.away()
    assert "last ones seen" in renderer.away()
