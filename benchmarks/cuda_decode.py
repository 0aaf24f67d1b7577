"""Ragged decode attention on a GPU, beside a copy, evenly spread budgets, FlashAttention 3 and FlashInfer.

A decode step's attention for the Qwen3-4B shape (32 query heads, 8 KV heads of 128, bfloat16), over histories
whose heads keep very different shares. All candidates read the same memory and take turns in one run; figures
are medians, in microseconds a layer. Before anything is timed, each peer's output must agree with ours.

    ours        one captured graph of all layers, as in serving
    even        ours, the same kept tokens spread evenly over the heads
    fa3         FlashAttention 3 of vLLM, one sequence for each (request, KV head), in a graph; the fastest of
                vLLM's own way (32 splits, scheduled ahead) and its heuristics. Its schedule is not timed
    fa3 even    the same on evenly spread budgets
    fa3 stock   FlashAttention 3 on vLLM's own layout: one sequence for each request, as many bytes
    fi          FlashInfer on the same sequences, each layer planned for its own lengths, planning counted: by
                the host's clock until the GPU is done, the fastest of its modes
    fi plan     the host's time of the plans alone, in their fastest mode
    fi run      a graph of the runs alone, in their fastest mode

Budgets: "spread" gives all layers the same eight shares (4% to 70% at a mean of a quarter), "model" is a
whole model of 36 layers with parametric needs (`benchmarks/budgets.py` says which: they are not calibrated).

    python benchmarks/cuda_decode.py --quick --json decode.json
    python benchmarks/cuda_decode.py --peers none
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.budgets import (
    HEAD_SIZE,
    PAGE,
    SPREAD,
    even_layout,
    geometry_layout,
    layout_of,
    model_geometry,
)
from benchmarks.cases import Case, Sequences, by_head, cache_views, model_case, spread_case, stock_sequences
from benchmarks.checks import Disagreement, check, check_replays, our_kernels
from benchmarks.decode_report import bars, has_bars, heading, line, ways
from benchmarks.peers import (
    INFER_PLANS,
    PLANS,
    FlashAttention3,
    FlashInfer,
    PeerMissing,
    load_flash_attention,
    load_flashinfer,
)
from benchmarks.timing import Sampler, alternate, capture, copy_sampler, device_sampler, host_sampler

QUICK = {"contexts": [32768], "batches": [64, 8], "retentions": [0.25]}


@dataclass(frozen=True)
class Setting:
    """One row of the table. ``budgets`` is "spread" or "model"."""

    budgets: str
    context: int
    batch: int
    retention: float

    @property
    def lengths(self) -> list[int]:
        """Unequal lengths around the context, as in serving."""
        return [self.context - (index * 97) % max(1, self.context // 8) for index in range(self.batch)]

    def cases(self, page: int, memory: torch.Tensor) -> tuple[Case, Case]:
        """With its budgets, and with as many kept tokens spread evenly.

        Raises:
            MemoryError: they do not fit.
        """
        if self.budgets == "spread":
            layout = layout_of(SPREAD[self.retention], page)
            spread, even = (spread_case(one, self.lengths, memory) for one in (layout, even_layout(layout)))
            return spread, even
        geometry = model_geometry(self.retention, page)
        layout = geometry_layout(geometry)
        spread, even = (
            model_case(geometry, one, self.lengths, memory) for one in (layout, even_layout(layout))
        )
        return spread, even


def settings(arguments: argparse.Namespace) -> list[Setting]:
    """All rows, those of the bars first."""
    product = itertools.product(
        arguments.budgets, arguments.contexts, arguments.batches, arguments.retentions
    )
    every = [Setting(*one) for one in product]
    every = [one for one in every if one.budgets == "spread" or one.retention < 1]
    first = {32768: 0}
    return sorted(
        every, key=lambda one: (first.get(one.context, 1), one.retention != 0.25, one.batch not in (64, 8))
    )


def fastest(candidates: Mapping[str, Sampler]) -> str:
    """Name of the one that took least in three rounds."""
    times = alternate(candidates, 3)
    return min(times, key=lambda name: times[name])


class Row:
    """Everything that is timed for one setting: samplers, with the layers that each run has."""

    def __init__(self) -> None:
        self.samplers: dict[str, Sampler] = {}
        self.layers: dict[str, int] = {}
        self.how: dict[str, str] = {}
        self.errors: dict[str, float] = {}

    def add(self, name: str, layers: int, candidates: Mapping[str, Sampler]) -> None:
        """Time the fastest of these under a name."""
        chosen = fastest(candidates) if len(candidates) > 1 else next(iter(candidates))
        self.samplers[name], self.layers[name], self.how[name] = candidates[chosen], layers, chosen

    def measure(self, rounds: int) -> dict[str, float]:
        """Microseconds a layer."""
        times = alternate(self.samplers, rounds)
        return {name: taken / self.layers[name] for name, taken in times.items()}


def add_ours(row: Row, case: Case, even: Case) -> None:
    """Our kernel, on both distributions."""
    replay = capture(case.step)
    row.add("ours", case.layers, {"graph": device_sampler(replay)})
    row.add("ours_host", case.layers, {"graph": host_sampler(replay)})
    row.add("even", even.layers, {"graph": device_sampler(capture(even.step))})


def replays_well(name: str, way: str, case: Case, replay: Callable[[], Any], out: torch.Tensor) -> bool:
    """Whether a way to call a peer survives being replayed; it is left out otherwise, and that is said."""
    try:
        check_replays(f"{name}, {way}", case, replay, out)
    except Disagreement as problem:
        print(f"left out: {problem}", flush=True)
        return False
    return True


def add_flash_attention(row: Row, module: Any, case: Case, even: Case, memory: torch.Tensor) -> int:
    """FlashAttention 3 on both distributions and on the stock layout.

    Returns:
        Bytes of a layer of the stock layout.
    """
    out = torch.empty_like(case.out)
    for name, one in (("fa3", case), ("fa3_even", even)):
        query, into = by_head(one.query), by_head(out)
        layers = one.sequences()
        ways = {str(plan): FlashAttention3(module, layers, one.cache(), query, into, plan) for plan in PLANS}
        row.errors[name] = max(check(f"{name}, {way}", one, peer.attend, out) for way, peer in ways.items())
        replays = {way: capture(peer.step) for way, peer in ways.items()}
        replays = {
            way: replay for way, replay in replays.items() if replays_well(name, way, one, replay, out)
        }
        row.add(name, one.layers, {way: device_sampler(replay) for way, replay in replays.items()})
    stock, stock_bytes = stock_sequences(case, memory, case.layers)
    cache = cache_views(memory, case.layout.page_tokens, case.kv_heads, HEAD_SIZE)
    samplers = {
        str(plan): device_sampler(capture(FlashAttention3(module, stock, cache, case.query, out, plan).step))
        for plan in PLANS
    }
    row.add("fa3_stock", len(stock), samplers)
    return stock_bytes


def add_flashinfer(row: Row, module: Any, case: Case, layers: list[Sequences]) -> None:
    """FlashInfer with its plans, its plans alone and its runs alone."""
    out = torch.empty_like(case.out)
    whole: dict[str, Sampler] = {}
    plans: dict[str, Sampler] = {}
    runs: dict[str, Sampler] = {}
    for plan in INFER_PLANS:
        peer = FlashInfer(module, layers, case.cache(), by_head(case.query), by_head(out), plan)
        row.errors[f"flashinfer, {plan}"] = check(f"flashinfer, {plan}", case, peer.attend, out)
        peer.planned_step()
        whole[f"{plan}, layer by layer"] = host_sampler(peer.planned_step)
        plans[str(plan)] = host_sampler(peer.plan_all)
        if not plan.fixed:  # an ordinary plan leaves its tables in new memory, which no graph can follow
            continue
        replay = capture(peer.step)
        check_replays(f"flashinfer, {plan}", case, replay, out)
        runs[str(plan)] = device_sampler(replay)
        whole[f"{plan}, all plans first, then one graph"] = host_sampler(planned_graph(peer, replay))
    row.add("flashinfer", case.layers, whole)
    row.add("flashinfer_plan", case.layers, plans)
    row.add("flashinfer_run", case.layers, runs)


def planned_graph(peer: FlashInfer, replay: Callable[[], Any]) -> Callable[[], None]:
    """All plans, then a graph of all runs: it reads what the plans leave."""

    def work() -> None:
        peer.plan_all()
        replay()

    return work


def measure(
    setting: Setting, memory: torch.Tensor, peers: Mapping[str, Any], page: int, rounds: int
) -> dict[str, Any]:
    """One row.

    Raises:
        MemoryError: it does not fit.
        Disagreement: a peer did other work.
    """
    row = Row()
    sample, copied = copy_sampler(memory)
    row.add("copy", 1, {"copy": sample})
    case, even = setting.cases(page, memory)
    add_ours(row, case, even)
    result = {
        "budgets": setting.budgets,
        "context": setting.context,
        "batch": setting.batch,
        "retention": setting.retention,
        "layers": case.layers,
        "bytes": case.layer_bytes,
        "even_bytes": even.layer_bytes,
    }
    if "fa3" in peers:
        result["stock_bytes"] = add_flash_attention(row, peers["fa3"], case, even, memory)
    if "flashinfer" in peers:
        add_flashinfer(row, peers["flashinfer"], case, case.sequences())
    times = row.measure(rounds)
    result["copy_bytes_a_second"] = copied / times.pop("copy") * 1e6
    return result | {"us": times, "how": row.how, "relative_errors": row.errors}


def load_peers(arguments: argparse.Namespace) -> dict[str, Any]:
    """The peers asked for, loaded and used once, so that no compilation is timed.

    Raises:
        PeerMissing: one cannot be loaded.
    """
    loads: dict[str, Callable[[], Any]] = {
        "fa3": load_flash_attention,
        "flashinfer": lambda: load_flashinfer(arguments.flashinfer_modules),
    }
    peers = {}
    for name in arguments.peers:
        if name != "none":
            start = time.perf_counter()
            peers[name] = loads[name]()
            print(f"{name}: loaded in {time.perf_counter() - start:.1f} s", flush=True)
    return peers


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rows that fit, until the time is up."""
    started = time.perf_counter()
    peers = load_peers(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    memory = torch.empty(int(arguments.gib * 2**29), dtype=torch.bfloat16, device=device).normal_()
    kind = our_kernels(memory)
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU: the times mean nothing"
    print(f"{name}; our kernels: {kind}")
    print(heading(), flush=True)
    rows: list[dict[str, Any]] = []
    left: list[str] = []
    for setting in settings(arguments):
        if time.perf_counter() - started > arguments.limit_s:
            left.append(f"{setting}: no time left")
            continue
        try:
            rows.append(measure(setting, memory, peers, arguments.page, arguments.rounds))
            print(line(rows[-1]), flush=True)
        except (MemoryError, torch.OutOfMemoryError) as error:
            left.append(f"{setting}: {error}")
        gc.collect()  # graphs and their memory
        save(arguments.json, {"device": name, "kernels": kind, "cases": rows})  # should a later row fail
    judged = bars(rows)
    for row in filter(has_bars, rows):
        print(ways(row))
    for verdict in judged:
        print(verdict)
    for reason in left:
        print(f"left out: {reason}")
    print(f"took {time.perf_counter() - started:.0f} s")
    return {
        "device": name,
        "kernels": kind,
        "cases": rows,
        "bars": [vars(one) for one in judged],
        "left_out": left,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the rows of the bars only")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32768, 131072])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--retentions", type=float, nargs="+", default=[1.0, 0.5, 0.25], choices=list(SPREAD))
    parser.add_argument("--budgets", nargs="+", default=["spread", "model"], choices=["spread", "model"])
    parser.add_argument(
        "--peers", nargs="+", default=["fa3", "flashinfer"], choices=["fa3", "flashinfer", "none"]
    )
    parser.add_argument(
        "--flashinfer-modules", type=Path, help="what benchmarks/flashinfer_modules.py compiled"
    )
    parser.add_argument("--page", type=int, default=PAGE, help="tokens of a page")
    parser.add_argument("--gib", type=float, default=90.0, help="GPU memory for the pool")
    parser.add_argument("--rounds", type=int, default=7, help="times that all candidates take turns")
    parser.add_argument("--limit-s", type=float, default=210.0, help="start no further row after so long")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        vars(arguments).update(QUICK)
    try:
        result = run(arguments)
    except (PeerMissing, Disagreement) as error:
        sys.exit(str(error))
    save(arguments.json, result)


def save(path: Path | None, result: dict[str, Any]) -> None:
    """Write all figures, where that was asked for."""
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
