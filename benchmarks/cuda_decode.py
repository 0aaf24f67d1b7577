"""Ragged decode attention on a GPU: time and bandwidth beside a plain copy and evenly spread budgets.

One layer of the Qwen3-4B shape (32 query heads, 8 KV heads of 128, bfloat16) at a time, over histories whose
heads keep very different shares. Each call works on another layer's pages, so that no run finds its data in
the L2 cache; calls are captured in one CUDA graph, as in serving.

    python benchmarks/cuda_decode.py --json decode.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernels import RaggedLayout, ragged_attention

KV_HEADS, GROUP, HEAD_SIZE = 8, 4, 128
PAGE, CHUNK, WINDOW = 16, 512, 128
TOKEN_BYTES = 2 * HEAD_SIZE * 2

# Shares of a chunk that the heads of a layer keep, by their mean: spread like calibrated budgets.
BUDGETS = {
    1.0: (1.0,) * 8,
    0.5: (0.12, 0.22, 0.34, 0.44, 0.55, 0.66, 0.79, 0.88),
    0.25: (0.04, 0.06, 0.09, 0.14, 0.2, 0.3, 0.47, 0.7),
}


def layout_of(budgets: tuple[float, ...], page: int) -> RaggedLayout:
    """One tier for each head."""
    keep = tuple(max(1, round(share * CHUNK / page)) * page for share in budgets)
    return RaggedLayout(page, -(-(CHUNK + WINDOW) // page) + 1, CHUNK, WINDOW, keep, HEAD_SIZE)


def visible(layout: RaggedLayout, tokens: int) -> int:
    """Tokens of all KV heads that a query at the end of the sequence sees."""
    sealed = layout.sealed(tokens - 1)
    return sum(sealed * keep + tokens - sealed * CHUNK for keep in layout.keep)


class Case:
    """Layers of one batch: each has its heads at other members of the same pages."""

    def __init__(self, layout: RaggedLayout, lengths: list[int], memory: torch.Tensor) -> None:
        self.layout, self.requests = layout, len(lengths)
        width = layout.width(max(lengths))
        page = layout.page_tokens * 2 * HEAD_SIZE
        self.members = max(1, min(16, memory.numel() // (page * width * self.requests)))
        pages = width * self.requests
        self.pool = memory[: pages * self.members * page].view(pages, self.members, layout.page_tokens, -1)
        random = torch.Generator(device="cuda").manual_seed(0)
        rows = torch.randperm(pages, generator=random, device="cuda").to(torch.int32)
        self.rows = rows.view(self.requests, width)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.starts = torch.arange(self.requests + 1, dtype=torch.int32, device="cuda")
        tiers = torch.arange(KV_HEADS, dtype=torch.int32, device="cuda")
        self.tables = [(tiers, (tiers * 3 + layer) % self.members) for layer in range(self.members)]
        heads = (self.requests, KV_HEADS * GROUP, HEAD_SIZE)
        self.query = torch.randn(heads, generator=random, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.query)
        self.bytes = sum(visible(layout, n) for n in lengths) * TOKEN_BYTES

    def layer(self, index: int) -> None:
        """One launch."""
        tier, member = self.tables[index % self.members]
        batch = (self.pool, self.rows, self.starts, self.seq_lens, tier, member, self.layout)
        ragged_attention(self.out, self.query, *batch, HEAD_SIZE**-0.5, max_query=1)

    def microseconds(self) -> float:
        """Of one call, among calls that between them read far more than the cache holds."""
        layers = max(self.members, min(64, 1 + 2**29 // self.bytes))
        return graph_microseconds(lambda: [self.layer(index) for index in range(layers)]) / layers


def graph_microseconds(work: Callable[[], Any], replays: int = 7) -> float:
    """Median time of a captured graph's replay."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    times = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000)
    return statistics.median(times)


def copy_bandwidth(memory: torch.Tensor) -> float:
    """Bytes read and written a second by a copy of 2 GiB."""
    half = min(memory.numel() // 2, 2**30)
    source, target = memory[:half], memory[half : 2 * half]
    target.copy_(source)
    times = []
    for _ in range(7):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(4):
            target.copy_(source)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 4 / 1000)
    return 4 * half / statistics.median(times)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All cases that fit."""
    memory = torch.empty(int(arguments.gib * 2**29), dtype=torch.bfloat16, device="cuda").normal_()
    copy = copy_bandwidth(memory)
    print(f"copy {copy / 1e9:.0f} GB/s")
    print("context  batch  retention       us    GB/s  of copy  even us  spread/even")
    results = []
    for context in arguments.contexts:
        for batch in arguments.batches:
            for retention in arguments.retentions:
                spread = layout_of(BUDGETS[retention], arguments.page)
                mean = sum(spread.keep) / len(spread.keep) / CHUNK
                even = even_layout(spread, arguments.page)
                if spread.width(context) * batch * PAGE * TOKEN_BYTES > memory.numel() * 2:
                    continue
                # Unequal lengths around the context, as in serving.
                lengths = [context - (index * 97) % max(1, context // 8) for index in range(batch)]
                case, flat = Case(spread, lengths, memory), Case(even, lengths, memory)
                took, even_took = case.microseconds(), flat.microseconds()
                rate = case.bytes / took * 1e6
                results.append(
                    {
                        "context": context,
                        "batch": batch,
                        "retention": retention,
                        "mean_share": mean,
                        "us": took,
                        "bytes": case.bytes,
                        "of_copy": rate / copy,
                        "even_us": even_took,
                        "even_bytes": flat.bytes,
                    }
                )
                ratio = took / case.bytes / (even_took / flat.bytes)
                print(
                    f"{context:7d} {batch:6d} {retention:10.2f} {took:8.1f} {rate / 1e9:7.0f}"
                    f" {rate / copy:8.2f} {even_took:8.1f} {ratio:12.3f}"
                )
    return {"device": torch.cuda.get_device_name(), "copy_bytes_a_second": copy, "cases": results}


def even_layout(spread: RaggedLayout, page: int) -> RaggedLayout:
    """The same kept tokens over all heads, as evenly as pages allow."""
    total = sum(spread.keep) // page
    heads = len(spread.keep)
    keep = tuple((total // heads + (index < total % heads)) * page for index in range(heads))
    return RaggedLayout(page, spread.ring_slots, CHUNK, WINDOW, keep, HEAD_SIZE)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32768, 131072])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument(
        "--retentions", type=float, nargs="+", default=[1.0, 0.5, 0.25], choices=list(BUDGETS)
    )
    parser.add_argument("--page", type=int, default=PAGE, help="tokens of a page")
    parser.add_argument("--gib", type=float, default=60.0, help="GPU memory for the pool")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
