"""How evenly a decode step's reading is shared out, from the formula: what ``kernels/cuda/share.cuh`` does.

All heads' histories of a layer are laid end to end in units of 16 tokens and cut into equal runs, one for
each block. With one block a head instead, all would wait for the head that keeps most.
"""

from __future__ import annotations

from dataclasses import dataclass

from tangram.geometry import Geometry, ceil_div

UNIT = 16
LEAST_RUN = 8
BLOCKS = 132
"""Blocks at once; an H100 has so many multiprocessors."""


@dataclass(frozen=True)
class Balance:
    """Mean over layers of the share of the blocks' time that is reading, for one conversation, from 0 to 1.

    Attributes:
        cut: with equal runs, as the kernel cuts them.
        unsplit: with one block a head.
    """

    cut: float
    unsplit: float


def balance(geometry: Geometry, tokens: int, blocks: int = BLOCKS) -> Balance:
    """Of a conversation of ``tokens`` tokens, at least 1, on so many blocks."""
    cut = unsplit = 0.0
    kept = [ceil_div(geometry.kept_tokens(tokens, tier), UNIT) for tier in range(geometry.num_tiers)]
    for row in geometry.head_tier:
        units = [kept[tier] for tier in row]
        total = sum(units)
        run = max(LEAST_RUN, ceil_div(total, blocks))
        cut += total / (ceil_div(total, run) * run)
        unsplit += total / (len(units) * max(units))
    return Balance(cut / geometry.layers, unsplit / geometry.layers)
