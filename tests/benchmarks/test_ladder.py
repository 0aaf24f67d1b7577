"""The arithmetic of the overhead ladder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import cuda_ladder
from benchmarks.budgets import longest_keep, model_geometry, spread_geometry
from benchmarks.ladder import RUNGS, Cost, conversation_bytes, fitting
from tests.benchmarks.imitated_peers import FlashAttentionModule

HEAD_PAGE = 16 * 2 * 128 * 2
HEADS = 36 * 8


def held(tokens: int) -> list[int]:
    """Bytes of a conversation on each rung, at a quarter kept."""
    geometry, longest = spread_geometry(0.25), longest_keep("spread", 0.25)
    return [conversation_bytes(rung, geometry, longest, tokens) for rung in RUNGS]


def test_bytes_of_a_conversation_counted_by_hand() -> None:
    # 32,768 tokens seal 63 chunks of 512; a ring has ceil((512 + 128 + 64) / 16) + 1 = 45 slots; of the 32
    # pages of a chunk, 4, 6, 9, 14, 20, 30, 47 and 70% are kept.
    dynamic, reserved, ragged, split = held(32768)
    assert reserved == (45 + 63 * 22) * HEADS * HEAD_PAGE
    assert dynamic == reserved + 512 // 16 * HEADS * HEAD_PAGE
    assert ragged == split == sum(45 + 63 * count for count in (1, 2, 3, 4, 6, 10, 15, 22)) * 36 * HEAD_PAGE


def test_bytes_before_anything_is_sealed() -> None:
    dynamic, reserved, ragged, _ = held(100)
    assert reserved == ragged == 7 * HEADS * HEAD_PAGE
    assert dynamic == (7 + 32) * HEADS * HEAD_PAGE


def test_one_table_of_a_head_that_needs_everything_saves_nothing() -> None:
    geometry = model_geometry(0.25)
    bytes_of = conversation_bytes(RUNGS[1], geometry, longest_keep("model", 0.25), 32768)
    assert bytes_of >= 0.95 * geometry.full_bytes(32768)
    assert bytes_of > 2.5 * conversation_bytes(RUNGS[2], geometry, 512, 32768)


def test_conversations_that_fit() -> None:
    assert fitting(100, [10, 20, 30, 40, 50], lambda tokens: tokens, 9) == [10, 20, 30, 40]
    assert fitting(100, [10, 20, 30, 40, 50], lambda tokens: tokens, 2) == [10, 20]
    assert fitting(5, [10], lambda tokens: tokens, 9) == []


def test_cost_of_a_step() -> None:
    cost = Cost(batch=64, attention=1000.0, seal=80.0, rest=3000.0, chunk=512)
    assert cost.sealing == 10.0
    assert cost.step == 4010.0
    assert cost.tokens_a_second == pytest.approx(64 / 4010e-6)


def test_the_whole_command_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(cuda_ladder, "load_flash_attention", FlashAttentionModule)
    report = tmp_path / "ladder.json"
    options = ["--gib", "0.23", "--context", "700", "--rounds", "1", "--rest-ms", "4", "--json", str(report)]
    monkeypatch.setattr("sys.argv", ["cuda_ladder.py", *options])
    cuda_ladder.main()
    assert "Simulated: dynamic reclaim" in capsys.readouterr().out
    rungs = json.loads(report.read_text())["rungs"]
    assert [rung["rung"] for rung in rungs] == [rung.name for rung in RUNGS]
    assert all(rung["conversations"] >= 1 and rung["tokens_a_second"] > 0 for rung in rungs)
    assert all(rung["step_us"] > 4000 for rung in rungs)
