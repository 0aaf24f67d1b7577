"""The replay in transformers gives the real engine's tokens, wherever budgets are
static."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tangram.advice import shape_of
from tangram.calibration.model import load_whole
from tangram.calibration.replay import Replay
from tangram.config import TangramConfig
from tangram.profile import build_geometry
from tests.engine.children import run_jobs
from tests.tangram.calibrated import made_profile, mean_queries_of
from tests.tiny_models import random_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SMALL: dict[str, Any] = {"chunk": 64, "window": 32, "rewind": 32, "query_window": 32, "group_size": 2}
CASES = {
    "keydiff": {"retention": 0.25, "scorer": "keydiff"},
    "expected_attention": {"retention": 0.25, "scorer": "expected_attention"},
    "snapkv": {"retention": 0.5, "scorer": "snapkv"},
    "keyvalue_query": {"retention": 0.25, "scorer": "keyvalue_query"},
}
TURNS, ANSWER = (333, 150, 40), 40
"""New tokens of each turn, and generated ones: seals come in prompts and among what is generated."""


def tokens_of(conversation: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(conversation)
    return [torch.randint(100, 40000, (count,), generator=generator).tolist() for count in TURNS]


@pytest.fixture(scope="module")
def model(bundled_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("llama"), bundled_model_dir)


@pytest.fixture(scope="module")
def profile(loaded: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Heads that need very different shares, and are asked different things."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    made = mean_queries_of(made_profile(identity=loaded[0].identity))
    replace(made, mean=((0.9, 0.1), (0.3, 0.06), (0.05, 0.6)), std=((0.0, 0.0),) * 3).save(path)
    return str(path)


@pytest.fixture(scope="module")
def engine(model: Path, profile: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Answers of the real engine: two conversations side by side, three turns, each resumed."""
    jobs = {}
    for name, case in CASES.items():
        waves = [
            {
                "turns": [
                    {"conversation": str(c), "tokens": tokens_of(c)[turn], "answer": ANSWER} for c in (0, 1)
                ]
            }
            for turn in range(len(TURNS))
        ]
        options = {"model": str(model), "dtype": "float32", "max_model_len": 1024}
        options |= {"skip_tokenizer_init": True}
        jobs[name] = {"tangram": SMALL | case | {"profile": profile}, "engine": options, "waves": waves}
    return run_jobs(jobs, tmp_path_factory.mktemp("engine"), "replayed")


@pytest.fixture(scope="module")
def loaded(model: Path) -> tuple[Any, Any]:
    return load_whole(str(model), "cpu", "float32")


@pytest.mark.parametrize("name", CASES)
def test_the_replay_says_what_the_engine_says(
    engine: dict[str, Any], loaded: tuple[Any, Any], profile: str, name: str
) -> None:
    config = TangramConfig(**SMALL | CASES[name], profile=profile)
    geometry = build_geometry(config, shape_of(loaded[0].identity))
    assert len(set(geometry.keep)) > 1
    for number in (0, 1):
        cache = Replay(*loaded, config, geometry, 1024)
        said, given = [], [wave[number]["answer"] for wave in engine[name]["waves"]]
        behind: list[int] = []  # the last token said is not in the cache yet
        for turn in tokens_of(number):
            said.append(cache.answer([*behind, *turn], [], ANSWER))
            behind = said[-1][-1:]
        assert said == given
        assert geometry.sealed(cache.length) == 9


def test_it_depends_on_what_is_kept(engine: dict[str, Any]) -> None:
    """Or the comparison would show nothing."""
    first = [[output["answer"] for output in engine[name]["waves"][-1]] for name in CASES]
    assert len({str(answers) for answers in first}) == len(CASES)
    assert all(output["cached"] > 0 for output in engine["keydiff"]["waves"][-1])
