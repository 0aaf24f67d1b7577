"""KeyDiff joined by the norm of the value: keep keys that point away from the mean, and values that weigh.

KeyDiff (arXiv 2504.15364) tells how a key differs, and nothing of what a query that finds it gets. What
attention adds to its output is a value times a weight, so of two keys that differ alike the longer value is
the greater loss. Both orders count alike: a token's score is the sum of its places in them, which needs no
common scale.

Keys and values only, so it works for generated text as for prompts and costs nothing before the seal.
"""

from __future__ import annotations

import torch

from kernels import fallback
from tangram.scorers.base import Chunk, Need, Scorer, present


def keyvalue(chunk: Chunk) -> torch.Tensor:
    """How many tokens of a head rank lower by KeyDiff, and how many have a smaller value (2-norm), added up:
    from 0 to 2 (tokens - 1). Sink tokens are above all others in both."""
    return fallback.keyvalue(chunk.keys, present(chunk.values, Need.VALUES), chunk.sink)


SCORER = Scorer("keyvalue", frozenset({Need.VALUES}), keyvalue)
