"""The comparison of ways to launch a decode step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cuda_launches
from benchmarks.budgets import SPREAD, layout_of
from benchmarks.cases import spread_case
from benchmarks.checks import Disagreement
from kernels.choice import DECODE_LAUNCHES


def test_the_whole_command_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = tmp_path / "launches.json"
    options = ["--gib", "0.1", "--cases", "2x700", "--rounds", "1", "--json", str(report)]
    monkeypatch.setattr("sys.argv", ["cuda_launches.py", *options])
    cuda_launches.main()
    (row,) = json.loads(report.read_text())["cases"]
    assert list(row["us"]) == ["small", *DECODE_LAUNCHES]
    assert all(time > 0 for time in row["us"].values())
    assert "2x700" in capsys.readouterr().out


def test_a_way_that_loses_the_new_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.randn(3 * 2**24, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    case = spread_case(layout_of(SPREAD[0.25]), [700, 20], memory)
    attended = cuda_launches.ragged_append_attention

    def forgetful(out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *rest: Any, **how: Any) -> None:
        lost = cuda_launches.dispatch.launch() == "early"
        attended(out, query, key * 0 if lost else key, *rest, **how)

    monkeypatch.setattr(cuda_launches, "ragged_append_attention", forgetful)
    with pytest.raises(Disagreement, match=r"^early: it leaves other bits than separate"):
        cuda_launches.ways(case)
