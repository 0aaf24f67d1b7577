"""Figures of decode steps, on traces whose answer is known."""

from typing import Any

import pytest

from benchmarks.steps import prefill_of, profile_of, union


def kernel(name: str, ts: float, dur: float, correlation: int) -> dict[str, Any]:
    args = {"correlation": correlation}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": args}


def trace(steps: int, pieces: int = 1) -> dict[str, Any]:
    """Steps of 100 us. Each has ``pieces`` graphs of two kernels of 20/pieces us with 2/pieces us between and
    after them, and a sampler of 10 us on its own, which begins 60 us into the step and overlaps a copy."""
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 1e6, "args": {"correlation": 1}},
        {"ph": "i", "cat": "kernel", "name": "mark", "ts": 1.0},
    ]
    for step in range(steps):
        start = 1000.0 + 100.0 * step
        for piece in range(pieces):
            at = start + piece * 44.0 / pieces
            graph = 10_000 + step * pieces + piece
            events.append(kernel("void tangram::decode_kernel<16>", at, 20.0 / pieces, graph))
            events.append(kernel("gemm", at + 22.0 / pieces, 20.0 / pieces, graph))
        events.append(kernel("sample", start + 60.0, 10.0, 20_000 + step))
        events.append({**kernel("copy", start + 65.0, 10.0, 30_000 + step), "cat": "gpu_memcpy"})
    return {"traceEvents": events}


@pytest.mark.parametrize("pieces", [1, 4])
def test_a_known_trace(pieces: int) -> None:
    figures = profile_of(trace(12, pieces), steps=12, skip=2)
    assert figures is not None
    assert figures["graphs_per_step"] == pieces
    assert figures["steps"] == 9
    assert figures["step_us"] == pytest.approx(100.0)
    assert figures["busy_us"] == pytest.approx(55.0)
    assert figures["kernels_us"] == pytest.approx(60.0)
    assert figures["gap"] == pytest.approx(0.45)
    # From the last graph kernel's end to the next step, less the 15 us of sampler and copy.
    last = 44.0 - 2.0 / pieces
    assert figures["gap_between_graphs"] == pytest.approx((100.0 - last - 15.0) / 100.0)
    assert figures["ours"] == pytest.approx(20.0 / 60.0)
    by_name = {entry["name"]: entry for entry in figures["top"]}
    assert by_name["gemm"]["us_per_step"] == pytest.approx(20.0)
    assert by_name["gemm"]["per_step"] == pytest.approx(pieces)


def test_no_graphs() -> None:
    assert profile_of({"traceEvents": [kernel("a", 0.0, 1.0, 1), kernel("b", 2.0, 1.0, 2)]}, 4) is None
    assert profile_of({"traceEvents": []}, 4) is None


def test_union() -> None:
    assert union([]) == 0
    assert union([(5, 7), (0, 2), (1, 3), (5, 6)]) == 5


def test_a_prefill_says_what_share_sealing_has() -> None:
    def kernel(name: str, start: float, took: float) -> dict[str, Any]:
        return {"cat": "kernel", "ph": "X", "name": name, "ts": start, "dur": took}

    events = [
        kernel("gemm", 0, 80),
        kernel("void tangram::seal_kernel<__half, 64>(tangram::Step, tangram::Seal)", 80, 10),
        kernel("gemm", 100, 10),
        {"cat": "cpu_op", "ph": "X", "name": "seal_kernel", "ts": 0, "dur": 500},
    ]
    figures = prefill_of({"traceEvents": events})
    assert figures is not None
    assert (figures["wall_us"], figures["busy_us"], figures["sealing"]) == (110, 100, 0.1)
    assert figures["top"][0] == {"name": "gemm", "us": 90, "count": 2}
    assert prefill_of({"traceEvents": events[-1:]}) is None
