"""Two turns of conversations on a GPU: the plugin beside stock vLLM, on random weights of Qwen3-4B's shape.

    python benchmarks/gpu_turns.py [--engines stock "tangram 0.25"] [--eager] [--kv-gib 16]
        [--cases 1x4096 16x4096 1x32768 8x32768] [--json FILE]

Each engine runs in a process of its own, one after another, with torch.compile and CUDA graphs unless
--eager, prefix caching, and the same bytes of KV cache. A case is conversations x tokens of their first
message: 64 tokens are generated, then 128 new ones follow and 64 more are generated. Reported: the latest
first token, the mean time between tokens, and how many tokens of the second turn were still in the cache.
With the plugin a conversation alone is also answered again from nothing: the tokens must be the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from engines import ENGINES, answers_channel, child, engine_options, write_model

ANSWER, MESSAGE = 64, 128


def worker(job: dict[str, Any]) -> None:
    """Child: one engine, all cases, one JSON line each."""
    answers = answers_channel()
    retention = ENGINES[job["engine"]]
    options = engine_options(retention)
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=40960,
        enforce_eager=job["eager"],
        kv_cache_memory_bytes=int(job["kv_gib"] * 2**30),
        max_num_seqs=64,
        enable_prefix_caching=True,
        disable_log_stats=False,
        **options,
    )
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)

    def ask(prompts: list[list[int]]) -> tuple[list[list[int]], dict[str, Any]]:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        stats = [output.metrics for output in outputs]
        between = [(s.last_token_ts - s.first_token_ts) / (ANSWER - 1) for s in stats]
        figures = {
            "ttft": max(s.first_token_ts - s.queued_ts for s in stats),
            "itl": sum(between) / len(between),
            "cached": sum(output.num_cached_tokens for output in outputs),
        }
        return [list(output.outputs[0].token_ids) for output in outputs], figures

    def text(seed: int, count: int) -> list[int]:
        return [(seed * 7919 + i * 104729) % 4000 for i in range(count)]

    ask([text(999, 700)])
    for case, (batch, length) in enumerate(job["cases"]):
        prompts = [text(1 + b + 1000 * case, length) for b in range(batch)]
        said, first = ask(prompts)
        prompts = [p + answer + text(5, MESSAGE) for p, answer in zip(prompts, said, strict=True)]
        again, second = ask(prompts)
        result = {"conversations": batch, "tokens": length, "first": first, "second": second}
        if retention:
            llm.llm_engine.engine_core.engine_core.scheduler.manager.evict()
            result["resumed_is_recomputed"] = ask(prompts[:1])[0][0] == again[0] if batch == 1 else None
        print(json.dumps(result), file=answers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", default=["stock", "tangram 0.25"], choices=ENGINES)
    parser.add_argument("--cases", nargs="+", default=["1x4096", "16x4096", "1x32768", "8x32768"])
    parser.add_argument("--kv-gib", type=float, default=16.0, help="GiB of KV cache")
    parser.add_argument("--eager", action="store_true", help="without torch.compile and CUDA graphs")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to try the script anywhere")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(json.loads(arguments.worker.read_text()))
        return
    cases = [tuple(int(part) for part in case.split("x")) for case in arguments.cases]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), arguments.tiny)
        columns = ("case", "TTFT 1 s", "TTFT 2 s", "ITL 1 ms", "ITL 2 ms", "cached")
        print(f"{'engine':<14}" + "".join(f"{column:>10}" for column in columns))
        for engine in arguments.engines:
            job = {"engine": engine, "model": folder, "cases": cases}
            job |= {"eager": arguments.eager, "kv_gib": arguments.kv_gib}
            for row in child(__file__, job, Path(folder)):
                rows.append({"engine": engine, **row})
                first, second = row["first"], row["second"]
                print(
                    f"{engine:<14}{row['conversations']:>4}x{row['tokens']:<5}{first['ttft']:>10.3f}"
                    f"{second['ttft']:>10.3f}{1e3 * first['itl']:>10.2f}{1e3 * second['itl']:>10.2f}"
                    f"{second['cached']:>10}",
                    flush=True,
                )
                if row.get("resumed_is_recomputed") is False:
                    sys.exit("a resumed conversation answered otherwise than a recomputed one")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
