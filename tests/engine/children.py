"""Starts the engines' processes: scripts of this folder that read one path and write JSON to another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ANYWHERE = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Part of an engine's environment. By itself vLLM binds every engine's threads to the same cores, so that two
would share one while another idles."""


def run_child(script: str, given: Path, folder: Path, threads: int = 1, timeout: float = 900) -> Any:
    """What ``script`` wrote about what it was ``given``. Its output goes to a log in ``folder``, of which a
    failure shows the end."""
    result, log = folder / f"{given.stem}.result", folder / f"{given.stem}.log"
    path = os.pathsep.join([str(ROOT), str(HERE)])
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, str(HERE / script), str(given), str(result)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=ANYWHERE | os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
            timeout=timeout,
        )
    if done.returncode:
        pytest.fail(f"{script} ended with {done.returncode}:\n{log.read_text()[-6000:]}")
    return json.loads(result.read_text())


def run_jobs(jobs: dict[str, dict[str, Any]], folder: Path, name: str) -> dict[str, dict[str, Any]]:
    """Run jobs of child.py one after another in one process, all with the plugin or all without. One that
    ends in an error gives ``{"error": ...}`` if it has ``may_fail``."""
    given = folder / f"{name}.jobs"
    given.write_text(json.dumps(list(jobs.values())))
    return dict(zip(jobs, run_child("several.py", given, folder, timeout=1500), strict=True))
