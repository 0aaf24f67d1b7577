"""The structures that the kernels take, as bytes: field by field in the order of the headers."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

_STEP = struct.Struct("7P3q10i")  # tangram::Step, step.cuh
_FRESH = struct.Struct("2P4q2i")  # tangram::Fresh, append.cuh
_ATTEND = struct.Struct("7P4q4i2f")  # tangram::Attend, attend.cuh
_LAUNCH = struct.Struct("2i")  # behind both in AppendAttend, binding.cu
_WIDE = struct.Struct("10P8q8i")  # tangram::Wide, wide.cuh
_SEAL = struct.Struct("6P3i4x")  # tangram::Seal, seal.cuh

_POINTER = struct.calcsize("P")
STEP_HEADS = 3 * _POINTER
"""Where ``Step`` has ``head_tier`` and ``head_member``, in bytes."""
ATTEND_OUT = 0
"""Where ``Attend`` has ``out`` and ``query``."""
FRESH_NEW = 0
"""Where ``Fresh`` has ``key`` and ``value``."""
DECODE_NEW = _ATTEND.size + FRESH_NEW
"""Where these are in what decoding takes, in which ``Fresh`` lies behind ``Attend``."""
WIDE_QUERY = 3 * _POINTER
"""Where ``Wide`` has ``query``, ``key`` and ``value``."""
SEAL_ASKED = 5 * _POINTER
"""Where ``Seal`` has ``asked``."""

Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

# What the registered operators take after the pool, from ``rows`` to ``window``.
Step = tuple[*Tables, int, int, int, int]

# Scale, sinks and soft cap of the scores.
Scoring = tuple[float, torch.Tensor | None, float]


def attend_bytes(
    out: torch.Tensor,
    query: torch.Tensor,
    workspace: Sequence[torch.Tensor],
    scoring: Scoring,
    hints: tuple[int, bool],
    tables_first: bool = False,
) -> bytes:
    """``tangram::Attend``; ``workspace``: of ``Native``, ``hints``: ``max_query`` and ``singles``."""
    scale, sinks, soft_cap = scoring
    pointers = (tensor.data_ptr() for tensor in workspace)
    strides = (*out.stride()[:2], *query.stride()[:2])
    first = (out.data_ptr(), query.data_ptr(), address(sinks))
    return _ATTEND.pack(*first, *pointers, *strides, query.shape[1], *hints, tables_first, scale, soft_cap)


def decode_bytes(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    workspace: Sequence[torch.Tensor],
    scoring: Scoring,
    launch: str,
) -> bytes:
    """``AppendAttend``, as ``Native.decode`` takes it."""
    attend = attend_bytes(out, query, workspace, scoring, (1, True), launch == "early")
    return attend + fresh_bytes(key, value) + _LAUNCH.pack(launch != "fused", 0)


def unpack_step_bytes(tokens: int, kv_heads: int) -> bytes:
    """``tangram::Step`` with what unpacking reads of it."""
    return _STEP.pack(*(0,) * 10, *(0, 0, tokens, kv_heads, 0, 0), *(0, 0, 0, 0))


def address(tensor: torch.Tensor | None) -> int:
    """0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def fresh_bytes(key: torch.Tensor, value: torch.Tensor) -> bytes:
    """``tangram::Fresh``."""
    strides = (*key.stride()[:2], *value.stride()[:2])
    return _FRESH.pack(key.data_ptr(), value.data_ptr(), *strides, key.shape[2], key.element_size())


def seal_bytes(
    due: torch.Tensor,
    tier_heads: torch.Tensor,
    scores: torch.Tensor | None,
    staged: torch.Tensor | None,
    origin: torch.Tensor | None,
    sink: int,
    values: bool,
    asked: torch.Tensor | None,
) -> bytes:
    """``tangram::Seal``."""
    pointers = (address(tensor) for tensor in (due, tier_heads, scores, staged, origin, asked))
    return _SEAL.pack(*pointers, due.shape[0], sink, values)


def stage_bytes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    places: tuple[int, int],
    most: tuple[int, int, int],
) -> bytes:
    """``tangram::Wide`` as ``Native.stage`` takes it."""
    requests, segments, _ = plan
    _, packed, table, _ = buffers
    pointers = (tensor.data_ptr() for tensor in (*plan, query, key, value, *buffers))
    strides = (stride for tensor in (query, key, value) for stride in tensor.stride()[:2])
    counts = (requests.shape[0], segments.shape[0], packed.shape[1], table.shape[1])
    return _WIDE.pack(*pointers, *strides, *places, *counts, *most, 0)


def unpack_bytes(
    out: torch.Tensor, packed: torch.Tensor, segments: torch.Tensor, starts: torch.Tensor, most_tokens: int
) -> bytes:
    """``tangram::Wide`` as ``Native.unpack`` takes it."""
    pointers = (0, segments.data_ptr(), starts.data_ptr(), out.data_ptr(), 0, 0, 0, packed.data_ptr(), 0, 0)
    strides = (*out.stride()[:2], 0, 0, 0, 0)
    counts = (1, segments.shape[0], packed.shape[1], 0)
    return _WIDE.pack(*pointers, *strides, 1, 0, *counts, 0, 0, most_tokens, 0)


def step_bytes(tokens: int, pool: torch.Tensor, step: Step) -> bytes:
    """``tangram::Step`` of a batch."""
    rows, query_start_loc, seq_lens, head_tier, head_member, tier_offset, *geometry = step
    pointers = (
        query_start_loc.data_ptr(),
        seq_lens.data_ptr(),
        head_tier.data_ptr(),
        head_member.data_ptr(),
    )
    return pack_step(pool, rows, pointers, tier_offset, tokens, head_tier.shape[0], geometry)


def pack_step(
    pool: torch.Tensor,
    rows: torch.Tensor,
    pointers: tuple[int, int, int, int],
    tier_offset: torch.Tensor,
    tokens: int,
    heads: int,
    geometry: Sequence[int],
) -> bytes:
    """``tangram::Step``; ``pointers``: from ``query_start_loc`` to ``head_member``."""
    requests, width = rows.shape
    pages, members, _, _ = pool.shape
    return _STEP.pack(
        rows.data_ptr(),
        *pointers,
        tier_offset.data_ptr(),
        pool.data_ptr(),
        *(rows.stride(0), pool.stride(0), pages),
        *(width, requests, tokens, heads, tier_offset.shape[0] - 1, members),
        *geometry,
    )
