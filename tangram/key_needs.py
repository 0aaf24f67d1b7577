"""What heads would need by a score of their keys alone, which an engine can afford to look at as it serves.

These needs give no budgets (docs/calibration.md says why). They tell whether live text is of the kind that a
profile was calibrated on: calibration notes them beside the oracle's, and :mod:`tangram.drift` compares.
"""

from __future__ import annotations

import torch

from tangram.profile_file import KEY_SHARE
from tangram.scorers import Chunk
from tangram.scorers.keydiff import keydiff
from tangram.sealing import comparable


def key_scores(layers: torch.Tensor, heads: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """float32 [heads, tokens].

    Args:
        layers, heads: int64 [heads], as :class:`tangram.scorers.Chunk` names them.
        keys: float32 [heads, tokens, head_size], rotated.
    """
    return keydiff(Chunk(layers=layers, heads=heads, keys=keys))


def shares_above(scores: torch.Tensor) -> torch.Tensor:
    """float32 [heads]: the share of each head's tokens that is among the best ``KEY_SHARE`` of all heads'.

    Nothing waits for the device.

    Args:
        scores: [heads, tokens] of one chunk.
    """
    flat = comparable(scores).flatten()
    kept = max(1, round(KEY_SHARE * flat.numel()))
    least = flat.kthvalue(flat.numel() - kept + 1).values
    return (scores >= least).float().mean(dim=-1)
