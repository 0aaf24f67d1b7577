"""The CPU side of the registered operators: the native library where it can be built, else the reference."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch

from kernels import fallback
from kernels.choice import implementation
from kernels.cpu.native import Native, load
from kernels.errors import KernelBuildError

logger = logging.getLogger(__name__)


@cache
def native() -> Native | None:
    """The native kernels, or None where ``TANGRAM_KERNELS`` or a missing compiler leaves the reference.

    Raises:
        KernelConfigError: ``TANGRAM_KERNELS`` is not understood.
        KernelBuildError: it is ``native`` and the library cannot be built.
    """
    choice = implementation()
    if choice == "reference":
        return None
    try:
        return load()
    except KernelBuildError as error:
        if choice == "native":
            raise
        logger.warning("native kernels are unavailable, attention will be slow: %s", error)
        return None


def append(key: torch.Tensor, *rest: Any) -> None:
    """``tangram::ragged_append`` on the CPU; the arguments are those of ``kernels.fallback``."""
    library = native()
    run = fallback.append if library is None else library.append
    run(key, *rest)


def attention(out: torch.Tensor, *rest: Any) -> None:
    """``tangram::ragged_attention`` on the CPU; the arguments are those of ``kernels.fallback``."""
    library = native()
    run = fallback.attention if library is None else library.attention
    run(out, *rest)


def append_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pool: torch.Tensor,
    *rest: Any,
) -> None:
    """``tangram::ragged_append_attention`` on the CPU; the arguments are those of its schema."""
    append(key, value, pool, *rest[:10])
    attention(out, query, pool, *rest)
