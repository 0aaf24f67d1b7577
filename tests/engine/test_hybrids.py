"""Models with sliding-window layers beside full ones, on the real engine, next to stock vLLM.

Small random models in float32, so that two correct attentions agree on every greedy token. Prompts are longer
than the windows and cross seal boundaries. The child checks at every step that no page is lost.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from tangram.config import TangramConfig
from tangram.profile import ModelShape, build_geometry
from tests.engine import small_models
from tests.engine.children import run_jobs

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

MODELS = ("gemma3", "gemma2", "gpt_oss")
SETTINGS = {"retention": 1.0, "page_tokens": 64, "chunk": 64, "window": 64, "rewind": 64}
FINE = {"page_tokens": 16, "chunk": 64, "window": 32, "rewind": 64}
ENGINE = {"max_model_len": 2048, "dtype": "float32", "skip_tokenizer_init": True, "seed": 0}
GEMMA3 = ModelShape(
    "gemma3",
    2,
    2,
    32,
    4,
    "float32",
    2048,
    full_layers=(2, 5),
    window_layers=4,
    window_span=small_models.WINDOW,
    window_state_bytes=2 * 2 * 32 * 4,
    window_blocks=(32, 16),
)
Results = dict[str, dict[str, Any]]


def turn(conversation: str, count: int, answer: int, **more: Any) -> dict[str, Any]:
    rng = random.Random(f"{conversation} {count}")
    tokens = [rng.randrange(3, 512) for _ in range(count)]
    return {"conversation": conversation, "tokens": tokens, "answer": answer, **more}


def talk() -> list[dict[str, Any]]:
    """Three turns of one conversation alone, then three turns of six at once."""
    alone = [{"turns": [turn("a", size, 24)]} for size in (300, 150, 90)]
    batch = [{"turns": [turn(f"b{i}", size + 13 * i, 12) for i in range(6)]} for size in (130, 70, 40)]
    return alone + batch


def resume_and_forget() -> list[dict[str, Any]]:
    """Three turns, the third answer again from its question, and again with nothing remembered."""
    sizes, answer = (300, 150, 90), 24
    waves = [{"turns": [turn("a", size, answer)]} for size in sizes]
    prompt = sum(sizes) + answer * 2
    waves.append({"turns": [turn("a", 0, answer, keep=prompt)]})
    waves.append({"forget": True, "turns": [turn("a", 0, answer, keep=prompt)]})
    return waves


def crowd() -> list[dict[str, Any]]:
    """Forty conversations, each returning once, in no order."""
    rng = random.Random(7)
    names = [f"c{i}" for i in range(40)]
    waves = []
    for _ in range(2):
        rng.shuffle(names)
        for start in range(0, 40, 10):
            some = names[start : start + 10]
            waves.append({"turns": [turn(n, rng.randint(40, 200), rng.randint(1, 6)) for n in some]})
    return waves


WAVES = {"gemma3": talk() + crowd(), "gemma2": talk(), "gpt_oss": talk()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: getattr(small_models, name)(folder / name) for name in MODELS}


@pytest.fixture(scope="module")
def stock(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Results:
    def job(model: str, waves: list[dict[str, Any]]) -> dict[str, Any]:
        engine = ENGINE | {"model": models[model], "block_size": 64, "max_num_batched_tokens": 512}
        return {"engine": engine, "tangram": None, "waves": waves}

    jobs = {name: job(name, WAVES[name]) for name in MODELS}
    return run_jobs(jobs, tmp_path_factory.mktemp("stock"), "stock")


@pytest.fixture(scope="module")
def ours(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Results:
    def job(model: str, waves: list[dict[str, Any]], settings: Any, **engine: Any) -> dict[str, Any]:
        engine = ENGINE | {"model": models[model], "max_num_batched_tokens": 512} | engine
        return {"engine": engine, "tangram": SETTINGS | settings, "waves": waves}

    jobs = {
        "gemma3": job("gemma3", WAVES["gemma3"], FINE, num_gpu_blocks_override=700),
        "gemma2": job("gemma2", WAVES["gemma2"], {}, max_num_batched_tokens=93),
        "gpt_oss": job("gpt_oss", WAVES["gpt_oss"], {}),
        "quarter": job("gemma3", resume_and_forget(), FINE | {"retention": 0.25}),
    }
    refused: dict[str, dict[str, Any]] = {
        "unified": {"disable_hybrid_kv_cache_manager": True},
        "only windows": {"hf_overrides": {"layer_types": ["sliding_attention"] * 6}},
    }
    for name, engine in refused.items():
        jobs[name] = job("gemma3", [], {}, **engine) | {"may_fail": True}
    return run_jobs(jobs, tmp_path_factory.mktemp("ours"), "ours")


def answers(result: dict[str, Any]) -> list[list[list[int]]]:
    return [[output["answer"] for output in wave] for wave in result["waves"]]


@pytest.mark.parametrize("name", MODELS)
def test_full_retention_gives_stock_vllm_s_tokens(stock: Results, ours: Results, name: str) -> None:
    """With pages of 16 and of 64 tokens, whole prompts and cut ones."""
    got = ours[name]
    assert answers(got) == answers(stock[name])
    assert len({token for wave in answers(got)[:6] for answer in wave for token in answer}) > 50
    for wave in (1, 2, 4, 5):
        assert all(output["cached"] > 100 for output in got["waves"][wave]), "every later turn resumed"
    assert got["counters"]["seals"] > 2 * 7
    assert got["free_at_end"] == got["free_at_start"]


def test_at_a_quarter_resumed_and_recomputed_are_one(ours: Results) -> None:
    outputs = [wave[0] for wave in ours["quarter"]["waves"]]
    for before, after in itertools.pairwise(outputs[:3]):
        computed = before["prompt"] + len(before["answer"]) - 1  # the last sampled token was never fed
        assert after["cached"] == computed // 16 * 16
    (sequence,) = ours["quarter"]["snapshot"]["sequences"]
    g = build_geometry(TangramConfig.from_mapping(FINE | {"retention": 0.25}), GEMMA3)
    tokens = sequence["tokens"]
    assert g.idle_pages(tokens) < sequence["pages"] <= g.idle_pages(tokens) + g.window_pages(tokens)
    third, again, anew = outputs[2:]
    assert third["prompt"] == again["prompt"] == anew["prompt"]
    assert again["cached"] == (third["prompt"] - 1) // 16 * 16, "the window layers let it go back, too"
    assert anew["cached"] == 0
    assert third["answer"] == again["answer"] == anew["answer"]


def test_a_crowd_in_too_little_memory(ours: Results) -> None:
    """Rows were evicted with their window blocks, others resumed; that no token was wrong is shown above."""
    crowded = ours["gemma3"]["waves"][6:]
    assert ours["gemma3"]["counters"]["evictions"] > 0
    assert any(output["cached"] for wave in crowded for output in wave)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unified", "leave out --disable-hybrid-kv-cache-manager"),
        ("only windows", "there is no history to compress"),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_sentence(ours: Results, name: str, message: str) -> None:
    assert message in ours[name]["error"]
