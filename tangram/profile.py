"""How much of its history each head needs, and the budgets that follow.

A profile holds, for every (layer, KV head), the mean and the standard deviation over calibration
samples of the share of the cache that the head needs. From these, for any target:

    need   = clip(mean + alpha * std, floor, 1)
    budget = clip(need ** g, floor, 1), with g such that the mean over heads is the target retention

Raising to a power keeps at 1 the heads that need everything; multiplying would cut them first. Where the
profile holds needs at several retentions, those at the one nearest to the target count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tangram.config import AUTO, TangramConfig
from tangram.errors import ConfigError, ProfileError
from tangram.geometry import Geometry, Head, Tier, ceil_div, rank_of
from tangram.identity import ModelIdentity
from tangram.profile_file import DEFAULT_FLOOR, Calibration, Matrix, Target, read, write

UNIFORM = "uniform"
"""The source of a profile that is no file: all heads alike."""


@dataclass(frozen=True)
class ModelShape:
    """What the cache must know of a model.

    Attributes:
        layers: layers that attend to everything. The others, if any, are sliding-window layers, whose cache
            is vLLM's.
        itemsize: bytes of a cache element.
        full_layers: the model's indices of these layers; empty when all of its layers are such.
        window_layers: how many sliding-window layers there are.
        window_span: tokens that one of them sees.
        window_state_bytes: bytes of a token in the cache of one of them.
        window_blocks: tokens that their kernel can have in a block, or multiples of these, best first.
        ranks: of tensor parallelism, to each of which go equally many KV heads of every layer. All else here
            is of the whole model.
        config_hash, weights_hash: the model's fingerprints (:mod:`tangram.identity`), which a calibrated
            profile must share; None is not compared.
    """

    name: str
    layers: int
    kv_heads: int
    head_size: int
    itemsize: int
    dtype: str
    max_model_len: int
    full_layers: tuple[int, ...] = ()
    window_layers: int = 0
    window_span: int = 0
    window_state_bytes: int = 0
    window_blocks: tuple[int, ...] = ()
    ranks: int = 1
    config_hash: str | None = None
    weights_hash: str | None = None

    def window_block(self, page_tokens: int) -> int:
        """Tokens in a block of a sliding-window layer: a page's tokens are a multiple of it, so that all
        lengths from which a conversation can resume are edges of both; 0 without such layers.

        Raises:
            ConfigError: no supported size divides a page.
        """
        if not self.window_layers:
            return 0
        for size in self.window_blocks:
            if page_tokens % size == 0:
                return size
        raise ConfigError(
            "page_tokens",
            f"must be a multiple of {min(self.window_blocks)} for a model with sliding-window layers, "
            f"not {page_tokens}",
        )


@dataclass(frozen=True)
class Profile:
    """Statistics of one model's heads.

    Attributes:
        mean, std: [layers][kv_heads], shares of the cache from 0 to 1.
        floor: the least share that any head keeps.
        source: where the profile came from, for people.
        calibration: how it was made, and on which model; None of a profile written by hand.
    """

    mean: Matrix
    std: Matrix
    floor: float = DEFAULT_FLOOR
    source: str = UNIFORM
    calibration: Calibration | None = None

    @classmethod
    def uniform(cls, layers: int, kv_heads: int) -> Profile:
        """All heads alike: used when no profile is given."""
        row = (0.5,) * kv_heads
        return cls((row,) * layers, ((0.0,) * kv_heads,) * layers, floor=0.0)

    @classmethod
    def load(cls, path: str | Path, layers: int, kv_heads: int) -> Profile:
        """Read a profile file made for a model of this shape.

        Raises:
            ProfileError: the file is missing, not a profile, newer, damaged, or for another model.
        """
        found = read(path)
        for name, matrix in (("mean", found.mean), ("std", found.std)):
            if len(matrix) != layers or any(len(row) != kv_heads for row in matrix):
                raise ProfileError(
                    f"profile {path} is for another model: {name!r} must be {layers} layers x "
                    f"{kv_heads} KV heads"
                )
        return cls(found.mean, found.std, found.floor, str(path), found.calibration)

    def save(self, path: str | Path) -> None:
        """Write the file form."""
        write(path, self.mean, self.std, self.floor, self.calibration)

    def mean_queries(self) -> tuple[Matrix, ...]:
        """[layers][kv_heads][head_size], see :attr:`tangram.profile_file.Calibration.mean_queries`.

        Raises:
            ProfileError: the profile holds none.
        """
        known = self.calibration
        if known is None or known.mean_queries is None:
            way = "name one that was calibrated with this release"
            if known is not None:
                way = "`tangram profile add-queries` adds them"
            named = self.source != UNIFORM
            lacking = f"the profile {self.source} has none"
            if not named:
                lacking = "no profile decides (none is named, or the scope is uniform)"
            raise ProfileError(
                f"the scorer keyvalue_query needs a profile's mean queries, and {lacking}: {way}, "
                "or choose the scorer keyvalue"
            )
        return known.mean_queries

    def at(self, retention: float) -> Profile:
        """With the needs at the stored retention that is nearest to this one, by their ratio."""
        known = self.calibration
        if known is None or not known.others:
            return self
        own = float(known.settings["retention"])
        best = min((own, *(other.retention for other in known.others)), key=_distance_from(retention))
        found = next((other for other in known.others if other.retention == best), None)
        if found is None:
            return self
        before = Target(own, self.mean, self.std, known.least, known.most, known.needs)
        calibration = replace(
            known,
            settings=known.settings | {"retention": found.retention},
            least=found.least,
            most=found.most,
            needs=found.needs,
            others=tuple(before if other is found else other for other in known.others),
        )
        return replace(self, mean=found.mean, std=found.std, calibration=calibration)

    def needs(self, alpha: float) -> list[list[float]]:
        """[layers][kv_heads]: mean + alpha * std, clipped to [floor, 1]."""
        return [
            [min(1.0, max(self.floor, m + alpha * s)) for m, s in zip(mean, std, strict=True)]
            for mean, std in zip(self.mean, self.std, strict=True)
        ]

    def budgets(self, retention: float, alpha: float) -> list[list[float]]:
        """[layers][kv_heads]: shares to keep, of mean ``retention`` (as near as floor and the heads that
        need everything allow)."""
        if retention >= 1.0:
            return [[1.0] * len(row) for row in self.mean]
        needs = self.at(retention).needs(alpha)
        flat = [max(need, 1e-6) for row in needs for need in row]

        def mean_at(power: float) -> float:
            return sum(min(1.0, max(self.floor, need**power)) for need in flat) / len(flat)

        low, high = 0.0, 1.0
        while mean_at(high) > retention and high < 2**20:
            high *= 2.0
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if mean_at(middle) > retention else (low, middle)
        return [[min(1.0, max(self.floor, max(need, 1e-6) ** high)) for need in row] for row in needs]


def _distance_from(retention: float) -> Callable[[float], float]:
    return lambda share: abs(math.log(share / retention))


def load_profile_file(path: str | Path) -> Profile:
    """A profile of whatever shape the file has. Raises ProfileError if it cannot be used."""
    found = read(path)
    layers, heads = len(found.mean), len(found.mean[0])
    if [len(row) for row in (*found.mean, *found.std)] != [heads] * 2 * layers:
        raise ProfileError(f"profile {path} is damaged: its layers have different numbers of KV heads")
    return Profile(found.mean, found.std, found.floor, str(path), found.calibration)


def load_of_model(path: str | Path, model: ModelShape | ModelIdentity) -> Profile:
    """A profile that is to be of this model. Raises ProfileError if it cannot be used, or is of another."""
    profile = Profile.load(path, model.layers, model.kv_heads)
    if profile.calibration is not None:
        profile.calibration.model.refuse_other(str(path), model.config_hash, model.weights_hash)
        _refuse_other_width(profile.calibration, model.head_size, str(path))
    return profile


def _refuse_other_width(known: Calibration, head_size: int, path: str) -> None:
    """What heads are asked is as wide as they are, which no fingerprint of a configuration tells."""
    if known.mean_queries is not None and known.model.head_size != head_size:
        raise ProfileError(
            f"profile {path} is for another model: its mean queries are of KV heads of size "
            f"{known.model.head_size}, and this model's are of {head_size}; calibrate this one"
        )


def load_profile(config: TangramConfig, shape: ModelShape) -> Profile:
    """The profile that a configuration names, or the uniform one.

    Raises:
        ProfileError: it cannot be used, or was calibrated on another model.
    """
    if config.profile is None or config.profile == AUTO:
        return Profile.uniform(shape.layers, shape.kv_heads)
    return load_of_model(config.profile, shape)


def in_force(config: TangramConfig, shape: ModelShape, profile: Profile | None = None) -> Profile:
    """The profile that decides: ``profile`` (default: the one that the configuration names), save in scope
    ``uniform``, where no profile does."""
    if config.scope == "uniform":
        return Profile.uniform(shape.layers, shape.kv_heads)
    return load_profile(config, shape) if profile is None else profile


def default_group_size(layers: int, kv_heads: int, ranks: int = 1) -> int:
    """A sixth of all heads: larger groups were seen to lose recall (docs/architecture.md). Equally many of
    them are on each rank."""
    return max(1, layers * kv_heads // 6 // ranks) * ranks


def group_size(config: TangramConfig, shape: ModelShape) -> int:
    """Head slots of a page, over all ranks. In scope ``layer`` at most a layer's KV heads: a group never
    leaves its layer, so more slots could only be empty.

    Raises:
        ConfigError: more heads were asked for than the model has, or ranks could not hold equally many.
    """
    total = shape.layers * shape.kv_heads
    window_block_bytes = shape.window_block(config.page_tokens) * shape.window_state_bytes
    slot = config.page_tokens * 2 * shape.head_size * shape.itemsize
    # No smaller than what one window layer needs of a page: smaller groups would leave the rest of it empty.
    least = min(total, ceil_div(window_block_bytes, slot * shape.ranks) * shape.ranks)
    group = config.group_size or max(default_group_size(shape.layers, shape.kv_heads, shape.ranks), least)
    if group > total:
        raise ConfigError("group_size", f"must be at most the model's {total} heads, not {group}")
    if config.scope == "layer":
        group = min(group, shape.kv_heads)
    if group % shape.ranks:
        raise ConfigError(
            "group_size",
            f"must be a multiple of --tensor-parallel-size ({shape.ranks}), not {group}: each rank holds "
            "equally many heads of a group",
        )
    return group


def build_geometry(config: TangramConfig, shape: ModelShape, profile: Profile | None = None) -> Geometry:
    """The cache's arithmetic for a model: budgets, cut into tiers, rounded to pages.

    The group size need not divide the heads (of the model, or of a layer in scope ``layer``): the last tier
    of a run of heads then has fewer members, and its pages have empty member slots.

    Heads cannot leave their rank, and a tier keeps the same on all ranks. So each rank's heads are cut by
    themselves, in the same way, and a tier is what stands at the same place on all ranks: the heads that need
    most are together wherever they are, and the mean over all of a tier keeps the retention asked for. Where
    tiers are full, no other assignment comes nearer to the heads' own budgets, in squares.
    """
    budgets = in_force(config, shape, profile).budgets(config.retention, config.alpha)
    group = group_size(config, shape)
    window_block = shape.window_block(config.page_tokens)
    groups = [heads for block in _blocks(config.scope, budgets) for heads in _cut(block, group, shape)]
    tiers = tuple(Tier(_keep(config, budgets, heads), tuple(heads)) for heads in groups)
    return Geometry(
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        itemsize=shape.itemsize,
        page_tokens=config.page_tokens,
        chunk=config.chunk,
        window=config.window,
        rewind=config.rewind,
        group_size=group,
        tiers=tiers,
        window_block_bytes=window_block * shape.window_state_bytes,
        window_layers=shape.window_layers,
        window_block_tokens=window_block,
        window_span=shape.window_span,
        ranks=shape.ranks,
    )


def _cut(block: list[Head], group: int, shape: ModelShape) -> Iterator[list[Head]]:
    """Groups of a run of heads, equally many of each rank, in the order of the run on each."""
    shares = [
        [head for head in block if rank_of(head, shape.kv_heads, shape.ranks) == rank]
        for rank in range(shape.ranks)
    ]
    each = group // shape.ranks
    for start in range(0, len(shares[0]), each):
        yield [head for share in shares for head in share[start : start + each]]


def _blocks(scope: str, budgets: list[list[float]]) -> list[list[Head]]:
    """Runs of heads inside which tiers are cut, each sorted by falling budget (stable by position)."""
    layers = [[(layer, head) for head in range(len(row))] for layer, row in enumerate(budgets)]
    if scope == "layer":
        return [sorted(heads, key=lambda h: -budgets[h[0]][h[1]]) for heads in layers]
    every = [head for heads in layers for head in heads]
    return [every if scope == "uniform" else sorted(every, key=lambda h: -budgets[h[0]][h[1]])]


def _keep(config: TangramConfig, budgets: list[list[float]], heads: list[Head]) -> int:
    mean = sum(budgets[layer][head] for layer, head in heads) / len(heads)
    pages = round(mean * config.chunk / config.page_tokens)
    return max(1, min(pages, config.chunk // config.page_tokens)) * config.page_tokens
