"""Scorers rank the tokens of a chunk when it is sealed. One file each, one function each.

A scorer takes keys ``[heads, tokens, head_size]`` in float32, as they lie in the cache (rotated), and
returns scores ``[heads, tokens]``: the higher, the rather kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tangram.errors import ConfigError
from tangram.scorers.keydiff import keydiff

Scorer = Callable[[torch.Tensor], torch.Tensor]

_SCORERS: dict[str, Scorer] = {"keydiff": keydiff}


def get_scorer(name: str) -> Scorer:
    """The scorer of that name. Raises ConfigError when there is none."""
    if name not in _SCORERS:
        raise ConfigError("scorer", f"must be one of {', '.join(_SCORERS)}, not {name!r}")
    return _SCORERS[name]
