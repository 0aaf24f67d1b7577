"""What a scorer is: a name, what it needs, and a function from a chunk to scores.

A scorer sees one chunk of one request at the moment it is sealed, for several KV heads at once (of any
layers). What it returns depends on the tokens up to the seal boundary alone, so the choice is the same
however the steps were cut, whoever shared the batch, and whether the conversation was resumed or read anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import torch

from tangram.errors import CacheIntegrityError
from tangram.rotary import Rotary

T = TypeVar("T")


class Need(Enum):
    """What a scorer uses beside the chunk's keys, which it always gets."""

    VALUES = "values"
    RECENT = "the keys of the raw window behind the chunk"
    QUERIES = "the last queries before the seal boundary"
    POSITIONS = "positions"
    ROTARY = "the model's rotary embedding"
    MEAN_QUERY = "the mean queries of a profile"


@dataclass(frozen=True)
class Chunk:
    """A chunk that is about to be sealed, as some KV heads see it. What a scorer did not ask for is None.

    Attributes:
        layers, heads: int64 [heads], the layer of each KV head and its number there, among all ranks' heads.
        keys: float32 [heads, tokens, head_size], rotated, as they lie in the cache.
        sink: so many of the leading tokens are kept whatever they score.
        values: float32 [heads, tokens, head_size].
        positions: int64 [tokens].
        recent: float32 [heads, window, head_size], keys of the tokens from the chunk's end to the boundary.
        queries: float32 [heads, group, w, head_size], rotated: of the last ``w`` tokens before the boundary
            (all of them behind the chunk), for each query head of a KV head's group.
        query_positions: int64 [w].
        scale: float32 [heads], what the attention multiplies its logits by.
        rotary: how keys and queries are rotated; None too where the model has no rotary embedding.
        mean_query: float32 [heads, head_size], what each KV head is asked on average behind the boundary
            (:class:`tangram.mean_queries.MeanQueries`).
    """

    layers: torch.Tensor
    heads: torch.Tensor
    keys: torch.Tensor
    sink: int = 0
    values: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    recent: torch.Tensor | None = None
    queries: torch.Tensor | None = None
    query_positions: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    rotary: Rotary | None = None
    mean_query: torch.Tensor | None = None


def present(part: T | None, need: Need) -> T:
    """A part of the chunk that the scorer asked for. Raises CacheIntegrityError when it was not given."""
    if part is None:
        raise CacheIntegrityError(f"a chunk came to be sealed without {need.value}")
    return part


@dataclass(frozen=True)
class Scorer:
    """Ranks the tokens of a chunk.

    Attributes:
        name: as the configuration names it.
        needs: what it uses beside the keys.
        score: :class:`Chunk` to float32 [heads, tokens]; the higher, the rather kept.
        whole_layer: the scores are averaged over the KV heads of a layer, which then rank alike.
    """

    name: str
    needs: frozenset[Need]
    score: Callable[[Chunk], torch.Tensor]
    whole_layer: bool = False

    def __call__(self, chunk: Chunk) -> torch.Tensor:
        """Scores of the chunk's tokens, float32 [heads, tokens]."""
        return self.score(chunk)
