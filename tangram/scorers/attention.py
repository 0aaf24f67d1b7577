"""Attention of the last queries over a chunk and the raw window behind it, as the model computes it."""

from __future__ import annotations

import torch

from tangram.scorers.base import Chunk, Need, present


def mean_attention(chunk: Chunk, last: int | None = None) -> torch.Tensor:
    """Softmax weights over every token from the chunk's first to the boundary, averaged over the query heads
    of the group and the last queries.

    Args:
        chunk: with recent keys, queries and positions.
        last: only so many of the last queries; all of them when None.

    Returns:
        float32 [heads, tokens + window]. A query sees no token behind its own; chunks sealed before are left
        out of the sum, so that the choice depends on this chunk alone.
    """
    queries = present(chunk.queries, Need.QUERIES)
    asked_at = present(chunk.query_positions, Need.QUERIES)
    scale = present(chunk.scale, Need.QUERIES)
    if last is not None:
        queries, asked_at = queries[:, :, -last:], asked_at[-last:]
    keys = torch.cat([chunk.keys, present(chunk.recent, Need.RECENT)], dim=1)
    first = present(chunk.positions, Need.POSITIONS)[0]
    at = first + torch.arange(keys.shape[1], device=keys.device)
    unseen = at > asked_at[:, None]
    total = torch.zeros_like(keys[..., 0])
    for asked in (queries * scale.view(-1, 1, 1, 1)).unbind(dim=1):  # one at a time, to stay in the caches
        logits = (asked @ keys.transpose(1, 2)).masked_fill_(unseen, -torch.inf)
        total += logits.softmax(dim=-1).sum(dim=1)
    return total / (queries.shape[1] * queries.shape[2])
