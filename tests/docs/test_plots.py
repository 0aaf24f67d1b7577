"""The documentation's figures: what a benchmark wrote is what they show."""

import json
from pathlib import Path
from typing import Any

import pytest

from docs.plots import BENCHMARKS, ROOT, figures_of


def written(tmp_path: Path, name: str, data: dict[str, Any]) -> Path:
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(data))
    return path


def point(engine: str, clients: int, p50: float) -> dict[str, Any]:
    times = {"p50": p50, "p99": 5 * p50, "count": 9}
    usual = {"engine": engine, "clients": clients, "exceeds": clients / 10, "ttft": times}
    return usual | {"turns_per_second": 2.0 * clients}


def test_serving(tmp_path: Path) -> None:
    points = [point("tangram 0.25", 20, 0.1), point("stock", 20, 0.2), point("stock", 10, 0.1)]
    points.append(point("stock", 30, 9.0) | {"ttft": None})  # nobody had an answer
    asked = {"thinking": 1.0, "kv_gib": 16.0, "goal": 1.0}
    path = written(tmp_path, "busy", {"benchmark": "gpu_serving", "arguments": asked, "points": points})
    figures = figures_of(path)
    assert set(figures) == {"busy-ttft", "busy-turns"}
    lines = {(line.name, line.line.dash): (line.x, line.y) for line in figures["busy-ttft"].data}
    assert lines["stock vLLM", "solid"] == ((10, 20), (0.1, 0.2))
    assert lines["stock vLLM", "dash"] == ((10, 20), (0.5, 1.0))
    assert lines["Tangram, a quarter kept", "solid"] == ((20,), (0.1,))
    turns = {line.name: (line.x, line.y) for line in figures["busy-turns"].data}
    assert turns["stock vLLM"] == ((1.0, 2.0, 3.0), (20.0, 40.0, 60.0))


def test_prompts(tmp_path: Path) -> None:
    rows = [
        {"part": "prefill", "engine": engine, "prompts": 1, "tokens": 8192, "ratio": ratio}
        for engine, ratio in (("stock", 1.0), ("tangram 0.25", 1.5))
    ]
    rows.append({"part": "contexts", "engine": "stock", "questions": 4, "turns_per_second": 3.0})
    asked = {"contexts": [20000, 120000], "clients": 16, "kv_gib": 40.0}
    path = written(tmp_path, "p", {"benchmark": "gpu_prompts", "arguments": asked, "rows": rows})
    figures = figures_of(path)
    assert [(bar.x, bar.y) for bar in figures["p-prefill"].data] == [(("1 x 8,192",), (1.5,))]
    assert [(bar.x, bar.y) for bar in figures["p-contexts"].data] == [(("4",), (3.0,))]


def test_steps_add_up(tmp_path: Path) -> None:
    profile = {"step_us": 100.0, "busy_us": 90.0, "gap": 0.1, "gap_between_graphs": 0.04, "ours": 0.5}
    case = {"engine": "stock", "conversations": 4, "tokens": 100, "profile": profile}
    path = written(tmp_path, "s", {"benchmark": "gpu_steps", "cases": [case, case | {"profile": None}]})
    (made,) = figures_of(path).values()
    parts = [bar.y[0] for bar in made.data]
    assert parts == pytest.approx([45.0, 45.0, 6.0, 4.0])
    assert all(len(bar.y) == 1 for bar in made.data)


def test_kernels_are_known_by_the_files_name(tmp_path: Path) -> None:
    row = {"budgets": "spread", "context": 32768, "batch": 8, "retention": 0.25, "bytes": 3e8}
    row |= {"copy_bytes_a_second": 4e12, "us": {"ours": 100.0}}
    (made,) = figures_of(written(tmp_path, "cuda_decode-h200", {"cases": [row]})).values()
    assert [(line.name, line.y) for line in made.data] == [("Tangram", (3000.0,)), ("a copy", (4000.0,))]
    step = {"retention": 1.0, "requests": 1, "step": 512, "cached": 0, "tflops": 5.0, "flash_tflops": 6.0}
    (made,) = figures_of(written(tmp_path, "cuda_prefill", {"prefill": [step]})).values()
    assert [line.y for line in made.data if line.y] == [(5.0,), (6.0,)]
    assert figures_of(written(tmp_path, "gpu_identity", {"benchmark": "gpu_identity"})) == {}


def test_accuracy(tmp_path: Path) -> None:
    cell = {"model": "m", "low": 0.5, "high": 0.75, "kept": 0.4, "count": 50}
    rows = [
        cell | {"condition": condition, "cell": cell_name, "value": value}
        for condition, cell_name, value in (
            ("full", "single@4096", 0.7),
            ("profile keyvalue 0.25", "single@4096", 0.6),
            ("full", "loss@4096", 2.0),
            ("full", "single@8192", 0.1),
            ("snapkv profile 0.25", "single@4096", 0.2),
        )
    ]
    heads = {"mean": [0.8, 0.2], "std": [0.1, 0.1], "least": [0.7, 0.1], "most": [0.9, 0.3]}
    regular = {"model": "m", "oracle": "kvzip", "retention": 0.25, "samples": 5, "heads": heads}
    regular |= {"kinds": {"a/a": 0.9, "a/b": 0.8, "b/b": 0.7}}
    regular |= {
        "alphas": [{"alpha": 0.0, "covered": 0.5, "cost": 0.2}, {"alpha": 1.0, "covered": 0.9, "cost": 0.3}]
    }
    path = written(tmp_path, "h", {"benchmark": "accuracy", "figures": rows, "regularity": [regular]})
    figures = figures_of(path)
    assert set(figures) == {
        f"h-m-{part}" for part in ("answers", *(f"kvzip-0.25-{p}" for p in ("kinds", "heads", "alpha")))
    }
    full, profile = figures["h-m-answers"].data
    assert (full.name, full.x, full.y) == ("all kept", ("one<br>fact",), (70.0,))
    assert profile.error_y.array == pytest.approx((15.0,))
    assert figures["h-m-kvzip-0.25-kinds"].data[0].z == ([0.9, 0.8], [0.8, 0.7])
    assert figures["h-m-kvzip-0.25-alpha"].data[0].y == (0.5, 0.9)
    assert figures["h-m-kvzip-0.25-heads"].data[-1].y == (0.8, 0.2)


def test_each_drawn_benchmark_is_there() -> None:
    for name in BENCHMARKS:
        assert (ROOT / "benchmarks" / f"{name}.py").exists() or (ROOT / "benchmarks" / name).is_dir()


def test_measured_data_can_be_drawn() -> None:
    for path in (ROOT / "docs" / "figures" / "data").glob("*.json"):
        figures_of(path)
