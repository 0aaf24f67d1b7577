"""How a decode step launches its attention on a GPU: what writing the new token and the launch itself cost.

A step of the Qwen3-4B shape (32 query heads, 8 KV heads of 128, bfloat16): in each layer a small kernel
writes queries, keys and values side by side, as a model's own kernels do, then they are appended and
attended. All ways take turns in one run, each in a graph of its own; figures are medians, in microseconds a
layer.

    small       the small kernels alone
    separate    one launch writes the new token, another attends
    fused       one launch does both
    dependent   it begins while the launch before it is ending, and waits for that first
    early       the same, and it reads the step's tables before it waits

Before anything is timed, all ways must leave the same bits as "separate", in the outputs and in the pool.

    python benchmarks/cuda_launches.py --json launches.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.budgets import GROUP, HEAD_SIZE, SPREAD, layout_of
from benchmarks.cases import Case, spread_case
from benchmarks.checks import Disagreement, our_kernels
from benchmarks.timing import alternate, capture, device_sampler
from kernels import ragged_append_attention
from kernels.choice import DECODE_LAUNCHES
from kernels.cuda import dispatch


class Decoding:
    """A case's layers with a small kernel in front of each."""

    def __init__(self, case: Case) -> None:
        self.case = case
        requests = len(case.lengths)
        shape = (requests, case.kv_heads * (GROUP + 2), HEAD_SIZE)
        random = torch.Generator().manual_seed(1)
        self.source = torch.randn(shape, generator=random).to(case.query.device, case.query.dtype)
        self.packed = torch.empty_like(self.source)
        parts = [case.kv_heads * GROUP, case.kv_heads, case.kv_heads]
        self.query, self.key, self.value = self.packed.split(parts, dim=1)

    def small(self) -> None:
        """The small kernels of all layers."""
        for _ in range(self.case.layers):
            torch.mul(self.source, 0.5, out=self.packed)

    def step(self) -> None:
        """All layers."""
        case = self.case
        for tier, member in case.tables:
            torch.mul(self.source, 0.5, out=self.packed)
            batch = (case.pool, case.rows, case.starts, case.seq_lens, tier, member, case.layout)
            given = (case.out, self.query, self.key, self.value)
            ragged_append_attention(*given, *batch, HEAD_SIZE**-0.5, max_query=1)

    def newest(self) -> list[tuple[torch.Tensor, ...]]:
        """Where the pool holds the newest tokens of each layer, as an index of it."""
        case = self.case
        last = case.seq_lens.long() - 1
        page, slots = case.layout.page_tokens, case.layout.ring_slots
        found = []
        for tier, member in case.tables:
            entry = (last // page % slots * case.layout.tiers)[:, None] + tier
            pages = case.rows.gather(1, entry).long()
            found.append((pages, member.long(), (last % page)[:, None]))
        return found

    def left_by(self, replay: Callable[[], Any]) -> list[torch.Tensor]:
        """What a step leaves where there was nothing: the last layer's output, the newest tokens."""
        case, places = self.case, self.newest()
        case.out.fill_(torch.nan)
        for place in places:
            case.pool[place] = torch.nan
        replay()
        return [case.out.clone(), *(case.pool[place] for place in places)]


def ways(case: Case) -> dict[str, Callable[[], Any]]:
    """A captured step for each way to launch it.

    Raises:
        Disagreement: one leaves other bits.
    """
    decoding = Decoding(case)
    replays: dict[str, Callable[[], Any]] = {"small": capture(decoding.small)}
    wanted: list[torch.Tensor] = []
    for name in DECODE_LAUNCHES:
        with patch.object(dispatch, "launch", lambda name=name: name):
            replays[name] = capture(decoding.step)
            left = decoding.left_by(replays[name])
        wanted = wanted or left
        if not all(torch.equal(one, other) for one, other in zip(left, wanted, strict=True)):
            raise Disagreement(f"{name}: it leaves other bits than {DECODE_LAUNCHES[0]}")
    return replays


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["1x2048", "1x32768", "16x8192", "64x2048", "64x32768"])
    parser.add_argument("--retention", type=float, default=0.25, choices=list(SPREAD))
    parser.add_argument("--gib", type=float, default=40.0, help="GPU memory for the pool")
    parser.add_argument("--rounds", type=int, default=15, help="times that all ways take turns")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    memory = torch.empty(int(arguments.gib * 2**29), dtype=torch.bfloat16, device=device).normal_()
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU: the times mean nothing"
    print(f"{name}; our kernels: {our_kernels(memory)}")
    print(f"{'case':<12}" + "".join(f"{way:>11}" for way in ("small", *DECODE_LAUNCHES)))
    rows = []
    for text in arguments.cases:
        batch, context = (int(part) for part in text.split("x"))
        lengths = [context - (index * 97) % max(1, context // 8) for index in range(batch)]
        case = spread_case(layout_of(SPREAD[arguments.retention]), lengths, memory)
        try:
            samplers = {way: device_sampler(replay) for way, replay in ways(case).items()}
        except Disagreement as error:
            sys.exit(str(error))
        times = alternate(samplers, arguments.rounds)
        us = {way: time / case.layers for way, time in times.items()}
        print(f"{text:<12}" + "".join(f"{time:>11.2f}" for time in us.values()), flush=True)
        rows.append({"batch": batch, "context": context, "layers": case.layers, "us": us})
    if arguments.json:
        report = {"device": name, "retention": arguments.retention, "cases": rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
