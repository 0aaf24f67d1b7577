"""Ragged prefill attention and sealing on a GPU, beside torch's FlashAttention at the same arithmetic.

One layer of the Qwen3-4B shape in bfloat16. A step brings new tokens to a history that is kept in part. What
FlashAttention gets is as many queries and as many keys, dense and without a mask, so that the operations of
both can be compared; ours also has the causal part.

    python benchmarks/cuda_prefill.py --json prefill.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.budgets import CHUNK, GROUP, HEAD_SIZE, KV_HEADS, LAYERS, SPREAD, WINDOW, layout_of
from benchmarks.timing import graph_microseconds
from kernels import RaggedLayout, ragged_append, ragged_attention, ragged_seal
from tangram.config import FUSED_SCORERS, PROFILE_SCORERS

CALLS = 10


def microseconds(call: Callable[[], Any]) -> float:
    """Of one call among several in a graph, so that the graph's own start does not count."""
    return graph_microseconds(lambda: [call() for _ in range(CALLS)]) / CALLS


class Prefill:
    """Requests that each bring ``step`` tokens to a history of ``cached``."""

    def __init__(self, layout: RaggedLayout, requests: int, cached: int, step: int) -> None:
        self.layout = layout
        width = layout.width(cached + step)
        pages = width * requests
        shape = (pages, KV_HEADS, layout.page_tokens, 2 * HEAD_SIZE)
        self.pool = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        self.rows = torch.randperm(pages, device="cuda").to(torch.int32).view(requests, width)
        self.seq_lens = torch.full((requests,), cached + step, dtype=torch.int32, device="cuda")
        self.starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * step
        self.tier = torch.arange(KV_HEADS, dtype=torch.int32, device="cuda")
        tokens = requests * step
        self.query = torch.randn(tokens, KV_HEADS * GROUP, HEAD_SIZE, dtype=torch.bfloat16, device="cuda")
        self.key = torch.randn(tokens, KV_HEADS, HEAD_SIZE, dtype=torch.bfloat16, device="cuda")
        self.out = torch.empty_like(self.query)
        sealed = layout.sealed(cached)
        kept = sum(layout.keep) / len(layout.keep)
        history = sealed * kept + cached - sealed * CHUNK
        self.pairs = tokens * (history + (step + 1) / 2)  # of query and key, a head
        self.keys = round(history + (step + 1) / 2)

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        return self.rows, self.starts, self.seq_lens, self.tier, self.tier

    def attend(self) -> None:
        ragged_attention(
            self.out, self.query, self.pool, *self.tables, self.layout, HEAD_SIZE**-0.5, singles=False
        )

    def append(self) -> None:
        ragged_append(self.key, self.key, self.pool, *self.tables, self.layout)


def flash_microseconds(queries: int, keys: int, requests: int) -> float:
    """FlashAttention over dense tensors, query heads' keys shared as ours."""
    shape = (requests, KV_HEADS * GROUP, queries, HEAD_SIZE)
    query = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    key = torch.randn(requests, KV_HEADS, keys, HEAD_SIZE, dtype=torch.bfloat16, device="cuda")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return microseconds(lambda: scaled_dot_product_attention(query, key, key, enable_gqa=True))


def seal_microseconds(layout: RaggedLayout, due: int, scorer: str) -> float:
    """All heads of all layers of one chunk of so many requests."""
    members = LAYERS * KV_HEADS // len(layout.keep)
    width = layout.ring_pages + layout.pages_per_chunk
    shape = (width * due, members, layout.page_tokens, 2 * HEAD_SIZE)
    pool = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    rows = torch.randperm(width * due, device="cuda").to(torch.int32).view(due, width)
    chunks = torch.tensor([[request, 0] for request in range(due)], dtype=torch.int32, device="cuda")
    heads = torch.full((layout.tiers,), members, dtype=torch.int32, device="cuda")
    how: dict[str, Any] = {"values": FUSED_SCORERS[scorer]}
    if scorer in PROFILE_SCORERS:
        how["asked"] = torch.randn(due, layout.tiers, members, HEAD_SIZE, device="cuda")
    return microseconds(lambda: ragged_seal(pool, rows, chunks, heads, layout, 4, **how))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    print("retention  requests  cached  step   append us  attend us  TFLOP/s  flash us  TFLOP/s")
    for retention in (1.0, 0.25):
        layout = layout_of(SPREAD[retention])
        for requests, cached, step in (
            (1, 0, 512),
            (1, 7 * 512 + WINDOW, 512),
            (1, 62 * 512 + WINDOW, 512),
            (1, 62 * 512 + WINDOW, 64),
            (4, 3 * 512 + WINDOW, 512),
            (16, 7 * 512 + WINDOW, 512),
        ):
            case = Prefill(layout, requests, cached, step)
            attend, append = microseconds(case.attend), microseconds(case.append)
            work = 4 * case.pairs * HEAD_SIZE * KV_HEADS * GROUP
            flash = flash_microseconds(step, case.keys, requests)
            dense = 4 * requests * step * case.keys * HEAD_SIZE * KV_HEADS * GROUP
            rates = (work / attend / 1e6, dense / flash / 1e6)
            results.append(
                {"retention": retention, "requests": requests, "cached": cached, "step": step}
                | {"append_us": append, "attend_us": attend, "tflops": rates[0]}
                | {"flash_us": flash, "flash_tflops": rates[1]}
            )
            print(
                f"{retention:9.2f} {requests:9d} {cached:7d} {step:5d} {append:11.1f} {attend:10.1f}"
                f" {rates[0]:8.0f} {flash:9.1f} {rates[1]:8.0f}"
            )
    seals: dict[str, dict[int, float]] = {scorer: {} for scorer in FUSED_SCORERS}
    for due in (1, 4, 16):
        for scorer, took in seals.items():
            took[due] = seal_microseconds(layout_of(SPREAD[0.25]), due, scorer)
            what = f"{due} chunks of {CHUNK} tokens, {LAYERS} layers of {KV_HEADS} heads"
            print(f"seal by {scorer}, {what}: {took[due]:.0f} us")
    if arguments.json:
        report = {"device": torch.cuda.get_device_name(), "prefill": results, "seal_us": seals}
        arguments.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
