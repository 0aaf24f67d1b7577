"""Serves prompts on one vLLM engine with a profile and tells the drift after each wave of them.

python drift_child.py JOB.json RESULT.json
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any


class Heard(logging.Handler):
    """Keeps what the drift's own logger says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main(job: dict[str, Any]) -> dict[str, Any]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "tangram", "TANGRAM": "1"}
    os.environ["TANGRAM_CHECK_INTEGRITY"] = "1"
    warnings.simplefilter("ignore")
    from tangram import drift_sampler
    from tangram.config import TangramConfig
    from tangram.control import call, worker_socket

    drift_sampler.LEAST_SECONDS, drift_sampler.MOST_OF_TIME = 0.0, 1e9  # waves take less than a second
    config = TangramConfig.from_mapping(job["tangram"])
    from vllm import LLM, SamplingParams

    llm = LLM(
        **job["engine"],
        enforce_eager=True,
        enable_prefix_caching=True,
        seed=0,
        kv_cache_memory_bytes=256 << 20,
        scheduler_cls="tangram.scheduler.TangramScheduler",
        block_size=config.page_tokens,
        worker_cls="tangram.cpu_worker.TangramCPUWorker",
        additional_config=json.loads(config.to_json()),
    )
    heard = Heard()  # now, as vLLM takes handlers away when it sets its logging up
    logging.getLogger("vllm.tangram.drift").addHandler(heard)
    instance = llm.llm_engine.vllm_config.instance_id
    told = []
    for number, wave in enumerate(job["waves"]):
        prompts = [
            {"prompt_token_ids": tokens, "cache_salt": f"{number}/{place}"}
            for place, tokens in enumerate(wave)
        ]
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        answers = [
            list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)
        ]
        worker = call(worker_socket(instance), "worker")
        told.append({"drift": worker["drift"], "answers": answers, "warnings": list(heard.lines)})
    return {"waves": told}


if __name__ == "__main__":
    finished = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(finished))
