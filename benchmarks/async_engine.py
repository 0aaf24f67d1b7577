"""vLLM's asynchronous engine, whose core is a process of its own, as vLLM's API server uses it.

The clients of a benchmark live in this process, so they do not take time from the engine's steps.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

from clients import Part
from engines import engine_options, parts_of


class Engine:
    """One engine on random weights. Tokens in, tokens out; answers are greedy and have a given length."""

    def __init__(self, job: dict[str, Any]) -> None:
        """``job``: engine (a name), model (a folder), profile (a file or None), kv_gib, max_model_len,
        max_num_seqs, eager, and perhaps largest_graph (tokens); all else is as vLLM's API server has it by
        default."""
        retention, settings = parts_of(job["engine"])
        options = engine_options(retention, job["profile"], own_core=True, **settings)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=job["model"],
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=job["max_model_len"],
            max_num_seqs=job["max_num_seqs"],
            kv_cache_memory_bytes=int(job["kv_gib"] * 2**30),
            enforce_eager=job["eager"],
            max_cudagraph_capture_size=job.get("largest_graph"),
            enable_prefix_caching=True,
            disable_log_stats=False,
            **options,
        )
        self._engine = AsyncLLM.from_engine_args(arguments, usage_context=UsageContext.OPENAI_API_SERVER)
        self._serial = itertools.count()

    @property
    def settings(self) -> dict[str, Any]:
        """What vLLM made of the options."""
        config = self._engine.vllm_config
        return {
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "kv_cache_memory_bytes": config.cache_config.kv_cache_memory_bytes,
        }

    async def ask(self, prompt: list[int], count: int, user: str = "") -> AsyncIterator[Part]:
        """Stream ``count`` tokens that follow a prompt. A caller who leaves aborts the request. Users do not
        share what is cached, as in the product."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        asked: Any = {"prompt_token_ids": prompt}
        if user:
            asked["cache_salt"] = user
        stream = self._engine.generate(asked, params, str(next(self._serial)))
        try:
            async for output in stream:
                if tokens := list(output.outputs[0].token_ids):
                    preempted = output.metrics.num_preemptions if output.metrics else 0
                    yield Part(tokens, output.num_cached_tokens or 0, preempted)
        finally:
            await stream.aclose()

    async def forget(self) -> None:
        """Drop all that is cached. Raises RuntimeError when something still runs after half a minute."""
        for _ in range(300):
            if await self._engine.reset_prefix_cache():
                return
            await asyncio.sleep(0.1)
        raise RuntimeError("the prefix cache could not be reset")

    @property
    def alive(self) -> bool:
        """Whether the core still runs."""
        return not self._engine.errored

    def close(self) -> None:
        """End the core's process."""
        self._engine.shutdown()
