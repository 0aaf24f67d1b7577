"""Moments as the app stores and tells them."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Unix milliseconds."""
    return int(time.time() * 1000)
