"""Ragged attention on the CPU beside torch's and vLLM's attention on the same dense shape.

    python benchmarks/cpu_attention.py [--json FILE] [--context 2048] [--seconds 0.5]

Every shape runs at retention 1.0, so that all sides do the same arithmetic: a decode step (one new token)
and a prefill step of 512 tokens, each at the given context, in bfloat16. Torch's
scaled_dot_product_attention gets its keys and values contiguous and is given its best of two calls: with
the causal mask, and without one, which computes the masked scores too but takes a faster path. vLLM's CPU
kernel, where vLLM is installed, reads scattered blocks of its own layout. All are timed in turns and the
best of the rounds counts, because the machine may be shared.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernels import RaggedLayout, ragged_attention

SHAPES = {
    "SmolLM2-135M": (9, 3, 64),
    "Qwen2.5-0.5B": (14, 2, 64),
    "Llama-3.2-3B": (24, 8, 128),
}
PAGE, CHUNK, WINDOW = 16, 512, 128


def ragged_case(
    query_heads: int, kv_heads: int, head_size: int, context: int, count: int, requests: int
) -> Callable[[], object]:
    """A step of ``count`` new tokens for each request, at ``context`` tokens afterwards."""
    layout = RaggedLayout(PAGE, (CHUNK + WINDOW) // PAGE + 5, CHUNK, WINDOW, (CHUNK,), head_size)
    width = layout.width(context)
    pool = torch.randn(width * requests + 1, kv_heads, PAGE, 2 * head_size).to(torch.bfloat16)
    rows = torch.randperm(width * requests).to(torch.int32).reshape(requests, width)
    starts = torch.arange(requests + 1, dtype=torch.int32) * count
    lengths = torch.full((requests,), context, dtype=torch.int32)
    tier = torch.zeros(kv_heads, dtype=torch.int32)
    member = torch.arange(kv_heads, dtype=torch.int32)
    query = torch.randn(count * requests, query_heads, head_size).to(torch.bfloat16)
    out = torch.empty_like(query)
    scale = head_size**-0.5

    def run() -> None:
        ragged_attention(out, query, pool, rows, starts, lengths, tier, member, layout, scale)

    return run


def dense_cases(
    query_heads: int, kv_heads: int, head_size: int, context: int, count: int, requests: int
) -> list[Callable[[], object]]:
    """The same step with torch, the last ``count`` of ``context`` queries: with the causal mask, and
    without."""
    query = torch.randn(requests, query_heads, count, head_size).to(torch.bfloat16)
    key, value = (torch.randn(requests, kv_heads, context, head_size).to(torch.bfloat16) for _ in range(2))
    mask = torch.ones(count, context, dtype=torch.bool).tril(context - count)
    attend = partial(F.scaled_dot_product_attention, query, key, value, enable_gqa=True)
    return [partial(attend, attn_mask=mask), attend]


def vllm_case(
    query_heads: int, kv_heads: int, head_size: int, context: int, count: int, requests: int
) -> list[Callable[[], object]]:
    """The same step with vLLM's CPU kernel over its default blocks of 128 tokens; nothing where there is
    none."""
    if importlib.util.find_spec("vllm") is None:
        return []
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    size, isa = 128, _get_attn_isa(torch.bfloat16, 128, head_size)
    blocks = -(-context // size)
    cache = torch.randn(blocks * requests + 1, kv_heads, size, 2 * head_size).to(torch.bfloat16)
    key_cache, value_cache = cache.view(-1, kv_heads, 2 * size, head_size).chunk(2, dim=2)
    table = torch.randperm(blocks * requests).to(torch.int32).reshape(requests, blocks)
    starts = torch.arange(requests + 1, dtype=torch.int32) * count
    lengths = torch.full((requests,), context, dtype=torch.int32)
    query = torch.randn(count * requests, query_heads, head_size).to(torch.bfloat16)
    plan = ops.cpu_attn_get_scheduler_metadata(
        *(requests, query_heads, kv_heads, head_size, lengths, query.dtype, starts, True, -1, isa, True)
    )
    out, scale = torch.empty_like(query), head_size**-0.5
    arguments = (
        query,
        key_cache,
        value_cache,
        out,
        starts,
        lengths,
        scale,
        True,
        None,
        -1,
        table,
        0.0,
        plan,
        None,
    )
    return [partial(ops.cpu_attention_with_kv_cache, *arguments)]


def best_times(cases: list[Callable[[], object]], seconds: float) -> list[float]:
    """Best milliseconds of each case, the cases taking turns until each has had ``seconds``."""
    best = [float("inf")] * len(cases)
    for case in cases:
        case()
    spent = 0.0
    while spent < seconds * len(cases):
        for index, case in enumerate(cases):
            start = time.perf_counter()
            case()
            taken = time.perf_counter() - start
            best[index] = min(best[index], taken * 1e3)
            spent += taken
    return best


def step_end(context: int) -> int:
    """The longest length up to ``context`` whose last 512 tokens are one step: a seal boundary."""
    return max(CHUNK + WINDOW, (context - WINDOW) // CHUNK * CHUNK + WINDOW)


def measure(context: int, seconds: float) -> list[dict[str, object]]:
    """One record for each shape and kind of step."""
    records: list[dict[str, object]] = []
    for model, (query_heads, kv_heads, head_size) in SHAPES.items():
        for step, count, requests, length in (
            ("decode", 1, 1, context),
            ("decode x8", 1, 8, context),
            ("prefill 512", 512, 1, step_end(context)),
        ):
            sizes = (query_heads, kv_heads, head_size, length, count, requests)
            cases = [ragged_case(*sizes), *dense_cases(*sizes), *vllm_case(*sizes)]
            ragged, masked, plain, *vllm = best_times(cases, seconds)
            dense = min(masked, plain)
            pairs = sum(length - count + 1 + i for i in range(count)) * requests
            bytes_read = requests * length * kv_heads * head_size * 2 * 2
            records.append(
                {
                    "model": model,
                    "step": step,
                    "heads": f"{query_heads}/{kv_heads}x{head_size}",
                    "context": length,
                    "ragged_ms": round(ragged, 4),
                    "sdpa_ms": round(dense, 4),
                    "vllm_ms": round(vllm[0], 4) if vllm else None,
                    "vs_sdpa": round(dense / ragged, 2),
                    "vs_vllm": round(vllm[0] / ragged, 2) if vllm else None,
                    "gflops": round(pairs * query_heads * head_size * 4 / ragged / 1e6, 1),
                    "gb_per_s": round(bytes_read / ragged / 1e6, 1),
                }
            )
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--context", type=int, default=2048, help="tokens in the cache after the step")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each case")
    parser.add_argument("--json", type=Path, help="also write the records to this file")
    options = parser.parse_args()
    torch.manual_seed(0)
    records = measure(options.context, options.seconds)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    columns = list(records[0])
    widths = [max(len(column), *(len(str(record[column])) for record in records)) for column in columns]
    for line in [dict(zip(columns, columns, strict=True)), *records]:
        print(
            "  ".join(str(line[column]).rjust(width) for column, width in zip(columns, widths, strict=True))
        )
    if options.json:
        report = {"threads": torch.get_num_threads(), "torch": torch.__version__, "records": records}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
