"""KeyDiff: keep the keys that point away from the mean key direction (arXiv 2504.15364).

Keys only, so it works for generated text as for prompts and costs nothing before the seal.
"""

from __future__ import annotations

import torch

from kernels import fallback
from tangram.scorers.base import Chunk, Scorer


def keydiff(chunk: Chunk) -> torch.Tensor:
    """Minus the cosine between each key and the mean of the unit keys of its head; from -1 to 1."""
    return fallback.keydiff(chunk.keys)


SCORER = Scorer("keydiff", frozenset(), keydiff)
