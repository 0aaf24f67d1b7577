"""Attention of steps that read prompts beside decoding, where they cross seal boundaries: what they cost the
host and the GPU.

A step of the Qwen3-4B shape (36 layers, 32 query heads, 8 KV heads of 128, bfloat16): some requests each read
640 tokens after a history, others decode one token. Such a step is too long for a CUDA graph, so what the
host needs to launch it counts. Beside it stock vLLM's two calls of each layer: write, and FlashAttention 3 on
all keys. All take turns in one run; figures are medians, in microseconds a layer.

    host    until all layers are launched, on an idle GPU
    device  of the same launches in a graph

    python benchmarks/cuda_mixed.py --json mixed.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.budgets import GROUP, HEAD_SIZE, KV_HEADS, LAYERS, SPREAD, layout_of
from benchmarks.cases import cache_views
from benchmarks.peers import PeerMissing, load_flash_attention
from benchmarks.timing import Sampler, alternate, capture, device_sampler, synchronize
from kernels.layout import RaggedLayout
from kernels.wide import staged_pages
from tangram.wide import Bounds, Scoring, WideSteps, flash_version

NEW = 640
SINK = 4


class Step:
    """The tokens of one step, one layer's after another.

    Args:
        reading, decoding: requests that bring ``NEW`` tokens, and one.
        history: tokens that each had.
    """

    def __init__(self, reading: int, decoding: int, history: int, device: str) -> None:
        counts = [NEW] * reading + [1] * decoding
        self.ends = [history + 7 * index + count for index, count in enumerate(counts)]
        self.starts = [end - count for end, count in zip(self.ends, counts, strict=True)]
        self.places = [sum(counts[:index]) for index in range(len(counts) + 1)]
        self.tokens, self.most_new = self.places[-1], max(counts)
        self.seq_lens = torch.tensor(self.ends, dtype=torch.int32, device=device)
        self.query_start_loc = torch.tensor(self.places, dtype=torch.int32, device=device)
        shape = (self.tokens, KV_HEADS * (GROUP + 2), HEAD_SIZE)
        packed = torch.randn(shape, dtype=torch.bfloat16, device=device)
        self.query, self.key, self.value = packed.split([KV_HEADS * GROUP, KV_HEADS, KV_HEADS], dim=1)
        self.out = torch.empty(self.tokens, KV_HEADS * GROUP, HEAD_SIZE, dtype=torch.bfloat16, device=device)


def ours(step: Step, layout: RaggedLayout, memory: torch.Tensor) -> Callable[[], None]:
    """The plugin's layers of the step.

    Raises:
        MemoryError: the rows do not fit.
    """
    device, requests = memory.device, len(step.ends)
    width = layout.width(max(step.ends))
    shape = (width * requests, LAYERS, layout.page_tokens, 2 * HEAD_SIZE)
    size = LAYERS * layout.page_tokens * 2 * HEAD_SIZE
    if shape[0] * size > memory.numel():
        raise MemoryError(f"{shape[0]} pages of {size} elements do not fit {memory.numel()}")
    pool = memory[: shape[0] * size].view(shape)
    random = torch.Generator().manual_seed(0)
    rows = torch.randperm(shape[0], generator=random).to(device, torch.int32).view(requests, width)
    tier = torch.arange(KV_HEADS, dtype=torch.int32, device=device)
    heads = [
        (tier, torch.tensor([(3 * head + layer) % LAYERS for head in range(KV_HEADS)]).to(tier))
        for layer in range(LAYERS)
    ]
    pages = staged_pages(layout, step.tokens, NEW)
    version = flash_version(device, pool.dtype, layout)
    steps = WideSteps(layout, (KV_HEADS * GROUP, KV_HEADS), SINK, pages, version)
    bounds = Bounds(step.starts, step.ends, step.places)
    made = steps.of(bounds, pool, rows, step.seq_lens)
    if made is None:
        raise ValueError("the step crosses no seal boundary")
    scoring = Scoring(HEAD_SIZE**-0.5)

    def run() -> None:
        for of_layer in heads:
            given = (step.out, step.query, step.key, step.value, step.query_start_loc)
            made.attend(*given, of_layer, scoring)

    return run


def stock(step: Step, memory: torch.Tensor) -> Callable[[], None]:
    """Stock vLLM's layers of the step.

    Raises:
        PeerMissing: FlashAttention 3 cannot be loaded.
    """
    flash = load_flash_attention()
    from vllm import _custom_ops as ops

    device, page = memory.device, 16
    blocks = -(-max(step.ends) // page)
    requests = len(step.ends)
    block = KV_HEADS * page * 2 * HEAD_SIZE
    fit = memory.numel() // (blocks * requests * block)
    caches = [
        cache_views(part, page, KV_HEADS, HEAD_SIZE)
        for part in memory[: min(fit, LAYERS) * blocks * requests * block].chunk(min(fit, LAYERS))
    ]
    table = torch.randperm(blocks * requests, device=device).to(torch.int32).view(requests, blocks)
    slots = torch.cat(
        [
            table[row, position // page].long() * page + position % page
            for row, (start, end) in enumerate(zip(step.starts, step.ends, strict=True))
            for position in (torch.arange(start, end, device=device),)
        ]
    )
    one = torch.ones((), device=device)

    def run() -> None:
        for layer in range(LAYERS):
            keys, values = caches[layer % len(caches)]
            ops.reshape_and_cache_flash(step.key, step.value, keys, values, slots, "auto", one, one)
            flash.flash_attn_varlen_func(
                step.query,
                keys,
                values,
                max_seqlen_q=step.most_new,
                cu_seqlens_q=step.query_start_loc,
                max_seqlen_k=max(step.ends),
                seqused_k=step.seq_lens,
                softmax_scale=HEAD_SIZE**-0.5,
                causal=True,
                block_table=table,
                out=step.out,
                fa_version=3,
            )

    return run


def launch_sampler(work: Callable[[], Any]) -> Sampler:
    """By the host's clock, from an idle GPU until everything is launched."""

    def sample() -> float:
        synchronize()
        start = time.perf_counter()
        work()
        taken = (time.perf_counter() - start) * 1e6
        synchronize()
        return taken

    return sample


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--cases", nargs="+", default=["1+0", "1+15", "2+15", "4+15"], help="reading+decoding"
    )
    parser.add_argument("--history", type=int, default=6000, help="tokens of each request before the step")
    parser.add_argument("--retention", type=float, default=0.25, choices=list(SPREAD))
    parser.add_argument("--gib", type=float, default=40.0, help="GPU memory for the caches")
    parser.add_argument("--rounds", type=int, default=15, help="times that all take turns")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    memory = torch.empty(int(arguments.gib * 2**29), dtype=torch.bfloat16, device=device).normal_()
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU: the times mean nothing"
    print(name)
    print(f"{'reading+decoding':<18}{'':<8}{'host':>9}{'device':>9}")
    rows = []
    for text in arguments.cases:
        reading, decoding = (int(part) for part in text.split("+"))
        step = Step(reading, decoding, arguments.history, device)
        work = {"ours": ours(step, layout_of(SPREAD[arguments.retention]), memory)}
        try:
            work["stock"] = stock(step, memory)
        except PeerMissing as missing:
            print(missing)
        samplers = {}
        for who, run in work.items():
            run()
            samplers |= {(who, "host"): launch_sampler(run), (who, "device"): device_sampler(capture(run))}
        times = {key: time / LAYERS for key, time in alternate(samplers, arguments.rounds).items()}
        for who in work:
            host, busy = times[who, "host"], times[who, "device"]
            print(f"{text:<18}{who:<8}{host:>9.1f}{busy:>9.1f}", flush=True)
            case = {"reading": reading, "decoding": decoding, "engine": who}
            rows.append(case | {"host_us": host, "device_us": busy})
    if arguments.json:
        report = {
            "device": name,
            "retention": arguments.retention,
            "history": arguments.history,
            "cases": rows,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
