"""KeyDiff: keep the keys that point away from the mean key direction (arXiv 2504.15364).

Keys only, so it works for generated text as for prompts and costs nothing before the seal.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cosine_similarity, normalize

from tangram.scorers.base import Chunk, Scorer


def keydiff(chunk: Chunk) -> torch.Tensor:
    """Minus the cosine between each key and the mean of the unit keys of its head; from -1 to 1."""
    anchor = normalize(chunk.keys, dim=-1).mean(dim=-2, keepdim=True)
    return -cosine_similarity(chunk.keys, anchor, dim=-1)


SCORER = Scorer("keydiff", frozenset(), keydiff)
