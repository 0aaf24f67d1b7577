"""The errors this package raises beyond ``ValueError`` and ``TypeError`` for bad arguments."""

from __future__ import annotations


class KernelError(Exception):
    """Base of the package's own errors."""


class KernelBuildError(KernelError):
    """The native library cannot be compiled or loaded; the message names the command and its output."""


class KernelConfigError(KernelError):
    """An environment variable that selects kernels has a value that does not exist."""
