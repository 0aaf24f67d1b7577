"""StreamingLLM: keep the latest tokens (arXiv 2309.17453).

Every chunk keeps its end; with the sink tokens, which always win, and the raw window this is the published
pattern, repeated for each chunk.
"""

from __future__ import annotations

import torch

from tangram.scorers.base import Chunk, Need, Scorer, present


def streamingllm(chunk: Chunk) -> torch.Tensor:
    """The token's place in the chunk, the same for all heads."""
    positions = present(chunk.positions, Need.POSITIONS)
    return (positions - positions[0]).float().repeat(chunk.keys.shape[0], 1)


SCORER = Scorer("streamingllm", frozenset({Need.POSITIONS}), streamingllm)
