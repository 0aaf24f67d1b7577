"""An engine in this process, as the checks of vLLM's features use it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Tokens = list[int]
VOCABULARY = 49152
FEW = [101, 202, 303, 404, 505, 606]
"""Tokens that a request may be held to: then n-grams repeat, and drafts are both accepted and rejected."""


def prompt(name: str, length: int, choices: Tokens | None = None) -> Tokens:
    """Token ids that depend on the name and the place only."""
    rng = random.Random(name)
    return [rng.choice(choices) if choices else rng.randrange(10, VOCABULARY) for _ in range(length)]


def plugin_options(settings: dict[str, Any]) -> dict[str, Any]:
    """What makes an engine of vLLM's ours, on a CPU."""
    from tangram.config import TangramConfig

    config = TangramConfig.from_mapping(settings)
    return {
        "scheduler_cls": "tangram.scheduler.TangramScheduler",
        "block_size": config.page_tokens,
        "worker_cls": "tangram.cpu_worker.TangramCPUWorker",
        "additional_config": json.loads(config.to_json()),
    }


class Engine:
    """One LLM, and what the checks need of it."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        options: dict[str, Any] = {"enforce_eager": True, "seed": 0, "disable_log_stats": False}
        options |= job["engine"]
        self.ours = job["tangram"] is not None
        if self.ours:
            options |= plugin_options(job["tangram"])
        self.adapters = job.get("adapters", [])
        self.llm = LLM(**options)
        self.scheduler: Any = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool

    def outputs(self, prompts: list[Tokens], salt: str = "", adapter: Any = None, **params: Any) -> list[Any]:
        """vLLM's outputs for prompts that are in flight together. Greedy unless told otherwise."""
        from vllm import SamplingParams

        given = [{"prompt_token_ids": list(p), **({"cache_salt": salt} if salt else {})} for p in prompts]
        sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": 24, "ignore_eos": True} | params))
        return self.llm.generate(given, sampling, use_tqdm=False, lora_request=adapter)

    def tokens(self, prompts: list[Tokens], **params: Any) -> list[list[Tokens]]:
        """All samples' token ids of each prompt."""
        return [[list(one.token_ids) for one in output.outputs] for output in self.outputs(prompts, **params)]

    def forget(self) -> None:
        """No conversation stays."""
        if not self.scheduler.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset: pages are still held")

    def free(self) -> int:
        """Free pages once idle conversations are dropped."""
        if self.ours:
            self.scheduler.manager.check_integrity()
            self.scheduler.manager.evict()
        return int(self.pool.get_num_free_blocks())

    def adapter(self, index: int | None) -> Any:
        from vllm.lora.request import LoRARequest

        return None if index is None else LoRARequest(f"a{index}", index + 1, self.adapters[index])

    @contextmanager
    def cut(self, budget: int, **scheduler_options: int) -> Iterator[None]:
        """While open, a step holds at most so many tokens; other options of the scheduler likewise. An engine
        that must not cut prompts keeps its budget: it would wait for ever."""
        config, before = self.scheduler.scheduler_config, self.scheduler.max_num_scheduled_tokens
        old = {name: getattr(config, name) for name in scheduler_options}
        self.scheduler.max_num_scheduled_tokens = budget if config.enable_chunked_prefill else before
        for name, value in scheduler_options.items():
            setattr(config, name, value)
        try:
            yield
        finally:
            self.scheduler.max_num_scheduled_tokens = before
            for name, value in old.items():
                setattr(config, name, value)
