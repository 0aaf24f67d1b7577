"""Looks at the keys of some of the chunks that are sealed, for :mod:`tangram.drift`.

Between two steps, rarely, and without waiting for the device: on a GPU the shares are copied in its own time
and read before a later step.
"""

from __future__ import annotations

import time

import torch

from tangram.drift import DriftMeter
from tangram.geometry import Geometry
from tangram.key_needs import key_scores, shares_above
from tangram.ranks import ALONE, Ranks
from tangram.wide import Bounds

LEAST_SECONDS = 0.25
MOST_OF_TIME = 0.01
"""The share of the time that looking at keys may take, on the host."""
HEADS_AT_ONCE = 16
"""So many heads' keys are copied at once, as float32: memory that vLLM has not counted."""


class DriftSampler:
    """One per worker.

    Args:
        geometry: this rank's.
        meter: gets the needs of each chunk that is looked at; None on all ranks but the first.
        every: of so many sealed chunks one is looked at, at most.
        ranks: what is among the best of all heads' only all of them can tell.
    """

    def __init__(
        self,
        geometry: Geometry,
        meter: DriftMeter | None,
        every: int,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        self.geometry, self.meter, self.every, self.ranks = geometry, meter, every, ranks
        self._members = [torch.tensor(tier.heads, device=device).unbind(dim=1) for tier in geometry.tiers]
        self._pages = torch.arange(geometry.chunk // geometry.page_tokens, device=device)
        self._sealed = every - 1  # the first one is looked at
        self._crossed: dict[int, int] = {}
        self._next = 0.0
        self._host: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def between_steps(self, pool: torch.Tensor, rows: torch.Tensor, bounds: Bounds) -> None:
        """Look at one chunk, if it is time to.

        Args:
            pool: [pages, group_size, page_tokens, 2 * head_size].
            rows: int32 [requests, width], page ids.
            bounds: of the step to come.
        """
        self._read()
        due = self._copied is None and time.monotonic() >= self._next
        if not due and self.ranks.count == 1:
            self._crossed = {}
            return
        # What the steps tell is the same on all ranks, what clocks tell is not.
        chosen = self._choose(bounds)
        if chosen is None or not self.ranks.agreed(due):
            return
        began = time.monotonic()
        self._look(pool, rows[chosen[0]], chosen[1])
        now = time.monotonic()
        self._next = now + max(LEAST_SECONDS, (now - began) / MOST_OF_TIME)

    def _choose(self, bounds: Bounds) -> tuple[int, int] | None:
        """(row, first position) of a chunk that has just been sealed, or is about to be: of a request that
        stands at a boundary, or crossed some in the step before, inside the layers. Such a one is known by
        its length alone; should another have the same, its keys are live ones too."""
        g, found = self.geometry, None
        for row, start in enumerate(bounds.starts):
            chunk = g.sealing(start)
            sealed = self._crossed.get(start, 0) if chunk is None else 1
            if sealed:
                self._sealed += sealed
                # The last whole pages: a ring holds more than a chunk.
                last = start - start % g.page_tokens - g.chunk
                found = (row, last if chunk is None else chunk * g.chunk)
        self._crossed = {}
        for start, end in zip(bounds.starts, bounds.ends, strict=True):
            if end - start > 1 and (crossed := g.sealed(end - 1) - g.sealed(start)) > 0:
                self._crossed[end] = crossed
        if found is None or self._sealed < self.every:
            return None
        self._sealed = 0
        return found

    def _look(self, pool: torch.Tensor, row: torch.Tensor, first: int) -> None:
        g = self.geometry
        scores = pool.new_empty(g.layers * g.kv_heads, g.chunk, dtype=torch.float32)
        slots = (self._pages + first // g.page_tokens) % g.ring_slots * g.num_tiers
        for tier, (layers, heads) in enumerate(self._members):
            pages = row[slots + tier].long()
            for begin in range(0, len(layers), HEADS_AT_ONCE):
                part = slice(begin, min(begin + HEADS_AT_ONCE, len(layers)))
                keys = pool[:, part, :, : g.head_size][
                    pages
                ].float()  # [pages, heads, page_tokens, head_size]
                keys = keys.transpose(0, 1).flatten(1, 2)
                scores[layers[part] * g.kv_heads + heads[part]] = key_scores(layers[part], heads[part], keys)
        scores = self.ranks.gathered(scores.unflatten(0, (g.layers, g.kv_heads))).flatten(0, 1)
        if self.meter is None:
            return
        shares = shares_above(scores)
        if not shares.is_cuda:
            self._tell(shares)
            return
        if self._host is None:
            self._host = torch.empty(shares.shape, dtype=shares.dtype, pin_memory=True)
        self._host.copy_(shares, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def _read(self) -> None:
        """Tell the meter what the device has copied by now."""
        if self._copied is not None and self._host is not None and self._copied.query():
            self._copied = None
            self._tell(self._host)

    def _tell(self, shares: torch.Tensor) -> None:
        if self.meter is not None:
            self.meter.observe(shares.double().reshape(self.geometry.layers, -1).numpy())
