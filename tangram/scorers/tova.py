"""TOVA: keep what the very last query attends to, all heads of a layer together (arXiv 2401.06104)."""

from __future__ import annotations

import torch

from tangram.scorers.attention import mean_attention
from tangram.scorers.base import Chunk, Need, Scorer


def tova(chunk: Chunk) -> torch.Tensor:
    """Attention weight of the last query before the boundary, mean over the query heads of the group.

    The mean over the layer's KV heads, which completes the published score, is taken by the sealing.
    """
    return mean_attention(chunk, last=1)[:, : chunk.keys.shape[1]]


SCORER = Scorer("tova", frozenset({Need.RECENT, Need.QUERIES, Need.POSITIONS}), tova, whole_layer=True)
