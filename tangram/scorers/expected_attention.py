"""Expected attention: keep what queries still to come are expected to attend to (arXiv 2510.00636).

Queries without their rotation are taken as normally distributed. Their mean and covariance, estimated from
the last queries before the boundary and rotated by the mean rotation of the next positions, give the
expectation of a key's attention in closed form: ``exp(k.mean / sqrt(d) + k.cov.k / 2d)``.
"""

from __future__ import annotations

import torch

from tangram.rotary import FUTURE
from tangram.scorers.base import Chunk, Need, Scorer, present


def expected_attention(chunk: Chunk) -> torch.Tensor:
    """Expected attention weight, mean over the query heads of the group, times the norm of the value.

    The weights are normalised over the chunk without its sink tokens and the raw window behind it. The sink
    tokens score 0.
    """
    values = present(chunk.values, Need.VALUES)
    scale = present(chunk.scale, Need.QUERIES).view(-1, 1, 1)
    tokens = chunk.keys.shape[1]
    mean, covariance = _future_queries(chunk)
    keys = torch.cat([chunk.keys, present(chunk.recent, Need.RECENT)], dim=1)
    logits = mean @ keys.transpose(1, 2) * scale  # [heads, group, tokens + window]
    for member in range(covariance.shape[1]):  # one at a time: together they would take too much room
        spread = ((keys @ covariance[:, member]) * keys).sum(dim=-1)
        logits[:, member] += spread * scale[..., 0].square() / 2
    logits[..., : chunk.sink] = -torch.inf
    weights = logits.softmax(dim=-1).mean(dim=1)
    return weights[:, :tokens] * values.norm(dim=-1)


def _future_queries(chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean [heads, group, D] and covariance [heads, group, D, D] of the queries to come."""
    queries = present(chunk.queries, Need.QUERIES)
    asked_at = present(chunk.query_positions, Need.QUERIES)
    rotary = chunk.rotary
    if rotary is not None:
        queries = rotary.turn(queries, *rotary.phases(-asked_at, chunk.layers))
    mean = queries.mean(dim=2)
    centred = queries - mean.unsqueeze(2)
    covariance = centred.transpose(-1, -2) @ centred / queries.shape[2]
    if rotary is not None:
        ahead = asked_at[-1] + 1 + torch.arange(FUTURE, device=asked_at.device)
        cos, sin = (phase.mean(dim=-2, keepdim=True) for phase in rotary.phases(ahead, chunk.layers))
        mean = rotary.turn(mean, cos[:, 0], sin[:, 0])
        covariance = rotary.turn(covariance, cos, sin)
        covariance = rotary.turn(covariance.transpose(-1, -2), cos, sin)
    return mean, covariance


SCORER = Scorer(
    "expected_attention",
    frozenset({Need.VALUES, Need.RECENT, Need.QUERIES, Need.ROTARY}),
    expected_attention,
)
