"""Runs a job of conversations on one vLLM engine in a process of its own, and writes what happened.

    python child.py JOB.json RESULT.json

The job names the engine's options, whether the plugin is on, and waves of turns. A turn adds token ids to its
conversation, generates greedily, and the answer becomes part of the conversation. All turns of a wave are in
flight together. With "forget", idle conversations are dropped before a wave, so that all is computed anew.
With "watched", the workers are :class:`watched_worker.WatchedWorker`, and tell what they kept and did.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> dict[str, Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_PLUGINS"] = "tangram" if job["tangram"] is not None else ""
    engine: dict[str, Any] = {"enforce_eager": True, "enable_prefix_caching": True, "seed": 0} | job["engine"]
    if job["tangram"] is not None:
        os.environ["TANGRAM"] = "1"
        os.environ["TANGRAM_CHECK_INTEGRITY"] = "1"
        from tangram.config import TangramConfig

        config = TangramConfig.from_mapping(job["tangram"])
        engine["scheduler_cls"] = "tangram.scheduler.TangramScheduler"
        engine["block_size"] = config.page_tokens
        engine.setdefault("worker_cls", "tangram.cpu_worker.TangramCPUWorker")
        engine["additional_config"] = json.loads(config.to_json())

    warnings.simplefilter("ignore")
    from vllm import LLM, SamplingParams

    llm = LLM(**engine)
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    result: dict[str, Any] = {"free_at_start": pool.get_num_free_blocks(), "waves": []}
    contexts: dict[str, list[int]] = {}
    for wave in job["waves"]:
        if wave.get("forget"):
            scheduler.reset_prefix_cache()
        for turn in wave["turns"]:
            context = contexts.setdefault(turn["conversation"], [])
            del context[turn.get("keep", len(context)) :]
            context += turn["tokens"]
        prompts = [
            {"prompt_token_ids": list(contexts[t["conversation"]]), "cache_salt": t["conversation"]}
            for t in wave["turns"]
        ]
        params = [
            SamplingParams(
                temperature=0.0 if t.get("seed") is None else 1.0,
                seed=t.get("seed"),
                n=t.get("n", 1),
                max_tokens=t["answer"],
                ignore_eos=True,
            )
            for t in wave["turns"]
        ]
        outputs = []
        for turn, output in zip(wave["turns"], llm.generate(prompts, params, use_tqdm=False), strict=True):
            answer = list(output.outputs[0].token_ids)
            contexts[turn["conversation"]] += answer
            outputs.append(
                {
                    "prompt": len(output.prompt_token_ids or ()),
                    "cached": output.num_cached_tokens,
                    "answer": answer,
                    "all": [list(one.token_ids) for one in output.outputs],
                }
            )
        result["waves"].append(outputs)
    if job["tangram"] is not None:
        manager = scheduler.manager
        result["snapshot"] = manager.snapshot().to_dict()
        result["counters"] = manager.counters | {"preemptions": scheduler.preemptions}
        manager.check_integrity()
        manager.evict()
        if job.get("watched"):
            from tangram import workers

            result["kept"] = llm.collective_rpc("kept")
            result["workers"] = workers.ask(llm.llm_engine.vllm_config.instance_id, manager.geometry.ranks)
    else:
        scheduler.reset_prefix_cache()
    result["free_at_end"] = pool.get_num_free_blocks()
    return result


if __name__ == "__main__":
    finished = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(finished))
