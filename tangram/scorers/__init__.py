"""Scorers rank the tokens of a chunk when it is sealed. One file each, behind the interface of
:mod:`tangram.scorers.base`; docs/scorers.md says which to use when."""

from __future__ import annotations

from tangram.errors import ConfigError
from tangram.scorers import (
    expected_attention,
    keydiff,
    keyvalue,
    keyvalue_query,
    knorm,
    random,
    snapkv,
    streamingllm,
    tova,
)
from tangram.scorers.base import Chunk, Need, Scorer

__all__ = ["Chunk", "Need", "Scorer", "get_scorer"]

_SCORERS: dict[str, Scorer] = {
    module.SCORER.name: module.SCORER
    for module in (
        keydiff,
        keyvalue,
        keyvalue_query,
        knorm,
        expected_attention,
        snapkv,
        tova,
        streamingllm,
        random,
    )
}


def get_scorer(name: str) -> Scorer:
    """The scorer of that name. Raises ConfigError when there is none."""
    if name not in _SCORERS:
        raise ConfigError("scorer", f"must be one of {', '.join(_SCORERS)}, not {name!r}")
    return _SCORERS[name]
