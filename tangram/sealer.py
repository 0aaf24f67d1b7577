"""Between two steps: seals the chunks of requests that stand at a boundary, and plans which queries of the
step to come a later seal will ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from kernels import ragged_seal
from tangram import runtime
from tangram.config import FUSED_SCORERS
from tangram.drift import DriftMeter, reference
from tangram.drift_sampler import DriftSampler
from tangram.geometry import Geometry
from tangram.mean_queries import Asked, MeanQueries
from tangram.observation import NULL_PAGE, Capture, QueryRecorder
from tangram.ranks import ALONE, Ranks
from tangram.rotary import Rotary
from tangram.scorers import Need, get_scorer
from tangram.seal_meter import SealMeter
from tangram.sealing import Observed, seal_chunk
from tangram.wide import Bounds

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Sealer:
    """One per worker.

    Args:
        geometry: this rank's.
        layers: layer name to its index in the geometry.
        dtype: of keys, values and queries.
        meter: where the time of each seal is counted.
        ranks: this one and the others.

    Attributes:
        asked: what heads are asked on average, where the scorer looks at that.

    Raises:
        UnsupportedError: the scorer cannot be used with this model.
        ProfileError: the profile does not hold what the scorer needs.
    """

    def __init__(
        self,
        geometry: Geometry,
        layers: Mapping[str, int],
        vllm_config: VllmConfig,
        dtype: torch.dtype,
        device: torch.device,
        meter: SealMeter,
        ranks: Ranks = ALONE,
    ) -> None:
        own = runtime.active()
        self.geometry = geometry
        self.ranks = ranks
        self.meter = meter
        self.layout = runtime.kernel_layout(geometry)
        members = [len(tier.heads) for tier in geometry.tiers]
        self.members = torch.tensor(members, dtype=torch.int32, device=device)
        self.sink = own.config.sink
        self.scorer = get_scorer(own.scorer)
        self.recorder: QueryRecorder | None = None
        self.drift = self._drift(own, device)
        self.rotary: Rotary | None = None
        self.mean_queries: MeanQueries | None = None
        self.asked: Asked | None = None
        if min(geometry.keep) == geometry.chunk:
            return
        if self.scorer.needs & {Need.ROTARY, Need.MEAN_QUERY}:
            self.rotary = runtime.rotary_of(vllm_config, geometry.layers, device)
        if Need.MEAN_QUERY in self.scorer.needs:
            self.mean_queries = MeanQueries.of_profile(own.profile, self.rotary, device)
            self.asked = Asked(self.mean_queries, geometry, ranks)
        if Need.QUERIES not in self.scorer.needs:
            return
        impls = {
            index: vllm_config.compilation_config.static_forward_context[name].impl
            for name, index in layers.items()
        }
        self.scale = torch.tensor([impls[layer].scale for layer in range(geometry.layers)], device=device)
        scheduler = vllm_config.scheduler_config
        self.recorder = QueryRecorder(
            geometry,
            layers,
            heads=impls[0].num_heads,
            width=own.config.query_window,
            step_tokens=scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
            dtype=dtype,
            device=device,
        )

    def _drift(self, own: runtime.Runtime, device: torch.device) -> DriftSampler | None:
        """None where there is no profile, or nothing is ever dropped."""
        every = own.config.drift_every
        if not every or not own.config.uses_profile or min(self.geometry.keep) == self.geometry.chunk:
            return None
        if self.ranks.first:
            self.meter.drift = DriftMeter(reference(own.profile), own.config.drift_warning)
        return DriftSampler(self.geometry, self.meter.drift, every, device, self.ranks)

    def between_steps(self, pool: torch.Tensor, rows: torch.Tensor, bounds: Bounds) -> Capture | None:
        """Seal what is due before a step. Returns what the step's layers are to copy aside, if anything.

        Args:
            pool: [pages, group_size, page_tokens, 2 * head_size].
            rows: int32 [requests, width], page ids.
            bounds: of the step to come.
        """
        if self.drift is not None:
            self.drift.between_steps(pool, rows, bounds)
        # On a CPU this only reads; elsewhere only a scorer that needs queries has the page ids copied.
        pages = rows[: len(bounds.starts), 0].tolist() if self.recorder else []
        if pool.is_cuda and self.scorer.name in FUSED_SCORERS:
            self._seal_all(pool, rows, bounds.starts)
            return None
        for index, tokens in enumerate(bounds.starts):
            chunk = self.geometry.sealing(tokens)
            if chunk is None or (pages and pages[index] == NULL_PAGE):
                continue
            observed = None
            if self.recorder is not None:
                observed = Observed(self.recorder.take(pages[index], tokens), self.scale, self.rotary)
            with self.meter.timing():
                what = (self.geometry, chunk, self.sink, self.scorer)
                seal_chunk(pool, rows[index], *what, observed, self.ranks, self.mean_queries)
        return self.recorder.plan(pages, bounds.starts, bounds.ends) if self.recorder else None

    def _seal_all(self, pool: torch.Tensor, rows: torch.Tensor, starts: list[int]) -> None:
        """All chunks that are due, in one launch each for choosing and writing."""
        chunks = ((index, self.geometry.sealing(tokens)) for index, tokens in enumerate(starts))
        due = [(index, chunk) for index, chunk in chunks if chunk is not None]
        if due:
            with self.meter.timing():
                which = torch.tensor(due, dtype=torch.int32).to(pool.device, non_blocking=True)
                values, asked = FUSED_SCORERS[self.scorer.name], None
                if self.asked is not None:
                    asked = self.asked.of_tiers([chunk for _, chunk in due])
                how = (self.members, self.layout, self.sink)
                ragged_seal(pool, rows, which, *how, values=values, asked=asked)
