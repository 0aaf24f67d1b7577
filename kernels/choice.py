"""Which implementation of the operators the environment asks for."""

from __future__ import annotations

import os

from kernels.errors import KernelConfigError

CHOICES = ("auto", "native", "reference")


def implementation() -> str:
    """``TANGRAM_KERNELS``: ``auto`` where it is not set.

    Raises:
        KernelConfigError: it is none of ``CHOICES``.
    """
    choice = os.environ.get("TANGRAM_KERNELS", "auto").strip().lower() or "auto"
    if choice not in CHOICES:
        raise KernelConfigError(f"TANGRAM_KERNELS: {choice!r} is not one of {', '.join(CHOICES)}")
    return choice
