"""Which implementation of the operators the environment asks for."""

from __future__ import annotations

import os

from kernels.errors import KernelConfigError

CHOICES = ("auto", "native", "reference")
DECODE_LAUNCHES = ("separate", "fused", "dependent", "early")
DECODE_LAUNCH = "dependent"
"""Where ``TANGRAM_DECODE_LAUNCH`` is not set."""


def implementation() -> str:
    """``TANGRAM_KERNELS``: ``auto`` where it is not set.

    Raises:
        KernelConfigError: it is none of ``CHOICES``.
    """
    choice = os.environ.get("TANGRAM_KERNELS", "auto").strip().lower() or "auto"
    if choice not in CHOICES:
        raise KernelConfigError(f"TANGRAM_KERNELS: {choice!r} is not one of {', '.join(CHOICES)}")
    return choice


def decode_launch() -> str:
    """``TANGRAM_DECODE_LAUNCH``: how a GPU decodes, one new token a request. Each adds to the one before:

    - ``separate``: one launch writes the new keys and values, another one attends;
    - ``fused``: one launch does both;
    - ``dependent``: it begins while the launch before it is ending, and waits for that first (from sm_90 on);
    - ``early``: before it waits it reads the step's tables, which the launch before must not have written.

    Raises:
        KernelConfigError: it is none of ``DECODE_LAUNCHES``.
    """
    choice = os.environ.get("TANGRAM_DECODE_LAUNCH", "").strip().lower() or DECODE_LAUNCH
    if choice not in DECODE_LAUNCHES:
        raise KernelConfigError(
            f"TANGRAM_DECODE_LAUNCH: {choice!r} is not one of {', '.join(DECODE_LAUNCHES)}"
        )
    return choice
