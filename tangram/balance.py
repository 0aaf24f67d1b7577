"""How evenly a decode step's reading is shared out, from the formula: what ``kernels/cuda/share.cuh`` does.

All heads' histories of a layer are laid end to end in units of 16 tokens and cut into equal runs, one for
each block. With one block a head instead, all would wait for the head that keeps most. With tensor
parallelism each rank shares out its own heads, and after every layer all wait for the one that reads most.
"""

from __future__ import annotations

from dataclasses import dataclass

from tangram.geometry import Geometry, ceil_div, rank_of

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
    """Of a conversation of ``tokens`` tokens, at least 1, on so many blocks of each rank."""
    cut = unsplit = 0.0
    kept = [ceil_div(geometry.kept_tokens(tokens, tier), UNIT) for tier in range(geometry.num_tiers)]
    for row in geometry.head_tier:
        units = [kept[tier] for tier in row]
        shares = [0] * geometry.ranks
        for head, count in enumerate(units):
            shares[rank_of((0, head), geometry.kv_heads, geometry.ranks)] += count
        runs = [max(LEAST_RUN, ceil_div(share, blocks)) for share in shares]
        used = sum(ceil_div(share, run) for share, run in zip(shares, runs, strict=True))
        cut += sum(shares) / (used * max(runs))
        unsplit += sum(units) / (len(units) * max(units))
    return Balance(cut / geometry.layers, unsplit / geometry.layers)
