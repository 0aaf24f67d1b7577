"""What the engine tells about itself: its status, and the profile that decides its budgets."""

from __future__ import annotations

from typing import Any

import vllm

from tangram.cli import own_version
from tangram.predict import Prediction
from tangram.profile import Profile
from tangram.runtime import Runtime
from tangram.telemetry import CacheSnapshot, model_report, pool_report


def status_report(
    own: Runtime, snapshot: CacheSnapshot, worker: dict[str, Any] | None, uptime: float
) -> dict[str, Any]:
    """The body of ``GET /tangram/status``.

    Args:
        worker: what the worker says of itself (see :mod:`tangram.seal_meter`); None if it does not answer.
        uptime: seconds since the engine became ready.
    """
    g = own.geometry
    return {
        "version": own_version(),
        "vllm": vllm.__version__,
        "model": model_report(own.shape),
        "config": own.config.to_dict(),
        "profile": own.profile.source,
        "scorer": own.scorer,
        "geometry": {
            "group_size": g.group_size,
            "ranks": g.ranks,
            "tiers": g.num_tiers,
            "budget": g.budget,
            "page_tokens": g.page_tokens,
            "page_bytes": g.page_bytes,
            "ring_pages": g.ring_pages,
            "pages_per_chunk": g.pages_per_chunk,
            "row_width": g.row_width(own.shape.max_model_len),
            "padding": g.padding,
        },
        "kernels": worker and worker["kernels"],
        "seals": worker and {"count": worker["seals"], "seconds": worker["seconds"]},
        "drift": _drift_summary(worker),
        "uptime_seconds": uptime,
        "requests": {"running": snapshot.running, "waiting": snapshot.waiting},
        "conversations": {state: snapshot.held(state) for state in ("running", "resident", "prefix")},
        "pool": pool_report(snapshot, g),
        "counters": snapshot.counters,
    }


def _drift_summary(worker: dict[str, Any] | None) -> dict[str, Any] | None:
    """Without the heads' table."""
    drift = worker and worker.get("drift")
    return drift and {name: value for name, value in drift.items() if name != "live"}


def profile_report(
    own: Runtime, prediction: Prediction, worker: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The body of ``GET /tangram/profile``: [layers][kv_heads] tables and what they cost.

    ``mean`` and ``std`` are the calibrated shares of the cache that a head needs, ``need`` is mean + alpha x
    std, ``budget`` the share of a chunk that the head's own need comes to at the retention asked for,
    ``keep`` the tokens of a chunk that its tier keeps. Without a profile nothing was calibrated: the first
    three and ``floor`` are None, ``source`` says so, and all heads have the same budget. ``drift`` is that of
    :meth:`tangram.drift.DriftMeter.to_dict`, None without a profile or where the worker does not answer.
    """
    profile, g = own.profile.at(own.config.retention), own.geometry
    calibrated = profile != Profile.uniform(own.shape.layers, own.shape.kv_heads)
    return {
        "model": model_report(own.shape),
        "source": profile.source if calibrated else _no_profile(own),
        "scope": own.config.scope,
        "retention": own.config.retention,
        "alpha": own.config.alpha,
        "floor": profile.floor if calibrated else None,
        "heads": {
            "mean": [list(row) for row in profile.mean] if calibrated else None,
            "std": [list(row) for row in profile.std] if calibrated else None,
            "need": profile.needs(own.config.alpha) if calibrated else None,
            "budget": [list(row) for row in prediction.budget],
            "tier": [list(row) for row in g.head_tier],
            "keep": [[g.keep[tier] for tier in row] for row in g.head_tier],
        },
        "drift": worker and worker.get("drift"),
        "prediction": prediction.to_dict(),
    }


def _no_profile(own: Runtime) -> str:
    if own.config.scope == "uniform":
        return "none: scope uniform uses no profile, all heads get the same budget"
    return (
        "none: no profile is shipped for this model and none was named (TANGRAM_PROFILE), so all heads get "
        "the same budget"
    )
