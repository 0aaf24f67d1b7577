"""Key norm: keep the keys of small L2 norm, which attract high attention (arXiv 2406.11430)."""

from __future__ import annotations

import torch

from tangram.scorers.base import Chunk, Scorer


def knorm(chunk: Chunk) -> torch.Tensor:
    """Minus the L2 norm of each key."""
    return -chunk.keys.norm(dim=-1)


SCORER = Scorer("knorm", frozenset(), knorm)
