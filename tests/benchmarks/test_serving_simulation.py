"""The simulated serving: real schedulers, simulated time."""

import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.engine.arg_utils
    import vllm.v1.core.sched.async_scheduler  # noqa: F401

from benchmarks import engines, serving_simulation
from benchmarks.clients import Workload


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine's options set there."""
    for name in ("VLLM_PLUGINS", "TANGRAM", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize("engine", ["stock", "tangram 0.25"])
def test_what_fits_is_found_again_and_what_does_not_is_read_again(tmp_path: Path, engine: str) -> None:
    """Five clients with 4,736 tokens in the mean: in 8 GiB all fit, in half a GiB or two none with either."""
    engines.write_model(tmp_path, tiny=False)
    workload = Workload(turns=3)
    small = 2.0 if engine == "stock" else 0.5
    ample, scarce = (
        serving_simulation.simulate(
            engine, tmp_path, workload, 5, kv_gib, warmup=5.0, seconds=10.0, max_model_len=8192
        )
        for kv_gib in (8.0, small)
    )
    inherent = sum(workload.message for _ in range(2)) + workload.mean_first()
    most = 1 - inherent / sum(workload.prompt_length(turn) for turn in range(3))
    assert ample["hit_rate"] == pytest.approx(most, abs=0.08)
    assert scarce["hit_rate"] < ample["hit_rate"] - 0.2
    assert scarce["ttft"]["p50"] > ample["ttft"]["p50"]
    assert ample["turns_per_second"] > scarce["turns_per_second"]
    # Thinking takes a second and 128 tokens some 4 ms each: at most 5 clients / 1.5 s.
    assert 2.0 < ample["turns_per_second"] < 3.6
    assert ample["errors"] == scarce["errors"] == 0
