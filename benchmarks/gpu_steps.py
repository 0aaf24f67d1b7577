"""How long a decode step takes beside the sum of its kernels: the plugin and stock vLLM, profiled.

    python benchmarks/gpu_steps.py [--engines stock "tangram 0.25"] [--cases 16x8192 64x2048]
        [--steps 40] [--decode separate fused dependent early] [--json FILE]

Random weights of Qwen3-4B's shape, full CUDA graphs, vLLM's defaults otherwise. A case is conversations x
tokens: after their prompts all of them generate. Then --steps steps are timed as they are, and as many more
with torch's profiler looking on. Printed for each case: the mean step without the profiler; with it, a step
(from one graph's first kernel to the next one's), the time in which some kernel runs, the share in which none
does, the part of this between graphs (where the host can be late; the rest is between a graph's own kernels),
and the share of kernel time that is the plugin's. "host gap" sets the kernels against the step without the
profiler, which by itself makes steps longer. Lengths should leave room before the next seal boundary, or one
step of all also seals.

With --decode the plugin's engines run once for each way to launch decode attention that is named (those of
``TANGRAM_DECODE_LAUNCH``). A dependent launch's kernel waits within its own time for the kernel before it, so
then compare steps, not kernel time or gaps.

Then one prompt of each length of --prompts is profiled: what share of its kernels' time is sealing.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from engines import (
    ENGINES,
    answers_channel,
    child,
    device,
    earlier,
    engine_options,
    launched,
    write_json,
    write_model,
)
from steps import prefill_of, profile_of

WARM = 8
"""Steps of pure decoding before those that are timed."""


def worker(job: dict[str, Any]) -> None:
    """One engine in this process; a line of JSON for each case."""
    answers = answers_channel()
    if job["decode"]:
        os.environ["TANGRAM_DECODE_LAUNCH"] = job["decode"]
    options = engine_options(ENGINES[job["engine"]], job["profile"])
    import torch
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(
        job["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=job["max_model_len"],
        max_num_seqs=256,
        kv_cache_memory_bytes=int(job["kv_gib"] * 2**30),
        enforce_eager=job["eager"],
        enable_prefix_caching=True,
        **options,
    )
    engine = llm.llm_engine
    on_gpu = torch.cuda.is_available()

    def settle() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    def timed(steps: int) -> float:
        settle()
        begin = time.perf_counter()
        for _ in range(steps):
            engine.step()
        settle()
        return (time.perf_counter() - begin) / steps

    activities = [torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU]
    serial = 0
    for conversations, length in job["cases"]:
        total = 3 * (WARM + job["steps"]) + conversations * (length // 512 + 2)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=total,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        names = []
        for index in range(conversations):
            tokens = [(serial * 7919 + i * (104729 + 2 * index)) % 4000 for i in range(length)]
            names.append(str(serial))
            engine.add_request(names[-1], {"prompt_token_ids": tokens}, params)
            serial += 1
        scheduler = engine.engine_core.engine_core.scheduler
        while scheduler.waiting or any(r.num_output_tokens < 2 for r in scheduler.running):
            engine.step()
        timed(WARM)
        lengths = [request.num_tokens for request in scheduler.running]
        plain = timed(job["steps"])
        with torch.profiler.profile(activities=activities) as profiler:
            profiled = timed(job["steps"])
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(trace))
            figures = profile_of(json.loads(trace.read_text(encoding="utf-8")), job["steps"])
        result = {
            "conversations": conversations,
            "tokens": length,
            "running": len(lengths),
            "tokens_at_first_step": max(lengths),
            "plain_step_us": plain * 1e6,
            "profiled_wall_us": profiled * 1e6,
            "profile": figures,
            "device": device(),
        }
        print(json.dumps(result), file=answers, flush=True)
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
        settle()
        llm.reset_prefix_cache()

    def read(length: int, salt: int) -> None:
        tokens = [(salt * 7919 + i * 104729) % 4000 for i in range(length)]
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)

    for length in job["prompts"]:
        read(length, 1)
        settle()
        llm.reset_prefix_cache()
        with torch.profiler.profile(activities=activities) as profiler:
            read(length, 2)
            settle()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(trace))
            prefill = prefill_of(json.loads(trace.read_text(encoding="utf-8")))
        print(
            json.dumps({"tokens": length, "prefill": prefill, "device": device()}), file=answers, flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engines", nargs="+", default=["stock", "tangram 1.0", "tangram 0.25"], choices=ENGINES
    )
    parser.add_argument("--cases", nargs="+", default=["16x8192", "64x2048"])
    parser.add_argument("--prompts", type=int, nargs="*", default=[32768], help="lengths, in tokens")
    parser.add_argument("--steps", type=int, default=40, help="timed, and profiled, in each case")
    parser.add_argument("--decode", nargs="+", default=[None], help="ways to launch decode attention")
    parser.add_argument("--kv-gib", type=float, default=32.0, help="GiB of KV cache")
    parser.add_argument("--max-model-len", type=int, default=40960)
    parser.add_argument("--uniform", action="store_true", help="all heads keep the same")
    parser.add_argument("--eager", action="store_true", help="without torch.compile and CUDA graphs")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to try the script anywhere")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    parser.add_argument("--join", action="store_true", help="keep what that file has of other engines")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(json.loads(arguments.worker.read_text()))
        return
    if arguments.tiny:
        arguments.kv_gib, arguments.max_model_len, arguments.cases = 0.01, 2048, ["4x600", "2x900"]
        arguments.prompts = [900]
    cases = [tuple(int(part) for part in case.split("x")) for case in arguments.cases]
    rows = earlier(arguments.json, arguments.join, "cases", arguments.engines)
    columns = ("case", "plain us", "step us", "busy us", "gap", "between", "host gap", "kernels", "ours")
    print(f"{'engine':<24}" + "".join(f"{column:>11}" for column in columns))
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), arguments.tiny)
        for engine, decode in launched(arguments.engines, arguments.decode):
            job = {
                "engine": engine,
                "model": folder,
                "profile": None if arguments.uniform else str(Path(folder, "profile.json")),
                "cases": cases,
                "prompts": arguments.prompts,
                "steps": arguments.steps,
                "kv_gib": arguments.kv_gib,
                "max_model_len": arguments.max_model_len,
                "eager": arguments.eager or arguments.tiny,
                "decode": decode,
            }
            for row in child(__file__, job, Path(folder)):
                rows.append({"engine": engine, **({"decode": decode} if decode else {}), **row})
                print_row(rows[-1])
                write_json(arguments.json, "gpu_steps", vars(arguments), cases=rows)


def title(row: dict[str, Any]) -> str:
    """A row's engine, and how it launches decode attention where that was asked for."""
    return " ".join(filter(None, (row["engine"], row.get("decode"))))


def print_prefill(row: dict[str, Any]) -> None:
    """One prompt, and its kernels by time below it."""
    figures = row["prefill"]
    line = f"{title(row):<24}{'prompt':>5} {row['tokens']:<6}"
    if figures is None:
        print(line + "   no kernel in the profile", flush=True)
        return
    print(
        f"{line} wall {figures['wall_us']:.0f} us, busy {figures['busy_us']:.0f} us, "
        f"sealing {figures['sealing']:.2%} of the kernels' time"
    )
    for kernel in figures["top"]:
        print(f"    {kernel['us']:9.0f} us {kernel['count']:7}x  {kernel['name'][:90]}")
    print(end="", flush=True)


def print_row(row: dict[str, Any]) -> None:
    """One case, and its kernels by time below it."""
    if "prefill" in row:
        print_prefill(row)
        return
    line = f"{title(row):<24}{row['conversations']:>5}x{row['tokens']:<5}{row['plain_step_us']:>11.0f}"
    figures = row["profile"]
    if figures is None:
        print(line + "   no replay of a graph in the profile", flush=True)
        return
    print(
        f"{line}{figures['step_us']:>11.0f}{figures['busy_us']:>11.0f}{figures['gap']:>11.1%}"
        f"{figures['gap_between_graphs']:>11.1%}{1 - figures['busy_us'] / row['plain_step_us']:>11.1%}"
        f"{figures['kernels_per_step']:>11.0f}{figures['ours']:>11.1%}"
    )
    for kernel in figures["top"]:
        print(f"    {kernel['us_per_step']:9.1f} us {kernel['per_step']:7.1f}x  {kernel['name'][:90]}")
    print(end="", flush=True)


if __name__ == "__main__":
    main()
