"""``keyvalue`` joined by the query to expect: keep, too, keys that the mean query of a head points to.

What a head asks for on average hardly depends on the text, so it is calibrated with the budgets (see
docs/calibration.md) and the score stays one of keys and values. As in expected attention (arXiv 2510.00636)
the mean query is taken without its rotation and rotated by the mean rotation of the positions to come; its
covariance is left out, and so is the softmax, which changes no order. All three orders count alike.
"""

from __future__ import annotations

import torch

from kernels import fallback
from tangram.scorers.base import Chunk, Need, Scorer, present


def keyvalue_query(chunk: Chunk) -> torch.Tensor:
    """How many tokens of a head rank lower by KeyDiff, have a smaller value (2-norm), and a smaller product
    of key and mean query, added up: from 0 to 3 (tokens - 1). Sink tokens are above all others in each."""
    values, query = present(chunk.values, Need.VALUES), present(chunk.mean_query, Need.MEAN_QUERY)
    return fallback.keyvalue(chunk.keys, values, chunk.sink, query)


SCORER = Scorer("keyvalue_query", frozenset({Need.VALUES, Need.MEAN_QUERY}), keyvalue_query)
