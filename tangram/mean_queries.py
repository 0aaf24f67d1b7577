"""What KV heads are asked on average: the queries of a profile's samples, put where the next ones stand.

The mean query of a head, its rotation taken off, hardly depends on the text. A query behind a seal boundary
is that mean rotated by its position, so over the positions to come it is the mean rotated by the mean
rotation.
"""

from __future__ import annotations

import torch

from tangram.profile import Profile
from tangram.rotary import FUTURE, Rotary


class MeanQueries:
    """Of all KV heads of a model.

    Args:
        means: float32 [layers, kv_heads, head_size], without their rotation.
        rotary: None where the model has none.
    """

    def __init__(self, means: torch.Tensor, rotary: Rotary | None) -> None:
        self._means, self._rotary = means, rotary
        self._layers = torch.arange(len(means), device=means.device)

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
