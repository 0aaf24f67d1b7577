"""The benchmark of steps that read and decode."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import cuda_mixed
from benchmarks.budgets import SPREAD, layout_of


def test_the_whole_command_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = tmp_path / "mixed.json"
    options = ["--gib", "1", "--cases", "1+2", "--history", "700", "--rounds", "1", "--json", str(report)]
    monkeypatch.setattr("sys.argv", ["cuda_mixed.py", *options])
    monkeypatch.setattr(cuda_mixed, "LAYERS", 2)
    cuda_mixed.main()
    rows = {row["engine"]: row for row in json.loads(report.read_text())["cases"]}
    assert rows["ours"]["host_us"] > 0
    assert rows["ours"]["device_us"] > 0
    assert ("stock" in rows) == torch.cuda.is_available()
    assert "1+2" in capsys.readouterr().out


def test_a_step_is_attended_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token gets an output, those that read and those that decode."""
    monkeypatch.setattr(cuda_mixed, "LAYERS", 1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    step = cuda_mixed.Step(1, 2, 700, device)
    assert step.tokens == cuda_mixed.NEW + 2
    assert step.ends == [700 + cuda_mixed.NEW, 708, 715]
    step.out.fill_(torch.nan)
    memory = torch.randn(2**24, device=device).to(torch.bfloat16)
    cuda_mixed.ours(step, layout_of(SPREAD[0.25]), memory)()
    assert not step.out.isnan().any()


def test_a_step_that_crosses_nothing_is_refused() -> None:
    memory = torch.zeros(2**26, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="crosses no seal boundary"):
        cuda_mixed.ours(cuda_mixed.Step(0, 1, 700, "cpu"), layout_of(SPREAD[0.25]), memory)
