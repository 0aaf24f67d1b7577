"""Long prompts: the plugin beside stock vLLM, prompts alone and many clients with long contexts in one
memory.

    python benchmarks/gpu_prompts.py [--engines stock "tangram 0.25"] [--cases 1x8192 16x2048 1x100000]
        [--questions 1 4] [--clients 16] [--kv-gib 40] [--seconds 60] [--json FILE]

Random weights of Qwen3-4B's shape, vLLM's defaults; one start of an engine for both parts.

Prefill: a case is prompts x tokens, all asked at once for one token, with nothing in the cache and fresh
random tokens each time. Reported: the median time until the last of them has its token.

Contexts: clients in a closed loop without thinking, each with contexts of 20,000 to 120,000 tokens (drawn
from a seed, equal weight on each factor) and a number of questions on each: 64 tokens in, 32 out. The first
comes with the context, further ones are turns of their own. Reported: requests/s, TTFT, and hits in the
cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from clients import Workload, observe
from engines import ENGINES, answers_channel, child, device, earlier, kv_bytes, ratio, write_json, write_model
from summary import summarise

PASSED = ("kv_gib", "max_model_len", "max_num_seqs", "eager", "warmup", "seconds", "repeats", "clients")


# ---- the child --------------------------------------------------------------------------------------------


def worker(job: dict[str, Any]) -> None:
    """One engine; a line of JSON for each case and each number of questions."""
    answers = answers_channel()
    from async_engine import Engine

    async def first_token(engine: Any, prompt: list[int]) -> int:
        cached = 0
        async for part in engine.ask(prompt, 1):
            cached = part.cached
        return cached

    async def prefill(engine: Any, serial: int, count: int, length: int) -> dict[str, Any]:
        words = Workload(vocabulary=job["vocabulary"], seed=job["seed"])
        seconds = []
        for repeat in range(job["repeats"]):
            prompts = [words.tokens(index, serial, repeat, length) for index in range(count)]
            await engine.forget()
            begin = time.perf_counter()
            cached = await asyncio.gather(*(first_token(engine, prompt) for prompt in prompts))
            seconds.append(time.perf_counter() - begin)
            if any(cached):
                raise RuntimeError("a fresh prompt was found in the cache")
        return {"part": "prefill", "prompts": count, "tokens": length, "all_seconds": seconds}

    async def results(engine: Any) -> AsyncIterator[dict[str, Any]]:
        await prefill(engine, 10**6, 4, min(2048, job["max_model_len"] // 2))
        for serial, (count, length) in enumerate(job["cases"]):
            yield await prefill(engine, serial, count, length)
        for workload in job["workloads"]:
            await engine.forget()
            seen = await observe(
                Workload(**workload), engine.ask, job["clients"], job["warmup"], job["seconds"]
            )
            yield {"part": "contexts", "questions": workload["turns"], **summarise(*seen)}

    async def drive() -> None:
        engine = Engine(job)
        try:
            async for result in results(engine):
                if not engine.alive:
                    raise RuntimeError("the engine's core ended")
                print(json.dumps(result | {"device": device()}), file=answers, flush=True)
        finally:
            engine.close()

    asyncio.run(drive())


# ---- the parent -------------------------------------------------------------------------------------------


def main() -> None:
    arguments = parse()
    if arguments.worker:
        worker(json.loads(arguments.worker.read_text()))
        return
    cases = [tuple(int(part) for part in case.split("x")) for case in arguments.cases]
    rows = earlier(arguments.json, arguments.join, "rows", arguments.engines)
    with tempfile.TemporaryDirectory() as folder:
        config = write_model(Path(folder), arguments.tiny, positions=arguments.max_model_len)
        talk = {"first": arguments.contexts, "thinking": 0.0, "seed": arguments.seed}
        talk |= {"message": 64, "answer": 32, "vocabulary": config["vocab_size"]}
        workloads = [talk | {"turns": questions} for questions in arguments.questions]
        for workload in workloads:
            shape = Workload(**workload)
            if shape.longest() > arguments.max_model_len:
                raise SystemExit(f"contexts of {shape.longest():.0f} tokens need a larger --max-model-len")
            exceeds = arguments.clients * shape.mean_length() * kv_bytes(config) / arguments.kv_gib / 2**30
            print(f"{shape.turns} questions: {arguments.clients} clients exceed the memory {exceeds:.1f}x")
        for engine in arguments.engines:
            job = {
                "engine": engine,
                "model": folder,
                "profile": None if arguments.uniform else str(Path(folder, "profile.json")),
                "cases": cases,
                "workloads": workloads,
                "vocabulary": config["vocab_size"],
                "seed": arguments.seed,
                **{name: getattr(arguments, name) for name in PASSED},
            }
            for row in child(__file__, job, Path(folder)):
                rows.append({"engine": engine, **row})
                finish(rows[-1], rows)
                write_json(arguments.json, "gpu_prompts", vars(arguments), rows=rows)


def finish(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Complete a row by what it says beside stock vLLM's, and print it."""
    keys = ("part", "prompts", "tokens", "questions")
    base = next(
        (r for r in rows if r["engine"] == "stock" and all(r.get(key) == row.get(key) for key in keys)), None
    )
    if row["part"] == "prefill":
        row["seconds"] = statistics.median(row["all_seconds"])
        row["tokens_per_second"] = row["prompts"] * row["tokens"] / row["seconds"]
        rate = "tokens_per_second"
        words = (
            f"prefill {row['prompts']}x{row['tokens']:<7} {row['seconds']:8.3f} s {row[rate]:10.0f} tokens/s"
        )
    else:
        rate = "turns_per_second"
        ttft = row["ttft"] or {"p50": math.nan, "p99": math.nan}
        hits = math.nan if row["hit_rate"] is None else row["hit_rate"]
        words = (
            f"{row['questions']} questions  {row[rate]:8.3f} requests/s  TTFT p50 {ttft['p50']:.2f} p99 "
            f"{ttft['p99']:.2f} s  hits {hits:.1%}  preemptions {row['preemptions']}  errors {row['errors']}"
            f"  of {row['turns']}"
        )
    row["ratio"] = ratio(row[rate], base[rate]) if base else None
    beside = "" if base is None or base is row else f"  {row['ratio']:.2f}x stock"
    print(f"{row['engine']:<14}{words}{beside}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    cases = ["16x2048", "1x8192", "1x32768", "1x65536", "1x100000"]
    parser.add_argument("--cases", nargs="*", default=cases, help="prompts x tokens")
    parser.add_argument("--repeats", type=int, default=3, help="of each case")
    parser.add_argument("--questions", type=int, nargs="*", default=[1, 4], help="on one context")
    parser.add_argument(
        "--contexts", type=int, nargs=2, default=[20000, 120000], help="least and most tokens"
    )
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--kv-gib", type=float, default=40.0, help="GiB of KV cache")
    parser.add_argument("--seconds", type=float, default=60.0, help="measured, for each number of questions")
    parser.add_argument("--warmup", type=float, default=15.0, help="seconds before, at least")
    parser.add_argument("--max-model-len", type=int, default=131072)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--uniform", action="store_true", help="all heads keep the same")
    parser.add_argument("--eager", action="store_true", help="without torch.compile and CUDA graphs")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny shape and work, to try the script anywhere"
    )
    parser.add_argument("--json", type=Path, help="also write all figures here")
    parser.add_argument("--join", action="store_true", help="keep what that file has of other engines")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.cases, arguments.contexts, arguments.clients = ["4x200", "1x1500"], [500, 1500], 4
        arguments.kv_gib, arguments.seconds, arguments.warmup = 0.003, 5.0, 2.0
        arguments.max_model_len, arguments.eager = 2048, True
    return arguments


if __name__ == "__main__":
    main()
