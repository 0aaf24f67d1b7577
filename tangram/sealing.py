"""Sealing: choose the tokens of a chunk that each head keeps, and write them to their pages.

Plain torch, one request at a time: a chunk is sealed once in its life, so this is far off the hot path.
"""

from __future__ import annotations

import torch

from tangram.geometry import Geometry
from tangram.scorers import Scorer


def select(keys: torch.Tensor, keep: int, sink: int, scorer: Scorer) -> torch.Tensor:
    """Which tokens of a chunk to keep.

    Args:
        keys: [heads, tokens, head_size].
        keep: tokens to keep, a head.
        sink: so many leading tokens always win.
        scorer: see :mod:`tangram.scorers`.

    Returns:
        [heads, keep], int64, rising: kept tokens stay in the order of their positions. Equal scores
        are decided in favour of the earlier token, so that the outcome is one only.
    """
    scores = scorer(keys.float())
    scores[:, :sink] = torch.inf
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[:, :keep].sort(dim=-1).values


def seal_chunk(
    pool: torch.Tensor, row: torch.Tensor, geometry: Geometry, chunk: int, sink: int, scorer: Scorer
) -> None:
    """Seal one chunk of one request, for all tiers.

    Args:
        pool: [pages, group_size, page_tokens, 2 * head_size].
        row: page ids of the request; must reach the chunk's sealed pages.
        chunk: its index; all its tokens must be in the ring.
        sink: leading tokens of the sequence that always win (only chunk 0 has them).
    """
    size, length = geometry.page_tokens, geometry.chunk
    first = chunk * length
    sink = max(0, min(length, sink - first))
    for index, tier in enumerate(geometry.tiers):
        heads = len(tier.heads)
        ring = [geometry.ring_index(p, index) for p in range(first, first + length, size)]
        raw = pool[row[ring].long(), :heads]  # [pages, heads, page_tokens, 2 * head_size]
        states = raw.transpose(0, 1).reshape(heads, length, -1)
        if tier.keep < length:
            kept = select(states[..., : geometry.head_size], tier.keep, sink, scorer)
            states = states.gather(1, kept.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
        target = [geometry.sealed_index(chunk, index, j) for j in range(0, tier.keep, size)]
        pages = states.reshape(heads, len(target), size, -1).transpose(0, 1)
        pool[row[target].long(), :heads] = pages
