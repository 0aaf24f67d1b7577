"""Head budgets for the kernel benchmarks: how much of each sealed chunk every head of a model keeps.

``SPREAD`` gives every layer the same eight shares, from 4% to 70% around a mean of a quarter.
``model_geometry`` gives the heads of a whole model different ones, as calibration does.

**No calibrated profile of a model with 36 layers of 8 KV heads exists here yet**, so that model's needs are
parametric: the 288 mid-quantiles of the arcsine distribution on 0..1, shuffled over the heads with a fixed
seed. Their standard deviation is 0.35, as was seen between the heads of two small models. The rest is the
product's own arithmetic: raised to the power that gives the retention, floor 0.05, tiers of a sixth of all
heads across layers, rounded to pages.
"""

from __future__ import annotations

import math
import random

from kernels import RaggedLayout
from tangram.config import TangramConfig
from tangram.geometry import Geometry, Tier, ceil_div
from tangram.profile import ModelShape, Profile, build_geometry

LAYERS, KV_HEADS, GROUP, HEAD_SIZE = 36, 8, 4, 128
"""Qwen3-4B: layers, KV heads of a layer, query heads of a KV head, elements of a head."""
PAGE, CHUNK, WINDOW, REWIND = 16, 512, 128, 64
ITEMSIZE = 2
TOKEN_BYTES = 2 * HEAD_SIZE * ITEMSIZE
"""Bytes of one token's key and value of one head."""

# Shares of a chunk that the heads of a layer keep, by their mean: spread like calibrated budgets.
SPREAD = {
    1.0: (1.0,) * 8,
    0.5: (0.12, 0.22, 0.34, 0.44, 0.55, 0.66, 0.79, 0.88),
    0.25: (0.04, 0.06, 0.09, 0.14, 0.2, 0.3, 0.47, 0.7),
}


def layout_of(shares: tuple[float, ...], page: int = PAGE) -> RaggedLayout:
    """One tier for each share of a chunk."""
    keep = tuple(max(1, round(share * CHUNK / page)) * page for share in shares)
    return RaggedLayout(page, ceil_div(CHUNK + WINDOW, page) + 1, CHUNK, WINDOW, keep, HEAD_SIZE)


def even_layout(spread: RaggedLayout) -> RaggedLayout:
    """The same kept tokens over all tiers, as evenly as pages allow."""
    total, tiers, page = sum(spread.keep) // spread.page_tokens, spread.tiers, spread.page_tokens
    keep = tuple((total // tiers + (index < total % tiers)) * page for index in range(tiers))
    return RaggedLayout(page, spread.ring_slots, spread.chunk, spread.window, keep, spread.head_size)


def tier_lengths(layout: RaggedLayout, tokens: int) -> list[int]:
    """Tokens that the query at the end of a sequence of ``tokens`` sees, for each tier."""
    sealed = layout.sealed(tokens - 1)
    return [sealed * keep + tokens - sealed * layout.chunk for keep in layout.keep]


def model_needs(layers: int = LAYERS, kv_heads: int = KV_HEADS) -> tuple[tuple[float, ...], ...]:
    """``[layers][kv_heads]`` shares of the cache that the heads need: see the module's text."""
    count = layers * kv_heads
    needs = [math.sin(math.pi * (index + 0.5) / (2 * count)) ** 2 for index in range(count)]
    random.Random(0).shuffle(needs)
    return tuple(tuple(needs[layer * kv_heads : (layer + 1) * kv_heads]) for layer in range(layers))


def model_profile() -> Profile:
    """The needs as a profile, without a spread between samples."""
    return Profile(model_needs(), ((0.0,) * KV_HEADS,) * LAYERS, source="parametric")


def model_config(retention: float, page: int = PAGE) -> TangramConfig:
    """The plugin's own configuration for it."""
    return TangramConfig(
        retention=retention, chunk=CHUNK, window=WINDOW, page_tokens=page, rewind=REWIND, scope="model"
    )


def longest_keep(budgets: str, retention: float, page: int = PAGE) -> int:
    """Tokens of a chunk that the head with the largest budget keeps, in whole pages, before tiers average
    heads. ``budgets`` is "spread" or "model"."""
    if budgets == "spread":
        return max(layout_of(SPREAD[retention], page).keep)
    shares = model_profile().budgets(retention, model_config(retention, page).alpha)
    return max(1, round(max(map(max, shares)) * CHUNK / page)) * page


def model_geometry(retention: float, page: int = PAGE) -> Geometry:
    """The cache of the whole model, with tiers across its layers."""
    shape = ModelShape("parametric", LAYERS, KV_HEADS, HEAD_SIZE, ITEMSIZE, "bfloat16", 131072)
    return build_geometry(model_config(retention, page), shape, model_profile())


def spread_geometry(retention: float, page: int = PAGE) -> Geometry:
    """The cache of a model whose layers all have the shares of ``SPREAD``: eight tiers, one head a layer."""
    keep = layout_of(SPREAD[retention], page).keep
    tiers = tuple(
        Tier(kept, tuple((layer, head) for layer in range(LAYERS))) for head, kept in enumerate(keep)
    )
    return Geometry(
        LAYERS, KV_HEADS, HEAD_SIZE, ITEMSIZE, page, CHUNK, WINDOW, REWIND, group_size=LAYERS, tiers=tiers
    )


def geometry_layout(geometry: Geometry) -> RaggedLayout:
    """What the kernels need of a geometry."""
    return RaggedLayout(
        geometry.page_tokens,
        geometry.ring_slots,
        geometry.chunk,
        geometry.window,
        geometry.keep,
        geometry.head_size,
    )
