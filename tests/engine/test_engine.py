"""What the plugin promises, shown on the real engine and the bundled model.

In float32, where two correct attentions agree on every greedy token; in bfloat16 the last bit of a sum
decides near ties (docs/architecture.md). The plugin checks at every step that each page has one owner
and each request exactly the pages that the formula says: the child sets TANGRAM_CHECK_INTEGRITY.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from tangram.config import TangramConfig
from tangram.geometry import Geometry
from tangram.profile import ModelShape, build_geometry

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

Job = Callable[..., dict[str, Any]]
SMOLLM2 = ModelShape("smollm2", 30, 3, 64, 4, "float32", 4096)


def geometry(**settings: Any) -> Geometry:
    return build_geometry(TangramConfig.from_mapping(settings), SMOLLM2)


def turn(conversation: str, tokens: list[int], answer: int, **more: Any) -> dict[str, Any]:
    return {"conversation": conversation, "tokens": tokens, "answer": answer, **more}


def answers(result: dict[str, Any]) -> list[list[list[int]]]:
    return [[output["answer"] for output in wave] for wave in result["waves"]]


@pytest.fixture(scope="module")
def conversations(prose: list[int]) -> list[dict[str, Any]]:
    """Four turns of one long conversation alone, then four turns of eight conversations at once."""
    text = iter(prose * 8)

    def take(count: int) -> list[int]:
        return [next(text) for _ in range(count)]

    alone = [{"turns": [turn("alone", take(size), 24)]} for size in (900, 500, 400, 300)]
    batch = [
        {"turns": [turn(f"batch{i}", take(size + 37 * i), 12) for i in range(8)]}
        for size in (330, 200, 120, 60)
    ]
    return alone + batch


@pytest.fixture(scope="module")
def stock(run_job: Job, conversations: list[dict[str, Any]]) -> dict[str, Any]:
    return run_job(conversations, None, max_num_batched_tokens=2048)


@pytest.mark.parametrize("budget", [2048, 173])
def test_full_retention_gives_stock_vllm_s_tokens(
    run_job: Job, conversations: list[dict[str, Any]], stock: dict[str, Any], budget: int
) -> None:
    """However the prompts are cut into steps, alone and in a batch of eight, turn after turn."""
    ours = run_job(conversations, {"retention": 1.0}, max_num_batched_tokens=budget)
    assert ours["waves"][3][0]["prompt"] > 2000
    assert answers(ours) == answers(stock)
    assert ours["counters"]["takeovers"] == 3 + 3 * 8, "every later turn continued its row"
    assert ours["counters"]["seals"] > 3 + 8
    assert ours["free_at_end"] == ours["free_at_start"]


def test_at_a_quarter_a_later_turn_reads_only_what_is_new(run_job: Job, prose: list[int]) -> None:
    g = geometry(retention=0.25)
    sizes, answer = (900, 500, 400, 300), 24
    text = iter(prose * 2)
    waves: list[dict[str, Any]] = [
        {"turns": [turn("a", [next(text) for _ in range(size)], answer)]} for size in sizes
    ]
    prompt = sum(sizes) + answer * 3
    # Last, forget everything and compute the fourth answer again from nothing.
    waves.append({"forget": True, "turns": [turn("a", [], answer, keep=prompt)]})
    result = run_job(waves, {"retention": 0.25}, max_num_batched_tokens=512)
    outputs = [wave[0] for wave in result["waves"]]
    for before, after in itertools.pairwise(outputs[:4]):
        computed = before["prompt"] + answer - 1  # the last sampled token was never fed
        assert after["cached"] == computed // g.page_tokens * g.page_tokens
        assert after["prompt"] - after["cached"] < g.page_tokens + max(sizes) + 1
    assert outputs[4]["cached"] == 0
    assert outputs[4]["answer"] == outputs[3]["answer"], "resumed and recomputed are one"
    (sequence,) = result["snapshot"]["sequences"]
    assert sequence["tokens"] == prompt + answer - 1
    assert sequence["pages"] == g.pages(prompt + answer - 1)
    assert g.bytes(sequence["tokens"]) < 0.65 * g.full_bytes(sequence["tokens"])
    assert result["free_at_end"] == result["free_at_start"]


def test_regenerating_within_rewind_resumes(run_job: Job, prose: list[int]) -> None:
    """The second answer to one question starts from the row of the first, across a seal boundary."""
    g = geometry(retention=0.25)
    question = g.boundary(0) - 20  # the first answer crosses the boundary
    waves: list[dict[str, Any]] = [
        {"turns": [turn("a", prose[:question], 40)]},
        {"turns": [turn("a", [], 40, keep=question)]},
    ]
    result = run_job(waves, {"retention": 0.25})
    first, second = (wave[0] for wave in result["waves"])
    assert second["cached"] == (question - 1) // g.page_tokens * g.page_tokens
    assert second["answer"] == first["answer"]


def test_seeded_sampling_survives_cut_prompts_and_does_not_depend_on_the_cuts(
    run_job: Job, prose: list[int]
) -> None:
    """A seeded prompt longer than a seal boundary, and two samples of one prompt."""
    waves: list[dict[str, Any]] = [
        {"turns": [turn("a", prose[:700], 8, seed=1), turn("b", prose[300:1000], 8, seed=7, n=2)]},
        {"turns": [turn("a", prose[1000:1400], 8, seed=2)]},
    ]
    results = [run_job(waves, {"retention": 1.0}, max_num_batched_tokens=budget) for budget in (2048, 150)]
    samples = [[[output["all"] for output in wave] for wave in result["waves"]] for result in results]
    assert samples[0] == samples[1]
    assert len(samples[0][0][1]) == 2
    assert samples[0][0][1][0] != samples[0][0][1][1], "two samples of one prompt differ"


def test_two_hundred_conversations_in_a_quarter_of_their_memory(run_job: Job, prose: list[int]) -> None:
    """No page lost, nothing hangs, no wrong token."""
    settings = {"retention": 1.0, "chunk": 32, "window": 16, "rewind": 16}
    g, rng = geometry(**settings), random.Random(2606)
    lengths = dict.fromkeys((f"c{i}" for i in range(200)), 0)
    todo = [name for name in lengths for _ in range(rng.randint(1, 2))]
    rng.shuffle(todo)
    waves: list[dict[str, Any]] = []
    while todo:
        batch, rest = [], []
        size = rng.randint(5, 60)
        for name in todo:
            (batch if len(batch) < size and name not in batch else rest).append(name)
        todo = rest
        turns = []
        for name in batch:
            start, new, answer = rng.randrange(len(prose) - 150), rng.randint(10, 50), rng.randint(1, 4)
            turns.append(turn(name, prose[start : start + new], answer))
            lengths[name] += new + answer
        waves.append({"turns": turns})
    needed = sum(g.pages(length) for length in lengths.values())
    pool = needed // 4
    stock = run_job(waves, None, max_model_len=1024)
    ours = run_job(
        waves, settings, max_model_len=1024, num_gpu_blocks_override=pool, max_num_batched_tokens=512
    )
    assert ours["free_at_start"] <= needed // 4
    assert ours["free_at_end"] == ours["free_at_start"]
    assert answers(ours) == answers(stock)
    assert ours["counters"]["takeovers"] > 0
    assert ours["counters"]["evictions"] > 0
