"""What the log says of the cache when an engine starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tangram.predict import Prediction, predict

if TYPE_CHECKING:
    from tangram.runtime import Runtime

TOKENS = 4096
"""Length of the conversation that the line reckons with, where the model takes as much."""
MIB = 1 << 20


def prediction_of(own: Runtime) -> Prediction:
    """What one conversation costs on this engine; with the warnings for the operator."""
    return predict(own.config, own.shape, own.profile, [min(TOKENS, own.shape.max_model_len)])


def summary(
    own: Runtime, prediction: Prediction, kernels: str, pool_bytes: int | None, engines: int = 1
) -> str:
    """One line: how the cache is cut and what fits.

    Args:
        prediction: :func:`prediction_of`.
        kernels: the implementation that runs, as in ``GET /tangram/status``.
        pool_bytes: of the KV cache of one engine, on all of its ranks; None while only vLLM's measurement at
            start will tell.
        engines: how many there are.
    """
    g, (at,) = own.geometry, prediction.at
    fit = f"a conversation of {at.tokens} tokens takes {at.bytes / MIB:.1f} MiB"
    if pool_bytes:
        fit += f", {pool_bytes // at.bytes} fit into {pool_bytes / MIB:.0f} MiB of cache"
    shared = f" on {g.ranks} ranks" if g.ranks > 1 else ""
    return (
        f"Ragged cache: retention {own.config.retention:g}, {_by(own)}, {g.num_tiers} tiers, groups of "
        f"{g.group_size} heads{shared}, {kernels} kernels, pages of {g.page_bytes} bytes; {fit} "
        f"({at.full_bytes / MIB:.1f} MiB uncompressed)"
        f"{f', tokens ranked by {own.scorer}' if own.config.retention < 1.0 else ''}"
        f"{f'; {engines} engines, each with a cache of its own' if engines > 1 else ''}"
    )


def _by(own: Runtime) -> str:
    """What decides the budgets."""
    return f"profile {Path(own.profile.source).name}" if own.config.uses_profile else "no profile"
