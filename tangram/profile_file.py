"""The file form of a profile: one JSON object, with a version and a checksum.

Version 1 holds mean, std and floor and names no model. Version 2 adds what a calibration knows: the model and
its fingerprints, how it was made, and every sample's needs; and a checksum over all of it. Who writes a
profile by hand uses version 1. Needs at further retentions, needs by the keys alone, and mean queries may be
missing: files of version 2 that were made before them lack them. So does any the origin of mean queries that
were not found in the calibration itself, which releases before it pass over.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tangram.errors import ProfileError
from tangram.identity import ModelIdentity

FORMAT = "tangram-profile"
VERSION = 2
READS = (1, 2)
DEFAULT_FLOOR = 0.05
FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127
"""Engines hold mean queries in float32."""
KEY_SCORER = "keydiff"
"""The score of keys by which needs are noted for an engine to compare with."""
KEY_SHARE = 0.5
"""Of all its values in a chunk, over all heads, so many count, the highest. A half leaves a head most room to
move to either side."""
Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Target:
    """What heads need when so much is kept, over samples.

    Attributes:
        retention: the share of all cached tokens that the best ones are.
        mean, std, least, most: [layers][kv_heads].
        needs: [samples][layers][kv_heads], shares from 0 to 1.
    """

    retention: float
    mean: Matrix
    std: Matrix
    least: Matrix
    most: Matrix
    needs: tuple[Matrix, ...]


@dataclass(frozen=True)
class KeyNeeds:
    """What heads would need by their keys alone: what an engine compares live text with.

    Attributes:
        scorer: the score; ``share`` of all its values count, the highest.
        needs: [samples][layers][kv_heads].
    """

    scorer: str
    share: float
    needs: tuple[Matrix, ...]

    @property
    def same_score(self) -> bool:
        """Whether this release finds needs by keys in the same way."""
        return (self.scorer, self.share) == (KEY_SCORER, KEY_SHARE)


@dataclass(frozen=True)
class QueryOrigin:
    """Where mean queries come from that were added to a profile later.

    Attributes:
        samples, samples_hash, data, length, seed, dtype, created, tool: as those of the calibration
            (:class:`Calibration` and its settings), of what was read for the mean queries.
    """

    samples: int
    samples_hash: str
    data: str
    length: int
    seed: int
    dtype: str
    created: str
    tool: str


@dataclass(frozen=True)
class Calibration:
    """Where a profile comes from.

    Attributes:
        settings: how it was made: oracle, scope, retention, alpha, length, seed, data, dtype, window, sink.
        samples: how many; ``samples_hash`` is of their tokens.
        created: ISO 8601, UTC.
        tool: the release that made it.
        least, most: [layers][kv_heads], over samples.
        needs: [samples][layers][kv_heads], shares from 0 to 1.
        others: the same at other retentions than that of the settings.
        key_needs: None where they are not known.
        mean_queries: [layers][kv_heads][head_size], what the query heads of each KV head ask on average, in
            all samples, without their rotation; None where that is not known.
        queries_from: where they come from, if not from this calibration's own samples as it read them.
    """

    model: ModelIdentity
    settings: dict[str, Any]
    samples: int
    samples_hash: str
    created: str
    tool: str
    least: Matrix
    most: Matrix
    needs: tuple[Matrix, ...]
    others: tuple[Target, ...] = ()
    key_needs: KeyNeeds | None = None
    mean_queries: tuple[Matrix, ...] | None = None
    queries_from: QueryOrigin | None = None


@dataclass(frozen=True)
class Contents:
    """What a file holds, checked."""

    mean: Matrix
    std: Matrix
    floor: float
    calibration: Calibration | None


SETTINGS: dict[str, tuple[type, ...]] = {
    "oracle": (str,),
    "scope": (str,),
    "retention": (float, int),
    "alpha": (float, int),
    "length": (int,),
    "seed": (int,),
    "data": (str,),
    "dtype": (str,),
    "window": (int,),
    "sink": (int,),
}


def read(path: str | Path) -> Contents:
    """Read and check a profile file of any version that this release knows.

    Raises:
        ProfileError: the file is missing, not a profile, newer, or damaged.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"profile {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ProfileError(f"profile {path} is damaged: it is not JSON") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ProfileError(f"profile {path} is not a Tangram profile: 'format' must be {FORMAT!r}")
    version = data.get("version")
    if version not in READS or isinstance(version, bool):
        raise ProfileError(
            f"profile {path} has version {version}, this release reads {' and '.join(map(str, READS))}: "
            "calibrate again or upgrade"
        )
    if version > 1 and data.get("checksum") != _checksum(data):
        raise ProfileError(f"profile {path} is damaged: its contents do not fit its checksum")
    mean, std = (_matrix(data.get(name), name, path) for name in ("mean", "std"))
    floor = data.get("floor", DEFAULT_FLOOR)
    if not _is_number(floor) or not 0.0 <= floor < 1.0:
        raise ProfileError(f"profile {path} is damaged: 'floor' must be from 0 to below 1")
    known = data.get("calibration") if version > 1 else None
    calibration = None if known is None else _calibration(known, mean, std, path)
    return Contents(mean, std, float(floor), calibration)


def write(path: str | Path, mean: Matrix, std: Matrix, floor: float, calibration: Calibration | None) -> None:
    """Write version 2; whoever reads meanwhile finds the file before or the whole one after."""
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "floor": floor,
        "calibration": None if calibration is None else _calibration_to_dict(calibration),
        "mean": mean,
        "std": std,
    }
    data["checksum"] = _checksum(data)
    fresh = Path(path).with_name(Path(path).name + ".new")
    fresh.write_text(_layout(data), encoding="utf-8")
    fresh.replace(path)


def as_matrix(table: Iterable[Iterable[float]]) -> Matrix:
    """Plain numbers, as a profile has them."""
    return tuple(tuple(float(value) for value in row) for row in table)


def _checksum(data: dict[str, Any]) -> str:
    rest = {name: value for name, value in data.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _layout(data: dict[str, Any]) -> str:
    """JSON with a line for each row of a table, which people and version control can read."""
    text = json.dumps(data, indent=1)
    # No text holds a line break, so what is joined are rows only.
    return re.sub(r"\[\n[\d\s.,eE+-]*\]", lambda row: "[" + " ".join(row[0][1:-1].split()) + "]", text) + "\n"


def _calibration_to_dict(known: Calibration) -> dict[str, Any]:
    origin = {} if known.queries_from is None else {"queries_from": asdict(known.queries_from)}
    return {
        "model": known.model.to_dict(),
        "settings": known.settings,
        "samples": known.samples,
        "samples_hash": known.samples_hash,
        "created": known.created,
        "tool": known.tool,
        "min": known.least,
        "max": known.most,
        "needs": known.needs,
        "others": [
            {
                "retention": other.retention,
                "mean": other.mean,
                "std": other.std,
                "min": other.least,
                "max": other.most,
                "needs": other.needs,
            }
            for other in known.others
        ],
        "key_needs": known.key_needs and asdict(known.key_needs),
        "mean_queries": known.mean_queries,
    } | origin


def _calibration(data: Any, mean: Matrix, std: Matrix, path: str | Path) -> Calibration:
    def damaged(what: str) -> ProfileError:
        return ProfileError(f"profile {path} is damaged: {what}")

    if not isinstance(data, dict):
        raise damaged("'calibration' must be an object")
    try:
        model = ModelIdentity.from_dict(data.get("model"))
    except ValueError as error:
        raise damaged(str(error)) from None
    settings = data.get("settings")
    if not isinstance(settings, dict) or any(
        isinstance(settings.get(name), bool) or not isinstance(settings.get(name), kinds)
        for name, kinds in SETTINGS.items()
    ):
        raise damaged("'settings' must have " + ", ".join(SETTINGS))
    for name in ("samples_hash", "created", "tool"):
        if not isinstance(data.get(name), str):
            raise damaged(f"{name!r} must be a text")
    size = (model.layers, model.kv_heads)
    count = data.get("samples")
    for name, table in (("mean", mean), ("std", std)):
        _check_size(table, name, size, path)
    every = _tables(data.get("needs"), "needs", size, count, path)
    return Calibration(
        model=model,
        settings=settings,
        samples=len(every),
        samples_hash=data["samples_hash"],
        created=data["created"],
        tool=data["tool"],
        least=_sized(data.get("min"), "min", size, path),
        most=_sized(data.get("max"), "max", size, path),
        needs=every,
        others=_others(data.get("others", []), size, len(every), path),
        key_needs=_key_needs(data.get("key_needs"), size, len(every), path),
        mean_queries=_mean_queries(data.get("mean_queries"), (*size, model.head_size), path),
        queries_from=_queries_from(data.get("queries_from"), path),
    )


def _others(value: Any, size: tuple[int, int], count: int, path: str | Path) -> tuple[Target, ...]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ProfileError(f"profile {path} is damaged: 'others' must be a list of objects")
    return tuple(
        Target(
            retention=_share(one.get("retention"), "retention", path),
            mean=_sized(one.get("mean"), "mean", size, path),
            std=_sized(one.get("std"), "std", size, path),
            least=_sized(one.get("min"), "min", size, path),
            most=_sized(one.get("max"), "max", size, path),
            needs=_tables(one.get("needs"), "needs", size, count, path),
        )
        for one in value
    )


def _key_needs(value: Any, size: tuple[int, int], count: int, path: str | Path) -> KeyNeeds | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("scorer"), str):
        raise ProfileError(f"profile {path} is damaged: 'key_needs' must be an object with a 'scorer'")
    needs = _tables(value.get("needs"), "key_needs", size, count, path)
    return KeyNeeds(value["scorer"], _share(value.get("share"), "share", path), needs)


def _mean_queries(value: Any, size: tuple[int, int, int], path: str | Path) -> tuple[Matrix, ...] | None:
    if value is None:
        return None
    layers, heads, width = size
    rows = [row for layer in value for row in layer] if _nested(value, layers, heads) else []
    if not rows or not all(_nested(row, width) and all(map(_is_float32, row)) for row in rows):
        raise ProfileError(
            f"profile {path} is damaged: 'mean_queries' must be numbers (float32) of {layers} layers x "
            f"{heads} KV heads x {width}"
        )
    return tuple(as_matrix(layer) for layer in value)


def _queries_from(value: Any, path: str | Path) -> QueryOrigin | None:
    if value is None:
        return None
    kinds = {
        name: int if field.type == "int" else str for name, field in QueryOrigin.__dataclass_fields__.items()
    }
    if not isinstance(value, dict) or any(type(value.get(name)) is not kind for name, kind in kinds.items()):
        raise ProfileError(f"profile {path} is damaged: 'queries_from' must have {', '.join(kinds)}")
    return QueryOrigin(**{name: value[name] for name in kinds})


def _nested(value: Any, count: int, each: int | None = None) -> bool:
    """Whether it is a list of so many, each of them a list of so many."""
    if not isinstance(value, list) or len(value) != count:
        return False
    return each is None or all(_nested(one, each) for one in value)


def _is_number(value: Any) -> bool:
    """Whether a float can hold it; JSON knows larger numbers, and those that are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_float32(value: Any) -> bool:
    return _is_number(value) and abs(value) <= FLOAT32_MAX


def _tables(value: Any, name: str, size: tuple[int, int], count: Any, path: str | Path) -> tuple[Matrix, ...]:
    """A table for each sample."""
    if not isinstance(value, list) or not value or len(value) != count:
        raise ProfileError(f"profile {path} is damaged: {name!r} must have a table for each of its 'samples'")
    return tuple(_sized(table, name, size, path) for table in value)


def _sized(value: Any, name: str, size: tuple[int, int], path: str | Path) -> Matrix:
    table = _matrix(value, name, path)
    _check_size(table, name, size, path)
    return table


def _check_size(table: Matrix, name: str, size: tuple[int, int], path: str | Path) -> None:
    if len(table) != size[0] or any(len(row) != size[1] for row in table):
        raise ProfileError(
            f"profile {path} is damaged: {name!r} must be {size[0]} layers x {size[1]} KV heads"
        )


def _share(value: Any, name: str, path: str | Path) -> float:
    if not _is_number(value) or not 0.0 < value < 1.0:
        raise ProfileError(f"profile {path} is damaged: {name!r} must be above 0 and below 1")
    return float(value)


def _matrix(value: Any, name: str, path: str | Path) -> Matrix:
    if not isinstance(value, list) or not value or not all(isinstance(row, list) and row for row in value):
        raise ProfileError(f"profile {path} is damaged: {name!r} must be a list of lists of numbers")
    for row in value:
        for number in row:
            if not _is_number(number) or not 0.0 <= number <= 1.0:
                raise ProfileError(
                    f"profile {path} is damaged: {name!r} has {number!r}, not a share from 0 to 1"
                )
    return as_matrix(value)
