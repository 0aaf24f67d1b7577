"""What the engine tells about its memory, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tangram.config import TangramConfig
from tangram.geometry import Geometry
from tangram.profile import ModelShape


@dataclass(frozen=True)
class Sequence:
    """A conversation in the pool.

    Attributes:
        state: "running" or "resident" (idle, kept for its next turn).
        tokens: tokens with a slot in the cache, counted before compression.
        idle_seconds: since when it is resident; None while running.
    """

    id: str
    state: str
    tokens: int
    sealed_chunks: int
    pages: int
    idle_seconds: float | None


@dataclass(frozen=True)
class CacheSnapshot:
    """The scheduler's view of the pool at one moment."""

    total_pages: int
    free_pages: int
    sequences: list[Sequence]
    counters: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CacheSnapshot:
        """The inverse of :meth:`to_dict`."""
        sequences = [Sequence(**sequence) for sequence in data["sequences"]]
        return cls(int(data["total_pages"]), int(data["free_pages"]), sequences, dict(data["counters"]))


def memory_report(
    snapshot: CacheSnapshot,
    geometry: Geometry,
    shape: ModelShape,
    config: TangramConfig,
    budgets: list[list[float]],
    now: float,
) -> dict[str, Any]:
    """The body of ``GET /tangram/memory``: a heat map's worth of numbers for every head.

    Tokens and pages of a head are sums over all sequences in the pool. A page belongs to each head of its
    tier, so the map of pages shows what a head's tier costs, not a partition.
    """
    tier_tokens = [
        sum(geometry.kept_tokens(seq.tokens, tier) for seq in snapshot.sequences)
        for tier in range(geometry.num_tiers)
    ]
    tier_pages = [
        sum(geometry.tier_pages(seq.tokens, tier) for seq in snapshot.sequences)
        for tier in range(geometry.num_tiers)
    ]
    by_state = {
        state: sum(seq.pages for seq in snapshot.sequences if seq.state == state)
        for state in ("running", "resident")
    }
    return {
        "time": now,
        "model": {
            "name": shape.name,
            "layers": shape.layers,
            "kv_heads": shape.kv_heads,
            "head_size": shape.head_size,
            "dtype": shape.dtype,
            "max_model_len": shape.max_model_len,
        },
        "config": config.to_dict(),
        "geometry": geometry.to_dict(),
        "pool": {
            "total_pages": snapshot.total_pages,
            "free_pages": snapshot.free_pages,
            "running_pages": by_state["running"],
            "resident_pages": by_state["resident"],
            "page_bytes": geometry.page_bytes,
        },
        "heads": {
            "budget": budgets,
            "tier": [list(row) for row in geometry.head_tier],
            "tokens_kept": [[tier_tokens[tier] for tier in row] for row in geometry.head_tier],
            "pages": [[tier_pages[tier] for tier in row] for row in geometry.head_tier],
        },
        "sequences": [asdict(seq) for seq in snapshot.sequences],
        "full_cache_bytes": sum(geometry.full_bytes(seq.tokens) for seq in snapshot.sequences),
        "used_bytes": sum(seq.pages for seq in snapshot.sequences) * geometry.page_bytes,
        "counters": snapshot.counters,
    }


LENGTHS = (4096, 16384, 65536)
"""Conversation lengths, tokens, at which a preview is worked out."""


MANY_GROUPS = 12
"""Page tables of sliding-window layers from which on a preview warns."""


def preview_report(
    geometry: Geometry, shape: ModelShape, budgets: list[list[float]], pool_bytes: int
) -> dict[str, Any]:
    """The body of ``POST /tangram/preview``: what a configuration would cost, from the formula alone."""
    flat = [budget for row in budgets for budget in row]
    kept = [tier.keep / geometry.chunk for tier in geometry.tiers]
    # Tokens of a tier beyond what its members' own budgets ask for, as a share of what the tier keeps.
    excess = sum(
        max(0.0, kept[index] - budgets[layer][head])
        for index, tier in enumerate(geometry.tiers)
        for layer, head in tier.heads
    )
    total = sum(kept[index] * len(tier.heads) for index, tier in enumerate(geometry.tiers))
    warnings = []
    if geometry.group_size * 6 > geometry.layers * geometry.kv_heads:
        warnings.append("groups of more than a sixth of all heads were seen to lose recall")
    if geometry.budget < 0.2:
        warnings.append("below a retention of 0.2 recall of details was seen to suffer")
    if geometry.window_groups > MANY_GROUPS:
        warnings.append(
            f"the sliding-window layers need {geometry.window_groups} page tables a conversation, which "
            "costs time at every step: pages of more tokens need fewer"
        )
    if max(flat) - min(flat) < 1e-9 and geometry.budget < 0.999:
        warnings.append("no calibrated profile: all heads keep the same, which loses recall of details")
    return {
        "geometry": geometry.to_dict(),
        "heads": {"budget": budgets},
        "bytes_at": {str(n): geometry.bytes(n) for n in LENGTHS},
        "full_bytes_at": {str(n): geometry.full_bytes(n) for n in LENGTHS},
        "conversations_at": {str(n): pool_bytes // geometry.bytes(n) for n in LENGTHS},
        "ring_bytes": geometry.ring_pages * geometry.page_bytes,
        "row_width": geometry.pages(shape.max_model_len),
        "fragmentation": min(1.0, excess / total),
        "warnings": warnings,
    }
