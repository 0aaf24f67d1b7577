"""Real engines on the bundled model, one at a time, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Job = Callable[..., dict[str, Any]]
CHILD = Path(__file__).with_name("child.py")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def run_job(bundled_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Run waves of turns on stock vLLM (``tangram=None``) or on the plugin; returns what the child wrote."""
    folder = tmp_path_factory.mktemp("engine")
    serial = 0

    def run(waves: list[dict[str, Any]], tangram: dict[str, Any] | None, **engine: Any) -> dict[str, Any]:
        nonlocal serial
        serial += 1
        job, result, log = (folder / f"{serial}.{kind}" for kind in ("job", "result", "log"))
        engine = {"model": str(bundled_model_dir), "max_model_len": 4096, "dtype": "float32"} | engine
        job.write_text(json.dumps({"engine": engine, "tangram": tangram, "waves": waves}))
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
        with log.open("w") as output:
            done = subprocess.run(
                [sys.executable, str(CHILD), str(job), str(result)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=900,
            )
        if done.returncode:
            pytest.fail(f"the engine's process ended with {done.returncode}:\n{log.read_text()[-6000:]}")
        finished: dict[str, Any] = json.loads(result.read_text())
        return finished

    return run


@pytest.fixture(scope="session")
def prose(bundled_model_dir: Path) -> list[int]:
    """Token ids of several thousand tokens of real text: this project's licence."""
    from transformers import AutoTokenizer

    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    ids: list[int] = AutoTokenizer.from_pretrained(str(bundled_model_dir))(text)["input_ids"]
    return ids
