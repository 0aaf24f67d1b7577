"""Runs conversations on one vLLM engine, and between steps copies both the cache manager's own books and the
report that the console reads.

python console_child.py JOB.json RESULT.json
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> dict[str, Any]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "tangram", "TANGRAM": "1"}
    os.environ["TANGRAM_CHECK_INTEGRITY"] = "1"
    warnings.simplefilter("ignore")
    from tangram.config import TangramConfig
    from tangram.control import call, socket_path
    from tangram.runtime import Runtime
    from tangram.telemetry import CacheSnapshot, memory_report

    config = TangramConfig.from_mapping(job["tangram"])
    from vllm import LLM, SamplingParams

    llm = LLM(
        **job["engine"],
        enforce_eager=True,
        enable_prefix_caching=True,
        seed=0,
        kv_cache_memory_bytes=job["cache_bytes"],
        scheduler_cls="tangram.scheduler.TangramScheduler",
        block_size=config.page_tokens,
        worker_cls="tangram.cpu_worker.TangramCPUWorker",
        additional_config=json.loads(config.to_json()),
    )
    engine = llm.llm_engine
    manager = engine.engine_core.engine_core.scheduler.manager
    own = Runtime.from_vllm(engine.vllm_config)
    socket = socket_path(engine.vllm_config.instance_id)

    def look() -> dict[str, Any]:
        running, idle = manager.held_rows()
        snapshot = CacheSnapshot.from_dict(call(socket, "memory"))
        args = (own.geometry, own.shape, own.config, own.budgets(), time.time())
        names = [*running, *[row.name for row in idle if not row.shared]]
        return {
            "running": running,
            "computed": {name: live.slots for name, live in manager.live.items()},
            "idle": [[row.name, row.pages, row.tokens, row.shared, row.pinned] for row in idle],
            "free": manager.block_pool.get_num_free_blocks(),
            "total": manager.block_pool.num_gpu_blocks - 1,
            "report": memory_report(snapshot, *args),
            "single": memory_report(snapshot, *args, names[0]) if names else None,
        }

    looks, pinned = [look()], None
    for number, wave in enumerate(job["waves"]):
        for place, (tokens, answer) in enumerate(wave):
            prompt = {"prompt_token_ids": tokens, "cache_salt": f"user {place}"}
            params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
            engine.add_request(f"{number}-{place}", prompt, params)
        steps = 0
        while engine.has_unfinished_requests():
            engine.step()
            steps += 1
            if steps % 7 == 0:
                looks.append(look())
        looks.append(look())
        if pinned is None:
            name = manager.resident.rows()[0].name
            pinned = [name, call(socket, "pin", sequence=name, pinned=True)]
    return {"geometry": own.geometry.to_dict(), "budgets": own.budgets(), "looks": looks, "pinned": pinned}


if __name__ == "__main__":
    finished = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(finished))
