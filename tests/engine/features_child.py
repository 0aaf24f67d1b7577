"""Runs named checks on vLLM engines, one engine after another in one process, and writes what each returned.

    python features_child.py JOB.json RESULT.json

The job is a list of engines; each names its options, the plugin's settings (null: stock vLLM) and the checks
to run on it. Stock engines come first: the plugin takes vLLM's only CPU backend for the rest of the process.
The test compares; a check here only does something with an engine and returns what came out.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from tests.engine.feature_checks import CHECKS
from tests.engine.feature_engine import Engine


def main(job: dict[str, Any]) -> dict[str, Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_PLUGINS"] = ""
    os.environ["TANGRAM"] = "1"
    os.environ["TANGRAM_CHECK_INTEGRITY"] = "1"
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    for name, one in job.items():
        if one["tangram"] is not None:
            from tangram.plugin import register

            register()
        engine = Engine(one)
        results[name] = {check: CHECKS[check](engine) for check in one["checks"]}
        engine.llm.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
    return results


if __name__ == "__main__":
    finished = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(finished))
