"""Registration of the ragged operators with torch, as ``tangram::ragged_append`` and
``tangram::ragged_attention``.

The operators take tensors and plain integers only, so that a compiled graph can hold them. A device joins
by implementing both for its dispatch key: the CPU with kernels, GPUs with the references for now. Neither
operator returns anything: each writes one of its arguments in place, which the schema declares.
"""

from __future__ import annotations

import torch

from kernels import fallback
from kernels.cpu import dispatch

_GEOMETRY = (
    "Tensor rows, Tensor query_start_loc, Tensor seq_lens, Tensor head_tier, Tensor head_member, "
    "Tensor tier_offset, int page_tokens, int ring_slots, int chunk, int window"
)

library = torch.library.Library("tangram", "FRAGMENT")
library.define(f"ragged_append(Tensor key, Tensor value, Tensor(a!) pool, {_GEOMETRY}) -> ()")
library.define(
    f"ragged_attention(Tensor(a!) out, Tensor query, Tensor pool, {_GEOMETRY}, float scale, "
    "Tensor? sinks=None, float soft_cap=0.0) -> ()",
)
library.impl("ragged_append", dispatch.append, "CPU")
library.impl("ragged_attention", dispatch.attention, "CPU")
library.impl("ragged_append", fallback.append, "CUDA")
library.impl("ragged_attention", fallback.attention, "CUDA")


def prepare(device: torch.device) -> None:
    """Compile and load what the operators need on a device, so that their first call does not wait for it.

    Raises:
        KernelError: ``TANGRAM_KERNELS`` is not understood, or insists on kernels that cannot be built.
    """
    if device.type == "cpu":
        dispatch.native()


def implementation(device: torch.device) -> str:
    """What the operators run on a device: "native" kernels or the plain-torch "reference"."""
    return "native" if device.type == "cpu" and dispatch.native() is not None else "reference"


def _nothing(*_: object) -> None:
    """The fake of both operators: they return nothing and only write in place."""


torch.library.register_fake("tangram::ragged_append", _nothing, lib=library)
torch.library.register_fake("tangram::ragged_attention", _nothing, lib=library)
