"""Numbers as people read them."""

from __future__ import annotations

import math
from time import gmtime, strftime, time

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_text(count: float) -> str:
    """``1536`` -> ``1.5 KiB``; three significant figures at most."""
    value = float(count)
    for unit in _UNITS:
        if abs(value) < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    if unit == "B":
        return f"{value:.0f} B"
    return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"


def count_text(count: float) -> str:
    """``12345`` -> ``12,345``."""
    return f"{count:,.0f}"


def percent_text(fraction: float) -> str:
    """``0.5`` -> ``50%``; one decimal below 10%."""
    percent = fraction * 100
    return f"{percent:.1f}%" if 0 < percent < 10 else f"{percent:.0f}%"


def duration_text(seconds: float | None) -> str:
    """``75`` -> ``1 min 15 s``; ``None`` is a dash."""
    if seconds is None:
        return "–"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def ago_text(milliseconds: float | None) -> str:
    """How long ago a time (Unix milliseconds) was; ``None`` is never."""
    if milliseconds is None:
        return "never"
    seconds = time() - milliseconds / 1000
    return "now" if seconds < 60 else f"{duration_text(seconds)} ago"


def time_text(seconds: float, form: str = "%Y-%m-%d %H:%M") -> str:
    """A moment, given in unix seconds, with its time zone: whoever reads it may sit in another one."""
    return strftime(f"{form} UTC", gmtime(seconds))


def latency_text(seconds: float | None) -> str:
    """Milliseconds below one second, seconds above; ``None`` is a dash."""
    if seconds is None:
        return "–"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def times_less_text(full_bytes: float, used_bytes: float) -> str:
    """How many times smaller ``used_bytes`` is, or an empty text when it is not smaller."""
    if used_bytes <= 0 or full_bytes <= used_bytes:
        return ""
    return f"{full_bytes / used_bytes:.1f}× less"


def short_id(identifier: str) -> str:
    """The first eight characters of a long id, without the prefix that all of them share."""
    bare = identifier.removeprefix("cmpl-")
    return bare if len(bare) <= 12 else f"{bare[:8]}…"


def byte_ticks(ceiling: float, most: int = 5) -> list[float]:
    """At most ``most`` + 1 round steps from 0 to just above ``ceiling`` bytes: 0, 64 MiB, 128 MiB, ..."""
    step = 1.0
    while ceiling > step * most:
        step *= 2
    count = max(1, math.ceil(ceiling / step))
    return [step * index for index in range(count + 1)]
