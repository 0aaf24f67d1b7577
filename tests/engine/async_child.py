"""Drives vLLM's asynchronous engine, whose core is a process of its own, and writes what happened.

    python async_child.py JOB.json RESULT.json

Callers leave at every moment: while they wait for a slot, inside their prompt, between two tokens. After each
round the core must hold no running request, and the same question must get the same answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from tests.engine.feature_engine import Tokens, plugin_options, prompt


async def ask(
    engine: Any,
    name: str,
    tokens: Tokens,
    answer: int,
    leave_after: int | None = None,
    began: asyncio.Event | None = None,
) -> Any:
    """Stream one answer. Returns its token ids and the sizes of the parts that they came in; leaves after so
    many parts when told so. ``began`` is set by the first part."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0, max_tokens=answer, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    said: Tokens = []
    parts: list[int] = []
    stream = engine.generate({"prompt_token_ids": tokens}, params, name)
    try:
        if leave_after == 0:
            first = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)  # the request is on its way, and nothing came back
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            return said, parts
        async for output in stream:
            said += output.outputs[0].token_ids
            parts.append(len(output.outputs[0].token_ids))
            if began:
                began.set()
            if len(parts) == leave_after:
                break
    finally:
        await stream.aclose()
    return said, parts


async def settled(engine: Any) -> dict[str, Any]:
    """What the core holds once nothing runs in it any more."""
    from tangram.control import call, socket_path

    path = socket_path(engine.vllm_config.instance_id)
    while True:
        memory = await asyncio.to_thread(call, path, "memory")
        if all(sequence["state"] != "running" for sequence in memory["sequences"]):
            return memory


async def drive(job: dict[str, Any]) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(**job["engine"], **plugin_options(job["tangram"]), enforce_eager=True)
    engine = AsyncLLM.from_engine_args(arguments)
    result: dict[str, Any] = {"wrong": [], "lost": []}
    try:
        question = prompt("question", 150)
        expected, result["parts"] = await ask(engine, "expected", question, 20)
        for moment in (0, 1, 3, 7):
            # Two slots: the third waits, the others are in their prompts or answering.
            leaving = [ask(engine, f"{moment}.{i}", prompt(f"{i}", 190), 40, moment) for i in range(3)]
            await asyncio.gather(*leaving)
            memory = await settled(engine)
            # Once each: rows that go on from one another share sealed pages.
            owned = sum(count for kind, count in memory["pages"].items() if kind != "free")
            if memory["free_pages"] + owned != memory["total_pages"]:
                result["lost"].append([moment, memory])
            again, _ = await ask(engine, f"again{moment}", question, 20)
            if again != expected:
                result["wrong"].append([moment, again])
        result["long"], _ = await ask(engine, "long", question, 300)
        for mode in ("keep", "wait", "abort"):
            for attempt in range(8 if mode == "abort" else 1):
                began = asyncio.Event()
                name = f"pause-{mode}-{attempt}"
                running = asyncio.ensure_future(ask(engine, name, question, 300, began=began))
                await began.wait()
                await engine.pause_generation(mode=mode, clear_cache=mode == "abort")
                await engine.resume_generation()
                result[mode], _ = await running
                if len(result[mode]) < 300:  # on a busy machine the answer may be there before the pause is
                    break
        again, _ = await ask(engine, "last", question, 20)
        result["last"] = again == expected
        await settled(engine)
    finally:
        engine.shutdown()
    return result


def main(job: dict[str, Any]) -> dict[str, Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker shares the core's process: one fewer
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_PLUGINS"] = "tangram"
    os.environ["TANGRAM"] = "1"
    os.environ["TANGRAM_CHECK_INTEGRITY"] = "1"
    warnings.simplefilter("ignore")
    return asyncio.run(drive(job))


if __name__ == "__main__":
    finished = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(finished))
