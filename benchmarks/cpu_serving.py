"""Tokens per second on a CPU: the plugin beside stock vLLM, in one run.

    .venv/bin/python benchmarks/cpu_serving.py [--model DIR] [--context 2048] [--rounds 5]
        [--batches 1 4] [--engines stock "tangram 0.25"] [--json FILE]

All engines are loaded first (eager, bfloat16, prefix caching, the machine's default threads) and then take
turns on the same work, one at a time, round after round, so that a noisy machine is noisy for all. Reported
are medians, and the median over rounds of the ratio to stock vLLM in the same round.

prefill: tokens/s of a fresh prompt of CONTEXT tokens.
decode:  tokens/s of generating after that prompt, alone and with four conversations at once.
turn:    seconds until the first token of a second turn of 64 new tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from engines import ENGINES, answers_channel, plugin_options

NEW_TOKENS = 64


def worker(model: str, retention: float | None, context: int) -> None:
    """Child: load one engine, then answer one JSON line of work with one JSON line of seconds."""
    answers = answers_channel()
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    options = plugin_options(retention)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        max_model_len=context + 3 * NEW_TOKENS,
        dtype="bfloat16",
        enforce_eager=True,
        disable_log_stats=False,
        **options,
    )

    def timed(prompts: list[list[int]], count: int) -> tuple[float, float, list[list[int]]]:
        """Seconds until all have a first token, seconds from there to the end, and what was generated."""
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        stats = [output.metrics for output in outputs]
        first = max(s.first_token_ts for s in stats)
        begun = min(s.queued_ts for s in stats)
        last = max(s.last_token_ts for s in stats)
        return first - begun, last - first, [list(output.outputs[0].token_ids) for output in outputs]

    timed([list(range(3, 40))], 4)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        prompts = json.loads(line)
        prefill, decode, generated = timed(prompts, 1 + NEW_TOKENS)
        turns = [ids + new + ids[:NEW_TOKENS] for ids, new in zip(prompts, generated, strict=True)]
        turn, _, _ = timed(turns, 1)
        print(json.dumps({"prefill": prefill, "decode": decode, "turn": turn}), file=answers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="model directory (default: the bundled model, prepared if missing)")
    parser.add_argument("--context", type=int, default=2048, help="prompt length in tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4], help="conversations at once")
    parser.add_argument(
        "--engines", nargs="+", default=list(ENGINES), choices=ENGINES, help="stock is needed"
    )
    parser.add_argument("--json", type=Path, help="also write all figures here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model = arguments.model or bundled()
    if arguments.worker:
        worker(model, ENGINES[arguments.worker], arguments.context)
        return
    children = {name: start(name, model, arguments.context) for name in arguments.engines}
    for child in children.values():
        ask(child)
    seconds: dict[tuple[str, int], list[dict[str, float]]] = {}
    serial = 0
    for _ in range(arguments.rounds):
        for batch in arguments.batches:
            serial += 1
            prompts = [
                [3 + (7 * i + 13 * serial + 1009 * b) % 40000 for i in range(arguments.context)]
                for b in range(batch)
            ]
            for name, child in children.items():
                seconds.setdefault((name, batch), []).append(ask(child, prompts))
    for child in children.values():
        child.stdin.close()
        child.wait()
    rows = report(seconds, arguments.context)
    if arguments.json:
        arguments.json.write_text(json.dumps({"context": arguments.context, "rows": rows}, indent=1) + "\n")


def bundled() -> str:
    from app import bundled_model

    home = Path(os.environ.get("TANGRAM_HOME", "~/.local/share/tangram-chat")).expanduser()
    return str(bundled_model.prepare(home / "models", print))


def start(name: str, model: str, context: int) -> Any:
    command = [sys.executable, __file__, "--model", model, "--worker", name, "--context", str(context)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )


def ask(child: Any, prompts: list[list[int]] | None = None) -> Any:
    if prompts is not None:
        print(json.dumps(prompts), file=child.stdin, flush=True)
    line = child.stdout.readline()
    if not line:
        sys.exit(f"an engine ended with {child.wait()}")
    return json.loads(line)


def report(seconds: dict[tuple[str, int], list[dict[str, float]]], context: int) -> list[dict[str, Any]]:
    rows = []
    print(
        f"{'engine':<14}{'batch':>6}{'prefill tok/s':>16}{'decode tok/s':>16}{'turn s':>10}   ratios to stock"
    )
    for (name, batch), rounds in seconds.items():
        base = seconds["stock", batch]

        def ratio(what: str, rounds: Any = rounds, base: Any = base) -> float:
            return statistics.median(b[what] / r[what] for r, b in zip(rounds, base, strict=True))

        median = {what: statistics.median(r[what] for r in rounds) for what in rounds[0]}
        row = {
            "engine": name,
            "batch": batch,
            "prefill_tokens_per_second": batch * context / median["prefill"],
            "decode_tokens_per_second": batch * NEW_TOKENS / median["decode"],
            "turn_seconds": median["turn"],
            "ratio": {what: ratio(what) for what in median},
        }
        rows.append(row)
        ratios = "  ".join(f"{what} {value:.2f}x" for what, value in row["ratio"].items())
        print(
            f"{name:<14}{batch:>6}{row['prefill_tokens_per_second']:>16.0f}"
            f"{row['decode_tokens_per_second']:>16.1f}{row['turn_seconds']:>10.3f}   {ratios}"
        )
    return rows


if __name__ == "__main__":
    main()
