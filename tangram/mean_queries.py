"""What KV heads are asked on average: the queries of a profile's samples, put where the next ones stand.

The mean query of a head, its rotation taken off, hardly depends on the text. A query behind a seal boundary
is that mean rotated by its position, so over the positions to come it is the mean rotated by the mean
rotation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from tangram.config import AUTO, WITH_QUERIES, WITHOUT_QUERIES, TangramConfig
from tangram.errors import ProfileError, UnsupportedError
from tangram.geometry import Geometry
from tangram.profile import Profile
from tangram.ranks import Ranks
from tangram.rotary import FUTURE, Rotary
from tangram.scorers import Need, get_scorer


def scorer_in_force(config: TangramConfig, profile: Profile, rotary: Callable[[], Rotary | None]) -> str:
    """The name of the scorer that decides, which a configuration may leave open (``auto``).

    Args:
        profile: that decides about budgets.
        rotary: how the model rotates; raises UnsupportedError where that is not known.

    Raises:
        ProfileError, UnsupportedError: what the configured scorer must know is not known, and something is to
            be ranked.
    """
    if config.scorer != AUTO:
        needs = get_scorer(config.scorer).needs if config.retention < 1.0 else frozenset()
        if Need.MEAN_QUERY in needs:
            profile.mean_queries()
        if needs & {Need.ROTARY, Need.MEAN_QUERY}:
            rotary()
        return config.scorer
    try:
        profile.mean_queries()
        rotary()
    except (ProfileError, UnsupportedError):
        return WITHOUT_QUERIES
    return WITH_QUERIES


class MeanQueries:
    """Of all KV heads of a model.

    Args:
        means: float32 [layers, kv_heads, head_size], without their rotation.
        rotary: None where the model has none.
    """

    def __init__(self, means: torch.Tensor, rotary: Rotary | None) -> None:
        self._means, self._rotary = means, rotary
        self._layers = torch.arange(len(means), device=means.device)

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self._means.device

    @classmethod
    def of_profile(cls, profile: Profile, rotary: Rotary | None, device: torch.device) -> MeanQueries:
        """Those that a profile holds.

        Raises:
            ProfileError: it holds none.
        """
        return cls(torch.tensor(profile.mean_queries(), dtype=torch.float32, device=device), rotary)

    def behind(self, boundary: int) -> torch.Tensor:
        """float32 [layers, kv_heads, head_size]: as asked, on average, at the ``FUTURE`` positions from
        ``boundary`` on."""
        if self._rotary is None:
            return self._means
        ahead = boundary + torch.arange(FUTURE, device=self._means.device)
        cos, sin = (phase.mean(dim=2) for phase in self._rotary.phases(ahead, self._layers))
        return self._rotary.turn(self._means, cos, sin)


MOST_KEPT = 256
"""Boundaries whose mean queries stay at hand: conversations have the same ones."""


class Asked:
    """Mean queries as the sealing operator takes them, for the heads of one rank.

    What a chunk's heads are asked is worked out by itself, never together with other chunks', so that it has
    the same bits whatever else is sealed in that step.
    """

    def __init__(self, mean_queries: MeanQueries, geometry: Geometry, ranks: Ranks) -> None:
        self._mean_queries, self._geometry = mean_queries, geometry
        first = ranks.rank * geometry.kv_heads
        self._own = slice(first, first + geometry.kv_heads)
        self._behind: OrderedDict[int, torch.Tensor] = OrderedDict()  # by chunk, used longest ago first
        self._places: tuple[torch.Tensor, torch.Tensor] | None = None

    def of_layer(self, layer: int, chunk: int) -> torch.Tensor:
        """float32 [1, kv_heads, head_size]: of a chunk's heads in one layer."""
        return self._chunk(chunk)[layer].unsqueeze(0)

    def of_layers(self, chunks: Sequence[int]) -> torch.Tensor | None:
        """float32 [layers, chunks, kv_heads, head_size]; None for no chunks."""
        return torch.stack([self._chunk(chunk) for chunk in chunks], dim=1) if chunks else None

    def of_tiers(self, chunks: Sequence[int]) -> torch.Tensor | None:
        """float32 [chunks, tiers, group_size, head_size], as a page's members follow one another; None for no
        chunks. A place that no head takes holds those of another one."""
        if not chunks:
            return None
        layers, heads = self._members()
        return torch.stack([self._chunk(chunk)[layers, heads] for chunk in chunks])

    def _members(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Layer and head, int64 [tiers, group_size], of a tier's members."""
        if self._places is None:
            size, members = self._geometry.group_size, [tier.heads for tier in self._geometry.tiers]
            padded = [[*heads, *[heads[0]] * (size - len(heads))] for heads in members]
            layers, places = torch.tensor(padded, device=self._mean_queries.device).unbind(dim=-1)
            self._places = layers, places
        return self._places

    def _chunk(self, chunk: int) -> torch.Tensor:
        """float32 [layers, kv_heads, head_size] behind a chunk's boundary."""
        if chunk in self._behind:
            self._behind.move_to_end(chunk)
            return self._behind[chunk]
        behind = self._mean_queries.behind(self._geometry.boundary(chunk))[:, self._own].contiguous()
        self._behind[chunk] = behind
        if len(self._behind) > MOST_KEPT:
            self._behind.popitem(last=False)
        return behind
