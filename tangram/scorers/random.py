"""Random: a floor that any real score must beat.

The score is a hash of layer, head and position rather than a draw from a generator: which tokens are kept
may depend neither on who shares the batch nor on how often a conversation was resumed.
"""

from __future__ import annotations

import torch

from tangram.scorers.base import Chunk, Need, Scorer, present

# Products of a number below 2^32 with one of these stay below 2^63, so that int64 arithmetic is exact.
_LAYER, _HEAD, _MIX = 0x6C8E9CF5, 0x51A7B0D3, (0x7FEB352D, 0x46CA6B4B)
_WORD = 0xFFFFFFFF


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Scatter 32-bit numbers: rounds of xor-shift and multiply, each of which loses nothing."""
    for multiplier in _MIX:
        x = ((x ^ (x >> 16)) * multiplier) & _WORD
    return x ^ (x >> 15)


def random(chunk: Chunk) -> torch.Tensor:
    """Uniform in [0, 1) by (layer, head, position)."""
    positions = present(chunk.positions, Need.POSITIONS)
    seed = _mixed((chunk.layers * _LAYER + chunk.heads * _HEAD) & _WORD)
    # The upper 24 bits, which float32 holds exactly.
    return (_mixed((seed[:, None] + positions) & _WORD) >> 8).float() / 2**24


SCORER = Scorer("random", frozenset({Need.POSITIONS}), random)
