"""Registration of the ragged operators with torch: ``tangram::ragged_append``, ``ragged_attention``, both in
one as ``ragged_append_attention``, ``ragged_seal``, ``ragged_stage`` and ``ragged_unpack``.

The operators take tensors and plain integers only, so that a compiled graph can hold them. A device joins
by implementing them for its dispatch key. No operator returns anything: each writes arguments in place, which
the schema declares.
"""

from __future__ import annotations

import torch

from kernels import fallback
from kernels.cpu import dispatch
from kernels.cuda import dispatch as cuda

_GEOMETRY = (
    "Tensor rows, Tensor query_start_loc, Tensor seq_lens, Tensor head_tier, Tensor head_member, "
    "Tensor tier_offset, int page_tokens, int ring_slots, int chunk, int window"
)
_SCORING = "float scale, Tensor? sinks=None, float soft_cap=0.0, int max_query=0, bool singles=True"

library = torch.library.Library("tangram", "FRAGMENT")
library.define(f"ragged_append(Tensor key, Tensor value, Tensor(a!) pool, {_GEOMETRY}) -> ()")
library.define(f"ragged_attention(Tensor(a!) out, Tensor query, Tensor pool, {_GEOMETRY}, {_SCORING}) -> ()")
library.define(
    "ragged_append_attention(Tensor(a!) out, Tensor query, Tensor key, Tensor value, Tensor(b!) pool, "
    f"{_GEOMETRY}, {_SCORING}) -> ()"
)
library.define(
    "ragged_seal(Tensor(a!) pool, Tensor rows, Tensor due, Tensor tier_offset, Tensor tier_heads, "
    "int page_tokens, int ring_slots, int chunk, int window, int sink, Tensor? scores=None, "
    "Tensor? head_tier=None, Tensor? head_member=None, Tensor? staged=None, Tensor? origin=None, "
    "bool values=False, Tensor? asked=None) -> ()"
)
library.define(
    "ragged_stage(Tensor query, Tensor key, Tensor value, Tensor(a!) pool, Tensor rows, Tensor head_tier, "
    "Tensor head_member, Tensor tier_offset, int page_tokens, int ring_slots, int chunk, int window, "
    "Tensor requests, Tensor segments, Tensor starts, Tensor(b!) staged, Tensor(c!) packed, "
    "Tensor(d!) table, Tensor(e!) used, int unit, int staged_at, int most_tail, int most_new, "
    "int most_tokens) -> ()"
)
library.define(
    "ragged_unpack(Tensor(a!) out, Tensor packed, Tensor segments, Tensor starts, int kv_heads, "
    "int most_tokens) -> ()"
)
library.impl("ragged_append", dispatch.append, "CPU")
library.impl("ragged_attention", dispatch.attention, "CPU")
library.impl("ragged_append_attention", dispatch.append_attention, "CPU")
library.impl("ragged_seal", fallback.seal, "CPU")
library.impl("ragged_stage", fallback.stage, "CPU")
library.impl("ragged_unpack", fallback.unpack, "CPU")
library.impl("ragged_append", cuda.append, "CUDA")
library.impl("ragged_attention", cuda.attention, "CUDA")
library.impl("ragged_append_attention", cuda.append_attention, "CUDA")
library.impl("ragged_seal", cuda.seal, "CUDA")
library.impl("ragged_stage", cuda.stage, "CUDA")
library.impl("ragged_unpack", cuda.unpack, "CUDA")


def prepare(device: torch.device, dtype: torch.dtype | None = None, head_size: int = 0) -> None:
    """Compile and load what the operators need on a device, so that their first call does not wait for it.

    On a GPU that depends on the pool's element type and the head size; without them nothing is prepared.

    Raises:
        KernelError: ``TANGRAM_KERNELS`` is not understood, or insists on kernels that cannot be built.
    """
    if device.type == "cpu":
        dispatch.native()
    elif device.type == "cuda" and dtype is not None:
        cuda.prepare(device, dtype, head_size)


def implementation(device: torch.device, dtype: torch.dtype | None = None, head_size: int = 0) -> str:
    """What the operators run on a device: "native" kernels or the plain-torch "reference". On a GPU that
    depends on the pool's element type and the head size."""
    if device.type == "cuda" and dtype is not None:
        return "reference" if cuda.native(device, dtype, head_size) is None else "native"
    return "native" if device.type == "cpu" and dispatch.native() is not None else "reference"


def _nothing(*_: object) -> None:
    """The fake of all operators: they return nothing and only write in place."""


for _name in ("append", "attention", "append_attention", "seal", "stage", "unpack"):
    torch.library.register_fake(f"tangram::ragged_{_name}", _nothing, lib=library)
