"""What the console shows of profile files, as plain data. Light: no torch, no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tangram.advice import advised_margin, margins, needs_of, shape_of, weaknesses
from tangram.calibration.statistics import between_samples, rank_correlation, split_half
from tangram.config import TangramConfig
from tangram.errors import ProfileError
from tangram.predict import predict
from tangram.profile import Profile, load_profile_file

MOST_DIFFERENT = 10


def describe(path: Path) -> dict[str, Any]:
    """Where a profile comes from and how well it is founded. Raises ProfileError for one that cannot be used.

    ``model`` and what follows from samples is None of a profile that was written by hand.
    """
    profile = load_profile_file(path)
    found: dict[str, Any] = {
        "file": path.name,
        "layers": len(profile.mean),
        "kv_heads": len(profile.mean[0]),
        "model": None,
        "notes": ["it names no model, so no engine can tell whether it is for another one"],
    }
    known = profile.calibration
    if known is None:
        return found
    needs = needs_of(known)
    pairs = between_samples(needs)
    return found | {
        "model": known.model.name,
        "config_hash": known.model.config_hash,
        "weights_hash": known.model.weights_hash,
        "created": known.created,
        "tool": known.tool,
        "samples": known.samples,
        "settings": known.settings,
        "retentions": [known.settings["retention"], *(other.retention for other in known.others)],
        "mean_std": float(np.mean(profile.std)),
        "halves_agree": split_half(needs),
        "samples_agree": None if pairs is None else pairs[0],
        "watches_drift": known.key_needs is not None and known.key_needs.same_score,
        "notes": weaknesses(profile, known),
    }


def advice(path: Path) -> dict[str, Any]:
    """Coverage and cost of some margins, and the one advised: ``advised`` is None if none covers enough."""
    profile = load_profile_file(path)
    known = profile.calibration
    if known is None:
        return {"margins": [], "advised": None}
    advised = advised_margin(profile, known)
    return {
        "margins": [
            {"alpha": one.alpha, "covered": one.covered, "cost": one.cost} for one in margins(profile, known)
        ],
        "advised": advised and advised.alpha,
    }


def compare(first: str | Path, second: str | Path | None, retention: float, alpha: float) -> dict[str, Any]:
    """How the budgets of two profiles differ at these settings. ``second`` may be None for equal budgets:
    ``rank_correlation`` is None then, as they put heads in no order.

    Raises:
        ProfileError: one cannot be used, or they are of models of different shapes.
    """
    a = load_profile_file(first)
    size = (len(a.mean), len(a.mean[0]))
    b = Profile.uniform(*size) if second is None else load_profile_file(second)
    other = (len(b.mean), len(b.mean[0]))
    if second is not None and size != other:
        raise ProfileError(
            f"{Path(first).name} has {size[0]} layers x {size[1]} KV heads, {Path(second).name} has "
            f"{other[0]} x {other[1]}: they cannot be compared"
        )
    ours, theirs = (one.budgets(retention, alpha) for one in (a, b))
    pairs = [
        {"layer": layer, "head": head, "first": x, "second": y}
        for layer, rows in enumerate(zip(ours, theirs, strict=True))
        for head, (x, y) in enumerate(zip(*rows, strict=True))
    ]
    apart = [abs(pair["first"] - pair["second"]) for pair in pairs]
    largest = sorted(range(len(pairs)), key=lambda place: -apart[place])[:MOST_DIFFERENT]
    a, b = a.at(retention), b.at(retention)
    return {
        "retention": retention,
        "alpha": alpha,
        "rank_correlation": None if second is None else rank_correlation(a.mean, b.mean),
        "mean_difference": sum(apart) / len(apart),
        "largest_difference": max(apart),
        "heads": [pairs[place] for place in largest],
        "made_differently": _differences(a, b),
        "first": ours,
        "second": theirs,
    }


def costs(
    path: Path, config: Mapping[str, Any], lengths: Sequence[int], *, equal: bool = False
) -> dict[int, int]:
    """Bytes that conversations of these lengths would hold with a profile, at these settings of an engine;
    ``equal``: with equal budgets on the profile's model. Empty for a profile that names no model, which
    cannot say. Raises ProfileError, ConfigError."""
    known = load_profile_file(path).calibration
    if known is None:
        return {}
    if equal:
        settings = TangramConfig.from_mapping({**config, "profile": None, "scope": "uniform"})
        found = predict(settings, shape_of(known.model), lengths=lengths)
        return {at.tokens: at.bytes for at in found.at}
    settings = TangramConfig.from_mapping({**config, "profile": str(path)})
    if settings.scope == "uniform":
        settings = replace(settings, scope="model")
    found = predict(settings, shape_of(known.model), load_profile_file(path), lengths)
    return {at.tokens: at.bytes for at in found.at}


def _differences(a: Profile, b: Profile) -> dict[str, list[Any]]:
    """What two profiles were made with, where it differs."""
    if a.calibration is None or b.calibration is None:
        return {}
    ours, theirs = (
        {"model": known.model.name, "weights": known.model.weights_hash, "samples": known.samples}
        | {"samples_hash": known.samples_hash[:12], "created": known.created}
        | {"mean queries": "none" if known.mean_queries is None else "held"}
        | known.settings
        for known in (a.calibration, b.calibration)
    )
    return {name: [ours.get(name), theirs.get(name)] for name in ours if ours.get(name) != theirs.get(name)}
