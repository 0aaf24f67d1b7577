"""What the engine tells about its memory, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from tangram.config import TangramConfig
from tangram.geometry import Geometry
from tangram.profile import ModelShape

KINDS = ("ring", "sealed", "resident", "prefix", "free")
"""What a page can be held by: the raw tail or the sealed chunks of a running request, an idle conversation
only, a shared prefix only, nobody. A page with several owners counts once, under the first of these."""


@dataclass(frozen=True)
class Sequence:
    """A row of pages in the pool.

    Attributes:
        state: "running", "resident" (idle, kept for its next turn) or "prefix" (kept to be shared).
        tokens: tokens with a slot in the cache, counted before compression.
        pages: of its row.
        idle_seconds: since when it is idle; None while running.
        shared_pages: of ``pages``, those that other rows hold too.
        resumes_at: tokens that whoever continues it need not compute, at most: what the row holds. None
            while running.
        pinned: whether it stays when room is made for others.
        engine: number of the engine core whose pool it lies in (:mod:`tangram.engines`).
    """

    id: str
    state: str
    tokens: int
    sealed_chunks: int
    pages: int
    idle_seconds: float | None
    shared_pages: int = 0
    resumes_at: int | None = None
    pinned: bool = False
    engine: int = 0


@dataclass(frozen=True)
class CacheSnapshot:
    """The scheduler's view of the pool at one moment.

    Attributes:
        counters: since the engine's start.
        pages: by kind, see ``KINDS``; adds up to ``total_pages``.
        running, waiting: requests, as the scheduler counts them.
    """

    total_pages: int
    free_pages: int
    sequences: list[Sequence]
    counters: dict[str, int]
    pages: dict[str, int] = field(default_factory=dict)
    running: int = 0
    waiting: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any], engine: int = 0) -> CacheSnapshot:
        """The inverse of :meth:`to_dict`, of the engine that it came from."""
        sequences = [Sequence(**{**sequence, "engine": engine}) for sequence in data["sequences"]]
        return cls(**{**data, "sequences": sequences})

    def held(self, *states: str) -> int:
        """Sequences in any of these states."""
        return sum(sequence.state in states for sequence in self.sequences)


@dataclass(frozen=True)
class TierUse:
    """What the heads of one tier have in the pool, summed over sequences; each head has the same.

    Attributes:
        kept: tokens that the heads see.
        pages: of the tier.
        chunks: sealed chunks.
        raw: of ``kept``, the tokens that are not sealed.
    """

    kept: int
    pages: int
    chunks: int
    raw: int


def tier_use(geometry: Geometry, sequences: Iterable[Sequence], tier: int) -> TierUse:
    """Sum up one tier. What a sequence's row holds beyond its sealed chunks is its ring, in which every tier
    has the same number of pages."""
    chunks = raw = ring = 0
    for seq in sequences:
        chunks += seq.sealed_chunks
        held = seq.tokens if seq.resumes_at is None else seq.resumes_at
        raw += max(0, held - seq.sealed_chunks * geometry.chunk)
        ring += (seq.pages - seq.sealed_chunks * geometry.pages_per_chunk) // geometry.num_tiers
    keep = geometry.keep[tier]
    pages = ring + chunks * keep // geometry.page_tokens
    return TierUse(kept=chunks * keep + raw, pages=pages, chunks=chunks, raw=raw)


def heads_report(geometry: Geometry, sequences: list[Sequence], budgets: list[list[float]]) -> dict[str, Any]:
    """[layers][kv_heads] tables, summed over the sequences.

    ``tokens_kept``: tokens that the head sees. ``pages``: of its tier; a page belongs to each head of its
    tier, so this shows what a head's tier costs, not a partition, and a page that several sequences share
    counts for each. ``waste``: token slots in those pages beyond what the head's own budget asks for and
    keeps: ``pages * B - chunks * min(keep, budget * C) - raw``.
    """
    use = [tier_use(geometry, sequences, tier) for tier in range(geometry.num_tiers)]

    def waste(tier: int, budget: float) -> float:
        of = use[tier]
        asked = of.chunks * min(float(geometry.keep[tier]), budget * geometry.chunk) + of.raw
        return round(of.pages * geometry.page_tokens - asked, 3)

    return {
        "budget": budgets,
        "tier": [list(row) for row in geometry.head_tier],
        "tokens_kept": [[use[tier].kept for tier in row] for row in geometry.head_tier],
        "pages": [[use[tier].pages for tier in row] for row in geometry.head_tier],
        "waste": [
            [waste(tier, budget) for tier, budget in zip(row, wanted, strict=True)]
            for row, wanted in zip(geometry.head_tier, budgets, strict=True)
        ],
    }


def model_report(shape: ModelShape) -> dict[str, Any]:
    """The model, as every report names it."""
    return {
        "name": shape.name,
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "head_size": shape.head_size,
        "dtype": shape.dtype,
        "max_model_len": shape.max_model_len,
    }


def pool_report(snapshot: CacheSnapshot, geometry: Geometry) -> dict[str, Any]:
    """Pages of the pool by what holds them. ``resident_pages`` counts all that only idle rows hold."""
    pages = dict.fromkeys(KINDS, 0) | snapshot.pages
    return {
        "total_pages": snapshot.total_pages,
        "free_pages": snapshot.free_pages,
        "running_pages": pages["ring"] + pages["sealed"],
        "resident_pages": pages["resident"] + pages["prefix"],
        "page_bytes": geometry.page_bytes,
        "pages": pages,
    }


def memory_report(
    snapshot: CacheSnapshot,
    geometry: Geometry,
    shape: ModelShape,
    config: TangramConfig,
    budgets: list[list[float]],
    now: float,
    sequence: str | None = None,
) -> dict[str, Any]:
    """The body of ``GET /tangram/memory``: a heat map's worth of numbers for every head.

    Args:
        now: Unix seconds.
        sequence: the id of one sequence, which ``heads``, ``sequences`` and the bytes are then restricted to
            (there can be two: a preempted request leaves a row of its name); None sums over all.
    """
    pool = pool_report(snapshot, geometry)
    chosen = [seq for seq in snapshot.sequences if sequence in (None, seq.id)]
    used = (
        pool["running_pages"] + pool["resident_pages"] if sequence is None else sum(s.pages for s in chosen)
    )
    return {
        "time": now,
        "model": model_report(shape),
        "config": config.to_dict(),
        "geometry": geometry.to_dict(),
        "pool": pool,
        "heads": heads_report(geometry, chosen, budgets),
        "sequences": [asdict(seq) for seq in chosen],
        # A prefix row holds tokens of conversations, which count them themselves.
        "full_cache_bytes": sum(
            geometry.full_bytes(seq.tokens) for seq in chosen if sequence is not None or seq.state != "prefix"
        ),
        "used_bytes": used * geometry.page_bytes,
        "counters": snapshot.counters,
    }
