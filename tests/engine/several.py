"""Runs several of child.py's jobs one after another in one process, which imports vLLM once.

    python several.py JOBS.json RESULTS.json

All of them with the plugin, or all without. A job that ends in an error gives ``{"error": ...}``.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

from child import main


def run(job: dict[str, Any]) -> dict[str, Any]:
    try:
        return main(job)
    except Exception as error:
        if not job.get("may_fail"):
            raise
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
        gc.collect()


if __name__ == "__main__":
    finished = [run(job) for job in json.loads(Path(sys.argv[1]).read_text())]
    Path(sys.argv[2]).write_text(json.dumps(finished))
