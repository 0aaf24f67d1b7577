"""SnapKV: keep what the last queries attend to, with its neighbours (arXiv 2404.14469).

The observation window is ``query_window`` tokens before the seal boundary. The attention is pooled by a mean
over ``KERNEL`` neighbouring tokens, so that what is kept stays readable in its surroundings.
"""

from __future__ import annotations

import torch
from torch.nn.functional import avg_pool1d

from tangram.scorers.attention import mean_attention
from tangram.scorers.base import Chunk, Need, Scorer, present

KERNEL = 5


def snapkv(chunk: Chunk) -> torch.Tensor:
    """Mean attention weight over the last queries and the query heads of the group, pooled.

    The pooling runs on into the raw window, up to the observing tokens; beyond either end it counts zeros.
    """
    weights = mean_attention(chunk)
    observing = present(chunk.queries, Need.QUERIES).shape[2]
    seen = weights[:, : weights.shape[1] - observing]
    pooled = avg_pool1d(seen, KERNEL, stride=1, padding=KERNEL // 2)
    return pooled[:, : chunk.keys.shape[1]]


SCORER = Scorer("snapkv", frozenset({Need.RECENT, Need.QUERIES, Need.POSITIONS}), snapkv)
