"""The engine cores behind one API server: one, or with ``--data-parallel-size N`` so many, each with a
scheduler, workers and a pool of its own.

vLLM runs those of a dense model as engines that know nothing of each other, and gives all of them one
instance id. So each answers on sockets of its own, and what is told of all is put together here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import tangram.workers
from tangram import control
from tangram.errors import EngineUnavailable
from tangram.geometry import Geometry
from tangram.telemetry import CacheSnapshot, pool_report

if TYPE_CHECKING:
    from vllm.config import VllmConfig

T = TypeVar("T")


def instance_of(instance: str, core: int) -> str:
    """The name under which a core of a vLLM instance answers; the first has the instance's own."""
    return f"{instance}_dp{core}" if core else instance


def own_instance(vllm_config: VllmConfig) -> str:
    """The name under which this process, a core's scheduler or worker, answers. A core of a dense model takes
    itself for the only one: just the index still tells which one it is."""
    return instance_of(vllm_config.instance_id, vllm_config.parallel_config.data_parallel_index)


class EngineCore:
    """One of them, as the API server asks it.

    Args:
        index: its number, from 0.
        ranks: of tensor parallelism, each with a worker.
    """

    def __init__(self, instance: str, index: int, ranks: int = 1) -> None:
        self.index = index
        self._ranks = ranks
        self._name = instance_of(instance, index)

    def ask(self, call: str, **options: Any) -> dict[str, Any]:
        """Ask its scheduler. Blocks. Raises EngineUnavailable."""
        return control.call(control.socket_path(self._name), call, **options)

    def snapshot(self, **options: Any) -> CacheSnapshot:
        """Its pool, now. Blocks. Raises EngineUnavailable."""
        return CacheSnapshot.from_dict(self.ask("memory", **options), self.index)

    def worker(self, timeout: float = control.TIMEOUT_SECONDS) -> dict[str, Any]:
        """What its workers say of themselves, as one. Blocks. Raises EngineUnavailable."""
        return tangram.workers.ask(self._name, self._ranks, timeout)


def of_each(cores: Sequence[EngineCore], ask: Callable[[EngineCore], T]) -> list[T]:
    """Ask all of them at once; the answers in their order. Blocks. Raises what the first one raised."""
    if len(cores) == 1:
        return [ask(cores[0])]
    with ThreadPoolExecutor(len(cores), "tangram-ask") as threads:
        return list(threads.map(ask, cores))


def evict(cores: Sequence[EngineCore], wanted: dict[str, Any]) -> dict[str, Any]:
    """Have every core evict what is asked; how many ``conversations`` and ``pages`` that were in all."""
    done = of_each(cores, lambda core: core.ask("evict", **wanted))
    return {name: sum(one[name] for one in done) for name in ("conversations", "pages")}


def pin(cores: Sequence[EngineCore], wanted: dict[str, Any]) -> dict[str, Any]:
    """Have the core that holds a conversation pin it; how many ``conversations`` that were, and why it was
    ``refused``, "" if it was not."""
    done = of_each(cores, lambda core: core.ask("pin", **wanted))
    refused = next((one["refused"] for one in done if one["refused"]), "")
    return {"conversations": sum(one["conversations"] for one in done), "refused": refused}


def workers(cores: Sequence[EngineCore], timeout: float) -> dict[str, Any] | None:
    """What the workers of all say, as one; None where one does not answer."""
    try:
        return merged_workers(of_each(cores, lambda core: core.worker(timeout=timeout)))
    except EngineUnavailable:
        return None


def merged(snapshots: Sequence[CacheSnapshot]) -> CacheSnapshot:
    """The pools of several cores as one: pages, requests and counters summed, the sequences of all."""
    if len(snapshots) == 1:
        return snapshots[0]
    return CacheSnapshot(
        total_pages=sum(one.total_pages for one in snapshots),
        free_pages=sum(one.free_pages for one in snapshots),
        sequences=[sequence for one in snapshots for sequence in one.sequences],
        counters=_summed([one.counters for one in snapshots]),
        pages=_summed([one.pages for one in snapshots]),
        running=sum(one.running for one in snapshots),
        waiting=sum(one.waiting for one in snapshots),
    )


def merged_workers(said: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of several cores' workers as one's (see :mod:`tangram.seal_meter`). Seals are summed. The
    drift is that of the core which is furthest off: each compares what it serves itself."""
    if len(said) == 1:
        return said[0]
    drifts = [one["drift"] for one in said if one.get("drift")]
    return {
        **said[0],
        "kernels": tangram.workers.kernels_of(said),
        "seals": sum(one["seals"] for one in said),
        "seconds": sum(one["seconds"] for one in said),
        "buckets": [sum(counts) for counts in zip(*(one["buckets"] for one in said), strict=True)],
        "drift": max(drifts, key=lambda drift: (drift["drift"] or 0.0, drift["chunks"]), default=None),
    }


def engines_report(snapshots: Sequence[CacheSnapshot], geometry: Geometry) -> list[dict[str, Any]]:
    """What each core has, for whoever chooses one for a new conversation."""
    return [
        {
            "engine": engine,
            "requests": {"running": one.running, "waiting": one.waiting},
            "conversations": one.held("resident"),
            "pool": pool_report(one, geometry),
        }
        for engine, one in enumerate(snapshots)
    ]


def _summed(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for one in counts for name in one)
    return {name: sum(one.get(name, 0) for one in counts) for name in names}
