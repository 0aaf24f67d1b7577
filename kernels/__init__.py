"""Kernels of ragged paging and their plain-torch references.

``kernels.layout`` says where a token lies, ``kernels.ragged`` holds the public operators. Set
``TANGRAM_KERNELS`` to ``native`` or ``reference`` to insist on one implementation; ``auto`` (the default)
takes native where it can be built.
"""

from __future__ import annotations

from kernels.errors import KernelBuildError, KernelConfigError, KernelError
from kernels.layout import RaggedLayout
from kernels.ops import implementation, prepare
from kernels.ragged import ragged_append, ragged_append_attention, ragged_attention, ragged_gather
from kernels.sealing import ragged_seal

__all__ = [
    "KernelBuildError",
    "KernelConfigError",
    "KernelError",
    "RaggedLayout",
    "implementation",
    "prepare",
    "ragged_append",
    "ragged_append_attention",
    "ragged_attention",
    "ragged_gather",
    "ragged_seal",
]
