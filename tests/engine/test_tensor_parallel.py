"""Two ranks of one engine, each with its own KV heads: real workers on the CPU, which vLLM joins."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from tangram.config import TangramConfig
from tangram.geometry import Geometry
from tangram.host import cpu_threads
from tangram.identity import config_fingerprint, weights_fingerprint
from tangram.profile import ModelShape, build_geometry
from tests.engine.children import run_jobs
from tests.engine.small_models import gemma3
from tests.tangram.calibrated import IDENTITY, key_needs_of, made_profile
from tests.tiny_models import random_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SMALL = {"chunk": 64, "window": 32, "rewind": 32, "group_size": 2}
NEEDS = ((0.9, 0.2), (0.5, 0.85), (0.15, 0.45))
"""Of the heads of three layers, by rank. In groups of two, one head of each rank, they are cut as without
ranks: so both engines keep the same, head by head."""
PAIRS = [{(0, 0), (1, 1)}, {(1, 0), (2, 1)}, {(2, 0), (0, 1)}]
Result = dict[str, Any]


def geometry(profile: Path, ranks: int) -> Geometry:
    config = TangramConfig.from_mapping(SMALL | {"retention": 0.5, "profile": str(profile)})
    return build_geometry(config, ModelShape("m", 3, 2, 32, 4, "float32", 1024, ranks=ranks))


def waves() -> list[dict[str, Any]]:
    """Three turns alone, then three conversations at once; at last the third answer again, from nothing."""
    draw = random.Random(1)

    def say(name: str, new: int, answer: int = 12, **more: Any) -> dict[str, Any]:
        return {"conversation": name, "tokens": [draw.randrange(3, 400) for _ in range(new)]} | (
            {"answer": answer} | more
        )

    found = [{"turns": [say("alone", new)]} for new in (300, 180, 120)]
    found.append({"turns": [say(f"beside{i}", 150 + 40 * i) for i in range(3)]})
    told = 300 + 180 + 120 + 12 * 2
    return [*found, {"forget": True, "turns": [say("alone", 0, keep=told)]}]


@pytest.fixture(scope="module")
def model(bundled_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("ranks") / "model", bundled_model_dir)


@pytest.fixture(scope="module")
def profile(model: Path) -> Path:
    """Calibrated, as far as the engine can tell, on this very model."""
    identity = replace(
        IDENTITY,
        layers=3,
        kv_heads=2,
        head_size=32,
        config_hash=config_fingerprint(AutoConfig.from_pretrained(model)),
        weights_hash=weights_fingerprint(str(model)),
    )
    path = model.parent / "profile.json"
    made = key_needs_of(made_profile(identity=identity))
    replace(made, mean=NEEDS, std=((0.0, 0.0),) * 3).save(path)
    return path


@pytest.fixture(scope="module")
def results(model: Path, profile: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    def job(ranks: int, tangram: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
        engine = {"model": str(model), "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 8}
        engine |= {"skip_tokenizer_init": True}
        engine |= {"tensor_parallel_size": ranks, "kv_cache_memory_bytes": 64 << 20} | more
        return {"engine": engine, "tangram": tangram, "waves": waves()}

    windows = gemma3(model.parent / "windows")
    half = SMALL | {"retention": 0.5, "profile": str(profile), "drift_every": 1}
    watched = {"worker_cls": "tests.engine.watched_worker.WatchedWorker"}
    ours = {
        "full": job(2, SMALL | {"retention": 1.0, "wide_steps": "on"}, model=windows),
        "ranks": job(2, half, **watched) | {"watched": True},
        "alone": job(1, half, **watched) | {"watched": True},
    }
    folder = tmp_path_factory.mktemp("engines")
    with pytest.MonkeyPatch.context() as patch:
        threads = cpu_threads(2, sorted(os.sched_getaffinity(0)), nodes=1)
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", threads or "nobind")
        return run_jobs({"stock": job(2, None, model=windows)}, folder, "stock") | run_jobs(
            ours, folder, "ours"
        )


def answers(result: Result) -> list[list[list[int]]]:
    return [[output["answer"] for output in wave] for wave in result["waves"]]


def test_full_retention_gives_the_tokens_of_stock_vllm_s_two_ranks(results: dict[str, Result]) -> None:
    """In steps that cross seal boundaries, beside sliding-window layers, whose heads are shared out too."""
    stock, ours = results["stock"], results["full"]
    assert answers(ours) == answers(stock)
    assert [wave[0]["cached"] for wave in ours["waves"]] == [0, 304, 496, 0, 0]
    assert ours["counters"]["takeovers"] == 2
    assert ours["free_at_end"] == ours["free_at_start"]


def test_a_conversation_resumed_answers_as_one_computed_again(results: dict[str, Result]) -> None:
    ours = results["ranks"]
    assert [wave[0]["cached"] for wave in ours["waves"]] == [0, 304, 496, 0, 0]
    assert answers(ours)[4] == answers(ours)[2]
    assert ours["free_at_end"] == ours["free_at_start"]


def test_every_head_of_the_model_keeps_what_it_keeps_without_ranks(
    results: dict[str, Result], profile: Path
) -> None:
    g = geometry(profile, 2)
    assert [set(tier.heads) for tier in g.tiers] == PAIRS
    assert [set(tier.heads) for tier in geometry(profile, 1).tiers] == PAIRS
    assert g.keep == geometry(profile, 1).keep
    assert len(set(g.keep)) == 3
    (whole,) = results["alone"]["kept"]
    ranks = results["ranks"]["kept"]
    assert len(whole) > 20
    assert [first | second for first, second in zip(*ranks, strict=True)] == whole
    dropping = {f"{la}/{h}" for tier in g.tiers for la, h in tier.heads if tier.keep < g.chunk}
    assert set(whole[0]) == dropping
    assert {name.split("/")[1] for name in ranks[1][0]} == {"1"}, "numbered as in the model"
    assert answers(results["ranks"]) == answers(results["alone"])
    assert results["ranks"]["counters"] == results["alone"]["counters"]


def test_what_workers_say_is_of_all_heads_and_counted_once(results: dict[str, Result]) -> None:
    ranks, alone = results["ranks"], results["alone"]
    assert ranks["workers"]["seals"] == alone["workers"]["seals"] == len(alone["kept"][0])
    assert ranks["workers"]["kernels"] == alone["workers"]["kernels"]
    here, there = ranks["workers"]["drift"], alone["workers"]["drift"]
    assert here["reference"] == "profile"
    assert here["chunks"] == there["chunks"] > 8
    assert here["drift"] == pytest.approx(there["drift"], rel=0.01)
    np.testing.assert_allclose(here["live"], there["live"], atol=0.01)
