"""What a token sees depends on its position alone: not on the batch, the cuts, preemption or resumption.

On a real engine at a quarter retention, in float32, with NaN in every slot that nobody wrote yet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.children import run_child
from tests.tiny_models import random_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

Turns = list[dict[str, Any]]


@pytest.fixture(scope="module")
def runs(bundled_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All runs of the child, on one engine."""
    folder = tmp_path_factory.mktemp("invariance")
    model = random_llama(folder / "model", bundled_model_dir)
    finished: dict[str, Any] = run_child("invariance_child.py", model, folder, timeout=500)
    return finished


def kept(turns: Turns) -> dict[str, Any]:
    """Chunk to what its tiers kept, over all turns of a conversation."""
    return {chunk: positions for turn in turns for chunk, positions in turn["kept"].items()}


@pytest.mark.parametrize("run", ["recomputed", "cut", "batch", "preempted"])
def test_tokens_and_kept_positions_are_those_of_the_conversation_alone(
    runs: dict[str, Any], run: str
) -> None:
    """Computed from nothing at each turn, cut into steps of 37 tokens, among four others, and preempted."""
    alone, other = runs["alone"], runs[run]
    assert [turn["answer"] for turn in other] == [turn["answer"] for turn in alone]
    assert kept(other) == kept(alone)
    assert set(kept(alone)) == {str(chunk) for chunk in range(6)}
    assert any(positions != sorted(positions) or len(positions) < 64 for positions in kept(alone)["0"])


@pytest.mark.parametrize("run", ["wide1", "wide3", *(f"wide_by_{budget}" for budget in (95, 96, 97, 100))])
def test_steps_that_cross_seal_boundaries_change_nothing(runs: dict[str, Any], run: str) -> None:
    """Alone, beside two others, and recomputed in steps of so many tokens, which end before, on and behind
    boundaries: the same answers, and the same keys and values in every sealed page, up to the rounding of
    matrix products of another size."""
    assert [turn["answer"] for turn in runs[run]] == [turn["answer"] for turn in runs["alone"]]
    assert runs["apart"][run] < 1e-4
    assert len(kept(runs[run])) < len(kept(runs["alone"])), "chunks were sealed inside the layers"


@pytest.mark.parametrize("run", ["asked_wide1", "asked_wide3"])
def test_so_it_is_where_it_counts_what_heads_are_asked(runs: dict[str, Any], run: str) -> None:
    """Between two steps the scorer chooses, inside the layers the operator, by the same mean queries."""
    assert kept(runs["asked"]) != kept(runs["alone"])
    assert [turn["answer"] for turn in runs[run]] == [turn["answer"] for turn in runs["asked"]]
    assert runs["apart"][run] < 1e-4
    assert len(kept(runs[run])) < len(kept(runs["asked"])), "chunks were sealed inside the layers"


def test_the_runs_were_what_they_claim(runs: dict[str, Any]) -> None:
    assert [turn["cached"] for turn in runs["alone"]] == [0, 176, 288]
    assert [turn["cached"] for turn in runs["recomputed"]] == [0, 0, 0]
    assert runs["preemptions"] > 0
    assert runs["lost"] == 0, "every page came back"


def test_twins_of_one_conversation_answer_as_each_alone(runs: dict[str, Any]) -> None:
    together, alone = runs["forks"]
    for name in ("left", "right"):
        assert together[name]["cached"] == 208, "both resumed, one of them by a fork"
        assert alone[name]["cached"] == 0
        assert together[name]["answer"] == alone[name]["answer"]
        later = {chunk: alone[name]["kept"][chunk] for chunk in together[name]["kept"]}
        assert together[name]["kept"] == later != {}


@pytest.mark.parametrize("steps", ["prefixes", "wide_prefixes"])
def test_sharers_of_a_system_prompt_answer_as_each_alone(runs: dict[str, Any], steps: str) -> None:
    shared, alone = runs[steps]
    assert [shared[f"user{i}"]["cached"] for i in range(4)] == [0, 0, 176, 176]
    for name, one in shared.items():
        assert one["answer"] == alone[name]["answer"]
        assert one["kept"] == {chunk: alone[name]["kept"][chunk] for chunk in one["kept"]}
