"""Serving conversations of many turns in one memory: the plugin beside stock vLLM, with closed-loop clients.

    python benchmarks/gpu_serving.py [--engines stock "tangram 0.25"] [--clients 10 20 32 60]
        [--kv-gib 16] [--seconds 40] [--thinking 1.0] [--search LOW HIGH] [--json FILE]

Random weights of Qwen3-4B's shape. Each client is a user (a cache_salt) with one conversation: a first
message of 4,096 random tokens, 512 new ones with every later turn, answers of 128 tokens, ten turns, an
exponentially distributed time of thinking in between, and then a new conversation; --thinking 0 saturates
the engine. An engine's name may go on with settings of the plugin: --engines "tangram 0.25 chunk=256".
A client's first conversation begins in its middle, so that conversations are of all lengths from the start.

One start of an engine serves all numbers of clients, with an empty cache for each; what happens in the
warm-up is not counted. "exceeds" is clients x the keys and values that a full cache holds for a conversation
of mean length, over the memory that there is for them; --exceed asks for such numbers instead of --clients.
"own" is the same with what this engine's cache holds of them.
--search looks for the most clients whose 99th percentile of the time to the first token (TTFT) is within
--goal seconds.

Engines run one after another, each in a process of its own and its core in another, with vLLM's defaults:
prefix caching, torch.compile, CUDA graphs, FlashAttention for stock vLLM. Budgets are spread over the heads
as in a calibrated profile (--uniform: all alike). Keep VLLM_CACHE_ROOT between runs: compiled graphs are
reused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

from clients import Workload, observe
from engines import (
    ENGINES,
    answers_channel,
    cache_of,
    child,
    device,
    earlier,
    engine_name,
    kv_bytes,
    ratio,
    write_json,
    write_model,
)
from summary import largest, meets, next_probe, summarise

TINY = {"first": (600, 600), "message": 60, "answer": 8, "turns": 4}
COLUMNS = (
    ("engine", "clients", "exceeds", "own", "turns/s", "tok/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99"),
    ("hits", "preempt", "errors", "waiting"),
)


# ---- the child --------------------------------------------------------------------------------------------


def worker(job: dict[str, Any]) -> None:
    """One engine; a line of JSON for its start and one for each number of clients."""
    answers = answers_channel()
    begun = time.perf_counter()
    from async_engine import Engine

    async def drive() -> None:
        engine = Engine(job)
        workload = Workload(**job["workload"])
        try:
            async for _ in engine.ask(workload.tokens(0, 2**31 - 1, 0, 700), 4):
                pass
            start = {"start_seconds": time.perf_counter() - begun, "device": device()}
            print(json.dumps(start | engine.settings), file=answers, flush=True)
            points: list[dict[str, Any]] = []
            waiting = list(job["clients"])
            probes = job["probes"] if job["search"] else 0
            while True:
                if waiting:
                    clients = waiting.pop(0)
                elif probes and (probe := next_probe(points, *job["search"], job["goal"])):
                    clients, probes = probe, probes - 1
                else:
                    break
                await engine.forget()
                seen = await observe(workload, engine.ask, clients, job["warmup"], job["seconds"])
                if not engine.alive:
                    raise RuntimeError("the engine's core ended")
                points.append({"clients": clients, **summarise(*seen)})
                print(json.dumps(points[-1]), file=answers, flush=True)
        finally:
            engine.close()

    asyncio.run(drive())


# ---- the parent -------------------------------------------------------------------------------------------


def main() -> None:
    arguments = parse()
    if arguments.worker:
        worker(json.loads(arguments.worker.read_text()))
        return
    shape: dict[str, Any] = {"seed": arguments.seed, "thinking": arguments.thinking}
    if arguments.tiny:
        shape |= TINY
    rows = earlier(arguments.json, arguments.join, "points", arguments.engines)
    starts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = write_model(Path(folder), arguments.tiny)
        workload = Workload(**shape, vocabulary=int(config["vocab_size"]))
        if workload.longest() > arguments.max_model_len:
            raise SystemExit(
                f"conversations of {workload.longest():.0f} tokens need a larger --max-model-len"
            )
        one = kv_bytes(config) / (arguments.kv_gib * 2**30)  # share of the memory that a token takes
        clients = arguments.clients
        if arguments.exceed:
            clients = [max(1, round(times / one / workload.mean_length())) for times in arguments.exceed]
        print(
            f"{workload.turns} turns, thinking {workload.thinking:g} s; a conversation's mean length is "
            f"{workload.mean_length():.0f} tokens, its greatest {workload.longest():.0f}; the memory of "
            f"{arguments.kv_gib:g} GiB holds {1 / one:.0f} tokens of a full cache"
        )
        print_heading()
        for engine in arguments.engines:
            job = {
                "engine": engine,
                "model": folder,
                "profile": None if arguments.uniform else str(Path(folder, "profile.json")),
                "clients": clients,
                "workload": shape | {"vocabulary": workload.vocabulary},
                **{name: getattr(arguments, name) for name in PASSED},
            }
            held = cache_of(engine, config, job["profile"], arguments.max_model_len)
            own = sum(held(length) for length in workload.lengths()) / workload.turns
            for answer in child(__file__, job, Path(folder)):
                if "clients" not in answer:
                    starts[engine] = answer
                    print(f"{engine}: ready after {answer['start_seconds']:.0f} s", flush=True)
                    continue
                exceeds = answer["clients"] * one
                answer |= {"engine": engine, "exceeds": exceeds * workload.mean_length()}
                answer["exceeds_longest"] = exceeds * workload.longest()
                answer["exceeds_own"] = answer["clients"] * own / (arguments.kv_gib * 2**30)
                rows.append(answer)
                print_row(answer)
                # What there is, in case this is cut off.
                write_json(arguments.json, "gpu_serving", vars(arguments), starts=starts, points=rows)
    goals = compare(rows, arguments.goal)
    write_json(arguments.json, "gpu_serving", vars(arguments), starts=starts, points=rows, goals=goals)


PASSED = ("kv_gib", "max_model_len", "max_num_seqs", "eager", "largest_graph")
PASSED += ("warmup", "seconds", "search", "probes", "goal")


def print_heading() -> None:
    first, second = COLUMNS
    print(f"{first[0]:<14}" + "".join(f"{name:>9}" for name in (*first[1:], *second)))


def print_row(row: dict[str, Any]) -> None:
    """Latencies to the first token in seconds, between tokens in milliseconds."""
    ttft, itl = (row[name] or {"p50": math.nan, "p99": math.nan} for name in ("ttft", "itl"))
    hits = math.nan if row["hit_rate"] is None else row["hit_rate"]
    print(
        f"{row['engine']:<14}{row['clients']:>9}{row['exceeds']:>8.1f}x{row['exceeds_own']:>8.1f}x{row['turns_per_second']:>9.2f}"
        f"{row['tokens_per_second']:>9.0f}{ttft['p50']:>9.3f}{ttft['p99']:>9.3f}{1e3 * itl['p50']:>9.2f}"
        f"{1e3 * itl['p99']:>9.2f}{hits:>9.1%}{row['preemptions']:>9}{row['errors']:>9}"
        f"{row['waiting_at_end']:>9}",
        flush=True,
    )
    by_turn = (
        f"{int(number) + 1}: {value['p50']:.3f}/{value['p99']:.3f}"
        for number, value in row["ttft_by_turn"].items()
    )
    print("  TTFT p50/p99 by turn  " + "  ".join(by_turn))
    if row["merged"] > 0.05:
        print(f"  {row['merged']:.0%} of the tokens came together with others: the clients were late")
    if row["error"]:
        print(f"  first error: {row['error']}")


def compare(rows: list[dict[str, Any]], goal: float) -> dict[str, int | None]:
    """Print each engine beside stock vLLM at the same number of clients, and how many it serves in time."""
    stock = {row["clients"]: row for row in rows if row["engine"] == "stock"}
    print("\nratios to stock: turns/s, TTFT p50, TTFT p99, ITL p50")
    for row in rows:
        base = stock.get(row["clients"])
        if base is None or row is base:
            continue
        parts = [ratio(row["turns_per_second"], base["turns_per_second"])]
        for name, quantile in (("ttft", "p50"), ("ttft", "p99"), ("itl", "p50")):
            parts.append(ratio(*((side[name] or {}).get(quantile) for side in (row, base))))
        print(f"{row['engine']:<14}{row['clients']:>9}" + "".join(f"{part:>9.2f}" for part in parts))
    print(f"\nmost clients with TTFT p99 within {goal:g} s, of those measured")
    goals: dict[str, int | None] = {}
    for engine in dict.fromkeys(row["engine"] for row in rows):
        own = [row for row in rows if row["engine"] == engine]
        goals[engine] = largest(own, goal)
        beyond = "" if any(not meets(row, goal) for row in own) else " (more was not tried)"
        print(f"{engine:<14}{goals[engine] or 'none':>9}{beyond}")
    return goals


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), type=engine_name)
    parser.add_argument("--clients", nargs="*", type=int, help="numbers of clients (default 10 20 32 60)")
    parser.add_argument(
        "--exceed", nargs="+", type=float, help="as many clients as exceed the memory so often"
    )
    parser.add_argument(
        "--search", nargs=2, type=int, metavar=("LOW", "HIGH"), help="look for the goal between"
    )
    parser.add_argument("--probes", type=int, default=5, help="of a search, at most")
    parser.add_argument("--goal", type=float, default=1.0, help="seconds to the first token, 99th percentile")
    parser.add_argument("--kv-gib", type=float, help="GiB of KV cache (default 16)")
    parser.add_argument("--seconds", type=float, help="measured, for each number of clients (default 40)")
    parser.add_argument("--warmup", type=float, help="seconds before, at least (default 15)")
    parser.add_argument("--thinking", type=float, help="mean seconds between turns (default 1)")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--uniform", action="store_true", help="all heads keep the same")
    parser.add_argument("--largest-graph", type=int, help="tokens of the largest CUDA graph (default vLLM's)")
    parser.add_argument("--eager", action="store_true", help="without torch.compile and CUDA graphs")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny shape and work, to try the script anywhere"
    )
    parser.add_argument("--json", type=Path, help="also write all figures here")
    parser.add_argument("--join", action="store_true", help="keep what that file has of other engines")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    defaults: dict[str, Any] = {"kv_gib": 16.0, "seconds": 40.0, "warmup": 15.0, "thinking": 1.0}
    if arguments.tiny:
        defaults = {"kv_gib": 0.002, "seconds": 6.0, "warmup": 2.0, "thinking": 0.2}
        arguments.max_model_len = 1024
        arguments.eager = True
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.clients is None:
        usual = [4, 12] if arguments.tiny else [10, 20, 32, 60]
        arguments.clients = [] if arguments.exceed or arguments.search else usual
    return arguments


if __name__ == "__main__":
    main()
