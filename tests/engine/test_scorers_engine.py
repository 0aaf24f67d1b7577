"""What a scorer keeps on a real engine does not depend on how the tokens came: cut, batched or generated."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tangram.config import SCORERS
from tests.engine.children import run_child

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the child wrote: one engine of random weights, through all scorers."""
    folder = tmp_path_factory.mktemp("scorers")
    result: dict[str, Any] = run_child("scorers_child.py", folder / "model", folder, threads=1, timeout=500)
    return result


@pytest.mark.parametrize("name", SCORERS)
def test_the_cuts_change_neither_what_is_kept_nor_what_is_said(runs: dict[str, Any], name: str) -> None:
    large, small = runs[name]["2048"], runs[name]["150"]
    assert large["contexts"] == small["contexts"]
    assert large["kept"] == small["kept"]
    chunks = [(conversation, chunk) for conversation, chunk, _ in large["kept"]]
    said = large["contexts"].items()
    expected = [(name, chunk) for name, ids in said for chunk in range((len(ids) - 1 - 32) // 64)]
    assert chunks == sorted(expected), "each chunk in one way"


@pytest.mark.parametrize("name", SCORERS)
def test_generated_text_is_sealed_as_a_prompt_is(runs: dict[str, Any], name: str) -> None:
    assert runs[name]["as a prompt"]["kept"] == runs[name]["2048"]["kept"]


def test_the_scorers_differ_and_conversations_were_resumed(runs: dict[str, Any]) -> None:
    assert len({json.dumps(runs[name]["2048"]["kept"]) for name in SCORERS}) == len(SCORERS)
    assert runs["takeovers"] == 2 * 3 * len(SCORERS)
    assert 1 <= runs["slots"] <= 8, "room for the queries of requests that ended is used again"


def test_the_queries_are_those_of_the_model(runs: dict[str, Any]) -> None:
    """The last ones before the first seal, up to which nothing was dropped, against transformers."""
    assert runs["queries"]["shape"] == [2, 32, 4, 16]
    assert runs["queries"]["error"] < 1e-4 * runs["largest query"]
