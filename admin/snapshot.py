"""The engine's memory report, checked once and typed for everything that draws it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from admin.errors import BadSnapshot
from admin.text import times_less_text

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Heads:
    """Per-head values, each ``layers`` rows of ``kv_heads`` numbers, summed over the pool's sequences."""

    budget: Matrix
    tokens_kept: Matrix
    pages: Matrix
    tier: Matrix
    waste: Matrix


@dataclass(frozen=True)
class Pool:
    """Pages of the pool by what holds them: ``ring`` and ``sealed`` are of running requests, ``resident`` of
    idle conversations, ``prefix`` of prefixes that several share."""

    total: int
    free: int
    ring: int
    sealed: int
    resident: int
    prefix: int
    page_bytes: int

    @property
    def running(self) -> int:
        """Pages of running requests."""
        return self.ring + self.sealed

    @property
    def idle(self) -> int:
        """Pages that nobody uses now, and that are kept."""
        return self.resident + self.prefix

    @property
    def used(self) -> int:
        """All that are not free."""
        return self.total - self.free


@dataclass(frozen=True)
class SequenceRow:
    """One sequence that holds pages; ``idle_seconds`` is ``None`` while it runs."""

    id: str
    state: str
    tokens: int
    sealed_chunks: int
    pages: int
    idle_seconds: float | None
    pinned: bool = False
    engine: int = 0


@dataclass(frozen=True)
class MemorySnapshot:
    """One answer of ``GET /tangram/memory``. Times are Unix seconds, sizes are bytes.

    ``group_size`` and ``scorer`` are those in force; in ``config`` they are ``None`` and ``auto`` when the
    engine chose by itself. ``scorer`` is empty where an engine of another release does not tell.
    ``engines``: how many there are, each with a pool of its own; all here is the sum of them.
    """

    time: float
    model: Mapping[str, Any]
    config: Mapping[str, Any]
    layers: int
    kv_heads: int
    group_size: int
    tier_keep: tuple[int, ...]
    tier_heads: tuple[int, ...]
    page_tokens: int
    chunk: int
    pool: Pool
    heads: Heads
    sequences: tuple[SequenceRow, ...]
    full_cache_bytes: int
    used_bytes: int
    counters: Mapping[str, int]
    engines: int = 1
    scorer: str = ""

    @property
    def less_than_full(self) -> str:
        """How many times less than a full cache is in use; "" where that is none, or where nothing is sealed
        yet: what is less then is the rounding to pages."""
        sealed = any(row.sealed_chunks for row in self.sequences)
        return times_less_text(self.full_cache_bytes, self.used_bytes) if sealed else ""

    @property
    def share(self) -> Matrix:
        """Share of the pool that each head's part of its tier's pages is: over all heads these add up to what
        the sequences hold. A page that several sequences share counts for each."""
        total = max(1, self.pool.total)
        return tuple(
            tuple(
                pages / (max(1, self.tier_heads[int(tier)]) * total)
                for pages, tier in zip(row, tiers, strict=True)
            )
            for row, tiers in zip(self.heads.pages, self.heads.tier, strict=True)
        )

    @property
    def pinned_pages(self) -> int:
        """Pages of pinned idle conversations."""
        return sum(row.pages for row in self.sequences if row.pinned and row.state != "running")

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> MemorySnapshot:
        """Check and convert a report; raises :class:`BadSnapshot` that names the field."""
        model = _mapping(data, "model")
        geometry = _mapping(data, "geometry")
        layers, kv_heads = _integer(model, "layers"), _integer(model, "kv_heads")
        heads = _mapping(data, "heads")
        pool = _mapping(data, "pool")
        kinds = _mapping(pool, "pages")
        return cls(
            time=_number(data, "time"),
            model=model,
            config=_mapping(data, "config"),
            layers=layers,
            kv_heads=kv_heads,
            group_size=_integer(geometry, "group_size"),
            tier_keep=tuple(_integer(tier, "keep") for tier in _mappings(geometry, "tiers")),
            tier_heads=tuple(len(tier.get("heads", ())) for tier in _mappings(geometry, "tiers")),
            page_tokens=_integer(geometry, "page_tokens"),
            chunk=_integer(geometry, "chunk"),
            pool=Pool(
                total=_integer(pool, "total_pages"),
                free=_integer(pool, "free_pages"),
                ring=_integer(kinds, "ring"),
                sealed=_integer(kinds, "sealed"),
                resident=_integer(kinds, "resident"),
                prefix=_integer(kinds, "prefix"),
                page_bytes=_integer(pool, "page_bytes"),
            ),
            heads=Heads(
                budget=_matrix(heads, "budget", layers, kv_heads),
                tokens_kept=_matrix(heads, "tokens_kept", layers, kv_heads),
                pages=_matrix(heads, "pages", layers, kv_heads),
                tier=_matrix(heads, "tier", layers, kv_heads),
                waste=_matrix(heads, "waste", layers, kv_heads),
            ),
            sequences=tuple(_sequence(row) for row in _mappings(data, "sequences")),
            full_cache_bytes=_integer(data, "full_cache_bytes"),
            used_bytes=_integer(data, "used_bytes"),
            counters={str(key): int(value) for key, value in _mapping(data, "counters").items()},
            engines=max(1, len(_mappings(data, "engines"))) if "engines" in data else 1,
            scorer=str(data.get("scorer", "")),
        )


def _sequence(row: Mapping[str, Any]) -> SequenceRow:
    idle = row.get("idle_seconds")
    return SequenceRow(
        id=str(row.get("id", "")),
        state=str(row.get("state", "")),
        tokens=_integer(row, "tokens"),
        sealed_chunks=_integer(row, "sealed_chunks"),
        pages=_integer(row, "pages"),
        idle_seconds=None if idle is None else _number(row, "idle_seconds"),
        pinned=bool(row.get("pinned", False)),
        engine=_integer(row, "engine") if "engine" in row else 0,
    )


def _mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key)
    if not isinstance(value, Mapping):
        raise BadSnapshot(f"memory report: {key} must be an object")
    return value


def _mappings(data: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    value = data.get(key)
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise BadSnapshot(f"memory report: {key} must be a list of objects")
    return value


def _number(data: Mapping[str, Any], key: str) -> float:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadSnapshot(f"memory report: {key} must be a number")
    return float(value)


def _integer(data: Mapping[str, Any], key: str) -> int:
    value = _number(data, key)
    if value < 0 or value != int(value):
        raise BadSnapshot(f"memory report: {key} must be a whole number of at least 0")
    return int(value)


def _matrix(data: Mapping[str, Any], key: str, rows: int, columns: int) -> Matrix:
    value = data.get(key)
    if not isinstance(value, list) or len(value) != rows:
        raise BadSnapshot(f"memory report: heads.{key} must have {rows} rows")
    for row in value:
        if not isinstance(row, list) or len(row) != columns:
            raise BadSnapshot(f"memory report: heads.{key} must have {columns} columns")
        if not all(isinstance(cell, int | float) and math.isfinite(cell) for cell in row):
            raise BadSnapshot(f"memory report: heads.{key} must hold numbers")
    return tuple(tuple(row) for row in value)
