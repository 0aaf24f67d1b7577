"""What callers of the engine's routes may ask for, checked. Refusals are ConfigErrors that name the field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from tangram.config import TangramConfig, printable
from tangram.errors import ConfigError

TUNABLE = ("retention", "group_size", "alpha", "scope")
MOST_LENGTHS, LONGEST = 32, 1 << 30
EVICTABLE = '{"sequence": ID}, {"idle_seconds": SECONDS} or {"all": true}'


async def body(request: Request) -> dict[str, Any]:
    """The JSON object that was sent."""
    try:
        sent = await request.json()
    except (ValueError, RecursionError):
        sent = None
    if not isinstance(sent, dict):
        raise ConfigError("body", 'must be a JSON object such as {"retention": 0.25}')
    return sent


def preview(sent: dict[str, Any], running: TangramConfig) -> tuple[TangramConfig, Sequence[int] | None]:
    """The configuration to look at, the running one with changes, and the lengths to work out, None where no
    lengths were named."""
    changes = dict(sent)
    named = "lengths" in changes
    lengths = changes.pop("lengths", None)
    for name in changes:
        if name not in TUNABLE:
            known = ", ".join((*TUNABLE, "lengths"))
            raise ConfigError(printable(name), f"cannot be previewed; there are: {known}")
    if named and not _lengths(lengths):
        raise ConfigError(
            "lengths", f"must be a list of 1 to {MOST_LENGTHS} whole numbers of tokens, each 1 to {LONGEST}"
        )
    return TangramConfig.from_mapping(running.to_dict() | changes), lengths


def evict(sent: dict[str, Any]) -> dict[str, Any]:
    """Which idle conversations to drop: exactly one of ``sequence``, ``idle_seconds`` and ``all``."""
    if len(sent) != 1 or not sent.keys() <= {"sequence", "idle_seconds", "all"}:
        raise ConfigError("body", f"must be one of {EVICTABLE}")
    ((name, value),) = sent.items()
    if name == "sequence" and not (isinstance(value, str) and value):
        raise ConfigError(name, "must be the id of a conversation as GET /tangram/memory lists them")
    if name == "idle_seconds" and not _seconds(value):
        raise ConfigError(name, f"must be a number of seconds of at least 0, not {printable(repr(value))}")
    if name == "all" and value is not True:
        raise ConfigError(name, f"must be true: to drop less, send {EVICTABLE}")
    return sent


def pin(sent: dict[str, Any]) -> dict[str, Any]:
    """Which conversation to keep or to let go: ``sequence`` and ``pinned``."""
    if sent.keys() != {"sequence", "pinned"}:
        raise ConfigError("body", 'must be {"sequence": ID, "pinned": true} or with false')
    if not (isinstance(sent["sequence"], str) and sent["sequence"]):
        raise ConfigError("sequence", "must be the id of a conversation as GET /tangram/memory lists them")
    if not isinstance(sent["pinned"], bool):
        raise ConfigError("pinned", "must be true or false")
    return sent


def _lengths(value: Any) -> bool:
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_LENGTHS:
        return False
    return all(type(n) is int and 1 <= n <= LONGEST for n in value)


def _seconds(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value >= 0 and math.isfinite(value)
