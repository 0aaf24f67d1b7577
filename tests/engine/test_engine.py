"""What the plugin promises, shown on the real engine and the bundled model; the crowd on a tiny one.

In float32, where two correct attentions agree on every greedy token; in bfloat16 the last bit of a sum
decides near ties (docs/architecture.md). The plugin checks at every step that each page has one owner
and each request exactly the pages that the formula says: the child sets TANGRAM_CHECK_INTEGRITY.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from tangram.config import TangramConfig
from tangram.geometry import Geometry
from tangram.profile import ModelShape, build_geometry
from tests.engine.children import ROOT, run_jobs
from tests.tiny_models import random_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

SMOLLM2 = ModelShape("smollm2", 30, 3, 64, 4, "float32", 4096)
TINY = ModelShape("tiny", 3, 2, 32, 4, "float32", 1024)
QUARTER = {"retention": 0.25}
SMALL = {"retention": 1.0, "chunk": 32, "window": 16, "rewind": 16}
SIZES, ANSWER = (900, 500, 400, 300), 24
Waves = list[dict[str, Any]]
Result = dict[str, Any]


def geometry(model: ModelShape = SMOLLM2, **settings: Any) -> Geometry:
    return build_geometry(TangramConfig.from_mapping(settings), model)


def turn(conversation: str, tokens: list[int], answer: int, **more: Any) -> dict[str, Any]:
    return {"conversation": conversation, "tokens": tokens, "answer": answer, **more}


def answers(result: Result) -> list[list[list[int]]]:
    return [[output["answer"] for output in wave] for wave in result["waves"]]


# ---- what is said to the engines ---------------------------------------------------------------------------


def talk(prose: list[int]) -> Waves:
    """Four turns of one long conversation alone, then four turns of eight conversations at once."""
    text = iter(prose * 8)

    def take(count: int) -> list[int]:
        return [next(text) for _ in range(count)]

    alone = [{"turns": [turn("alone", take(size), 24)]} for size in SIZES]
    batch = [
        {"turns": [turn(f"batch{i}", take(size + 9 * i), 12) for i in range(8)]}
        for size in (330, 200, 120, 60)
    ]
    return alone + batch


def return_and_forget(prose: list[int]) -> Waves:
    """Four turns; last, everything is forgotten and the fourth answer computed again from nothing."""
    text = iter(prose * 2)
    waves: Waves = [{"turns": [turn("a", [next(text) for _ in range(size)], ANSWER)]} for size in SIZES]
    waves.append({"forget": True, "turns": [turn("a", [], ANSWER, keep=sum(SIZES) + ANSWER * 3)]})
    return waves


def regenerate(prose: list[int]) -> Waves:
    """The first answer crosses the first seal boundary."""
    question = geometry(**QUARTER).boundary(0) - 20
    return [
        {"turns": [turn("a", prose[:question], 40)]},
        {"turns": [turn("a", [], 40, keep=question)]},
    ]


def seeded(prose: list[int]) -> Waves:
    """A seeded prompt longer than a seal boundary, and two samples of one prompt."""
    return [
        {"turns": [turn("a", prose[:700], 8, seed=1), turn("b", prose[300:1000], 8, seed=7, n=2)]},
        {"turns": [turn("a", prose[1000:1400], 8, seed=2)]},
    ]


def crowd(prose: list[int]) -> tuple[Waves, int]:
    """Two hundred conversations, and a quarter of the pages that they take on the tiny model."""
    g, rng = geometry(TINY, **SMALL), random.Random(2606)
    lengths = dict.fromkeys((f"c{i}" for i in range(200)), 0)
    todo = [name for name in lengths for _ in range(rng.randint(1, 2))]
    rng.shuffle(todo)
    waves: Waves = []
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
    return waves, sum(g.idle_pages(length) for length in lengths.values()) // 4


# ---- the engines: two processes ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prose(bundled_model_dir: Path) -> list[int]:
    """Token ids of several thousand tokens of real text: this project's licence."""
    from transformers import AutoTokenizer

    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    ids: list[int] = AutoTokenizer.from_pretrained(str(bundled_model_dir))(text)["input_ids"]
    return ids


@pytest.fixture(scope="module")
def results(
    prose: list[int], bundled_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    """What each job brought, on stock vLLM ("stock ...") and on the plugin."""

    tiny = str(random_llama(tmp_path_factory.mktemp("tiny"), bundled_model_dir))

    def job(waves: Waves, tangram: dict[str, Any] | None, **engine: Any) -> dict[str, Any]:
        engine = {"model": str(bundled_model_dir), "max_model_len": 4096, "dtype": "float32"} | engine
        return {"engine": engine, "tangram": tangram, "waves": waves, "may_fail": True}

    many, pages = crowd(prose)
    full = {"retention": 1.0}
    stock = {
        "stock": job(talk(prose), None, max_num_batched_tokens=2048),
        "stock crowd": job(many, None, model=tiny, max_model_len=1024),
    }
    small = {"max_model_len": 1024, "num_gpu_blocks_override": pages, "max_num_batched_tokens": 512}
    ours = {
        "full 2048": job(talk(prose), full, max_num_batched_tokens=2048),
        "full 173": job(talk(prose), full, max_num_batched_tokens=173),
        "return": job(return_and_forget(prose), QUARTER, max_num_batched_tokens=512),
        "regenerate": job(regenerate(prose), QUARTER),
        "seeded 2048": job(seeded(prose), full, max_num_batched_tokens=2048),
        "seeded 150": job(seeded(prose), full, max_num_batched_tokens=150),
        "crowd": job(many, SMALL, model=tiny, **small),
    }
    folder = tmp_path_factory.mktemp("engine")
    return run_jobs(stock, folder, "stock") | run_jobs(ours, folder, "ours")


def result_of(results: dict[str, Result], name: str) -> Result:
    if "error" in results[name]:
        pytest.fail(f"{name}: {results[name]['error']}")
    return results[name]


# ---- what must hold ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [2048, 173])
def test_full_retention_gives_stock_vllm_s_tokens(results: dict[str, Result], budget: int) -> None:
    """However the prompts are cut into steps, alone and in a batch of eight, turn after turn."""
    ours, stock = result_of(results, f"full {budget}"), result_of(results, "stock")
    assert ours["waves"][3][0]["prompt"] > 2000
    assert answers(ours) == answers(stock)
    assert ours["counters"]["takeovers"] == 3 + 3 * 8, "every later turn continued its row"
    assert ours["counters"]["seals"] > 3 + 8
    assert ours["free_at_end"] == ours["free_at_start"]


def test_at_a_quarter_a_later_turn_reads_only_what_is_new(results: dict[str, Result]) -> None:
    g, result = geometry(**QUARTER), result_of(results, "return")
    outputs = [wave[0] for wave in result["waves"]]
    for before, after in itertools.pairwise(outputs[:4]):
        computed = before["prompt"] + ANSWER - 1  # the last sampled token was never fed
        assert after["cached"] == computed // g.page_tokens * g.page_tokens
        assert after["prompt"] - after["cached"] < g.page_tokens + max(SIZES) + 1
    assert outputs[4]["cached"] == 0
    assert outputs[4]["answer"] == outputs[3]["answer"], "resumed and recomputed are one"
    (sequence,) = result["snapshot"]["sequences"]
    held = sum(SIZES) + ANSWER * 4 - 1
    assert sequence["tokens"] == held
    assert sequence["pages"] == g.idle_pages(held) < g.pages(held)
    assert g.bytes(held) < 0.65 * g.full_bytes(held)
    assert result["free_at_end"] == result["free_at_start"]


def test_regenerating_within_rewind_resumes(results: dict[str, Result]) -> None:
    """The second answer to one question starts from the row of the first, across a seal boundary."""
    g = geometry(**QUARTER)
    first, second = (wave[0] for wave in result_of(results, "regenerate")["waves"])
    assert second["cached"] == (g.boundary(0) - 20 - 1) // g.page_tokens * g.page_tokens
    assert second["answer"] == first["answer"]


def test_seeded_sampling_survives_cut_prompts_and_does_not_depend_on_the_cuts(
    results: dict[str, Result],
) -> None:
    large, small = (
        [[output["all"] for output in wave] for wave in result_of(results, f"seeded {budget}")["waves"]]
        for budget in (2048, 150)
    )
    assert large == small
    assert len(large[0][1]) == 2
    assert large[0][1][0] != large[0][1][1], "two samples of one prompt differ"


def test_two_hundred_conversations_in_a_quarter_of_their_memory(
    results: dict[str, Result], prose: list[int]
) -> None:
    """No page lost, nothing hangs, no wrong token. Many short turns, which a tiny model is enough for."""
    ours, stock = result_of(results, "crowd"), result_of(results, "stock crowd")
    assert ours["free_at_start"] <= crowd(prose)[1]
    assert ours["free_at_end"] == ours["free_at_start"]
    assert answers(ours) == answers(stock)
    assert ours["counters"]["takeovers"] > 0
    assert ours["counters"]["evictions"] > 0
