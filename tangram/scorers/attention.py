"""Attention of the last queries over a chunk and the raw window behind it, as the model computes it."""

from __future__ import annotations

import torch

from tangram.scorers.base import Chunk, Need, present


def observed_attention(chunk: Chunk, last: int | None = None) -> torch.Tensor:
    """Softmax weights of the last queries before the boundary over every token from the chunk's first on.

    Args:
        chunk: with recent keys, queries and positions.
        last: only so many of the last queries; all of them when None.

    Returns:
        float32 [heads, group, queries, tokens + window]. A query sees no token behind its own; chunks sealed
        before are left out of the sum, so that the choice depends on this chunk alone.
    """
    queries = present(chunk.queries, Need.QUERIES)
    asked_at = present(chunk.query_positions, Need.QUERIES)
    scale = present(chunk.scale, Need.QUERIES)
    if last is not None:
        queries, asked_at = queries[:, :, -last:], asked_at[-last:]
    keys = torch.cat([chunk.keys, present(chunk.recent, Need.RECENT)], dim=1)
    heads, group, count, size = queries.shape
    logits = torch.bmm(queries.reshape(heads, group * count, size), keys.transpose(1, 2))
    logits = logits.view(heads, group, count, -1) * scale.view(-1, 1, 1, 1)
    first = present(chunk.positions, Need.POSITIONS)[0]
    at = first + torch.arange(keys.shape[1], device=keys.device)
    logits.masked_fill_(at > asked_at[:, None], -torch.inf)
    return logits.softmax(dim=-1)
