"""Puts calibrated profiles among those that the release ships, and into their index.

    python scripts/ship_profile.py FILE... [--name NAME] [--hub-id ID ...] [--folder DIR]

A file replaces the one of the same weights. --name is what the model is called (default: what the profile
says). --hub-id: a name of the hub under which exactly these weights are published; by it a model whose
weights are still to be downloaded gets its profile. Both are for one file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from tangram.errors import ProfileError  # noqa: E402
from tangram.profile import Profile, load_profile_file  # noqa: E402
from tangram.shipped import INDEX, Shipped, folder, index  # noqa: E402


def ship(profile: Profile, name: str | None, hub_ids: Sequence[str], where: Path) -> Shipped:
    """Write the profile and its entry. Raises ProfileError for one that no engine could choose by itself."""
    known = profile.calibration
    if known is None or known.model.weights_hash is None:
        raise ProfileError(f"profile {profile.source} names no weights: calibrate from safetensors files")
    model = replace(known.model, name=name or known.model.name)
    file = re.sub(r"[^a-z0-9._-]+", "-", model.name.rsplit("/", 1)[-1].lower()) + ".json"
    entry = Shipped(file, model.name, model.config_hash, model.weights_hash or "", tuple(hub_ids))
    others = [one for one in index(where) if one.weights_hash != entry.weights_hash]
    if file in [one.file for one in others]:
        raise ProfileError(f"{file} is the profile of other weights: give this one another --name")
    where.mkdir(parents=True, exist_ok=True)
    for old in index(where):
        if old.weights_hash == entry.weights_hash:
            (where / old.file).unlink(missing_ok=True)
    replace(profile, calibration=replace(known, model=model)).save(where / file)
    entries = sorted([*others, entry], key=lambda one: one.file)
    text = json.dumps([asdict(one) for one in entries], indent=1) + "\n"
    (where / INDEX).write_text(text, encoding="utf-8")
    return entry


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Puts profiles among those that the release ships.")
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--name")
    parser.add_argument("--hub-id", action="append", default=[])
    parser.add_argument("--folder", type=Path, default=folder())
    options = parser.parse_args(arguments)
    if len(options.files) > 1 and (options.name or options.hub_id):
        parser.error("--name and --hub-id are for one file")
    try:
        for file in options.files:
            entry = ship(load_profile_file(file), options.name, options.hub_id, options.folder)
            print(f"{entry.file}: {entry.model}")
    except ProfileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
