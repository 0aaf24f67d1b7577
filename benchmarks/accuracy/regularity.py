"""Whether heads need much the same whatever the text: from the needs that profiles store, without a model."""

from __future__ import annotations

from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import numpy as np

from tangram.calibration.kinds import KINDS
from tangram.calibration.settings import BUILTIN
from tangram.calibration.statistics import (
    advised_alpha,
    between_samples,
    cost,
    coverage,
    mean_and_std,
    rank_correlation,
    split_half,
)
from tangram.profile import load_profile_file

ALPHAS = tuple(step / 4 for step in range(13))


def regularity(path: str | Path) -> dict[str, Any] | None:
    """Of one profile file; None if it holds no needs.

    Returns:
        model, oracle, retention, samples; ``kinds``: mean rank correlation of heads between samples of two
        kinds of text, by "a/b" (built-in texts only); ``between``: mean and least of all pairs;
        ``heads``: mean, std, least and most of each head, by falling mean; ``alphas``: coverage and cost.
    """
    profile = load_profile_file(path)
    known = profile.calibration
    if known is None:
        return None
    needs = np.array(known.needs)
    mean, std = mean_and_std(needs)
    order = np.argsort(-mean.ravel(), kind="stable")
    tables = {"mean": mean, "std": std, "least": needs.min(axis=0), "most": needs.max(axis=0)}
    return {
        "file": Path(path).name,
        "model": known.model.name,
        "oracle": known.settings["oracle"],
        "retention": known.settings["retention"],
        "length": known.settings["length"],
        "samples": len(needs),
        "kinds": between_kinds(needs) if known.settings["data"] == BUILTIN else {},
        "between": None if (pairs := between_samples(needs)) is None else list(pairs),
        "halves": split_half(needs),
        "spread_of_a_head": float(std.mean()),
        "spread_of_heads": float(mean.std()),
        "heads": {name: [round(float(v), 4) for v in table.ravel()[order]] for name, table in tables.items()},
        "alphas": [
            {"alpha": a, "covered": coverage(needs, a, profile.floor), "cost": cost(needs, a, profile.floor)}
            for a in ALPHAS
        ],
        "advised_alpha": advised_alpha(needs, profile.floor),
    }


def between_kinds(needs: Any) -> dict[str, float]:
    """Mean Spearman correlation between samples of two kinds; the built-in kinds come in turn."""
    names = list(KINDS)
    found = {}
    for a, b in combinations_with_replacement(range(len(names)), 2):
        pairs = [
            rank_correlation(needs[i], needs[j])
            for i in range(a, len(needs), len(names))
            for j in range(b, len(needs), len(names))
            if i != j
        ]
        if pairs:
            found[f"{names[a]}/{names[b]}"] = round(float(np.mean(pairs)), 4)
    return found
