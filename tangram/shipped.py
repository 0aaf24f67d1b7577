"""Profiles that come with the release, found by the model's identity.

``profiles/index.json`` names for each file the model's fingerprints (:mod:`tangram.identity`). That of the
weights decides: it tells a fine-tuned or quantised variant, whose heads may need other shares, from the model
that was calibrated. Where the weights are not on this machine yet, one of the hub ids under which exactly
these weights are published decides; the engine compares the weights once it has them.

``auto`` is settled once, before vLLM starts its processes, so that all of them see one profile.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from tangram.config import AUTO, TangramConfig
from tangram.errors import ProfileError
from tangram.identity import weights_fingerprint

INDEX = "index.json"


@dataclass(frozen=True)
class Shipped:
    """A profile of the release.

    Attributes:
        file: its name in :func:`folder`.
        model: the model's name, for people.
        hub_ids: names of the hub that stand for these very weights.
    """

    file: str
    model: str
    config_hash: str
    weights_hash: str
    hub_ids: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Shipped:
        """An entry of the index."""
        return cls(**{**data, "hub_ids": tuple(data["hub_ids"])})


def folder() -> Path:
    """Where the release has its profiles."""
    return Path(str(files("tangram"))) / "profiles"


def index(where: Path | None = None) -> list[Shipped]:
    """All entries; empty where the release has none. Raises ProfileError for an index that cannot be read."""
    path = (where or folder()) / INDEX
    try:
        return [Shipped.from_dict(entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProfileError(f"{path} is damaged ({error}): install this release again") from None


def find(model: str, revision: str | None = None, where: Path | None = None) -> Shipped | None:
    """The profile for a model, a directory or a hub id; None if there is none for these very weights."""
    known = index(where)
    if not known:
        return None
    weights = weights_fingerprint(model, revision)
    if weights is not None:
        return next((one for one in known if one.weights_hash == weights), None)
    if revision is not None:
        return None
    return next((one for one in known if model in one.hub_ids), None)


def settled(
    config: TangramConfig,
    model: str,
    revision: str | None = None,
    reshaped: bool = False,
    where: Path | None = None,
) -> TangramConfig:
    """The configuration with ``auto`` replaced by a file, or by none.

    Args:
        reshaped: the model's configuration is changed on the command line, and with it perhaps its heads.
    """
    if config.profile != AUTO:
        return config
    found = None if reshaped else find(model, revision, where)
    return replace(config, profile=None if found is None else str((where or folder()) / found.file))


def told(config: TangramConfig, settled: TangramConfig) -> str:
    """What a user should know of the choice; "" if nothing."""
    if config.profile != AUTO or config.scope == "uniform" or config.retention >= 1.0:
        return ""
    if settled.profile is not None:
        return f"heads keep what {Path(settled.profile).name} says, the profile shipped for this model"
    return (
        "no profile is shipped for this model, so all heads keep the same, which loses details: "
        "`tangram calibrate` makes one"
    )
