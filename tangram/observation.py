"""The last queries before a seal boundary, kept as the forward pass computes them.

Scorers that rank by attention need, when chunk ``k`` is sealed at ``b = (k + 1) * C + W``, the queries of
positions ``b - w .. b - 1``. A query exists only while its token is computed, so each layer's forward pass
copies them aside; the seal between two steps reads them and gives their room back. Prompts and generated
text are the same here.

The worker does not know requests by name. It knows a request by the first page of its row, which nobody else
has while it lives. What an earlier owner of the page left behind is told by the positions: queries are added
only to those of the position right before, and only from ``b - w`` on does a new record begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tangram.errors import CacheIntegrityError
from tangram.geometry import Geometry

NULL_PAGE = 0
"""vLLM's page of padding: the first page of no request."""

PATIENCE = 64
"""Steps with room for all after which a request that was in none of them is taken to have ended."""


@dataclass
class _Record:
    """Queries of one request.

    Attributes:
        slot: its place in the storage.
        boundary: the seal that they are for.
        end: the position behind the last one; they begin at ``boundary - w``.
        seen: calm steps when it was last added to.
    """

    slot: int
    boundary: int
    end: int
    seen: int


@dataclass(frozen=True)
class Capture:
    """One step's copies: tokens of the batch to entries of the storage, the same for all layers.

    Attributes:
        storage: [layers, slots * w, query heads, head_size].
        layers: layer name to its index.
        tokens, entries: int64 [n].
    """

    storage: torch.Tensor
    layers: Mapping[str, int]
    tokens: torch.Tensor
    entries: torch.Tensor

    def keep(self, layer: str, query: torch.Tensor) -> None:
        """Copy what a seal will ask for out of a layer's queries, [tokens, query heads, head_size]."""
        self.storage[self.layers[layer]].index_copy_(0, self.entries, query.index_select(0, self.tokens))


class QueryRecorder:
    """Plans each step's copies and hands complete records to the seal.

    Args:
        layers: layer name to its index.
        heads: query heads of a layer.
        width: ``w``, at most the geometry's window.
        step_tokens: tokens that a step has room for. A request that runs is left out of a step only when
            there is no room, which is how records of requests that ended are told from those that wait.
    """

    def __init__(
        self,
        geometry: Geometry,
        layers: Mapping[str, int],
        heads: int,
        width: int,
        step_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._geometry = geometry
        self._layers = dict(layers)
        self._width = width
        self._step_tokens = step_tokens
        self._shape = (geometry.layers, 0, heads, geometry.head_size)
        self._storage = torch.empty(self._shape, dtype=dtype, device=device)
        self._records: dict[int, _Record] = {}
        self._free: list[int] = []
        self._calm = 0

    @property
    def slots(self) -> int:
        """Requests that there is room for now."""
        return self._storage.shape[1] // self._width

    def plan(self, pages: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> Capture | None:
        """What to copy in a step that takes each request from ``starts`` to ``ends`` tokens.

        Args:
            pages: first page of each request's row.

        Returns:
            None when no request of the step comes near a boundary.
        """
        tokens: list[int] = []
        entries: list[int] = []
        offset = 0
        self._calm += sum(ends) - sum(starts) < self._step_tokens
        for page, start, end in zip(pages, starts, ends, strict=True):
            if page != NULL_PAGE:
                boundary = self._geometry.next_boundary(start)
                begin = boundary - self._width
                low, high = max(start, begin), min(end, boundary)
                record = self._continued(page, boundary, low, fresh=start <= begin)
                if low < high and (record is not None or start <= begin):
                    record = record or self._begin(page, boundary)
                    record.end, record.seen = high, self._calm
                    first = record.slot * self._width - begin
                    tokens.extend(range(offset + low - start, offset + high - start))
                    entries.extend(range(first + low, first + high))
            offset += end - start
        if not tokens:
            return None
        device = self._storage.device
        return Capture(
            self._storage,
            self._layers,
            torch.tensor(tokens, device=device),
            torch.tensor(entries, device=device),
        )

    def take(self, page: int, boundary: int) -> torch.Tensor:
        """The queries of the last ``w`` tokens before a boundary, [layers, w, query heads, head_size]; read
        them before the next step. Their record is gone afterwards.

        Raises:
            CacheIntegrityError: not all of them were computed since the request began or was resumed.
        """
        record = self._records.get(page)
        if record is None or record.boundary != boundary or record.end != boundary:
            raise CacheIntegrityError(
                f"the seal at {boundary} tokens lacks queries of the {self._width} tokens before it: the "
                "request was resumed behind the first of them"
            )
        self._drop(page)
        begin = record.slot * self._width
        return self._storage[:, begin : begin + self._width]

    def _continued(self, page: int, boundary: int, low: int, fresh: bool) -> _Record | None:
        """The record that a step goes on with; one that it does not continue was somebody else's."""
        record = self._records.get(page)
        if record is None:
            return None
        if fresh or record.boundary != boundary or record.end != low:
            self._drop(page)
            return None
        return record

    def _begin(self, page: int, boundary: int) -> _Record:
        if not self._free:
            self._make_room()
        record = _Record(self._free.pop(), boundary, boundary - self._width, self._calm)
        self._records[page] = record
        return record

    def _drop(self, page: int) -> None:
        self._free.append(self._records.pop(page).slot)

    def _make_room(self) -> None:
        """Forget requests that must have ended; without one, double the storage."""
        for page in [p for p, record in self._records.items() if self._calm - record.seen >= PATIENCE]:
            self._drop(page)
        if self._free:
            return
        before = self.slots
        after = max(1, before * 2)
        grown = self._storage.new_empty(self._shape[0], after * self._width, *self._shape[2:])
        grown[:, : before * self._width] = self._storage
        self._storage = grown
        self._free = list(range(after - 1, before - 1, -1))
