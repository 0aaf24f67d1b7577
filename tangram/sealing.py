"""Sealing: choose the tokens of a chunk that each head keeps, and write them to their pages.

Plain torch, one request at a time: a chunk is sealed once in its life, so this is far off the hot path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tangram.errors import CacheIntegrityError
from tangram.geometry import Geometry
from tangram.mean_queries import MeanQueries
from tangram.ranks import ALONE, Ranks
from tangram.rotary import Rotary
from tangram.scorers import Chunk, Need, Scorer


@dataclass(frozen=True)
class Observed:
    """What scorers need of the model's forward pass before a boundary.

    Attributes:
        queries: [layers, w, query heads, head_size] of the last ``w`` tokens before the boundary, rotated.
        scale: float32 [layers], what each layer's attention multiplies its logits by.
        rotary: None where the model has none, or the scorer does not ask.
    """

    queries: torch.Tensor
    scale: torch.Tensor
    rotary: Rotary | None = None


def comparable(scores: torch.Tensor) -> torch.Tensor:
    """A copy in which what is not a number ranks last."""
    return scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def select(scores: torch.Tensor, keep: int, sink: int) -> torch.Tensor:
    """Which tokens of a chunk to keep.

    Args:
        scores: [heads, tokens], the higher, the rather kept.
        keep: tokens to keep, a head.
        sink: so many leading tokens always win.

    Returns:
        [heads, keep], int64, rising: kept tokens stay in the order of their positions. Equal scores
        are decided in favour of the earlier token, so that the outcome is one only.
    """
    scores = comparable(scores)
    scores[:, :sink] = torch.inf
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[:, :keep].sort(dim=-1).values


def seal_chunk(
    pool: torch.Tensor,
    row: torch.Tensor,
    geometry: Geometry,
    chunk: int,
    sink: int,
    scorer: Scorer,
    observed: Observed | None = None,
    ranks: Ranks = ALONE,
    mean_queries: MeanQueries | None = None,
) -> None:
    """Seal one chunk of one request, for all tiers.

    Args:
        pool: [pages, group_size, page_tokens, 2 * head_size].
        geometry: this rank's.
        row: page ids of the request; must reach the chunk's sealed pages.
        chunk: its index; its tokens and those up to its boundary must be in the ring.
        sink: leading tokens of the sequence that always win (only chunk 0 has them).
        observed: for scorers that need queries.
        ranks: whose heads these are, and who else has some of each layer.
        mean_queries: of all ranks' heads, for scorers that need them.

    Raises:
        CacheIntegrityError: the scorer needs something that is not given.
    """
    size, length = geometry.page_tokens, geometry.chunk
    sink = max(0, min(length, sink - chunk * length))
    query = None
    if Need.MEAN_QUERY in scorer.needs and mean_queries is not None:
        query = mean_queries.behind(geometry.boundary(chunk))
    view = _ChunkView(pool, row, geometry, chunk, sink, scorer.needs, observed, ranks, query)
    averaged = _layer_scores(view, scorer) if scorer.whole_layer and min(geometry.keep) < length else None
    for index, tier in enumerate(geometry.tiers):
        states = view.raw(index, chunk * length, length)
        if tier.keep < length:
            part = view.chunk(index, states)
            scores = scorer(part) if averaged is None else averaged[part.layers]
            kept = select(scores, tier.keep, sink)
            states = states.gather(1, kept.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
        target = [geometry.sealed_index(chunk, index, j) for j in range(0, tier.keep, size)]
        pages = states.reshape(len(tier.heads), len(target), size, -1).transpose(0, 1)
        pool[row[target].long(), : len(tier.heads)] = pages


def _layer_scores(view: _ChunkView, scorer: Scorer) -> torch.Tensor:
    """[layers, tokens]: scores averaged over the KV heads of each layer, which tiers and ranks scatter."""
    geometry = view.geometry
    table = view.pool.new_empty(geometry.layers, geometry.kv_heads, geometry.chunk, dtype=torch.float32)
    for index in range(geometry.num_tiers):
        part = view.chunk(index, view.raw(index, view.first, geometry.chunk))
        table[part.layers, part.heads - view.first_head] = scorer(part)
    return view.ranks.gathered(table).mean(dim=1)


@dataclass(frozen=True)
class _ChunkView:
    """Reads one chunk of one request out of the pool, tier by tier; see :func:`seal_chunk`."""

    pool: torch.Tensor
    row: torch.Tensor
    geometry: Geometry
    index: int
    sink: int
    needs: frozenset[Need]
    observed: Observed | None
    ranks: Ranks
    mean_query: torch.Tensor | None

    @property
    def first_head(self) -> int:
        """The model's number, in each layer, of this rank's first head."""
        return self.ranks.rank * self.geometry.kv_heads

    @property
    def first(self) -> int:
        """Position of the chunk's first token."""
        return self.index * self.geometry.chunk

    def raw(self, tier: int, first: int, count: int) -> torch.Tensor:
        """[heads, count, 2 * head_size] of raw tokens from ``first``, which starts a page."""
        g, heads = self.geometry, len(self.geometry.tiers[tier].heads)
        ring = [g.ring_index(p, tier) for p in range(first, first + count, g.page_tokens)]
        pages = self.pool[self.row[ring].long(), :heads]  # [pages, heads, page_tokens, 2 * head_size]
        return pages.transpose(0, 1).reshape(heads, len(ring) * g.page_tokens, -1)[:, :count]

    def chunk(self, tier: int, states: torch.Tensor) -> Chunk:
        """What the scorer needs of a tier's heads, whose raw tokens are ``states``."""
        g, device = self.geometry, states.device
        layers, heads = torch.tensor(g.tiers[tier].heads, device=device).unbind(dim=1)
        keys, values = states.float().split(g.head_size, dim=-1)
        behind, boundary = self.first + g.chunk, g.boundary(self.index)
        recent = queries = asked_at = scale = rotary = None
        if Need.RECENT in self.needs:
            recent = self.raw(tier, behind, g.window)[..., : g.head_size].float()
        if Need.QUERIES in self.needs:
            if self.observed is None:
                raise CacheIntegrityError(f"chunk {self.index} came to be sealed without its queries")
            seen = self.observed.queries.unflatten(2, (g.kv_heads, -1))  # [layers, w, kv_heads, group, D]
            queries = seen[layers, :, heads].transpose(1, 2).float()
            asked_at = torch.arange(boundary - queries.shape[2], boundary, device=device)
            scale, rotary = self.observed.scale[layers], self.observed.rotary
        return Chunk(
            layers=layers,
            heads=heads + self.first_head,
            keys=keys,
            sink=self.sink,
            values=values if Need.VALUES in self.needs else None,
            positions=torch.arange(self.first, behind, device=device)
            if Need.POSITIONS in self.needs
            else None,
            recent=recent,
            queries=queries,
            query_positions=asked_at,
            scale=scale,
            rotary=rotary if Need.ROTARY in self.needs else None,
            mean_query=None if self.mean_query is None else self.mean_query[layers, heads + self.first_head],
        )
