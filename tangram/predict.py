"""What a configuration will cost, from the formula alone: nothing is allocated, nothing is measured.

The console shows it before a change, and ``GET /tangram/profile`` for what runs. Notation as in
:mod:`tangram.geometry`; ``budget[h]`` is the share of a chunk that head h's own needs ask for, ``keep[t]``
the tokens that its tier keeps after averaging and rounding. A *slot* is the place of one head's ``B`` tokens
in a page, ``B * 2 * head_size * itemsize`` bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tangram.balance import balance
from tangram.config import TangramConfig
from tangram.geometry import Geometry, that_fit
from tangram.profile import ModelShape, Profile, build_geometry, in_force
from tangram.profile_file import Matrix

MANY_GROUPS = 12
"""Page tables of sliding-window layers above which there is a warning."""

LENGTHS = (4096, 16384, 65536)
"""Conversation lengths, tokens, see :func:`default_lengths`."""

NOTED_EXCESS = 0.25
"""A retention that is missed by more than this share is worth a warning."""

NOTED_PADDING = 0.05
"""Share of the sealed bytes from which on padding is worth a warning."""


def default_lengths(max_model_len: int) -> tuple[int, ...]:
    """Where a prediction is worked out when nobody names lengths, in tokens, rising: those of ``LENGTHS``
    that a conversation of the model can have, and its greatest."""
    return (*(n for n in LENGTHS if n < max_model_len), max_model_len)


@dataclass(frozen=True)
class AtLength:
    """A conversation of ``tokens`` tokens.

    Attributes:
        pages: pages(n), exactly what the engine will hold for it while it is being answered.
        bytes: the same in bytes of pool.
        idle_pages, idle_bytes: what it holds between its turns; 0 where it is too short to be continued.
        full_bytes: what a full cache in pages of ``page_tokens`` tokens takes for it.
        bytes_per_token: ``bytes / tokens``; falls with the length, as the ring is paid once.
        kept_share: mean over all heads of the share of the tokens that a head still sees.
        padding_bytes: of ``bytes``, those in empty member slots and in the rounding of ``state_bytes``.
        split, split_unsplit: see :class:`tangram.balance.Balance`.
        conversations: how many such conversations a pool holds at once, one of them being answered and the
            others idle; summed over the pools of several engine cores; 0 until :meth:`Prediction.within`.
    """

    tokens: int
    pages: int
    bytes: int
    idle_pages: int
    idle_bytes: int
    full_bytes: int
    bytes_per_token: float
    kept_share: float
    padding_bytes: int
    split: float = 1.0
    split_unsplit: float = 1.0
    conversations: int = 0

    def within(self, *pool_bytes: int) -> AtLength:
        """The same, with how many fit pools of these sizes."""
        fit = (that_fit(pool, self.bytes, self.idle_bytes) for pool in pool_bytes)
        return replace(self, conversations=sum(fit))


@dataclass(frozen=True)
class Prediction:
    """See the module.

    Attributes:
        budget: [layers][kv_heads], the heads' own budgets, shares of a chunk.
        at: conversations by length.
        sealed_bytes_per_token: ``S * page_bytes / C``: what a long conversation grows by, a token.
        ring_bytes: the raw tail of a conversation that has sealed a chunk.
        row_width: page ids in a request's row at the model's greatest length.
        excess_tokens: residual fragmentation, tokens a chunk: what tiers keep above what their heads' own
            budgets asked for, summed over heads, ``sum(max(0, keep[t(h)] - budget[h] * C))``.
        excess_share: the same as a share of all kept tokens, from 0 to 1.
        shortfall_tokens: the other side of averaging, ``sum(max(0, budget[h] * C - keep[t(h)]))``.
        shortfall_share: the same as a share of what the budgets ask for.
        empty_slots: slots without a head among the pages of one sealed chunk.
        empty_slot_bytes: the same in bytes.
        rounding_bytes: bytes of one sealed chunk's pages behind the last slot, where ``state_bytes`` is
            rounded up to an equal share of every layer.
        padding_share: ``(empty_slot_bytes + rounding_bytes) / (S * page_bytes)``, from 0 to below 1.
        warnings: sentences for the operator.
        covered: share of the calibration samples' needs that is at most what the head's tier keeps; None
            without samples.
    """

    geometry: Geometry
    budget: Matrix
    at: tuple[AtLength, ...]
    sealed_bytes_per_token: float
    ring_bytes: int
    row_width: int
    excess_tokens: float
    excess_share: float
    shortfall_tokens: float
    shortfall_share: float
    empty_slots: int
    empty_slot_bytes: int
    rounding_bytes: int
    padding_share: float
    warnings: tuple[str, ...]
    covered: float | None = None

    def within(self, *pool_bytes: int) -> Prediction:
        """The same, with how many conversations fit pools of these sizes."""
        return replace(self, at=tuple(at.within(*pool_bytes) for at in self.at))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the body of ``POST /tangram/preview``. What depends on a length is a mapping by it."""
        by_length = {
            f"{name}_at": {str(at.tokens): getattr(at, name) for at in self.at}
            for name in (
                "pages",
                "bytes",
                "idle_pages",
                "idle_bytes",
                "full_bytes",
                "bytes_per_token",
                "kept_share",
                "padding_bytes",
                "split",
                "split_unsplit",
                "conversations",
            )
        }
        names = (
            "sealed_bytes_per_token",
            "ring_bytes",
            "row_width",
            "excess_tokens",
            "shortfall_tokens",
            "shortfall_share",
            "empty_slots",
            "empty_slot_bytes",
            "rounding_bytes",
            "padding_share",
            "covered",
        )
        return {
            "geometry": self.geometry.to_dict(),
            "heads": {"budget": [list(row) for row in self.budget]},
            **by_length,
            **{name: getattr(self, name) for name in names},
            "fragmentation": self.excess_share,
            "warnings": list(self.warnings),
        }


def predict(
    config: TangramConfig,
    shape: ModelShape,
    profile: Profile | None = None,
    lengths: Sequence[int] | None = None,
) -> Prediction:
    """What ``config`` costs on a model of this shape.

    Args:
        profile: head statistics; None reads those that the configuration names. Scope ``uniform`` uses none.
        lengths: at which to work out a conversation's cost, each at least 1; None for
            :func:`default_lengths`.

    Raises:
        ConfigError: the configuration cannot work on this model.
        ProfileError: the profile that it names cannot be used.
    """
    profile = in_force(config, shape, profile)
    geometry = build_geometry(config, shape, profile)
    budgets = profile.budgets(config.retention, config.alpha)
    warnings = _warnings(config, shape, geometry, budgets)
    found = measure(geometry, budgets, shape.max_model_len, lengths, warnings, config.observed)
    return replace(found, covered=_covered(geometry, profile.at(config.retention)))


def measure(
    geometry: Geometry,
    budgets: Sequence[Sequence[float]],
    max_model_len: int,
    lengths: Sequence[int] | None = None,
    warnings: Sequence[str] = (),
    observed: int = 0,
) -> Prediction:
    """The figures of a geometry, whoever cut its tiers. Arguments as the fields, :func:`predict` and
    :meth:`tangram.geometry.Geometry.resumable` say."""
    g = geometry
    slot = g.page_tokens * 2 * g.head_size * g.itemsize
    missing = [g.group_size - len(tier.heads) for tier in g.tiers]
    empty = sum(tier.keep // g.page_tokens * gap for tier, gap in zip(g.tiers, missing, strict=True))
    rounding = g.page_bytes - g.group_size * slot  # of one page
    over = short = kept = asked = 0.0
    for tier in g.tiers:
        for layer, head in tier.heads:
            wanted = budgets[layer][head] * g.chunk
            over, short = over + max(0.0, tier.keep - wanted), short + max(0.0, wanted - tier.keep)
            kept, asked = kept + tier.keep, asked + wanted

    def at(n: int) -> AtLength:
        held, idle = g.bytes(n), g.idle_bytes(n, observed)
        even = balance(g, n)
        hollow = sum(g.tier_pages(n, index) * gap for index, gap in enumerate(missing)) * slot
        return AtLength(
            tokens=n,
            pages=g.pages(n) + g.window_pages(n),
            bytes=held,
            idle_pages=idle // g.page_bytes,
            idle_bytes=idle,
            full_bytes=g.full_bytes(n),
            bytes_per_token=held / n,
            kept_share=g.kept_fraction(n),
            padding_bytes=hollow + g.pages(n) * rounding,
            split=even.cut,
            split_unsplit=even.unsplit,
        )

    sealed_bytes = g.pages_per_chunk * g.page_bytes
    return Prediction(
        geometry=g,
        budget=tuple(tuple(row) for row in budgets),
        at=tuple(at(n) for n in (default_lengths(max_model_len) if lengths is None else lengths)),
        sealed_bytes_per_token=sealed_bytes / g.chunk,
        ring_bytes=g.ring_pages * g.page_bytes,
        row_width=g.row_width(max_model_len),
        excess_tokens=over,
        excess_share=over / kept,
        shortfall_tokens=short,
        shortfall_share=short / asked if asked else 0.0,
        empty_slots=empty,
        empty_slot_bytes=empty * slot,
        rounding_bytes=g.pages_per_chunk * rounding,
        padding_share=(empty * slot + g.pages_per_chunk * rounding) / sealed_bytes,
        warnings=tuple(warnings),
    )


def _covered(geometry: Geometry, profile: Profile) -> float | None:
    """See :class:`Prediction`."""
    if profile.calibration is None:
        return None
    keep, kept = geometry.keep, 0
    for sample in profile.calibration.needs:
        for row, tiers in zip(sample, geometry.head_tier, strict=True):
            for need, tier in zip(row, tiers, strict=True):
                kept += need * geometry.chunk <= keep[tier] + 1e-6
    return kept / (len(profile.calibration.needs) * geometry.layers * geometry.kv_heads)


def _warnings(
    config: TangramConfig, shape: ModelShape, geometry: Geometry, budgets: list[list[float]]
) -> list[str]:
    total = shape.layers * shape.kv_heads
    flat = [budget for row in budgets for budget in row]
    found = []
    if config.scope == "layer" and (config.group_size or 0) > geometry.group_size:
        found.append(
            f"in scope layer a group holds at most the {shape.kv_heads} KV heads of a layer: "
            f"{geometry.group_size} is used instead of {config.group_size}"
        )
    if geometry.group_size * 6 > total:
        found.append("groups of more than a sixth of all heads were seen to lose recall")
    if geometry.budget > config.retention * (1 + NOTED_EXCESS):
        found.append(
            f"heads keep {geometry.budget:.2f} of a chunk on average, not {config.retention:g} as asked: "
            "by the profile too many need everything, or a chunk has too few pages to keep less"
        )
    if geometry.budget < 0.2:
        found.append("below a retention of 0.2 recall of details was seen to suffer")
    if geometry.window_groups > MANY_GROUPS:
        found.append(
            f"the sliding-window layers need {geometry.window_groups} page tables a conversation, which "
            "costs time at every step: pages of more tokens need fewer"
        )
    if max(flat) - min(flat) < 1e-9 and geometry.budget < 0.999:
        found.append("no calibrated profile: all heads keep the same, which loses recall of details")
    if geometry.padding > NOTED_PADDING:
        slots = geometry.group_size * geometry.page_tokens * 2 * geometry.head_size * geometry.itemsize
        rounding = 1.0 - slots / geometry.page_bytes
        run, of = (shape.kv_heads, "a layer's") if config.scope == "layer" else (total, "the model's")
        found.append(
            f"{geometry.padding:.0%} of the sealed memory is padding: "
            + (
                f"a page is rounded up to equal shares of {shape.layers} layers, larger groups lose less"
                if rounding > geometry.padding / 2
                else f"a group size that divides {of} {run} heads leaves no place empty"
            )
        )
    return found
