"""Times on a GPU: captured graphs, host time, and several candidates taking turns.

On a CPU the same calls run without a graph, so that a benchmark can be tried there; its figures mean nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Sampler = Callable[[], float]
"""Runs something once and says how many microseconds it took."""


def capture(work: Callable[[], Any]) -> Callable[[], Any]:
    """What replays the graph that is captured from ``work`` now, and keeps alive what the graph reads."""
    work()
    if not torch.cuda.is_available():
        return work
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()

    def replay(kept: Callable[[], Any] = work) -> None:
        graph.replay()

    return replay


def device_sampler(work: Callable[[], Any]) -> Sampler:
    """Of what ``work`` sends to the GPU, between two events."""
    if not torch.cuda.is_available():
        return host_sampler(work)

    def sample() -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1000

    return sample


def host_sampler(work: Callable[[], Any]) -> Sampler:
    """By the host's clock, from an idle GPU until it is idle again."""

    def sample() -> float:
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        return (time.perf_counter() - start) * 1e6

    return sample


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def alternate(candidates: Mapping[str, Sampler], rounds: int) -> dict[str, float]:
    """Median of each over rounds in which each runs once: what changes with time changes for all."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, sample in candidates.items():
            times[name].append(sample())
    return {name: statistics.median(taken) for name, taken in times.items()}


def graph_microseconds(work: Callable[[], Any], replays: int = 7) -> float:
    """Median time of a captured graph's replay."""
    return alternate({"": device_sampler(capture(work))}, replays)[""]


def copy_sampler(memory: torch.Tensor) -> tuple[Sampler, int]:
    """Four copies of up to 2 GiB, and the bytes that they read and write."""
    half = min(memory.numel() // 2, 2**30)
    source, target = memory[:half], memory[half : 2 * half]
    target.copy_(source)
    copies = 4
    work = device_sampler(lambda: [target.copy_(source) for _ in range(copies)])
    return work, 2 * copies * half * memory.element_size()
