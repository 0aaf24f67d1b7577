"""Load the compiled CPU kernels and call them on tensors."""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from pathlib import Path

import torch

from kernels.cpu import build
from kernels.errors import KernelBuildError, KernelError

_ELEMENTS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

_FAULTS = {
    1: "query_start_loc: the bounds of request {0} decrease or pass the tokens that were given",
    2: "seq_lens: request {0} is shorter than its new tokens",
    3: "seq_lens: the step of request {0} crosses a seal boundary; end the step there",
    4: "rows: the row of request {0} ends before its sealed chunks do",
    5: "rows: request {0} names a page outside the pool",
    6: "head_tier, head_member: head {0} names a tier or member that does not exist",
}
_OUT_OF_MEMORY = 7


# The structures of the headers, whose fields are all 8 bytes wide, packed in the order of their fields there.
# Packing takes half the time of filling a ctypes.Structure, and each layer of a decode step pays it twice.
_STEP = struct.Struct("7P16q")  # tangram::Step, step.h
_FRESH = struct.Struct("2P4q")  # tangram::Fresh, append.h
_HEADS = struct.Struct("3P5q2d")  # tangram::Heads, attention.h


class Native:
    """The functions of one compiled library.

    Raises:
        KernelBuildError: the library cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
            self._append = library.tangram_append
            self._attention = library.tangram_attention
        except (OSError, AttributeError) as error:
            raise KernelBuildError(f"cannot load {path}: {error}") from error
        for function in (self._append, self._attention):
            function.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
            function.restype = ctypes.c_int64

    def append(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        pool: torch.Tensor,
        rows: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        head_tier: torch.Tensor,
        head_member: torch.Tensor,
        tier_offset: torch.Tensor,
        *geometry: int,
    ) -> None:
        """``ragged_append``; ``geometry`` is page tokens, ring slots, chunk and window."""
        tables = (rows, query_start_loc, seq_lens, head_tier, head_member, tier_offset)
        step = _step(key.shape[0], pool, tables, geometry)
        key_stride, value_stride = key.stride(), value.stride()
        fresh = _FRESH.pack(key.data_ptr(), value.data_ptr(), *key_stride[:2], *value_stride[:2])
        _raise_for(self._append(step, fresh))

    def attention(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        pool: torch.Tensor,
        rows: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        head_tier: torch.Tensor,
        head_member: torch.Tensor,
        tier_offset: torch.Tensor,
        page_tokens: int,
        ring_slots: int,
        chunk: int,
        window: int,
        scale: float,
        sinks: torch.Tensor | None = None,
        soft_cap: float = 0.0,
        max_query: int = 0,
        singles: bool = True,
    ) -> None:
        """``ragged_attention``; ``max_query`` and ``singles``, hints, are of no use here."""
        tables = (rows, query_start_loc, seq_lens, head_tier, head_member, tier_offset)
        step = _step(query.shape[0], pool, tables, (page_tokens, ring_slots, chunk, window))
        strides = (*out.stride()[:2], *query.stride()[:2])
        pointers = (out.data_ptr(), query.data_ptr(), 0 if sinks is None else sinks.data_ptr())
        heads = _HEADS.pack(*pointers, *strides, query.shape[1], scale, soft_cap)
        _raise_for(self._attention(step, heads))


@cache
def load() -> Native:
    """The library for this machine, compiled if need be and loaded once.

    Raises:
        KernelBuildError: it cannot be built or loaded.
    """
    return Native(build.library())


def _step(
    tokens: int, pool: torch.Tensor, tables: tuple[torch.Tensor, ...], geometry: tuple[int, ...]
) -> bytes:
    rows, query_start_loc, seq_lens, head_tier, head_member, tier_offset = tables
    pages, members, _, both = pool.shape
    requests, width = rows.shape
    return _STEP.pack(
        rows.data_ptr(),
        query_start_loc.data_ptr(),
        seq_lens.data_ptr(),
        head_tier.data_ptr(),
        head_member.data_ptr(),
        tier_offset.data_ptr(),
        pool.data_ptr(),
        *(rows.stride(0), width, requests, tokens, head_tier.shape[0], tier_offset.shape[0] - 1),
        *(pages, pool.stride(0), members, both // 2),
        *geometry,
        *(_ELEMENTS[pool.dtype], torch.get_num_threads()),
    )


def _raise_for(result: int) -> None:
    if result == 0:
        return
    kind, index = result & 0xFF, result >> 8
    if kind == _OUT_OF_MEMORY:
        raise MemoryError("ragged attention: no memory for its workspace")
    if kind in _FAULTS:
        raise ValueError(_FAULTS[kind].format(index))
    raise KernelError(f"the native kernels returned the unknown fault {result}")
