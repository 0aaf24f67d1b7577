"""What a profile's statistics advise: margin and group size, and doubts. Fractions of a second, no model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from tangram.calibration.statistics import Needs, advised_alpha, cost, coverage, split_half
from tangram.config import TangramConfig
from tangram.identity import ModelIdentity
from tangram.predict import predict
from tangram.profile import ModelShape, Profile, default_group_size
from tangram.profile_file import Calibration

MARGINS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
FEW_SAMPLES = 10
AGREEMENT = 0.9
COVERED = 0.9


@dataclass(frozen=True)
class Margin:
    """A safety margin.

    Attributes:
        covered: share of the samples' needs that it covers, those of a text to come by estimate.
        cost: mean share of the cache that it asks for, before budgets are scaled to a retention.
    """

    alpha: float
    covered: float
    cost: float


@dataclass(frozen=True)
class Grouping:
    """A group size.

    Attributes:
        row_width: page ids in a request's row at the model's greatest length.
        waste: share of the kept tokens that heads hold above their own budgets, and of padding.
    """

    group_size: int
    tiers: int
    page_bytes: int
    row_width: int
    excess: float
    padding: float

    @property
    def waste(self) -> float:
        """Both kinds together."""
        return self.excess + self.padding


def needs_of(calibration: Calibration) -> Needs:
    """[samples, layers, kv_heads]."""
    return np.array(calibration.needs, dtype=np.float64)


def margins(profile: Profile, calibration: Calibration) -> list[Margin]:
    """Coverage and cost of some margins."""
    return [_margin(profile, needs_of(calibration), alpha) for alpha in MARGINS]


def advised_margin(profile: Profile, calibration: Calibration) -> Margin | None:
    """The cheapest margin that covers 95% of the needs; None if none does."""
    needs = needs_of(calibration)
    alpha = advised_alpha(needs, profile.floor)
    return None if alpha is None else _margin(profile, needs, alpha)


def _margin(profile: Profile, needs: Needs, alpha: float) -> Margin:
    return Margin(alpha, coverage(needs, alpha, profile.floor), cost(needs, alpha, profile.floor))


def shape_of(model: ModelIdentity) -> ModelShape:
    """The calibrated model as geometry and predictions take it."""
    window_bytes = model.kv_heads * 2 * model.head_size * model.itemsize if model.window_layers else 0
    return ModelShape(
        name=model.name,
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_size=model.head_size,
        itemsize=model.itemsize,
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        window_layers=model.window_layers,
        window_span=model.window_span,
        window_state_bytes=window_bytes,
        window_blocks=(16,) if model.window_layers else (),
        config_hash=model.config_hash,
        weights_hash=model.weights_hash,
    )


def groupings(config: TangramConfig, shape: ModelShape, profile: Profile) -> list[Grouping]:
    """Waste and row width of some group sizes, rising: powers of two, and what divides all heads, up to a
    sixth of them; larger groups were seen to lose recall."""
    most = default_group_size(shape.layers, shape.kv_heads)
    if config.scope == "layer":
        most = shape.kv_heads
    total = shape.layers * shape.kv_heads
    powers = {2**power for power in range(int(math.log2(most)) + 1)}
    sizes = powers | {size for size in range(1, most + 1) if total % size == 0} | {most}
    return [_grouping(replace(config, group_size=size), shape, profile) for size in sorted(sizes)]


def _grouping(config: TangramConfig, shape: ModelShape, profile: Profile) -> Grouping:
    found = predict(config, shape, profile, [])
    geometry = found.geometry
    return Grouping(
        group_size=geometry.group_size,
        tiers=len(geometry.tiers),
        page_bytes=geometry.page_bytes,
        row_width=found.row_width,
        excess=found.excess_share,
        padding=found.padding_share,
    )


def knee(choices: list[Grouping]) -> Grouping:
    """Where larger groups begin to waste more than they save: the least sum of waste and of the logarithm of
    the row's width, each as a share of its range."""
    widths = [math.log2(choice.row_width) for choice in choices]
    wastes = [choice.waste for choice in choices]

    def share(value: float, every: list[float]) -> float:
        span = max(every) - min(every)
        return (value - min(every)) / span if span else 0.0

    return min(choices, key=lambda c: share(math.log2(c.row_width), widths) + share(c.waste, wastes))


def weaknesses(profile: Profile, known: Calibration) -> list[str]:
    """Sentences on what makes a usable profile doubtful."""
    needs, alpha, notes = needs_of(known), float(known.settings["alpha"]), []
    if known.samples < FEW_SAMPLES:
        notes.append(f"{known.samples} samples are few: spread and coverage are uncertain")
    agreement = split_half(needs)
    if agreement is not None and agreement < AGREEMENT:
        notes.append(f"the heads' ranks in two halves of the samples agree by {agreement:.2f} only")
    covered = coverage(needs, alpha, profile.floor)
    if covered < COVERED:
        notes.append(
            f"a safety margin (alpha) of {alpha:g} covers {covered:.0%} of the samples' needs, before scaling"
        )
    if known.mean_queries is None:
        notes.append(
            "it holds no mean queries, so that the scorer auto is keyvalue, not keyvalue_query: "
            "`tangram profile add-queries` adds them"
        )
    return notes
