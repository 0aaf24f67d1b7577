"""A worker that keeps note of what it seals, in a cache whose unwritten slots are NaN."""

from __future__ import annotations

from typing import Any

from tangram import drift_sampler, sealer, sealing
from tangram.cpu_worker import TangramCPUWorker
from tangram.geometry import Geometry
from tangram.ranks import ALONE, Ranks

drift_sampler.LEAST_SECONDS, drift_sampler.MOST_OF_TIME = 0.0, 1e9  # answers take less than a second

Kept = dict[str, list[int]]
kept: list[Kept] = []
"""For each chunk in the order of sealing: "layer/KV head of the model" to the positions that it keeps."""


class WatchedWorker(TangramCPUWorker):
    """See the module."""

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> Any:
        found = super().initialize_from_config(*args, **kwargs)
        for cache in self.model_runner.kv_caches:
            cache.fill_(float("nan"))
        return found

    def kept(self) -> list[Kept]:
        """What this rank's heads kept since the last time."""
        found = list(kept)
        kept.clear()
        return found


def _watch() -> None:
    """Have sealing noted, in this process."""
    seal_chunk, select = sealer.seal_chunk, sealing.select
    chosen: list[Any] = []

    def noted_select(*args: Any) -> Any:
        chosen.append(select(*args))
        return chosen[-1]

    def noted_seal(pool: Any, row: Any, geometry: Geometry, *rest: Any) -> None:
        chosen.clear()
        seal_chunk(pool, row, geometry, *rest)
        ranks = next((one for one in rest if isinstance(one, Ranks)), ALONE)
        first = ranks.rank * geometry.kv_heads
        picked = iter(chosen)
        found: Kept = {}
        for tier in geometry.tiers:
            if tier.keep < geometry.chunk:
                for (layer, head), positions in zip(tier.heads, next(picked).tolist(), strict=True):
                    found[f"{layer}/{first + head}"] = positions
        kept.append(found)

    sealing.select, sealer.seal_chunk = noted_select, noted_seal


_watch()
